"""Anthropic's Messages API, as it is answered: messages and events.

    message_start (content_block_start content_block_delta* content_block_stop)* message_delta
        message_stop

Invariant: blocks come one after the other, a stream's blocks fold to the plain answer's, and a
thinking block has a signature, since clients send it back. Every event is named and has its type,
as half of the clients read the one and half the other. Driven by exchange.py through dialect.py;
messages.py reads the requests.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import orjson

from rollmesh.core.errors import SessionError
from rollmesh.runtime.chat import CallDelta, Delta, ToolCall, Turn
from rollmesh.serve.interception.dialects.blocks import Said, Thought, blocks_of, parts_of
from rollmesh.serve.interception.dialects.dialect import Stream
from rollmesh.serve.interception.dialects.frames import named_event
from rollmesh.serve.interception.reply_view import ReplyView

_ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
_TEXT_DELTA = (
    b'event: content_block_delta\ndata: {"type":"content_block_delta","index":%d,'
    b'"delta":{"type":"%b","%b":%b}}\n\n'
)
_KEYS = {
    "text": (b"text_delta", b"text"),
    "thinking": (b"thinking_delta", b"thinking"),
    "tool_use": (b"input_json_delta", b"partial_json"),
}


class MessageCall:
    """Satisfies Call."""

    def __init__(self, turn: Turn) -> None:
        self.turns: tuple[Turn, ...] = (turn,)
        self.is_streamed = turn.stream

    def whole(self, views: Sequence[ReplyView]) -> bytes:
        (view,) = views
        content = [_block(view, block) for block in blocks_of(view)]
        message = _message(view, content)
        message |= _finish(view)
        message["usage"] = _usage(view, view.num_tokens)
        return orjson.dumps(message)

    def stream(self, views: Sequence[ReplyView]) -> Stream:
        return MessageStream(views[0])


class MessageStream:
    """Satisfies Stream."""

    def __init__(self, view: ReplyView) -> None:
        self._view = view
        self._is_opened = False
        self._open_kind = ""
        """Of the block that is open: `text`, `thinking`, `tool_use`, or none."""
        self._open_call = -1
        self._index = -1

    def piece(self, choice: int, delta: Delta) -> bytes:
        return b"".join(self._events(delta))

    def end(self, choice: int, delta: Delta) -> bytes:
        events = [*self._events(delta), *self._close()]
        usage = _usage(self._view, self._view.num_tokens)
        last = {"type": "message_delta", "delta": _finish(self._view), "usage": usage}
        return b"".join([*events, named_event(last), named_event({"type": "message_stop"})])

    def close(self) -> bytes:
        return b""

    def error(self, error: SessionError) -> bytes:
        return named_event(failure(error))

    def _events(self, delta: Delta) -> Iterator[bytes]:
        if not self._is_opened:
            self._is_opened = True
            message = _message(self._view, [])
            message |= {"stop_reason": None, "stop_sequence": None, "usage": _usage(self._view, 0)}
            yield named_event({"type": "message_start", "message": message})
        for part in parts_of(delta, self._open_call >= 0):
            match part:
                case Thought(text):
                    yield from self._enter("thinking", {"thinking": "", "signature": ""})
                    yield self._text(text)
                case Said(text):
                    yield from self._enter("text", {"text": ""})
                    yield self._text(text)
                case CallDelta():
                    yield from self._call(part)

    def _call(self, call: CallDelta) -> Iterator[bytes]:
        if call.index != self._open_call:
            yield from self._close()
            self._open_call = call.index
            yield from self._enter("tool_use", {"id": call.id, "name": call.name, "input": {}})
        if call.arguments:
            yield self._text(call.arguments)

    def _enter(self, kind: str, empty: dict[str, Any]) -> Iterator[bytes]:
        """Open a block of this kind, unless it is open."""
        if self._open_kind == kind:
            return
        yield from self._close()
        self._index += 1
        self._open_kind = kind
        block = {"type": kind, **empty}
        start = {"type": "content_block_start", "index": self._index, "content_block": block}
        yield named_event(start)

    def _close(self) -> Iterator[bytes]:
        """Close the block that is open, if one is."""
        if not self._open_kind:
            return
        if self._open_kind == "thinking":
            signature = {"type": "signature_delta", "signature": _signature(self._view)}
            signed = {"type": "content_block_delta", "index": self._index, "delta": signature}
            yield named_event(signed)
        self._open_kind = ""
        yield named_event({"type": "content_block_stop", "index": self._index})

    def _text(self, text: str) -> bytes:
        kind, key = _KEYS[self._open_kind]
        return _TEXT_DELTA % (self._index, kind, key, orjson.dumps(text))


def _block(view: ReplyView, block: Thought | Said | ToolCall) -> dict[str, Any]:
    """A block of a plain answer."""
    match block:
        case Thought(text):
            return {"type": "thinking", "thinking": text, "signature": _signature(view)}
        case Said(text):
            return {"type": "text", "text": text}
        case ToolCall(call_id, name, arguments):
            return {"type": "tool_use", "id": call_id, "name": name, "input": _input(arguments)}


def failure(error: SessionError) -> dict[str, Any]:
    """The error as body and as event; `code` is beyond Anthropic's shape, as clients key on it."""
    default = "api_error" if error.status >= 500 else "invalid_request_error"
    kind = _ERROR_TYPES.get(error.status, default)
    told = {"type": kind, "message": str(error), "code": error.code}
    return {"type": "error", "error": told}


def _message(view: ReplyView, content: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "id": f"msg_{view.head.id}",
        "type": "message",
        "role": "assistant",
        "model": view.model,
        "content": content,
    }


def _finish(view: ReplyView) -> dict[str, Any]:
    stop = view.matched_stop
    reasons = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
    reason = reasons[view.finish_reason]
    if stop is not None and reason == "end_turn":
        reason = "stop_sequence"
    return {"stop_reason": reason, "stop_sequence": stop}


def _usage(view: ReplyView, num_sampled: int) -> dict[str, int]:
    return {
        "input_tokens": view.head.num_prompt_tokens,
        "output_tokens": num_sampled,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 0,
    }


def _signature(view: ReplyView) -> str:
    """Opaque to clients, who give it back; we know thinking by its text."""
    return f"rollmesh-{view.head.id}"


def _input(text: str) -> Any:
    """What a call was given, as the object that this API wants."""
    try:
        found = orjson.loads(text)
    except orjson.JSONDecodeError:
        return {}
    return found if isinstance(found, dict) else {}
