"""The message history of a session: which messages of a request are stored as exact tokens.

- A trie of messages (message_trie.py). Each distinct message is stored once, in the common form of
  all dialects, a long one as a blob. Other spellings are stored as hashes, at most ALIASES_PER_NODE
  for each node.
- `match` changes nothing, so it may run twice, or only to count tokens.
- Codex sends a truncated answer and the next one as adjacent items, which are one message: both
  lead to the node of the newer answer.
"""

import bisect
from typing import NamedTuple

import msgspec

from rollmesh.core.memo import Memo
from rollmesh.runtime import blobs
from rollmesh.runtime.blobs import Blob
from rollmesh.runtime.chat import ChatMessage, Rotating, Turn, read_held, read_tools
from rollmesh.runtime.conversation.message_trie import (
    BARE,
    Lookup,
    Match,
    MessageNode,
    ParseCache,
    PrefixIndex,
    conclude,
    read_chat,
    split_array,
)
from rollmesh.runtime.conversation.shared_prefixes import PrefixMessage, PrefixMessages
from rollmesh.runtime.images import ImageRef

ALIASES_PER_NODE = 4
LONG_BYTES = 16 * 1024
"""Messages from this size on are blobs, which siblings share."""
MESSAGE_NODE_BYTES = 500
"""Memory of a node besides its message: itself, its children and the keys that lead to it, measured
by tracemalloc (487 over 1,000 nodes with an alias for every second)."""


class _LateAnswer(NamedTuple):
    """A sampled message that is not in the trie yet."""

    context: MessageNode
    message: ChatMessage
    node: int
    is_void: bool


class MessageHistory:
    """The message history of one session."""

    __slots__ = (
        "_begun",
        "_late",
        "_long",
        "_num_aliases",
        "_num_late_bytes",
        "_num_nodes",
        "_num_short_bytes",
        "_numbered",
        "_parse_cache",
        "_prefixes",
        "blob_bytes",
        "images",
        "roots",
        "rotating",
        "sampled",
    )  # fmt: skip

    def __init__(self, rotating: Rotating = None) -> None:
        self.rotating = rotating
        self.roots: dict[int, MessageNode] = {}
        """By the meaning of the offered tools."""
        self.sampled: list[MessageNode] = []
        """Answers of the model, in order."""
        self.images: dict[str, ImageRef] = {}
        """Images of stored messages, by digest."""
        self.blob_bytes = 0
        """Bytes of images and long messages, each counted once, though other sessions may share
        them."""
        self._long: set[Blob] = set()
        self._num_short_bytes = 0
        self._begun: tuple[PrefixMessages, MessageNode] | None = None
        """The shared prefix and its end, while no request has gone further."""
        self._late: list[_LateAnswer] = []
        """Answers that no request has needed yet."""
        self._num_late_bytes = 0
        self._prefixes = PrefixIndex()
        self._parse_cache: ParseCache | None = None
        """Created for the first unit with an image."""
        self._num_aliases = 0
        self._num_nodes = 0
        self._numbered: list[MessageNode] | None = None
        """Nodes by number, while the history is restored."""

    def match(self, turn: Turn, start: MessageNode | None = None) -> Match:
        """Find the deepest stored history that `turn` begins with; SessionError 400 if it is
        unreadable.

        The search begins at `start` if given, else at the root of the turn's tools.
        """
        self.catch_up()
        tools_key = tools_key_of(turn.tools)
        root = start or self.roots.get(tools_key) or MessageNode(None, b"")
        lookup = self._walk_from(root, turn)
        lookup.advance(turn.messages)
        if turn.messages_raw:
            lookup = self._walk_array(lookup, turn.messages_raw)
        return conclude(lookup, tools_key)

    def from_root(self, match: Match, turn: Turn) -> Match:
        """The match of the same request with nothing stored."""
        root = self.roots.get(match.tools_key) or MessageNode(None, b"")
        lookup = self._walk_from(root, turn)
        lookup.is_stopped = True
        lookup.advance(turn.messages)
        if turn.messages_raw:
            lookup.advance(split_array(turn.messages_raw))
        lookup.array, lookup.array_start = match.lookup.array, match.lookup.array_start
        lookup.prefix_hash = match.lookup.prefix_hash
        again = conclude(lookup, match.tools_key)
        again.deepest = match.deepest
        return again

    def hold(self, match: Match, node: int) -> MessageNode:
        """Store the new messages of a matched request; `node` ends with the last of them."""
        for alias in match.lookup.aliases:
            self._add_alias(alias.start, hash(alias.unit), alias.message_node)
        for each in match.lookup.renamed or ():
            each.start.adopt(each.message_node, [each.key])
        if match.is_held:
            self._remember(match, match.deepest)
            return match.message_node
        message_node = match.message_node
        if message_node.parent is None:
            message_node = self.roots.setdefault(match.tools_key, message_node)
        at = 0
        for unit_key, end in match.ends:
            start = message_node
            message_nodes: list[MessageNode] = []
            for n in range(at, end):
                message_node = self._hold_message(message_node, match.new[n], match.raws[n])
                message_nodes.append(message_node)
            if message_node is not start.child(unit_key):
                self._add_alias(start, unit_key, message_node)
            if self.images and match.lookup.array:
                self._remember_reading(match, unit_key, match.new[at:end], message_nodes)
            at = end
        self._remember(match, message_node)
        if message_node.sampled:
            message_node = message_node.child(BARE) or self._new_node(message_node, b"", [BARE])
        message_node.node = node
        return message_node

    def add_sampled(
        self, context: MessageNode, message: ChatMessage, node: int, is_void: bool = False
    ) -> None:
        """Store the message that the model sampled after `context`.

        A void one is not an answer, and does not match messages of equal text.
        """
        self._late.append(_LateAnswer(context, message, node, is_void))
        self._num_late_bytes += len(message.text())

    def answer_at(self, node: int) -> MessageNode | None:
        """The answer that was sampled as `node`; None if it is no message of a chat."""
        self.catch_up()
        at = bisect.bisect_left(self.sampled, node, key=lambda message_node: message_node.node)
        found = self.sampled[at] if at < len(self.sampled) else None
        return found if found and found.node == node else None

    def raws_to(self, context: MessageNode) -> list[bytes]:
        """The messages up to `context`, in the common shape."""
        if self._begun and self._begun[1] is context:
            return list(self._begun[0].raws)
        return [message_node.raw for message_node in context.line()]

    @property
    def num_bytes(self) -> int:
        """Bytes of the stored messages, except blobs."""
        num_begun_bytes = self._begun[0].num_bytes if self._begun else 0
        texts = self._num_short_bytes + self._num_late_bytes
        return texts + num_begun_bytes + MESSAGE_NODE_BYTES * self._num_nodes

    def begin(self, line: PrefixMessages, node: int) -> MessageNode:
        """Store a shared prefix, before anything else; `node` ends with the last of its
        messages."""
        end = MessageNode(None, b"")
        end.node = node
        for image in line.images.values():
            self._hold_image(image)
        self._begun = line, end
        return end

    def catch_up(self) -> None:
        """Enter postponed messages into the trie; most rollouts of one turn never need them."""
        if self._begun:
            self._link(*self._begun)
            self._begun = None
        if self._late:
            late, self._late, self._num_late_bytes = self._late, [], 0
            for answer in late:
                self._add_answer(answer)

    def line(self, match: Match, message_node: MessageNode) -> PrefixMessages:
        """The messages up to `message_node`, which is the whole history; `match` created it."""
        message_nodes = [self.roots[match.tools_key], *message_node.line()]
        places = {each: place for place, each in enumerate(message_nodes)}
        links = [
            PrefixMessage(place, key, places[child])
            for place, each in enumerate(message_nodes)
            for key, child in (each.children or {}).items()
        ]
        prefix_hash = self._prefixes.newest
        return PrefixMessages(
            tools_key=match.tools_key,
            raws=tuple([each.raw for each in message_nodes[1:]]),
            links=tuple(links),
            segments=prefix_hash.segments if prefix_hash else (),
            num_units=prefix_hash.num_units if prefix_hash else 0,
            ends=match.unit_ends(),
            images=dict(self.images),
        )

    def restore(self) -> list[MessageNode]:
        """Prepare to restore the history; returns its nodes, which are referred to by number."""
        self._numbered = []
        return self._numbered

    def add_way(self, start: MessageNode, key: int, message_node: MessageNode) -> None:
        """Add a key of a unit that leads from `start` to `message_node`, found by another
        process."""
        self._add_alias(start, key, message_node)

    def forget(self) -> None:
        """Break the reference cycles between nodes."""
        message_nodes = list(self.roots.values())
        while message_nodes:
            message_node = message_nodes.pop()
            message_nodes += dict.fromkeys((message_node.children or {}).values())
            message_node.children = None
        self.roots.clear()
        self.sampled.clear()
        self._numbered = None
        self._prefixes = PrefixIndex()
        self._parse_cache = None
        self._late.clear()
        self._num_late_bytes = 0
        self._begun = None

    def read(self, message_node: MessageNode) -> ChatMessage:
        """The message of a node that has one."""
        return read_held(message_node.raw, self.images)

    def _walk_from(self, root: MessageNode, turn: Turn) -> Lookup:
        lookup = Lookup(root, turn.read or read_chat, self.rotating, self._parse_cache)
        lookup.renamed = None if self._numbered is None else []
        return lookup

    def _walk_array(self, lookup: Lookup, array: bytes) -> Lookup:
        start = None if lookup.is_stopped else lookup.message_node
        lookup.num_skipped = -len(lookup.units)
        known = self._prefixes.find(start, array) if start else None
        onward = lookup.skip(known, array) if known else None
        if onward is None:
            onward = lookup
            lookup.advance(split_array(array))
        onward.array, onward.array_start = array, start
        return onward

    def _remember(self, match: Match, end: MessageNode) -> None:
        lookup = match.lookup
        start = lookup.array_start
        if start is None or (start.parent is None and start is not self.roots.get(match.tools_key)):
            return
        self._prefixes.add(lookup.prefix_hash, start, lookup.array, end, lookup.num_units)

    def _remember_reading(
        self,
        match: Match,
        unit_key: int,
        messages: list[ChatMessage],
        message_nodes: list[MessageNode],
    ) -> None:
        self._parse_cache = self._parse_cache or ParseCache(self.images)
        self._parse_cache.keep(
            match.lookup.read,
            unit_key,
            messages,
            [message_node.content for message_node in message_nodes],
        )

    def _link(self, line: PrefixMessages, end: MessageNode) -> None:
        message_nodes = [self.roots.setdefault(line.tools_key, MessageNode(None, b""))]
        for raw in line.raws[:-1]:
            message_nodes.append(self._new_node(message_nodes[-1], raw, []))
        end.follow(message_nodes[-1], self._to_stored(line.raws[-1]))
        message_nodes.append(self._counted(end))
        for link in line.links:
            message_nodes[link.start].adopt(message_nodes[link.end], (link.key,))
        if line.segments:
            self._prefixes.begin(message_nodes[0], line.segments, end, line.num_units)

    def _add_answer(self, answer: "_LateAnswer") -> None:
        context, message = answer.context, answer.message
        keys = message.meanings()
        if answer.is_void:
            keys = [key for key in keys if context.child(key) is None]
        message_node = self._new_node(context, message.as_json(), keys)
        message_node.node, message_node.sampled = answer.node, True
        if not answer.is_void:
            self.sampled.append(message_node)
            before = context.anchor()
            before.continued = before.sampled
        self._join(context, message, message_node)

    def _hold_message(
        self, message_node: MessageNode, message: ChatMessage, raw: bytes
    ) -> MessageNode:
        keys = message.meanings(self.rotating) if message_node.children else ()
        if child := message_node.child(hash(raw)) or message_node.find(keys):
            return child
        for image in message.images():
            self._hold_image(image)
        own = message.meanings(self.rotating, is_ours=False)
        return self._new_node(message_node, raw, [hash(raw), *own])

    def _join(
        self, message_node: MessageNode | None, message: ChatMessage, answer: MessageNode
    ) -> None:
        """Store `answer` also for requests that show it joined with the assistant's messages before
        it."""
        while message_node is not None and message_node.parent is not None:
            if message_node.content:
                before = self.read(message_node) if b'"assistant"' in message_node.raw else None
                if before is None or not before.is_text_of_assistant:
                    return
                message, above = before.joined(message), message_node.parent
                keys = message.meanings(is_ours=False)
                above.adopt(answer, [key for key in keys if above.child(key) is None])
            message_node = message_node.parent

    def _hold_image(self, image: ImageRef) -> None:
        if image.digest not in self.images:
            self.images[image.digest] = image
            self.blob_bytes += image.num_bytes

    def _to_stored(self, raw: bytes) -> bytes | Blob:
        """A message in the form that its node stores."""
        if len(raw) < LONG_BYTES:
            return raw
        blob = blobs.hold(raw)
        if blob not in self._long:
            self._long.add(blob)
            self.blob_bytes += blob.num_bytes
        return blob

    def _new_node(self, parent: MessageNode, raw: bytes, keys: list[int]) -> MessageNode:
        message_node = MessageNode(parent, self._to_stored(raw))
        parent.adopt(message_node, keys)
        return self._counted(message_node)

    def _counted(self, message_node: MessageNode) -> MessageNode:
        message_node.number = self._num_nodes
        self._num_nodes += 1
        if self._numbered is not None:
            self._numbered.append(message_node)
        if isinstance(message_node.content, bytes):
            self._num_short_bytes += len(message_node.content)
        return message_node

    def _add_alias(self, start: MessageNode, key: int, message_node: MessageNode) -> None:
        if self._num_aliases < ALIASES_PER_NODE * self._num_nodes:
            self._num_aliases += 1
            start.adopt(message_node, [key])


@Memo
def tools_key_of(raw: bytes) -> int:
    """The meaning of tools; 0 for none, or for an empty list."""
    tools = read_tools(raw) if raw else []
    return hash(msgspec.json.encode(tools, order="deterministic")) if tools else 0
