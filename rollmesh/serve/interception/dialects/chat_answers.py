"""OpenAI's Chat Completions API, as it is answered: completions and chunks.

Invariant: a stream folds to the plain answer; its first chunk of a choice has the role, its last
the finish reason. What all chunks of a choice share is encoded once. Driven by exchange.py through
dialect.py; chat.py reads the requests.
"""

from collections.abc import Sequence
from typing import Any

import orjson

from rollmesh.core.errors import SessionError
from rollmesh.runtime.chat import Answer, CallDelta, Delta, ToolCall, Turn
from rollmesh.serve.interception.dialects.dialect import Stream
from rollmesh.serve.interception.dialects.failures import openai_failure
from rollmesh.serve.interception.dialects.frames import DONE, event
from rollmesh.serve.interception.reply_view import ReplyView

_CHOICE = (
    b'{"index":%d,"message":{"role":"assistant","content":%b%b},"logprobs":%b,'
    b'"finish_reason":"%b"%b}'
)


class ChatCall:
    """Satisfies Call."""

    def __init__(self, turn: Turn, is_legacy: bool) -> None:
        self.turns: tuple[Turn, ...] = (turn,)
        self.is_streamed = turn.stream
        self._is_legacy = is_legacy
        """Asked with `functions`: a call is told as `function_call`."""

    def whole(self, views: Sequence[ReplyView]) -> bytes:
        choices = b",".join([self._choice(n, view) for n, view in enumerate(views)])
        first = views[0]
        ids = _prompt_ids(first) if first.wish.return_token_ids else b""
        frame = _frame(first, b"chat.completion"), choices, ids, _usage(views)
        return b'{%b,"choices":[%b]%b,"usage":%b}' % frame

    def stream(self, views: Sequence[ReplyView]) -> Stream:
        return ChatStream(views, self._is_legacy)

    def _choice(self, index: int, view: ReplyView) -> bytes:
        answer, num_tokens = view.answer, view.num_tokens
        return _CHOICE % (
            index,
            b"null" if answer.tool_calls and not answer.content else orjson.dumps(answer.content),
            self._beside_content(answer),
            listing(view, 0, num_tokens) if view.wish.logprobs else b"null",
            _finish(view, self._is_legacy),
            _token_ids(view, 0, num_tokens),
        )

    def _beside_content(self, answer: Answer) -> bytes:
        """What else a message says; most say nothing else."""
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
    """Satisfies Stream."""

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
        if not self._views[0].wish.include_usage:
            return DONE
        return b'%b,"choices":[],"usage":%b}\n\n%b' % (self._frame, _usage(self._views), DONE)

    def error(self, error: SessionError) -> bytes:
        return event(openai_failure(error))

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
            if view.wish.return_token_ids:
                prompt_ids = _prompt_ids(view)
        fields += self._fields(delta)
        extra = _token_ids(view, start, delta.num_tokens)
        if view.wish.logprobs:
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
    """Tokens of a whole answer."""
    num_sampled = sum([view.num_tokens for view in views])
    return b'{"prompt_tokens":%d,"completion_tokens":%d,"total_tokens":%d}' % (
        num_prompt,
        num_sampled,
        num_prompt + num_sampled,
    )


def listing(view: ReplyView, start: int, stop: int) -> bytes:
    """`logprobs` of a choice: every sampled token, reasoning and marks included."""
    return b'{"content":%b,"refusal":null}' % view.listed_tokens(start, stop)


def _usage(views: Sequence[ReplyView]) -> bytes:
    """Choices share their prompt."""
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
    if not view.wish.return_token_ids:
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
    """The first call's pieces; agents that know no tools know of no second."""
    if not pieces:
        return []
    function = {"arguments": "".join([piece.arguments for piece in pieces])}
    if pieces[0].id:
        function = {"name": pieces[0].name, **function}
    return [b'"function_call":' + orjson.dumps(function)]
