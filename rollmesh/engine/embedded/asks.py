"""Turns the body of /generate into Requests, or refuses it in one line.

Owns the list of what this engine runs of SGLang's request fields; a field that it does not run is
refused when it asks for something, never silently ignored. Invariant: what leaves here cannot fail
in the step loop: ids are in the vocabulary and everything fits in memory. Driven by the routes.
"""

import uuid
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

from rollmesh.core.errors import DECODE_ERRORS, EngineRefused
from rollmesh.engine.embedded.adapters import Shelf
from rollmesh.engine.embedded.checkpoint import Architecture
from rollmesh.engine.embedded.params import ParamsReader, SamplingBody
from rollmesh.engine.embedded.request import Request, Tokens

TextEncoder = Callable[[str], list[int]]
Which = tuple[int | None, int]
"""A prompt's place in its list, None of one that came alone; and the number of its output."""

_DEFAULTS = SamplingBody()
_NO_TOKENS = np.array(0, dtype=np.int64)


class GenerateBody(msgspec.Struct):
    """The body of /generate; with a list of prompts every other field may be a list too."""

    input_ids: list[int | list[int]] | None = None
    text: str | list[str] | None = None
    sampling_params: SamplingBody | list[SamplingBody] | None = None
    rid: str | list[str] | None = None
    extra_key: str | list[str] | None = None
    return_logprob: bool | list[bool] | None = None
    logprob_start_len: int | list[int] | None = None
    top_logprobs_num: int | list[int] | None = None
    stream: bool = False
    lora_path: str | list[str | None] | None = None
    """The name of an adapter."""
    # From here on refused if set.
    token_ids_logprob: Any = None
    return_hidden_states: Any = None
    input_embeds: Any = None
    image_data: Any = None


_BODY_NOT_RUN = GenerateBody.__struct_fields__[
    GenerateBody.__struct_fields__.index("token_ids_logprob") :
]


class Ask(msgspec.Struct, frozen=True):
    """One prompt of a body: its request and how to answer it."""

    request: Request
    wants_logprobs: bool = False
    skips_special: bool = True
    trims_stop: bool = True
    """Whether what it was stopped by is cut from its text."""


class Asks(msgspec.Struct, frozen=True):
    """A decoded body."""

    asks: list[Ask]
    is_list: bool
    """Whether several were asked for, or one in a list, so that a list is answered."""
    streams: bool


class AskDecoder:
    """Knows the model's limits and hands out ids where a body names none."""

    def __init__(self, architecture: Architecture, num_slots: int, params: ParamsReader) -> None:
        self.shelf = Shelf()
        """The adapters that a body may name."""
        self._architecture = architecture
        self._max_context = min(architecture.max_context, num_slots)
        self._params = params
        self._body = msgspec.json.Decoder(GenerateBody)

    def read(self, raw: bytes) -> GenerateBody:
        """The body, if its types are right; EngineRefused in one line if not."""
        try:
            return self._body.decode(raw)
        except DECODE_ERRORS as error:
            raise EngineRefused(f"bad request: {error}") from None

    def decode(self, body: GenerateBody, encode_text: TextEncoder | None = None) -> Asks:
        """The requests of a body; EngineRefused in one line if something is wrong with it."""
        refuse_not_run(body)
        prompts, is_list = self._prompts(body, encode_text)
        asks: list[Ask] = []
        for at, prompt in enumerate(prompts):
            place = at if is_list else None
            params = pick(body.sampling_params, place) or _DEFAULTS
            numbers = range(params.num_outputs)
            asks += [self._ask(body, params, prompt, (place, number)) for number in numbers]
        return Asks(asks, is_list or len(asks) > 1, body.stream)

    def _prompts(
        self, body: GenerateBody, encode_text: TextEncoder | None
    ) -> tuple[list[list[int]], bool]:
        ids: list[Any] | None = body.input_ids
        if ids is None:
            if body.text is None or encode_text is None:
                raise EngineRefused("input_ids should be provided")
            texts = [body.text] if isinstance(body.text, str) else body.text
            return [encode_text(text) for text in texts], not isinstance(body.text, str)
        is_list = bool(ids) and isinstance(ids[0], list)
        return (ids if is_list else [ids]), is_list

    def _ask(
        self, body: GenerateBody, params: SamplingBody, prompt: list[int], which: Which
    ) -> Ask:
        at, number = which
        wants_logprobs = bool(pick(body.return_logprob, at))
        start = pick(body.logprob_start_len, at)
        scores = wants_logprobs and start is not None and start >= 0
        tokens = self._checked(prompt)
        sampling = self._params.read(params, self._budget(params, len(tokens)), number)
        if name := pick(body.lora_path, at):
            sampling = msgspec.structs.replace(sampling, adapter=self.shelf.find(name))
        request = Request(
            rid_of(body, params, at),
            tokens,
            sampling,
            extra_key=pick(body.extra_key, at) or "",
            logprob_start=start if scores else None,
            num_top=self._num_top(pick(body.top_logprobs_num, at)) if wants_logprobs else 0,
            streams=body.stream,
        )
        skips_special = params.skip_special_tokens is not False
        return Ask(request, wants_logprobs, skips_special, not params.no_stop_trim)

    def _num_top(self, asked: int | None) -> int:
        most = self._architecture.vocab_size
        if asked is not None and not 0 <= asked <= most:
            raise EngineRefused(f"top_logprobs_num must be in [0, {most}], got {asked}.")
        return asked or 0

    def _checked(self, prompt: list[int]) -> Tokens:
        """The prompt as int32; refused if empty, too long or out of vocabulary."""
        if prompt == []:
            raise EngineRefused("input_ids cannot be empty")
        try:
            tokens = np.array(prompt, dtype=np.int64)
        except (TypeError, ValueError, OverflowError):
            tokens = _NO_TOKENS
        if tokens.ndim != 1:
            raise EngineRefused("input_ids must be a list of token ids or a list of such lists")
        vocab_size = self._architecture.vocab_size
        if tokens.min() < 0 or tokens.max() >= vocab_size:
            bad = prompt[int(np.flatnonzero((tokens < 0) | (tokens >= vocab_size))[0])]
            raise EngineRefused(f"token id {bad} is not in the vocabulary of {vocab_size} tokens")
        if len(tokens) >= self._max_context:
            raise EngineRefused(
                f"The input ({len(tokens)} tokens) is longer than the model's context length "
                f"({self._max_context} tokens)."
            )
        return tokens.astype(np.int32)

    def _budget(self, params: SamplingBody, num_prompt_tokens: int) -> int:
        """How many tokens may be put out; refused if they do not fit."""
        most = self._max_context - num_prompt_tokens
        if params.max_new_tokens is None:
            return most
        if params.max_new_tokens > most:
            raise EngineRefused(
                f"Requested token count exceeds the model's maximum context length of "
                f"{self._max_context} tokens: {num_prompt_tokens} of the input and "
                f"{params.max_new_tokens} for the completion."
            )
        return params.max_new_tokens


def rid_of(body: GenerateBody, params: SamplingBody, at: int | None) -> str:
    """The request's id; one of several outputs gets one that nobody named, as in SGLang."""
    rid = pick(body.rid, at)
    if not rid or params.num_outputs > 1:
        return uuid.uuid4().hex
    return f"{rid}_{at}" if isinstance(body.rid, str) and at is not None else str(rid)


def pick(value: Any, at: int | None) -> Any:
    """The value of the prompt at index `at`: lists have one per prompt, others hold for all."""
    if not isinstance(value, list):
        return value
    if at is None or at >= len(value):
        raise EngineRefused("a list of values needs a list of as many prompts")
    return value[at]


def refuse_not_run(body: GenerateBody) -> None:
    """EngineRefused if the body asks for something that this engine does not do."""
    for name in _BODY_NOT_RUN:
        if getattr(body, name):
            raise EngineRefused(f"{name} is not run by the embedded engine")
