"""Units that show images, as they were read before, whatever they followed.

An agent that drops its oldest screenshots edits its history at each turn, and all that stands
behind the edit is new to the trie of history.py, though the session holds it already. Owns, of each
such unit, the messages that it was read as, in the common shape. Invariants: what is told again is
what reading the unit again would tell (its images are those that are held, so none is decoded); no
byte is held here that a spot does not hold. Driven by history.py and walk.py.
"""

from collections.abc import Sequence

from rollmesh.runtime.blobs import Blob
from rollmesh.runtime.chat import ChatMessage, read_held
from rollmesh.runtime.images import ImageRef
from rollmesh.runtime.turns import ReadUnit

MIN_UNIT_BYTES = 4096
"""Shorter ones are read sooner than they are looked up."""
MAX_UNITS = 1024
"""The newest: agents that move a cache marker spell a unit anew at each turn."""

_Key = tuple[ReadUnit, int]
"""Who reads, and the hash of the unit."""


class Readings:
    """One per session; `images` are those that it holds, by their digests."""

    __slots__ = ("_images", "_said")

    def __init__(self, images: dict[str, ImageRef]) -> None:
        self._images = images
        self._said: dict[_Key, Sequence[bytes | Blob]] = {}

    def __len__(self) -> int:
        """Units that are known."""
        return len(self._said)

    def find(self, read: ReadUnit, unit: bytes) -> list[ChatMessage] | None:
        """The messages of `unit`; None where it has to be read."""
        if len(unit) < MIN_UNIT_BYTES or not self._said:
            return None
        said = self._said.get((read, hash(unit)))
        if said is None:
            return None
        raws = [each if isinstance(each, bytes) else each.read() for each in said]
        return [read_held(raw, self._images) for raw in raws]

    def keep(
        self,
        read: ReadUnit,
        unit_key: int,
        messages: Sequence[ChatMessage],
        said: Sequence[bytes | Blob],
    ) -> None:
        """The unit of this hash was read as `messages`, which are held as `said`."""
        shows = any(each.images() for each in messages)
        # An assistant's message may be held as one that says less or more: see meanings().
        if shows and all(each.role != "assistant" for each in messages):
            self._said[read, unit_key] = said
            if len(self._said) > MAX_UNITS:
                del self._said[next(iter(self._said))]
