"""Store the requests of a relay session: each distinct message once, in a tree of histories.

- A request is split into its messages and the rest (settings, tools, system text), which is
  interned, since agents repeat it. Every request can be reconstructed.
- The part of a body that a stored prefix (body_prefixes.py) covers is not parsed again; the
  messages after it are found by the hash of their bytes, and known ones are not copied.
- Long values (images, texts) are blobs apart from the message around them, so a moved cache marker
  does not store an image twice, and sessions share them.
- Memory is linear in distinct messages.
"""

import codecs
import re
import secrets
import sys
from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec

from rollmesh.core.errors import DECODE_ERRORS
from rollmesh.engine.connection import size_of
from rollmesh.runtime.blobs import Blob
from rollmesh.runtime.chat import ROLES
from rollmesh.runtime.conversation.forks import ForkCause
from rollmesh.serve.interception.pieces import MIN_BLOB_BYTES, Piece, cut, equals, held, joined
from rollmesh.serve.interception.relay.body_prefixes import BodyMatcher, BodyPrefix

MAX_PREFIXES = 4
"""Histories that are matched by their bytes: the main line, a sub-agent or two, a title request."""
MIN_PREFIX_BYTES = 4096
"""A shorter body is parsed, which is faster than comparing it."""
MAX_JOINED_BYTES = 64 * 1024
"""A body up to this size is forwarded in one piece, which is cheaper than many short ones."""
NODE_BYTES = 600
"""Memory of a message besides its bytes: the node and its entries in two tables."""

STEP_BYTES = 2**20
"""Text is checked in steps of this size, since Python needs up to four bytes per character."""

_MAX_BRANCHES = 16
"""Stored branches that a request is compared with to find the cause of its fork."""

_BLANKS = b" \t\r\n"
_GAP = re.compile(rb"[ \t\r\n]*,?[ \t\r\n]*")
_FIRST = b"[%d" % secrets.randbits(62)
"""Placeholder for the messages of a matched prefix, so that the rest of the body parses as JSON.

It is random, so a body with two histories cannot contain it.
"""

Span = tuple[bytes, int, int]
"""A message: a text, and its start and stop in it."""
Message = bytes | memoryview
"""A message's bytes; a view if it is long, so that a known one is not copied."""

_NO_HISTORY = msgspec.Raw(b"[]")
_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])
_elements = msgspec.json.Decoder(list[msgspec.Raw])
_encode = msgspec.json.Encoder().encode


class HistoryNode:
    """A history up to and including one message."""

    __slots__ = ("children", "depth", "is_continued", "number", "parent", "pieces", "request")

    def __init__(self, parent: "HistoryNode | None", pieces: tuple[Piece, ...]) -> None:
        self.parent = parent
        self.pieces = pieces
        """The message as JSON."""
        self.depth: int = parent.depth + 1 if parent else 0
        self.children: dict[int, HistoryNode] | None = None
        """By the hash of their messages."""
        self.request: StoredRequest | None = None
        """The newest request whose history ends here."""
        self.is_continued = False
        """A later request continues from here."""
        self.number = -1
        """Number in the session's events; -1 if none has it yet."""

    def messages(self) -> list[tuple[Piece, ...]]:
        """The messages of the history, oldest first."""
        found: list[tuple[Piece, ...]] = []
        node = self
        while node.parent is not None:
            found.append(node.pieces)
            node = node.parent
        return found[::-1]


class StoredRequest(msgspec.Struct, frozen=True, eq=False):
    """A request as stored."""

    node: HistoryNode
    settings: Piece
    """A JSON object: all keys except the history, tools and system text."""
    tools: Piece
    system: Piece
    fork: str
    """Why it does not continue an earlier request; '' if it does, or is the first."""

    def is_same(self, other: "StoredRequest") -> bool:
        """Whether both are the same body, except for the order of keys and white space."""
        mine = (self.settings, self.tools, self.system)
        return self.node is other.node and mine == (other.settings, other.tools, other.system)


class StoredBody(NamedTuple):
    """A received body."""

    request: StoredRequest | None
    """None if it is not a JSON object."""
    pieces: Sequence[Piece]
    """Its bytes, to be forwarded; a long body shares the pieces that the session stores."""


class _MessageRole(msgspec.Struct):
    role: str = ""


class _ParsedBody(NamedTuple):
    """A body, as far as it had to be parsed."""

    fields: dict[str, msgspec.Raw]
    """All keys except the history."""
    branch_point: HistoryNode
    """The last node of the history that was stored before."""
    node: HistoryNode
    """The end of the history."""
    prefix: BodyPrefix | None
    """The prefix that covers the history."""
    rest: bytes
    """The body after the prefix; the whole body without one."""


class HistoryStore:
    """The requests of one session."""

    def __init__(self, min_prefix_bytes: int = MIN_PREFIX_BYTES) -> None:
        """Bodies shorter than `min_prefix_bytes` are parsed as a whole."""
        self.num_blob_bytes = 0
        """Bytes of the blobs, which other sessions may share."""
        self.root = HistoryNode(None, ())
        self._prefixes: deque[BodyPrefix] = deque(maxlen=MAX_PREFIXES)
        self._messages: dict[int, tuple[Piece, ...]] = {}
        """By the hash of their bytes."""
        self._shared: dict[bytes, bytes] = {}
        """Settings, tools and system texts."""
        self._blobs: set[Blob] = set()
        self._num_text_bytes = 0
        self._min_prefix_bytes = min_prefix_bytes
        self._is_first = True
        self._kinds: set[tuple[Piece, Piece]] = set()
        """Tools and system texts of all requests."""

    @property
    def num_bytes(self) -> int:
        """Bytes stored outside blobs."""
        return self._num_text_bytes + sum([prefix.num_text_bytes for prefix in self._prefixes])

    def follow(self, num_bytes: int = sys.maxsize) -> BodyMatcher:
        """A matcher for the next body, of at most `num_bytes` bytes."""
        return BodyMatcher(self._prefixes if num_bytes >= self._min_prefix_bytes else ())

    def hold(self, body: BodyMatcher, history_key: str) -> StoredBody:
        """Store what is new in a received body, which has its conversation under `history_key`."""
        try:
            read = self._read_on(body) or self._read(body, history_key)
        except DECODE_ERRORS:
            return StoredBody(None, body.pieces())
        fields, node = read.fields, read.node
        tools, system = (self._keep(bytes(fields.pop(key, b""))) for key in ("tools", "system"))
        settings = b",".join([b"%b:%b" % (_encode(k), bytes(v)) for k, v in fields.items()])
        cause = self._fork(read.branch_point, node, tools, system)
        node.request = StoredRequest(node, self._keep(b"{%b}" % settings), tools, system, cause)
        self._is_first = False
        if body.whole is not None and len(body.whole) <= MAX_JOINED_BYTES:
            return StoredBody(node.request, (body.whole,))
        before = read.prefix.pieces if read.prefix else []
        if sum(map(size_of, before)) <= MAX_JOINED_BYTES:
            return StoredBody(node.request, (joined([*before, read.rest]),))
        return StoredBody(node.request, [*before, read.rest])

    def restore(
        self, node: HistoryNode, messages: Sequence[bytes], rest: Sequence[bytes], fork: str
    ) -> tuple[StoredRequest, list[HistoryNode]]:
        """Restore a request of another process: `messages` after `node`; `rest` are settings, tools
        and system text. Returns it with the nodes of the messages."""
        branch_point, end = self._go(node, [(text, 0, len(text)) for text in messages])
        settings, tools, system = map(self._keep, rest)
        self._fork(branch_point, end, tools, system)
        end.request = StoredRequest(end, settings, tools, system, fork)
        self._is_first = False
        return end.request, _last_nodes(end, len(messages))

    def clear(self) -> None:
        """Drop everything, breaking reference cycles so that no garbage collection is needed."""
        nodes = [self.root]
        while nodes:
            node = nodes.pop()
            nodes += (node.children or {}).values()
            node.parent = node.children = node.request = None
        self._prefixes.clear()
        self._messages.clear()
        self._shared.clear()
        self._kinds.clear()
        self._blobs.clear()
        self._num_text_bytes = self.num_blob_bytes = 0

    def _read_on(self, body: BodyMatcher) -> _ParsedBody | None:
        """Parse the rest of a body that begins with a stored prefix; None if it does not."""
        prefix = body.prefix
        if prefix is None:
            return None
        num_messages = prefix.ends_before(body.num_matched)
        for num_same in range(num_messages, max(0, num_messages - 2), -1):
            rest = body.since(prefix.stop_of(num_same))
            if rest.lstrip(_BLANKS)[:1] in (b",", b"]"):
                break
        else:
            return None
        _check_text(rest)
        fields = _fields.decode(b"%b%b%b" % (prefix.head, _FIRST, rest))
        history = fields.pop(prefix.key)
        if bytes(memoryview(history)[: len(_FIRST)]) != _FIRST:
            return None
        if num_same < len(prefix.nodes):
            prefix = prefix.up_to(num_same)
        elif prefix in self._prefixes:
            self._prefixes.remove(prefix)
        return self._walk(prefix, rest, 0, _elements.decode(history)[1:], fields)

    def _read(self, body: BodyMatcher, key: str) -> _ParsedBody:
        raw = body.since(0)
        _check_text(raw)
        fields = _fields.decode(raw)
        history = fields.pop(key, _NO_HISTORY)
        if bytes(memoryview(history)[:1]) != b"[":
            branch_point, node = self._go(self.root, [_alone(history)])
            return _ParsedBody(fields, branch_point, node, None, raw)
        elements = _elements.decode(history)
        is_long = len(raw) >= self._min_prefix_bytes and elements
        opened = re.search(rb'"%b"\s*:\s*\[' % key.encode(), raw) if is_long else None
        at = opened.end() - 1 if opened else 0
        if not opened or not raw.startswith(history, at):
            branch_point, node = self._go(self.root, map(_alone, elements))
            return _ParsedBody(fields, branch_point, node, None, raw)
        prefix = BodyPrefix(raw[:at], key)
        return self._walk(prefix, raw, at + 1, elements, fields)

    def _walk(
        self,
        prefix: BodyPrefix,
        text: bytes,
        at: int,
        elements: Sequence[msgspec.Raw],
        fields: dict[str, msgspec.Raw],
    ) -> _ParsedBody:
        """Add messages after those of `prefix`, which becomes the newest prefix; they are in `text`
        from byte `at` on."""
        start = prefix.nodes[-1] if prefix.nodes else self.root
        branch_point = node = start
        if elements:
            spans = _spans(text, at, elements)
            branch_point, node = self._go(start, [(text, *span) for span in spans])
            prefix.grow(text, spans, _last_nodes(node, len(spans)))
            at = spans[-1][1]
        self._prefixes.append(prefix)
        return _ParsedBody(fields, branch_point, node, prefix, text[at:])

    def _go(self, node: HistoryNode, spans: Iterable[Span]) -> tuple[HistoryNode, HistoryNode]:
        """Find or add messages after `node`; the last node that was stored before, and the end."""
        branch_point = None
        for span in spans:
            message = _message_at(span)
            key = at = hash(message)
            children = node.children = {} if node.children is None else node.children
            while (child := children.get(at)) is not None and not equals(child.pieces, message):
                at += 1
            if child is None:
                branch_point = branch_point or node
                child = children[at] = HistoryNode(node, self._pieces(key, message, span))
                self._num_text_bytes += NODE_BYTES
            node = child
        return branch_point or node, node

    def _pieces(self, key: int, message: Message, span: Span) -> tuple[Piece, ...]:
        """The pieces of a message, which another history may have stored."""
        known = self._messages.get(key)
        if known is not None and equals(known, message):
            return known
        pieces = self._messages[key] = cut(*span)
        for piece in pieces:
            self._count(piece)
        return pieces

    def _keep(self, raw: bytes) -> Piece:
        if (known := self._shared.get(raw)) is not None:
            return known
        piece = held(raw)
        if isinstance(piece, bytes):
            self._shared[piece] = piece
        self._count(piece)
        return piece

    def _count(self, piece: Piece) -> None:
        if isinstance(piece, bytes):
            self._num_text_bytes += len(piece)
        elif piece not in self._blobs:
            self._blobs.add(piece)
            self.num_blob_bytes += piece.num_bytes

    def _fork(
        self, branch_point: HistoryNode, node: HistoryNode, tools: Piece, system: Piece
    ) -> str:
        """The cause of a fork (docs/explanation/forks.md), by requests only: answers are not parsed
        yet."""
        base = branch_point
        while base.request is None and base.parent is not None:
            base = base.parent
        was_continued = base.is_continued
        base.is_continued = was_continued or base is not node
        is_known_kind = (tools, system) in self._kinds
        self._kinds.add((tools, system))
        if base.request is None:
            if self._is_first:
                return ""
            return _unrelated_cause(branch_point, node) if is_known_kind else ForkCause.OTHER_CHAT
        if tools != base.request.tools:
            return ForkCause.TOOLS_CHANGED
        if system != base.request.system:
            return ForkCause.SYSTEM_CHANGED
        if not was_continued or base is node:
            return ""
        if cause := _cause_of_reuse(branch_point, node):
            return cause
        is_dropped = branch_point is base and _role(_new(branch_point, node)[0]) == "user"
        return ForkCause.COMPACTED if is_dropped else ForkCause.REWOUND


def _unrelated_cause(branch_point: HistoryNode, node: HistoryNode) -> str:
    """The cause of a fork whose history continues no stored request, with known tools."""
    new = _new(branch_point, node)
    if not branch_point.depth and new and _role(new[0]) == "system":
        old = [
            child
            for each in _others(branch_point, new[0])
            for child in (each.children or {}).values()
        ]
        is_same_chat = any(child.pieces is after.pieces for after in new[1:2] for child in old)
        return ForkCause.SYSTEM_CHANGED if is_same_chat else ForkCause.OTHER_CHAT
    if cause := _cause_of_reuse(branch_point, node):
        return cause
    is_cut = any(_role(each) == "user" for each in _last_nodes(branch_point, branch_point.depth))
    return ForkCause.COMPACTED if is_cut else ForkCause.RESTARTED


def _cause_of_reuse(branch_point: HistoryNode, node: HistoryNode) -> str:
    """EDITED if a later message kept its place on another branch, COMPACTED if an answer moved;
    '' if neither is found."""
    new = _new(branch_point, node)
    has_moved = False
    for other_line in _others(branch_point, new[0]) if new else ():
        old = [other_line]
        while old[-1].children:
            old.append(next(reversed(old[-1].children.values())))
        if any(one.pieces is other.pieces for one, other in zip(old, new, strict=False)):
            return ForkCause.EDITED
        held_pieces = {id(each.pieces) for each in old}
        answers = [each for each in new if id(each.pieces) in held_pieces]
        has_moved = has_moved or any(_role(each) == "assistant" for each in answers)
    return ForkCause.COMPACTED if has_moved else ""


def _new(branch_point: HistoryNode, node: HistoryNode) -> list[HistoryNode]:
    """The messages after `branch_point`."""
    return _last_nodes(node, node.depth - branch_point.depth)


def _others(node: HistoryNode, child: HistoryNode) -> list[HistoryNode]:
    """The newest children of a node except `child`."""
    children = list((node.children or {}).values())[-_MAX_BRANCHES:]
    return [each for each in reversed(children) if each is not child]


def _role(node: HistoryNode) -> str:
    """The role of a message: system, user, assistant, tool; '' if it has none."""
    try:
        message = msgspec.json.decode(joined(node.pieces), type=_MessageRole)
    except msgspec.MsgspecError:
        return ""
    return ROLES.get(message.role, message.role)


def _spans(text: bytes, at: int, elements: Iterable[msgspec.Raw]) -> list[tuple[int, int]]:
    """(start, stop) of a list's elements in `text`, the first at or after byte `at`."""
    spans = []
    for raw in elements:
        gap = _GAP.match(text, at)
        assert gap
        start = gap.end()
        at = start + len(memoryview(raw))
        spans.append((start, at))
    return spans


def _alone(raw: msgspec.Raw) -> Span:
    """A message copied out of its body."""
    text = bytes(raw)
    return text, 0, len(text)


def _message_at(span: Span) -> Message:
    text, start, stop = span
    return text[start:stop] if stop - start < MIN_BLOB_BYTES else memoryview(text)[start:stop]


def _last_nodes(node: HistoryNode, num_messages: int) -> list[HistoryNode]:
    """The last `num_messages` nodes of a history."""
    found: list[HistoryNode] = []
    while len(found) < num_messages:
        found.append(node)
        assert node.parent
        node = node.parent
    return found[::-1]


def _check_text(raw: bytes) -> None:
    """UnicodeDecodeError for bytes that are not UTF-8: messages are stored without decoding."""
    if raw.isascii():
        return
    decoder = codecs.getincrementaldecoder("utf-8")()
    for at in range(0, len(raw), STEP_BYTES):
        decoder.decode(raw[at : at + STEP_BYTES])
    decoder.decode(b"", final=True)
