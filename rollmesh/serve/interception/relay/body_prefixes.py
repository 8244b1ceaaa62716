"""Match a body, while it is received, with the beginnings of a session's earlier bodies.

Agents send their whole history with each call, so most bodies begin like an earlier one. The bytes
that match are dropped as they arrive; only the rest is kept.

- The joined pieces of a BodyPrefix are a body from its first byte to the end of its history's last
  message. Its long pieces are the blobs of the messages.
- A prefix only grows: bytes that matched once keep matching.
"""

import io
from bisect import bisect, bisect_left
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rollmesh.core.errors import ContentLost
from rollmesh.engine.connection import size_of
from rollmesh.serve.interception.pieces import Piece, joined, part_of

if TYPE_CHECKING:
    from rollmesh.serve.interception.relay.history import HistoryNode

MAX_RUN_BYTES = 64 * 1024
"""Text is joined up to this size: short histories are one piece, long ones are not copied."""


class BodyPrefix:
    """A body up to the end of its history's last message."""

    __slots__ = (
        "_pieces", "_starts", "_stops", "head", "key", "nodes", "num_bytes", "num_text_bytes",
    )  # fmt: skip

    def __init__(self, head: bytes, key: str) -> None:
        """`head` are the bytes before the history's array, `key` is the key of that array."""
        self.head = head
        self.key = key
        self.num_bytes = 0
        self.num_text_bytes = 0
        """Bytes of the pieces that are not blobs."""
        self.nodes: list[HistoryNode] = []
        """The history's messages."""
        self._stops: list[int] = []
        """The end of each message."""
        self._pieces: list[Piece] = []
        self._starts: list[int] = []

    def grow(
        self, text: bytes, spans: Sequence[tuple[int, int]], nodes: Sequence["HistoryNode"]
    ) -> None:
        """Append `text` up to the end of its last message; `spans` and `nodes` are its messages."""
        num_done = 0
        for (start, stop), node in zip(spans, nodes, strict=True):
            if len(node.pieces) > 1 or not isinstance(node.pieces[0], bytes):
                self._add(text[num_done:start])
                for piece in node.pieces:
                    self._add(piece)
                num_done = stop
            self.nodes.append(node)
            self._stops.append(self.num_bytes + stop - num_done)
        self._add(text[num_done : spans[-1][1]])

    def ends_before(self, stop: int) -> int:
        """Number of messages that end at or before this byte."""
        return bisect(self._stops, stop)

    def stop_of(self, num_messages: int) -> int:
        """The end of the first `num_messages` messages."""
        return self._stops[num_messages - 1]

    def up_to(self, num_messages: int) -> "BodyPrefix":
        """A new prefix that ends after the first `num_messages` messages."""
        prefix = BodyPrefix(self.head, self.key)
        prefix.nodes, prefix._stops = self.nodes[:num_messages], self._stops[:num_messages]
        for piece in self.cut(0, self.stop_of(num_messages)):
            prefix._add(piece)
        return prefix

    def agrees(self, at: int, data: bytes) -> bool:
        """Whether `data` equals the bytes from `at` on, up to the shorter end; False if a blob is
        unreadable."""
        n, done = bisect(self._starts, at) - 1, 0
        while done < len(data) and at + done < self.num_bytes:
            start = at + done - self._starts[n]
            stop = min(size_of(self._pieces[n]), start + len(data) - done)
            try:
                is_same = data.startswith(part_of(self._pieces[n], start, stop), done)
            except ContentLost:  # reported when the content itself is requested
                is_same = False
            if not is_same:
                return False
            done += stop - start
            n += 1
        return True

    def cut(self, start: int, stop: int) -> list[Piece]:
        """The bytes from `start` to `stop` as pieces; whole blobs stay blobs."""
        found: list[Piece] = []
        first = max(0, bisect(self._starts, start) - 1)
        for n in range(first, bisect_left(self._starts, stop)):
            piece, at = self._pieces[n], self._starts[n]
            if start <= at and at + size_of(piece) <= stop:
                found.append(piece)
            else:
                found.append(bytes(part_of(piece, max(0, start - at), stop - at)))
        return found

    @property
    def pieces(self) -> list[Piece]:
        """A copy of the current pieces."""
        return self._pieces.copy()

    def _add(self, piece: Piece) -> None:
        size = size_of(piece)
        last = self._pieces[-1] if self._pieces else None
        if isinstance(piece, bytes):
            self.num_text_bytes += size
        if (
            isinstance(piece, bytes)
            and isinstance(last, bytes)
            and len(last) + size <= MAX_RUN_BYTES
        ):
            self._pieces[-1] = last + piece
        else:
            self._starts.append(self.num_bytes)
            self._pieces.append(piece)
        self.num_bytes += size


class BodyMatcher:
    """A body that is being received: the prefix that it begins with, and the rest."""

    __slots__ = ("_first", "_more", "_prefixes", "num_matched", "prefix", "whole")

    def __init__(self, prefixes: Sequence[BodyPrefix]) -> None:
        """`prefixes` are the oldest first."""
        self.prefix: BodyPrefix | None = None
        self.num_matched = 0
        """Number of bytes that equal those of `prefix`."""
        self.whole: bytes | None = None
        """The body, if it arrived in one piece."""
        self._prefixes: Sequence[BodyPrefix] | None = prefixes
        self._first = b""
        """The rest, while it is one piece."""
        self._more: io.BytesIO | None = None
        """The rest, if it arrived in several pieces, so that it is stored once."""

    def append(self, data: bytes) -> None:
        """Add received bytes."""
        if self._prefixes is not None:
            self.whole, self.prefix, self._prefixes = data, _nearest(self._prefixes, data), None
            prefix = self.prefix
        else:
            self.whole = None
            prefix = None if self._first or self._more else self.prefix
            if prefix is not None and not prefix.agrees(self.num_matched, data):
                prefix = None
        num_same = min(len(data), prefix.num_bytes - self.num_matched) if prefix else 0
        self.num_matched += num_same
        if num_same < len(data):
            self._add(data[num_same:])

    @property
    def rest(self) -> bytes:
        """The bytes after those that equal `prefix`."""
        return self._first if self._more is None else self._more.getvalue()

    def pieces(self) -> list[Piece]:
        """The pieces of the whole body."""
        start = self.prefix.cut(0, self.num_matched) if self.prefix else []
        return [*start, self.rest]

    def since(self, stop: int) -> bytes:
        """The body from this byte of the prefix on."""
        if stop == self.num_matched or self.prefix is None:
            return self.rest
        return joined([*self.prefix.cut(stop, self.num_matched), self.rest])

    def _add(self, data: bytes) -> None:
        if not self._first and self._more is None:
            self._first = data
            return
        if self._more is None:
            self._more = io.BytesIO()
            self._more.write(self._first)
            self._first = b""
        self._more.write(data)


def _nearest(prefixes: Sequence[BodyPrefix], data: bytes) -> BodyPrefix | None:
    """The prefix with most bytes in common with a body that begins with `data`; of equals, the
    newest."""
    agreeing = [prefix for prefix in reversed(prefixes) if prefix.agrees(0, data)]
    if len(agreeing) < 2:
        return agreeing[0] if agreeing else None
    return max(agreeing, key=lambda prefix: min(prefix.num_bytes, len(data)))
