"""Sampling parameters of a generation, its seed, and how long engine faults are retried.

- `force | default | allow` combine the session's policy with the agent's parameters. The same
  request, rollout and generation get the same seed on any machine; under a forced seed no two
  generations of a group share one.
- A token resets all retry counters. An attempt that an update cut counts only in
  `max_fruitless_attempts`. One engine's faults are retried for `sick_s` if no better engine was
  available.
"""

import functools
import hashlib
import sys

import msgspec

from rollmesh.core.config import EngineConfig, InterceptionConfig
from rollmesh.core.errors import EngineBroke, EngineError, EngineOverloaded, EngineUnavailable
from rollmesh.core.types import (
    UNVERSIONED,
    FieldPolicy,
    SamplingParams,
    SamplingPolicy,
    SamplingRule,
)
from rollmesh.runtime.chat import RequestedSampling

Number = float | int
MAX_SEED = 2**63 - 1
"""Engines store seeds in a signed 64-bit integer."""
NO_TOP_K = -1
"""SGLang's value for no limit; agents of other servers send 0."""


def derive_seed(seed: int, rollout_index: int, generation_index: int) -> int:
    """63 bits of BLAKE2b over the arguments: engines store seeds in a signed 64-bit integer."""
    text = f"{seed}/{rollout_index}/{generation_index}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1


def resolve(
    policy: SamplingPolicy,
    requested: RequestedSampling,
    *,
    room_tokens: int,
    derived_seed: int,
    stop_token_ids: tuple[int, ...],
    choice: int = 0,
) -> SamplingParams:
    """The parameters to sample with.

    `room_tokens` is the number of tokens that the context has left; it always limits max_tokens.
    The choices of one call never share a seed, whatever its source.
    """
    decided = _decide(policy, requested, stop_token_ids)
    seed = _pick(
        policy.seed, None if requested.seed is None else requested.seed + choice, derived_seed
    )
    if seed == policy.seed.value:
        seed += choice
    max_tokens = max(1, min(decided.max_tokens, room_tokens))
    return msgspec.structs.replace(decided, max_tokens=max_tokens, seed=int(seed) & MAX_SEED)


@functools.lru_cache(maxsize=64)
def _decide(
    policy: SamplingPolicy, requested: RequestedSampling, stop_token_ids: tuple[int, ...]
) -> SamplingParams:
    """The parameters that do not depend on the call; cached, since an agent's turns request the
    same."""
    free = policy.penalties.policy is not FieldPolicy.FORCE
    has_bias = policy.logit_bias.policy is not FieldPolicy.FORCE
    has_grammar = policy.grammar.policy is not FieldPolicy.FORCE
    temperature = _pick(policy.temperature, requested.temperature, 1.0)
    top_p = _pick(policy.top_p, requested.top_p, 1.0)
    if top_p == 0:
        # Temperature 0 as the smallest nucleus: engines accept no top_p of 0.
        temperature, top_p = 0.0, 1.0
    return SamplingParams(
        max_tokens=int(_pick(policy.max_tokens, requested.max_tokens, sys.maxsize)),
        temperature=temperature,
        top_p=top_p,
        top_k=int(_pick(policy.top_k, requested.top_k, NO_TOP_K)) or NO_TOP_K,
        stop=requested.stop,
        stop_token_ids=stop_token_ids,
        frequency_penalty=(requested.frequency_penalty or 0.0) if free else 0.0,
        presence_penalty=(requested.presence_penalty or 0.0) if free else 0.0,
        repetition_penalty=(requested.repetition_penalty or 1.0) if free else 1.0,
        min_p=_pick(policy.min_p, requested.min_p, 0.0),
        logit_bias=requested.logit_bias if has_bias else (),
        grammar=requested.grammar if has_grammar else None,
    )


def forced_fields(requested: RequestedSampling, params: SamplingParams) -> tuple[str, ...]:
    """Names of the fields that the agent set and that are sampled with another value."""
    if requested == _NOTHING_REQUESTED:
        return ()
    names = []
    for name in RequestedSampling.__struct_fields__:
        asked = getattr(requested, name)
        if asked not in (None, ()) and asked != getattr(params, name):
            names.append(name)
    return tuple(names)


_NOTHING_REQUESTED = RequestedSampling()


def _pick(rule: SamplingRule, asked: Number | None, otherwise: Number) -> Number:
    """The forced value, else the agent's, else the policy's default, else the common default."""
    if rule.policy is not FieldPolicy.FORCE and asked is not None:
        return asked
    return otherwise if rule.value is None else rule.value


REMEDY = "see `rollmesh status` or a gateway's /healthz"
MAX_QUOTED_CHARS = 300
"""Engine errors are passed on to agents; longer ones, such as pages of HTML, are truncated."""

_NOT_READY = "no engine is ready"
_BEHIND = "no engine has weights as new as this session has seen"

EngineIncarnation = tuple[str, str]
"""(url, incarnation)"""


_ENGINE, _INTERCEPTION = EngineConfig(), InterceptionConfig()


class GenerationSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Retry limits of a generation; all times exclude pauses by updates. core/config.py describes
    those that are settings."""

    retry_window_s: float = _INTERCEPTION.retry_window_s
    engine_wait_s: float = _INTERCEPTION.engine_wait_s
    connect_timeout_s: float = _ENGINE.connect_timeout_s
    answer_timeout_s: float = _ENGINE.answer_timeout_s
    abort_timeout_s: float = _ENGINE.abort_timeout_s
    avoid_s: float = _ENGINE.avoid_s
    abort_repeat_s: float = 0.04
    """Wait after a first abort; grows from there."""
    max_fruitless_attempts: int = 16
    """Number of consecutive attempts without a token after which the generation fails."""
    max_full_queues: int = 8
    """Number of consecutive attempts that meet a full queue after which the caller must retry
    later."""
    max_broken_attempts: int = 3
    """Number of attempts that break before the first token of a request with images after which the
    request is considered the cause."""
    sick_s: float = 1.5
    """A generation fails if its engine's faults last this long and no other engine can take
    over."""
    backoff_s: float = 0.05
    """Wait after a second fruitless attempt in a row; doubles from there."""
    max_backoff_s: float = 1.0


class RetryState:
    """Retry state of one generation. Its methods return the error to end with, or None."""

    __slots__ = (
        "_faulted",
        "_last_failure",
        "_missing",
        "_num_broken",
        "_num_fruitless",
        "_num_full_queues",
        "_settings",
        "_sick_since_s",
        "not_before_s",
    )

    def __init__(self, settings: GenerationSettings) -> None:
        self.not_before_s = 0.0
        """When the next attempt may begin."""
        self._settings = settings
        self._num_fruitless = 0
        self._num_full_queues = 0
        self._num_broken = 0
        self._faulted: set[EngineIncarnation] = set()
        """Engine incarnations that failed since the last token."""
        self._sick_since_s = 0.0
        self._missing = _NOT_READY
        self._last_failure = ""

    def on_tokens(self) -> None:
        """The engine produced tokens."""
        self._num_full_queues = 0

    def on_full_queue(self, detail: str) -> EngineError | None:
        """No attempt began: the engine's queue is full."""
        self._num_full_queues += 1
        is_enough = self._num_full_queues > self._settings.max_full_queues
        return EngineOverloaded(detail) if is_enough else None

    def on_broken(self, detail: str) -> EngineError | None:
        """An engine broke at a request with images, which it fetches and opens before it samples;
        one such request would fence all engines.

        SGLang answers 500, or cuts the stream, if an image's address is invalid.
        """
        self._num_broken += 1
        if self._num_broken < self._settings.max_broken_attempts:
            return None
        why = f"engines fail at this request, which has images; can they reach them? {detail}"
        return EngineBroke(why)

    def on_fault(
        self, incarnation: EngineIncarnation, detail: str, now_s: float
    ) -> EngineError | None:
        """The engine failed without a token, and the request is not known to be the cause."""
        self._num_full_queues = 0
        self._last_failure = detail[:MAX_QUOTED_CHARS]
        if not self._faulted:
            self._sick_since_s = now_s
        is_again = incarnation in self._faulted
        self._faulted.add(incarnation)
        if is_again and now_s - self._sick_since_s >= self._settings.sick_s:
            return self._unavailable("the engine fails at every attempt, and there is no other")
        return None

    def on_cut(self, is_fruitful: bool, now_s: float) -> EngineError | None:
        """An attempt ended before the turn did, whatever the cause."""
        if is_fruitful:
            self._num_fruitless = 0
            self._faulted.clear()
            return None
        self._num_fruitless += 1
        if self._num_fruitless > self._settings.max_fruitless_attempts:
            return self._unavailable("no engine made progress; are they healthy?")
        if self._num_fruitless > 1:
            wait_s = self._settings.backoff_s * 2.0 ** (self._num_fruitless - 2)
            self.not_before_s = now_s + min(wait_s, self._settings.max_backoff_s)
        return None

    def on_older_weights(self, url: str, served: int, announced: int) -> None:
        """An attempt's tokens were refused: of older weights than the session's or the fleet
        table's."""
        named = "unnumbered weights" if served == UNVERSIONED else f"policy version {served}"
        self._last_failure = f"{url}: samples with {named}, the fleet table has {announced}"

    def on_missing(self, why: str, *, is_behind: bool = False) -> None:
        """No engine is available, for the reason `why`; READY engines are behind the session."""
        self._missing = _BEHIND if is_behind else _NOT_READY
        self._last_failure = why[:MAX_QUOTED_CHARS] or self._last_failure

    def without_engine(self) -> EngineError:
        """The error if no engine was available for as long as a call waits."""
        return self._unavailable(self._missing)

    def _unavailable(self, why: str) -> EngineUnavailable:
        last = f" (last: {self._last_failure})" if self._last_failure else ""
        return EngineUnavailable(f"{why}{last}; {REMEDY}")
