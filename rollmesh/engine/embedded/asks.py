"""Turns the body of /generate into Requests, or refuses it in one line.

Owns the list of what this engine runs of SGLang's request fields; a field that it does not run is
refused when it asks for something, never silently ignored. Invariant: what leaves here cannot fail
in the step loop: ids are in the vocabulary and everything fits in memory. Driven by the routes.
"""

import math
import random
import uuid
from collections.abc import Callable
from typing import Annotated, Any

import msgspec
import numpy as np

from rollmesh.core.errors import EngineRefused
from rollmesh.engine.embedded.checkpoint import Architecture
from rollmesh.engine.embedded.request import Request, Sampling, Tokens

TextEncoder = Callable[[str], list[int]]
Seed = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]


class SamplingBody(msgspec.Struct, forbid_unknown_fields=True):
    """`sampling_params`; null means the default. Fields from no_stop_trim on are refused if set."""

    max_new_tokens: int | None = 128
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    sampling_seed: Seed | None = None
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    no_stop_trim: bool = False
    stop: Any = None
    stop_regex: Any = None
    min_p: float = 0.0
    min_new_tokens: int = 0
    n: int = 1
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    json_schema: Any = None
    regex: Any = None
    ebnf: Any = None
    structural_tag: Any = None
    logit_bias: Any = None
    custom_params: Any = None


_DEFAULTS = SamplingBody()
_NO_TOKENS = np.array(0, dtype=np.int64)
_NOT_RUN = SamplingBody.__struct_fields__[SamplingBody.__struct_fields__.index("no_stop_trim") :]


class GenerateBody(msgspec.Struct):
    """The body of /generate; with a list of prompts every other field may be a list too."""

    input_ids: list[int | list[int]] | None = None
    text: str | list[str] | None = None
    sampling_params: SamplingBody | list[SamplingBody] | None = None
    rid: str | list[str] | None = None
    extra_key: str | list[str] | None = None
    return_logprob: bool | list[bool] | None = None
    logprob_start_len: int | list[int] | None = None
    stream: bool = False
    # From here on refused if set.
    top_logprobs_num: Any = None
    token_ids_logprob: Any = None
    return_hidden_states: Any = None
    input_embeds: Any = None
    image_data: Any = None
    lora_path: Any = None


_BODY_NOT_RUN = GenerateBody.__struct_fields__[
    GenerateBody.__struct_fields__.index("top_logprobs_num") :
]


class Ask(msgspec.Struct, frozen=True):
    """One prompt of a body: its request and how to answer it."""

    request: Request
    wants_logprobs: bool
    skips_special: bool


class Asks(msgspec.Struct, frozen=True):
    """A decoded body."""

    asks: list[Ask]
    is_list: bool
    """Whether the prompts came as a list, so that a list is answered."""
    streams: bool


class AskDecoder:
    """Knows the model's limits and hands out ids and seeds where a body names none."""

    def __init__(self, architecture: Architecture, num_slots: int, seed: int) -> None:
        self._architecture = architecture
        self._max_context = min(architecture.max_context, num_slots)
        self._seeds = random.Random(seed)
        self._body = msgspec.json.Decoder(GenerateBody)

    def decode(self, raw: bytes, encode_text: TextEncoder | None = None) -> Asks:
        """The requests of a body; EngineRefused in one line if it is wrong."""
        try:
            body = self._body.decode(raw)
        except msgspec.MsgspecError as error:
            raise EngineRefused(f"bad request: {error}") from None
        refuse_not_run(body)
        prompts, is_list = self._prompts(body, encode_text)
        asks = [
            self._ask(body, prompt, at if is_list else None) for at, prompt in enumerate(prompts)
        ]
        return Asks(asks, is_list, body.stream)

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

    def _ask(self, body: GenerateBody, prompt: list[int], at: int | None) -> Ask:
        params = pick(body.sampling_params, at) or _DEFAULTS
        wants_logprobs = bool(pick(body.return_logprob, at))
        start = pick(body.logprob_start_len, at)
        scores = wants_logprobs and start is not None and start >= 0
        tokens = self._checked(prompt)
        rid = pick(body.rid, at) or uuid.uuid4().hex
        if isinstance(body.rid, str) and at is not None:
            rid = f"{body.rid}_{at}"
        request = Request(
            rid,
            tokens,
            self._sampling(params, len(tokens)),
            extra_key=pick(body.extra_key, at) or "",
            logprob_start=start if scores else None,
            streams=body.stream,
        )
        return Ask(request, wants_logprobs, params.skip_special_tokens)

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

    def _sampling(self, params: SamplingBody, num_prompt_tokens: int) -> Sampling:
        refuse_out_of_range(params)
        most = self._max_context - num_prompt_tokens
        max_new_tokens = most if params.max_new_tokens is None else params.max_new_tokens
        if max_new_tokens > most:
            raise EngineRefused(
                f"Requested token count exceeds the model's maximum context length of "
                f"{self._max_context} tokens: {num_prompt_tokens} of the input and "
                f"{max_new_tokens} for the completion."
            )
        stops: set[int] = set()
        if not params.ignore_eos:
            stops.update(params.stop_token_ids or (), self._architecture.eos_token_ids)
        seed = params.sampling_seed
        temperature = 1.0 if params.temperature is None else params.temperature
        return Sampling(
            max_new_tokens=max_new_tokens,
            temperature=0.0 if temperature < 1e-6 else temperature,
            top_p=1.0 if params.top_p is None else params.top_p,
            top_k=-1 if params.top_k is None else params.top_k,
            stop_token_ids=frozenset(stops),
            seed=self._seeds.getrandbits(63) if seed is None else seed,
        )


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
    given = body.sampling_params
    for params in given if isinstance(given, list) else [given]:
        for name in _NOT_RUN if params is not None else ():
            if getattr(params, name) not in (getattr(_DEFAULTS, name), None, [], {}):
                raise EngineRefused(f"sampling_params.{name} is not run by the embedded engine")


def refuse_out_of_range(params: SamplingBody) -> None:
    """EngineRefused, in SGLang's words, for sampling values that mean nothing."""
    temperature = 1.0 if params.temperature is None else params.temperature
    if not math.isfinite(temperature) or temperature < 0:
        raise EngineRefused(f"temperature must be a non-negative finite number, got {temperature}.")
    if params.top_p is not None and not 0 < params.top_p <= 1:
        raise EngineRefused(f"top_p must be in (0, 1], got {params.top_p}.")
    if params.top_k is not None and params.top_k < 1 and params.top_k != -1:
        raise EngineRefused(f"top_k must be -1 (disable) or at least 1, got {params.top_k}.")
    if params.max_new_tokens is not None and params.max_new_tokens < 0:
        raise EngineRefused(f"max_new_tokens must be at least 0, got {params.max_new_tokens}.")
