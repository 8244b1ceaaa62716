"""The newest bodies of a session, by which the next one is known while it is still coming in.

Agents send their whole history with each call, so a body mostly begins as an earlier one did. Owns
that comparison: what of a new body is the same is let go as it arrives, and only the rest is kept.
Invariants: a tip's pieces joined are the body that it stands for, from its first byte to the end of
its history's last message, and their long ones are blobs that the messages hold anyway; what was
said of a tip's bytes stays true while the tip grows. Driven by threads.py and by edge.py.
"""

import io
from bisect import bisect, bisect_left
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rollmesh.core.errors import ContentLost
from rollmesh.engine.pieces import size_of
from rollmesh.serve.interception.pieces import Piece, joined, part_of

if TYPE_CHECKING:
    from rollmesh.serve.interception.relay.threads import Spot

MAX_RUN_BYTES = 64 * 1024
"""Text is gathered up to here, so that short histories are one piece, and long ones not copied."""


class Tip:
    """A body up to the end of its history's last message."""

    __slots__ = (
        "_pieces", "_starts", "_stops", "key", "num_bytes", "num_text_bytes", "opening", "spots",
    )  # fmt: skip

    def __init__(self, opening: bytes, key: str) -> None:
        """`opening` is all before the history's array, `key` the name that the array has."""
        self.opening = opening
        self.key = key
        self.num_bytes = 0
        self.num_text_bytes = 0
        """Of the pieces that are no blobs, held here beside the messages."""
        self.spots: list[Spot] = []
        """The history's messages."""
        self._stops: list[int] = []
        """Where each of them ends."""
        self._pieces: list[Piece] = []
        self._starts: list[int] = []

    def grow(self, text: bytes, spans: Sequence[tuple[int, int]], spots: Sequence["Spot"]) -> None:
        """By `text`, up to the end of the last of its messages, which are `spots`."""
        begun = 0
        for (start, stop), spot in zip(spans, spots, strict=True):
            if len(spot.pieces) > 1 or not isinstance(spot.pieces[0], bytes):
                self._add(text[begun:start])
                for piece in spot.pieces:
                    self._add(piece)
                begun = stop
            self.spots.append(spot)
            self._stops.append(self.num_bytes + stop - begun)
        self._add(text[begun : spans[-1][1]])

    def ends_before(self, stop: int) -> int:
        """How many messages end at or before this byte."""
        return bisect(self._stops, stop)

    def stop_of(self, num_messages: int) -> int:
        """Where so many messages end."""
        return self._stops[num_messages - 1]

    def up_to(self, num_messages: int) -> "Tip":
        """A tip of its own that ends with so many of these messages."""
        tip = Tip(self.opening, self.key)
        tip.spots, tip._stops = self.spots[:num_messages], self._stops[:num_messages]
        for piece in self.cut(0, self.stop_of(num_messages)):
            tip._add(piece)
        return tip

    def agrees(self, at: int, data: bytes) -> bool:
        """Whether `data` is what stands here from byte `at` on, as far as both go; not where that
        cannot be read."""
        n, done = bisect(self._starts, at) - 1, 0
        while done < len(data) and at + done < self.num_bytes:
            start = at + done - self._starts[n]
            stop = min(size_of(self._pieces[n]), start + len(data) - done)
            try:
                is_same = data.startswith(part_of(self._pieces[n], start, stop), done)
            except ContentLost:  # whoever reads a connection cannot be told; who asks for it is
                is_same = False
            if not is_same:
                return False
            done += stop - start
            n += 1
        return True

    def cut(self, start: int, stop: int) -> list[Piece]:
        """The bytes from `start` to `stop`; whole blobs stay blobs."""
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
        """All of them, as they are now."""
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


class Following:
    """One body on its way in: how far it is a tip's, and the rest."""

    __slots__ = ("_first", "_more", "_tips", "num_matched", "tip", "whole")

    def __init__(self, tips: Sequence[Tip]) -> None:
        """`tips` are the oldest first."""
        self.tip: Tip | None = None
        self.num_matched = 0
        """So many bytes stand in `tip`."""
        self.whole: bytes | None = None
        """The body, where it came in one piece."""
        self._tips: Sequence[Tip] | None = tips
        self._first = b""
        """Of the rest."""
        self._more: io.BytesIO | None = None
        """All of the rest, where it came in several pieces: there is never a second copy of it."""

    def append(self, data: bytes) -> None:
        """More of the body."""
        if self._tips is not None:
            self.whole, self.tip, self._tips = data, _nearest(self._tips, data), None
            tip = self.tip
        else:
            self.whole = None
            tip = None if self._first or self._more else self.tip
            if tip is not None and not tip.agrees(self.num_matched, data):
                tip = None
        num_same = min(len(data), tip.num_bytes - self.num_matched) if tip else 0
        self.num_matched += num_same
        if num_same < len(data):
            self._add(data[num_same:])

    @property
    def rest(self) -> bytes:
        """Of the body, behind what stands in `tip`."""
        return self._first if self._more is None else self._more.getvalue()

    def pieces(self) -> list[Piece]:
        """The whole body."""
        start = self.tip.cut(0, self.num_matched) if self.tip else []
        return [*start, self.rest]

    def since(self, stop: int) -> bytes:
        """The body from this byte of the tip on."""
        if stop == self.num_matched or self.tip is None:
            return self.rest
        return joined([*self.tip.cut(stop, self.num_matched), self.rest])

    def _add(self, data: bytes) -> None:
        if not self._first and self._more is None:
            self._first = data
            return
        if self._more is None:
            self._more = io.BytesIO()
            self._more.write(self._first)
            self._first = b""
        self._more.write(data)


def _nearest(tips: Sequence[Tip], data: bytes) -> Tip | None:
    """Which a body that begins like that goes on from furthest; of several, the newest."""
    agreeing = [tip for tip in reversed(tips) if tip.agrees(0, data)]
    if len(agreeing) < 2:
        return agreeing[0] if agreeing else None
    return max(agreeing, key=lambda tip: min(tip.num_bytes, len(data)))
