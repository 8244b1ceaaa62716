"""How much stale tokens weigh: of all of them, by age, over batches and ranks."""

from collections.abc import Sequence

import pytest
import torch

from rollmesh.trainer.algorithms.step_report import (
    MAX_AGE,
    ImportanceMeter,
    ImportanceStats,
    TokenAges,
)
from rollmesh.trainer.ranks import SingleRank


def metered(*batches: tuple[list[int], list[float], list[bool]]) -> ImportanceMeter:
    meter = ImportanceMeter()
    for ages, weights, truncated in batches:
        meter.add(
            torch.tensor(ages, dtype=torch.int64), torch.tensor(weights), torch.tensor(truncated)
        )
    return meter


def test_weights_are_told_of_all_and_by_age_over_batches() -> None:
    meter = metered(([2, 0, 2], [4.0, 1.0, 2.0], [True, False, False]), ([0], [1.0], [False]))
    whole, by_age = meter.told(SingleRank())
    assert whole == ImportanceStats(4, 2.0, 0.25, round(64 / (4 * 22), 5))
    assert by_age == {
        "0": ImportanceStats(2, 1.0, 0.0, 1.0),
        "2": ImportanceStats(2, 3.0, 0.5, 0.9),
    }


def test_one_token_that_weighs_all_is_as_good_as_one() -> None:
    whole, _ = metered(([0] * 4, [8.0, 0.0, 0.0, 0.0], [False] * 4)).told(SingleRank())
    assert whole.effective == 0.25


@pytest.mark.parametrize("weights", [[], [0.0, 0.0]])
def test_nothing_that_weighs_anything_has_no_figures_that_are_none(weights: list[float]) -> None:
    whole, _ = metered(([0] * len(weights), weights, [False] * len(weights))).told(SingleRank())
    assert whole == (
        ImportanceStats(2, 0.0, 0.0, 0.0) if weights else ImportanceStats(0, None, None, None)
    )


class Twice(SingleRank):
    """Two ranks: the other has seen tokens of one age more, and otherwise the same."""

    def max(self, value: float) -> float:
        return value + 1

    def sum(self, values: Sequence[float]) -> list[float]:
        doubled = [2 * value for value in values]
        return [*doubled[:-4], 1.0, 2.0, 4.0, 1.0]


def test_ranks_that_saw_other_ages_add_up() -> None:
    whole, by_age = metered(([0], [1.0], [False])).told(Twice())
    assert by_age == {
        "0": ImportanceStats(2, 1.0, 0.0, 1.0),
        "1": ImportanceStats(1, 2.0, 1.0, 1.0),
    }
    assert whole.num_tokens == 3


def test_age_is_counted_in_train_steps_of_the_weights_that_sampled() -> None:
    moment = TokenAges(step=7, step_of_version={3: 7, 2: 5, 1: 4})
    versions = torch.tensor([3, 1, 2, 3, 9], dtype=torch.int32)
    assert moment.ages(versions).tolist() == [0, 3, 2, 0, 0]  # nobody knows 9
    assert moment.ages(versions[:0]).tolist() == []


def test_no_age_is_below_0_or_past_the_last_that_is_told() -> None:
    moment = TokenAges(step=1000, step_of_version={1: 0, 2: 1002})
    assert moment.ages(torch.tensor([1, 2])).tolist() == [MAX_AGE, 0]
