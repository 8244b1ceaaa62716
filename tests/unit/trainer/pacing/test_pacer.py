"""Every requested rollout is trained, dropped with a reason, measured, or open, and recorded once.

A run ends if its environment fails in every group from the first one.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rollmesh.core.errors import EnvError
from rollmesh.core.ids import GroupId
from rollmesh.core.types import ErrorPlace, GroupRecord, Outcome, RolloutRecord, Task
from rollmesh.serve.client.arrivals import Arrival
from rollmesh.serve.client.journal import History
from rollmesh.serve.client.journal_entries import GroupBooked, SeenRollout, StateSaved
from rollmesh.serve.client.samples import Sample
from rollmesh.testing.client import ScriptedClient, rollout
from rollmesh.testing.clock import FakeClock
from rollmesh.trainer.checkpoints.recovery_plan import LoopState, plan_recovery
from rollmesh.trainer.pacing import pacer
from rollmesh.trainer.pacing.lifecycle import SPARE_VERSIONS, VersionSteps
from rollmesh.trainer.pacing.pacer import NUM_ALIKE, FirstFailures, GroupAccounting
from rollmesh.trainer.pacing.ready_queue import ReadyGroup
from rollmesh.trainer.reports.records import RunRecords, Tally
from tests.unit.trainer.pacing.pacer_stage import MANY, Stage
from tests.unit.trainer.pacing.test_ready_queue import sampled_by

GROUP = GroupId("r", 3)


class AccountingRecords:
    """Accounting and records of a run whose versions 0 to 9 are the weights after as many steps."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.records, self.tally = RunRecords(folder, FakeClock()), Tally()
        versions = VersionSteps(max_staleness=4)
        versions.add({step: step for step in range(10)})
        self.accounting = GroupAccounting((self.records, self.tally), "guess", versions)

    def rows(self, name: str) -> list[dict[str, Any]]:
        self.records.flush()
        lines = (self._folder / name).read_bytes().splitlines()
        return [msgspec.json.decode(line, type=dict[str, Any]) for line in lines]

    def drops(self) -> list[tuple[Any, ...]]:
        """Group, reason and age of each drop."""
        rows = self.rows("drops.jsonl")
        return [(row.get("index"), row["reason"], row.get("age")) for row in rows]


@pytest.fixture
def reports(tmp_path: Path) -> Iterator[AccountingRecords]:
    reports = AccountingRecords(tmp_path)
    yield reports
    reports.records.close()


def group(samples: Sequence[Sequence[Sample]], *rollouts: RolloutRecord) -> ReadyGroup:
    record = GroupRecord(task=Task(id="t"), rollouts=list(rollouts))
    return ReadyGroup(GROUP, record, "worker-0", [list(each) for each in samples])


def whole(index: int, *policy_versions: int) -> RolloutRecord:
    return rollout(index, Outcome.COMPLETED, policy_versions)


def failed(index: int, *policy_versions: int) -> RolloutRecord:
    record = rollout(index, Outcome.AGENT_ERROR, policy_versions)
    record.error = "it broke"
    return record


def test_a_step_records_which_rollouts_of_a_group_trained(reports: AccountingRecords) -> None:
    trained = [sampled_by(3, 4), sampled_by(4, 4)]
    reports.accounting.trained(group([trained, []], whole(0, 3, 4), failed(1, 2)), step=5)
    tally = reports.tally
    assert (tally.num_trained, tally.num_samples, tally.num_dropped) == (1, 2, 1)
    assert (tally.ages, tally.num_two_versions) == ({5 - 3: 1, 5 - 4: 1}, 1)
    assert tally.outcomes == {Outcome.COMPLETED: 1, Outcome.AGENT_ERROR: 1}
    assert reports.drops() == [(1, "agent_error: it broke", 5 - 2)]
    assert [row["step"] for row in reports.rows("trajectories.jsonl")] == [5, 5]


def test_each_rollout_of_a_dropped_group_has_its_own_reason(reports: AccountingRecords) -> None:
    reports.accounting.dropped(
        group([[sampled_by(2)], []], whole(0, 2), failed(1, 1)), 6, "stale: age 4"
    )
    assert sorted(reports.drops()) == [(0, "stale: age 4", 4), (1, "agent_error: it broke", 5)]
    assert (reports.tally.num_trained, reports.tally.num_dropped) == (0, 2)
    assert [row["step"] for row in reports.rows("trajectories.jsonl")] == [None, None]


def test_group_without_samples_records_the_reason(reports: AccountingRecords) -> None:
    why = reports.accounting.untrainable(group([[], []], failed(0, 1), whole(1, 1)), 2)
    assert why == "completed: nothing in it trains"
    assert reports.drops() == [(0, "agent_error: it broke", 1), (1, why, 1)]


def test_fully_masked_rollout_is_recorded_once(reports: AccountingRecords) -> None:
    masked = group([[], [sampled_by(6)]], whole(0, 1), whole(1, 1, 6))
    masked.num_masked = {0: 2, 1: 1}
    reports.accounting.masked(masked, 7)
    reports.accounting.trained(masked, 7)
    assert reports.drops() == [(0, "masked: no token of it is within the age bound", 6)]
    assert (reports.tally.num_trained, reports.tally.num_dropped) == (1, 1)
    rows = reports.rows("trajectories.jsonl")
    assert [row["num_masked"] for row in rows] == [2, 1]


def test_group_without_a_result_records_its_ended_rollouts_and_counts_the_rest(
    reports: AccountingRecords,
) -> None:
    seen = tuple(SeenRollout(at, Outcome.COMPLETED, 7, (4, 2)) for at in range(6))
    booked = GroupBooked(GROUP, "infra_error: lost", 5, "t", seen)
    reports.accounting.ended(booked, num_samples=4)  # of more than were asked for nobody hears
    assert reports.drops() == [(at, "infra_error: lost", 3) for at in range(4)]
    reports.accounting.ended(msgspec.structs.replace(booked, rollouts=seen[:1]), num_samples=4)
    assert reports.drops()[4:] == [(0, "infra_error: lost", 3), (None, "infra_error: lost", None)]
    assert reports.rows("drops.jsonl")[-1]["num_rollouts"] == 3
    assert reports.tally.num_dropped == 8
    assert reports.tally.outcomes == {Outcome.COMPLETED: 5}


def test_an_evaluation_is_measured_and_never_counted(reports: AccountingRecords) -> None:
    reports.accounting.measured(group([[]], whole(0, 0)))
    reports.accounting.unmeasured(GROUP, "t", "deadline: over")
    assert reports.tally.measured == [0.0]
    assert (reports.tally.num_dropped, reports.tally.outcomes) == (0, {})
    assert reports.drops() == [(None, "evaluation: deadline: over", None)]


def test_group_of_another_run_leaves_a_row_and_no_count(reports: AccountingRecords) -> None:
    reports.accounting.not_requested(GROUP)
    assert reports.drops() == [(None, "of an earlier run", None)]
    assert reports.tally.num_dropped == 0


HERE = ErrorPlace("KeyError", "my_env.py", 15, "score")
ELSEWHERE = ErrorPlace("KeyError", "my_env.py", 16, "score")
INFRA = ErrorPlace("InfraError", "my_env.py", 3, "run")
ERROR = "score: KeyError: 'answer' (my_env.py:15 in score)"


def failed_group(place: ErrorPlace | None, outcome: Outcome = Outcome.AGENT_ERROR) -> GroupRecord:
    """A failed group with one sibling that was cancelled after the others had failed."""
    rollouts = [RolloutRecord(index=at, outcome=outcome, error=ERROR, place=place) for at in (0, 1)]
    rollouts.append(RolloutRecord(index=2, outcome=Outcome.CANCELLED))
    return GroupRecord(task=Task(id="t7"), rollouts=rollouts, place=place)


def scored() -> GroupRecord:
    rollouts = [RolloutRecord(index=at, outcome=Outcome.COMPLETED, reward=1.0) for at in (0, 1)]
    return GroupRecord(task=Task(id="t7"), rollouts=rollouts)


@pytest.fixture
def first() -> FirstFailures:
    return FirstFailures("my_env:MyEnv")


def note(first: FirstFailures, *records: GroupRecord) -> None:
    for record in records:
        first.note(record)
        first.check()


@pytest.mark.parametrize("outcome", [Outcome.AGENT_ERROR, Outcome.INFRA_ERROR])
def test_a_run_whose_first_groups_all_fail_at_one_place_ends(
    first: FirstFailures, outcome: Outcome
) -> None:
    note(first, *[failed_group(HERE, outcome)] * (NUM_ALIKE - 1))
    with pytest.raises(EnvError) as raised:
        note(first, failed_group(HERE, outcome))
    assert f"the first {NUM_ALIKE} groups had the same failure: {ERROR}; task t7" in str(
        raised.value
    )


def test_groups_that_cannot_be_scored_together_count(first: FirstFailures) -> None:
    group = scored()
    group.reason, group.place = "infra_error: score_group: KeyError: 'answer'", HERE
    with pytest.raises(EnvError, match="score_group: KeyError"):
        note(first, *[group] * NUM_ALIKE)


@pytest.mark.parametrize("place", [None, INFRA], ids=["an engine", "what the environment needs"])
def test_faults_of_the_infrastructure_never_count(
    first: FirstFailures, place: ErrorPlace | None
) -> None:
    note(first, *[failed_group(place, Outcome.INFRA_ERROR)] * (3 * NUM_ALIKE))
    note(first, *[failed_group(HERE)] * (NUM_ALIKE - 1), failed_group(place, Outcome.INFRA_ERROR))
    with pytest.raises(EnvError):
        note(first, failed_group(HERE))


def test_run_with_one_success_continues_despite_equal_failures(first: FirstFailures) -> None:
    note(first, failed_group(HERE), scored(), *[failed_group(HERE)] * (3 * NUM_ALIKE))
    assert first.has_succeeded


def test_failures_at_different_places_are_not_counted_together(first: FirstFailures) -> None:
    note(first, *[failed_group(HERE), failed_group(ELSEWHERE)] * NUM_ALIKE)
    assert not first.has_succeeded


def test_group_with_any_reward_has_not_failed(first: FirstFailures) -> None:
    half_failed = failed_group(HERE)
    half_failed.rollouts[1] = scored().rollouts[1]
    note(first, *[half_failed] * (3 * NUM_ALIKE))
    assert first.has_succeeded


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    stage = Stage(tmp_path)
    yield stage
    stage.records.close()


def test_pacer_requests_groups_up_to_the_bound(stage: Stage) -> None:
    stage.pacer.ask(MANY)
    stage.pacer.ask(MANY)
    assert len(stage.open()) == 4
    assert stage.lost() == 0


def test_run_near_its_end_requests_only_the_groups_it_needs(stage: Stage) -> None:
    stage.pacer.ask(num_needed=3)
    assert len(stage.open()) == 3


def test_trained_batch_is_counted_and_recorded(stage: Stage) -> None:
    stage.pacer.ask(MANY)
    for group_id in stage.open():
        stage.client.finish(group_id)
    batch = stage.batch(step=0)
    assert batch.group_ids() == [GroupId("run", 0), GroupId("run", 1)]
    assert len(batch.samples()) == 8
    stage.pacer.trained(batch)
    assert (stage.tally.num_trained, stage.tally.num_samples, stage.lost()) == (8, 8, 0)
    assert [row["step"] for row in stage.rows("trajectories.jsonl")] == [0] * 8


def test_batch_of_a_failed_step_stays_open(stage: Stage) -> None:
    stage.pacer.ask(MANY)
    for group_id in stage.open():
        stage.client.finish(group_id)
    stage.batch(step=0)
    assert (stage.lost(), stage.tally.num_open) == (0, 16)


def test_step_of_a_policy_version_is_known_while_its_tokens_may_train(stage: Stage) -> None:
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


def test_group_with_versions_of_another_run_is_dropped_with_that_reason(stage: Stage) -> None:
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


def test_group_without_samples_frees_its_place(stage: Stage) -> None:
    stage.pacer.ask(MANY)
    first, *_ = stage.open()
    stage.client.finish(first, dict.fromkeys(range(4), Outcome.AGENT_ERROR))
    stage.pacer.collect(0.0)
    stage.pacer.ask(MANY)
    assert len(stage.open()) == 4
    assert (stage.tally.num_dropped, stage.lost()) == (4, 0)


def test_dropped_group_is_recorded_and_frees_its_place(stage: Stage) -> None:
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
    """A client whose groups of one end at the first poll."""

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


def test_evaluation_of_any_size_is_requested_in_windows(
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


def test_evaluation_does_not_wait_for_groups_in_the_checkpoint(stage: Stage) -> None:
    asked = {"before": [(0, 3)]}
    history = History(evals=asked, num_asked=3, saved=StateSaved(gone=asked))
    stage.tally.num_evals = 3
    stage.pacer.resume(plan_recovery(LoopState(num_steps=0), history))
    assert stage.pacer.measure(3)


def test_evaluation_records_rollouts_without_a_result(tmp_path: Path) -> None:
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


def test_environment_that_never_gives_samples_ends_the_run(stage: Stage) -> None:
    drop_groups(stage, 399)
    with pytest.raises(EnvError, match=r'env = "guess": the last 400 groups .*\(agent_error: it b'):
        drop_groups(stage, 1)


def test_trainable_group_resets_the_count_of_groups_without_samples(stage: Stage) -> None:
    drop_groups(stage, 399)
    stage.pacer.ask(num_needed=1)
    stage.client.finish(stage.open()[0])
    stage.pacer.collect(0.0)
    stage.pacer.ask(num_needed=2)
    stage.client.drop(stage.open()[0], "agent_error: it broke")
    stage.pacer.collect(0.0)
    assert stage.lost() == 0


def test_pacing_state_counts_open_and_ready_groups(stage: Stage) -> None:
    stage.pacer.publishing(policy_version=5, step=2)
    stage.pacer.published(2)
    stage.pacer.ask(MANY)
    pacing = stage.pacer.pacing
    assert (pacing.running, pacing.capacity, pacing.oldest_version) == (16, 0, 5)


def test_open_groups_are_cancelled_when_the_run_is_done(stage: Stage) -> None:
    stage.pacer.ask(MANY)
    stage.client.finish(stage.open()[0])
    stage.pacer.collect(0.0)
    stage.pacer.cancel_open("its run is done")
    stage.pacer.collect(0.0)
    assert (stage.open(), stage.tally.num_dropped, stage.lost()) == ([], 12, 0)


def test_expected_rollouts_are_those_running_or_still_allowed_and_needed(
    stage: Stage,
) -> None:
    assert [stage.pacer.num_to_come(needed) for needed in (MANY, 3, 0)] == [16, 12, 0]
    stage.pacer.ask(MANY)
    assert stage.pacer.num_to_come(MANY) == 16
    first, *_ = stage.open()
    stage.client.finish(first)
    stage.pacer.collect(0.0)
    assert [stage.pacer.num_to_come(needed) for needed in (MANY, 3)] == [12, 12]


def test_rollouts_missing_from_the_next_batch_are_expected_even_without_capacity(
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
