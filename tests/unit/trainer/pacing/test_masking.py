"""Tokens past the age bound are context; what is left of a rollout trains, and weighs as it did."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollmesh.serve.client.samples import Sample, SampledRun
from rollmesh.trainer.pacing.ready_queue import without_versions
from tests.unit.trainer.pacing.pacer_stage import MANY, staged
from tests.unit.trainer.samples import new_sample


def sampled_by(*policy_versions: int, weight: float = 1.0) -> Sample:
    """A prompt of two tokens and an answer, token by token."""
    versions = [-1, -1, *policy_versions]
    return new_sample(
        list(range(len(versions))),
        [int(each >= 0) for each in versions],
        policy_versions=np.array(versions, np.int32),
        runs=tuple(SampledRun(1, each, f"engine-{each % 2}") for each in policy_versions),
        weight=weight,
    )


def test_old_tokens_are_masked_and_runs_count_the_rest() -> None:
    sample = sampled_by(3, 4, 4, 5)
    [left] = without_versions([sample], {1, 3})
    assert left.loss_mask.tolist() == [False, False, False, True, True, True]
    assert left.policy_versions.tolist() == [-1, -1, -1, 4, 4, 5]
    assert left.logprobs.tolist() == [0.0, 0.0, 0.0, -1.0, -1.0, -1.0]
    assert left.runs == (SampledRun(2, 4, "engine-0"), SampledRun(1, 5, "engine-1"))
    assert left.token_ids.tolist() == sample.token_ids.tolist()
    assert sample.loss_mask.sum() == 4, "what was given is not written to"


def test_neighbours_of_a_run_that_is_masked_become_one() -> None:
    [left] = without_versions([sampled_by(6, 3, 6)], {3})
    assert left.runs == (SampledRun(2, 6, "engine-0"),)


def test_samples_with_nothing_left_are_gone_and_the_others_share_the_weight() -> None:
    rollout = [sampled_by(2, 2, weight=0.4), sampled_by(2, 5, 5, weight=0.6)]
    [left] = without_versions(rollout, {2})
    assert left.weight == 1.0
    assert without_versions(rollout, {2, 5}) == []


@given(
    rollout=st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=6), min_size=1, max_size=4),
    stale=st.sets(st.integers(0, 4)),
)
def test_whatever_is_masked_weights_and_runs_add_up(
    rollout: list[list[int]], stale: set[int]
) -> None:
    left = without_versions([sampled_by(*versions) for versions in rollout], stale)
    counts = [sum(each not in stale for each in versions) for versions in rollout]
    assert [int(each.loss_mask.sum()) for each in left] == [num for num in counts if num]
    for each in left:
        assert sum(run.num_tokens for run in each.runs) == each.loss_mask.sum()
        assert each.weight == pytest.approx(each.loss_mask.sum() / sum(counts))


def test_what_is_too_old_is_masked_and_the_rest_trains(tmp_path: Path) -> None:
    stage = staged(tmp_path, "mask")
    stage.pacer.ask(MANY)
    old, mixed, *fresh = stage.open()
    stage.client.finish(old, policy_versions=(0, 1))
    stage.client.finish(mixed, policy_versions=(0, 3))
    for group_id in fresh:
        stage.client.finish(group_id, policy_versions=(3,))
    batch = stage.batch(step=3)
    assert batch.group_ids() == [mixed, fresh[0]]
    for sample in batch.groups[0].all_samples():
        assert sample.policy_versions.tolist() == [-1, -1, -1, -1, 3]
        assert sample.loss_mask.tolist() == [False, False, False, False, True]
        assert sample.logprobs[3] == 0.0
        assert [(run.num_tokens, run.policy_version) for run in sample.runs] == [(1, 3)]
        assert sample.weight == 1.0
    stage.pacer.trained(batch)
    assert set(stage.tally.ages) == {0}
    drops = stage.rows("drops.jsonl")
    assert [drop["reason"] for drop in drops] == ["stale: age 3"] * 4
    rows = [row for row in stage.rows("trajectories.jsonl") if row["step"] == 3]
    assert [row["num_masked"] for row in rows] == [1] * 4 + [0] * 4
    assert stage.lost() == 0
    stage.records.close()


def test_a_rollout_of_which_masking_leaves_nothing_is_dropped_alone(tmp_path: Path) -> None:
    stage = staged(tmp_path, "mask")
    stage.pacer.ask(MANY)
    first, *rest = stage.open()
    stage.client.finish(first, policy_versions=(3,), of_rollout={2: (0,)})
    for group_id in rest:
        stage.client.finish(group_id, policy_versions=(3,))
    batch = stage.batch(step=3)
    assert [len(group.all_samples()) for group in batch.groups] == [3, 4, 4]
    [drop] = stage.rows("drops.jsonl")
    assert drop["index"] == 2
    assert (drop["reason"], drop["age"]) == ("masked: no token of it is within the age bound", 3)
    stage.pacer.trained(batch)
    assert stage.lost() == 0
    stage.records.close()
