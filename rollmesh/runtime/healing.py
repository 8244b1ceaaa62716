"""How a message that comes back differs from the one that is held, where it means the same.

Agents drop reasoning, re-serialise arguments, move cache markers. None of that forks; it is
counted by kind, so that an engineer sees what their agent does to its history. Invariant: a message
that differs in nothing but the spelling of its JSON has no kinds. Driven by forks.py.
"""

import enum
from typing import Any

import msgspec

from rollmesh.runtime.chat import ChatMessage


class _Plain(msgspec.Struct, forbid_unknown_fields=True):
    """A message without anything to see past, as most are."""

    role: str
    content: str | None = None


_KNOWN_KEYS = frozenset(
    ("role", "content", "reasoning_content", "tool_calls", "tool_call_id", "type", "id")
)
_plain = msgspec.json.Decoder(_Plain)
_EMPTY: tuple[object, ...] = (None, [], {}, "")


class HealedKind(enum.StrEnum):
    """What was seen past."""

    DROPPED_REASONING = "dropped_reasoning"
    INLINED_REASONING = "inlined_reasoning"
    CHANGED_REASONING = "changed_reasoning"
    RESERIALISED_ARGUMENTS = "reserialised_arguments"
    CHANGED_CALL = "changed_call"
    """Known by its call ids, though name, arguments or text are others."""
    CHANGED_CALL_IDS = "changed_call_ids"
    CHANGED_TEXT = "changed_text"
    """Of an answer that is known by its calls."""
    WHITE_SPACE = "white_space"
    SYSTEM_LINE = "system_line"
    PART_LIST = "part_list"
    CACHE_MARKER = "cache_marker"
    EXTRA_KEYS = "extra_keys"


def healed_kinds(held: ChatMessage, got: ChatMessage) -> set[HealedKind]:
    """What differs between two messages of one meaning, as they were read."""
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
    """Kinds that show in a unit's bytes alone: keys that readers ignore."""
    kinds: set[HealedKind] = set()
    try:
        _plain.decode(unit)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        pass
    else:
        return kinds
    if b'"cache_control"' in unit:
        kinds.add(HealedKind.CACHE_MARKER)
    try:
        opened: Any = msgspec.json.decode(unit)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
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
