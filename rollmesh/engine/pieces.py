"""What the body of a request is made of: bytes that are there, and bytes that are yet to be read.

Invariant: nothing here is joined or kept; of an unread piece no more is read than is written next.
Driven by connection.py.
"""

from collections.abc import Iterator, Sequence
from typing import Protocol

PART_BYTES = 2**18
"""So much of an unread piece is read at once, on the loop; runtime/blobs.py has the figures."""


class Unread(Protocol):
    """Bytes that lie somewhere, perhaps on disk."""

    @property
    def num_bytes(self) -> int:
        """All of them."""

    def part(self, start: int, stop: int) -> "Ready":
        """A part of them; ContentLost if they cannot be read."""


Ready = bytes | memoryview
"""A view lasts until the call has ended."""
Piece = Ready | Unread


def ready_head(body: Sequence[Piece]) -> list[Ready]:
    """The pieces before the first that is unread: mostly all of them."""
    head: list[Ready] = []
    for piece in body:
        if not isinstance(piece, (bytes, memoryview)):
            break
        head.append(piece)
    return head


def size_of(piece: Piece) -> int:
    """Its bytes."""
    return len(piece) if isinstance(piece, (bytes, memoryview)) else piece.num_bytes


def parts(body: Sequence[Piece]) -> Iterator[Ready]:
    """The body as it is written, part by part; ContentLost where a piece cannot be read."""
    for piece in body:
        if isinstance(piece, (bytes, memoryview)):
            yield piece
        else:
            for start in range(0, piece.num_bytes, PART_BYTES):
                yield piece.part(start, start + PART_BYTES)
