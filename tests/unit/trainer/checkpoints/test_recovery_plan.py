"""A recovery plan lists every group once and reuses no number.

Checkpoints are due by steps, or forced by a full journal, and retried after a delay.
"""

import collections

import pytest

from rollmesh.core.config import JournalConfig
from rollmesh.core.errors import UserError
from rollmesh.core.ids import GroupId
from rollmesh.core.types import Outcome, Task
from rollmesh.serve.client.arrivals import StoredResult
from rollmesh.serve.client.journal import History, OpenAsk
from rollmesh.serve.client.journal_entries import GroupBooked, Published, StateSaved, StepTaken
from rollmesh.trainer.checkpoints.recovery_plan import (
    FORCED_RETRY_S,
    CheckpointSchedule,
    LoopState,
    plan_recovery,
)
from rollmesh.trainer.pacing.lifecycle import (
    GroupLifecycle,
    GroupRequest,
    ResultArrived,
    RetakeStep,
    StepTrained,
    VersionCreated,
    VersionPublished,
)
from rollmesh.trainer.staleness import StalenessManager, StalenessSettings
from tests.unit.trainer.trainer_incarnations import (
    PATIENCE_S,
    TrainerIncarnation,
    TrainerIncarnations,
)


def begins(
    due: CheckpointSchedule, num_gone: int = 0, now_s: float = 0.0, is_full: bool = False
) -> bool:
    """Return whether a checkpoint was due, and begin it."""
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
    forced = [begins(due, num_gone=1, now_s=each, is_full=True) for each in times_s]
    assert forced == [True, False, False, True, False]
    due.stepped(100)
    assert begins(due, num_gone=1, now_s=FORCED_RETRY_S + 2.0), "steps go on regardless"


NUM_ROLLOUTS = 4
ROOMY = JournalConfig()


def group(seq: int, run_id: str = "r1") -> GroupId:
    return GroupId(run_id, seq)


def filed(seq: int) -> StoredResult:
    return StoredResult(group(seq), 1, "w1", 100 * seq, 10)


def open_ask(seq: int, *, asked_step: int = 0, is_eval: bool = False) -> OpenAsk:
    return OpenAsk(
        group_id=group(seq),
        task=Task(id=f"t{seq}"),
        num_samples=NUM_ROLLOUTS,
        is_eval=is_eval,
        asked_step=asked_step,
    )


def history() -> History:
    """A journal in which steps 2 and 3, and version 3, are later than the checkpoint of 2 steps."""
    return History(
        saved=StateSaved(2, 2, {"r1": [(0, 4)]}),
        steps=(StepTaken(2, (group(5), group(4))), StepTaken(3, (group(6), group(7)))),
        published=(Published(3, 3),),
        results=tuple(map(filed, range(4, 10))),
        drops=(GroupBooked(group(10), "deadline: over"),),
        open_asks=(open_ask(11, asked_step=1), open_ask(12, asked_step=3)),
        num_asked=13,
        num_drawn=13,
    )


SAVED = LoopState(
    num_steps=2,
    policy_version=2,
    step_of_version={0: 0, 1: 1, 2: 2},
    num_tasks=6,
    ended={"r1": [(0, 4)]},
)


def test_steps_after_the_checkpoint_are_redone_with_their_own_groups() -> None:
    plan = plan_recovery(SAVED, history())
    assert (plan.num_steps, plan.next_step) == (2, 4)
    assert plan.redo == (StepTaken(2, (group(5), group(4))), StepTaken(3, (group(6), group(7))))
    assert {each: filed(each.seq) for each in map(group, (4, 5, 6, 7))} == plan.results
    assert plan.ready == (filed(8), filed(9))
    assert [each.group_id for each in plan.open_asks] == [group(11), group(12)]
    assert plan.drops == (GroupBooked(group(10), "deadline: over"),)
    assert plan.saved == SAVED.to_journal()
    assert plan.lines == ()


def test_tasks_continue_after_the_last_one_drawn_in_the_journal() -> None:
    # 15 were drawn; the requests of two of them waited for space in the journal and were lost.
    ahead = LoopState(num_steps=2, num_tasks=15)
    assert plan_recovery(ahead, history()).num_tasks == 13
    assert plan_recovery(ahead, History()).num_tasks == 15


def test_policy_versions_continue_after_the_highest_ever_used() -> None:
    plan = plan_recovery(SAVED, history())
    assert plan.policy_version == 4
    assert plan.step_of_version == {0: 0, 1: 1, 2: 2, 3: 3}
    assert plan_recovery(LoopState(num_steps=2, policy_version=9), history()).policy_version == 10
    freed = History(saved=StateSaved(8, 7))
    assert plan_recovery(None, freed).policy_version == 8
    assert plan_recovery(None, History()).policy_version == 1


def test_without_a_checkpoint_everything_is_redone_from_the_first_weights() -> None:
    steps = (StepTaken(0, (group(0),)), StepTaken(1, (group(1),)))
    history = History(steps=steps, results=(filed(0), filed(1), filed(2)), num_asked=3)
    plan = plan_recovery(None, history)
    assert (plan.num_steps, plan.redo, plan.next_step) == (0, steps, 2)
    assert plan.ready == (filed(2),)
    assert plan.step_of_version == {0: 0}
    assert plan.lines == ()


def test_groups_that_left_by_the_checkpoint_do_not_return() -> None:
    # It is durable, but its process died before the journal recorded it.
    newer = LoopState(num_steps=3, policy_version=3, ended={"r1": [(0, 6), (8, 9), (10, 12)]})
    plan = plan_recovery(newer, history())
    assert plan.redo == (StepTaken(3, (group(6), group(7))),)
    assert plan.ready == (filed(9),)
    assert plan.drops == ()
    assert [each.group_id for each in plan.open_asks] == [group(12)]


def test_steps_lost_with_a_damaged_checkpoint_are_reported_and_their_numbers_not_reused() -> None:
    saved = StateSaved(20, 21, {}, {10: 10, 20: 19, 21: 20})
    freed = History(saved=saved, steps=(StepTaken(20, (group(40),)),))
    older = LoopState(num_steps=10, policy_version=10, step_of_version={9: 9, 10: 10})
    plan = plan_recovery(older, freed)
    assert (plan.num_steps, plan.redo, plan.next_step) == (10, (), 21)
    assert plan_recovery(older, History(saved=saved)).next_step == 20, "nor where none came after"
    assert plan.policy_version == 22
    # Its versions are known, oldest first: waiting results may have these.
    assert list(plan.step_of_version.items()) == [(9, 9), (10, 10), (20, 19), (21, 20)]
    [gap, lost] = plan.lines
    assert gap.startswith("steps 10 to 19 are not in the weights: the checkpoint that freed ")
    assert lost == "step 20 is not redone: r1/40, which the journal has lost"


def test_step_is_redone_without_a_group_whose_result_is_lost() -> None:
    history = History(steps=(StepTaken(0, (group(0), group(1))),), results=(filed(1),))
    plan = plan_recovery(None, history)
    assert plan.redo == (StepTaken(0, (group(1),)),)
    assert plan.lines == ("step 0 is without r1/0, which the journal has lost",)


@pytest.mark.parametrize("max_concurrent", [100, 14])
def test_capacity_after_recovery_follows_the_formula(max_concurrent: int) -> None:
    plan = plan_recovery(SAVED, history())
    settings = StalenessSettings(batch=8, max_staleness=4, max_concurrent=max_concurrent)
    manager = StalenessManager(settings, published_step=plan.num_steps)
    lifecycle = GroupLifecycle(manager, NUM_ROLLOUTS)
    lifecycle.resume(plan)
    for step in plan.redo:
        for group_id in step.group_ids:
            lifecycle.step(ResultArrived(group_id, Task(id="t"), (frozenset({2}),) * NUM_ROLLOUTS))
        lifecycle.step(RetakeStep(step))
        lifecycle.step(StepTrained())
    # Steps 2 and 3 train two groups each; two are ready, which count as running until they are
    # handed out, and two are open.
    assert (manager.training, manager.running) == (16, 16)
    assert manager.capacity == max(0, min(max_concurrent - 16, 5 * 8 - 32))
    lifecycle.step(VersionCreated(plan.policy_version, plan.next_step))
    lifecycle.step(VersionPublished(plan.next_step))
    assert (manager.training, manager.running) == (0, 16)
    assert manager.capacity == max(0, min(max_concurrent - 16, 5 * 8 - 16))


def test_evaluations_that_are_open_do_not_count() -> None:
    plan = plan_recovery(None, History(open_asks=(open_ask(0, is_eval=True), open_ask(1))))
    manager = StalenessManager(StalenessSettings(batch=8, max_staleness=1, max_concurrent=100))
    GroupLifecycle(manager, NUM_ROLLOUTS).resume(plan)
    assert manager.running == NUM_ROLLOUTS


def run_to_failed_rollouts(incarnation: TrainerIncarnation) -> None:
    """Run to a step that takes two groups, each with a failed rollout."""
    incarnation.pacer.publishing(1, 1)
    incarnation.client.note_published(1, 1)
    incarnation.pacer.published(1)
    incarnation.client.cancel(incarnation.next_ask(), "of no use")
    incarnation.pacer.collect(PATIENCE_S)
    ends = (
        {"reason": "infra_error: its worker is gone", "policy_versions": (0, 1)},
        {"outcomes": (Outcome.AGENT_ERROR,) * 2},
        {"policy_versions": (7,)},
    )
    for how in ends:
        incarnation.pacer.ask(num_needed=1)
        group_id, task = incarnation.receive_ask()
        incarnation.finish(group_id, task.id, **how)
        incarnation.pacer.collect(PATIENCE_S)
    incarnation.pacer.ask(num_needed=3)
    for policy_version in (0, 1, 1):
        group_id, task = incarnation.receive_ask()
        outcomes = (Outcome.COMPLETED, Outcome.AGENT_ERROR)
        incarnation.finish(group_id, task.id, outcomes, policy_versions=(policy_version,))
        incarnation.pacer.collect(PATIENCE_S)
    batch = incarnation.pacer.take(5)  # for which one group is too old
    assert batch is not None
    incarnation.client.note_step(5, batch.group_ids(), batch.oldest_step)
    incarnation.pacer.trained(batch)


def drops_of(incarnation: TrainerIncarnation) -> dict[tuple[str, int | None], dict[str, object]]:
    rows = incarnation.rows("drops.jsonl")
    by_rollout = {(row["group_id"], row.get("index")): row for row in rows}
    assert len(by_rollout) == len(rows), "a rollout is in two rows"
    return by_rollout


def redo(incarnation: TrainerIncarnation) -> None:
    for step in incarnation.recovery.redo:
        batch = incarnation.pacer.retake(step, incarnation.recovery.results)
        assert batch is not None
        incarnation.pacer.trained(batch)


@pytest.mark.parametrize("later", ["requeue", "drop", "mask"])
def test_drops_of_a_trainer_that_was_killed_are_those_of_one_that_was_not(
    begin: TrainerIncarnations, later: str
) -> None:
    incarnation = begin(ROOMY, "trainer.stale_policy=requeue")
    run_to_failed_rollouts(incarnation)
    drops, tally = drops_of(incarnation), incarnation.tally
    reasons = collections.Counter(str(row["reason"]).partition(":")[0] for row in drops.values())
    assert reasons == {
        "cancelled": 1,
        "infra_error": 2,
        "agent_error": 2 + 3,
        "foreign": 2,
        "requeued": 1,
    }
    assert [row["age"] for row in drops.values() if "gone" in str(row["reason"])] == [0, 0]
    again = begin(ROOMY, f"trainer.stale_policy={later}")
    redo(again)
    assert drops_of(again) == drops
    assert again.tally.state() == tally.state()
    assert again.client.take(0.0) == [], "what was dropped is not handed out again"


@pytest.mark.parametrize("is_saved", [False, True])
def test_stale_task_is_requested_again_once_whichever_process_dies(
    begin: TrainerIncarnations, is_saved: bool
) -> None:
    requeue = "trainer.stale_policy=requeue"
    incarnation = begin(ROOMY, requeue)
    run_to_failed_rollouts(incarnation)
    [waiting] = incarnation.pacer.lifecycle.to_ask_again
    if is_saved:
        incarnation.saver.save(6)
    incarnation = begin(ROOMY, requeue)
    assert incarnation.pacer.lifecycle.to_ask_again == (waiting,)
    redo(incarnation)
    incarnation.pacer.publishing(2, 6)
    incarnation.pacer.published(6)
    incarnation.pacer.ask(num_needed=1)
    group_id, task = incarnation.receive_ask()
    assert task == waiting.task
    incarnation = begin(ROOMY, requeue)
    assert incarnation.pacer.lifecycle.request(group_id) == GroupRequest(task, waiting.again)
    assert incarnation.pacer.lifecycle.next_again() is None


def test_nothing_is_lost_if_the_newest_checkpoint_is_damaged(begin: TrainerIncarnations) -> None:
    journal = JournalConfig(segment_bytes=256)
    incarnation = begin(journal)
    for step in range(4):
        incarnation.train(step)
        incarnation.saver.save(step + 1)
    *_, older, newest = sorted((incarnation.folder / "savepoints").iterdir())
    (newest / "manifest.json").unlink()
    incarnation = begin(journal)
    assert incarnation.recovery.num_steps == 3
    assert [each.step for each in incarnation.recovery.redo] == [3]
    assert incarnation.recovery.lines == ()
    # It is freed all the same, by the checkpoint before that.
    assert incarnation.recovery.saved.num_steps == 3
    (older / "manifest.json").unlink()
    with pytest.raises(UserError, match="no checkpoint is intact"):
        begin(journal)
