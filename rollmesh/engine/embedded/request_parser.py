"""Parses the body of /generate and its `sampling_params` into Requests, or refuses it in one line.

- Names, defaults, bounds and refusals are SGLang's.
- A field that this engine does not support is refused if it is set, never ignored.
- A parsed request cannot fail in the step loop: ids are in the vocabulary, grammars are compiled,
  patterns parse, and everything fits in memory.
"""

import math
import random
import re
import uuid
from collections.abc import Callable
from typing import Annotated, Any, TypeVar

import msgspec
import numpy as np
from tokenizers import Tokenizer

from rollmesh.core.errors import DECODE_ERRORS, EngineRefused
from rollmesh.engine.embedded.checkpoint import Architecture
from rollmesh.engine.embedded.model import AdapterRegistry
from rollmesh.engine.embedded.request import Request, Sampling, Tokens
from rollmesh.engine.embedded.shaping import CompiledGrammar, GrammarCompiler, GrammarKind, Shaping
from rollmesh.engine.embedded.text import StopRule

Value = TypeVar("Value")
Seed = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]

_GRAMMARS: tuple[GrammarKind, ...] = ("json_schema", "regex", "ebnf")
_MOST_STOPS = 32
_MOST_PATTERN_BYTES = 256
_BOUNDS: tuple[tuple[str, float, float], ...] = (
    ("min_p", 0, 1),
    ("frequency_penalty", -2, 2),
    ("presence_penalty", -2, 2),
)


class SamplingBody(msgspec.Struct, forbid_unknown_fields=True):
    """`sampling_params`; null means the default."""

    max_new_tokens: int | None = 128
    min_new_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    stop: str | list[str] | None = None
    stop_regex: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    no_stop_trim: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    sampling_seed: Seed | None = None
    n: int | None = None
    json_schema: str | None = None
    regex: str | None = None
    ebnf: str | None = None
    # Fields below are refused if set.
    structural_tag: Any = None
    custom_params: Any = None

    @property
    def num_outputs(self) -> int:
        """Outputs for each prompt; SGLang treats 0 and null as 1."""
        return max(self.n or 1, 1)


class SamplingParser:
    """Parses sampling parameters for one model and its tokenizer."""

    def __init__(self, architecture: Architecture, tokenizer: Tokenizer | None, seed: int) -> None:
        """`seed` seeds the seeds of requests that name none."""
        self._architecture = architecture
        self._tokenizer = tokenizer
        self._seeds = random.Random(seed)
        self._compiler: GrammarCompiler | None = None
        if tokenizer is not None:
            ends = architecture.eos_token_ids
            self._compiler = GrammarCompiler(tokenizer, architecture.vocab_size, ends)

    def read(self, params: SamplingBody, max_new_tokens: int, number: int) -> Sampling:
        """Parse the parameters of output `number` of n; EngineRefused in one line if one is
        invalid.

        With a given seed each of n outputs has a draw of its own, and the first the one it would
        have alone.
        """
        refuse_out_of_range(params)
        ends = {*(params.stop_token_ids or ()), *self._architecture.eos_token_ids}
        temperature = default(params.temperature, 1.0)
        seed = params.sampling_seed
        return Sampling(
            max_new_tokens=max_new_tokens,
            temperature=0.0 if temperature < 1e-6 else temperature,
            top_p=default(params.top_p, 1.0),
            top_k=default(params.top_k, -1),
            min_p=default(params.min_p, 0.0),
            stop_token_ids=frozenset() if params.ignore_eos else frozenset(ends),
            stop=self._stop(params),
            shaping=self._shaping(params, ends),
            grammar=self._grammar(params),
            seed=self._seeds.getrandbits(63) if seed is None else seed + number,
        )

    def _shaping(self, params: SamplingBody, ends: set[int]) -> Shaping | None:
        biases = self._biases(params.logit_bias or {})
        shaping = Shaping(
            frequency_penalty=default(params.frequency_penalty, 0.0),
            presence_penalty=default(params.presence_penalty, 0.0),
            repetition_penalty=default(params.repetition_penalty, 1.0),
            min_new_tokens=params.min_new_tokens or 0,
            end_tokens=tuple(self._known(ends)) if params.min_new_tokens else (),
            bias_tokens=tuple(biases),
            biases=tuple(biases.values()),
        )
        return None if shaping == Shaping() else shaping

    def _known(self, tokens: set[int]) -> list[int]:
        return sorted(token for token in tokens if 0 <= token < self._architecture.vocab_size)

    def _biases(self, given: dict[str, float]) -> dict[int, float]:
        last = self._architecture.vocab_size - 1
        biases: dict[int, float] = {}
        for name, bias in given.items():
            if not name.isdecimal() or int(name) > last:
                raise EngineRefused(f"logit_bias must has keys in [0, {last}], got {name}.")
            biases[int(name)] = bias
        return biases

    def _stop(self, params: SamplingBody) -> StopRule | None:
        strings, patterns = listed(params.stop), listed(params.stop_regex)
        if not strings and not patterns:
            return None
        if self._tokenizer is None:
            raise EngineRefused("stop strings need a tokenizer, and the model folder has none")
        if max(len(strings), len(patterns)) > _MOST_STOPS:
            raise EngineRefused(f"at most {_MOST_STOPS} stop strings are allowed")
        return StopRule(self._tokenizer, tuple(strings), tuple(map(compiled, patterns)))

    def _grammar(self, params: SamplingBody) -> CompiledGrammar | None:
        asked = [(kind, text) for kind in _GRAMMARS if (text := getattr(params, kind))]
        if not asked:
            return None
        if len(asked) > 1:
            raise EngineRefused(
                "Only one of json_schema, regex, ebnf, or structural_tag can be set."
            )
        if self._compiler is None:
            raise EngineRefused("grammars need a tokenizer, and the model folder has none")
        return self._compiler.compile(*asked[0])


def default(value: Value | None, otherwise: Value) -> Value:
    return otherwise if value is None else value


def listed(given: str | list[str] | None) -> list[str]:
    return [given] if isinstance(given, str) else given or []


def compiled(pattern: str) -> re.Pattern[str]:
    """Compile a stop pattern; EngineRefused if it is invalid or longer than SGLang accepts."""
    if len(pattern.encode()) > _MOST_PATTERN_BYTES:
        raise EngineRefused(f"stop_regex is over the {_MOST_PATTERN_BYTES}-byte limit")
    try:
        return re.compile(pattern)
    except re.error as error:
        raise EngineRefused(f"invalid stop_regex {pattern!r}: {error}") from None


def refuse_out_of_range(params: SamplingBody) -> None:
    """EngineRefused, in SGLang's words, for values out of range and unsupported fields."""
    for name in ("structural_tag", "custom_params"):
        if getattr(params, name):
            raise EngineRefused(f"sampling_params.{name} is not run by the embedded engine")
    temperature = default(params.temperature, 1.0)
    if not math.isfinite(temperature) or temperature < 0:
        raise EngineRefused(f"temperature must be a non-negative finite number, got {temperature}.")
    if params.top_p is not None and not 0 < params.top_p <= 1:
        raise EngineRefused(f"top_p must be in (0, 1], got {params.top_p}.")
    if params.top_k is not None and params.top_k < 1 and params.top_k != -1:
        raise EngineRefused(f"top_k must be -1 (disable) or at least 1, got {params.top_k}.")
    for name, least, most in _BOUNDS:
        value = getattr(params, name)
        if value is not None and not least <= value <= most:
            raise EngineRefused(f"{name} must be in [{least}, {most}], got {value}.")
    repetition = default(params.repetition_penalty, 1.0)
    if not 0 < repetition <= 2:
        raise EngineRefused(
            f"repetition_penalty must be in (0, 2] (1.0 = no penalty), got {repetition}."
        )
    refuse_lengths(params)


def refuse_lengths(params: SamplingBody) -> None:
    """EngineRefused if minimum and maximum length contradict each other."""
    most, least = params.max_new_tokens, params.min_new_tokens or 0
    if most is not None and most < 0:
        raise EngineRefused(f"max_new_tokens must be at least 0, got {most}.")
    if least < 0 or (most is not None and least > most):
        raise EngineRefused(f"min_new_tokens must be in [0, max_new_tokens({most})], got {least}.")


TextEncoder = Callable[[str], list[int]]
OutputIndex = tuple[int | None, int]
"""A prompt's index in its list (None if it came alone), and the number of its output."""

_DEFAULTS = SamplingBody()
_NO_TOKENS = np.array(0, dtype=np.int64)


class GenerateBody(msgspec.Struct):
    """Body of /generate; with a list of prompts every other field may be a list too."""

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
    """Name of an adapter."""
    # Fields below are refused if set.
    token_ids_logprob: Any = None
    return_hidden_states: Any = None
    input_embeds: Any = None
    image_data: Any = None


_BODY_NOT_RUN = GenerateBody.__struct_fields__[
    GenerateBody.__struct_fields__.index("token_ids_logprob") :
]


class PromptRequest(msgspec.Struct, frozen=True):
    """One prompt of a body: its request, and the form of its response."""

    request: Request
    wants_logprobs: bool = False
    skip_special: bool = True
    trims_stop: bool = True
    """Whether the text that stopped the output is cut from its text."""


class ParsedBody(msgspec.Struct, frozen=True):
    """A parsed body."""

    requests: list[PromptRequest]
    is_list: bool
    """Whether the response is a list: several outputs, or one prompt in a list."""
    streams: bool


class RequestParser:
    """Parses bodies within the model's limits, and assigns ids if a body has none."""

    def __init__(self, architecture: Architecture, num_slots: int, params: SamplingParser) -> None:
        self.adapters = AdapterRegistry()
        """Adapters that a body may name."""
        self._architecture = architecture
        self._max_context = min(architecture.max_context, num_slots)
        self._params = params
        self._body = msgspec.json.Decoder(GenerateBody)

    def read(self, raw: bytes) -> GenerateBody:
        """Decode the body; EngineRefused in one line if a type is wrong."""
        try:
            return self._body.decode(raw)
        except DECODE_ERRORS as error:
            raise EngineRefused(f"bad request: {error}") from None

    def decode(self, body: GenerateBody, encode_text: TextEncoder | None = None) -> ParsedBody:
        """Return the requests of a body; EngineRefused in one line if it is invalid."""
        refuse_unsupported_fields(body)
        prompts, is_list = self._prompts(body, encode_text)
        requests: list[PromptRequest] = []
        for at, prompt in enumerate(prompts):
            place = at if is_list else None
            params = pick(body.sampling_params, place) or _DEFAULTS
            numbers = range(params.num_outputs)
            requests += [self._request(body, params, prompt, (place, number)) for number in numbers]
        return ParsedBody(requests, is_list or len(requests) > 1, body.stream)

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

    def _request(
        self, body: GenerateBody, params: SamplingBody, prompt: list[int], which: OutputIndex
    ) -> PromptRequest:
        at, number = which
        wants_logprobs = bool(pick(body.return_logprob, at))
        start = pick(body.logprob_start_len, at)
        scores = wants_logprobs and start is not None and start >= 0
        tokens = self._checked(prompt)
        sampling = self._params.read(params, self._budget(params, len(tokens)), number)
        if name := pick(body.lora_path, at):
            sampling = msgspec.structs.replace(sampling, adapter=self.adapters.find(name))
        request = Request(
            rid_of(body, params, at),
            tokens,
            sampling,
            extra_key=pick(body.extra_key, at) or "",
            logprob_start=start if scores else None,
            num_top=self._num_top(pick(body.top_logprobs_num, at)) if wants_logprobs else 0,
            streams=body.stream,
        )
        skip_special = params.skip_special_tokens is not False
        return PromptRequest(request, wants_logprobs, skip_special, not params.no_stop_trim)

    def _num_top(self, asked: int | None) -> int:
        most = self._architecture.vocab_size
        if asked is not None and not 0 <= asked <= most:
            raise EngineRefused(f"top_logprobs_num must be in [0, {most}], got {asked}.")
        return asked or 0

    def _checked(self, prompt: list[int]) -> Tokens:
        """Return the prompt as int32; refused if empty, too long or out of vocabulary."""
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
        """Return the maximum number of output tokens; refused if they do not fit."""
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
    """Return the request's id; one of several outputs gets a random one, as in SGLang."""
    rid = pick(body.rid, at)
    if not rid or params.num_outputs > 1:
        return uuid.uuid4().hex
    return f"{rid}_{at}" if isinstance(body.rid, str) and at is not None else str(rid)


def pick(value: Any, at: int | None) -> Any:
    """Return the value for the prompt at index `at`: lists have one per prompt, others are
    common."""
    if not isinstance(value, list):
        return value
    if at is None or at >= len(value):
        raise EngineRefused("a list of values needs a list of as many prompts")
    return value[at]


def refuse_unsupported_fields(body: GenerateBody) -> None:
    """EngineRefused if the body sets a field that this engine does not support."""
    for name in _BODY_NOT_RUN:
        if getattr(body, name):
            raise EngineRefused(f"{name} is not run by the embedded engine")
