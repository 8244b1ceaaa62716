"""Which part of a request's messages the session already holds as exact tokens.

Owns a trie of messages: each Spot is a history up to one message, and knows the graph node whose
tokens end there, if one does. A message is looked up by its bytes, then by its meaning
(ChatMessage.meanings), so re-serialised arguments, dropped reasoning, part lists and moved cache
markers all find their way. Invariant: each distinct message is stored once; a lookup costs one scan
of the request, and only unknown messages are parsed. Driven by session.py.

    root --system--> . --user--> [context node] --assistant--> [sampled node] --tool--> [context]

A request that ends with the model's own answer gets a bare spot behind it, without a message, so
that the answer's spot keeps its node; lookups see through it.
"""

import enum
from collections.abc import Iterable

import msgspec

from rollmesh.runtime.turns import ROLES, ChatMessage, Turn, read_message, read_tools

NO_NODE = -1

_BARE = hash("asked with nothing new after an answer")


class ForkCause(enum.StrEnum):
    """Why a request did not simply extend what was sampled last on its line."""

    TOOLS_CHANGED = "tools_changed"
    SYSTEM_CHANGED = "system_changed"
    RESTARTED = "restarted"
    COMPACTED = "compacted"
    HISTORY_EDITED = "history_edited"
    REWOUND = "rewound"
    TEMPLATE = "template"


class Spot:
    """A history up to and with one message."""

    __slots__ = ("children", "continued", "node", "parent", "raw", "sampled")

    def __init__(self, parent: "Spot | None", raw: bytes) -> None:
        self.parent = parent
        self.raw = raw
        self.children: dict[int, Spot] | None = None
        self.node = NO_NODE
        """The graph node that ends with this message (a context's also ends the prompt)."""
        self.sampled = False
        """This message is one that the model sampled here."""
        self.continued = False
        """A later request already went on from here."""

    def child(self, key: int) -> "Spot | None":
        if not self.children:
            return None
        found, bare = self.children.get(key), self.children.get(_BARE)
        return bare.child(key) if found is None and bare is not None else found

    def adopt(self, spot: "Spot", keys: Iterable[int]) -> None:
        """Make `spot` a child under each key; a newer sibling of the same meaning wins."""
        if self.children is None:
            self.children = {}
        for key in keys:
            self.children[key] = spot

    def messages(self) -> list[bytes]:
        """The history's messages as JSON, in order."""
        raws: list[bytes] = []
        spot: Spot | None = self
        while spot is not None and spot.parent is not None:
            raws += [spot.raw] if spot.raw else []
            spot = spot.parent
        raws.reverse()
        return raws


class Match(msgspec.Struct):
    """How a request relates to what is held."""

    spot: Spot
    """The deepest spot to build on: the whole request's, or the last sampled message's."""
    num_held: int
    """Messages up to and with `spot`."""
    new: list[ChatMessage]
    """The messages after it, read."""
    tools_key: int = 0
    """The meaning of the tools on offer."""
    cause: ForkCause | None = None

    @property
    def is_held(self) -> bool:
        """The very same messages were asked before: a sibling, no new context."""
        return not self.new and self.spot.node != NO_NODE and not self.spot.sampled


class History:
    """One per session."""

    def __init__(self) -> None:
        self._roots: dict[int, Spot] = {}
        """By the meaning of the tools on offer."""
        self._tools: dict[int, int] = {}
        """Tools by their bytes to tools by their meaning."""
        self.num_bytes = 0
        """Of the messages held."""

    def match(self, turn: Turn) -> Match:
        """Find the deepest held history that `turn` begins with; SessionError 400 if unreadable."""
        first_call = not self._roots
        tools_key = self._tools_key(turn.tools)
        known_tools = tools_key in self._roots
        spot = self._roots.setdefault(tools_key, Spot(None, b""))
        anchor, num_held, num_walked = spot, 0, 0
        for position, raw in enumerate(turn.messages):
            child = spot.child(hash(raw)) or _find_by_meaning(spot, raw, position)
            if child is None:
                break
            spot, num_walked = child, position + 1
            if spot.sampled:
                anchor, num_held = spot, num_walked
        whole = num_walked == len(turn.messages)
        if whole and spot.sampled:
            spot = spot.child(_BARE) or spot
        if whole and spot.node != NO_NODE and not spot.sampled:
            return Match(spot, num_walked, [], tools_key)
        new = [read_message(turn.messages[n], n) for n in range(num_held, len(turn.messages))]
        cause = None if first_call else _cause(anchor, new, num_walked, known_tools)
        return Match(anchor, num_held, new, tools_key, cause)

    def from_root(self, match: Match, turn: Turn, cause: ForkCause) -> Match:
        """The same request on no held history at all."""
        messages = [read_message(raw, n) for n, raw in enumerate(turn.messages)]
        return Match(self._roots[match.tools_key], 0, messages, match.tools_key, cause)

    def add_context(self, match: Match, raws: list[bytes], node: int) -> Spot:
        """Hold the matched request's new messages; `node` ends with the last of them."""
        spot = match.spot
        spot.continued = True
        for raw, message in zip(raws[match.num_held :], match.new, strict=True):
            child = spot.child(hash(raw))
            if child is None:
                child = self._new_spot(spot, raw, [hash(raw), *message.meanings()])
            spot = child
        if spot.sampled:
            spot = spot.child(_BARE) or self._new_spot(spot, b"", [_BARE])
        spot.node = node
        return spot

    def add_sampled(self, context: Spot, raw: bytes, message: ChatMessage, node: int) -> Spot:
        """Hold the message that the model sampled after `context`."""
        spot = self._new_spot(context, raw, message.meanings())
        spot.node, spot.sampled = node, True
        return spot

    def _new_spot(self, parent: Spot, raw: bytes, keys: list[int]) -> Spot:
        spot = Spot(parent, raw)
        parent.adopt(spot, keys)
        self.num_bytes += len(raw)
        return spot

    def _tools_key(self, raw: bytes) -> int:
        if not raw:
            return 0
        key = self._tools.get(hash(raw))
        if key is None:
            key = hash(msgspec.json.encode(read_tools(raw), order="deterministic"))
            self._tools[hash(raw)] = key
        return key


def _find_by_meaning(spot: Spot, raw: bytes, position: int) -> Spot | None:
    """The child that means the same as `raw`; remembers these bytes for the next turn."""
    if not spot.children:
        return None
    for key in read_message(raw, position).meanings():
        child = spot.child(key)
        if child is not None:
            spot.children[hash(raw)] = child
            return child
    return None


def _cause(
    anchor: Spot, new: list[ChatMessage], num_walked: int, known_tools: bool
) -> ForkCause | None:
    """Why this is a fork; None where it extends a line's end."""
    if anchor.node != NO_NODE:
        if any(ROLES[message.role] == "assistant" for message in new):
            return ForkCause.HISTORY_EDITED
        return ForkCause.REWOUND if anchor.continued else None
    if not known_tools:
        return ForkCause.TOOLS_CHANGED
    if num_walked == 0:
        is_system = ROLES[new[0].role] == "system"
        return ForkCause.SYSTEM_CHANGED if is_system else ForkCause.RESTARTED
    if any(ROLES[message.role] == "assistant" for message in new):
        return ForkCause.HISTORY_EDITED
    return ForkCause.COMPACTED
