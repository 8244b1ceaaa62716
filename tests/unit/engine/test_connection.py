"""HTTP connections: request bodies in pieces, the response parser, and broken peers."""

import asyncio
from collections.abc import Callable

import psutil
import pytest
import uvloop

from rollmesh.core.errors import EngineUnavailable, RequestLost
from rollmesh.engine.connection import (
    MAX_OVERHEAD_BYTES,
    PART_BYTES,
    AnswerParser,
    Headers,
    HttpCall,
    Piece,
)
from rollmesh.engine.http import HttpClient, target
from rollmesh.runtime.blobs import Blob, BlobStore
from tests.unit.engine.http_peer import (
    CHUNKED,
    OK,
    PATIENCE_S,
    ResponseRecorder,
    Unread,
    Wire,
    answering,
    get,
    serving,
)

WHOLE = (
    b"HTTP/1.1 100 Continue\r\nX: y\r\n\r\n"
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n"
)


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_an_answer_is_the_same_however_it_is_cut(size: int) -> None:
    parser, body = AnswerParser(), b""
    for at in range(0, len(WHOLE), size):
        assert parser.feed(WHOLE[at : at + size]) == ""
        body += parser.take()
    assert (parser.status, body, parser.is_whole, parser.keeps_alive) == (200, b"abcde", True, True)
    assert parser.headers == [(b"Transfer-Encoding", b"chunked")]
    assert not parser.ends_with_connection
    parser.close()


def test_bytes_behind_an_answer_are_not_part_of_it() -> None:
    parser = AnswerParser()
    assert parser.feed(WHOLE + b"HTTP/1.1 500 No\r\nContent-Length: 1\r\n\r\nx") == ""
    assert (parser.status, parser.take(), parser.is_whole) == (200, b"abcde", True)
    assert not parser.keeps_alive
    parser.close()


def test_a_new_answer_keeps_nothing_of_the_last() -> None:
    parser = AnswerParser()
    parser.feed(WHOLE)
    parser.begin(is_head=True)
    assert (parser.status, parser.headers, parser.take(), parser.has_bytes) == (0, [], b"", False)
    assert parser.feed(b"HTTP/1.1 204 No\r\n\r\n") == ""
    assert (parser.status, parser.is_whole, parser.ends_with_connection) == (204, True, True)
    parser.close()


CONTENT = bytes(range(256)) * (16 * 2**20 // 256)
"""More bytes than sockets buffer while the peer does not read."""


class BlobPiece(Unread):
    """A piece whose bytes are in a blob."""

    def __init__(self, blob: Blob) -> None:
        super().__init__(b"")
        self.num_bytes = blob.num_bytes
        self._blob = blob

    def part(self, start: int, stop: int) -> bytes | memoryview:
        part = self._blob.part(start, stop)
        self.num_read += len(part)
        return part


async def test_bodies_in_pieces_arrive_whole_and_their_connection_is_reused(
    client: HttpClient,
) -> None:
    small, large = Unread(b"small"), Unread(CONTENT[: 3 * PART_BYTES + 1])
    bodies: list[bytes] = []

    async def script(wire: Wire) -> None:
        for _ in range(2):
            bodies.append((await wire.read()).partition(b"\r\n\r\n")[2])
            await wire.answer(OK)
        await wire.gone()

    async with serving(script) as server:
        to = target("POST", server.url)
        sent: list[list[Piece]] = [
            [b"[", small, b",", small, memoryview(b"]")],
            [large, b"x", large],
        ]
        for body in sent:
            assert (await client.fetch(to, body, timeout_s=PATIENCE_S)).body == b"ok"
        assert server.num_connections == 1
    assert bodies[0] == b"[small,small]"
    assert bodies[1] == CONTENT[: 3 * PART_BYTES + 1] + b"x" + CONTENT[: 3 * PART_BYTES + 1]


async def test_no_more_is_read_than_the_peer_takes(client: HttpClient) -> None:
    await _send_to_a_waiting_peer(client)


def test_no_more_is_read_than_the_peer_takes_on_uvloop() -> None:
    async def play() -> None:
        async with HttpClient() as client:
            await _send_to_a_waiting_peer(client)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(play())


async def _send_to_a_waiting_peer(client: HttpClient) -> None:
    may_continue = asyncio.Event()

    async def script(wire: Wire) -> None:
        await may_continue.wait()
        assert (await wire.read()).endswith(CONTENT)
        await wire.answer(OK)

    pieces, recorder = [Unread(CONTENT) for _ in range(4)], ResponseRecorder()
    async with serving(script) as server:
        client.send(target("POST", server.url), pieces, recorder)
        await _standstill(lambda: sum([piece.num_read for piece in pieces]))
        assert 0 < pieces[0].num_read < len(CONTENT)
        assert [piece.num_read for piece in pieces[1:]] == [0, 0, 0]
        may_continue.set()
        await recorder.until(lambda: recorder.ends)
    assert (recorder.status, recorder.ends) == (200, [None])
    assert [piece.num_read for piece in pieces] == [len(CONTENT)] * 4


async def test_waiting_calls_hold_no_copy_of_their_bodies(
    client: HttpClient,
) -> None:
    """Four calls of 20 MB each use less memory than one copy of a body."""
    store, may_continue = BlobStore(), asyncio.Event()
    shots = [store.hold(bytes([n]) * 2**21) for n in range(10)]
    history = [BlobPiece(shot) for shot in shots]
    process = psutil.Process()

    async def script(wire: Wire) -> None:
        await may_continue.wait()

    async with serving(script) as server:
        before = process.memory_info().rss
        to = target("POST", server.url)
        calls = [client.send(to, [b"[", *history, b"]"], ResponseRecorder()) for _ in range(4)]
        await _standstill(lambda: sum([seen.num_read for seen in history]))
        grown = process.memory_info().rss - before
        for call in calls:
            call.close()
        may_continue.set()
    assert grown < 20 * 2**20
    assert [seen.num_read for seen in history[-2:]] == [0, 0]


async def test_a_resent_request_reads_its_pieces_again(client: HttpClient) -> None:
    piece, bodies = Unread(b"image"), list[bytes]()

    async def script(wire: Wire) -> None:
        bodies.append(await wire.read())
        await wire.answer(OK)
        if len(bodies) == 1:
            bodies.append(await wire.read())
        else:
            await wire.gone()

    async with serving(script) as server:
        to = target("POST", server.url)
        for _ in range(2):
            assert (await client.fetch(to, [b"<", piece, b">"], timeout_s=PATIENCE_S)).body == b"ok"
        assert server.num_connections == 2
    assert [body[-7:] for body in bodies] == [b"<image>"] * 3


async def test_lost_bytes_end_only_their_call_and_are_not_retried(
    client: HttpClient,
) -> None:
    async def script(wire: Wire) -> None:
        for _ in range(2):
            await wire.read()
            await wire.answer(OK)

    async with serving(script) as server:
        to = target("POST", server.url)
        assert (await client.fetch(to, [b"x"], timeout_s=PATIENCE_S)).body == b"ok"
        lost = Unread(CONTENT, is_lost=True)
        with pytest.raises(RequestLost, match="cannot be read back: the disk is gone"):
            await client.fetch(to, [lost], timeout_s=PATIENCE_S)
        assert lost.num_read == PART_BYTES
        assert (await client.fetch(to, [b"x"], timeout_s=PATIENCE_S)).body == b"ok"


async def test_a_connection_is_not_used_again_if_its_peer_answered_before_the_bodys_end(
    client: HttpClient,
) -> None:
    async def script(wire: Wire) -> None:
        await wire.answer(OK)
        await wire.gone()

    piece = Unread(CONTENT)
    async with serving(script) as server:
        to = target("POST", server.url)
        for num in (1, 2):
            assert (await client.fetch(to, [piece] * 4, timeout_s=PATIENCE_S)).body == b"ok"
            assert server.num_connections == num


async def test_nothing_more_is_read_for_a_call_that_was_closed(client: HttpClient) -> None:
    piece = Unread(CONTENT)
    calls: list[HttpCall] = []

    class Closing(Unread):
        def part(self, start: int, stop: int) -> bytes | memoryview:
            calls[0].close()
            return super().part(start, stop)

    async def script(wire: Wire) -> None:
        await wire.gone()

    async with serving(script) as server:
        closing = Closing(CONTENT)
        calls.append(client.send(target("POST", server.url), [closing, piece], ResponseRecorder()))
        await _standstill(lambda: closing.num_read)
    assert (closing.num_read, piece.num_read) == (PART_BYTES, 0)


async def _standstill(count: Callable[[], int]) -> None:
    """Wait until a positive count stays the same for 100 turns of the loop."""
    async with asyncio.timeout(PATIENCE_S):
        seen, num_same = 0, 0
        while num_same < 100:
            await asyncio.sleep(0)
            num_same = num_same + 1 if count() == seen and seen else 0
            seen = count()


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
        responses = [await get(client, server.url) for _ in answers]
        assert server.num_connections == 1
    assert [(each.status, each.body) for each in responses] == [
        (200, b"ok"),
        (200, b"ok"),
        (204, b""),
        (200, b"ok"),
        (404, b""),
    ]
    assert responses[3].headers == [(b"Content-Length", b"2")]


async def test_chunks_of_one_read_are_delivered_as_one_piece(client: HttpClient) -> None:
    may_continue = asyncio.Event()

    async def script(wire: Wire) -> None:
        await wire.read()
        await wire.answer(CHUNKED + b"1\r\na\r\n2;x=y\r\nbc\r\n")
        await may_continue.wait()
        await wire.answer(b"1\r\nd\r\n0\r\nTrailer: t\r\n\r\n")
        await wire.gone()

    recorder = ResponseRecorder()
    async with serving(script) as server:
        client.send(target("GET", server.url), (), recorder)
        await recorder.until(lambda: recorder.data)
        assert (recorder.data, recorder.ends) == ([b"abc"], [])
        may_continue.set()
        await recorder.until(lambda: recorder.ends)
    assert recorder.data == [b"abc", b"d"]
    assert recorder.headers == [(b"Transfer-Encoding", b"chunked")]


async def test_an_answer_to_head_has_no_body(client: HttpClient) -> None:
    async with serving(answering(b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n")) as server:
        response = await get(client, server.url, "HEAD")
    assert (response.status, response.body) == (200, b"")
    assert response.headers == [(b"Content-Length", b"99")]


async def test_answer_without_a_length_ends_with_its_connection(client: HttpClient) -> None:
    async with serving(answering(b"HTTP/1.1 200 OK\r\n\r\nall ", b"there is")) as server:
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


async def test_a_request_is_not_resent_after_the_first_byte_of_an_answer(
    client: HttpClient,
) -> None:
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

    class Slow(ResponseRecorder):
        def on_data(self, data: bytes) -> None:
            super().on_data(data)
            if len(self.data) == 1:
                call.pause()

    recorder = Slow()
    async with serving(script) as server:
        call = client.send(target("GET", server.url), (), recorder)
        await recorder.until(lambda: recorder.data)
        async with asyncio.timeout(PATIENCE_S):
            await is_stuck.wait()
        for _ in range(100):
            await asyncio.sleep(0)
        assert len(recorder.data) == 1
        assert num_written < 64
        call.resume()
        await recorder.until(lambda: recorder.ends)
    assert sum(map(len, recorder.data)) == 64 * len(piece)


async def test_a_call_may_be_closed_in_on_head(client: HttpClient) -> None:
    class ClosesOnHead(ResponseRecorder):
        def on_head(self, status: int, headers: Headers) -> None:
            super().on_head(status, headers)
            call.close()

    recorder = ClosesOnHead()
    async with serving(answering(OK)) as server:
        call = client.send(target("GET", server.url), (), recorder)
        await recorder.until(lambda: recorder.status)
        await get(client, server.url)
    assert (recorder.data, recorder.ends) == ([], [])


@pytest.mark.parametrize(
    ("pieces", "error_text"),
    [
        ([b"this is no HTTP\r\n\r\n"], "invalid HTTP"),
        ([b"\x16\x03\x01\x02\x00"], "invalid HTTP"),
        ([b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n"], "invalid HTTP"),
        ([b"HTTP/1.1 200 OK\r\nContent-Length: -5\r\n\r\n"], "invalid HTTP"),
        ([b"HTTP/1.1 101 Switching\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n"], "protocol"),
        ([CHUNKED, b"zz\r\nnonsense\r\n"], "invalid HTTP"),
        ([b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n", b"abc"], "before the answer's end"),
        ([CHUNKED, b"5\r\nab"], "before the answer's end"),
        ([CHUNKED, b"2\r\nab\r\n"], "before the answer's end"),
        ([b"HTTP/1.1 200 OK\r\nX-A"], "before the answer's end"),
        ([b""], "before the answer's end"),
    ],
)
async def test_broken_answer_is_one_error_that_names_the_peer(
    client: HttpClient, pieces: list[bytes], error_text: str
) -> None:
    recorder = ResponseRecorder()
    async with serving(answering(*pieces)) as server:
        client.send(target("GET", server.url), (), recorder)
        await recorder.until(lambda: recorder.ends)
    [error] = recorder.ends
    assert error_text in str(error)
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
async def test_a_peer_that_sends_endless_headers_is_disconnected(
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
    assert MAX_OVERHEAD_BYTES < 2**20


@pytest.mark.parametrize("more", [OK, b"garbage", b"\r\nHTTP/1.1 500 No\r\n\r\n"])
async def test_an_answer_with_bytes_behind_it_is_valid_but_its_connection_is_closed(
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


async def test_unexpected_bytes_end_an_idle_connection(client: HttpClient) -> None:
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


async def test_a_server_may_answer_before_it_has_read_the_request(client: HttpClient) -> None:
    async def script(wire: Wire) -> None:
        await wire.answer(
            b"HTTP/1.1 413 Too Large\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"
        )
        await wire.gone()

    async with serving(script) as server:
        to = target("POST", server.url)
        response = await client.fetch(to, [bytes(2**24)], timeout_s=PATIENCE_S)
    assert response.status == 413
