"""Draws have the right distribution, support and log-probs, and depend on the seed only."""

import math
from typing import Any

import numpy as np
import pytest
import torch

from rollmesh.engine.embedded.request import Sampling
from rollmesh.engine.embedded.runner import cut_tails, draw, likeliest, mix, tempered, uniforms

LOGITS = torch.tensor([2.0, 1.0, 0.5, 0.0, -1.0, -30.0])
PROBS = LOGITS.softmax(-1)


def draw_many(num: int, **params: Any) -> tuple[list[int], list[float]]:
    samplings = [Sampling(seed=seed, **params) for seed in range(num)]
    return draw(LOGITS.expand(num, -1), samplings, [5] * num)


def shares(tokens: list[int]) -> torch.Tensor:
    return torch.bincount(torch.tensor(tokens), minlength=len(LOGITS)) / len(tokens)


def test_tokens_are_drawn_as_often_as_their_probability() -> None:
    num = 40_000
    tokens, _ = draw_many(num)
    deviation = (PROBS * (1 - PROBS) / num).sqrt()
    assert bool(((shares(tokens) - PROBS).abs() < 4 * deviation + 1e-9).all())


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_logprobs_are_of_the_tempered_distribution(temperature: float) -> None:
    tokens, logprobs = draw_many(200, temperature=temperature)
    expected = (LOGITS / temperature).log_softmax(-1)[tokens]
    assert torch.allclose(torch.tensor(logprobs), expected, atol=1e-6)


def test_greedy_takes_the_likeliest_and_reports_temperature_one() -> None:
    tokens, logprobs = draw_many(3, temperature=0.0)
    assert tokens == [0, 0, 0]
    assert logprobs == pytest.approx([math.log(PROBS[0])] * 3, abs=1e-6)


def test_greedy_and_sampling_rows_share_a_batch() -> None:
    samplings = [Sampling(temperature=0.0), Sampling(seed=3), Sampling(temperature=0.0)]
    tokens, _ = draw(LOGITS.expand(3, -1), samplings, [1, 1, 1])
    alone, _ = draw(LOGITS.expand(1, -1), [Sampling(seed=3)], [1])
    assert tokens == [0, alone[0], 0]


def test_top_k_leaves_the_k_likeliest_in_their_proportions() -> None:
    tokens, logprobs = draw_many(20_000, top_k=2)
    expected = torch.tensor([PROBS[0], PROBS[1], 0, 0, 0, 0]) / (PROBS[0] + PROBS[1])
    assert bool(((shares(tokens) - expected).abs() < 0.015).all())
    assert logprobs[0] == pytest.approx(math.log(PROBS[tokens[0]]), abs=1e-6), "not renormalised"


@pytest.mark.parametrize(("top_p", "kept"), [(0.5, 1), (0.6, 2), (0.7, 2), (0.8, 3), (0.999, 5)])
def test_top_p_keeps_the_smallest_set_that_reaches_it(top_p: float, kept: int) -> None:
    before = torch.cat((torch.zeros(1), PROBS.cumsum(0)[:-1]))
    assert int((before <= top_p).sum()) == kept, "this case keeps that many tokens"
    tokens, _ = draw_many(3000, top_p=top_p)
    assert set(tokens) == set(range(kept))


def test_top_k_and_top_p_are_both_cut_from_the_full_distribution() -> None:
    sampling = Sampling(top_k=3, top_p=0.7)
    kept = cut_tails(PROBS.expand(1, -1), [sampling])[0]
    assert kept.nonzero().flatten().tolist() == [0, 1]
    assert torch.equal(kept[:2], PROBS[:2])


def test_a_row_draws_the_same_in_every_batch() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(50, 64, generator=generator)
    samplings = [Sampling(seed=s, top_k=-1 if s % 2 else 9, temperature=0.7) for s in range(50)]
    positions = [s * 3 for s in range(50)]
    together, _ = draw(logits, samplings, positions)
    alone = [draw(logits[r : r + 1], [samplings[r]], [positions[r]])[0][0] for r in range(50)]
    assert together == alone


def test_uniforms_are_even_and_depend_on_seed_and_position() -> None:
    seeds = np.arange(20_000, dtype=np.uint64)
    drawn = uniforms(seeds, np.full(20_000, 7, dtype=np.uint64))
    assert drawn.min() >= 0
    assert drawn.max() < 1
    counts, _ = np.histogram(drawn, bins=20, range=(0, 1))
    assert np.abs(counts - 1000).max() < 150
    assert np.array_equal(drawn, uniforms(seeds, np.full(20_000, 7, dtype=np.uint64)))
    moved = uniforms(seeds, np.full(20_000, 8, dtype=np.uint64))
    assert abs(np.corrcoef(drawn, moved)[0, 1]) < 0.03
    assert abs(np.corrcoef(drawn[:-1], drawn[1:])[0, 1]) < 0.03


def test_mixing_is_splitmix64() -> None:
    # First output of SplitMix64 seeded with 0, as its authors' reference code prints it.
    golden = np.array([0x9E3779B97F4A7C15], dtype=np.uint64)
    assert int(mix(golden)[0]) == 0xE220A8397B1DCDAF


def test_a_negative_seed_is_valid() -> None:
    tokens, _ = draw(LOGITS.expand(1, -1), [Sampling(seed=-(2**63))], [0])
    assert 0 <= tokens[0] < len(LOGITS)


def test_min_p_keeps_what_is_likely_enough_beside_the_likeliest() -> None:
    share = float(PROBS[2] / PROBS[0])
    for min_p, kept in [(share * 0.99, 3), (share * 1.01, 2), (1.0, 1)]:
        left = cut_tails(PROBS.expand(1, -1), [Sampling(min_p=min_p)])[0]
        assert left.nonzero().flatten().tolist() == list(range(kept))


def test_the_likeliest_come_in_order_with_the_logprobs_that_draws_report() -> None:
    sampling = Sampling(temperature=0.5)
    logprobs = tempered(LOGITS.expand(2, -1), [sampling, sampling])
    one, three = likeliest(logprobs, [1, 3])
    expected = (LOGITS / 0.5).log_softmax(-1).tolist()
    assert [token for _, token in three] == [0, 1, 2]
    assert [logprob for logprob, _ in three] == pytest.approx(expected[:3])
    assert one == three[:1]


def test_an_impossible_token_is_reported_with_the_lowest_float() -> None:
    logits = torch.tensor([[0.0, -torch.inf, -torch.inf]])
    ((_, impossible, _),) = likeliest(logits.log_softmax(-1), [3])
    assert impossible[0] == torch.finfo(torch.float32).min
    assert len(likeliest(logits, [9])[0]) == 3, "there are no more tokens"
