"""Arrays of messages known by the hash of their beginning.

A growing history sends the same bytes in every turn. Owns, for the newest few lines of a session,
where an array seen before ended and which spot of the history that was; an array that begins with
it is split behind it only. A stretch is hashed in segments, one per turn, so that a turn costs one
scan of the request and one hash of what is new. Invariant: bounded, and no message is kept here.
Driven by history.py.
"""

from collections.abc import Iterator

import msgspec

from rollmesh.core.errors import SessionError
from rollmesh.runtime.spot import Spot

MAX_STRETCHES = 8
_MAX_SEGMENTS = 16

_split = msgspec.json.Decoder(list[msgspec.Raw]).decode


class Stretch(msgspec.Struct, frozen=True):
    """Units in a row, without the bracket that closes them."""

    start: Spot
    """What they follow."""
    end: Spot
    """Their last message."""
    segments: tuple[tuple[int, int], ...]
    """(offset of its end, hash of its bytes); the first begins at 0."""
    num_units: int
    """Of the request up to here."""

    @property
    def num_bytes(self) -> int:
        return self.segments[-1][0]

    def begins(self, array: bytes) -> bool:
        """Whether `array` goes on from these very bytes."""
        if len(array) <= self.num_bytes or array[self.num_bytes] not in b",]":
            return False
        view, at = memoryview(array), 0
        for end, digest in self.segments:
            if hash(view[at:end]) != digest:
                return False
            at = end
        return True

    def rest(self, array: bytes) -> Iterator[bytes]:
        """The units of `array` behind these."""
        behind = self.num_bytes + 1
        if array[self.num_bytes] == ord("]"):
            return iter(())
        return split_array(b"".join((b"[", memoryview(array)[behind:])))


class Stretches:
    """The newest of one session."""

    __slots__ = ("_newest_last", "_num_strangers")

    def __init__(self) -> None:
        self._newest_last: tuple[Stretch, ...] = ()
        self._num_strangers = 0
        """Arrays in a row that began like none before."""

    @property
    def newest(self) -> Stretch | None:
        return self._newest_last[-1] if self._newest_last else None

    def begin(
        self, start: Spot, segments: tuple[tuple[int, int], ...], end: Spot, num_units: int
    ) -> None:
        """Know one stretch, of which another session has learned."""
        self._newest_last = (Stretch(start, end, segments, num_units),)

    def find(self, start: Spot, array: bytes) -> Stretch | None:
        """The one that `array`, standing behind `start`, goes on from."""
        for stretch in reversed(self._newest_last):
            if stretch.start is start and stretch.begins(array):
                return stretch
        return None

    def add(self, known: Stretch | None, start: Spot, array: bytes, end: Spot, num: int) -> None:
        """Remember all of `array`, `num` units; it begins with `known` and takes its place.

        Of an agent that edits its history at each turn only some arrays are: to hash them all would
        be in vain.
        """
        self._num_strangers = 0 if known else self._num_strangers + 1
        if self._num_strangers > 2 * MAX_STRETCHES and self._num_strangers % MAX_STRETCHES:
            return
        stop = len(array) - 1
        segments = known.segments if known else ()
        if known and known.num_bytes == stop:
            return
        if array[stop - 1 :] != b"}]":
            return  # white space before the bracket: the next array will differ there
        at = known.num_bytes if known and len(segments) < _MAX_SEGMENTS else 0
        segment = (stop, hash(memoryview(array)[at:stop]))
        segments = (*segments, segment) if at else (segment,)
        kept = [each for each in self._newest_last if each is not known]
        self._newest_last = (*kept[1 - MAX_STRETCHES :], Stretch(start, end, segments, num))


def split_array(array: bytes) -> Iterator[bytes]:
    """The elements of a JSON array, unopened, each copied in its turn; SessionError 400 if it is
    none."""
    try:
        return map(bytes, _split(array))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise SessionError(400, "invalid_messages", f"messages: {error}") from None
