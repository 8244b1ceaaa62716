"""What one generation is sampled with: the agent's wishes under the session's policy.

Owns the meaning of `force | default | allow` and the derivation of seeds. Invariant: under a forced
seed no two generations of a group share one, and the same ask, rollout and generation give the same
seed again on any machine. Driven by session.py.
"""

import functools
import hashlib
import sys

import msgspec

from rollmesh.core.types import FieldPolicy, SamplingParams, SamplingPolicy, SamplingRule
from rollmesh.runtime.turns import SamplingAsk

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
