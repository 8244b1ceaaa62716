"""The items of OpenAI's Responses API as chat messages: grouping, reading, tools.

A history unit is one item, or all adjacent items of the assistant's side (reasoning, texts, calls),
which are one message of a chat. Invariant: what a model could read is read or refused by its type;
left out are items and tools that only OpenAI's servers can run or open. Shapes as in OpenAI's API
reference (create response). Driven by history.py through responses.py.
"""

from typing import Any

import msgspec
import orjson

from rollmesh.runtime.chat import ChatMessage, read_message
from rollmesh.serve.interception.dialects.frames import refusal

_CALLS = frozenset({"function_call", "custom_tool_call"})
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

    @property
    def is_assistants(self) -> bool:
        return self.role == "assistant" or self.type == "reasoning" or self.type in _CALLS

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


def read_unit(raw: bytes, position: int) -> list[ChatMessage]:
    """The chat message of one unit; SessionError 400 says what is wrong with it."""
    items = orjson.loads(raw)
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
    if kind == "item_reference":
        why = "items are kept by their response: use previous_response_id, or store: false"
        return refusal("item_not_found", f"input[{position}]: {why}")
    why = f"input[{position}]: {kind!r} is nothing that this model can read"
    return refusal("unsupported_content", why)
