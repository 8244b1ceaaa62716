"""One `/generate` request: the body that SGLang is sent, and the tokens that its answer brings.

    plain:   head, body, end      -> on_chunk with all tokens, on_end
    stream:  head, events..., end -> on_chunk for each read that brings tokens, on_end

Invariants: a body holds only ids that are tokens, since one bad id kills an SGLang server; ready
JSON of a prompt is sent as it is, and an image is read only when its turn comes to be sent; each
token is told once, whichever form of stream the server has; on_end or on_error ends a leg, once.
Sources: SGLang's io_struct.py and tokenizer_manager.py. Driven by client.py.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from rollmesh.core.errors import EngineBroke, EngineError, EngineRefused, EngineUnavailable
from rollmesh.core.types import SamplingParams
from rollmesh.engine import answers
from rollmesh.engine.answers import Answer, LegChunk
from rollmesh.engine.connection import Call
from rollmesh.engine.parser import Headers
from rollmesh.engine.pieces import Piece, Unread

_IMAGE_SCHEMES = ("data:image/", "http://", "https://")

Image = str | Unread
"""A `data:` or http(s) address. One that is unread is `data:`, as whoever holds it has made sure,
and stands in JSON as it is: no byte of it needs an escape."""


class LegRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What one leg samples on from, and how."""

    rid: str
    params: SamplingParams
    max_new_tokens: int
    extra_key: str
    """Prefixes are shared only under the same key."""
    stream: bool
    prompt_ids: Sequence[int] = ()
    prompt_json: Piece = b""
    """`1,2,3`: the prompt's ids as JSON, which the caller has checked; stands for `prompt_ids`."""
    sampled_ids: Sequence[int] = ()
    """What earlier legs sampled, behind the prompt."""
    num_top_logprobs: int = 0
    """So many likeliest tokens are told at each place."""
    images: tuple[Image, ...] = ()
    """In the order of their placeholders in the prompt."""
    adapter: str = ""
    """To be applied over the engine's weights; SGLang calls it a LoRA path, and means its name."""


class LegReceiver(Protocol):
    """Hears one leg. Its methods are called from the loop and do not raise."""

    def on_chunk(self, chunk: LegChunk) -> None:
        """New tokens; the last chunk has a finish."""

    def on_end(self) -> None:
        """The connection is free again; a chunk with a finish came before."""

    def on_error(self, error: EngineError) -> None:
        """There will be no finish: EngineRefused, or EngineUnavailable if it is worth a retry."""


class _Sampling(msgspec.Struct, omit_defaults=True):
    """SGLang's sampling_params; it answers 500 to a name that it does not know."""

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    stop_token_ids: tuple[int, ...] = ()
    sampling_seed: int | None = None
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[str, float] | None = None
    json_schema: str | None = None
    regex: str | None = None
    ebnf: str | None = None


class _Body(msgspec.Struct, omit_defaults=True):
    """All of a request but its ids."""

    sampling_params: _Sampling
    return_logprob: bool
    rid: str = ""
    stream: bool = False
    extra_key: str = ""
    logprob_start_len: int = -1
    top_logprobs_num: int = 0
    lora_path: str = ""


_encoder = msgspec.json.Encoder()


def encode_leg(leg: LegRequest, vocab_size: int) -> list[Piece]:
    """The pieces of the body of `leg`; EngineRefused for an id that is no token, or no prompt."""
    pieces: list[Piece] = [
        b'{"input_ids":[',
        leg.prompt_json or _ids_json(leg.prompt_ids, vocab_size),
    ]
    if len(leg.sampled_ids):
        pieces += (b",", _ids_json(leg.sampled_ids, vocab_size))
    body = _Body(
        sampling_params=_sampling_of(leg.params, leg.max_new_tokens),
        return_logprob=True,
        rid=leg.rid,
        stream=leg.stream,
        extra_key=leg.extra_key,
        top_logprobs_num=leg.num_top_logprobs,
        lora_path=leg.adapter,
    )
    pieces.append(b"],")
    if leg.images:
        pieces += _images_json(leg.images)
    pieces.append(_encoder.encode(body)[1:])
    return pieces


def encode_score(
    token_ids: Sequence[int], extra_key: str, vocab_size: int, adapter: str = ""
) -> list[bytes]:
    """A body that asks for log-probs of `token_ids` and samples nothing; errors as `encode_leg`."""
    body = _Body(
        sampling_params=_Sampling(max_new_tokens=0),
        return_logprob=True,
        logprob_start_len=0,
        extra_key=extra_key,
        lora_path=adapter,
    )
    ids = _ids_json(token_ids, vocab_size)
    return [b'{"input_ids":[', ids, b"],", _encoder.encode(body)[1:]]


def _sampling_of(params: SamplingParams, max_new_tokens: int) -> _Sampling:
    sampling = _Sampling(
        max_new_tokens=max_new_tokens,
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=params.top_k,
        stop_token_ids=params.stop_token_ids,
        sampling_seed=params.seed,
        frequency_penalty=params.frequency_penalty,
        presence_penalty=params.presence_penalty,
        repetition_penalty=params.repetition_penalty,
    )
    if params.min_p:
        sampling.min_p = params.min_p
    if params.logit_bias:
        sampling.logit_bias = {str(token): bias for token, bias in params.logit_bias}
    if params.grammar:
        setattr(sampling, params.grammar.kind, params.grammar.text)
    return sampling


def _images_json(images: Sequence[Image]) -> list[Piece]:
    pieces: list[Piece] = []
    glue = b'"image_data":['
    for image in images:
        if not isinstance(image, str):
            pieces += (glue + b'"', image)
            glue = b'",'
        elif image.startswith(_IMAGE_SCHEMES):
            pieces.append(glue + _encoder.encode(image))
            glue = b","
        else:
            # SGLang would open it as a file of its own machine.
            raise EngineRefused("an image must have a data: or http(s) address")
    pieces.append(glue.removesuffix(b",") + b"],")
    return pieces


def _ids_json(token_ids: Sequence[int], vocab_size: int) -> bytes:
    if not len(token_ids):
        raise EngineRefused("an empty prompt cannot be continued")
    if min(token_ids) < 0 or max(token_ids) >= vocab_size:
        raise EngineRefused(f"a token id is not below the vocabulary size {vocab_size}")
    return _encoder.encode(list(token_ids))[1:-1]


class LegAnswer:
    """Receives the HTTP answer to one leg and tells `receiver` its tokens."""

    __slots__ = (
        "_call",
        "_is_finished",
        "_num_seen",
        "_on_costly",
        "_pieces",
        "_receiver",
        "_status",
        "_url",
        "_vocab_size",
    )

    def __init__(
        self, url: str, receiver: LegReceiver, on_costly: Callable[[], None], vocab_size: int
    ) -> None:
        """`on_costly` is called where a stream says again in each event what it said before."""
        self._url = url
        self._receiver = receiver
        self._on_costly = on_costly
        self._vocab_size = vocab_size
        self._call: Call | None = None
        self._status = 0
        self._pieces: list[bytes] = []
        """Of a body that is opened whole."""
        self._num_seen = 0
        self._is_finished = False

    def attend(self, call: Call) -> None:
        """The call that this answers, to be closed if the answer is wrong."""
        self._call = call

    def on_head(self, status: int, headers: Headers) -> None:
        self._status = status

    def on_data(self, data: bytes) -> None:
        self._pieces.append(data)

    def on_end(self) -> None:
        try:
            if self._status != 200:
                raw = b"".join(self._pieces)
                raise answers.refusal_of(self._status, raw, is_generation=True)
            self._finish()
        except EngineError as error:
            self._fail(error)
        else:
            self._receiver.on_end()

    def on_error(self, error: EngineUnavailable) -> None:
        if self._is_finished:
            # All that was to be said was said before the connection broke.
            self._receiver.on_end()
        else:
            self._receiver.on_error(self._broken(str(error)) if self._status == 200 else error)

    def _broken(self, why: str) -> EngineUnavailable:
        return EngineUnavailable(why) if self._num_seen else EngineBroke(why)

    def _finish(self) -> None:
        chunk = answers.chunk_of(answers.decode_answer(b"".join(self._pieces)), 0)
        if chunk.finish is None:
            raise EngineUnavailable("answered without a finish reason")
        self._tell(chunk)

    def _tell(self, chunk: LegChunk) -> None:
        token_ids = chunk.token_ids
        if token_ids and (min(token_ids) < 0 or max(token_ids) >= self._vocab_size):
            told = f"told of tokens that are none of {self._vocab_size}; does it serve this model?"
            raise EngineUnavailable(told)
        self._num_seen += len(token_ids)
        self._is_finished = chunk.finish is not None
        self._receiver.on_chunk(chunk)

    def _fail(self, error: EngineError) -> None:
        if self._call:
            self._call.close()
        self._receiver.on_error(type(error)(f"{self._url}: {error}"))


class LegStream(LegAnswer):
    """As LegAnswer, for an answer that is a stream of events."""

    __slots__ = ("_pending",)

    def __init__(
        self, url: str, receiver: LegReceiver, on_costly: Callable[[], None], vocab_size: int
    ) -> None:
        super().__init__(url, receiver, on_costly, vocab_size)
        self._pending = b""
        """An event that has not come to its end."""

    def on_data(self, data: bytes) -> None:
        if self._status != 200:
            super().on_data(data)
            return
        if self._pending:
            data = self._pending + data
        end = data.rfind(b"\n\n")
        if end < 0:
            self._pending = data
            return
        self._pending = data[end + 2 :]
        events = data[:end].split(b"\n\n")
        if events[-1].endswith(b"[DONE]"):
            events.pop()
        try:
            for chunk in self._read(events):
                self._tell(chunk)
        except EngineError as error:
            self._fail(error)

    def _read(self, events: list[bytes]) -> list[LegChunk]:
        """What these events bring, in one chunk for each version of the weights.

        Decoded from the newest backwards until nothing is missing: of cumulative events that came
        together only one is opened.
        """
        # SGLang tells of a bad request by a first event, where it answers a plain call with 400.
        is_first = not self._num_seen and len(events) == 1
        told = EngineRefused if is_first else EngineUnavailable
        opened: list[Answer] = []
        for event in reversed(events):
            if event.startswith(b"data:"):
                answer = answers.decode_answer(event[5:], told)
                opened.append(answer)
                if answer.num_before <= self._num_seen:
                    break
        if self._num_seen and opened and opened[-1].output_ids and not opened[-1].num_before:
            self._on_costly()
        return answers.chunks_of(opened[::-1], self._num_seen)

    def _finish(self) -> None:
        if not self._is_finished:
            raise self._broken("the stream was cut")
