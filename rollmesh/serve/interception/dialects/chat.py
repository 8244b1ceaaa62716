"""OpenAI's Chat Completions API: POST .../v1/chat/completions.

Shapes as in OpenAI's API reference (create chat completion, streaming chunks), plus
`return_token_ids` as vLLM has it. Invariant: unknown keys are accepted everywhere; what we cannot
honour without a grammar (`n` > 1, JSON schemas, `top_logprobs`) is refused in one line rather than
ignored. Driven by exchange.py through dialect.py.
"""

from typing import Annotated, Any

import msgspec
import orjson

from rollmesh.core.errors import SessionError
from rollmesh.runtime.deltas import Delta, ToolCall
from rollmesh.runtime.turns import SamplingAsk, ToolChoice, Turn
from rollmesh.serve.interception.view import ReplyView

MAX_SEED = 2**63 - 1

AtLeastOne = Annotated[int, msgspec.Meta(ge=1)]
NotNegative = Annotated[float, msgspec.Meta(ge=0)]
Share = Annotated[float, msgspec.Meta(gt=0, le=1)]


class StreamOptions(msgspec.Struct):
    """`stream_options`."""

    include_usage: bool | None = None


class ResponseFormat(msgspec.Struct):
    """`response_format`."""

    type: str = "text"


class ChatBody(msgspec.Struct):
    """The keys that we read; OpenAI's reference has their meanings."""

    messages: list[msgspec.Raw]
    model: str | None = None
    tools: msgspec.Raw = msgspec.Raw(b"")
    tool_choice: Any = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: NotNegative | None = None
    top_p: Share | None = None
    top_k: int | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    max_tokens: AtLeastOne | None = None
    max_completion_tokens: AtLeastOne | None = None
    stop: str | list[str] | None = None
    n: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    response_format: ResponseFormat | None = None
    return_token_ids: bool | None = None


_decoder = msgspec.json.Decoder(ChatBody)


class ChatDialect:
    """Satisfies Dialect."""

    def decode(self, body: bytes, digest: int, is_retry: bool) -> Turn:
        try:
            asked = _decoder.decode(body)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            why = f"the body is no chat completion request: {error}"
            raise _refusal("invalid_request", why) from None
        _check(asked)
        tools = bytes(asked.tools)
        return Turn(
            messages=[bytes(raw) for raw in asked.messages],
            tools=b"" if tools in (b"", b"null", b"[]") else tools,
            tool_choice=ToolChoice("none" if asked.tool_choice == "none" else "auto"),
            ask=_sampling(asked),
            model=asked.model or "",
            stream=bool(asked.stream),
            include_usage=bool(asked.stream_options and asked.stream_options.include_usage),
            logprobs=bool(asked.logprobs),
            return_token_ids=bool(asked.return_token_ids),
            digest=digest,
            is_retry=is_retry,
        )

    def whole(self, view: ReplyView, delta: Delta) -> bytes:
        message: dict[str, Any] = {"role": "assistant", "content": delta.content or None}
        if delta.reasoning:
            message["reasoning_content"] = delta.reasoning
        if delta.tool_calls:
            message["tool_calls"] = [_call(call) for call in delta.tool_calls]
        elif not delta.content:
            message["content"] = ""
        choice = {
            "index": 0,
            "message": message,
            "logprobs": _logprobs(view, 0, delta.num_tokens),
            "finish_reason": view.finish_reason,
        }
        answer = _frame(view, "chat.completion", choice)
        answer["usage"] = _usage(view)
        if view.turn.return_token_ids:
            choice["token_ids"] = view.token_ids(0, delta.num_tokens)
            answer["prompt_token_ids"] = view.prompt_ids()
        return orjson.dumps(answer)

    def piece(self, view: ReplyView, delta: Delta, start: int) -> bytes:
        return _event(self._chunk(view, delta, start, None))

    def end(self, view: ReplyView, delta: Delta, start: int) -> bytes:
        events = [_event(self._chunk(view, delta, start, view.finish_reason))]
        if view.turn.include_usage:
            usage = _frame(view, "chat.completion.chunk", None)
            usage["usage"] = _usage(view)
            events.append(_event(usage))
        events.append(b"data: [DONE]\n\n")
        return b"".join(events)

    def error(self, error: SessionError) -> bytes:
        return orjson.dumps(_error(error))

    def error_event(self, error: SessionError) -> bytes:
        return _event(_error(error))

    def _chunk(
        self, view: ReplyView, delta: Delta, start: int, finish_reason: str | None
    ) -> dict[str, Any]:
        fields: dict[str, Any] = {}
        if start == 0:
            fields["role"] = "assistant"
        if delta.reasoning:
            fields["reasoning_content"] = delta.reasoning
        if delta.content or start == 0:
            fields["content"] = delta.content
        if delta.tool_calls:
            fields["tool_calls"] = [
                {"index": n, **_call(call)} for n, call in enumerate(delta.tool_calls)
            ]
        choice: dict[str, Any] = {"index": 0, "delta": fields, "finish_reason": finish_reason}
        if view.turn.logprobs:
            choice["logprobs"] = _logprobs(view, start, delta.num_tokens)
        chunk = _frame(view, "chat.completion.chunk", choice)
        if view.turn.return_token_ids:
            choice["token_ids"] = view.token_ids(start, delta.num_tokens)
            if start == 0:
                chunk["prompt_token_ids"] = view.prompt_ids()
        return chunk


def _check(asked: ChatBody) -> None:
    """Refuse what we cannot honour."""
    if not asked.messages:
        raise _refusal("invalid_messages", "messages: expected at least one")
    if asked.n not in (None, 1):
        raise _refusal("unsupported_n", f"n: {asked.n} choices asked, only 1 is possible")
    if asked.top_logprobs:
        raise _refusal("unsupported_top_logprobs", "top_logprobs: only 0 is possible")
    if asked.response_format and asked.response_format.type != "text":
        kind = asked.response_format.type
        raise _refusal("unsupported_response_format", f"response_format: {kind!r} is not possible")


def _sampling(asked: ChatBody) -> SamplingAsk:
    stop = asked.stop or []
    return SamplingAsk(
        temperature=asked.temperature,
        top_p=asked.top_p,
        top_k=asked.top_k,
        frequency_penalty=asked.frequency_penalty,
        presence_penalty=asked.presence_penalty,
        repetition_penalty=asked.repetition_penalty,
        seed=None if asked.seed is None else asked.seed & MAX_SEED,
        max_tokens=asked.max_completion_tokens or asked.max_tokens,
        stop=tuple(s for s in ([stop] if isinstance(stop, str) else stop) if s),
    )


def _frame(view: ReplyView, kind: str, choice: dict[str, Any] | None) -> dict[str, Any]:
    return {
        "id": f"chatcmpl-{view.head.id}",
        "object": kind,
        "created": view.head.created_s,
        "model": view.model,
        "choices": [] if choice is None else [choice],
    }


def _usage(view: ReplyView) -> dict[str, int]:
    num_prompt, num_sampled = view.head.num_prompt_tokens, view.num_tokens
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_sampled,
        "total_tokens": num_prompt + num_sampled,
    }


def _logprobs(view: ReplyView, start: int, stop: int) -> dict[str, Any] | None:
    if not view.turn.logprobs:
        return None
    content = [
        {"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []}
        for text, logprob in view.tokens(start, stop)
    ]
    return {"content": content, "refusal": None}


def _call(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}


def _event(data: dict[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(data) + b"\n\n"


def _error(error: SessionError) -> dict[str, Any]:
    kind = "invalid_request_error"
    if error.status == 401:
        kind = "authentication_error"
    elif error.status == 429:
        kind = "rate_limit_error"
    elif error.status >= 500:
        kind = "server_error"
    return {"error": {"message": str(error), "type": kind, "param": None, "code": error.code}}


def _refusal(code: str, message: str) -> SessionError:
    return SessionError(400, code, message)
