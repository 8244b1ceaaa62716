"""Requests, bodies and malformed bytes on real sockets, on both event loops."""

import asyncio
import gzip

import pytest

from rollmesh.core.errors import SessionError
from rollmesh.engine.connection import MAX_OVERHEAD_BYTES
from rollmesh.serve.interception import body_limits as bodies_module
from rollmesh.serve.interception.connection import MAX_PIPELINED
from rollmesh.serve.interception.request import JSON, HttpRequest
from tests.unit.serve.interception.http_client import (
    GET,
    MAX_BYTES,
    HeldHandler,
    echo,
    serving,
    sized,
    status_of,
)


def test_a_request_is_parsed_with_its_headers_in_order(runner: asyncio.Runner) -> None:
    seen: list[HttpRequest] = []

    async def handle(request: HttpRequest) -> None:
        seen.append(request)
        await echo(request)

    async def main() -> None:
        async with serving(handle) as running:
            client = await running.client()
            client.send(sized(b"abc", b"X-Key: one", b"x-key: two", b"X-Key:"))
            assert await client.answer() == (200, b"abc")

    runner.run(main())
    assert (seen[0].method, seen[0].path) == ("POST", "/p?q")
    assert seen[0].headers == {b"host": b"x", b"content-length": b"3", b"x-key": b"one"}
    headers = [(b"Content-Length", b"3"), (b"X-Key", b"one"), (b"x-key", b"two"), (b"X-Key", b"")]
    assert seen[0].raw_headers == [(b"Host", b"x"), *headers]


def test_an_absolute_request_target_is_reduced_to_its_path(
    runner: asyncio.Runner,
) -> None:
    seen: list[str] = []

    async def handle(request: HttpRequest) -> None:
        seen.append(request.path)
        await echo(request)

    async def main() -> None:
        async with serving(handle) as running:
            client = await running.client()
            for target in (b"http://h:80/healthz?a", b"HTTP://u@h?b", b"http://h", b"/http://h/c"):
                client.send(b"GET " + target + b" HTTP/1.1\r\nHost: h\r\n\r\n")
                assert await client.answer() == (200, b"")

    runner.run(main())
    assert seen == ["/healthz?a", "/?b", "/", "/http://h/c"]


def test_requests_that_arrive_byte_by_byte_are_answered_on_one_connection(
    runner: asyncio.Runner,
) -> None:
    chunked = (
        b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n2;x=y\r\nde\r\n1\r\nf\r\n"
    )
    chunked += b"0\r\nTrailer: x\r\n\r\n"

    async def main() -> None:
        async with serving(echo) as running:
            client = await running.client()
            for request, body in ((sized(b"abc"), b"abc"), (chunked, b"def")):
                for byte in request:
                    client.send(bytes([byte]))
                    await client.writer.drain()
                    await asyncio.sleep(0)
                assert await client.answer() == (200, body)

    runner.run(main())


def test_pipelined_requests_are_answered_in_order(runner: asyncio.Runner) -> None:
    in_progress: list[HttpRequest] = []

    async def handle(request: HttpRequest) -> None:
        assert not in_progress
        in_progress.append(request)
        await asyncio.sleep(0)
        await echo(request)
        in_progress.clear()

    async def main() -> None:
        async with serving(handle) as running:
            client = await running.client()
            bodies = [b"%d" % number * 5000 for number in range(MAX_PIPELINED)]
            client.send(b"".join(map(sized, bodies)))
            assert [await client.answer() for _ in bodies] == [(200, body) for body in bodies]

    runner.run(main())


def test_too_many_pipelined_requests_end_the_connection_after_the_earlier_answers(
    runner: asyncio.Runner,
) -> None:
    async def main() -> None:
        async with serving(echo) as running:
            answers = await running.ask(GET * 1000)
            assert answers.count(b"HTTP/1.1 200 ") == MAX_PIPELINED + 1
            assert answers.count(b"HTTP/1.1 400 ") == 1
            assert answers.rpartition(b"HTTP/1.1 ")[2].startswith(b"400 ")

    runner.run(main())


def test_unrequested_data_is_not_read(runner: asyncio.Runner) -> None:
    held = HeldHandler()

    async def handle(request: HttpRequest) -> None:
        await (held(request) if request.path == "/held" else echo(request))

    async def main() -> None:
        async with serving(handle) as running:
            client = await running.client()
            client.send(b"POST /held HTTP/1.1\r\nHost: x\r\nContent-Length: 60000000\r\n\r\n")
            await held.begun.wait()
            client.send(b"x" * 60_000_000)
            other = await running.client()
            for _ in range(500):
                other.send(sized(b"x"))
                assert await other.answer() == (200, b"x")
            assert client.num_unsent > 40_000_000

    runner.run(main())


def test_unread_answers_do_not_accumulate(runner: asyncio.Runner) -> None:
    num_answered = 0

    async def handle(request: HttpRequest) -> None:
        nonlocal num_answered
        num_answered += request.path == "/many"
        request.answer(200, request.header_lines(JSON), b"x" * 100_000)

    async def main() -> None:
        async with serving(handle) as running:
            client, other = await running.client(limit=1), await running.client()
            for _ in range(200):
                client.send(b"GET /many HTTP/1.1\r\nHost: x\r\n\r\n" * 10)
                other.send(GET)
                assert (await other.answer())[0] == 200

    runner.run(main())
    # These bytes exceed the kernel's buffers of both sides.
    assert 0 < num_answered < 200


def test_expect_continue_is_answered_only_if_the_body_is_wanted(
    runner: asyncio.Runner,
) -> None:
    async def main() -> None:
        async with serving(echo) as running:
            client = await running.client()
            head, _, _ = sized(b"abc", b"Expect: 100-continue").partition(b"abc")
            client.send(head)
            assert await client.head() == b"HTTP/1.1 100 Continue\r\n\r\n"
            client.send(b"abc")
            assert await client.answer() == (200, b"abc")
            large = (
                b"POST / HTTP/1.1\r\nHost: x\r\n"
                b"Expect: 100-continue\r\nContent-Length: 900000\r\n\r\n"
            )
            client.send(large)
            assert await client.answer() == (413, b"body_too_large")
            assert await client.rest() == b""

    runner.run(main())


@pytest.mark.parametrize(
    "head",
    [b"Content-Length: 900000\r\n\r\n", b"Transfer-Encoding: chunked\r\n\r\ndbba0\r\n"],
    ids=["sized", "chunked"],
)
def test_a_body_over_the_limit_is_refused_while_its_sender_continues(
    runner: asyncio.Runner, head: bytes
) -> None:
    async def main() -> None:
        async with serving(echo) as running:
            answer = await running.ask(b"POST / HTTP/1.1\r\nHost: x\r\n" + head + b"x" * 900_000)
            assert answer.startswith(b"HTTP/1.1 413 ")
            assert b"Connection: close\r\n" in answer

    runner.run(main())


def test_a_content_length_of_many_digits_is_accepted(runner: asyncio.Runner) -> None:
    async def main() -> None:
        async with serving(echo) as running:
            client = await running.client()
            client.send(
                b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: " + b"0" * 5000 + b"3\r\n\r\n"
            )
            for _ in range(20):  # The server reads each part separately.
                await asyncio.sleep(0)
            client.send(b"abc")
            assert await client.answer() == (200, b"abc")

    runner.run(main())


def test_a_body_that_arrives_too_slowly_is_refused(
    runner: asyncio.Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bodies_module, "SLOWEST_BYTES_PER_S", 1e12)

    async def handle(request: HttpRequest) -> None:
        with pytest.raises(SessionError) as refused:
            await request.read(MAX_BYTES, 0.05)
        request.answer(refused.value.status, b"", b"")

    async def main() -> None:
        async with serving(handle) as running:
            client = await running.client()
            client.send(sized(b"x" * MAX_BYTES)[:100])
            answer = asyncio.create_task(client.answer())
            while not answer.done():
                client.send(b"x")
                await asyncio.sleep(0)
            assert await answer == (408, b"")

    runner.run(main())


def test_compressed_bodies_are_decompressed_within_the_limit(runner: asyncio.Runner) -> None:
    gzipped = b"Content-Encoding: gzip"

    async def main() -> None:
        async with serving(echo) as running:
            client = await running.client()
            for raw, coding, answer in (
                (gzip.compress(b"abc" * 1000), gzipped, (200, b"abc" * 1000)),
                (gzip.compress(b"x" * (MAX_BYTES + 1)), gzipped, (413, b"body_too_large")),
                (gzip.compress(b"abc")[:-9], gzipped, (400, b"invalid_body")),
                (b"abc", gzipped, (400, b"invalid_body")),
                (b"abc", b"Content-Encoding: br", (415, b"unsupported_encoding")),
                (b"abc", b"Content-Encoding: identity", (200, b"abc")),
            ):
                client.send(sized(raw, coding))
                assert await client.answer() == answer

    runner.run(main())


@pytest.mark.parametrize("wish", [b"h2c", b"websocket"])
def test_an_upgrade_is_declined_and_hides_no_body(runner: asyncio.Runner, wish: bytes) -> None:
    inner = b"GET /smuggled HTTP/1.1\r\nHost: x\r\n\r\n"

    async def main() -> None:
        async with serving(echo) as running:
            client = await running.client()
            upgrade = sized(inner, b"Connection: Upgrade", b"Upgrade: " + wish)
            for cut in (len(upgrade), len(upgrade) - 5, 20):
                client.send(upgrade[:cut])
                for _ in range(5):  # The server reads each part separately.
                    await asyncio.sleep(0)
                client.send(upgrade[cut:] + sized(b"next"))
                assert await client.answer() == (200, inner)
                assert await client.answer() == (200, b"next")

    runner.run(main())


GARBAGE = {
    "tls": b"\x16\x03\x01\x02\x00\x01\x00",
    "no method": b"FROB / HTTP/1.1\r\n\r\n",
    "http 2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "a later version": b"GET / HTTP/2.0\r\n\r\n",
    "an earlier version": b"GET /\r\n\r\n",
    "a proxy's": b"CONNECT h:443 HTTP/1.1\r\n\r\n",
    "bare line ends": b"GET / HTTP/1.1\nA: b\n\n",
    "a bare return": b"GET / HTTP/1.1\r\nHost: x\r\nA: b\rX: y\r\n\r\n",
    "a folded line": b"GET / HTTP/1.1\r\nHost: x\r\nA: b\r\n c\r\n\r\n",
    "a space in a name": b"GET / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding : chunked\r\n\r\n",
    "a zero": b"GET / HTTP/1.1\r\nHost: x\r\nA: b\0c\r\n\r\n",
    "two lengths": b"POST / HTTP/1.1\r\nHost: x\r\n"
    b"Content-Length: 1\r\nContent-Length: 2\r\n\r\nabc",
    "a signed length": b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: +1\r\n\r\na",
    "length and chunks": b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\nGET /smuggled HTTP/1.1\r\nHost: x\r\n\r\n",
    "chunks and length": b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n"
    b"Content-Length: 5\r\n\r\n0\r\n\r\nGET /smuggled HTTP/1.1\r\nHost: x\r\n\r\n",
    "not chunked last": b"POST / HTTP/1.1\r\nHost: x\r\n"
    b"Transfer-Encoding: chunked, gzip\r\n\r\n0\r\n\r\n",
    "unknown framing": b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: identity\r\n\r\n" + GET,
    "a garbled chunk": b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nz\r\n"
    + GET,
    "a chunk's bare end": b"POST / HTTP/1.1\r\nHost: x\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n1\na\r\n" + GET,
    "a long chunk": b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nab\r\n"
    + GET,
    "another coding": b"POST / HTTP/1.1\r\nHost: x\r\n"
    b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
    "a huge chunk": b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n" + b"f" * 17,
}


@pytest.mark.parametrize("garbage", GARBAGE.values(), ids=GARBAGE)
def test_invalid_http_is_answered_once_and_closes_the_connection(
    runner: asyncio.Runner, garbage: bytes
) -> None:
    async def main() -> None:
        async with serving(echo) as running:
            answers = await running.ask(sized(b"before") + garbage)
            assert answers.count(b"HTTP/1.1 ") == 2
            assert b"\r\n\r\nbeforeHTTP/1.1 40" in answers or b"beforeHTTP/1.1 501 " in answers
            head, _, body = answers.rpartition(b"\r\n\r\n")
            assert b"\r\nConnection: close" in head
            assert b"\n" not in body

    runner.run(main())


@pytest.mark.parametrize(
    "endless",
    [
        b"GET /",
        b"GET / HTTP/1.1\r\nHost: x\r\nA: ",
        b"GET / HTTP/1.1\r\nHost: x\r\nCookie: secret\r\nA: b\r\n" * 1,
    ],
)
def test_an_endless_head_is_refused(runner: asyncio.Runner, endless: bytes) -> None:
    async def main() -> None:
        async with serving(echo) as running:
            more = b"x" if not endless.endswith(b"\n") else b"A: b\r\n"
            answer = await running.ask(endless + more * (2 * MAX_OVERHEAD_BYTES))
            assert status_of(answer) == 431
            assert b"secret" not in answer

    runner.run(main())


def test_endless_chunk_extensions_are_refused(runner: asyncio.Runner) -> None:
    async def main() -> None:
        async with serving(echo) as running:
            head = b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n1;"
            assert status_of(await running.ask(head + b"x" * (4 * MAX_OVERHEAD_BYTES))) == 400

    runner.run(main())
