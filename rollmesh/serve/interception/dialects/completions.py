"""OpenAI's Completions API: POST .../v1/completions, raw prompts without a chat.

A prompt is a text, token ids, or a list of either; a batch gives as many turns, and the choices of
all are numbered in order. Shapes as in OpenAI's API reference (create completion). Invariant:
`suffix` and `best_of` beyond `n` are refused, since an answer without them would be another's. With
`echo` the prompt's tokens have no log-probs: nobody computed them. Driven by exchange.py through
dialect.py.
"""

from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
import orjson

from rollmesh.core.errors import DECODE_ERRORS, SessionError
from rollmesh.runtime.chat import Delta, Turn
from rollmesh.serve.interception.dialects import unopened
from rollmesh.serve.interception.dialects.asks import Int64, NumTops, SamplingBody, TokenId
from rollmesh.serve.interception.dialects.chat_answers import usage
from rollmesh.serve.interception.dialects.dialect import Asked, Call, Stream
from rollmesh.serve.interception.dialects.failures import openai_failure, openai_failure_body
from rollmesh.serve.interception.dialects.frames import DONE, event, read_body, refusal
from rollmesh.serve.interception.reply_view import ReplyView

MAX_PROMPTS = 128
DEFAULT_MAX_TOKENS = 16
"""Of OpenAI's reference."""

Ids = Annotated[list[TokenId], msgspec.Meta(min_length=1)]
Prompt = str | tuple[int, ...]


class CompletionBody(SamplingBody, kw_only=True):
    """The keys that we read beside those of sampling."""

    prompt: unopened.Prompt
    echo: bool | None = None
    suffix: str | None = None
    best_of: Int64 | None = None
    logprobs: NumTops | bool | None = None


_A_BATCH = msgspec.Meta(min_length=1, max_length=MAX_PROMPTS)
_decoder = msgspec.json.Decoder(CompletionBody)
_texts = msgspec.json.Decoder(str | Annotated[list[str], _A_BATCH])
_ids = msgspec.json.Decoder(Ids)
_batch = msgspec.json.Decoder(Annotated[list[Ids], _A_BATCH])


class CompletionsDialect:
    """Satisfies Dialect."""

    def decode(self, asked: Asked) -> Call:
        body = read_body(_decoder, asked.body, "completion request")
        if body.suffix:
            raise refusal("unsupported_suffix", "suffix: only what follows a prompt is sampled")
        if body.best_of not in (None, body.n or 1):
            raise refusal("unsupported_best_of", "best_of: expected the same number as n")
        prompts = read_prompts(bytes(body.prompt))
        turns = tuple(_turn(body, asked, n, prompt) for n, prompt in enumerate(prompts))
        return CompletionCall(turns, bool(body.echo))

    def error(self, error: SessionError) -> bytes:
        return openai_failure_body(error)


def read_prompts(raw: bytes) -> list[Prompt]:
    """The prompts of a request in order; SessionError 400 where there is none."""
    for decoder in (_texts, _ids, _batch):
        try:
            return _prompts_of(decoder.decode(raw))
        except DECODE_ERRORS:
            continue
    why = f"prompt: expected a text, token ids, or 1 to {MAX_PROMPTS} of either in a list"
    raise refusal("invalid_prompt", why)


def _prompts_of(found: Any) -> list[Prompt]:
    """One text, one list of ids, or several of either."""
    if isinstance(found, str):
        return [found]
    if isinstance(found[0], int):
        return [tuple(found)]
    return [each if isinstance(each, str) else tuple(each) for each in found]


def _turn(body: CompletionBody, asked: Asked, number: int, prompt: Prompt) -> Turn:
    return Turn(
        messages=[],
        prompt_text=prompt if isinstance(prompt, str) else None,
        prompt_ids=None if isinstance(prompt, str) else prompt,
        num_choices=body.n or 1,
        num_top_logprobs=int(body.logprobs or 0),
        ask=body.ask(body.max_tokens or DEFAULT_MAX_TOKENS),
        model=body.model or "",
        stream=bool(body.stream),
        include_usage=body.includes_usage,
        logprobs=body.logprobs is not None and body.logprobs is not False,
        return_token_ids=bool(body.return_token_ids),
        digest=asked.digest if number == 0 else hash((asked.digest, number)),
        is_retry=asked.is_retry,
        dialect="completions",
    )


class CompletionCall:
    """Satisfies Call."""

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

    def stream(self, views: Sequence[ReplyView]) -> Stream:
        return CompletionStream(views, self._echoes)


class CompletionStream:
    """Satisfies Stream."""

    def __init__(self, views: Sequence[ReplyView], echoes: bool) -> None:
        self._views = views
        self._echo = [_echo(view) if echoes else None for view in views]
        self._head = b'data: {%b,"choices":[' % _frame(views[0])
        self._num_sent = [0] * len(views)
        self._num_chars = [0] * len(views)
        """Of text sent; log-probs say where in it each token stands."""

    def piece(self, choice: int, delta: Delta) -> bytes:
        return b"%b%b]}\n\n" % (self._head, self.choice(choice, delta, None))

    def end(self, choice: int, delta: Delta) -> bytes:
        ended = self.choice(choice, delta, self._views[choice])
        return b"%b%b]}\n\n" % (self._head, ended)

    def close(self) -> bytes:
        if not self._views[0].wish.include_usage:
            return DONE
        return b'%b],"usage":%b}\n\n%b' % (self._head, _usage(self._views), DONE)

    def error(self, error: SessionError) -> bytes:
        return event(openai_failure(error))

    def choice(self, index: int, delta: Delta, ended: ReplyView | None) -> bytes:
        """The next part of a choice; `ended` with the last."""
        view, start = self._views[index], self._num_sent[index]
        self._num_sent[index] = delta.num_tokens
        prompt, self._echo[index] = self._echo[index], None
        text = (prompt or "") + delta.content
        fields = [b'{"index":%d,"text":%b,"logprobs":' % (index, orjson.dumps(text))]
        if view.wish.logprobs:
            fields.append(_logprobs(view, start, delta.num_tokens, self._num_chars[index], prompt))
        else:
            fields.append(b"null")
        self._num_chars[index] += len(text)
        reason = b'"%b"' % ended.finish_reason.encode() if ended else b"null"
        fields.append(b',"finish_reason":' + reason)
        if view.wish.return_token_ids:
            fields.append(b',"token_ids":' + orjson.dumps(view.token_ids(start, delta.num_tokens)))
            if start == 0:
                fields.append(b',"prompt_token_ids":' + orjson.dumps(view.prompt_ids()))
        return b"".join([*fields, b"}"])


def _echo(view: ReplyView) -> str:
    text = view.wish.prompt_text
    return view.prompt_text() if text is None else text


def _logprobs(view: ReplyView, start: int, stop: int, at: int, echo: str | None) -> bytes:
    """`logprobs` of this API: parallel lists, and a map for each token's alternatives."""
    ids, text = view.token_ids(start, stop), view.token_text
    prompt_ids = view.prompt_ids() if echo is not None else []
    nothing: list[None] = [None] * len(prompt_ids)
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
            "token_logprobs": [*nothing, *view.logprobs(start, stop)],
            "top_logprobs": [*nothing, *tops] if view.wish.num_top_logprobs else None,
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
    """Every turn's prompt counts once, however many choices it has."""
    firsts: dict[int, ReplyView] = {}
    for view in views:
        firsts.setdefault(id(view.wish), view)
    num_prompt = sum([view.head.num_prompt_tokens for view in firsts.values()])
    return usage(views, num_prompt)
