"""Answers of OpenAI's Responses API: response objects and events.

    created in_progress (output_item.added part.added delta* done part.done output_item.done)*
        completed | incomplete | failed

- Ids derive from the reply, so a repeated answer is equal.
- Each event has its type, its name and the next sequence number.
- Items are sent one after the other; the last event has the items of the answer that is not
  streamed.
- Fields that a request may omit are echoed with the values that were used.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import orjson

from rollmesh.core.errors import SessionError
from rollmesh.runtime.chat import CallDelta, Delta, ToolCall, Turn
from rollmesh.serve.interception.dialects.answer_parts import (
    ReasoningPiece,
    TextPiece,
    blocks_of,
    named_sse_event,
    parts_of,
)
from rollmesh.serve.interception.dialects.dialect import (
    AnswerStream,
    Json,
    ReplyView,
    UpstreamChoice,
)

ID_PREFIX = "resp_"
Item = dict[str, Any]


class EchoedFields(msgspec.Struct, frozen=True, kw_only=True):
    """Fields of the request that its response repeats."""

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


def response(
    view: ReplyView, echo: EchoedFields, status: str, output: list[Item]
) -> dict[str, Any]:
    """The response object; it has `usage` once it has ended."""
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
    """`completed`, or `incomplete` if the token limit ended the reply."""
    return "incomplete" if view.finish_reason == "length" else "completed"


def reasoning_item(view: ReplyView, echo: EchoedFields, index: int, text: str | None) -> Item:
    """A reasoning item; `text` is None while it is being sampled."""
    summary = [] if text is None else [{"type": "summary_text", "text": text}]
    item: Item = {"id": f"rs_{view.head.id}_{index}", "type": "reasoning", "summary": summary}
    if echo.seals_reasoning:
        # Opaque to clients, which send it back; the session recognizes reasoning by its text.
        item["encrypted_content"] = "" if text is None else f"rollmesh-{view.head.id}"
    return item


def message_item(view: ReplyView, index: int, text: str | None, is_whole: bool) -> Item:
    """A message item; `text` is None while it is being sampled."""
    status = "in_progress" if text is None else "completed" if is_whole else "incomplete"
    return {
        "id": f"msg_{view.head.id}_{index}",
        "type": "message",
        "status": status,
        "role": "assistant",
        "content": [] if text is None else [text_part(text)],
    }


def text_part(text: str, listed: bytes = b"[]") -> Item:
    """The content part of a message, with the JSON list of its tokens."""
    logprobs = orjson.Fragment(listed)
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def list_tokens(view: ReplyView, output: list[Item]) -> None:
    """Add log-probs, if requested: those of the whole reply, including reasoning."""
    if not view.options.logprobs:
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


_REASONING, _MESSAGE, _CALL = "reasoning", "message", "function_call"
_DELTA = {
    _REASONING: (b"response.reasoning_summary_text.delta", b'"summary_index":0'),
    _MESSAGE: (b"response.output_text.delta", b'"content_index":0,"logprobs":[]'),
    _CALL: (b"response.function_call_arguments.delta", b""),
}


class ResponsesRequest:
    """Implements DecodedRequest."""

    def __init__(self, turn: Turn, echo: EchoedFields) -> None:
        self.turns: tuple[Turn, ...] = (turn,)
        self.is_streamed = turn.stream
        self._echo = echo

    def whole(self, views: Sequence[ReplyView]) -> bytes:
        (view,) = views
        output, status = list[Item](), final_status(view)
        blocks = blocks_of(view)
        for n, block in enumerate(blocks):
            is_whole = status == "completed" or n + 1 < len(blocks)
            output.append(self._item(view, n, block, is_whole))
        list_tokens(view, output)
        return orjson.dumps(response(view, self._echo, status, output))

    def _item(
        self,
        view: ReplyView,
        index: int,
        block: ReasoningPiece | TextPiece | ToolCall,
        is_whole: bool,
    ) -> Item:
        match block:
            case ReasoningPiece(text):
                return reasoning_item(view, self._echo, index, text)
            case TextPiece(text):
                return message_item(view, index, text, is_whole)
            case ToolCall():
                return call_item(view, index, block, "completed")

    def stream(self, views: Sequence[ReplyView]) -> AnswerStream:
        return ResponseStream(views[0], self._echo)


class ResponseStream:
    """Implements AnswerStream."""

    def __init__(self, view: ReplyView, echo: EchoedFields) -> None:
        self._view = view
        self._echo = echo
        self._sequence = 0
        self._output: list[Item] = []
        """Finished items."""
        self._kind = ""
        """Type of the open item; '' if none is open."""
        self._texts: list[str] = []
        """Pieces of the open item's text."""
        self._call: CallDelta | None = None
        """The first piece of the newest call."""

    def piece(self, choice: int, delta: Delta) -> bytes:
        return b"".join(self._events(delta))

    def end(self, choice: int, delta: Delta) -> bytes:
        status = final_status(self._view)
        events = [*self._events(delta), *self._close(is_whole=status == "completed")]
        list_tokens(self._view, self._output)
        whole = response(self._view, self._echo, status, self._output)
        return b"".join([*events, self._event(f"response.{status}", response=whole)])

    def close(self) -> bytes:
        return b""

    def error(self, error: SessionError) -> bytes:
        whole = response(self._view, self._echo, "in_progress", self._output)
        whole |= {"status": "failed", "error": {"code": error.code, "message": str(error)}}
        fields = {"code": error.code, "message": str(error), "param": None}
        return self._event("error", **fields) + self._event("response.failed", response=whole)

    def _events(self, delta: Delta) -> Iterator[bytes]:
        if self._sequence == 0:
            opened = response(self._view, self._echo, "in_progress", [])
            yield self._event("response.created", response=opened)
            yield self._event("response.in_progress", response=opened)
        for part in parts_of(delta, self._call is not None):
            match part:
                case ReasoningPiece(text):
                    yield from self._enter(_REASONING)
                    yield self._delta(text)
                case TextPiece(text):
                    yield from self._enter(_MESSAGE)
                    yield self._delta(text)
                case CallDelta():
                    yield from self._call_piece(part)

    def _call_piece(self, piece: CallDelta) -> Iterator[bytes]:
        if self._call is None or self._call.index != piece.index:
            yield from self._close()
            self._call = piece
            yield from self._enter(_CALL)
        if piece.arguments:
            yield self._delta(piece.arguments)

    def _enter(self, kind: str) -> Iterator[bytes]:
        """Open an item of this kind, unless one is open."""
        if self._kind == kind:
            return
        yield from self._close()
        self._kind, self._texts = kind, []
        item = self._item(None, is_whole=False)
        index = len(self._output)
        yield self._event("response.output_item.added", output_index=index, item=item)
        if kind == _REASONING:
            part = {"type": "summary_text", "text": ""}
            yield self._on_item("response.reasoning_summary_part.added", summary_index=0, part=part)
        elif kind == _MESSAGE:
            part = text_part("")
            yield self._on_item("response.content_part.added", content_index=0, part=part)

    def _close(self, is_whole: bool = True) -> Iterator[bytes]:
        """Close the open item, if any."""
        if not self._kind:
            return
        text = "".join(self._texts)
        item = self._item(text, is_whole)
        if self._kind == _REASONING:
            (part,), of = item["summary"], {"summary_index": 0}
            yield self._on_item("response.reasoning_summary_text.done", text=text, **of)
            yield self._on_item("response.reasoning_summary_part.done", part=part, **of)
        elif self._kind == _MESSAGE:
            (part,), of = item["content"], {"content_index": 0}
            yield self._on_item("response.output_text.done", text=text, logprobs=[], **of)
            yield self._on_item("response.content_part.done", part=part, **of)
        else:
            name = item["name"]
            yield self._on_item("response.function_call_arguments.done", name=name, arguments=text)
        index = len(self._output)
        yield self._event("response.output_item.done", output_index=index, item=item)
        self._output.append(item)
        self._kind = ""

    def _item(self, text: str | None, is_whole: bool) -> Item:
        """The open item; `text` is given once it is finished."""
        index = len(self._output)
        if self._kind == _REASONING:
            return reasoning_item(self._view, self._echo, index, text)
        if self._kind == _MESSAGE:
            return message_item(self._view, index, text, is_whole)
        assert self._call is not None
        call = ToolCall(self._call.id, self._call.name, text or "")
        status = "in_progress" if text is None else "completed"
        return call_item(self._view, index, call, status)

    def _delta(self, text: str) -> bytes:
        self._texts.append(text)
        kind, more = _DELTA[self._kind]
        index = len(self._output)
        item_id = self._item(None, is_whole=False)["id"].encode()
        sequence, self._sequence = self._sequence, self._sequence + 1
        return (
            b'event: %b\ndata: {"type":"%b","sequence_number":%d,"output_index":%d,'
            b'"item_id":"%b","delta":%b%b%b}\n\n'
        ) % (kind, kind, sequence, index, item_id, orjson.dumps(text), b"," if more else b"", more)

    def _on_item(self, kind: str, **fields: Any) -> bytes:
        item_id = self._item(None, is_whole=False)["id"]
        return self._event(kind, output_index=len(self._output), item_id=item_id, **fields)

    def _event(self, kind: str, **fields: Any) -> bytes:
        sequence, self._sequence = self._sequence, self._sequence + 1
        return named_sse_event({"type": kind, "sequence_number": sequence, **fields})


def read_response(events: Sequence[Json]) -> list[UpstreamChoice]:
    """The response object: the whole answer, or part of a stream's last event."""
    whole = events[-1]
    for event in events:
        if event.get("type") in ("response.completed", "response.incomplete"):
            whole = event["response"]
    output = whole["output"]
    logprobs = [
        each["logprob"]
        for item in output
        for part in item.get("content") or ()
        for each in part.get("logprobs") or ()
    ]
    incomplete = (whole.get("incomplete_details") or {}).get("reason")
    finish_reason = incomplete or whole.get("status") or ""
    return [UpstreamChoice({"output": output}, finish_reason, logprobs=logprobs or None)]
