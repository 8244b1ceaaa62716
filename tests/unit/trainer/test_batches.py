"""Samples to tensors: nothing lost, nothing doubled, every rollout weighs the same."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollmesh.core.errors import ConfigError
from rollmesh.serve.client.samples import Sample
from rollmesh.trainer.batches import TokenBatch, pack
from tests.unit.trainer.samples import new_sample


def packed(samples: list[Sample], max_tokens: int = 64) -> list[TokenBatch]:
    return list(pack(samples, np.arange(len(samples), dtype=np.float32), max_tokens, "cpu"))


@st.composite
def some_samples(draw: st.DrawFn) -> list[Sample]:
    samples = []
    for index in range(draw(st.integers(1, 8))):
        mask = [0, *draw(st.lists(st.integers(0, 1), min_size=1, max_size=12)), 1]
        token_ids = draw(st.lists(st.integers(0, 3), min_size=len(mask), max_size=len(mask)))
        logprobs = [-float(n + 1) for n in range(len(mask))]
        sample = new_sample(
            token_ids, mask, index=index, logprobs=logprobs, policy_version=index, temperature=0.5
        )
        samples.append(sample)
    return samples


@settings(deadline=None, max_examples=60)
@given(some_samples(), st.integers(1, 40))
def test_every_trained_token_has_one_entry_with_all_that_was_recorded(
    samples: list[Sample], max_tokens: int
) -> None:
    seen = []
    for batch in packed(samples, max_tokens):
        rows, length = batch.token_ids_BT.shape
        assert rows == 1 or rows * (length + 1) <= max_tokens
        contexts = batch.token_ids_BT[batch.rows_N, batch.kept_K[batch.columns_N]]
        fields = (
            batch.samples_N,
            batch.kept_K[batch.columns_N] + 1,
            contexts,
            batch.targets_N,
            batch.recorded_N,
            batch.policy_versions_N,
            batch.advantages_N,
            batch.temperatures_N,
        )
        seen += list(zip(*(field.tolist() for field in fields), strict=True))
    expected = [
        (at, n, s.token_ids[n - 1], s.token_ids[n], s.logprobs[n], s.policy_versions[n], at, 0.5)
        for at, s in enumerate(samples)
        for n in np.flatnonzero(s.loss_mask)
    ]
    assert sorted(seen) == sorted(expected)


@settings(deadline=None, max_examples=60)
@given(some_samples(), st.integers(1, 40))
def test_every_rollout_weighs_the_same_whatever_its_length(
    samples: list[Sample], max_tokens: int
) -> None:
    totals = np.zeros(len(samples))
    for batch in packed(samples, max_tokens):
        np.add.at(totals, batch.samples_N.numpy(), batch.weights_N.numpy())
    assert totals == pytest.approx(np.full(len(samples), 1 / len(samples)), rel=1e-5)


def test_weight_of_a_rollout_does_not_grow_with_its_samples() -> None:
    whole = new_sample([1, 2, 3], [0, 1, 1], index=0)
    parts = [
        new_sample([1, 2, 3, 4], [0, 1, 1, 1], index=1, weight=0.75),
        new_sample([1, 5], [0, 1], index=1, weight=0.25),
    ]
    (batch,) = packed([whole, *parts])
    weights = [batch.weights_N[batch.samples_N == at].tolist() for at in range(3)]
    # Two rollouts: 1/2 each, spread over 2 tokens of the one and 3 + 1 tokens of the other.
    assert weights == [[0.25, 0.25], [0.125] * 3, [0.125]]


def test_samples_of_equal_tokens_share_a_row_and_keep_their_entries() -> None:
    samples = [
        new_sample([1, 2, 3], [0, 1, 1], index=0, logprobs=[0, -1, -2]),
        new_sample([1, 2, 4], [0, 1, 1], index=1, logprobs=[0, -3, -4]),
        new_sample([1, 2, 3], [0, 0, 1], index=2, logprobs=[0, 0, -5]),
    ]
    (batch,) = packed(samples)
    assert batch.token_ids_BT.tolist() == [[1, 2], [1, 2]]
    assert batch.samples_N.tolist() == [0, 0, 2, 1, 1]
    assert batch.rows_N.tolist() == [0, 0, 0, 1, 1]
    assert batch.recorded_N.tolist() == [-1, -2, -5, -3, -4]


def test_rows_of_like_length_stand_together() -> None:
    lengths = [9, 2, 8, 3, 2]
    samples = [
        new_sample([at] * length, [0] * (length - 1) + [1], index=at)
        for at, length in enumerate(lengths)
    ]
    shapes = [tuple(batch.token_ids_BT.shape) for batch in packed(samples, max_tokens=18)]
    assert shapes == [(3, 2), (2, 8)]


def test_temperature_of_zero_cannot_be_trained() -> None:
    with pytest.raises(ConfigError, match=r"sampling\.temperature must be above 0"):
        packed([new_sample([1, 2], [0, 1], temperature=0.0)])
