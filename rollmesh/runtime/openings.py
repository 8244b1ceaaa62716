"""How the sessions of a group begin: one first chat, matched, rendered and tokenised once.

The siblings of a group send the same first request, each in a session of its own. Owns what the
first of them learned of it, by the request's very bytes; the others begin with the same messages
and tokens without looking. Invariants: an opening is what a session that had to find out for itself
would hold after that request, and no more; it never changes; they are bounded in number and bytes,
and those that were not used for longest go first; images are not held here, so that an opening is
lost with the last session that shows them. One per process; driven by session.py.
"""

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from weakref import WeakValueDictionary

import msgspec

from rollmesh.runtime.branches import RootKind
from rollmesh.runtime.images import ImageRef
from rollmesh.runtime.turns import Turn

MAX_OPENINGS = 256
MAX_OPENING_BYTES = 64 * 1024
"""A larger one is found out by each session."""
MAX_BYTES = 4 * 2**20
"""Of all of them."""
_BYTES_PER_TOKEN = 12
"""Four as it lies in the graph, the rest as JSON."""


class Link(msgspec.Struct, frozen=True, gc=False):
    """One way down a line: from a place on it, by `key`, to another; 0 is the root."""

    start: int
    key: int
    end: int


UnitEnd = tuple[int, int]
"""A unit's key (keys.py), SAME_BYTES where it is its one message as that is held, and how many of
the messages end with it."""
SAME_BYTES = 0


class Line(msgspec.Struct, frozen=True):
    """A history without a branch, as history.py holds it."""

    tools_key: int
    raws: tuple[bytes, ...]
    """The messages in the common shape."""
    links: tuple[Link, ...]
    segments: tuple[tuple[int, int], ...]
    """Of the array that the messages came in, see stretches.py; empty for none."""
    num_units: int
    """In that array."""
    images: dict[str, ImageRef]
    ends: tuple[UnitEnd, ...] = ()
    """Of the units that the messages came in."""

    @property
    def num_bytes(self) -> int:
        """Of the messages."""
        return sum(map(len, self.raws))


class Opening(msgspec.Struct, frozen=True):
    """A first chat."""

    line: Line
    kind: RootKind
    token_ids: Sequence[int]
    prompt_json: bytes
    """The same as JSON, without brackets."""
    image_digests: tuple[str, ...]


class _Kept(msgspec.Struct, frozen=True):
    """An opening that shows images has none of them in its line."""

    opening: Opening
    digests: tuple[str, ...]
    images: WeakValueDictionary[str, ImageRef]
    num_bytes: int


class Openings:
    """The newest, by the requests that they begin with."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self._newest_last: OrderedDict[Hashable, _Kept] = OrderedDict()

    @property
    def num_openings(self) -> int:
        return len(self._newest_last)

    def find(self, turn: Turn) -> Opening | None:
        """What a new session holds after `turn`, if one before it has told."""
        key = _key(turn)
        kept = self._newest_last.get(key)
        if kept is None:
            return None
        self._newest_last.move_to_end(key)
        if not kept.digests:
            return kept.opening
        images = dict(kept.images)
        if len(images) < len(kept.digests):
            self._drop(key)
            return None
        return _with_images(kept.opening, {each: images[each] for each in kept.digests})

    def keep(self, turn: Turn, opening: Opening) -> None:
        """Remember what `turn` opened, unless it is large."""
        num_bytes = _size(turn, opening)
        if num_bytes > MAX_OPENING_BYTES:
            return
        key, images = _key(turn), opening.line.images
        self._drop(key)
        without = _with_images(opening, {}) if images else opening
        self._newest_last[key] = _Kept(
            without, tuple(images), WeakValueDictionary(images), num_bytes
        )
        self.num_bytes += num_bytes
        while len(self._newest_last) > MAX_OPENINGS or self.num_bytes > MAX_BYTES:
            self._drop(next(iter(self._newest_last)))

    def _drop(self, key: Hashable) -> None:
        kept = self._newest_last.pop(key, None)
        if kept is not None:
            self.num_bytes -= kept.num_bytes


def _with_images(opening: Opening, images: dict[str, ImageRef]) -> Opening:
    line = msgspec.structs.replace(opening.line, images=images)
    return msgspec.structs.replace(opening, line=line)


def _key(turn: Turn) -> Hashable:
    return (turn.messages_raw, turn.tools, turn.read, *turn.messages)


def _size(turn: Turn, opening: Opening) -> int:
    asked = len(turn.messages_raw) + len(turn.tools) + sum(map(len, turn.messages))
    held = opening.line.num_bytes + _BYTES_PER_TOKEN * len(opening.token_ids)
    return asked + held
