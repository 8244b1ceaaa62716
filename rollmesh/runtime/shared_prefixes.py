"""First prompts that the sessions of a group share: matched, rendered and tokenised once.

- A session that begins with the same request bytes starts from the stored messages and tokens.
- A shared prefix never changes. The number and the bytes of all are bounded; the least recently
  used is dropped first. It holds no image, and is lost with the last session that shows one of its
  images.
"""

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from weakref import WeakValueDictionary

import msgspec

from rollmesh.runtime.chat import Turn
from rollmesh.runtime.images import ImageRef
from rollmesh.runtime.token_graph import RootKind

MAX_OPENINGS = 256
MAX_OPENING_BYTES = 64 * 1024
"""A larger one is found out by each session."""
MAX_BYTES = 4 * 2**20
"""Of all of them."""
_BYTES_PER_TOKEN = 12
"""Four as it lies in the graph, the rest as JSON."""


class PrefixMessage(msgspec.Struct, frozen=True, gc=False):
    """One way down a line: from a place on it, by `key`, to another; 0 is the root."""

    start: int
    key: int
    end: int


UnitEnd = tuple[int, int]
"""A unit's key (SAME_BYTES if it is one message with the same bytes), and the number of messages up
to its end."""
SAME_BYTES = 0


class PrefixTokens(msgspec.Struct, frozen=True):
    """A history without a branch, as history.py holds it."""

    tools_key: int
    raws: tuple[bytes, ...]
    """The messages in the common shape."""
    links: tuple[PrefixMessage, ...]
    segments: tuple[tuple[int, int], ...]
    """Of the array that the messages came in, see message_trie.py; empty for none."""
    num_units: int
    """In that array."""
    images: dict[str, ImageRef]
    ends: tuple[UnitEnd, ...] = ()
    """Of the units that the messages came in."""

    @property
    def num_bytes(self) -> int:
        """Of the messages."""
        return sum(map(len, self.raws))


class SharedPrefix(msgspec.Struct, frozen=True):
    """A first chat."""

    line: PrefixTokens
    kind: RootKind
    token_ids: Sequence[int]
    prompt_json: bytes
    """The same as JSON, without brackets."""
    image_digests: tuple[str, ...]


class _Kept(msgspec.Struct, frozen=True):
    """An opening that shows images has none of them in its line."""

    shared_prefix: SharedPrefix
    digests: tuple[str, ...]
    images: WeakValueDictionary[str, ImageRef]
    num_bytes: int


class SharedPrefixes:
    """The newest, by the requests that they begin with."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self._newest_last: OrderedDict[Hashable, _Kept] = OrderedDict()

    @property
    def num_openings(self) -> int:
        return len(self._newest_last)

    def find(self, turn: Turn) -> SharedPrefix | None:
        """What a new session holds after `turn`, if one before it has told."""
        key = _key(turn)
        kept = self._newest_last.get(key)
        if kept is None:
            return None
        self._newest_last.move_to_end(key)
        if not kept.digests:
            return kept.shared_prefix
        images = dict(kept.images)
        if len(images) < len(kept.digests):
            self._drop(key)
            return None
        return _with_images(kept.shared_prefix, {each: images[each] for each in kept.digests})

    def keep(self, turn: Turn, shared_prefix: SharedPrefix) -> None:
        """Remember what `turn` opened, unless it is large."""
        num_bytes = _size(turn, shared_prefix)
        if num_bytes > MAX_OPENING_BYTES:
            return
        key, images = _key(turn), shared_prefix.line.images
        self._drop(key)
        without = _with_images(shared_prefix, {}) if images else shared_prefix
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


def _with_images(shared_prefix: SharedPrefix, images: dict[str, ImageRef]) -> SharedPrefix:
    line = msgspec.structs.replace(shared_prefix.line, images=images)
    return msgspec.structs.replace(shared_prefix, line=line)


def _key(turn: Turn) -> Hashable:
    return (turn.messages_raw, turn.tools, turn.read, *turn.messages)


def _size(turn: Turn, shared_prefix: SharedPrefix) -> int:
    asked = len(turn.messages_raw) + len(turn.tools) + sum(map(len, turn.messages))
    held = shared_prefix.line.num_bytes + _BYTES_PER_TOKEN * len(shared_prefix.token_ids)
    return asked + held
