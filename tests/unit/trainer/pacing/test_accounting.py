"""Every rollout that leaves is recorded once: trained, dropped, or measured.

A run whose environment fails in every group from the first one ends, and no other does.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rollmesh.core.errors import EnvError
from rollmesh.core.ids import GroupId
from rollmesh.core.types import ErrorPlace, GroupRecord, Outcome, RolloutRecord, Task
from rollmesh.serve.client.journal_entries import GroupBooked, SeenRollout
from rollmesh.serve.client.samples import Sample
from rollmesh.testing.client import rollout
from rollmesh.testing.clock import FakeClock
from rollmesh.trainer.pacing.lifecycle import VersionSteps
from rollmesh.trainer.pacing.pacer import NUM_ALIKE, FirstFailures, GroupAccounting
from rollmesh.trainer.pacing.ready_queue import ReadyGroup
from rollmesh.trainer.reports.records import RunRecords
from rollmesh.trainer.reports.summary import Tally
from tests.unit.trainer.pacing.test_ready_queue import sampled_by

GROUP = GroupId("r", 3)


class Books:
    """Exits of a run whose weights after each of nine steps are named by that step."""

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
        """The group, the reason and the age."""
        rows = self.rows("drops.jsonl")
        return [(row.get("index"), row["reason"], row.get("age")) for row in rows]


@pytest.fixture
def reports(tmp_path: Path) -> Iterator[Books]:
    reports = Books(tmp_path)
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


def test_a_step_records_which_rollouts_of_a_group_trained(reports: Books) -> None:
    trained = [sampled_by(3, 4), sampled_by(4, 4)]
    reports.accounting.trained(group([trained, []], whole(0, 3, 4), failed(1, 2)), step=5)
    tally = reports.tally
    assert (tally.num_trained, tally.num_samples, tally.num_dropped) == (1, 2, 1)
    assert (tally.ages, tally.num_two_versions) == ({5 - 3: 1, 5 - 4: 1}, 1)
    assert tally.outcomes == {Outcome.COMPLETED: 1, Outcome.AGENT_ERROR: 1}
    assert reports.drops() == [(1, "agent_error: it broke", 5 - 2)]
    assert [row["step"] for row in reports.rows("trajectories.jsonl")] == [5, 5]


def test_of_a_group_that_is_dropped_each_rollout_keeps_its_own_reason(reports: Books) -> None:
    reports.accounting.dropped(
        group([[sampled_by(2)], []], whole(0, 2), failed(1, 1)), 6, "stale: age 4"
    )
    assert sorted(reports.drops()) == [(0, "stale: age 4", 4), (1, "agent_error: it broke", 5)]
    assert (reports.tally.num_trained, reports.tally.num_dropped) == (0, 2)
    assert [row["step"] for row in reports.rows("trajectories.jsonl")] == [None, None]


def test_a_barren_group_says_why(reports: Books) -> None:
    why = reports.accounting.untrainable(group([[], []], failed(0, 1), whole(1, 1)), 2)
    assert why == "completed: nothing in it trains"
    assert reports.drops() == [(0, "agent_error: it broke", 1), (1, why, 1)]


def test_a_rollout_that_masking_has_emptied_is_booked_once(reports: Books) -> None:
    masked = group([[], [sampled_by(6)]], whole(0, 1), whole(1, 1, 6))
    masked.num_masked = {0: 2, 1: 1}
    reports.accounting.masked(masked, 7)
    reports.accounting.trained(masked, 7)
    assert reports.drops() == [(0, "masked: no token of it is within the age bound", 6)]
    assert (reports.tally.num_trained, reports.tally.num_dropped) == (1, 1)
    rows = reports.rows("trajectories.jsonl")
    assert [row["num_masked"] for row in rows] == [2, 1]


def test_of_a_group_without_a_result_those_that_came_are_seen_and_the_rest_is_not(
    reports: Books,
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


def test_an_evaluation_is_measured_and_never_counted(reports: Books) -> None:
    reports.accounting.measured(group([[]], whole(0, 0)))
    reports.accounting.unmeasured(GROUP, "t", "deadline: over")
    assert reports.tally.measured == [0.0]
    assert (reports.tally.num_dropped, reports.tally.outcomes) == (0, {})
    assert reports.drops() == [(None, "evaluation: deadline: over", None)]


def test_a_stranger_leaves_a_row_and_no_count(reports: Books) -> None:
    reports.accounting.not_requested(GROUP)
    assert reports.drops() == [(None, "of an earlier run", None)]
    assert reports.tally.num_dropped == 0


HERE = ErrorPlace("KeyError", "my_env.py", 15, "score")
ELSEWHERE = ErrorPlace("KeyError", "my_env.py", 16, "score")
INFRA = ErrorPlace("InfraError", "my_env.py", 3, "run")
ERROR = "score: KeyError: 'answer' (my_env.py:15 in score)"


def failed_group(place: ErrorPlace | None, outcome: Outcome = Outcome.AGENT_ERROR) -> GroupRecord:
    """A group one of whose siblings was cancelled when the others had failed."""
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


def test_a_run_in_which_a_group_has_succeeded_goes_on(first: FirstFailures) -> None:
    note(first, failed_group(HERE), scored(), *[failed_group(HERE)] * (3 * NUM_ALIKE))
    assert first.has_succeeded


def test_failures_at_different_places_are_not_alike(first: FirstFailures) -> None:
    note(first, *[failed_group(HERE), failed_group(ELSEWHERE)] * NUM_ALIKE)
    assert not first.has_succeeded


def test_a_group_in_which_some_have_a_reward_has_not_failed(first: FirstFailures) -> None:
    half_failed = failed_group(HERE)
    half_failed.rollouts[1] = scored().rollouts[1]
    note(first, *[half_failed] * (3 * NUM_ALIKE))
    assert first.has_succeeded
