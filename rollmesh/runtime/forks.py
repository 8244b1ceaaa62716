"""Where a session's history did not extend what was sampled, why, and what that cost.

Owns the causes, and the log of one session: a row for each fork, and counts of the differences that
were healed instead. Invariant: a request that goes on from the end of its line, and one that comes
before the model has answered anything, is no fork. Driven by holdings.py.

A cause is read off the trie: what the request shares with what is held, and what stands behind the
place where they part. A sub-agent, a title call and the main line after one look alike when they
begin, so they have one cause; the branch of their nodes tells them apart once the session is over.
"""

import bisect
import enum
from collections.abc import Sequence
from typing import Any

import msgspec

from rollmesh.core.types import ForkRow
from rollmesh.runtime.chat import ROLES, ChatMessage, canonical
from rollmesh.runtime.healing import HealedKind, healed_keys, healed_kinds
from rollmesh.runtime.history import History
from rollmesh.runtime.match import Match, read_chat
from rollmesh.runtime.spot import Spot
from rollmesh.runtime.walk import Alias

EXCERPT_CHARS = 80
_CHARS_BEFORE = 20
_MIN_SUMMARY_CHARS = 24
_MAX_SYSTEMS = 16
_MAX_LOOKED_AT = 256
"""Answers of the model that are looked for in a new chat."""


class ForkCause(enum.StrEnum):
    """Why a request did not simply extend what was sampled last on its line."""

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
    """What became of a session's histories."""

    forks: list[ForkRow]
    healed: dict[str, int]
    """Differences that did not fork, by kind."""


class ForkLog:
    """One per session."""

    __slots__ = ("healed", "rows")

    def __init__(self) -> None:
        self.rows: list[ForkRow] = []
        self.healed: dict[str, int] = {}
        """How often, by kind."""

    def add_healed(self, history: History, match: Match) -> None:
        """Count what was seen past when `match` was found."""
        for alias in match.walk.aliases:
            kinds = healed_keys(alias.unit) if len(alias.messages) == 1 else set()
            for held, message in zip(_held_as(history, alias), alias.messages, strict=True):
                kinds |= healed_kinds(held, message)
            if match.walk.read is not read_chat:
                kinds.discard(HealedKind.PART_LIST)  # other dialects have nothing but parts
            for kind in kinds:
                self.healed[kind] = self.healed.get(kind, 0) + 1

    def report(self) -> ForkReport:
        return ForkReport(list(self.rows), dict(self.healed))


def cause_of(history: History, match: Match) -> ForkCause | None:
    """Why `match` is a fork; None where it extends the end of a line, or begins the first."""
    if match.is_held or not history.sampled:
        return None
    if match.spot.parent is None:
        return _cause_at_root(history, match)
    at = _place_of_deepest(match)
    echo = next((n for n in range(at, len(match.new)) if _is_answer(match.new[n])), None)
    if echo is None:
        return ForkCause.REWOUND if match.spot.continued else None
    if not match.spot.continued and not _is_known_answer(history, match.new[echo]):
        return None  # answers of others behind the line's end are context like any other
    return _cause_of_echo(history, match, at, echo)


def where(history: History, match: Match) -> tuple[int, str, str]:
    """(index of the first differing message, an excerpt of it as held, and as it came)."""
    at = _place_of_deepest(match)
    got = _shown(match.new[at]) if at < len(match.new) else ""
    held_next = _newest_child(match.deepest)
    held = _shown(history.read(held_next)) if held_next else ""
    return match.deepest.depth, *excerpts(held, got)


def excerpts(held: str, got: str) -> tuple[str, str]:
    """Both texts, cut to where they differ."""
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


def newest_node(history: History, match: Match) -> int:
    """The last node of the line that `match` leaves; -1 where there is none."""
    spot = match.deepest
    if spot.parent is None and not spot.children:
        spot = history.sampled[-1] if history.sampled else spot
    node = spot.node
    while (after := _newest_child(spot)) is not None:
        spot = after
        node = spot.node if spot.node >= 0 else node
    return node


def first_difference(one: Sequence[Any], two: Sequence[Any]) -> int:
    """Index of the first element in which two sequences differ, or of the end of the shorter."""
    size = min(len(one), len(two))
    if one[:size] == two[:size]:
        return size
    return bisect.bisect_left(range(size), True, key=lambda n: one[: n + 1] != two[: n + 1])


def _held_as(history: History, alias: Alias) -> list[ChatMessage]:
    """What is held for each message of `alias`; what the assistant said in a row may be one."""
    spots: list[Spot] = []
    spot: Spot | None = alias.spot
    while spot is not None and spot is not alias.start:
        spots += [spot] if spot.said else []
        spot = spot.parent
    spots.reverse()
    held: list[ChatMessage] = []
    for num_left in range(len(alias.messages) - 1, -1, -1):
        one = history.read(spots.pop())
        while len(spots) > num_left and (before := history.read(spots[-1])).is_text_of_assistant:
            one = before.joined(one)
            spots.pop()
        held.append(one)
    return held[::-1]


def _cause_at_root(history: History, match: Match) -> ForkCause:
    new, root = match.new, match.spot
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
    echo = next((n for n in range(at, len(new)) if _is_answer(new[n])), None)
    if echo is not None:
        return _cause_of_echo(history, match, at, echo)
    if any(ROLES[message.role] == "user" for message in new[:at]):
        return ForkCause.COMPACTED
    return ForkCause.COMPACTED if _quotes_an_answer(history, new[at:]) else ForkCause.RESTARTED


def _cause_of_echo(history: History, match: Match, at: int, echo: int) -> ForkCause:
    """Edited if the answer is in its old place, compacted if it moved up, or its calls as text."""
    spot: Spot | None = match.deepest
    for _ in range(at, echo + 1):
        spot = _newest_child(spot) if spot else None
    keys = match.new[echo].meanings()
    in_place = spot is not None and bool(set(keys) & set(history.read(spot).meanings()))
    if not in_place and _is_known_answer(history, match.new[echo]):
        return ForkCause.COMPACTED
    if spot is not None and _writes_out_calls(match.new[echo], history.read(spot)):
        return ForkCause.CALLS_AS_TEXT
    return ForkCause.EDITED


def _writes_out_calls(message: ChatMessage, held: ChatMessage) -> bool:
    """Whether the calls of the held answer are in the text of a message that has none itself."""
    if message.tool_calls or not held.tool_calls:
        return False
    text = message.text()
    return all(
        (call.id and call.id in text) or call.function.name in text for call in held.tool_calls
    )


def _place_of_deepest(match: Match) -> int:
    """How many of `match.new` are held."""
    return max(0, match.deepest.depth - match.spot.depth)


def _shares_talk(start: Spot, messages: Sequence[ChatMessage], history: History) -> bool:
    """Whether a user's message or an answer of ours is held behind `start` as it stands here."""
    spot: Spot | None = start
    for message in messages:
        spot = spot.find(message.meanings(history.rotating)) if spot else None
        if spot is None:
            return False
        if not _is_system(message):
            return True
    return False


def _is_known_answer(history: History, message: ChatMessage) -> bool:
    keys = set(message.meanings())
    newest = history.sampled[-_MAX_LOOKED_AT:]
    return any(not keys.isdisjoint(history.read(spot).meanings()) for spot in newest)


def _quotes_an_answer(history: History, messages: Sequence[ChatMessage]) -> bool:
    """Whether an answer stands in the text of a message: a summary that was asked for."""
    text = "\n".join([message.text() for message in messages])
    for spot in history.sampled[-_MAX_LOOKED_AT:]:
        answer = history.read(spot).text().strip()
        if len(answer) >= _MIN_SUMMARY_CHARS and answer in text:
            return True
    return False


def _children(spot: Spot) -> list[Spot]:
    """The spots one message below, each once."""
    found = dict.fromkeys((spot.children or {}).values())
    spots = []
    for child in found:
        if child.parent is spot:
            spots += [child] if child.said else _children(child)
    return spots


def _newest_child(spot: Spot) -> Spot | None:
    return next(reversed(_children(spot)), None)


def _is_answer(message: ChatMessage) -> bool:
    return message.role == "assistant"


def _is_system(message: ChatMessage) -> bool:
    return ROLES[message.role] == "system"
