"""OpenAI's Completions API: POST .../v1/completions, raw prompts without a chat.

Shapes as in OpenAI's API reference (create completion).

- A prompt is a text, token ids, or a list of either. A batch becomes several turns, whose choices
  are numbered in order.
- `suffix`, and a `best_of` other than `n`, are refused, since ignoring them changes the answer.
- With `echo` the prompt's tokens have no log-probs: they are not computed.
"""

from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
import orjson

from rollmesh.core.errors import DECODE_ERRORS, SessionError
from rollmesh.core.types import DialectName
from rollmesh.runtime.chat import Delta, Turn
from rollmesh.serve.interception.dialects.answer_parts import (
    DONE,
    OPENAI_ERROR,
    OpenAIDialect,
    openai_error,
    sse_event,
)
from rollmesh.serve.interception.dialects.chat import completion_schema, read_chat_choices, usage
from rollmesh.serve.interception.dialects.dialect import (
    AnswerStream,
    ApiSchema,
    DecodedRequest,
    Json,
    ReplyView,
    RequestBody,
    UpstreamChoice,
)
from rollmesh.serve.interception.dialects.request_parts import (
    Int64,
    NumTopLogprobs,
    OpenAISamplingBody,
    RawPrompt,
    TokenId,
    bad_request,
    read_body,
)

MAX_PROMPTS = 128
DEFAULT_MAX_TOKENS = 16
"""The default of OpenAI's API reference."""

Ids = Annotated[list[TokenId], msgspec.Meta(min_length=1)]
Prompt = str | tuple[int, ...]


class CompletionBody(OpenAISamplingBody, kw_only=True):
    """The keys that are read, besides those of sampling."""

    prompt: RawPrompt
    echo: bool | None = None
    suffix: str | None = None
    best_of: Int64 | None = None
    logprobs: NumTopLogprobs | bool | None = None


_A_BATCH = msgspec.Meta(min_length=1, max_length=MAX_PROMPTS)
_decoder = msgspec.json.Decoder(CompletionBody)
_texts = msgspec.json.Decoder(str | Annotated[list[str], _A_BATCH])
_ids = msgspec.json.Decoder(Ids)
_batch = msgspec.json.Decoder(Annotated[list[Ids], _A_BATCH])


class CompletionsDialect(OpenAIDialect):
    """Implements Dialect."""

    name: DialectName = "completions"
    route = "/completions"
    history_key = "prompt"
    schema = ApiSchema(
        "Completion",
        CompletionBody,
        completion_schema("text_completion"),
        "OpenAIError",
        OPENAI_ERROR,
    )

    def decode(self, request: RequestBody) -> DecodedRequest:
        body = read_body(_decoder, request.body, "completion request")
        if body.suffix:
            raise bad_request("unsupported_suffix", "suffix: text before a suffix is not sampled")
        if body.best_of not in (None, body.n or 1):
            raise bad_request("unsupported_best_of", "best_of: expected the same number as n")
        prompts = read_prompts(bytes(body.prompt))
        turns = tuple(_turn(body, request, n, prompt) for n, prompt in enumerate(prompts))
        return CompletionRequest(turns, bool(body.echo))

    def read_answer(self, events: Sequence[Json]) -> list[UpstreamChoice]:
        return read_chat_choices(events)


def read_prompts(raw: bytes) -> list[Prompt]:
    """The prompts of a request in order; SessionError 400 if there are none."""
    for decoder in (_texts, _ids, _batch):
        try:
            return _prompts_of(decoder.decode(raw))
        except DECODE_ERRORS:
            continue
    why = f"prompt: expected a text, token ids, or 1 to {MAX_PROMPTS} of either in a list"
    raise bad_request("invalid_prompt", why)


def _prompts_of(found: Any) -> list[Prompt]:
    """The prompts in one text, one list of ids, or a list of either."""
    if isinstance(found, str):
        return [found]
    if isinstance(found[0], int):
        return [tuple(found)]
    return [each if isinstance(each, str) else tuple(each) for each in found]


def _turn(body: CompletionBody, request: RequestBody, number: int, prompt: Prompt) -> Turn:
    return Turn(
        messages=[],
        prompt_text=prompt if isinstance(prompt, str) else None,
        prompt_ids=None if isinstance(prompt, str) else prompt,
        num_choices=body.n or 1,
        num_top_logprobs=int(body.logprobs or 0),
        sampling=body.requested_sampling(body.max_tokens or DEFAULT_MAX_TOKENS),
        model=body.model or "",
        stream=bool(body.stream),
        include_usage=body.includes_usage,
        logprobs=body.logprobs is not None and body.logprobs is not False,
        return_token_ids=bool(body.return_token_ids),
        digest=request.digest if number == 0 else hash((request.digest, number)),
        is_retry=request.is_retry,
        dialect="completions",
    )


class CompletionRequest:
    """Implements DecodedRequest."""

    def __init__(self, turns: tuple[Turn, ...], echoes: bool) -> None:
        self.turns = turns
        self.is_streamed = turns[0].stream
        self._echoes = echoes

    def whole(self, views: Sequence[ReplyView]) -> bytes:
        stream = CompletionStream(views, self._echoes)
        choices = [
            stream.choice(n, Delta(view.answer.content, num_tokens=view.num_tokens), view)
            for n, view in enumerate(views)
        ]
        frame = _frame(views[0]), b",".join(choices), _usage(views)
        return b'{%b,"choices":[%b],"usage":%b}' % frame

    def stream(self, views: Sequence[ReplyView]) -> AnswerStream:
        return CompletionStream(views, self._echoes)


class CompletionStream:
    """Implements AnswerStream."""

    def __init__(self, views: Sequence[ReplyView], echoes: bool) -> None:
        self._views = views
        self._echo = [_echo(view) if echoes else None for view in views]
        self._head = b'data: {%b,"choices":[' % _frame(views[0])
        self._num_sent = [0] * len(views)
        self._num_chars = [0] * len(views)
        """Characters sent for each choice; log-probs list each token's offset in the text."""

    def piece(self, choice: int, delta: Delta) -> bytes:
        return b"%b%b]}\n\n" % (self._head, self.choice(choice, delta, None))

    def end(self, choice: int, delta: Delta) -> bytes:
        ended = self.choice(choice, delta, self._views[choice])
        return b"%b%b]}\n\n" % (self._head, ended)

    def close(self) -> bytes:
        if not self._views[0].options.include_usage:
            return DONE
        return b'%b],"usage":%b}\n\n%b' % (self._head, _usage(self._views), DONE)

    def error(self, error: SessionError) -> bytes:
        return sse_event(openai_error(error))

    def choice(self, index: int, delta: Delta, ended: ReplyView | None) -> bytes:
        """The next part of a choice; `ended` is the committed reply, given with the last part."""
        view, start = self._views[index], self._num_sent[index]
        self._num_sent[index] = delta.num_tokens
        prompt, self._echo[index] = self._echo[index], None
        text = (prompt or "") + delta.content
        fields = [b'{"index":%d,"text":%b,"logprobs":' % (index, orjson.dumps(text))]
        if view.options.logprobs:
            fields.append(_logprobs(view, start, delta.num_tokens, self._num_chars[index], prompt))
        else:
            fields.append(b"null")
        self._num_chars[index] += len(text)
        reason = b'"%b"' % ended.finish_reason.encode() if ended else b"null"
        fields.append(b',"finish_reason":' + reason)
        if view.options.return_token_ids:
            fields.append(b',"token_ids":' + orjson.dumps(view.token_ids(start, delta.num_tokens)))
            if start == 0:
                fields.append(b',"prompt_token_ids":' + orjson.dumps(view.prompt_ids()))
        return b"".join([*fields, b"}"])


def _echo(view: ReplyView) -> str:
    text = view.options.prompt_text
    return view.prompt_text() if text is None else text


def _logprobs(view: ReplyView, start: int, stop: int, at: int, echo: str | None) -> bytes:
    """The `logprobs` of this API: parallel lists, and a map of each token's alternatives."""
    ids, text = view.token_ids(start, stop), view.token_text
    prompt_ids = view.prompt_ids() if echo is not None else []
    no_values: list[None] = [None] * len(prompt_ids)
    tokens = [text(token_id) for token_id in [*prompt_ids, *ids]]
    offsets = []
    for token in tokens:
        offsets.append(at)
        at += len(token)
    rows = view.top_logprobs(start, stop) or [()] * len(ids)
    tops = [{text(i): logprob for logprob, i in row} for row in rows]
    return orjson.dumps(
        {
            "tokens": tokens,
            "token_logprobs": [*no_values, *view.logprobs(start, stop)],
            "top_logprobs": [*no_values, *tops] if view.options.num_top_logprobs else None,
            "text_offset": offsets,
        }
    )


def _frame(view: ReplyView) -> bytes:
    head = view.head
    return b'"id":"cmpl-%b","object":"text_completion","created":%d,"model":%b' % (
        head.id.encode(),
        head.created_s,
        orjson.dumps(view.model),
    )


def _usage(views: Sequence[ReplyView]) -> bytes:
    """The `usage`, which counts the prompt of each turn once."""
    firsts: dict[int, ReplyView] = {}
    for view in views:
        firsts.setdefault(id(view.options), view)
    num_prompt = sum([view.head.num_prompt_tokens for view in firsts.values()])
    return usage(views, num_prompt)
