"""Sampling parameters of a generation, its seed, and how long engine faults are retried.

- `force | default | allow` combine the session's policy with the agent's parameters. The same
  request, rollout and generation get the same seed on any machine; under a forced seed no two
  generations of a group share one.
- A token resets all retry counters. A leg that an update cut counts in `max_fruitless_legs` only.
  One engine's faults are retried for `sick_s` if no better engine was available.
"""

import functools
import hashlib
import sys

import msgspec

from rollmesh.core.errors import EngineBroke, EngineError, EngineOverloaded, EngineUnavailable
from rollmesh.core.types import FieldPolicy, SamplingParams, SamplingPolicy, SamplingRule
from rollmesh.engine.answers import UNVERSIONED
from rollmesh.runtime.chat import SamplingAsk

Number = float | int
MAX_SEED = 2**63 - 1
"""Engines keep seeds in a signed 64-bit integer."""
NO_TOP_K = -1
"""SGLang's word for no bound; agents of other servers write 0."""


def derive_seed(seed: int, rollout_index: int, generation_index: int) -> int:
    """63 bits of BLAKE2b over the three: engines keep seeds in a signed 64-bit integer."""
    text = f"{seed}/{rollout_index}/{generation_index}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1


def resolve(
    policy: SamplingPolicy,
    ask: SamplingAsk,
    *,
    room_tokens: int,
    derived_seed: int,
    stop_token_ids: tuple[int, ...],
    choice: int = 0,
) -> SamplingParams:
    """The parameters to sample with.

    `room_tokens` is what the context leaves for the answer; it caps max_tokens whatever is asked.
    The choices of one call never share a seed, wherever it comes from.
    """
    decided = _decide(policy, ask, stop_token_ids)
    seed = _pick(policy.seed, None if ask.seed is None else ask.seed + choice, derived_seed)
    if seed == policy.seed.value:
        seed += choice
    max_tokens = max(1, min(decided.max_tokens, room_tokens))
    return msgspec.structs.replace(decided, max_tokens=max_tokens, seed=int(seed) & MAX_SEED)


@functools.lru_cache(maxsize=64)
def _decide(
    policy: SamplingPolicy, ask: SamplingAsk, stop_token_ids: tuple[int, ...]
) -> SamplingParams:
    """What does not depend on the call: an agent asks the same of each of its turns."""
    free = policy.penalties.policy is not FieldPolicy.FORCE
    has_bias = policy.logit_bias.policy is not FieldPolicy.FORCE
    has_grammar = policy.grammar.policy is not FieldPolicy.FORCE
    temperature = _pick(policy.temperature, ask.temperature, 1.0)
    top_p = _pick(policy.top_p, ask.top_p, 1.0)
    if top_p == 0:
        # The smallest nucleus is the likeliest token; engines take no share of nothing.
        temperature, top_p = 0.0, 1.0
    return SamplingParams(
        max_tokens=int(_pick(policy.max_tokens, ask.max_tokens, sys.maxsize)),
        temperature=temperature,
        top_p=top_p,
        top_k=int(_pick(policy.top_k, ask.top_k, NO_TOP_K)) or NO_TOP_K,
        stop=ask.stop,
        stop_token_ids=stop_token_ids,
        frequency_penalty=(ask.frequency_penalty or 0.0) if free else 0.0,
        presence_penalty=(ask.presence_penalty or 0.0) if free else 0.0,
        repetition_penalty=(ask.repetition_penalty or 1.0) if free else 1.0,
        min_p=_pick(policy.min_p, ask.min_p, 0.0),
        logit_bias=ask.logit_bias if has_bias else (),
        grammar=ask.grammar if has_grammar else None,
    )


def forced_fields(ask: SamplingAsk, params: SamplingParams) -> tuple[str, ...]:
    """Names of the fields that the agent set and that are sampled with another value."""
    if ask == _NOTHING_ASKED:
        return ()
    names = []
    for name in SamplingAsk.__struct_fields__:
        asked = getattr(ask, name)
        if asked not in (None, ()) and asked != getattr(params, name):
            names.append(name)
    return tuple(names)


_NOTHING_ASKED = SamplingAsk()


def _pick(rule: SamplingRule, asked: Number | None, otherwise: Number) -> Number:
    """Ours where forced, else theirs, else ours as a default, else the common default."""
    if rule.policy is not FieldPolicy.FORCE and asked is not None:
        return asked
    return otherwise if rule.value is None else rule.value


WHERE_TO_LOOK = "`rollmesh status`, or a gateway's /healthz, says more"
MAX_SAID_CHARS = 300
"""What an engine says goes on to agents; a page of HTML would not help them."""

_NOT_READY = "no engine is ready"
_BEHIND = "no engine has weights as new as this session has seen"

EngineLife = tuple[str, str]
"""(url, incarnation)"""


class GenerationSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How patient a generation is; all in time that is not paused by an update."""

    retry_window_s: float = 30.0
    engine_wait_s: float = 120.0
    answer_timeout_s: float = 90.0
    abort_repeat_s: float = 0.04
    """Wait after a first abort; grows from there."""
    abort_timeout_s: float = 5.0
    """A leg that does not end by then is dropped with the tokens that it did not show."""
    max_fruitless_legs: int = 16
    """So many legs in a row without a token, and the engines are given up."""
    max_full_queues: int = 8
    """So many legs in a row that meet a full queue, and the caller is told to come back later."""
    max_broken_legs: int = 3
    """So many legs that break before the first token of a request with images, and it is why."""
    sick_s: float = 1.5
    """An engine whose faults go on for so long, with nobody to take over, is given up."""
    backoff_s: float = 0.05
    """Wait after a second fruitless leg in a row; doubles from there."""
    max_backoff_s: float = 1.0


class Patience:
    """One generation's. Each of its questions is answered by the error to end with, or None."""

    __slots__ = (
        "_faulted",
        "_last_said",
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
        """When the next leg may begin."""
        self._settings = settings
        self._num_fruitless = 0
        self._num_full_queues = 0
        self._num_broken = 0
        self._faulted: set[EngineLife] = set()
        """Engines that failed it since the last token, each in one life."""
        self._sick_since_s = 0.0
        self._missing = _NOT_READY
        self._last_said = ""

    def on_tokens(self) -> None:
        """An engine gets on with it."""
        self._num_full_queues = 0

    def on_full_queue(self, detail: str) -> EngineError | None:
        """No leg was begun: the engine has no room."""
        self._num_full_queues += 1
        is_enough = self._num_full_queues > self._settings.max_full_queues
        return EngineOverloaded(detail) if is_enough else None

    def on_broken(self, detail: str) -> EngineError | None:
        """The engine fetches and opens images before it samples: one such request would fence all.

        SGLang answers 500, or cuts the stream, where an image's address leads nowhere.
        """
        self._num_broken += 1
        if self._num_broken < self._settings.max_broken_legs:
            return None
        why = f"engines break at this request, which shows images; are they in reach? {detail}"
        return EngineBroke(why)

    def on_fault(self, life: EngineLife, detail: str, now_s: float) -> EngineError | None:
        """The engine failed without a token, and the request is not known to be why."""
        self._num_full_queues = 0
        self._last_said = detail[:MAX_SAID_CHARS]
        if not self._faulted:
            self._sick_since_s = now_s
        is_again = life in self._faulted
        self._faulted.add(life)
        if is_again and now_s - self._sick_since_s >= self._settings.sick_s:
            return self._unavailable("the engine fails at every try, and no other is there")
        return None

    def on_cut(self, is_fruitful: bool, now_s: float) -> EngineError | None:
        """A leg is over and the turn is not, whosever fault it was."""
        if is_fruitful:
            self._num_fruitless = 0
            self._faulted.clear()
            return None
        self._num_fruitless += 1
        if self._num_fruitless > self._settings.max_fruitless_legs:
            return self._unavailable("no engine got on with it; are they healthy?")
        if self._num_fruitless > 1:
            wait_s = self._settings.backoff_s * 2.0 ** (self._num_fruitless - 2)
            self.not_before_s = now_s + min(wait_s, self._settings.max_backoff_s)
        return None

    def on_older_weights(self, url: str, served: int, announced: int) -> None:
        """A leg's tokens were refused: of older weights than the session's or the fleet table's."""
        named = "unnumbered weights" if served == UNVERSIONED else f"policy version {served}"
        self._last_said = f"{url}: samples with {named}, the fleet table has {announced}"

    def on_missing(self, why: str, *, is_behind: bool = False) -> None:
        """No engine is fit, and why; those that are READY are behind the session."""
        self._missing = _BEHIND if is_behind else _NOT_READY
        self._last_said = why[:MAX_SAID_CHARS] or self._last_said

    def without_engine(self) -> EngineError:
        """None was fit for as long as a call waits."""
        return self._unavailable(self._missing)

    def _unavailable(self, why: str) -> EngineUnavailable:
        last = f" (last: {self._last_said})" if self._last_said else ""
        return EngineUnavailable(f"{why}{last}; {WHERE_TO_LOOK}")
