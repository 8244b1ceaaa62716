"""The items of OpenAI's Responses API as chat messages: grouping, references, reading, tools.

A history unit is one item, or all adjacent items of the assistant's side (reasoning, texts, calls),
which are one message of a chat. Shapes as in OpenAI's API reference (create response).

- What a model could read is read, or refused by its type; items and tools that only OpenAI's
  servers can run or open are left out.
- An `item_reference` stands for an item that an earlier response of the same session had.
"""

import re
from typing import Any

import msgspec
import orjson

from rollmesh.runtime.chat import ChatMessage, FindAnswer, read_message
from rollmesh.serve.interception.dialects.frames import refusal

_CALLS = frozenset({"function_call", "custom_tool_call"})
_REFERENCE = "item_reference"
_ITEM_ID = re.compile(r"(rs|msg|fc)_(.+)_(\d{1,9})")
"""Kind, reply and place of an item, as response_items.py names it."""
_UNREAD = frozenset(
    {
        "code_interpreter_call",
        "compaction",
        "computer_call",
        "file_search_call",
        "ghost_snapshot",
        "image_generation_call",
        "mcp_approval_request",
        "mcp_approval_response",
        "mcp_call",
        "mcp_list_tools",
        "web_search_call",
    }
)
"""Traces of what OpenAI's servers did, sealed or without words for a model."""


class ItemHead(msgspec.Struct):
    """What tells where an item belongs."""

    type: str | None = None
    role: str | None = None
    id: Any = None

    @property
    def is_reference(self) -> bool:
        """It names an earlier item; its type may be left out."""
        return self.type == _REFERENCE or (
            self.type is None and self.role is None and self.id is not None
        )

    @property
    def is_assistants(self) -> bool:
        is_item = self.type in ("reasoning", *_CALLS)
        return self.role == "assistant" or is_item or self.is_reference

    @property
    def is_unread(self) -> bool:
        return self.type in _UNREAD


def units_of(heads: list[ItemHead], raws: list[msgspec.Raw]) -> list[bytes]:
    """The items as history units; each a JSON array of the items it is made of."""
    units: list[bytes] = []
    group: list[bytes] = []
    for head, raw in zip(heads, raws, strict=True):
        if head.is_unread:
            continue
        if head.is_assistants:
            group.append(bytes(raw))
            continue
        if group:
            units.append(b"[%b]" % b",".join(group))
            group = []
        units.append(b"[%b]" % bytes(raw))
    if group:
        units.append(b"[%b]" % b",".join(group))
    return units


def spell_out(units: list[bytes], find: FindAnswer) -> list[bytes]:
    """Put the items that references name in their place; SessionError 400 for an unknown id."""
    return [_spelled_out(unit, find) if b'"id"' in unit else unit for unit in units]


def _spelled_out(unit: bytes, find: FindAnswer) -> bytes:
    items = _items(unit)
    named = [_Named.read(item.get("id")) if _is_reference(item) else None for item in items]
    if not any(named):
        return unit
    found: list[Any] = []
    for item, name in zip(items, named, strict=True):
        found += [item] if name is None else name.items(named, find)
    return orjson.dumps(found)


def _is_reference(item: Any) -> bool:
    return isinstance(item, dict) and msgspec.convert(item, ItemHead, strict=False).is_reference


class _Named(msgspec.Struct, frozen=True):
    """An item of an earlier response, by the parts of its id."""

    id: Any
    kind: str = ""
    reply: str = ""
    place: int = 0

    @classmethod
    def read(cls, name: Any) -> "_Named":
        parts = _ITEM_ID.fullmatch(name) if isinstance(name, str) else None
        return cls(name, parts[1], parts[2], int(parts[3])) if parts else cls(name)

    def items(self, others: list["_Named | None"], find: FindAnswer) -> list[dict[str, Any]]:
        """The item; none if it is more of a text that `others` of its unit have named already."""
        answer = find(self.reply) if self.kind else None
        if answer is not None and self.kind == "rs" and answer.reasoning_content:
            summary = [{"type": "summary_text", "text": answer.reasoning_content}]
            return [{"type": "reasoning", "summary": summary}]
        before = [
            each.place
            for each in others
            if each and (each.kind, each.reply) == ("msg", self.reply) and each.place < self.place
        ]
        if answer is not None and self.kind == "msg" and (text := answer.text()):
            message = {"type": "message", "role": "assistant", "content": text}
            return [] if before else [message]
        calls = answer.tool_calls or [] if answer is not None else []
        if answer is not None and self.kind == "fc":
            is_named = any(each and each.kind == "msg" for each in others)
            num_texts = len(before) if is_named else bool(answer.text())
            number = self.place - bool(answer.reasoning_content) - num_texts
            if 0 <= number < len(calls):
                call = calls[number]
                function = {"name": call.function.name, "arguments": call.function.arguments}
                return [{"type": "function_call", "call_id": call.id, **function}]
        why = f"Item with id {self.id!r} not found: no response of this session had it."
        raise refusal("item_not_found", why)


def _items(raw: bytes) -> list[Any]:
    """The items of a unit, whose JSON was checked but for its numbers; SessionError 400."""
    try:
        found: list[Any] = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise refusal("invalid_body", f"an item of the input is no JSON: {error}") from None
    return found


def read_unit(raw: bytes, position: int) -> list[ChatMessage]:
    """The chat message of one unit; SessionError 400 says what is wrong with it."""
    items = _items(raw)
    first = items[0]
    if ItemHead(first.get("type"), first.get("role")).is_assistants:
        message = _assistant(items, position)
    elif "call_id" in first and str(first.get("type", "")).endswith("_output"):
        content = _content(first.get("output"), position)
        message = {"role": "tool", "tool_call_id": first["call_id"], "content": content}
    elif first.get("type") in (None, "message"):
        content = _content(first.get("content"), position)
        message = {"role": first.get("role"), "content": content}
    else:
        raise _unknown(first.get("type"), position)
    try:
        return [read_message(orjson.dumps(message), position)]
    except TypeError as error:  # integers past 64 bits
        raise refusal("invalid_input", f"input[{position}]: {error}") from None


def _assistant(items: list[dict[str, Any]], position: int) -> dict[str, Any]:
    reasoning: list[str] = []
    parts: list[Any] = []
    calls: list[dict[str, Any]] = []
    for item in items:
        kind = item.get("type")
        if kind == "reasoning":
            reasoning += _reasoning(item)
        elif kind in _CALLS:
            arguments = item.get("arguments")
            if kind == "custom_tool_call":
                arguments = {"input": item.get("input")}
            function = {"name": item.get("name"), "arguments": arguments}
            calls.append({"id": item.get("call_id"), "function": function})
        else:
            content = _content(item.get("content"), position)
            parts += [content] if isinstance(content, str) else content
    message: dict[str, Any] = {"role": "assistant", "content": parts}
    if reasoning:
        message["reasoning_content"] = "\n".join(reasoning)
    if calls:
        message["tool_calls"] = calls
    return message


def _reasoning(item: dict[str, Any]) -> list[str]:
    """The texts of a reasoning item: what was thought, or else its summary."""
    for parts in (item.get("content"), item.get("summary")):
        if isinstance(parts, list) and parts:
            return [
                str(part["text"]) for part in parts if isinstance(part, dict) and "text" in part
            ]
    return []


def _content(content: Any, position: int) -> Any:
    """Content as chat messages have it."""
    if content is None:
        return ""
    if not isinstance(content, list):
        return content if isinstance(content, str) else orjson.dumps(content).decode()
    return [_part(part, position) for part in content]


def _part(part: Any, position: int) -> Any:
    if isinstance(part, str):
        return part
    if not isinstance(part, dict):
        raise refusal("invalid_input", f"input[{position}]: content parts must be objects")
    if part.get("type") == "input_image" and part.get("image_url"):
        return {"type": "image_url", "image_url": part["image_url"]}
    if isinstance(part.get("text"), str):
        return {"type": "text", "text": part["text"]}
    if isinstance(part.get("refusal"), str):
        return {"type": "refusal", "refusal": part["refusal"]}
    raise _unknown(part.get("type"), position)


def _unknown(kind: Any, position: int) -> Exception:
    why = f"input[{position}]: {kind!r} is nothing that this model can read"
    return refusal("unsupported_content", why)
