"""JSON in pieces, whose long parts are blobs shared by all sessions that contain them.

- A piece is bytes, or a Blob for each run of MIN_BLOB_BYTES without a quote, such as the base64 of
  an image or a long text.
- Joined pieces are exactly the bytes that were cut.
"""

import sys
from collections.abc import Iterator, Sequence

from rollmesh.runtime.blobs import Blob, hold

MIN_BLOB_BYTES = 16 * 1024
"""Shorter runs stay bytes; the blob table has a cost per entry."""

Piece = bytes | Blob


def cut(text: bytes, start: int = 0, stop: int = sys.maxsize) -> tuple[Piece, ...]:
    """Return the pieces of `text[start:stop]`."""
    stop = min(stop, len(text))
    if stop - start < MIN_BLOB_BYTES:
        return (text[start:stop],)
    pieces: list[Piece] = []
    for first, last in _long_stretches(text, start, stop):
        pieces += [held(text[start:first]), hold(text[first:last])]
        start = last
    return (*pieces, held(text[start:stop]))


def held(text: bytes) -> Piece:
    """Return `text` as one piece."""
    return hold(text) if len(text) >= MIN_BLOB_BYTES else text


def part_of(piece: Piece, start: int, stop: int) -> bytes | memoryview:
    """Return `piece[start:stop]`, without a copy unless it must be read from disk."""
    return memoryview(piece)[start:stop] if isinstance(piece, bytes) else piece.part(start, stop)


def joined(pieces: Sequence[Piece]) -> bytes:
    """Join pieces; a single short piece is returned without a copy."""
    if len(pieces) == 1 and isinstance(pieces[0], bytes):
        return pieces[0]
    return b"".join([p if isinstance(p, bytes) else p.read() for p in pieces])


def equals(pieces: Sequence[Piece], raw: bytes | memoryview) -> bool:
    """Whether the joined pieces equal `raw`, without a copy."""
    if isinstance(pieces[0], bytes) and len(pieces) == 1:
        return pieces[0] == raw
    at = 0
    for piece in pieces:
        own = piece if isinstance(piece, bytes) else piece.read()
        if not own.startswith(raw[at : at + len(own)]):
            return False
        at += len(own)
    return at == len(raw)


def _long_stretches(text: bytes, at: int, stop: int) -> Iterator[tuple[int, int]]:
    """Yield the start and end of each long run without a quote."""
    while at < stop:
        end = text.find(b'"', at, stop)
        end = stop if end < 0 else end
        if end - at >= MIN_BLOB_BYTES:
            yield at, end
        at = end + 1
