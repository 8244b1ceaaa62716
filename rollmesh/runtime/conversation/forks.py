"""Forks: where a request does not extend the sampled history, why, and how many tokens that costs.

Differences that keep the meaning (dropped reasoning, re-serialised arguments, cache markers) are
not forks. They are healed, and counted by kind.
"""

import bisect
import enum
from collections.abc import Sequence
from typing import Any

import msgspec

from rollmesh.core.errors import DECODE_ERRORS
from rollmesh.core.types import ForkRow
from rollmesh.runtime.chat import ROLES, ChatMessage, canonical
from rollmesh.runtime.conversation.history import MessageHistory
from rollmesh.runtime.conversation.message_trie import (
    Alias,
    Match,
    MessageNode,
    read_chat,
)


class _PlainMessage(msgspec.Struct, forbid_unknown_fields=True):
    """A message with the common fields only, as most are."""

    role: str
    content: str | None = None


_KNOWN_KEYS = frozenset(
    ("role", "content", "reasoning_content", "tool_calls", "tool_call_id", "type", "id")
)
_plain = msgspec.json.Decoder(_PlainMessage)
_EMPTY: tuple[object, ...] = (None, [], {}, "")


class HealedKind(enum.StrEnum):
    """Kinds of differences that are healed."""

    DROPPED_REASONING = "dropped_reasoning"
    INLINED_REASONING = "inlined_reasoning"
    CHANGED_REASONING = "changed_reasoning"
    RESERIALISED_ARGUMENTS = "reserialised_arguments"
    CHANGED_CALL = "changed_call"
    """Same call ids, but another name, arguments or text."""
    CHANGED_CALL_IDS = "changed_call_ids"
    CHANGED_TEXT = "changed_text"
    """The text of an answer that is identified by its calls."""
    WHITE_SPACE = "white_space"
    SYSTEM_LINE = "system_line"
    PART_LIST = "part_list"
    CACHE_MARKER = "cache_marker"
    EXTRA_KEYS = "extra_keys"


def healed_kinds(held: ChatMessage, got: ChatMessage) -> set[HealedKind]:
    """Kinds of differences between two parsed messages of one meaning."""
    if held == got:
        return set()
    kinds = _of_text(held, got)
    if isinstance(got.content, list) is not isinstance(held.content, list):
        kinds.add(HealedKind.PART_LIST)
    if held.role == "assistant":
        kinds |= _of_reasoning(held, got)
        kinds |= _of_calls(held, got)
    return kinds


def healed_keys(unit: bytes) -> set[HealedKind]:
    """Kinds that only a unit's bytes show: keys that parsers ignore."""
    kinds: set[HealedKind] = set()
    try:
        _plain.decode(unit)
    except DECODE_ERRORS:
        pass
    else:
        return kinds
    if b'"cache_control"' in unit:
        kinds.add(HealedKind.CACHE_MARKER)
    try:
        opened: Any = msgspec.json.decode(unit)
    except DECODE_ERRORS:
        return kinds
    if isinstance(opened, dict) and any(
        key not in _KNOWN_KEYS and value not in _EMPTY for key, value in opened.items()
    ):
        kinds.add(HealedKind.EXTRA_KEYS)
    return kinds


def _of_text(held: ChatMessage, got: ChatMessage) -> set[HealedKind]:
    ours, theirs = held.text(), got.text()
    if ours == theirs:
        return set()
    if "</think>" in theirs and "</think>" not in ours:
        return {HealedKind.INLINED_REASONING}
    if ours.strip() == theirs.strip():
        return {HealedKind.WHITE_SPACE}
    return {HealedKind.CHANGED_TEXT if held.role == "assistant" else HealedKind.SYSTEM_LINE}


def _of_reasoning(held: ChatMessage, got: ChatMessage) -> set[HealedKind]:
    ours, theirs = (str(each.reasoning_content or "").strip() for each in (held, got))
    if ours == theirs or "</think>" in got.text():
        return set()
    return {HealedKind.CHANGED_REASONING if theirs else HealedKind.DROPPED_REASONING}


def _of_calls(held: ChatMessage, got: ChatMessage) -> set[HealedKind]:
    kinds = set()
    for ours, theirs in zip(held.tool_calls or (), got.tool_calls or (), strict=False):
        if ours.id != theirs.id:
            kinds.add(HealedKind.CHANGED_CALL_IDS)
        if ours.function == theirs.function:
            continue
        same = ours.function.name == theirs.function.name
        if same and ours.parsed_arguments() == theirs.parsed_arguments():
            kinds.add(HealedKind.RESERIALISED_ARGUMENTS)
        else:
            kinds.add(HealedKind.CHANGED_CALL)
    return kinds


EXCERPT_CHARS = 80
_CHARS_BEFORE = 20
_MIN_SUMMARY_CHARS = 24
_MAX_SYSTEMS = 16
_MAX_LOOKED_AT = 256
"""Number of the model's answers that are searched for in a new chat."""


class ForkCause(enum.StrEnum):
    """Why a request did not extend the last sampled answer of its branch."""

    OTHER_CHAT = "subagent_or_side_call"
    COMPACTED = "compaction"
    EDITED = "edited_history"
    CALLS_AS_TEXT = "calls_as_text"
    TOOLS_CHANGED = "changed_tools"
    SYSTEM_CHANGED = "changed_system_text"
    TEMPLATE = "template"
    RESTARTED = "restart"
    REWOUND = "rewind"


class ForkReport(msgspec.Struct, frozen=True):
    """Forks and healed differences of a session."""

    forks: list[ForkRow]
    healed: dict[str, int]
    """Healed differences by kind."""


class ForkLog:
    """Collects the forks and healed differences of one session."""

    __slots__ = ("healed", "rows")

    def __init__(self) -> None:
        self.rows: list[ForkRow] = []
        self.healed: dict[str, int] = {}
        """Counts by kind."""

    def add_healed(self, history: MessageHistory, match: Match) -> None:
        """Count the differences that were healed when `match` was found."""
        for alias in match.lookup.aliases:
            kinds = healed_keys(alias.unit) if len(alias.messages) == 1 else set()
            for held, message in zip(_held_as(history, alias), alias.messages, strict=True):
                kinds |= healed_kinds(held, message)
            if match.lookup.read is not read_chat:
                kinds.discard(HealedKind.PART_LIST)  # other dialects have only parts
            for kind in kinds:
                self.healed[kind] = self.healed.get(kind, 0) + 1

    def report(self) -> ForkReport:
        return ForkReport(list(self.rows), dict(self.healed))


def cause_of(history: MessageHistory, match: Match) -> ForkCause | None:
    """Why `match` is a fork; None if it extends the end of a branch, or begins the first."""
    if match.is_held or not history.sampled:
        return None
    if match.message_node.parent is None:
        return _cause_at_root(history, match)
    at = _place_of_deepest(match)
    resent = next((n for n in range(at, len(match.new)) if _is_answer(match.new[n])), None)
    if resent is None:
        return ForkCause.REWOUND if match.message_node.continued else None
    if not match.message_node.continued and not _is_known_answer(history, match.new[resent]):
        return None  # answers of others after the branch's end are ordinary context
    return _cause_of_resend(history, match, at, resent)


def where(history: MessageHistory, match: Match) -> tuple[int, str, str]:
    """(index of the first differing message, excerpts of it as stored and as received)."""
    at = _place_of_deepest(match)
    got = _shown(match.new[at]) if at < len(match.new) else ""
    held_next = _newest_child(match.deepest)
    held = _shown(history.read(held_next)) if held_next else ""
    return match.deepest.depth, *excerpts(held, got)


def excerpts(held: str, got: str) -> tuple[str, str]:
    """Both texts, cut to the part in which they differ."""
    start = max(0, first_difference(held, got) - _CHARS_BEFORE)
    stop = start + EXCERPT_CHARS
    return held[start:stop], got[start:stop]


def _shown(message: ChatMessage) -> str:
    """The text of a message and its tool calls, for an excerpt."""
    calls = [
        f"{call.function.name}({canonical(call.parsed_arguments()).decode()})"
        for call in message.tool_calls or ()
    ]
    return " ".join([text for text in (message.text(), *calls) if text])


def newest_node(history: MessageHistory, match: Match) -> int:
    """The last node of the branch that `match` leaves; -1 if there is none."""
    message_node = match.deepest
    if message_node.parent is None and not message_node.children:
        message_node = history.sampled[-1] if history.sampled else message_node
    node = message_node.node
    while (after := _newest_child(message_node)) is not None:
        message_node = after
        node = message_node.node if message_node.node >= 0 else node
    return node


def first_difference(one: Sequence[Any], two: Sequence[Any]) -> int:
    """Index of the first element in which two sequences differ, or the length of the shorter."""
    size = min(len(one), len(two))
    if one[:size] == two[:size]:
        return size
    return bisect.bisect_left(range(size), True, key=lambda n: one[: n + 1] != two[: n + 1])


def _held_as(history: MessageHistory, alias: Alias) -> list[ChatMessage]:
    """The stored messages of `alias`; consecutive messages of the assistant may be stored as
    one."""
    message_nodes: list[MessageNode] = []
    message_node: MessageNode | None = alias.message_node
    while message_node is not None and message_node is not alias.start:
        message_nodes += [message_node] if message_node.content else []
        message_node = message_node.parent
    message_nodes.reverse()
    held: list[ChatMessage] = []
    for num_left in range(len(alias.messages) - 1, -1, -1):
        one = history.read(message_nodes.pop())
        while (
            len(message_nodes) > num_left
            and (before := history.read(message_nodes[-1])).is_text_of_assistant
        ):
            one = before.joined(one)
            message_nodes.pop()
        held.append(one)
    return held[::-1]


def _cause_at_root(history: MessageHistory, match: Match) -> ForkCause:
    new, root = match.new, match.message_node
    for other in history.roots.values():
        if other is not root and _shares_talk(other, new, history):
            return ForkCause.TOOLS_CHANGED
    at = match.deepest.depth
    if at == 0 and _is_system(new[0]):
        newest = _children(root)[-_MAX_SYSTEMS:]
        olds = [child for child in newest if _is_system(history.read(child))]
        if any(_shares_talk(old, new[1:], history) for old in [*olds, root]):
            return ForkCause.SYSTEM_CHANGED
        return ForkCause.OTHER_CHAT
    if not root.children:
        return ForkCause.OTHER_CHAT
    resent = next((n for n in range(at, len(new)) if _is_answer(new[n])), None)
    if resent is not None:
        return _cause_of_resend(history, match, at, resent)
    if any(ROLES[message.role] == "user" for message in new[:at]):
        return ForkCause.COMPACTED
    return ForkCause.COMPACTED if _quotes_an_answer(history, new[at:]) else ForkCause.RESTARTED


def _cause_of_resend(history: MessageHistory, match: Match, at: int, resent: int) -> ForkCause:
    """EDITED if the answer kept its place, COMPACTED if it moved up, or its calls became text."""
    message_node: MessageNode | None = match.deepest
    for _ in range(at, resent + 1):
        message_node = _newest_child(message_node) if message_node else None
    keys = match.new[resent].meanings()
    in_place = message_node is not None and bool(
        set(keys) & set(history.read(message_node).meanings())
    )
    if not in_place and _is_known_answer(history, match.new[resent]):
        return ForkCause.COMPACTED
    if message_node is not None and _writes_out_calls(
        match.new[resent], history.read(message_node)
    ):
        return ForkCause.CALLS_AS_TEXT
    return ForkCause.EDITED


def _writes_out_calls(message: ChatMessage, held: ChatMessage) -> bool:
    """Whether a message without calls has the stored answer's calls in its text."""
    if message.tool_calls or not held.tool_calls:
        return False
    text = message.text()
    return all(
        (call.id and call.id in text) or call.function.name in text for call in held.tool_calls
    )


def _place_of_deepest(match: Match) -> int:
    """Number of messages of `match.new` that are stored."""
    return max(0, match.deepest.depth - match.message_node.depth)


def _shares_talk(
    start: MessageNode, messages: Sequence[ChatMessage], history: MessageHistory
) -> bool:
    """Whether a user's message or an answer of the model is stored after `start` at the same
    place."""
    message_node: MessageNode | None = start
    for message in messages:
        message_node = (
            message_node.find(message.meanings(history.rotating)) if message_node else None
        )
        if message_node is None:
            return False
        if not _is_system(message):
            return True
    return False


def _is_known_answer(history: MessageHistory, message: ChatMessage) -> bool:
    keys = set(message.meanings())
    newest = history.sampled[-_MAX_LOOKED_AT:]
    return any(
        not keys.isdisjoint(history.read(message_node).meanings()) for message_node in newest
    )


def _quotes_an_answer(history: MessageHistory, messages: Sequence[ChatMessage]) -> bool:
    """Whether a message quotes an answer of the model: a requested summary."""
    text = "\n".join([message.text() for message in messages])
    for message_node in history.sampled[-_MAX_LOOKED_AT:]:
        answer = history.read(message_node).text().strip()
        if len(answer) >= _MIN_SUMMARY_CHARS and answer in text:
            return True
    return False


def _children(message_node: MessageNode) -> list[MessageNode]:
    """The nodes one message below, each once."""
    found = dict.fromkeys((message_node.children or {}).values())
    message_nodes = []
    for child in found:
        if child.parent is message_node:
            message_nodes += [child] if child.content else _children(child)
    return message_nodes


def _newest_child(message_node: MessageNode) -> MessageNode | None:
    return next(reversed(_children(message_node)), None)


def _is_answer(message: ChatMessage) -> bool:
    return message.role == "assistant"


def _is_system(message: ChatMessage) -> bool:
    return ROLES[message.role] == "system"
