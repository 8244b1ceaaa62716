"""Checkpoints are due by steps, or forced by a full journal, and retried with a delay."""

from rollmesh.trainer.checkpoints.recovery_plan import FORCED_RETRY_S, CheckpointSchedule


def begins(
    due: CheckpointSchedule, num_gone: int = 0, now_s: float = 0.0, is_full: bool = False
) -> bool:
    """Return whether a checkpoint was due; it is begun then."""
    is_now = due.is_now(num_gone, now_s, is_full=is_full)
    if is_now:
        due.begun(now_s)
    return is_now


def test_checkpoint_is_due_every_few_steps() -> None:
    due, begun = CheckpointSchedule(3, 0), []
    for num_steps in range(1, 10):
        due.stepped(num_steps)
        if begins(due):
            begun.append(num_steps)
            due.settled(num_steps)
    assert begun == [3, 6, 9]


def test_checkpoint_due_during_another_is_due_after_it() -> None:
    due = CheckpointSchedule(2, 0)
    due.stepped(2)
    assert begins(due)
    due.stepped(4)
    due.stepped(5)  # by now the first is durable
    due.settled(8)
    assert [begins(due), begins(due)] == [True, False]


def test_full_journal_forces_a_checkpoint_that_would_free_some_of_it() -> None:
    due = CheckpointSchedule(100, 4)
    assert not begins(due, num_gone=4, is_full=True), "the newest one knows these"
    assert not begins(due, num_gone=5, is_full=False)
    assert begins(due, num_gone=5, is_full=True)
    due.settled(5)
    assert not begins(due, num_gone=5, is_full=True)
    assert begins(due, num_gone=6, is_full=True), "at once, since the disk took the last"


def test_refused_checkpoint_is_not_retried_at_once() -> None:
    due = CheckpointSchedule(100, 0)
    times_s = [0.0, 1.0, FORCED_RETRY_S - 0.1, FORCED_RETRY_S, FORCED_RETRY_S + 1.0]
    told = [begins(due, num_gone=1, now_s=each, is_full=True) for each in times_s]
    assert told == [True, False, False, True, False]
    due.stepped(100)
    assert begins(due, num_gone=1, now_s=FORCED_RETRY_S + 2.0), "steps go on regardless"
