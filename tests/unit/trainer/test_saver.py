"""Checkpoints are made after steps, also redone ones, and when a full journal waits for one."""

import pytest

from rollmesh.core.config import JournalConfig
from rollmesh.core.ids import GroupId
from rollmesh.serve.client.journal_entries import StepTaken
from rollmesh.wire.messages import AskGroup
from tests.unit.trainer.trainer_incarnations import (
    PATIENCE_S,
    PERIOD_STEPS,
    Killed,
    TrainerIncarnation,
    TrainerIncarnations,
)

FULL = JournalConfig(max_bytes=1)
"""A journal over its budget as soon as it has anything that a checkpoint would free."""


def test_full_journal_is_freed_of_groups_that_failed_before_a_death(
    begin: TrainerIncarnations,
) -> None:
    first = begin(FULL)
    first.saver.poll(0)
    assert not first.checkpoints.is_writing
    first.fail_a_group()
    second = begin(FULL)
    assert [each.reason for each in second.recovery.drops] == ["cancelled: of no use"]
    assert second.client.is_journal_full
    second.pacer.ask(num_needed=1)  # waits for space in the journal
    second.saver.poll(0)
    assert second.checkpoints.is_writing
    second.saver.save(0)
    second.router.expect(AskGroup)


def assert_none_is_made(incarnation: TrainerIncarnation) -> None:
    """Assert that a journal which is full of an untrained step forces no checkpoint."""
    assert incarnation.client.is_journal_full
    incarnation.saver.poll(0)
    assert not incarnation.checkpoints.is_writing


def test_groups_in_the_newest_checkpoint_do_not_force_another(
    begin: TrainerIncarnations,
) -> None:
    first = begin(FULL)
    first.fail_a_group()
    first.saver.save(0)
    first.take_step(0)
    assert_none_is_made(first)
    assert_none_is_made(begin(FULL))


def checkpoints_of(incarnation: TrainerIncarnation) -> list[str]:
    """Return the names of the checkpoints, oldest first."""
    return sorted(path.name for path in incarnation.checkpoints.folder.iterdir())


def test_a_run_that_ends_as_a_checkpoint_is_made_is_not_written_twice(
    begin: TrainerIncarnations,
) -> None:
    incarnation = begin(JournalConfig())
    for step in range(PERIOD_STEPS):
        incarnation.train(step)
    incarnation.saver.after_step(PERIOD_STEPS)
    incarnation.saver.finish(PERIOD_STEPS)
    assert checkpoints_of(incarnation) == ["000001-step-2"]
    incarnation.saver.finish(PERIOD_STEPS)
    assert checkpoints_of(incarnation) == ["000001-step-2"]


def test_groups_that_left_since_the_newest_checkpoint_are_in_the_last(
    begin: TrainerIncarnations,
) -> None:
    first = begin(JournalConfig())
    first.train(0)
    first.saver.save(1)
    first.fail_a_group()
    first.saver.finish(1)
    assert checkpoints_of(first) == ["000001-step-1", "000002-step-1"]
    assert begin(JournalConfig()).recovery.saved.gone == {first.client.run_id: [(0, 2)]}


def test_trainer_that_dies_while_redoing_leaves_less_to_redo(
    begin: TrainerIncarnations,
) -> None:
    roomy = JournalConfig()
    first = begin(roomy)
    for step in range(3):
        first.take_step(step)
    second = begin(roomy)
    assert [each.step for each in second.recovery.redo] == [0, 1, 2]
    second.policy.dies_in_step = 2
    with pytest.raises(Killed):
        second.loop.run(second.recovery)
    second.checkpoints.settled(PATIENCE_S)
    third = begin(roomy)
    assert third.recovery.num_steps == PERIOD_STEPS
    [left] = third.recovery.redo
    assert left == StepTaken(2, (GroupId(first.client.run_id, 2),), 0)
    assert third.pacer.lifecycle.gone == {first.client.run_id: [(0, 2)]}
