"""The trie of a session's messages, and the lookup of a request in it.

    root --system--> . --user--> [context node] --assistant--> [sampled node] --tool--> [context]

- A unit of a request is looked up by the hash of its bytes; only if these are new, it is parsed
  and looked up by meaning. A lookup changes nothing; history.py stores the aliases that it found.
- A request that ends with the model's own answer gets a node without a message after that answer.
- A prefix of an array that was sent before is found by its hash and not parsed again. Units with
  images are cached as parsed, for agents that drop their oldest screenshots.
- `key_of` and `unit_key` are equal in every process, unlike Python's salted hash, which serves
  within one.
"""

import hashlib
import zlib
from collections.abc import Iterable, Iterator, Sequence

import msgspec

from rollmesh.core.errors import DECODE_ERRORS, SessionError
from rollmesh.runtime.blobs import Blob
from rollmesh.runtime.chat import ChatMessage, ReadUnit, Rotating, read_held, read_message
from rollmesh.runtime.conversation.shared_prefixes import SAME_BYTES, UnitEnd
from rollmesh.runtime.images import ImageRef

TAIL_BYTES = 2048


def key_of(*parts: bytes) -> int:
    """A 64-bit key of the parts, in order: CRC-32 of all bytes, and 32 bits of SHA-256 over the
    length and the last TAIL_BYTES of each."""
    checksum, tails = 0, []
    for part in parts:
        checksum = zlib.crc32(part, checksum)
        tails += [b"%d:" % len(part), part[-TAIL_BYTES:]]
    digest = hashlib.sha256(b"".join(tails)).digest()
    return int.from_bytes(digest[:4] + checksum.to_bytes(4, "little"), "little", signed=True)


def unit_key(unit: bytes) -> int:
    """63 bits of the BLAKE2b digest of a unit."""
    return int.from_bytes(hashlib.blake2b(unit, digest_size=8).digest(), "little") >> 1


NO_NODE = -1
NO_NUMBER = -1
"""Number of a root, and of a node that is not in the trie yet."""
BARE = hash("asked with nothing new after an answer")


class MessageNode:
    """A history up to and including one message."""

    __slots__ = (
        "__weakref__",
        "children",
        "content",
        "continued",
        "depth",
        "node",
        "number",
        "parent",
        "sampled",
    )  # fmt: skip

    def __init__(self, parent: "MessageNode | None", content: bytes | Blob) -> None:
        self.follow(parent, content)
        self.children: dict[int, MessageNode] | None = None
        """By meanings, and by the hashes of units that lead there or further down."""
        self.node = NO_NODE
        """The graph node that ends with this message (for a context, also the end of the
        prompt)."""
        self.number = NO_NUMBER
        """Number within the session, in order of creation."""
        self.sampled = False
        """The model sampled this message in this session."""
        self.continued = False
        """The model has answered a request that continues this answer."""

    def follow(self, parent: "MessageNode | None", content: bytes | Blob) -> None:
        """Move after `parent`, for the message `content`."""
        self.parent = parent
        self.depth: int = (parent.depth if parent else 0) + bool(content)
        """Number of messages up to this one."""
        self.content = content
        """The message in the common shape; empty for a root and for a node without a message."""

    @property
    def raw(self) -> bytes:
        """The message's bytes, read."""
        return self.content if isinstance(self.content, bytes) else self.content.read()

    def child(self, key: int) -> "MessageNode | None":
        if not self.children:
            return None
        found = self.children.get(key)
        if found is None and (bare := self.children.get(BARE)) is not None:
            return bare.child(key)
        return found

    def find(self, keys: Iterable[int]) -> "MessageNode | None":
        """The child of the first key that has one."""
        if not self.children:
            return None
        return next((found for key in keys if (found := self.child(key)) is not None), None)

    def adopt(self, message_node: "MessageNode", keys: Iterable[int]) -> None:
        """Make `message_node` a child under each key, replacing older siblings of the same
        meaning."""
        if self.children is None:
            self.children = {}
        for key in keys:
            self.children[key] = message_node

    def line(self) -> "list[MessageNode]":
        """The nodes of this history that have a message, in order."""
        message_nodes: list[MessageNode] = []
        message_node: MessageNode | None = self
        while message_node is not None:
            if message_node.content:
                message_nodes.append(message_node)
            message_node = message_node.parent
        message_nodes.reverse()
        return message_nodes

    def anchor(self) -> "MessageNode":
        """The last sampled message of this history, else its root."""
        message_node = self
        while not message_node.sampled and message_node.parent is not None:
            message_node = message_node.parent
        return message_node

    def asked(self) -> "MessageNode | None":
        """The node after which a request that ends with this message was sampled."""
        message_node = self.child(BARE) if self.sampled else self
        return message_node if message_node is not None and message_node.node != NO_NODE else None


MAX_PREFIX_HASHES = 8
_MAX_SEGMENTS = 16

_split = msgspec.json.Decoder(list[msgspec.Raw]).decode


class PrefixHash(msgspec.Struct, frozen=True):
    """The hash of consecutive units of an array, without its closing bracket."""

    start: MessageNode
    """The node that the units follow."""
    end: MessageNode
    """The node of their last message."""
    segments: tuple[tuple[int, int], ...]
    """(end offset, hash of the bytes) of each segment; the first begins at 0."""
    num_units: int
    """Units of the request up to the end."""

    @property
    def num_bytes(self) -> int:
        return self.segments[-1][0]

    def begins(self, array: bytes) -> bool:
        """Whether `array` begins with these bytes."""
        if len(array) <= self.num_bytes or array[self.num_bytes] not in b",]":
            return False
        view, at = memoryview(array), 0
        for end, digest in self.segments:
            if hash(view[at:end]) != digest:
                return False
            at = end
        return True

    def rest(self, array: bytes) -> Iterator[bytes]:
        """The units of `array` after these."""
        rest_start = self.num_bytes + 1
        if array[self.num_bytes] == ord("]"):
            return iter(())
        return split_array(b"".join((b"[", memoryview(array)[rest_start:])))


class PrefixIndex:
    """The newest prefix hashes of one session."""

    __slots__ = ("_newest_last", "_num_misses")

    def __init__(self) -> None:
        self._newest_last: tuple[PrefixHash, ...] = ()
        self._num_misses = 0
        """Consecutive arrays that began like none before."""

    @property
    def newest(self) -> PrefixHash | None:
        return self._newest_last[-1] if self._newest_last else None

    def begin(
        self,
        start: MessageNode,
        segments: tuple[tuple[int, int], ...],
        end: MessageNode,
        num_units: int,
    ) -> None:
        """Add a prefix that another session has found."""
        self._newest_last = (PrefixHash(start, end, segments, num_units),)

    def find(self, start: MessageNode, array: bytes) -> PrefixHash | None:
        """The prefix with which `array`, which follows `start`, begins."""
        for prefix_hash in reversed(self._newest_last):
            if prefix_hash.start is start and prefix_hash.begins(array):
                return prefix_hash
        return None

    def add(
        self, known: PrefixHash | None, start: MessageNode, array: bytes, end: MessageNode, num: int
    ) -> None:
        """Store `array` of `num` units; it replaces `known`, with which it begins.

        If an agent edits its history at each turn, only some arrays are stored, since hashing all
        of them would be useless.
        """
        self._num_misses = 0 if known else self._num_misses + 1
        if self._num_misses > 2 * MAX_PREFIX_HASHES and self._num_misses % MAX_PREFIX_HASHES:
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
        others = [each for each in self._newest_last if each is not known]
        self._newest_last = (
            *others[1 - MAX_PREFIX_HASHES :],
            PrefixHash(start, end, segments, num),
        )


def split_array(array: bytes) -> Iterator[bytes]:
    """The raw elements of a JSON array, copied one at a time; SessionError 400 if it is not an
    array."""
    try:
        return map(bytes, _split(array))
    except DECODE_ERRORS as error:
        raise SessionError(400, "invalid_messages", f"messages: {error}") from None


MIN_UNIT_BYTES = 4096
"""Shorter units are parsed, which is faster than a lookup."""
MAX_UNITS = 1024
"""Number of cached units; agents that move a cache marker change a unit's bytes at each turn."""

_Key = tuple[ReadUnit, int]
"""The unit's parser, and the hash of its bytes."""


class ParseCache:
    """Parsed units of one session; `images` are the session's, by digest."""

    __slots__ = ("_contents", "_images")

    def __init__(self, images: dict[str, ImageRef]) -> None:
        self._images = images
        self._contents: dict[_Key, Sequence[bytes | Blob]] = {}

    def __len__(self) -> int:
        """Number of cached units."""
        return len(self._contents)

    def find(self, read: ReadUnit, unit: bytes) -> list[ChatMessage] | None:
        """The messages of `unit`; None if it must be parsed."""
        if len(unit) < MIN_UNIT_BYTES or not self._contents:
            return None
        content = self._contents.get((read, hash(unit)))
        if content is None:
            return None
        raws = [each if isinstance(each, bytes) else each.read() for each in content]
        return [read_held(raw, self._images) for raw in raws]

    def keep(
        self,
        read: ReadUnit,
        unit_key: int,
        messages: Sequence[ChatMessage],
        content: Sequence[bytes | Blob],
    ) -> None:
        """Cache the messages of the unit with this hash, which are stored as `content`."""
        shows = any(each.images() for each in messages)
        # The stored form of an assistant's message may have less or more: see meanings().
        if shows and all(each.role != "assistant" for each in messages):
            self._contents[read, unit_key] = content
            if len(self._contents) > MAX_UNITS:
                del self._contents[next(iter(self._contents))]


class Alias(msgspec.Struct, frozen=True):
    """A unit with new bytes and a known meaning."""

    start: MessageNode
    unit: bytes
    message_node: MessageNode
    messages: list[ChatMessage]


class Renamed(msgspec.Struct, frozen=True):
    """A unit of another process, with the hash of its bytes in this one."""

    start: MessageNode
    key: int
    message_node: MessageNode


class Lookup:
    """The lookup of one request in the trie, unit by unit."""

    __slots__ = (
        "aliases",
        "anchor",
        "array",
        "array_start",
        "is_stopped",
        "message_node",
        "num_skipped",
        "parse_cache",
        "pending",
        "prefix_hash",
        "read",
        "renamed",
        "rotating",
        "units",
    )  # fmt: skip

    def __init__(
        self, start: MessageNode, read: ReadUnit, rotating: Rotating, parse_cache: ParseCache | None
    ) -> None:
        self.message_node = start
        self.anchor: MessageNode | None = start if start.sampled or start.parent is None else None
        """The last sampled message on the path; None while none was found."""
        self.units: list[bytes] = []
        """The units after the anchor."""
        self.num_skipped = 0
        """Position of the first of `units`; in an array, elements count from 0."""
        self.pending: dict[int, list[ChatMessage]] = {}
        """Messages that were parsed on the path, by position in `units`."""
        self.aliases: list[Alias] = []
        self.renamed: list[Renamed] | None = None
        """None if the whole history is of this process."""
        self.is_stopped = False
        """The next message is not stored."""
        self.array = b""
        """The request's array of units, the node that it follows, and its known prefix."""
        self.array_start: MessageNode | None = None
        self.prefix_hash: PrefixHash | None = None
        self.read = read
        self.parse_cache = parse_cache
        self.rotating = rotating

    @property
    def num_units(self) -> int:
        """Units of the request, or of its array, up to here."""
        return self.num_skipped + len(self.units)

    def advance(self, units: Iterable[bytes]) -> None:
        """Continue while units are known."""
        for unit in units:
            self.units.append(unit)
            if not self.is_stopped:
                self._step(unit)

    def skip(self, prefix_hash: PrefixHash, array: bytes) -> "Lookup | None":
        """The lookup after a known prefix; None if units in it must be parsed."""
        lookup = Lookup(prefix_hash.end, self.read, self.rotating, self.parse_cache)
        lookup.aliases = list(self.aliases)
        lookup.renamed = None if self.renamed is None else list(self.renamed)
        lookup.num_skipped, lookup.prefix_hash = prefix_hash.num_units, prefix_hash
        lookup.advance(prefix_hash.rest(array))
        if lookup.anchor is None and (lookup.is_stopped or lookup.message_node.asked() is None):
            return None
        return lookup

    def messages_of(self, place: int) -> list[ChatMessage]:
        """The messages of the unit at `place`."""
        found = self.pending.get(place)
        return self._read(place) if found is None else found

    def _read(self, place: int) -> list[ChatMessage]:
        unit = self.units[place]
        found = self.parse_cache.find(self.read, unit) if self.parse_cache else None
        return self.read(unit, self.num_skipped + place) if found is None else found

    def _step(self, unit: bytes) -> None:
        if not self.message_node.children:
            self.is_stopped = True
            return
        if child := self.message_node.child(hash(unit)):
            return self._arrive(child)
        if self.renamed is not None and (child := self.message_node.child(unit_key(unit))):
            self.renamed.append(Renamed(self.message_node, hash(unit), child))
            return self._arrive(child)
        place = len(self.units) - 1
        messages = self.pending[place] = self._read(place)
        start = self.message_node
        for message in messages:
            found = self.message_node.find(message.meanings(self.rotating))
            if found is None:
                self.is_stopped = True
                return
            self.message_node = found
        self._arrive(self.message_node)
        self.aliases.append(Alias(start, unit, self.message_node, messages))

    def _arrive(self, message_node: MessageNode) -> None:
        self.message_node = message_node
        if message_node.sampled:
            self.anchor = message_node
            self.num_skipped += len(self.units)
            self.units.clear()
            self.pending.clear()


class Match(msgspec.Struct):
    """The result of a lookup: the last stored node and the new messages after it."""

    message_node: MessageNode
    """The deepest node to build on: that of the whole request, or the last sampled message."""
    deepest: MessageNode
    """The last node that the request shares."""
    tools_key: int
    """The meaning of the offered tools."""
    lookup: Lookup
    new: list[ChatMessage] = []
    """The parsed messages after `message_node`."""
    raws: list[bytes] = []
    """These messages in the common shape."""
    ends: list[tuple[int, int]] = []
    """(hash, number of messages of `new` up to its end) of each unit of `new`."""

    @property
    def is_held(self) -> bool:
        """Whether the same messages were requested before: a sibling, without new context."""
        return not self.new and self.message_node.node != NO_NODE and not self.message_node.sampled

    def unit_ends(self) -> tuple[UnitEnd, ...]:
        """`ends` with keys that are stable across processes."""
        ends: list[UnitEnd] = []
        at = 0
        for unit, (_, end) in zip(self.lookup.units, self.ends, strict=True):
            is_message = end == at + 1 and self.raws[at] is unit
            ends.append((SAME_BYTES if is_message else unit_key(unit), end))
            at = end
        return tuple(ends)


def conclude(lookup: Lookup, tools_key: int) -> Match:
    """The result of a lookup; SessionError 400 if the request has no message."""
    if not lookup.is_stopped and (asked := lookup.message_node.asked()) is not None:
        return Match(asked, lookup.message_node, tools_key, lookup)
    assert lookup.anchor is not None
    match = Match(lookup.anchor, lookup.message_node, tools_key, lookup)
    for place, unit in enumerate(lookup.units):
        messages = lookup.messages_of(place)
        # Parts may have keys of the client's own, which have no meaning and are not stored.
        is_common = lookup.read is read_chat and not isinstance(messages[0].content, list)
        match.new += messages
        match.raws += [unit] if is_common else [message.as_json() for message in messages]
        match.ends.append((hash(unit), len(match.new)))
    if lookup.anchor.parent is None and not match.new:
        raise SessionError(400, "invalid_messages", "messages: expected at least one")
    return match


def read_chat(raw: bytes, position: int) -> list[ChatMessage]:
    """Parse a unit that is one chat message."""
    return [read_message(raw, position)]
