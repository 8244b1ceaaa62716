"""Anthropic's messages as chat messages: the reader of history units, and of tools.

A unit is one message as the client sent it. A user message may hold tool results, which are
messages of their own for a chat template; an assistant message may hold thinking, text and tool
uses, which are one. Invariant: what is not understood is refused by its type, never dropped, but
for redacted thinking and cache markers, which say nothing. Shapes as in Anthropic's Messages API
reference. Driven by history.py through messages.py.
"""

from typing import Any

import msgspec
import orjson

from rollmesh.core.errors import DECODE_ERRORS
from rollmesh.runtime.chat import ChatMessage, read_message
from rollmesh.serve.interception.dialects.frames import refusal

Blocks = str | list[dict[str, Any] | str] | None


class _Message(msgspec.Struct):
    role: str
    content: Blocks = None


_decoder = msgspec.json.Decoder(_Message)


def read_unit(raw: bytes, position: int) -> list[ChatMessage]:
    """The chat messages of one message; SessionError 400 names it and what is wrong."""
    try:
        message = _decoder.decode(raw)
    except DECODE_ERRORS as error:
        why = f"messages[{position}]: {error}"
        raise refusal("invalid_messages", why) from None
    if isinstance(message.content, str) or message.content is None:
        plain = {"role": message.role, "content": message.content or ""}
        return [_chat(plain, position)]
    blocks = [_as_block(block) for block in message.content]
    if message.role == "assistant":
        return [_chat(_assistant(blocks), position)]
    return [_chat(each, position) for each in _others(message.role, blocks)]


def _assistant(blocks: list[dict[str, Any]]) -> dict[str, Any]:
    reasoning: list[str] = []
    parts: list[dict[str, Any]] = []
    calls: list[dict[str, Any]] = []
    for block in blocks:
        kind = block.get("type")
        if kind == "thinking":
            reasoning.append(str(block.get("thinking", "")))
        elif kind == "tool_use":
            function = {"name": block.get("name"), "arguments": block.get("input")}
            calls.append({"id": block.get("id"), "function": function})
        elif kind != "redacted_thinking":
            parts.append(_part(block))
    message: dict[str, Any] = {"role": "assistant", "content": parts}
    if reasoning:
        message["reasoning_content"] = "\n".join(reasoning)
    if calls:
        message["tool_calls"] = calls
    return message


def _others(role: str, blocks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Tool results and what stands between them, in order."""
    messages: list[dict[str, Any]] = []
    parts: list[dict[str, Any]] = []
    for block in blocks:
        if block.get("type") != "tool_result":
            parts.append(_part(block))
            continue
        if parts:
            messages.append({"role": role, "content": parts})
            parts = []
        content = block.get("content") or ""
        if isinstance(content, list):
            content = [_part(_as_block(each)) for each in content]
        result = {"role": "tool", "content": content, "tool_call_id": block.get("tool_use_id")}
        messages.append(result)
    if parts or not messages:
        messages.append({"role": role, "content": parts})
    return messages


def _as_block(block: Any) -> dict[str, Any]:
    return block if isinstance(block, dict) else {"type": "text", "text": block}


def _part(block: dict[str, Any]) -> dict[str, Any]:
    """A block as a part of a chat message."""
    source = block.get("source")
    if isinstance(source, dict):
        kind, data = source.get("type"), source.get("data")
        if block.get("type") == "image":
            url = source.get("url")
            if kind == "base64":
                url = f"data:{source.get('media_type')};base64,{data}"
            return {"type": "image_url", "image_url": {"url": url}}
        if block.get("type") == "document" and kind == "text":
            return {"type": "text", "text": data}
    return {"type": str(block.get("type")), "text": block.get("text")}


def _chat(message: dict[str, Any], position: int) -> ChatMessage:
    try:
        raw = orjson.dumps(message)
    except TypeError as error:  # integers past 64 bits
        raise refusal("invalid_messages", f"messages[{position}]: {error}") from None
    return read_message(raw, position)
