"""Savepoints are made as steps are done, or redone, and when a full journal waits for one."""

import pytest

from rollmesh.core.config import JournalConfig
from rollmesh.core.ids import GroupId
from rollmesh.serve.client.journal_entries import StepTaken
from rollmesh.wire.messages import AskGroup
from tests.unit.trainer.trainer_lives import PATIENCE_S, PERIOD_STEPS, Killed, Life, Lives

FULL = JournalConfig(max_bytes=1)
"""Over its budget as soon as there is anything in it that a savepoint would free."""


def test_a_full_journal_is_freed_of_what_failed_before_the_trainer_died(begin: Lives) -> None:
    first = begin(FULL)
    first.saver.tend(0)
    assert not first.savepoints.is_writing
    first.fail_a_group()
    second = begin(FULL)
    assert [each.reason for each in second.recovery.drops] == ["cancelled: of no use"]
    assert second.client.is_journal_full
    second.pacer.ask(num_needed=1)  # which waits for room in the journal
    second.saver.tend(0)
    assert second.savepoints.is_writing
    second.saver.save(0)
    second.router.expect(AskGroup)


def assert_none_is_made(life: Life) -> None:
    """Whose journal is full of a step that nobody has trained yet."""
    assert life.client.is_journal_full
    life.saver.tend(0)
    assert not life.savepoints.is_writing


def test_what_the_newest_savepoint_knows_is_no_reason_for_another(begin: Lives) -> None:
    first = begin(FULL)
    first.fail_a_group()
    first.saver.save(0)
    first.take_step(0)
    assert_none_is_made(first)
    assert_none_is_made(begin(FULL))


def savepoints_of(life: Life) -> list[str]:
    """By name, the oldest first."""
    return sorted(path.name for path in life.savepoints.folder.iterdir())


def test_a_run_that_ends_as_a_savepoint_is_made_is_not_written_twice(begin: Lives) -> None:
    life = begin(JournalConfig())
    for step in range(PERIOD_STEPS):
        life.train(step)
    life.saver.stepped(PERIOD_STEPS)
    life.saver.finish(PERIOD_STEPS)
    assert savepoints_of(life) == ["000001-step-2"]
    life.saver.finish(PERIOD_STEPS)
    assert savepoints_of(life) == ["000001-step-2"]


def test_what_has_left_since_the_newest_savepoint_stands_in_the_last(begin: Lives) -> None:
    first = begin(JournalConfig())
    first.train(0)
    first.saver.save(1)
    first.fail_a_group()
    first.saver.finish(1)
    assert savepoints_of(first) == ["000001-step-1", "000002-step-1"]
    assert begin(JournalConfig()).recovery.saved.gone == {first.client.run_id: [(0, 2)]}


def test_a_trainer_that_dies_as_it_redoes_steps_leaves_the_next_one_less_to_redo(
    begin: Lives,
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
    second.savepoints.settled(PATIENCE_S)
    third = begin(roomy)
    assert third.recovery.num_steps == PERIOD_STEPS
    [left] = third.recovery.redo
    assert left == StepTaken(2, (GroupId(first.client.run_id, 2),), 0)
    assert third.pacer.lifecycle.gone == {first.client.run_id: [(0, 2)]}
