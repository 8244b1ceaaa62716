"""The session's policy over the agent's wishes."""

import msgspec

from rollmesh.core.types import EVAL_SAMPLING, SamplingParams, SamplingPolicy
from rollmesh.runtime.chat import RequestedSampling
from rollmesh.runtime.sampling import derive_seed, resolve

ASK = RequestedSampling(temperature=0.0, top_p=0.5, seed=1, frequency_penalty=1.0, max_tokens=9)


def params(
    policy: SamplingPolicy, ask: RequestedSampling, room_tokens: int = 100
) -> SamplingParams:
    return resolve(policy, ask, room_tokens=room_tokens, derived_seed=77, stop_token_ids=(2,))


def test_training_forces_what_would_make_siblings_equal() -> None:
    got = params(SamplingPolicy(), ASK)
    assert (got.temperature, got.top_p, got.seed, got.frequency_penalty) == (1.0, 1.0, 77, 0.0)
    assert got.max_tokens == 9
    assert got.stop_token_ids == (2,)


def test_evaluation_gives_the_agent_what_it_asks() -> None:
    got = params(EVAL_SAMPLING, ASK)
    assert (got.temperature, got.top_p, got.seed, got.frequency_penalty) == (0.0, 0.5, 1, 1.0)
    assert params(EVAL_SAMPLING, RequestedSampling()).seed == 77


def test_a_share_of_nothing_is_greedy_and_a_count_of_nothing_is_no_bound() -> None:
    """Agents of other servers write both; SGLang answers 400 to either."""
    greedy = params(EVAL_SAMPLING, RequestedSampling(temperature=0.7, top_p=0.0, top_k=5))
    assert (greedy.temperature, greedy.top_p, greedy.top_k) == (0.0, 1.0, 5)
    free = params(EVAL_SAMPLING, RequestedSampling(temperature=0.7, top_p=0.9, top_k=0))
    assert (free.temperature, free.top_p, free.top_k) == (0.7, 0.9, -1)


def test_max_tokens_never_leaves_the_context() -> None:
    assert (
        params(SamplingPolicy(), RequestedSampling(max_tokens=500), room_tokens=40).max_tokens == 40
    )
    assert params(SamplingPolicy(), RequestedSampling()).max_tokens == 100


def test_seeds_differ_by_ask_rollout_and_generation_and_fit_63_bits() -> None:
    seeds = {derive_seed(a, b, c) for a in range(4) for b in range(4) for c in range(4)}
    assert len(seeds) == 64
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert derive_seed(1, 2, 3) == derive_seed(1, 2, 3)


def test_params_go_over_the_wire_as_they_are() -> None:
    got = params(SamplingPolicy(), ASK)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(got), type=SamplingParams) == got
