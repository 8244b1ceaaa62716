"""One connection: answers of every kind, and peers that do not keep to HTTP."""

import asyncio

import pytest

from rollmesh.core.errors import EngineUnavailable
from rollmesh.engine.connection import MAX_MUTE_BYTES
from rollmesh.engine.http import HttpClient, target
from rollmesh.engine.parser import Headers
from tests.unit.engine.http_peer import (
    CHUNKED,
    OK,
    PATIENCE_S,
    Ear,
    Wire,
    get,
    saying,
    serving,
)


async def test_connection_is_used_again_after_each_kind_of_answer(client: HttpClient) -> None:
    answers = [
        OK,
        CHUNKED + b"2\r\nok\r\n0\r\n\r\n",
        b"HTTP/1.1 204 No Content\r\n\r\n",
        b"HTTP/1.1 100 Continue\r\nX: y\r\n\r\n" + OK,
        b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n",
    ]

    async def script(wire: Wire) -> None:
        for answer in answers:
            await wire.read()
            await wire.answer(answer)
        await wire.gone()

    async with serving(script) as server:
        heard = [await get(client, server.url) for _ in answers]
        assert server.num_connections == 1
    assert [(each.status, each.body) for each in heard] == [
        (200, b"ok"),
        (200, b"ok"),
        (204, b""),
        (200, b"ok"),
        (404, b""),
    ]
    assert heard[3].headers == [(b"Content-Length", b"2")]


async def test_chunks_of_one_read_are_told_as_one_piece(client: HttpClient) -> None:
    go_on = asyncio.Event()

    async def script(wire: Wire) -> None:
        await wire.read()
        await wire.answer(CHUNKED + b"1\r\na\r\n2;x=y\r\nbc\r\n")
        await go_on.wait()
        await wire.answer(b"1\r\nd\r\n0\r\nTrailer: t\r\n\r\n")
        await wire.gone()

    ear = Ear()
    async with serving(script) as server:
        client.send(target("GET", server.url), (), ear)
        await ear.until(lambda: ear.data)
        assert (ear.data, ear.ends) == ([b"abc"], [])
        go_on.set()
        await ear.until(lambda: ear.ends)
    assert ear.data == [b"abc", b"d"]
    assert ear.headers == [(b"Transfer-Encoding", b"chunked")]


async def test_answer_to_head_has_no_body_whatever_its_length_says(client: HttpClient) -> None:
    async with serving(saying(b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n")) as server:
        response = await get(client, server.url, "HEAD")
    assert (response.status, response.body) == (200, b"")
    assert response.headers == [(b"Content-Length", b"99")]


async def test_answer_without_a_length_ends_with_its_connection(client: HttpClient) -> None:
    async with serving(saying(b"HTTP/1.1 200 OK\r\n\r\nall ", b"there is")) as server:
        assert (await get(client, server.url)).body == b"all there is"


async def test_connection_that_the_server_will_close_is_not_used_again(client: HttpClient) -> None:
    async def script(wire: Wire) -> None:
        await wire.read()
        await wire.answer(b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\nok")
        await wire.gone()

    async with serving(script) as server:
        for _ in range(2):
            assert (await get(client, server.url)).body == b"ok"
        assert server.num_connections == 2


async def test_request_is_not_sent_again_once_a_byte_of_an_answer_came(client: HttpClient) -> None:
    async def script(wire: Wire) -> None:
        await wire.read()
        await wire.answer(OK)
        await wire.read()
        await wire.answer(b"HTTP")

    async with serving(script) as server:
        await get(client, server.url)
        with pytest.raises(EngineUnavailable, match="before the answer's end"):
            await get(client, server.url)
        assert server.num_connections == 1


async def test_receiver_that_pauses_makes_the_peer_wait(client: HttpClient) -> None:
    piece = bytes(2**20)
    is_stuck = asyncio.Event()
    num_written = 0

    async def script(wire: Wire) -> None:
        nonlocal num_written
        await wire.read()
        wire.writer.transport.set_write_buffer_limits(0)
        wire.writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % (64 * len(piece)))
        for _ in range(64):
            wire.writer.write(piece)
            if wire.writer.transport.get_write_buffer_size():
                is_stuck.set()
            await wire.writer.drain()
            num_written += 1

    class Slow(Ear):
        def on_data(self, data: bytes) -> None:
            super().on_data(data)
            if len(self.data) == 1:
                call.pause()

    ear = Slow()
    async with serving(script) as server:
        call = client.send(target("GET", server.url), (), ear)
        await ear.until(lambda: ear.data)
        async with asyncio.timeout(PATIENCE_S):
            await is_stuck.wait()
        for _ in range(100):
            await asyncio.sleep(0)
        assert len(ear.data) == 1
        assert num_written < 64
        call.resume()
        await ear.until(lambda: ear.ends)
    assert sum(map(len, ear.data)) == 64 * len(piece)


async def test_call_may_be_closed_by_the_answers_first_line(client: HttpClient) -> None:
    class Curt(Ear):
        def on_head(self, status: int, headers: Headers) -> None:
            super().on_head(status, headers)
            call.close()

    ear = Curt()
    async with serving(saying(OK)) as server:
        call = client.send(target("GET", server.url), (), ear)
        await ear.until(lambda: ear.status)
        await get(client, server.url)
    assert (ear.data, ear.ends) == ([], [])


@pytest.mark.parametrize(
    ("pieces", "told"),
    [
        ([b"this is no HTTP\r\n\r\n"], "no HTTP"),
        ([b"\x16\x03\x01\x02\x00"], "no HTTP"),
        ([b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n"], "no HTTP"),
        ([b"HTTP/1.1 200 OK\r\nContent-Length: -5\r\n\r\n"], "no HTTP"),
        ([b"HTTP/1.1 101 Switching\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n"], "protocol"),
        ([CHUNKED, b"zz\r\nnonsense\r\n"], "no HTTP"),
        ([b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n", b"abc"], "before the answer's end"),
        ([CHUNKED, b"5\r\nab"], "before the answer's end"),
        ([CHUNKED, b"2\r\nab\r\n"], "before the answer's end"),
        ([b"HTTP/1.1 200 OK\r\nX-A"], "before the answer's end"),
        ([b""], "before the answer's end"),
    ],
)
async def test_broken_answer_is_one_error_that_names_the_peer(
    client: HttpClient, pieces: list[bytes], told: str
) -> None:
    ear = Ear()
    async with serving(saying(*pieces)) as server:
        client.send(target("GET", server.url), (), ear)
        await ear.until(lambda: ear.ends)
    [error] = ear.ends
    assert told in str(error)
    assert server.url in str(error)


@pytest.mark.parametrize(
    "begin",
    [
        b"HTTP/1.1 200 OK\r\nX: ",
        CHUNKED + b"1;",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nX: ",
        b"HTTP/1.1 100 Continue\r\nX: ",
    ],
)
async def test_peer_that_sends_headers_without_end_is_cut_off(
    client: HttpClient, begin: bytes
) -> None:
    num_sent = 0

    async def script(wire: Wire) -> None:
        nonlocal num_sent
        await wire.read()
        await wire.answer(begin)
        while True:
            await wire.answer(b"a" * 2**14)
            num_sent += 2**14

    async with serving(script) as server:
        with pytest.raises(EngineUnavailable, match="without end"):
            await get(client, server.url)
    assert num_sent < 2**26
    assert MAX_MUTE_BYTES < 2**20


@pytest.mark.parametrize("more", [OK, b"garbage", b"\r\nHTTP/1.1 500 No\r\n\r\n"])
async def test_answer_with_more_behind_it_counts_but_its_connection_does_not(
    client: HttpClient, more: bytes
) -> None:
    async def script(wire: Wire) -> None:
        await wire.read()
        await wire.answer(OK + more)
        await wire.gone()

    async with serving(script) as server:
        for _ in range(2):
            assert (await get(client, server.url)).body == b"ok"
        assert server.num_connections == 2


async def test_bytes_that_nobody_asked_for_end_an_idle_connection(client: HttpClient) -> None:
    is_idle = asyncio.Event()
    gone = asyncio.Event()

    async def script(wire: Wire) -> None:
        await wire.read()
        await wire.answer(OK)
        await is_idle.wait()
        await wire.answer(OK)
        await wire.gone()
        gone.set()

    async with serving(script) as server:
        await get(client, server.url)
        is_idle.set()
        await asyncio.wait_for(gone.wait(), PATIENCE_S)
        assert (await get(client, server.url)).body == b"ok"
        assert server.num_connections == 2


async def test_half_closed_answer_is_an_error(client: HttpClient) -> None:
    async def script(wire: Wire) -> None:
        await wire.read()
        await wire.answer(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nab")
        wire.writer.write_eof()
        await wire.gone()

    async with serving(script) as server:
        with pytest.raises(EngineUnavailable, match="before the answer's end"):
            await get(client, server.url)


async def test_server_may_answer_before_it_has_read_the_request(client: HttpClient) -> None:
    async def script(wire: Wire) -> None:
        await wire.answer(
            b"HTTP/1.1 413 Too Large\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"
        )
        await wire.gone()

    async with serving(script) as server:
        to = target("POST", server.url)
        response = await client.fetch(to, [bytes(2**24)], timeout_s=PATIENCE_S)
    assert response.status == 413
