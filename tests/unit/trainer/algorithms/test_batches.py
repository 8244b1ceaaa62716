"""Packed batches: no token is lost, doubled or padded, and weights do not depend on ranks."""

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollmesh.core.config import LossWeight
from rollmesh.core.errors import ConfigError
from rollmesh.serve.client.samples import Sample
from rollmesh.trainer.algorithms.packing import (
    TokenBatch,
    assign_minibatches,
    empty_batch,
    pack,
    token_weights,
)
from tests.unit.trainer.samples import new_sample


def packed(samples: list[Sample], max_tokens: int = 64) -> list[TokenBatch]:
    """The nth sample has advantage n and weight n + 0.5."""
    numbers: npt.NDArray[np.float32] = np.arange(len(samples), dtype=np.float32)
    return list(pack(samples, numbers, numbers + np.float32(0.5), max_tokens, "cpu"))


@st.composite
def some_samples(draw: st.DrawFn) -> list[Sample]:
    samples = []
    for index in range(draw(st.integers(1, 8))):
        mask = [0, *draw(st.lists(st.integers(0, 1), min_size=1, max_size=12)), 1]
        token_ids = draw(st.lists(st.integers(0, 3), min_size=len(mask), max_size=len(mask)))
        logprobs = [-float(n + 1) for n in range(len(mask))]
        temperature = draw(st.sampled_from([0.5, 1.0]))
        sample = new_sample(
            token_ids,
            mask,
            index=index,
            logprobs=logprobs,
            policy_version=index,
            temperature=temperature,
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
        kept = batch.kept_K[batch.kept_index_N]
        starts = np.array(batch.starts)
        which = np.searchsorted(starts, kept.numpy(), "right") - 1
        fields = (
            batch.samples_N,
            kept.numpy() + 1 - starts[which],
            batch.token_ids_T[kept],
            batch.targets_K[batch.kept_index_N],
            batch.temperatures_K[batch.kept_index_N],
            batch.recorded_N,
            batch.policy_versions_N,
            batch.advantages_N,
            batch.weights_N,
        )
        seen += list(zip(*(field.tolist() for field in fields), strict=True))
    expected = [
        (
            *(at, n, s.token_ids[n - 1], s.token_ids[n], s.temperature, s.logprobs[n]),
            *(s.policy_versions[n], at, at + 0.5),
        )
        for at, s in enumerate(samples)
        for n in np.flatnonzero(s.loss_mask)
    ]
    assert sorted(seen) == sorted(expected)


@settings(deadline=None, max_examples=60)
@given(some_samples(), st.integers(1, 40))
def test_tokens_of_all_batches_are_the_distinct_sequences_and_no_padding(
    samples: list[Sample], max_tokens: int
) -> None:
    sequences = []
    for batch in packed(samples, max_tokens):
        ends = zip(batch.starts, batch.starts[1:], strict=False)
        sequences += [tuple(batch.token_ids_T[start:end].tolist()) for start, end in ends]
        assert batch.starts[-1] == len(batch.token_ids_T)
        assert len(batch.starts) == 2 or len(batch.token_ids_T) <= max_tokens
    distinct = {(sample.token_ids.tobytes(), sample.temperature): sample for sample in samples}
    assert sorted(sequences) == sorted(tuple(s.token_ids[:-1].tolist()) for s in distinct.values())
    assert [len(each) for each in sequences] == sorted(len(each) for each in sequences)


def test_batches_are_filled_as_far_as_the_bound_allows() -> None:
    samples = [
        new_sample([at] * length, [0] * (length - 1) + [1], index=at)
        for at, length in enumerate([9, 2, 8, 3, 2, 30])
    ]
    batches = packed(samples, max_tokens=11)
    assert [batch.starts for batch in batches] == [(0, 1, 2, 4, 11), (0, 8), (0, 29)]


def test_samples_of_equal_tokens_share_a_sequence_and_keep_their_entries() -> None:
    samples = [
        new_sample([1, 2, 3], [0, 1, 1], index=0, logprobs=[0, -1, -2]),
        new_sample([1, 2, 4], [0, 1, 1], index=1, logprobs=[0, -3, -4]),
        new_sample([1, 2, 3], [0, 0, 1], index=2, logprobs=[0, 0, -5]),
    ]
    (batch,) = packed(samples)
    assert batch.token_ids_T.tolist() == [1, 2, 1, 2]
    assert batch.samples_N.tolist() == [0, 0, 2, 1, 1]
    assert batch.kept_K[batch.kept_index_N].tolist() == [0, 1, 1, 2, 3]
    assert batch.targets_K.tolist() == [2, 3, 2, 4]
    assert batch.recorded_N.tolist() == [-1, -2, -5, -3, -4]


def test_equal_tokens_of_another_temperature_have_a_sequence_of_their_own() -> None:
    pair = [new_sample([1, 2], [0, 1], index=at, temperature=at + 1.0) for at in range(2)]
    (batch,) = packed(pair)
    assert batch.temperatures_K.tolist() == [1.0, 2.0]


def test_a_batch_of_nothing_is_a_token_that_trains_none() -> None:
    batch = empty_batch("cpu")
    assert (batch.token_ids_T.tolist(), batch.starts) == ([0], (0, 1))
    of_tokens = [getattr(batch, name) for name in TokenBatch._fields if name.endswith("_N")]
    assert [len(each) for each in of_tokens] == [0] * 6


def test_temperature_of_zero_cannot_be_trained() -> None:
    with pytest.raises(ConfigError, match=r"sampling\.temperature must be above 0"):
        packed([new_sample([1, 2], [0, 1], temperature=0.0)])


def shares(samples: list[Sample], rule: LossWeight) -> list[float]:
    weights, total = token_weights(samples, rule)
    return list(weights / total)


def whole_and_parts() -> list[Sample]:
    """A rollout of 2 trained tokens, and one of 3 + 1 whose graph was cut into two."""
    return [
        new_sample([1, 2, 3], [0, 1, 1], index=0),
        new_sample([1, 2, 3, 4], [0, 1, 1, 1], index=1, weight=0.75),
        new_sample([1, 5], [0, 1], index=1, weight=0.25),
    ]


def test_by_token_every_trained_token_weighs_the_same() -> None:
    assert shares(whole_and_parts(), "token") == pytest.approx([1 / 6] * 3)


def test_by_rollout_every_rollout_weighs_the_same() -> None:
    # Two rollouts: 1/2 each, over 2 tokens of the one and 3 + 1 tokens of the other.
    assert shares(whole_and_parts(), "rollout") == pytest.approx([0.25, 0.125, 0.125])


@pytest.mark.parametrize("rule", ["token", "rollout"])
def test_a_rollout_weighs_the_same_however_many_samples_it_was_cut_into(rule: LossWeight) -> None:
    other, *cut = whole_and_parts()
    uncut = new_sample([1, 2, 3, 4, 5], [0, 1, 1, 1, 1], index=1)
    in_two, in_one = shares([other, *cut], rule), shares([other, uncut], rule)
    assert 3 * in_two[1] + in_two[2] == pytest.approx(4 * in_one[1])
    assert in_two[0] == pytest.approx(in_one[0])


@pytest.mark.parametrize("rule", ["token", "rollout"])
def test_ranks_that_add_up_their_totals_weigh_as_one_does(rule: LossWeight) -> None:
    samples = whole_and_parts()
    (ours, total), (theirs, other) = (
        token_weights(samples[:1], rule),
        token_weights(samples[1:], rule),
    )
    together = np.concatenate([ours, theirs]) / (total + other)
    assert together.tolist() == pytest.approx(shares(samples, rule))


def test_minibatches_are_whole_groups_in_turn() -> None:
    groups = [3, 3, 1, 2, 1, 3, 0]
    samples = [new_sample([1, 2], [0, 1], seq=seq, index=at) for at, seq in enumerate(groups)]
    assert assign_minibatches(samples, 3) == [0, 0, 1, 2, 1, 0, 0]
    assert assign_minibatches(samples, 9) == [0, 0, 1, 2, 1, 0, 3]
    assert assign_minibatches(samples, 1) == [0] * 7
