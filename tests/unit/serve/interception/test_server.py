"""The end of connections: silence, disconnects, streams and `stop`, on both event loops."""

import asyncio
import gc

import pytest

from rollmesh.serve.interception.connection import (
    AgentConnection,
    ConnectionLimits,
    HttpRequestParser,
)
from rollmesh.serve.interception.request import JSON, HttpRequest
from tests.unit.serve.interception.http_client import (
    GET,
    LAST_GET,
    PATIENCE_S,
    HeldHandler,
    echo,
    serving,
    sized,
)

# silent clients, and clients that disconnect


def test_a_slow_head_is_a_408(runner: asyncio.Runner) -> None:
    async def main() -> None:
        async with serving(echo, limits=ConnectionLimits(head_s=0.05)) as running:
            client = await running.client()
            client.send(GET)
            assert (await client.answer())[0] == 200
            client.send(b"GET / HTTP/1.1\r\nHost: x\r\nA: ")
            answer = asyncio.create_task(client.answer())
            while not answer.done():
                client.send(b"x")
                await asyncio.sleep(0)
            assert (await answer)[0] == 408
            assert await client.rest() == b""

    runner.run(main())


def test_half_a_head_after_an_answer_has_the_same_time_limit(
    runner: asyncio.Runner,
) -> None:
    async def main() -> None:
        async with serving(echo, limits=ConnectionLimits(head_s=0.05)) as running:
            client = await running.client()
            client.send(GET + b"GET / HT")
            assert (await client.answer())[0] == 200
            assert (await client.answer())[0] == 408

    runner.run(main())


def test_idle_connections_are_closed_without_an_answer(runner: asyncio.Runner) -> None:
    async def main() -> None:
        async with serving(echo, limits=ConnectionLimits(idle_s=0.05)) as running:
            fresh, kept = await running.client(), await running.client()
            kept.send(GET)
            assert (await kept.answer())[0] == 200
            assert await fresh.rest() == await kept.rest() == b""

    runner.run(main())


def test_a_running_handler_is_not_idle(runner: asyncio.Runner) -> None:
    async def main() -> None:
        held = HeldHandler()
        async with serving(
            held, limits=ConnectionLimits(idle_s=0.01, head_s=0.01, linger_s=0.01)
        ) as running:
            client, fresh = await running.client(), await running.client()
            client.send(GET)
            await held.begun.wait()
            assert await fresh.rest() == b""
            held.go.set()
            assert await client.answer() == (200, b"held")

    runner.run(main())


@pytest.mark.parametrize("half", [False, True], ids=["reset", "half"])
def test_a_handler_is_cancelled_when_its_client_disconnects(
    runner: asyncio.Runner, half: bool
) -> None:
    async def main() -> None:
        held = HeldHandler()
        async with serving(held) as running:
            client = await running.client()
            client.send(GET)
            await held.begun.wait()
            if half:
                client.writer.write_eof()
            else:
                client.reset()
            assert await held.cancelled.wait()

    runner.run(main())


def test_a_handler_is_cancelled_when_its_body_ends_early(runner: asyncio.Runner) -> None:
    reading = asyncio.Event()
    left = asyncio.Event()

    async def handle(request: HttpRequest) -> None:
        reading.set()
        try:
            await echo(request)
        except asyncio.CancelledError:
            left.set()
            raise

    async def main() -> None:
        async with serving(handle) as running:
            client = await running.client()
            client.send(sized(b"abc")[:-1])
            await reading.wait()
            client.reset()
            assert await left.wait()

    runner.run(main())


def send_until_disconnected() -> None:
    """Send for as long as the client is connected."""


def test_a_client_that_does_not_read_blocks_its_writer_and_is_then_cut(
    runner: asyncio.Runner,
) -> None:
    num_sent = 0
    ended = asyncio.Event()

    async def handle(request: HttpRequest) -> None:
        nonlocal num_sent
        request.open(200, b"")
        try:
            while True:
                request.send(b"x" * 65536)
                num_sent += 1
                await request.drain(send_until_disconnected)
        finally:
            ended.set()

    async def main() -> None:
        async with serving(handle, limits=ConnectionLimits(idle_s=0.2)) as running:
            client = await running.client(limit=1)
            client.send(GET)
            await ended.wait()

    runner.run(main())
    assert num_sent < 1000


def test_a_client_that_does_not_read_and_half_closes_is_cut_at_once(
    runner: asyncio.Runner,
) -> None:
    blocked, cancelled = asyncio.Event(), asyncio.Event()

    async def handle(request: HttpRequest) -> None:
        request.open(200, b"")
        try:
            while not request.is_write_paused:
                request.send(b"x" * 65536)
            blocked.set()
            await request.drain(send_until_disconnected)
        except asyncio.CancelledError:
            cancelled.set()
            raise

    async def main() -> None:
        async with serving(handle) as running:
            client = await running.client(limit=1)
            client.send(GET)
            await blocked.wait()
            client.writer.write_eof()
            await cancelled.wait()

    runner.run(main())


@pytest.mark.usefixtures("young_heap")
def test_a_lost_connection_leaves_nothing_to_the_garbage_collector(
    runner: asyncio.Runner,
) -> None:
    async def main() -> None:
        async with serving(echo) as running:
            gc.collect()
            gc.disable()
            try:
                assert b" 200 " in await running.ask(LAST_GET)
                kept = await running.client()
                kept.send(GET + sized(b"abc")[:-1])
                assert (await kept.answer())[0] == 200
                kept.reset()
                parts = (AgentConnection, HttpRequestParser)
                while any(type(each) in parts for each in gc.get_objects()):  # noqa: ASYNC110 - nothing signals when the last object is freed
                    await asyncio.sleep(0)
            finally:
                gc.enable()

    runner.run(main())


def test_a_blocked_writer_continues_when_its_client_reads_again(runner: asyncio.Runner) -> None:
    whole = b"x" * 20_000_000

    async def handle(request: HttpRequest) -> None:
        request.answer(200, b"", whole)
        assert request.is_write_paused
        await request.drain(send_until_disconnected)

    async def main() -> None:
        async with serving(handle) as running:
            client = await running.client()
            client.send(GET)
            assert await client.answer() == (200, whole)
            client.send(LAST_GET)
            assert (await client.rest()).endswith(whole)

    runner.run(main())


# answers


def test_connections_are_kept_or_closed_as_the_client_requests(runner: asyncio.Runner) -> None:
    async def main() -> None:
        async with serving(echo) as running:
            client = await running.client()
            client.send(b"GET / HTTP/1.0\r\nConnection: keep-alive\r\n\r\n")
            assert b"\r\nConnection: keep-alive\r\n" in await client.head()
            client.send(b"GET / HTTP/1.0\r\n\r\n")
            assert b"\r\nConnection: close\r\n" in await client.head()
            assert await client.rest() == b""
            answers = await running.ask(LAST_GET + GET)
            assert answers.count(b"HTTP/1.1 200 OK\r\n") == 1
            assert b"\r\nConnection: close\r\n" in answers

    runner.run(main())


async def send_events(request: HttpRequest) -> None:
    request.open(200, request.header_lines(b"text/event-stream"))
    for _ in range(2):
        request.send(b"data: 1\n\n")
        await asyncio.sleep(0)
    request.close(b"data: 2\n\n" if request.path == "/last" else b"")


def test_streams_are_chunked_or_end_with_their_connection(runner: asyncio.Runner) -> None:
    async def main() -> None:
        async with serving(send_events) as running:
            client = await running.client()
            chunk = b"9\r\ndata: 1\n\n\r\n"
            client.send(GET)
            assert b"\r\nTransfer-Encoding: chunked\r\n" in await client.head()
            assert await client.reader.readexactly(2 * len(chunk) + 5) == 2 * chunk + b"0\r\n\r\n"
            client.send(b"GET /last HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            body = (await client.rest()).partition(b"\r\n\r\n")[2]
            assert body == 2 * chunk + chunk.replace(b"1\n", b"2\n") + b"0\r\n\r\n"
            old = await running.ask(b"GET / HTTP/1.0\r\nConnection: keep-alive\r\n\r\n")
            head, _, body = old.partition(b"\r\n\r\n")
            assert body == b"data: 1\n\n" * 2
            assert b"Transfer-Encoding" not in head
            assert b"\r\nConnection: close" in head

    runner.run(main())


def test_head_is_answered_without_a_body(runner: asyncio.Runner) -> None:
    async def handle(request: HttpRequest) -> None:
        request.answer(200, request.header_lines(JSON), b"body")

    async def main() -> None:
        async with serving(handle) as running:
            answers = await running.ask(b"HEAD / HTTP/1.1\r\nHost: x\r\n\r\n" + LAST_GET)
            assert answers.count(b"Content-Length: 4\r\n") == 2
            assert answers.count(b"body") == 1

    runner.run(main())


@pytest.mark.parametrize("begins", [False, True])
def test_a_broken_handler_ends_its_own_connection_only(
    runner: asyncio.Runner, begins: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async def handle(request: HttpRequest) -> None:
        if request.method == "GET":
            await echo(request)
            return
        if begins:
            request.open(200, b"")
            request.send(b"x")
        raise ValueError("broken")

    async def main() -> None:
        async with serving(handle) as running:
            other = await running.client()
            client = await running.client()
            client.send(sized(b"", b"x-api-key: rk-secret"))
            answer = await client.rest()
            assert answer[:13] in ((b"", b"HTTP/1.1 200 ") if begins else (b"HTTP/1.1 500 ",))
            assert not answer.endswith(b"0\r\n\r\n")
            other.send(GET)
            assert (await other.answer())[0] == 200

    runner.run(main())
    assert "http.broken" in caplog.text
    assert "rk-secret" not in caplog.text


# stop


def test_stop_closes_idle_connections_and_lets_a_running_handler_end(
    runner: asyncio.Runner,
) -> None:
    async def main() -> None:
        held = HeldHandler()
        async with serving(held, drain_s=PATIENCE_S) as running:
            idle, partial, busy = [await running.client() for _ in range(3)]
            partial.send(b"GET / HT")
            busy.send(GET + GET)
            await held.begun.wait()
            stopping = asyncio.create_task(running.server.stop())
            assert await idle.rest() == await partial.rest() == b""
            with pytest.raises(OSError):  # noqa: PT011 - the message depends on the event loop
                await running.client()
            assert not stopping.done()
            held.go.set()
            answer = await busy.rest()
            assert answer.count(b"HTTP/1.1 200 OK\r\n") == 1
            assert b"\r\nConnection: close\r\n" in answer
            await stopping

    runner.run(main())


def test_stop_cancels_handlers_that_do_not_end(runner: asyncio.Runner) -> None:
    async def main() -> None:
        held = HeldHandler()
        async with serving(held, drain_s=0.01) as running:
            client = await running.client()
            client.send(GET)
            await held.begun.wait()
            await running.server.stop()
            assert held.cancelled.is_set()

    runner.run(main())
