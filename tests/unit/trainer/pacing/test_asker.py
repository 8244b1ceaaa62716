"""Tasks are asked for in turn, and those that came too late again, before new ones."""

from pathlib import Path

import pytest

from rollmesh.trainer.pacing.lifecycle import MAX_REQUEUES
from tests.unit.trainer.pacing.pacer_stage import MANY, Stage, staged


def test_the_task_of_a_requeued_group_is_asked_for_before_new_ones(tmp_path: Path) -> None:
    stage = staged(tmp_path, "requeue")
    stage.pacer.ask(MANY)
    first, *rest = stage.open()
    for group_id in rest:
        stage.client.drop(group_id, "agent_error: it broke")
    stage.pacer.collect(0.0)
    for num_requeued in range(MAX_REQUEUES + 1):
        stage.client.finish(first, policy_versions=(0,))
        stage.pacer.collect(0.0)
        assert stage.pacer.take(step=3) is None
        stage.pacer.ask(MANY)
        tasks = {task.id: group_id for group_id, (task, _) in stage.client.asked.items()}
        reasons = {drop["reason"] for drop in stage.rows("drops.jsonl")}
        assert ("t0" in tasks) == (num_requeued < MAX_REQUEUES) == ("stale: age 3" not in reasons)
        first = tasks.get("t0", first)
    assert stage.lost() == 0
    stage.records.close()


def test_where_tasks_end_none_was_asked_for(tmp_path: Path) -> None:
    stage = Stage(tmp_path, num_tasks=3)
    with pytest.raises(StopIteration):
        stage.pacer.ask(MANY)
    assert (stage.tally.num_asked, stage.lost()) == (12, 0)
    stage.records.close()


def test_an_ask_names_the_policy_version_that_its_pacing_counts_on(tmp_path: Path) -> None:
    stage = staged(tmp_path, "wait")
    stage.pacer.publishing(policy_version=7, step=4)
    stage.pacer.ask(MANY)
    assert set(stage.client.min_policy_versions) == {3}  # 7 is on its way
    stage.records.close()
