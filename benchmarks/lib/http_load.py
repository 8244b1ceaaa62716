"""A closed loop of HTTP/1.1 calls at minimal cost: a connection asks, waits, asks again.

A Talk is a generator that yields requests and receives their answers. The connections share the
talks; each runs one to its end and takes the next.

- A call's time is from the write of its request to the last byte of its answer. An answer that is
  not 2xx ends the run. Only the HTTP that the benchmarks use is supported.
"""

import asyncio
from collections.abc import Generator, Iterable, Iterator
from time import perf_counter
from typing import cast

import msgspec

PATIENCE_S = 120.0

_LAST_CHUNK = b"\r\n0\r\n\r\n"


class HttpAnswer(msgspec.Struct):
    """An answer; a stream's body is not kept."""

    body: bytes
    num_bytes: int = 0


Talk = Generator[bytes, HttpAnswer, None]


class Timings(msgspec.Struct):
    """Times of one run, in seconds."""

    calls_s: list[float] = []
    first_events_s: list[float] = []
    """Seconds to the first event of each stream."""
    wall_s: float = 0.0

    def percentile_ms(self, percent: float) -> float:
        """Percentile of the call times, in milliseconds."""
        return 1e3 * percentile(self.calls_s, percent)


class LoadError(Exception):
    """A call got a wrong answer, so the run is invalid."""


class Connection(asyncio.Protocol):
    """Run talks, one call at a time."""

    def __init__(self, talks: Iterator[Talk], timings: Timings) -> None:
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._talks = talks
        self._talk: Talk | None = None
        self._timings = timings
        self._parts: list[bytes] = []
        self._missing = 0
        """Remaining bytes of a plain answer; -1 before its head, -2 within a stream."""
        self._tail = b""
        self._num_bytes = 0
        self._asked_s = 0.0
        self._transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(
            "asyncio.Transport", transport
        )  # uvloop's transport is no subclass of asyncio.Transport

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.ended.done():
            self.ended.set_exception(LoadError(f"the server hung up in a call: {exc}"))

    def begin(self) -> None:
        """Send the first request."""
        self._next_talk()

    def data_received(self, data: bytes) -> None:
        if self._missing == -2:
            return self._stream(data)
        if self._missing >= 0:
            self._parts.append(data)
            self._missing -= len(data)
            return None if self._missing else self._answered(b"".join(self._parts))
        self._parts.append(data)
        head, mark, body = b"".join(self._parts).partition(b"\r\n\r\n")
        if not mark:
            return None
        if not head.startswith(b"HTTP/1.1 2"):
            return self._fail(head, body)
        length = _header(head, b"content-length:")
        if length:
            self._parts = [body]
            self._missing = int(length) - len(body)
            return None if self._missing else self._answered(body)
        self._missing = -2
        return self._stream(body) if body else None

    def _stream(self, data: bytes) -> None:
        """Read chunks, of which only the first and the last matter."""
        if not self._num_bytes:
            self._timings.first_events_s.append(perf_counter() - self._asked_s)
        self._num_bytes += len(data)
        self._tail = (self._tail + data)[-len(_LAST_CHUNK) :]
        if self._tail == _LAST_CHUNK:
            self._answered(b"")

    def _answered(self, body: bytes) -> None:
        self._timings.calls_s.append(perf_counter() - self._asked_s)
        assert self._talk
        try:
            self._ask(self._talk.send(HttpAnswer(body, self._num_bytes)))
        except StopIteration:
            self._next_talk()

    def _next_talk(self) -> None:
        self._talk = next(self._talks, None)
        if self._talk is None:
            self.ended.set_result(None)
            return
        self._ask(next(self._talk))

    def _ask(self, request: bytes) -> None:
        self._parts = []
        self._missing = -1
        self._num_bytes = 0
        self._tail = b""
        self._asked_s = perf_counter()
        self._transport.write(request)

    def _fail(self, head: bytes, body: bytes) -> None:
        line = head.partition(b"\r\n")[0].decode()
        if not self.ended.done():
            self.ended.set_exception(LoadError(f"{line}: {body[:300].decode(errors='replace')}"))

    def close(self) -> None:
        """Close the connection and end all waiting for a talk."""
        self.ended.cancel()
        self._transport.close()


async def carry(
    port: int, talks: Iterable[Talk], num_connections: int, stagger_s: float = 0.0
) -> Timings:
    """Run all talks over `num_connections` connections, the last of which begins after `stagger_s`.

    LoadError if a call goes wrong.
    """
    timings, shared = Timings([], []), iter(talks)
    loop = asyncio.get_running_loop()
    connections = []
    for _ in range(num_connections):
        _, connection = await loop.create_connection(
            lambda: Connection(shared, timings), "127.0.0.1", port
        )
        connections.append(connection)
    began_s = perf_counter()
    try:
        for at, connection in enumerate(connections):
            loop.call_later(stagger_s * at / num_connections, connection.begin)
        async with asyncio.timeout(PATIENCE_S):
            await asyncio.gather(*[connection.ended for connection in connections])
        timings.wall_s = perf_counter() - began_s
    finally:
        for connection in connections:
            connection.close()
    return timings


def percentile(values: Iterable[float], percent: float) -> float:
    """Return the nearest value; 0 for an empty sequence."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))] if ordered else 0.0


def _header(head: bytes, name: bytes) -> bytes:
    at = head.lower().find(name)
    return head[at + len(name) :].partition(b"\r\n")[0].strip() if at >= 0 else b""
