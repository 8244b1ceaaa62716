"""First prompts that the sessions of a group share: matched, rendered and tokenised once.

- A session that begins with the same request bytes starts from the stored messages and tokens.
- A shared prefix never changes. The number and the bytes of all are bounded; the least recently
  used is dropped first. It has no image, and is dropped with the last session that shows one of
  its images.
"""

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from weakref import WeakValueDictionary

import msgspec

from rollmesh.runtime.chat import Turn
from rollmesh.runtime.conversation.token_graph import RootKind
from rollmesh.runtime.images import ImageRef

MAX_PREFIXES = 256
MAX_PREFIX_BYTES = 64 * 1024
"""Larger prefixes are not shared."""
MAX_BYTES = 4 * 2**20
"""Total bytes of all shared prefixes."""
_BYTES_PER_TOKEN = 12
"""Four in the graph, the rest as JSON."""


class PrefixMessage(msgspec.Struct, frozen=True, gc=False):
    """A key that leads from one message of a prefix to a later one; 0 is the root."""

    start: int
    key: int
    end: int


UnitEnd = tuple[int, int]
"""(the unit's key, or SAME_BYTES if it is one message with the same bytes; the number of messages
up to its end)"""
SAME_BYTES = 0


class PrefixMessages(msgspec.Struct, frozen=True):
    """The messages of a prefix, for history.py."""

    tools_key: int
    raws: tuple[bytes, ...]
    """The messages in the common shape."""
    links: tuple[PrefixMessage, ...]
    segments: tuple[tuple[int, int], ...]
    """Segments of the array with the messages (message_trie.py); empty for none."""
    num_units: int
    """Number of units in that array."""
    images: dict[str, ImageRef]
    ends: tuple[UnitEnd, ...] = ()
    """Ends of the units with the messages."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the messages."""
        return sum(map(len, self.raws))


class SharedPrefix(msgspec.Struct, frozen=True):
    """The first prompt of a chat."""

    line: PrefixMessages
    kind: RootKind
    token_ids: Sequence[int]
    prompt_json: bytes
    """These ids as JSON, without brackets."""
    image_digests: tuple[str, ...]


class _Kept(msgspec.Struct, frozen=True):
    """A stored prefix, without its images."""

    shared_prefix: SharedPrefix
    digests: tuple[str, ...]
    images: WeakValueDictionary[str, ImageRef]
    num_bytes: int


class SharedPrefixes:
    """The most recently used shared prefixes, by their first requests."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self._newest_last: OrderedDict[Hashable, _Kept] = OrderedDict()

    @property
    def num_openings(self) -> int:
        return len(self._newest_last)

    def find(self, turn: Turn) -> SharedPrefix | None:
        """The state of a new session after `turn`, if an earlier session has stored it."""
        key = _key(turn)
        entry = self._newest_last.get(key)
        if entry is None:
            return None
        self._newest_last.move_to_end(key)
        if not entry.digests:
            return entry.shared_prefix
        images = dict(entry.images)
        if len(images) < len(entry.digests):
            self._drop(key)
            return None
        return _with_images(entry.shared_prefix, {each: images[each] for each in entry.digests})

    def keep(self, turn: Turn, shared_prefix: SharedPrefix) -> None:
        """Store the state after `turn`, unless it is large."""
        num_bytes = _size(turn, shared_prefix)
        if num_bytes > MAX_PREFIX_BYTES:
            return
        key, images = _key(turn), shared_prefix.line.images
        self._drop(key)
        without = _with_images(shared_prefix, {}) if images else shared_prefix
        self._newest_last[key] = _Kept(
            without, tuple(images), WeakValueDictionary(images), num_bytes
        )
        self.num_bytes += num_bytes
        while len(self._newest_last) > MAX_PREFIXES or self.num_bytes > MAX_BYTES:
            self._drop(next(iter(self._newest_last)))

    def _drop(self, key: Hashable) -> None:
        entry = self._newest_last.pop(key, None)
        if entry is not None:
            self.num_bytes -= entry.num_bytes


def _with_images(shared_prefix: SharedPrefix, images: dict[str, ImageRef]) -> SharedPrefix:
    line = msgspec.structs.replace(shared_prefix.line, images=images)
    return msgspec.structs.replace(shared_prefix, line=line)


def _key(turn: Turn) -> Hashable:
    return (turn.messages_raw, turn.tools, turn.read, *turn.messages)


def _size(turn: Turn, shared_prefix: SharedPrefix) -> int:
    asked = len(turn.messages_raw) + len(turn.tools) + sum(map(len, turn.messages))
    held = shared_prefix.line.num_bytes + _BYTES_PER_TOKEN * len(shared_prefix.token_ids)
    return asked + held
