"""Bodies that are read while they are sent: whole, anew for each try, and no faster than taken."""

import asyncio
from collections.abc import Callable

import psutil
import pytest
import uvloop

from rollmesh.core.errors import RequestLost
from rollmesh.engine.connection import Call
from rollmesh.engine.http import HttpClient, target
from rollmesh.engine.pieces import PART_BYTES, Piece
from rollmesh.runtime.blobs import Blob, BlobStore
from tests.unit.engine.http_peer import OK, PATIENCE_S, Ear, Unread, Wire, serving

CONTENT = bytes(range(256)) * (16 * 2**20 // 256)
"""More than sockets take while nobody reads."""


class Seen(Unread):
    """One that has its bytes in a blob."""

    def __init__(self, blob: Blob) -> None:
        super().__init__(b"")
        self.num_bytes = blob.num_bytes
        self._blob = blob

    def part(self, start: int, stop: int) -> bytes | memoryview:
        part = self._blob.part(start, stop)
        self.num_read += len(part)
        return part


async def test_they_come_whole_and_in_order_and_leave_their_connection_to_the_next(
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
    await _send_to_one_that_waits(client)


def test_nor_on_the_loop_of_our_processes() -> None:
    async def play() -> None:
        async with HttpClient() as client:
            await _send_to_one_that_waits(client)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(play())


async def _send_to_one_that_waits(client: HttpClient) -> None:
    go_on = asyncio.Event()

    async def script(wire: Wire) -> None:
        await go_on.wait()
        assert (await wire.read()).endswith(CONTENT)
        await wire.answer(OK)

    pieces, ear = [Unread(CONTENT) for _ in range(4)], Ear()
    async with serving(script) as server:
        client.send(target("POST", server.url), pieces, ear)
        await _standstill(lambda: sum([piece.num_read for piece in pieces]))
        assert 0 < pieces[0].num_read < len(CONTENT)
        assert [piece.num_read for piece in pieces[1:]] == [0, 0, 0]
        go_on.set()
        await ear.until(lambda: ear.ends)
    assert (ear.status, ear.ends) == (200, [None])
    assert [piece.num_read for piece in pieces] == [len(CONTENT)] * 4


async def test_calls_that_wait_for_an_engine_hold_no_copy_of_what_they_send(
    client: HttpClient,
) -> None:
    """Four of 20 MB: what one of them would be by itself is more than all of them add."""
    store, go_on = BlobStore(), asyncio.Event()
    shots = [store.hold(bytes([n]) * 2**21) for n in range(10)]
    history = [Seen(shot) for shot in shots]
    process = psutil.Process()

    async def script(wire: Wire) -> None:
        await go_on.wait()

    async with serving(script) as server:
        before = process.memory_info().rss
        to = target("POST", server.url)
        calls = [client.send(to, [b"[", *history, b"]"], Ear()) for _ in range(4)]
        await _standstill(lambda: sum([seen.num_read for seen in history]))
        grown = process.memory_info().rss - before
        for call in calls:
            call.close()
        go_on.set()
    assert grown < 20 * 2**20
    assert [seen.num_read for seen in history[-2:]] == [0, 0]


async def test_a_request_that_is_sent_again_is_read_again(client: HttpClient) -> None:
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


async def test_bytes_that_are_lost_end_their_call_alone_and_are_not_tried_again(
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
    calls: list[Call] = []

    class Closing(Unread):
        def part(self, start: int, stop: int) -> bytes | memoryview:
            calls[0].close()
            return super().part(start, stop)

    async def script(wire: Wire) -> None:
        await wire.gone()

    async with serving(script) as server:
        closing = Closing(CONTENT)
        calls.append(client.send(target("POST", server.url), [closing, piece], Ear()))
        await _standstill(lambda: closing.num_read)
    assert (closing.num_read, piece.num_read) == (PART_BYTES, 0)


async def _standstill(count: Callable[[], int]) -> None:
    """Until a count that has begun moves no more, however often the loop turns."""
    async with asyncio.timeout(PATIENCE_S):
        seen, num_same = 0, 0
        while num_same < 100:
            await asyncio.sleep(0)
            num_same = num_same + 1 if count() == seen and seen else 0
            seen = count()
