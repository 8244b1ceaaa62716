"""Every requested rollout is trained, dropped with a reason, or open: never lost."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from rollmesh.core.errors import EnvError
from rollmesh.core.ids import GroupId
from rollmesh.core.types import Outcome, Task
from rollmesh.serve.client.arrivals import Arrival
from rollmesh.serve.client.journal import History
from rollmesh.serve.client.journal_entries import StateSaved
from rollmesh.testing.client import ScriptedClient
from rollmesh.trainer.checkpoints.recovery_plan import LoopState, plan_recovery
from rollmesh.trainer.pacing import pacer
from rollmesh.trainer.pacing.lifecycle import SPARE_VERSIONS
from tests.unit.trainer.pacing.pacer_stage import MANY, Stage


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    stage = Stage(tmp_path)
    yield stage
    stage.records.close()


def test_asks_fill_the_bound_and_no_more(stage: Stage) -> None:
    stage.pacer.ask(MANY)
    stage.pacer.ask(MANY)
    assert len(stage.open()) == 4
    assert stage.lost() == 0


def test_a_run_near_its_end_asks_for_what_it_will_take(stage: Stage) -> None:
    stage.pacer.ask(num_needed=3)
    assert len(stage.open()) == 3


def test_a_trained_batch_is_counted_and_written(stage: Stage) -> None:
    stage.pacer.ask(MANY)
    for group_id in stage.open():
        stage.client.finish(group_id)
    batch = stage.batch(step=0)
    assert batch.group_ids() == [GroupId("run", 0), GroupId("run", 1)]
    assert len(batch.samples()) == 8
    stage.pacer.trained(batch)
    assert (stage.tally.num_trained, stage.tally.num_samples, stage.lost()) == (8, 8, 0)
    assert [row["step"] for row in stage.rows("trajectories.jsonl")] == [0] * 8


def test_a_batch_whose_step_fails_is_open_and_not_lost(stage: Stage) -> None:
    stage.pacer.ask(MANY)
    for group_id in stage.open():
        stage.client.finish(group_id)
    stage.batch(step=0)
    assert (stage.lost(), stage.tally.num_open) == (0, 16)


def test_the_step_of_a_policy_version_is_known_for_as_long_as_it_may_train(stage: Stage) -> None:
    stage.pacer.ask(MANY)
    first, second, *_ = stage.open()
    for policy_version in range(1, SPARE_VERSIONS + 10):
        stage.pacer.publishing(policy_version, policy_version)
    stage.client.finish(first, policy_versions=(0,))
    stage.client.finish(second, policy_versions=(SPARE_VERSIONS,))
    stage.pacer.collect(0.0)
    for drop in stage.rows("drops.jsonl"):
        assert drop["group_id"] == str(first)
        assert drop["reason"] == "foreign: policy version 0 is not of this run"
    assert stage.tally.num_dropped == 4


def test_tokens_of_another_runs_weights_are_dropped_by_name(stage: Stage) -> None:
    stage.pacer.ask(MANY)
    first, *_ = stage.open()
    stage.client.finish(first, policy_versions=(0, 30))
    stage.pacer.collect(0.0)
    reasons = [drop["reason"] for drop in stage.rows("drops.jsonl")]
    assert reasons == ["foreign: policy version 30 is not of this run"] * 4
    assert (stage.tally.num_dropped, stage.lost()) == (4, 0)


@pytest.mark.parametrize("outcome", [Outcome.AGENT_ERROR, Outcome.INFRA_ERROR])
def test_a_failed_sibling_is_dropped_with_its_reason_and_the_rest_trains(
    stage: Stage, outcome: Outcome
) -> None:
    stage.pacer.ask(MANY)
    first, second, third, _ = stage.open()
    stage.client.finish(first, {2: outcome})
    stage.client.finish(second)
    stage.pacer.collect(0.0)
    assert stage.lost() == 0
    assert stage.pacer.take(step=0) is None, "a batch is eight rollouts"
    stage.client.finish(third)
    batch = stage.batch(step=0)
    stage.pacer.trained(batch)
    assert len(batch.samples()) == 11
    [drop] = stage.rows("drops.jsonl")
    assert (drop["index"], str(drop["reason"]).split(":")[0]) == (2, outcome.value)
    assert stage.lost() == 0


def test_a_group_in_which_nothing_trains_makes_room(stage: Stage) -> None:
    stage.pacer.ask(MANY)
    first, *_ = stage.open()
    stage.client.finish(first, dict.fromkeys(range(4), Outcome.AGENT_ERROR))
    stage.pacer.collect(0.0)
    stage.pacer.ask(MANY)
    assert len(stage.open()) == 4
    assert (stage.tally.num_dropped, stage.lost()) == (4, 0)


def test_a_dropped_group_is_booked_and_makes_room(stage: Stage) -> None:
    stage.pacer.ask(MANY)
    stage.client.drop(stage.open()[0], "attempts_exhausted: 3 have begun")
    stage.pacer.collect(0.0)
    stage.pacer.ask(MANY)
    assert len(stage.open()) == 4
    [drop] = stage.rows("drops.jsonl")
    assert drop["reason"] == "attempts_exhausted: 3 have begun"
    assert stage.lost() == 0


def test_a_group_past_the_bound_is_dropped_with_its_age(stage: Stage) -> None:
    stage.pacer.ask(MANY)
    stage.client.finish(stage.open()[0])
    stage.pacer.collect(0.0)
    assert stage.pacer.take(step=3) is None
    drops = stage.rows("drops.jsonl")
    assert [drop["reason"] for drop in drops] == ["stale: age 3"] * 4
    assert drops[1] | {"time_s": 0} == {
        "time_s": 0,
        "group_id": "run/0",
        "num_rollouts": 1,
        "reason": "stale: age 3",
        "index": 1,
        "task_id": "t0",
        "env": "guess",
        "length": 2,
        "age": 3,
        "outcome": "completed",
    }
    assert stage.lost() == 0


def test_age_counts_train_steps_and_not_versions(stage: Stage) -> None:
    stage.pacer.publishing(policy_version=7, step=2)
    stage.pacer.publishing(policy_version=9, step=3)
    stage.pacer.ask(MANY)
    for group_id in stage.open():
        stage.client.finish(group_id, policy_versions=(7, 9))
    batch = stage.batch(step=3)
    stage.pacer.trained(batch)
    assert set(stage.tally.ages) == {1}
    assert stage.tally.num_two_versions == 16, "what the next step could not take comes along"


def test_results_of_an_earlier_run_do_not_train(stage: Stage) -> None:
    stage.pacer.ask(MANY)
    stage.client.asked[GroupId("before", 5)] = (Task(id="old"), 4)
    stage.client.finish(GroupId("before", 5))
    stage.pacer.collect(0.0)
    assert stage.rows("drops.jsonl")[0]["reason"] == "of an earlier run"
    assert stage.lost() == 0


class ClientThatFinishes(ScriptedClient):
    """Every group of one ends when it is first polled."""

    def take(self, timeout_s: float) -> list[Arrival]:
        for group_id in [g for g, (_, num_samples) in self.asked.items() if num_samples == 1]:
            self.finish(group_id)
        return super().take(timeout_s)


def test_evaluation_is_measured_and_never_counted(tmp_path: Path) -> None:
    stage = Stage(tmp_path, ClientThatFinishes())
    stage.pacer.ask(MANY)
    assert stage.measured(6) == [0.0] * 6
    assert (stage.tally.num_asked, stage.lost()) == (16, 0)
    assert len(stage.open()) == 4
    stage.records.close()


def test_evaluation_of_any_size_asks_for_a_window_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pacer, "EVAL_WINDOW", 4)
    most_open: list[int] = []

    class Client(ClientThatFinishes):
        def take(self, timeout_s: float) -> list[Arrival]:
            most_open.append(len(self.asked))
            return super().take(timeout_s)

    stage = Stage(tmp_path, Client())
    assert stage.measured(10) == [0.0] * 10
    assert most_open == [4, 4, 2]
    stage.records.close()


def test_an_evaluation_does_not_wait_for_what_went_with_a_checkpoint(stage: Stage) -> None:
    asked = {"before": [(0, 3)]}
    told = History(evals=asked, num_asked=3, saved=StateSaved(gone=asked))
    stage.tally.num_evals = 3
    stage.pacer.resume(plan_recovery(LoopState(num_steps=0), told))
    assert stage.pacer.measure(3)


def test_evaluation_writes_down_what_brought_no_result(tmp_path: Path) -> None:
    class Client(ClientThatFinishes):
        def take(self, timeout_s: float) -> list[Arrival]:
            for group_id in list(self.asked)[:1]:
                self.drop(group_id, "env_failed: no licence")
            return super().take(timeout_s)

    stage = Stage(tmp_path, Client())
    assert stage.measured(3) == [0.0] * 2
    [drop] = stage.rows("drops.jsonl")
    assert drop["reason"] == "evaluation: env_failed: no licence"
    stage.records.close()


def drop_groups(stage: Stage, num_groups: int) -> None:
    for _ in range(num_groups):
        stage.pacer.ask(num_needed=1)
        [group_id] = stage.open()
        stage.client.drop(group_id, "agent_error: it broke")
        stage.pacer.collect(0.0)


def test_an_environment_that_never_gives_anything_to_train_ends_the_run(stage: Stage) -> None:
    drop_groups(stage, 399)
    with pytest.raises(EnvError, match=r'env = "guess": the last 400 groups .*\(agent_error: it b'):
        drop_groups(stage, 1)


def test_a_group_that_trains_is_a_new_beginning(stage: Stage) -> None:
    drop_groups(stage, 399)
    stage.pacer.ask(num_needed=1)
    stage.client.finish(stage.open()[0])
    stage.pacer.collect(0.0)
    stage.pacer.ask(num_needed=2)
    stage.client.drop(stage.open()[0], "agent_error: it broke")
    stage.pacer.collect(0.0)
    assert stage.lost() == 0


def test_pacing_tells_what_is_under_way(stage: Stage) -> None:
    stage.pacer.publishing(policy_version=5, step=2)
    stage.pacer.published(2)
    stage.pacer.ask(MANY)
    pacing = stage.pacer.pacing
    assert (pacing.running, pacing.capacity, pacing.oldest_version) == (16, 0, 5)


def test_what_is_open_when_a_run_is_done_is_cancelled(stage: Stage) -> None:
    stage.pacer.ask(MANY)
    stage.client.finish(stage.open()[0])
    stage.pacer.collect(0.0)
    stage.pacer.cancel_open("its run is done")
    stage.pacer.collect(0.0)
    assert (stage.open(), stage.tally.num_dropped, stage.lost()) == ([], 12, 0)


def test_what_is_to_come_is_what_runs_or_may_be_asked_for_of_what_the_run_takes(
    stage: Stage,
) -> None:
    assert [stage.pacer.num_to_come(needed) for needed in (MANY, 3, 0)] == [16, 12, 0]
    stage.pacer.ask(MANY)
    assert stage.pacer.num_to_come(MANY) == 16
    first, *_ = stage.open()
    stage.client.finish(first)
    stage.pacer.collect(0.0)
    assert [stage.pacer.num_to_come(needed) for needed in (MANY, 3)] == [12, 12]


def test_what_the_next_batch_lacks_is_to_come_though_there_is_no_room_for_it_yet(
    stage: Stage,
) -> None:
    stage.pacer.ask(MANY)
    for group_id in stage.open():
        stage.client.finish(group_id)
    stage.pacer.collect(0.0)
    for step in range(2):
        stage.pacer.trained(stage.batch(step))
    assert stage.pacer.pacing.capacity == 0
    assert [stage.pacer.num_to_come(needed) for needed in (MANY, 1)] == [8, 4]
