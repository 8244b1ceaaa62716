"""`sampling_params` of a request's body: which fields there are, which values mean something.

Owns SGLang's names, defaults, bounds and words of refusal for them. Invariant: a Sampling that
leaves here can be drawn by: tokens are in the vocabulary, grammars are compiled, patterns parse.
Driven by the ask decoder.
"""

import math
import random
import re
from typing import Annotated, Any, TypeVar

import msgspec
from tokenizers import Tokenizer

from rollmesh.core.errors import EngineRefused
from rollmesh.engine.embedded.checkpoint import Architecture
from rollmesh.engine.embedded.grammars import Grammar, GrammarCompiler, GrammarKind
from rollmesh.engine.embedded.request import Sampling
from rollmesh.engine.embedded.shaping import Shaping
from rollmesh.engine.embedded.stops import StopRule

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
    # From here on refused if set.
    structural_tag: Any = None
    custom_params: Any = None

    @property
    def num_outputs(self) -> int:
        """Outputs for each prompt; SGLang takes 0 and null for 1."""
        return max(self.n or 1, 1)


class ParamsReader:
    """Makes a Sampling of a body's parameters, for one model and its tokenizer."""

    def __init__(self, architecture: Architecture, tokenizer: Tokenizer | None, seed: int) -> None:
        """`seed`: of the seeds of requests that name none."""
        self._architecture = architecture
        self._tokenizer = tokenizer
        self._seeds = random.Random(seed)
        self._compiler: GrammarCompiler | None = None
        if tokenizer is not None:
            ends = architecture.eos_token_ids
            self._compiler = GrammarCompiler(tokenizer, architecture.vocab_size, ends)

    def read(self, params: SamplingBody, max_new_tokens: int, number: int) -> Sampling:
        """EngineRefused in one line if something is wrong; `number`: which of n outputs it is of.

        A named seed gives each of n outputs a draw of its own, and the first the one it would have
        alone.
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

    def _grammar(self, params: SamplingBody) -> Grammar | None:
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
    """`value`, or the default where it is null."""
    return otherwise if value is None else value


def listed(given: str | list[str] | None) -> list[str]:
    """One string or several as a list."""
    return [given] if isinstance(given, str) else given or []


def compiled(pattern: str) -> re.Pattern[str]:
    """EngineRefused where it does not parse, or is longer than SGLang takes."""
    if len(pattern.encode()) > _MOST_PATTERN_BYTES:
        raise EngineRefused(f"stop_regex is over the {_MOST_PATTERN_BYTES}-byte limit")
    try:
        return re.compile(pattern)
    except re.error as error:
        raise EngineRefused(f"invalid stop_regex {pattern!r}: {error}") from None


def refuse_out_of_range(params: SamplingBody) -> None:
    """EngineRefused, in SGLang's words, for values that mean nothing, and for what is not run."""
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
    """EngineRefused where the least and the most tokens contradict each other."""
    most, least = params.max_new_tokens, params.min_new_tokens or 0
    if most is not None and most < 0:
        raise EngineRefused(f"max_new_tokens must be at least 0, got {most}.")
    if least < 0 or (most is not None and least > most):
        raise EngineRefused(f"min_new_tokens must be in [0, max_new_tokens({most})], got {least}.")
