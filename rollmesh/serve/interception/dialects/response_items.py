"""What a response of OpenAI's Responses API consists of: its frame, its items, their parts.

Invariant: ids derive from the reply, so a repeated answer names everything alike; what a request
may leave open is echoed as it was used. Driven by response_events.py.
"""

from typing import Any

import msgspec
import orjson

from rollmesh.runtime.chat import ToolCall
from rollmesh.serve.interception.reply_view import ReplyView

ID_PREFIX = "resp_"
Item = dict[str, Any]


class Echo(msgspec.Struct, frozen=True, kw_only=True):
    """What of the request its response repeats."""

    instructions: str | None
    tools: bytes
    """JSON, like all bytes here."""
    tool_choice: bytes
    parallel_tool_calls: bool
    previous_response_id: str | None
    max_output_tokens: int | None
    metadata: bytes
    seals_reasoning: bool
    """`include` asks for `reasoning.encrypted_content`."""


def response(view: ReplyView, echo: Echo, status: str, output: list[Item]) -> dict[str, Any]:
    """The response object; `usage` once it has ended."""
    params = view.head.params
    is_cut = status == "incomplete"
    return {
        "id": ID_PREFIX + view.head.id,
        "object": "response",
        "created_at": view.head.created_s,
        "status": status,
        "background": False,
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "instructions": echo.instructions,
        "max_output_tokens": echo.max_output_tokens,
        "model": view.model,
        "output": output,
        "parallel_tool_calls": echo.parallel_tool_calls,
        "previous_response_id": echo.previous_response_id,
        "reasoning": {"effort": None, "summary": None},
        "store": False,
        "temperature": params.temperature,
        "text": {"format": {"type": "text"}},
        "tool_choice": orjson.Fragment(echo.tool_choice),
        "tools": orjson.Fragment(echo.tools),
        "top_p": params.top_p,
        "truncation": "disabled",
        "usage": None if status == "in_progress" else _usage(view),
        "metadata": orjson.Fragment(echo.metadata),
    }


def final_status(view: ReplyView) -> str:
    """`completed`, or `incomplete` where the tokens ran out."""
    return "incomplete" if view.finish_reason == "length" else "completed"


def reasoning_item(view: ReplyView, echo: Echo, index: int, text: str | None) -> Item:
    """A reasoning item; without its text while it is thought."""
    summary = [] if text is None else [{"type": "summary_text", "text": text}]
    item: Item = {"id": f"rs_{view.head.id}_{index}", "type": "reasoning", "summary": summary}
    if echo.seals_reasoning:
        # Opaque to clients, who give it back; we know reasoning by its text.
        item["encrypted_content"] = "" if text is None else f"rollmesh-{view.head.id}"
    return item


def message_item(view: ReplyView, index: int, text: str | None, is_whole: bool) -> Item:
    """A message; without content while it is said."""
    status = "in_progress" if text is None else "completed" if is_whole else "incomplete"
    return {
        "id": f"msg_{view.head.id}_{index}",
        "type": "message",
        "status": status,
        "role": "assistant",
        "content": [] if text is None else [text_part(text)],
    }


def text_part(text: str, listed: bytes = b"[]") -> Item:
    """The content of a message, with the list of its tokens."""
    logprobs = orjson.Fragment(listed)
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def list_tokens(view: ReplyView, output: list[Item]) -> None:
    """Put log-probs where they were asked for: those of the whole reply, reasoning and all."""
    if not view.wish.logprobs:
        return
    listed = view.listed_tokens(0, view.num_tokens)
    for item in output:
        if item["type"] == "message":
            item["content"] = [text_part(part["text"], listed) for part in item["content"]]


def call_item(view: ReplyView, index: int, call: ToolCall, status: str) -> Item:
    """A function call."""
    return {
        "id": f"fc_{view.head.id}_{index}",
        "type": "function_call",
        "status": status,
        "call_id": call.id,
        "name": call.name,
        "arguments": call.arguments,
    }


def _usage(view: ReplyView) -> dict[str, Any]:
    num_prompt, num_sampled = view.head.num_prompt_tokens, view.num_tokens
    return {
        "input_tokens": num_prompt,
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens": num_sampled,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": num_prompt + num_sampled,
    }
