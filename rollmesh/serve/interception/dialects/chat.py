"""OpenAI's Chat Completions API: POST .../v1/chat/completions.

Shapes as in OpenAI's API reference (create chat completion); `return_token_ids` as in vLLM;
`functions` and `function_call` are the predecessors of tools.

- Messages are not decoded here: the session decodes those that are new to it.
- A stream folds to the answer that is not streamed. The first chunk of a choice has the role, the
  last one the finish reason.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
import orjson

from rollmesh.core.errors import SessionError
from rollmesh.core.memo import Memo
from rollmesh.core.types import DialectName
from rollmesh.runtime.chat import (
    CallDelta,
    ChatMessage,
    Delta,
    Function,
    MessageToolCall,
    ParsedReply,
    ToolCall,
    ToolChoice,
    Turn,
    read_message,
)
from rollmesh.serve.interception.dialects.answer_parts import (
    DONE,
    NUMBER_SCHEMA,
    OPENAI_ERROR,
    TEXT_SCHEMA,
    OpenAIDialect,
    openai_error,
    sse_event,
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
    NumTopLogprobs,
    OpenAISamplingBody,
    PositiveInt,
    RawChatMessages,
    RawTools,
    bad_request,
    check_tool_choice,
    nonempty_array,
    present_json,
    raw_field,
    read_body,
    read_tool_choice,
)


class ChatBody(OpenAISamplingBody, kw_only=True):
    """The keys that are read, besides those of sampling."""

    messages: RawChatMessages
    tools: RawTools = raw_field()
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    functions: RawTools = raw_field()
    function_call: Any = None
    max_completion_tokens: PositiveInt | None = None
    logprobs: bool | None = None
    top_logprobs: NumTopLogprobs | None = None


class _LegacyMessage(msgspec.Struct):
    function_call: Function | None = None


_decoder = msgspec.json.Decoder(ChatBody)


def completion_schema(kind: str) -> Json:
    """The JSON schema of an answer of Chat or Completions."""
    choice = object_schema(index=NUMBER_SCHEMA, finish_reason=TEXT_SCHEMA)
    counts = ("prompt_tokens", "completion_tokens", "total_tokens")
    return object_schema(
        object={"const": kind},
        id=TEXT_SCHEMA,
        model=TEXT_SCHEMA,
        created=NUMBER_SCHEMA,
        choices={"type": "array", "items": choice},
        usage=object_schema(**dict.fromkeys(counts, NUMBER_SCHEMA)),
    )


class ChatDialect(OpenAIDialect):
    """Implements Dialect."""

    name: DialectName = "chat"
    route = "/chat/completions"
    history_key = "messages"
    schema = ApiSchema(
        "ChatCompletion",
        ChatBody,
        completion_schema("chat.completion"),
        "OpenAIError",
        OPENAI_ERROR,
    )

    def decode(self, request: RequestBody) -> DecodedRequest:
        body = read_body(_decoder, request.body, "chat completion request")
        tools, choice, is_legacy = _tools(body)
        turn = Turn(
            messages=[],
            messages_raw=nonempty_array(body.messages, "messages"),
            read=_read_legacy if is_legacy else None,
            tools=tools,
            tool_choice=choice,
            parallel_calls=body.parallel_tool_calls is not False and not is_legacy,
            num_choices=body.n or 1,
            num_top_logprobs=(body.top_logprobs or 0) if body.logprobs else 0,
            sampling=body.requested_sampling(body.max_completion_tokens or body.max_tokens),
            model=body.model or "",
            stream=bool(body.stream),
            include_usage=body.includes_usage,
            logprobs=bool(body.logprobs),
            return_token_ids=bool(body.return_token_ids),
            digest=request.digest,
            is_retry=request.is_retry,
            dialect=self.name,
        )
        return ChatRequest(turn, is_legacy)

    def read_answer(self, events: Sequence[Json]) -> list[UpstreamChoice]:
        return read_chat_choices(events)


_AUTO = ToolChoice()


def _tools(body: ChatBody) -> tuple[bytes, ToolChoice, bool]:
    """Tools in chat shape, the choice among them, and whether they were sent as `functions`."""
    if body.tool_choice is None and not body.functions:
        return present_json(body.tools), _AUTO, False
    tools, functions = present_json(body.tools), present_json(body.functions)
    is_legacy = bool(functions) and not tools
    if is_legacy:
        tools = _from_functions(functions)
    choice = read_tool_choice(body.function_call if is_legacy else body.tool_choice)
    check_tool_choice(choice, tools)
    return tools, choice, is_legacy


@Memo
def _from_functions(functions: bytes) -> bytes:
    try:
        each = msgspec.json.decode(functions, type=list[dict[str, Any]])
    except msgspec.MsgspecError as error:
        raise bad_request("invalid_tools", f"functions: {error}") from None
    return orjson.dumps([{"type": "function", "function": function} for function in each])


def _read_legacy(raw: bytes, position: int) -> list[ChatMessage]:
    """Read a message of an agent that uses `functions`: its call becomes a tool call without id."""
    message = read_message(raw, position)
    call = msgspec.json.decode(raw, type=_LegacyMessage).function_call
    if call is not None and message.role == "assistant":
        message.tool_calls = [*(message.tool_calls or ()), MessageToolCall(call)]
    return [message]


_CHOICE = (
    b'{"index":%d,"message":{"role":"assistant","content":%b%b},"logprobs":%b,'
    b'"finish_reason":"%b"%b}'
)


class ChatRequest:
    """Implements DecodedRequest."""

    def __init__(self, turn: Turn, is_legacy: bool) -> None:
        self.turns: tuple[Turn, ...] = (turn,)
        self.is_streamed = turn.stream
        self._is_legacy = is_legacy
        """The request offered `functions`: a call is encoded as `function_call`."""

    def whole(self, views: Sequence[ReplyView]) -> bytes:
        choices = b",".join([self._choice(n, view) for n, view in enumerate(views)])
        first = views[0]
        ids = _prompt_ids(first) if first.options.return_token_ids else b""
        frame = _frame(first, b"chat.completion"), choices, ids, _usage(views)
        return b'{%b,"choices":[%b]%b,"usage":%b}' % frame

    def stream(self, views: Sequence[ReplyView]) -> AnswerStream:
        return ChatStream(views, self._is_legacy)

    def _choice(self, index: int, view: ReplyView) -> bytes:
        answer, num_tokens = view.answer, view.num_tokens
        return _CHOICE % (
            index,
            b"null" if answer.tool_calls and not answer.content else orjson.dumps(answer.content),
            self._more_fields(answer),
            listing(view, 0, num_tokens) if view.options.logprobs else b"null",
            _finish(view, self._is_legacy),
            _token_ids(view, 0, num_tokens),
        )

    def _more_fields(self, answer: ParsedReply) -> bytes:
        """Reasoning and tool calls of a message; most have neither."""
        fields = b""
        if answer.reasoning:
            fields += b',"reasoning_content":' + orjson.dumps(answer.reasoning)
        if answer.tool_calls and self._is_legacy:
            fields += b',"function_call":' + orjson.dumps(_function(answer.tool_calls[0]))
        elif answer.tool_calls:
            calls = [_call(call) for call in answer.tool_calls]
            fields += b',"tool_calls":' + orjson.dumps(calls)
        return fields


class ChatStream:
    """Implements AnswerStream; the parts that a choice's chunks share are encoded once."""

    def __init__(self, views: Sequence[ReplyView], is_legacy: bool) -> None:
        self._views = views
        self._is_legacy = is_legacy
        self._num_sent = [0] * len(views)
        self._is_opened = [False] * len(views)
        frame = b"data: {%b" % _frame(views[0], b"chat.completion.chunk")
        self._heads = [
            b'%b,"choices":[{"index":%d,"delta":{' % (frame, n) for n in range(len(views))
        ]
        self._frame = frame

    def piece(self, choice: int, delta: Delta) -> bytes:
        return self._chunk(choice, delta, b"null")

    def end(self, choice: int, delta: Delta) -> bytes:
        finish = b'"%b"' % _finish(self._views[choice], self._is_legacy)
        return self._chunk(choice, delta, finish)

    def close(self) -> bytes:
        if not self._views[0].options.include_usage:
            return DONE
        return b'%b,"choices":[],"usage":%b}\n\n%b' % (self._frame, _usage(self._views), DONE)

    def error(self, error: SessionError) -> bytes:
        return sse_event(openai_error(error))

    def _chunk(self, choice: int, delta: Delta, finish: bytes) -> bytes:
        view, start = self._views[choice], self._num_sent[choice]
        self._num_sent[choice] = delta.num_tokens
        prompt_ids = b""
        fields: list[bytes] = []
        if not self._is_opened[choice]:
            self._is_opened[choice] = True
            fields.append(b'"role":"assistant"')
            if not delta.content:
                fields.append(b'"content":""')
            if view.options.return_token_ids:
                prompt_ids = _prompt_ids(view)
        fields += self._fields(delta)
        extra = _token_ids(view, start, delta.num_tokens)
        if view.options.logprobs:
            extra += b',"logprobs":' + listing(view, start, delta.num_tokens)
        parts = self._heads[choice], b",".join(fields), finish, extra, prompt_ids
        return b'%b%b},"finish_reason":%b%b}]%b}\n\n' % parts

    def _fields(self, delta: Delta) -> list[bytes]:
        fields: list[bytes] = []
        if delta.reasoning:
            fields.append(b'"reasoning_content":' + orjson.dumps(delta.reasoning))
        if delta.content:
            fields.append(b'"content":' + orjson.dumps(delta.content))
        if delta.calls and self._is_legacy:
            fields += _function_delta([call for call in delta.calls if call.index == 0])
        elif delta.calls:
            fields.append(b'"tool_calls":' + orjson.dumps([_call_delta(c) for c in delta.calls]))
        return fields


def usage(views: Sequence[ReplyView], num_prompt: int) -> bytes:
    """The `usage` of a whole answer."""
    num_sampled = sum([view.num_tokens for view in views])
    return b'{"prompt_tokens":%d,"completion_tokens":%d,"total_tokens":%d}' % (
        num_prompt,
        num_sampled,
        num_prompt + num_sampled,
    )


def listing(view: ReplyView, start: int, stop: int) -> bytes:
    """The `logprobs` of a choice: every sampled token, including reasoning and markup."""
    return b'{"content":%b,"refusal":null}' % view.listed_tokens(start, stop)


def _usage(views: Sequence[ReplyView]) -> bytes:
    """The `usage` of choices that share their prompt."""
    return usage(views, views[0].head.num_prompt_tokens)


def _frame(view: ReplyView, kind: bytes) -> bytes:
    head = view.head
    return b'"id":"chatcmpl-%b","object":"%b","created":%d,"model":%b' % (
        head.id.encode(),
        kind,
        head.created_s,
        orjson.dumps(view.model),
    )


def _finish(view: ReplyView, is_legacy: bool) -> bytes:
    reason = view.finish_reason
    return b"function_call" if is_legacy and reason == "tool_calls" else reason.encode()


def _prompt_ids(view: ReplyView) -> bytes:
    return b',"prompt_token_ids":' + orjson.dumps(view.prompt_ids())


def _token_ids(view: ReplyView, start: int, stop: int) -> bytes:
    if not view.options.return_token_ids:
        return b""
    return b',"token_ids":' + orjson.dumps(view.token_ids(start, stop))


def _function(call: ToolCall) -> dict[str, str]:
    return {"name": call.name, "arguments": call.arguments}


def _call(call: ToolCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": _function(call)}


def _call_delta(call: CallDelta) -> dict[str, Any]:
    if not call.id:
        return {"index": call.index, "function": {"arguments": call.arguments}}
    function = {"name": call.name, "arguments": call.arguments}
    return {"index": call.index, "id": call.id, "type": "function", "function": function}


def _function_delta(pieces: list[CallDelta]) -> list[bytes]:
    """The pieces of the first call: `function_call` has room for one."""
    if not pieces:
        return []
    function = {"arguments": "".join([piece.arguments for piece in pieces])}
    if pieces[0].id:
        function = {"name": pieces[0].name, **function}
    return [b'"function_call":' + orjson.dumps(function)]


def read_chat_choices(events: Sequence[Json]) -> list[UpstreamChoice]:
    """The choices of a Chat or Completions answer: one object, or chunks to be added up.

    Where engines put tokens:

        SGLang  choices[].response_token_ids, .prompt_token_ids, .meta_info, sglext, metadata
        vLLM    choices[].token_ids; prompt_token_ids at the top or in the choice, in each chunk
        OpenAI  choices[].logprobs.content[].logprob: no ids
    """
    found: dict[int, UpstreamChoice] = {}
    prompt_ids = None
    for chunk in events:
        prompt_ids = chunk.get("prompt_token_ids") or prompt_ids
        for choice in chunk.get("choices") or ():
            index = choice.get("index", 0)
            answer = found.setdefault(index, UpstreamChoice({"role": "assistant", "content": ""}))
            _add_choice(answer, choice)
    for chunk in events:
        _add_extension(found, chunk)
    for answer in found.values():
        answer.prompt_ids = answer.prompt_ids or prompt_ids
        if answer.versions is None and answer.token_ids is not None:
            answer.versions = _versions(events, len(answer.token_ids))
    return [found[index] for index in sorted(found)]


def _add_choice(answer: UpstreamChoice, choice: Json) -> None:
    delta = choice.get("message") or choice.get("delta") or {"content": choice.get("text")}
    message = answer.message
    for key in ("content", "reasoning_content", "reasoning", "refusal"):
        if isinstance(delta.get(key), str):
            message[key] = (message.get(key) or "") + delta[key]
    for number, piece in enumerate(delta.get("tool_calls") or ()):
        _add_call(message.setdefault("tool_calls", []), piece.get("index", number), piece)
    answer.finish_reason = choice.get("finish_reason") or answer.finish_reason
    answer.prompt_ids = choice.get("prompt_token_ids") or answer.prompt_ids
    meta = choice.get("meta_info") or {}
    pairs = meta.get("output_token_logprobs")
    if pairs:
        answer.token_ids = [pair[1] for pair in pairs]
        answer.logprobs = [pair[0] for pair in pairs]
        return
    ids = choice.get("response_token_ids") or choice.get("token_ids")
    if isinstance(ids, list):
        answer.token_ids = (answer.token_ids or []) + ids
    logprobs = list(_logprobs(choice.get("logprobs") or {}))
    if logprobs:
        answer.logprobs = (answer.logprobs or []) + logprobs


def _add_call(calls: list[Json], index: int, piece: Json) -> None:
    while len(calls) <= index:
        calls.append({"id": "", "type": "function", "function": {"name": "", "arguments": ""}})
    call, function = calls[index], piece.get("function") or {}
    call["id"] = piece.get("id") or call["id"]
    call["function"]["name"] += function.get("name") or ""
    call["function"]["arguments"] += function.get("arguments") or ""


def _logprobs(listed: Json) -> Iterable[float]:
    """Log-probs of Chat's list of tokens, or of the plain list of Completions."""
    content = listed.get("content")
    return listed.get("token_logprobs") or [each["logprob"] for each in content or ()]


def _add_extension(found: dict[int, UpstreamChoice], chunk: Json) -> None:
    """Add SGLang's `sglext`, which a stream sends in a chunk without choices."""
    extension = chunk.get("sglext") or {}
    for index, ids in enumerate(extension.get("output_ids") or ()):
        if index in found and ids:
            found[index].token_ids = ids
    if extension.get("input_ids"):
        for answer in found.values():
            answer.prompt_ids = extension["input_ids"]


def _versions(events: Sequence[Json], num_tokens: int) -> list[tuple[str, int]] | None:
    for chunk in events:
        metadata = chunk.get("metadata") or {}
        spans = metadata.get("weight_versions")
        if spans:
            return [(str(span["version"]), span["end"] - span["start"]) for span in spans]
        if metadata.get("weight_version") is not None:
            return [(str(metadata["weight_version"]), num_tokens)]
    return None
