"""What a token weighs: the same whatever its rollout was cut into, and however ranks share it."""

import numpy as np
import pytest

from rollmesh.core.config import LossWeight
from rollmesh.serve.client.samples import Sample
from rollmesh.trainer.algorithms.batches import assign_minibatches, token_weights
from tests.unit.trainer.samples import new_sample


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
