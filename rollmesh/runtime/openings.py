"""How the sessions of a group begin: one first chat, matched, rendered and tokenised once.

The siblings of a group send the same first request, each in a session of its own. Owns what the
first of them learned of it, by the request's very bytes; the others begin with the same messages
and tokens without looking. Invariants: an opening is what a session that had to find out for itself
would hold after that request, and no more; it never changes; they are bounded in number and size,
and those that were not used for longest go first. One per process; driven by session.py.
"""

from collections import OrderedDict
from collections.abc import Hashable, Sequence

import msgspec

from rollmesh.runtime.branches import RootKind
from rollmesh.runtime.images import ImageRef
from rollmesh.runtime.turns import Turn

MAX_OPENINGS = 256
MAX_OPENING_BYTES = 64 * 1024
"""A larger one is found out by each session."""
_BYTES_PER_TOKEN = 12
"""Four as it lies in the graph, the rest as JSON."""


class Link(msgspec.Struct, frozen=True, gc=False):
    """One way down a line: from a place on it, by `key`, to another; 0 is the root."""

    start: int
    key: int
    end: int


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


class Openings:
    """The newest, by the requests that they begin with."""

    def __init__(self) -> None:
        self._newest_last: OrderedDict[Hashable, Opening] = OrderedDict()

    def find(self, turn: Turn) -> Opening | None:
        """What a new session holds after `turn`, if one before it has told."""
        key = _key(turn)
        found = self._newest_last.get(key)
        if found is not None:
            self._newest_last.move_to_end(key)
        return found

    def keep(self, turn: Turn, opening: Opening) -> None:
        """Remember what `turn` opened, unless it is large."""
        if _size(turn, opening) > MAX_OPENING_BYTES:
            return
        self._newest_last[_key(turn)] = opening
        if len(self._newest_last) > MAX_OPENINGS:
            self._newest_last.popitem(last=False)


def _key(turn: Turn) -> Hashable:
    return (turn.messages_raw, turn.tools, turn.read, *turn.messages)


def _size(turn: Turn, opening: Opening) -> int:
    asked = len(turn.messages_raw) + len(turn.tools) + sum(map(len, turn.messages))
    held = opening.line.num_bytes + _BYTES_PER_TOKEN * len(opening.token_ids)
    return asked + held
