"""Hands page events to the browsers that listen.

Owns a bounded queue per listener. Invariant: a slow browser costs a fixed amount of memory: when
its queue is full, all that waits is dropped and it is given a fresh state. Driven by the polling
task (`publish`, `close`) and by one request handler per browser (`subscribe`).
"""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import msgspec

from rollmesh.dashboard.reader import PageEvent

MAX_WAITING = 64

Frames = asyncio.Queue[bytes | None]
"""Server-sent events, ready to write; None ends the stream."""


class Feed:
    """The listeners of one page."""

    def __init__(self, state: Callable[[], PageEvent]) -> None:
        """`state` makes the event that a new or outrun listener starts from."""
        self._state = state
        self._listeners: set[Frames] = set()
        self._is_closed = False

    @contextmanager
    def subscribe(self) -> Iterator[Frames]:
        """A queue that starts with the state and then gets what is published."""
        frames: Frames = asyncio.Queue(MAX_WAITING)
        frames.put_nowait(None if self._is_closed else frame(self._state()))
        self._listeners.add(frames)
        try:
            yield frames
        finally:
            self._listeners.discard(frames)

    def publish(self, events: list[PageEvent]) -> None:
        """Queue `events`, which happened since the last call, for every listener."""
        data = [frame(event) for event in events] if self._listeners else []
        for frames in self._listeners:
            if frames.qsize() + len(data) > MAX_WAITING:
                drain(frames)
                frames.put_nowait(frame(self._state()))
            else:
                for each in data:
                    frames.put_nowait(each)

    def close(self) -> None:
        """End every stream."""
        self._is_closed = True
        for frames in self._listeners:
            drain(frames)
            frames.put_nowait(None)


def drain(frames: Frames) -> None:
    """Drop all that waits."""
    while not frames.empty():
        frames.get_nowait()


def frame(event: PageEvent) -> bytes:
    """A server-sent event (WHATWG HTML, 9.2.5: event stream format); JSON has no raw newlines."""
    return b"event: %s\ndata: %s\n\n" % (event.name.encode(), msgspec.json.encode(event.data))
