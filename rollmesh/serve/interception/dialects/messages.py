"""Anthropic's Messages API: POST .../v1/messages and .../v1/messages/count_tokens.

    message_start (content_block_start content_block_delta* content_block_stop)* message_delta
        message_stop

Shapes as in Anthropic's API reference.

- A history unit is one message of the client; the system text is the first unit. A user message is
  split at tool results; the blocks of an assistant message become one chat message.
- Unknown content is refused by its type, except redacted thinking and cache markers.
- A stream's blocks fold to those of the answer that is not streamed. Thinking blocks have a
  signature, since clients send it back.
- Any anthropic-version and anthropic-beta header is accepted.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import orjson

from rollmesh.core.errors import DECODE_ERRORS, SessionError
from rollmesh.core.types import DialectName, OutputGrammar
from rollmesh.runtime.chat import (
    CallDelta,
    ChatMessage,
    Delta,
    RequestedSampling,
    ToolCall,
    ToolChoice,
    Turn,
    read_message,
)
from rollmesh.serve.interception.dialects.answer_parts import (
    COUNTS_SCHEMA,
    TEXT_SCHEMA,
    ReasoningPiece,
    TextPiece,
    blocks_of,
    named_sse_event,
    parts_of,
)
from rollmesh.serve.interception.dialects.dialect import (
    AnswerStream,
    ApiSchema,
    DecodedRequest,
    Json,
    ReplyView,
    RequestBody,
    UpstreamChoice,
    object_schema,
)
from rollmesh.serve.interception.dialects.request_parts import (
    Int64,
    NonNegative,
    PositiveFraction,
    PositiveInt,
    RawMessages,
    RawSchema,
    RawSystem,
    RawTools,
    bad_request,
    check_tool_choice,
    nonempty_array,
    present_json,
    raw_field,
    read_body,
    read_tool_choice,
    schema_text,
    tools_of_messages,
)


class OutputFormat(msgspec.Struct):
    """`output_format`, and `output_config.format`."""

    schema: RawSchema = raw_field()


class OutputConfig(msgspec.Struct):
    """`output_config`."""

    format: OutputFormat | None = None


class MessagesBody(msgspec.Struct, kw_only=True):
    """The keys that are read (Anthropic's API reference)."""

    messages: RawMessages
    model: str | None = None
    max_tokens: PositiveInt | None = None
    system: RawSystem = raw_field()
    tools: RawTools = raw_field()
    tool_choice: Any = None
    stream: bool | None = None
    stop_sequences: list[str] | None = None
    temperature: NonNegative | None = None
    top_p: PositiveFraction | None = None
    top_k: Int64 | None = None
    output_format: OutputFormat | None = None
    output_config: OutputConfig | None = None


_decoder = msgspec.json.Decoder(MessagesBody)


_ANSWER = object_schema(
    type={"const": "message"},
    id=TEXT_SCHEMA,
    model=TEXT_SCHEMA,
    role={"const": "assistant"},
    content={"type": "array"},
    stop_reason=TEXT_SCHEMA,
    usage=COUNTS_SCHEMA,
)
_ERROR = object_schema(
    type={"const": "error"},
    error=object_schema(message=TEXT_SCHEMA, type=TEXT_SCHEMA, code=TEXT_SCHEMA),
)


class MessagesDialect:
    """Implements Dialect."""

    name: DialectName = "messages"
    route = "/messages"
    count_route = "/messages/count_tokens"
    history_key = "messages"
    end_events = frozenset({"message_stop"})
    error_events = frozenset[str]()
    prefers_x_api_key = True
    schema = ApiSchema("Message", MessagesBody, _ANSWER, "AnthropicError", _ERROR)

    def decode(self, request: RequestBody) -> DecodedRequest:
        body = read_body(_decoder, request.body, "messages request")
        system = present_json(body.system)
        units = [b'{"role":"system","content":%b}' % system] if system not in (b"", b'""') else []
        tools = present_json(body.tools)
        if tools:
            tools = tools_of_messages(tools)
        choice, is_parallel = _tool_choice(body.tool_choice)
        check_tool_choice(choice, tools)
        turn = Turn(
            messages=units,
            messages_raw=nonempty_array(body.messages, "messages"),
            read=read_unit,
            tools=tools,
            tool_choice=choice,
            parallel_calls=is_parallel,
            sampling=_sampling(body),
            model=body.model or "",
            stream=bool(body.stream),
            digest=request.digest,
            is_retry=request.is_retry,
            dialect=self.name,
        )
        return MessagesRequest(turn)

    def error(self, error: SessionError) -> bytes:
        return orjson.dumps(anthropic_error(error))

    def error_event(self, error: SessionError) -> bytes:
        return named_sse_event(anthropic_error(error))

    def read_answer(self, events: Sequence[Json]) -> list[UpstreamChoice]:
        return read_upstream_message(events)


def _tool_choice(value: Any) -> tuple[ToolChoice, bool]:
    """The choice, and whether one turn may have several calls."""
    is_parallel = not (isinstance(value, dict) and value.get("disable_parallel_tool_use"))
    return read_tool_choice(value), is_parallel


def _sampling(body: MessagesBody) -> RequestedSampling:
    form = body.output_format or (body.output_config and body.output_config.format)
    grammar = None
    if form:
        text = schema_text(bytes(form.schema), "output_config.format.schema")
        grammar = OutputGrammar("json_schema", text)
    return RequestedSampling(
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        max_tokens=body.max_tokens,
        stop=tuple(filter(None, body.stop_sequences or ())),
        grammar=grammar,
    )


Blocks = str | list[dict[str, Any] | str] | None


class _Unit(msgspec.Struct):
    role: str
    content: Blocks = None


_unit_decoder = msgspec.json.Decoder(_Unit)


def read_unit(raw: bytes, position: int) -> list[ChatMessage]:
    """The chat messages of one message; SessionError 400 names its position and the problem."""
    try:
        message = _unit_decoder.decode(raw)
    except DECODE_ERRORS as error:
        why = f"messages[{position}]: {error}"
        raise bad_request("invalid_messages", why) from None
    if isinstance(message.content, str) or message.content is None:
        plain = {"role": message.role, "content": message.content or ""}
        return [_chat(plain, position)]
    blocks = [_as_block(block) for block in message.content]
    if message.role == "assistant":
        return [_chat(_assistant(blocks), position)]
    return [_chat(each, position) for each in _split_at_results(message.role, blocks)]


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


def _split_at_results(role: str, blocks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Tool results as messages of their own, and messages of the blocks between them, in order."""
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
    """A block as a content part of a chat message."""
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
        raise bad_request("invalid_messages", f"messages[{position}]: {error}") from None
    return read_message(raw, position)


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


class MessagesRequest:
    """Implements DecodedRequest."""

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

    def stream(self, views: Sequence[ReplyView]) -> AnswerStream:
        return MessageStream(views[0])


class MessageStream:
    """Implements AnswerStream."""

    def __init__(self, view: ReplyView) -> None:
        self._view = view
        self._is_opened = False
        self._open_kind = ""
        """Type of the open block: `text`, `thinking` or `tool_use`; '' if none is open."""
        self._open_call = -1
        self._index = -1

    def piece(self, choice: int, delta: Delta) -> bytes:
        return b"".join(self._events(delta))

    def end(self, choice: int, delta: Delta) -> bytes:
        events = [*self._events(delta), *self._close()]
        usage = _usage(self._view, self._view.num_tokens)
        last = {"type": "message_delta", "delta": _finish(self._view), "usage": usage}
        return b"".join([*events, named_sse_event(last), named_sse_event({"type": "message_stop"})])

    def close(self) -> bytes:
        return b""

    def error(self, error: SessionError) -> bytes:
        return named_sse_event(anthropic_error(error))

    def _events(self, delta: Delta) -> Iterator[bytes]:
        if not self._is_opened:
            self._is_opened = True
            message = _message(self._view, [])
            message |= {"stop_reason": None, "stop_sequence": None, "usage": _usage(self._view, 0)}
            yield named_sse_event({"type": "message_start", "message": message})
        for part in parts_of(delta, self._open_call >= 0):
            match part:
                case ReasoningPiece(text):
                    yield from self._enter("thinking", {"thinking": "", "signature": ""})
                    yield self._text(text)
                case TextPiece(text):
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
        """Open a block of this kind, unless one is open."""
        if self._open_kind == kind:
            return
        yield from self._close()
        self._index += 1
        self._open_kind = kind
        block = {"type": kind, **empty}
        start = {"type": "content_block_start", "index": self._index, "content_block": block}
        yield named_sse_event(start)

    def _close(self) -> Iterator[bytes]:
        """Close the open block, if any."""
        if not self._open_kind:
            return
        if self._open_kind == "thinking":
            signature = {"type": "signature_delta", "signature": _signature(self._view)}
            signed = {"type": "content_block_delta", "index": self._index, "delta": signature}
            yield named_sse_event(signed)
        self._open_kind = ""
        yield named_sse_event({"type": "content_block_stop", "index": self._index})

    def _text(self, text: str) -> bytes:
        kind, key = _KEYS[self._open_kind]
        return _TEXT_DELTA % (self._index, kind, key, orjson.dumps(text))


def _block(view: ReplyView, block: ReasoningPiece | TextPiece | ToolCall) -> dict[str, Any]:
    """A block of an answer that is not streamed."""
    match block:
        case ReasoningPiece(text):
            return {"type": "thinking", "thinking": text, "signature": _signature(view)}
        case TextPiece(text):
            return {"type": "text", "text": text}
        case ToolCall(call_id, name, arguments):
            return {"type": "tool_use", "id": call_id, "name": name, "input": _input(arguments)}


def anthropic_error(error: SessionError) -> dict[str, Any]:
    """The error as body and as event; `code` extends Anthropic's shape, since clients key on it."""
    default = "api_error" if error.status >= 500 else "invalid_request_error"
    kind = _ERROR_TYPES.get(error.status, default)
    return {"type": "error", "error": {"type": kind, "message": str(error), "code": error.code}}


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
    """Opaque to clients, which send it back; the session recognizes thinking by its text."""
    return f"rollmesh-{view.head.id}"


def _input(text: str) -> Any:
    """A call's arguments as the object that this API requires."""
    try:
        found = orjson.loads(text)
    except orjson.JSONDecodeError:
        return {}
    return found if isinstance(found, dict) else {}


def read_upstream_message(events: Sequence[Json]) -> list[UpstreamChoice]:
    """The message: one object, or events that build its blocks."""
    if events[0].get("type") == "message":
        message = events[0]
        content, reason = message["content"], message.get("stop_reason") or ""
        return [UpstreamChoice({"role": "assistant", "content": content}, reason)]
    if events[0].get("type") != "message_start":
        return []
    blocks: dict[int, Json] = {}
    inputs: dict[int, str] = {}
    reason = ""
    for event in events:
        match event.get("type"):
            case "content_block_start":
                blocks[event["index"]] = dict(event["content_block"])
            case "content_block_delta":
                _add_block(blocks[event["index"]], event["delta"], inputs, event["index"])
            case "message_delta":
                reason = event["delta"].get("stop_reason") or reason
    for index, text in inputs.items():
        blocks[index]["input"] = orjson.loads(text or "{}")
    content = [blocks[index] for index in sorted(blocks)]
    return [UpstreamChoice({"role": "assistant", "content": content}, reason)]


def _add_block(block: Json, delta: Json, inputs: dict[int, str], index: int) -> None:
    if delta.get("type") == "input_json_delta":
        inputs[index] = inputs.get(index, "") + delta["partial_json"]
        return
    for key in ("text", "thinking", "signature"):
        if isinstance(delta.get(key), str):
            block[key] = block.get(key, "") + delta[key]
