"""A run whose environment fails in every group from the first one on ends, and no other does."""

import pytest

from rollmesh.core.errors import EnvError
from rollmesh.core.types import ErrorPlace, GroupRecord, Outcome, RolloutRecord, Task
from rollmesh.trainer.pacing.accounting import NUM_ALIKE, FirstFailures

HERE = ErrorPlace("KeyError", "my_env.py", 15, "score")
ELSEWHERE = ErrorPlace("KeyError", "my_env.py", 16, "score")
INFRA = ErrorPlace("InfraError", "my_env.py", 3, "run")
ERROR = "score: KeyError: 'answer' (my_env.py:15 in score)"


def failed(place: ErrorPlace | None, outcome: Outcome = Outcome.AGENT_ERROR) -> GroupRecord:
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
    note(first, *[failed(HERE, outcome)] * (NUM_ALIKE - 1))
    with pytest.raises(EnvError) as raised:
        note(first, failed(HERE, outcome))
    assert f"the first {NUM_ALIKE} groups all failed alike: {ERROR}; task t7" in str(raised.value)


def test_groups_that_cannot_be_scored_together_count(first: FirstFailures) -> None:
    group = scored()
    group.reason, group.place = "infra_error: score_group: KeyError: 'answer'", HERE
    with pytest.raises(EnvError, match="score_group: KeyError"):
        note(first, *[group] * NUM_ALIKE)


@pytest.mark.parametrize("place", [None, INFRA], ids=["an engine", "what the environment needs"])
def test_faults_of_the_infrastructure_never_count(
    first: FirstFailures, place: ErrorPlace | None
) -> None:
    note(first, *[failed(place, Outcome.INFRA_ERROR)] * (3 * NUM_ALIKE))
    note(first, *[failed(HERE)] * (NUM_ALIKE - 1), failed(place, Outcome.INFRA_ERROR))
    with pytest.raises(EnvError):
        note(first, failed(HERE))


def test_a_run_in_which_a_group_has_succeeded_goes_on(first: FirstFailures) -> None:
    note(first, failed(HERE), scored(), *[failed(HERE)] * (3 * NUM_ALIKE))
    assert first.has_succeeded


def test_failures_at_different_places_are_not_alike(first: FirstFailures) -> None:
    note(first, *[failed(HERE), failed(ELSEWHERE)] * NUM_ALIKE)
    assert not first.has_succeeded


def test_a_group_in_which_some_have_a_reward_has_not_failed(first: FirstFailures) -> None:
    half_failed = failed(HERE)
    half_failed.rollouts[1] = scored().rollouts[1]
    note(first, *[half_failed] * (3 * NUM_ALIKE))
    assert first.has_succeeded
