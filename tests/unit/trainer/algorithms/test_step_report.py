"""The report of a step: gaps run by run, ages of tokens, and importance over batches and ranks."""

from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from rollmesh.core.ids import GroupId, RolloutId
from rollmesh.serve.client.samples import SampledRun
from rollmesh.trainer.algorithms.step_report import (
    MAX_AGE,
    ImportanceMeter,
    ImportanceStats,
    TokenAges,
)
from rollmesh.trainer.policy import Policy
from rollmesh.trainer.ranks import SingleRank
from tests.unit.trainer.exact import SETTINGS, pair, two_groups


def test_gap_is_measured_on_the_weights_held_alone(tiny_folder: Path, tmp_path: Path) -> None:
    policy = Policy(str(tiny_folder), SETTINGS)
    samples = pair(tiny_folder)
    assert policy.step(samples, 0).logprob_gap_max is not None
    stale = policy.step(samples, 1)  # the weights moved on, under no name
    assert (stale.logprob_gap_max, stale.logprob_gap_mean, stale.num_masked) == (None, None, 0)
    assert stale.kl > 0.0
    policy.save(tmp_path / "v1", policy_version=1)
    policy.save(tmp_path / "checkpoint")  # a copy does not change what they are called
    fresh = pair(tmp_path / "v1", policy_version=1)
    gap = policy.step([*fresh, *samples], 2).logprob_gap_max
    assert gap is not None
    assert gap < 1e-4


@pytest.mark.parametrize("num_minibatches", [1, 2])
def test_gaps_come_run_by_run_in_the_order_of_the_samples(
    tiny_folder: Path, num_minibatches: int
) -> None:
    settings = msgspec.structs.replace(SETTINGS, num_minibatches=num_minibatches)
    samples = []
    for seq, (long, short) in enumerate([pair(tiny_folder), pair(tiny_folder, policy_version=5)]):
        off = msgspec.structs.replace(
            long,
            rollout_id=RolloutId(GroupId("r", seq), 0),
            logprobs=long.logprobs - np.array([0, 0, 0.01, 0, 0.02, 0.03], np.float32),
            runs=(SampledRun(1, 0, "a"), SampledRun(2, 0, "b")),
        )
        samples += [off, msgspec.structs.replace(short, rollout_id=RolloutId(GroupId("r", seq), 1))]
    report = Policy(str(tiny_folder), settings).step(samples, 0)
    assert (report.held_policy_version, report.num_masked) == (0, 0)
    for first, second in (report.gaps[:2], report.gaps[2:]):
        gaps = [(gap.num_tokens, gap.total, gap.largest) for gap in (*first, *second)]
        expected = [(1, 0.01, 0.01), (2, 0.05, 0.03), (2, 0.0, 0.0)]
        assert gaps == [pytest.approx(each, abs=1e-4) for each in expected]


def test_drift_of_older_weights_is_reported_and_masks_nothing(tiny_folder: Path) -> None:
    policy = Policy(str(tiny_folder), SETTINGS)
    far = [
        msgspec.structs.replace(sample, logprobs=sample.logprobs - np.float32(0.3))
        for sample in pair(tiny_folder, policy_version=5)
    ]
    report = policy.step(far, 0)
    assert (report.num_masked, report.logprob_gap_max) == (0, None)
    largest = [gap.largest for each in report.gaps for gap in each]
    assert largest == pytest.approx([0.3, 0.3], abs=1e-4)


def test_stale_tokens_are_reported_by_age_with_their_weight(tiny_folder: Path) -> None:
    settings = msgspec.structs.replace(SETTINGS, max_importance_weight=1.2)
    policy = Policy(str(tiny_folder), settings)
    policy.save(tiny_folder.with_name("v7"), policy_version=7)
    good, bad = pair(tiny_folder, policy_version=7)
    old = msgspec.structs.replace(
        bad,
        logprobs=np.where(bad.loss_mask, bad.logprobs - np.float32(0.5), 0).astype("f4"),
        policy_versions=np.where(bad.loss_mask, 5, -1).astype(np.int32),
        runs=(SampledRun(2, 5),),
    )
    report = policy.step([good, old], 4, step_of_version={5: 1, 7: 4})
    fresh, stale = report.importance_by_age["0"], report.importance_by_age["3"]
    assert (fresh.num_tokens, fresh.truncated) == (3, 0.0)
    assert fresh.mean == pytest.approx(1.0, abs=1e-4)
    assert (stale.num_tokens, stale.truncated) == (2, 1.0)
    assert stale.mean == pytest.approx(1.2)
    assert report.truncated_fraction == pytest.approx(0.4)
    assert report.importance_mean == pytest.approx(1.08, abs=1e-3)
    assert report.effective_fraction == pytest.approx(5.4**2 / (5 * (3 + 2 * 1.44)), abs=1e-3)


def test_masked_tokens_do_not_affect_importance_statistics(tiny_folder: Path) -> None:
    good, bad = pair(tiny_folder)
    false = msgspec.structs.replace(good, logprobs=good.logprobs - np.float32(0.5))
    report = Policy(str(tiny_folder), SETTINGS).step([false, bad], 0)
    assert (report.num_tokens, report.num_masked) == (5, 1)
    assert report.importance_by_age["0"].num_tokens == 2


def test_gaps_are_measured_only_before_the_weights_change(
    tiny_folder: Path,
) -> None:
    settings = msgspec.structs.replace(SETTINGS, proximal="loglinear", num_minibatches=2)
    report = Policy(str(tiny_folder), settings).step(two_groups(tiny_folder), 0)
    assert [bool(each) for each in report.gaps] == [True, True, False, False]
    assert report.logprob_gap_max is not None
    assert report.logprob_gap_max < 1e-4


def test_one_token_that_is_a_little_off_is_not_masked(tiny_folder: Path) -> None:
    good, bad = pair(tiny_folder)
    spiked = good.logprobs - np.array([0, 0, 0.12, 0, 0, 0], np.float32)
    report = Policy(str(tiny_folder), SETTINGS).step(
        [msgspec.structs.replace(good, logprobs=spiked), bad], 0
    )
    assert (report.num_masked, report.num_masked_tokens) == (0, 0)
    assert report.logprob_gap_max == pytest.approx(0.12, abs=1e-3)


def test_report_becomes_a_metrics_row(tiny_folder: Path) -> None:
    report = Policy(str(tiny_folder), SETTINGS).step(pair(tiny_folder), 0)
    row = report.figures()
    assert msgspec.json.decode(msgspec.json.encode(row)) == row
    assert row["importance_by_age"]["0"]["num_tokens"] == 5


def metered(*batches: tuple[list[int], list[float], list[bool]]) -> ImportanceMeter:
    meter = ImportanceMeter()
    for ages, weights, truncated in batches:
        meter.add(
            torch.tensor(ages, dtype=torch.int64), torch.tensor(weights), torch.tensor(truncated)
        )
    return meter


def test_weights_are_reported_in_total_and_by_age_over_batches() -> None:
    meter = metered(([2, 0, 2], [4.0, 1.0, 2.0], [True, False, False]), ([0], [1.0], [False]))
    whole, by_age = meter.totals(SingleRank())
    assert whole == ImportanceStats(4, 2.0, 0.25, round(64 / (4 * 22), 5))
    assert by_age == {
        "0": ImportanceStats(2, 1.0, 0.0, 1.0),
        "2": ImportanceStats(2, 3.0, 0.5, 0.9),
    }


def test_one_dominant_token_counts_as_one_effective_token() -> None:
    whole, _ = metered(([0] * 4, [8.0, 0.0, 0.0, 0.0], [False] * 4)).totals(SingleRank())
    assert whole.effective == 0.25


@pytest.mark.parametrize("weights", [[], [0.0, 0.0]])
def test_importance_without_weight_is_zero_and_without_tokens_is_none(weights: list[float]) -> None:
    whole, _ = metered(([0] * len(weights), weights, [False] * len(weights))).totals(SingleRank())
    assert whole == (
        ImportanceStats(2, 0.0, 0.0, 0.0) if weights else ImportanceStats(0, None, None, None)
    )


class Twice(SingleRank):
    """Two ranks: the other one has seen one more age, and the same tokens otherwise."""

    def max(self, value: float) -> float:
        return value + 1

    def sum(self, values: Sequence[float]) -> list[float]:
        doubled = [2 * value for value in values]
        return [*doubled[:-4], 1.0, 2.0, 4.0, 1.0]


def test_age_statistics_of_ranks_add_up() -> None:
    whole, by_age = metered(([0], [1.0], [False])).totals(Twice())
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


def test_ages_are_clamped_to_the_reported_range() -> None:
    moment = TokenAges(step=1000, step_of_version={1: 0, 2: 1002})
    assert moment.ages(torch.tensor([1, 2])).tolist() == [MAX_AGE, 0]
