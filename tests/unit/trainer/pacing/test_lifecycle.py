"""Every group leaves once, for one reason, and a step takes groups of this run only.

The age of a token follows from the step that made its version.
"""

import msgspec
import pytest

from rollmesh.core.config import StalePolicy
from rollmesh.core.ids import GroupId
from rollmesh.core.types import Task
from rollmesh.serve.client.arrivals import StoredResult
from rollmesh.serve.client.journal import History, OpenAsk
from rollmesh.serve.client.journal_entries import (
    Again,
    GroupBooked,
    GroupParted,
    StepTaken,
    decode_entry,
)
from rollmesh.trainer.checkpoints.recovery_plan import (
    LoopState,
    PendingTask,
    RecoveryPlan,
    plan_recovery,
)
from rollmesh.trainer.pacing.lifecycle import (
    MAX_REQUEUES,
    SPARE_VERSIONS,
    UNKNOWN,
    Action,
    DropReplayed,
    GroupLeft,
    GroupLifecycle,
    GroupOutcome,
    GroupRequest,
    GroupRequested,
    QueueGroup,
    ResultArrived,
    ResultMissing,
    RetakeStep,
    StepTrained,
    TakeStep,
    TrainGroups,
    VersionCreated,
    VersionPublished,
    VersionSteps,
    spans_versions,
    versions_of,
)
from rollmesh.trainer.staleness import StalenessManager, StalenessSettings
from tests.unit.trainer.pacing.test_ready_queue import sampled_by


@pytest.fixture
def versions() -> VersionSteps:
    """Versions of a run whose publications skip steps, and whose recovery published the weights of
    four steps twice."""
    found = VersionSteps(max_staleness=2)
    found.add({1: 2, 2: 4, 5: 4})
    return found


def test_version_of_the_first_weights_is_known_before_any_publication() -> None:
    assert dict(VersionSteps(max_staleness=2).steps) == {0: 0}


def test_age_counts_steps_since_the_version_of_the_oldest_trained_token(
    versions: VersionSteps,
) -> None:
    samples = [sampled_by(2, 5), sampled_by(1, 2)]
    assert versions.age(samples, 6) == 6 - 2
    assert versions.age(samples[:1], 6) == 6 - 4
    assert versions.oldest_step({1, 5}) == 2
    assert versions.newest_step({1, 5}) == 4


def test_weights_published_twice_have_the_newer_version(versions: VersionSteps) -> None:
    assert [versions.named(step) for step in (0, 2, 3, 4)] == [0, 1, None, 5]


def test_versions_made_before_a_step_are_listed(versions: VersionSteps) -> None:
    before = {step: versions.made_before(step) for step in (0, 1, 2, 3, 4, 5)}
    assert before[0] == frozenset()
    assert before[1] == before[2] == {0}
    assert before[3] == before[4] == {0, 1}
    assert before[5] == {0, 1, 2, 5}


def test_unknown_version_is_of_another_run(versions: VersionSteps) -> None:
    assert versions.foreign({0, 2, 5}) == set()
    assert versions.foreign({2, 3, 9}) == {3, 9}


def test_age_of_unknown_versions_is_none(versions: VersionSteps) -> None:
    assert versions.age_of((1, 9), 6) == 4
    assert versions.age_of((9,), 6) is None
    assert versions.age_of((), 6) is None


def test_only_versions_too_old_to_train_are_forgotten() -> None:
    versions = VersionSteps(max_staleness=2)
    newest = 3 * SPARE_VERSIONS
    for step in range(newest + 1):
        versions.add({step: step})
    assert len(versions.steps) == 2 + SPARE_VERSIONS
    assert list(versions.steps) == list(range(newest - SPARE_VERSIONS - 1, newest + 1))


def test_versions_of_untrained_tokens_do_not_count() -> None:
    assert versions_of([sampled_by(3, 4), sampled_by(4, 6)]) == {3, 4, 6}
    assert versions_of([]) == frozenset()
    assert [spans_versions(sampled_by(*each)) for each in ((3, 4), (3, 3))] == [True, False]


SIZE = 2


class Run:
    """A group lifecycle with a batch of two groups, a bound of one step, and room for many."""

    def __init__(self, policy: StalePolicy = "wait") -> None:
        settings = StalenessSettings(
            batch=2 * SIZE, max_staleness=1, max_concurrent=100, policy=policy
        )
        self.staleness = StalenessManager(settings)
        self.lifecycle = GroupLifecycle(self.staleness, SIZE)

    def ask(self, *seqs: int, again: Again | None = None, is_eval: bool = False) -> None:
        for seq in seqs:
            request = GroupRequest(task(seq), again, is_eval)
            self.lifecycle.step(GroupRequested(group(seq), request))

    def come(self, seq: int, *rollouts: set[int], is_eval: bool = False) -> Action:
        versions = tuple(map(frozenset, rollouts))
        [action] = self.lifecycle.step(ResultArrived(group(seq), task(seq), versions, is_eval))
        return action

    def fail(self, seq: int) -> Action:
        [action] = self.lifecycle.step(ResultMissing(group(seq), "deadline: over"))
        return action

    def publish(self, *steps: int) -> None:
        """Publish the weights after each of these numbers of steps, under that number."""
        for step in steps:
            self.lifecycle.step(VersionCreated(step, step))
            self.lifecycle.step(VersionPublished(step))

    def gone(self) -> list[int]:
        return [
            seq
            for each in self.lifecycle.gone.values()
            for begin, end in each
            for seq in range(begin, end)
        ]


def group(seq: int) -> GroupId:
    return GroupId("r", seq)


def task(seq: int) -> Task:
    return Task(id=f"t{seq}")


def taken(actions: list[Action]) -> list[StepTaken]:
    return [each.taken for each in actions if isinstance(each, TrainGroups)]


def test_group_waits_trains_and_leaves_once_its_step_is_in_the_weights() -> None:
    run = Run()
    run.ask(0, 1)
    assert [run.come(seq, {0}, {0}) for seq in (0, 1)] == [
        QueueGroup(group(0)),
        QueueGroup(group(1)),
    ]
    batch = StepTaken(0, (group(0), group(1)), 0)
    assert taken(run.lifecycle.step(TakeStep(0))) == [batch]
    assert run.gone() == [], "a crash now requests it again"
    left = run.lifecycle.step(StepTrained())
    assert left == [
        GroupLeft(group(seq), GroupOutcome.TRAINED, GroupRequest(task(seq))) for seq in (0, 1)
    ]
    assert (run.gone(), run.lifecycle.num_gone) == ([0, 1], 2)
    assert run.lifecycle.step(StepTrained()) == []


def test_group_that_ends_without_a_result_is_dropped_and_frees_its_place() -> None:
    run = Run()
    run.ask(0)
    assert run.fail(0) == GroupLeft(
        group(0), GroupOutcome.FAILED, GroupRequest(task(0)), "deadline: over"
    )
    assert (run.staleness.running, run.gone(), run.lifecycle.num_untrainable) == (0, [0], 1)
    assert run.fail(0) == GroupLeft(group(0), GroupOutcome.NOT_REQUESTED), "it was here once"


def test_group_without_samples_leaves_and_frees_its_place() -> None:
    run = Run()
    run.ask(0)
    assert run.come(0) == GroupLeft(group(0), GroupOutcome.UNTRAINABLE, GroupRequest(task(0)))
    assert (run.staleness.running, run.gone(), run.lifecycle.num_untrainable) == (0, [0], 1)


def test_trainable_group_resets_the_count_of_barren_groups() -> None:
    run = Run()
    run.ask(0, 1)
    run.fail(0)
    run.come(1, {0})
    assert run.lifecycle.num_untrainable == 0


def test_failed_rollouts_are_not_counted() -> None:
    run = Run()
    run.ask(0, 1, 2)
    run.come(0, {0})
    run.come(1, {0}, {0})
    assert (run.staleness.ready, run.staleness.running) == (3, 2)
    assert run.lifecycle.step(TakeStep(0)) == []
    run.come(2, {0})
    assert taken(run.lifecycle.step(TakeStep(0))) == [
        StepTaken(0, (group(0), group(1), group(2)), 0)
    ]


def test_group_with_versions_of_another_run_does_not_train() -> None:
    run = Run()
    run.ask(0)
    why = "foreign: policy version 7 is not of this run"
    assert run.come(0, {0}, {0, 7, 9}) == GroupLeft(
        group(0), GroupOutcome.FOREIGN, GroupRequest(task(0)), why
    )
    assert (run.staleness.running, run.staleness.ready, run.gone()) == (0, 0, [0])
    assert run.lifecycle.num_untrainable == 0


def test_an_unrequested_group_is_unknown_and_not_dropped() -> None:
    run = Run()
    assert run.come(5, {0}) == GroupLeft(group(5), GroupOutcome.NOT_REQUESTED)
    assert run.gone() == []


@pytest.mark.parametrize("is_eval_in_record", [False, True])
def test_evaluations_are_measured_and_never_counted(is_eval_in_record: bool) -> None:
    run = Run()
    run.ask(0, is_eval=not is_eval_in_record)
    assert run.staleness.running == SIZE * is_eval_in_record
    action = run.come(0, {0}, is_eval=is_eval_in_record)
    assert isinstance(action, GroupLeft)
    assert (action.outcome, run.gone()) == (GroupOutcome.MEASURED, [0])
    assert (run.staleness.running, run.staleness.ready) == (0, 0)


def test_evaluation_without_a_result_is_unmeasured_and_not_barren() -> None:
    run = Run()
    run.ask(0, is_eval=True)
    assert run.fail(0) == GroupLeft(
        group(0), GroupOutcome.UNMEASURED, GroupRequest(task(0), is_eval=True), "deadline: over"
    )
    assert (run.gone(), run.lifecycle.num_untrainable) == ([0], 0)


@pytest.mark.parametrize("policy", ["wait", "drop"])
def test_group_past_the_age_bound_leaves_with_its_age(policy: StalePolicy) -> None:
    run = Run(policy)
    run.ask(0)
    run.come(0, {0})
    why = "stale: age 5"
    assert run.lifecycle.step(TakeStep(5)) == [
        GroupLeft(group(0), GroupOutcome.STALE, GroupRequest(task(0)), why)
    ]
    assert (run.gone(), run.lifecycle.next_again()) == ([0], None)


def test_task_of_a_stale_group_is_requested_again_a_limited_number_of_times() -> None:
    run = Run("requeue")
    again = None
    for num in range(MAX_REQUEUES):
        run.ask(num, again=again)
        run.come(num, {0})
        [left] = run.lifecycle.step(TakeStep(5))
        assert isinstance(left, GroupLeft)
        again = Again(group(num), num + 1)
        assert (left.outcome, left.why) == (GroupOutcome.REQUEUED, "requeued: age 5")
        assert left.times == again.times
        assert run.lifecycle.next_again() == GroupRequest(task(num), again)
        assert run.lifecycle.next_again() is None, "once"
    run.ask(9, again=again)
    run.come(9, {0})
    [left] = run.lifecycle.step(TakeStep(5))
    assert isinstance(left, GroupLeft)
    assert (left.outcome, run.lifecycle.next_again()) == (GroupOutcome.STALE, None)


def test_only_versions_past_the_age_bound_are_masked() -> None:
    run = Run("mask")
    run.publish(1, 2, 3)
    run.ask(0, 1)
    run.come(0, {0, 3}, {1, 2})
    run.come(1, {3}, {3})
    [train] = run.lifecycle.step(TakeStep(3))
    assert train == TrainGroups(
        StepTaken(3, (group(0), group(1)), oldest_step=2), frozenset({0, 1})
    )
    assert run.staleness.histogram == {1: 2, 0: 2}


def test_rollouts_of_a_masked_group_count_if_they_keep_a_token() -> None:
    run = Run("mask")
    run.publish(1, 2, 3)
    run.ask(0, 1)
    run.come(0, {0, 3}, {0, 1})
    run.come(1, {3}, {3})
    assert run.lifecycle.step(TakeStep(3)) == [], "three of four"


def test_requests_are_limited_by_the_bound_and_by_need() -> None:
    run = Run()
    run.ask(0, 1)
    assert [run.lifecycle.may_ask(num) for num in (2, 3)] == [False, True]
    run.come(0, {0}, {0})
    assert not run.lifecycle.may_ask(2), "what is ready is under way, too"
    run.ask(2, 3)
    assert not run.lifecycle.may_ask(100), "two batches"


def test_age_of_a_token_counts_steps_not_versions() -> None:
    run = Run()
    run.lifecycle.step(VersionCreated(7, 1))
    run.lifecycle.step(VersionPublished(1))
    run.ask(0, 1)
    run.come(0, {7})
    run.come(1, {7}, {7})
    assert run.staleness.oldest_version == 7
    assert run.lifecycle.step(TakeStep(2)) == []
    run.ask(2)
    run.come(2, {7})
    assert taken(run.lifecycle.step(TakeStep(2))) == [StepTaken(2, tuple(map(group, range(3))), 0)]


def earlier(**more: tuple[int, ...]) -> RecoveryPlan:
    """A plan after a checkpoint of two steps with groups 0 to 3; steps 2 and 3 were taken later."""
    history = History(
        steps=(StepTaken(2, (group(5), group(4)), 0), StepTaken(3, (group(6), group(7)), 0)),
        results=tuple(
            StoredResult(group(seq), 1, "w", seq, 9) for seq in (4, 5, 6, 7, *more["ready"])
        ),
        drops=(GroupBooked(group(10), "deadline: over"),),
        open_asks=(
            OpenAsk(
                group_id=group(11), task=task(11), num_samples=SIZE, is_eval=False, asked_step=2
            ),
            OpenAsk(group_id=group(12), task=task(12), num_samples=1, is_eval=True, asked_step=2),
        ),
        num_asked=13,
        num_drawn=13,
    )
    saved = LoopState(num_steps=2, step_of_version={0: 0, 2: 2}, ended={"r": [(0, 4)]})
    return plan_recovery(saved, history)


def test_a_restart_continues_with_what_earlier_incarnations_left() -> None:
    run = Run()
    left = run.lifecycle.resume(earlier(ready=(8, 9)))
    assert [(each.group_id, each.outcome, each.why) for each in left] == [
        (group(10), GroupOutcome.FAILED, "deadline: over")
    ]
    assert run.gone() == [0, 1, 2, 3, 10]
    # All but the evaluation count: in steps, ready and open.
    assert (run.staleness.running, run.staleness.capacity) == (7 * SIZE, 0)
    assert run.lifecycle.request(group(11)) == GroupRequest(task(11))
    assert run.lifecycle.request(group(12)) == GroupRequest(task(12), is_eval=True)
    assert run.lifecycle.num_untrainable == 0


def test_dropped_evaluation_groups_do_not_count_as_training_drops() -> None:
    plan = earlier(ready=())
    [left] = Run().lifecycle.resume(plan)
    assert left.outcome is GroupOutcome.FAILED
    plan = msgspec.structs.replace(plan, evals={"r": [(10, 11)]})
    [left] = Run().lifecycle.resume(plan)
    assert left.outcome is GroupOutcome.UNMEASURED


def test_step_is_retaken_with_its_own_groups_in_order() -> None:
    run = Run()
    plan = earlier(ready=())
    run.lifecycle.resume(plan)
    for step in plan.redo:
        for each in step.group_ids:
            run.come(each.seq, {0}, {2})
        assert taken(run.lifecycle.step(RetakeStep(step))) == [step]
        assert run.staleness.training == 2 * SIZE * (step.step - 1)
        left = run.lifecycle.step(StepTrained())
        assert [each.group_id for each in left if isinstance(each, GroupLeft)] == [*step.group_ids]


def test_step_is_retaken_without_unreadable_results() -> None:
    run = Run()
    [first, *_] = (plan := earlier(ready=())).redo
    run.lifecycle.resume(plan)
    run.fail(5)
    assert run.lifecycle.num_untrainable == 1
    run.come(4, {0}, {0})
    assert taken(run.lifecycle.step(RetakeStep(first))) == [StepTaken(2, (group(4),), 0)]
    assert run.lifecycle.step(RetakeStep(plan.redo[1])) == [], "nothing of it is here"


def test_no_step_is_taken_before_all_earlier_results_are_read() -> None:
    run = Run("drop")
    run.lifecycle.resume(msgspec.structs.replace(earlier(ready=(8, 9)), redo=()))
    run.lifecycle.step(VersionPublished(2))
    run.ask(20, 21)
    run.come(20, {2}, {2})
    run.come(21, {2}, {2})
    run.come(9, {2}, {2})
    assert run.lifecycle.step(TakeStep(3)) == []
    action = run.come(8)
    assert isinstance(action, GroupLeft)
    assert (action.outcome, run.lifecycle.num_untrainable) == (GroupOutcome.UNTRAINABLE, 0), (
        "it trained beside others"
    )
    assert taken(run.lifecycle.step(TakeStep(3)))


def test_task_of_an_earlier_result_comes_from_its_record() -> None:
    run = Run("requeue")
    run.lifecycle.resume(msgspec.structs.replace(earlier(ready=(8,)), redo=()))
    run.come(8, {0})
    run.lifecycle.step(TakeStep(5))
    assert run.lifecycle.next_again() == GroupRequest(task(8), Again(group(8), 1))


@pytest.mark.parametrize("policy", ["wait", "mask"])
def test_retaken_step_masks_the_tokens_that_it_masked_before(
    policy: StalePolicy,
) -> None:
    for oldest_step, stale in ((0, frozenset[int]()), (2, frozenset({0}))):
        run, plan = Run(policy), earlier(ready=())
        run.lifecycle.resume(plan)
        run.come(4, {0, 2})
        run.come(5, {0, 2})
        again = StepTaken(2, (group(5), group(4)), oldest_step)
        assert run.lifecycle.step(RetakeStep(again)) == [TrainGroups(again, stale)]
        assert run.staleness.histogram == {2 - oldest_step: 2}, "nor counts it their ages"


@pytest.mark.parametrize(("policy", "oldest_step"), [("wait", 0), ("mask", 1)])
def test_retaken_step_of_an_earlier_release_masks_by_the_settings(
    policy: StalePolicy, oldest_step: int
) -> None:
    fields = msgspec.to_builtins(StepTaken(2, (group(5), group(4)), 7))
    taken = decode_entry([msgspec.msgpack.encode(fields[:-1])])
    assert isinstance(taken, StepTaken)
    run = Run(policy)
    run.lifecycle.resume(earlier(ready=()))
    run.come(4, {0, 2})
    run.come(5, {0, 2})
    [train] = run.lifecycle.step(RetakeStep(taken))
    stale = frozenset({0} if policy == "mask" else ())
    assert train == TrainGroups(StepTaken(2, (group(5), group(4)), oldest_step), stale)


def test_groups_dropped_by_earlier_incarnations_stay_dropped_and_are_requested_again_if_due() -> (
    None
):
    run = Run("drop")  # whatever the settings are now
    plan = earlier(ready=())
    run.lifecycle.resume(msgspec.structs.replace(plan, evals={"r": [(23, 24)]}))
    fates = []
    for seq, num_rollouts, times in ((20, 4, 2), (21, 4, 0), (22, 0, 0), (23, 1, 0)):
        entry = GroupParted(group(seq), f"why {seq}", 3, times)
        [leave] = run.lifecycle.step(DropReplayed(entry, task(seq), num_rollouts))
        assert isinstance(leave, GroupLeft)
        fates.append((leave.outcome, leave.why))
    assert fates == [
        (GroupOutcome.STALE, "why 20"),
        (GroupOutcome.STALE, "why 21"),
        (GroupOutcome.UNTRAINABLE, ""),
        (GroupOutcome.MEASURED, ""),
    ]
    assert run.gone()[-4:] == [20, 21, 22, 23]
    assert run.lifecycle.num_untrainable == 0
    assert run.lifecycle.next_again() == GroupRequest(task(20), Again(group(20), 2))
    assert run.lifecycle.next_again() is None


def test_checkpoint_holds_the_tasks_to_request_again_and_the_repeated_open_ones() -> None:
    run, first, second = Run("requeue"), Again(group(70), 1), Again(group(71), 3)
    plan = earlier(ready=(8,))
    waiting = (PendingTask(task(70), first),)
    run.lifecycle.resume(
        msgspec.structs.replace(plan, waiting=waiting, again={group(8): Again(group(72), 1)})
    )
    run.ask(20)
    run.ask(21, again=second)
    # Of what has a result, the journal has the ask.
    assert run.lifecycle.to_ask_again == (*waiting, PendingTask(task(21), second))
    assert run.lifecycle.request(group(8)) == GroupRequest(UNKNOWN, Again(group(72), 1))
    run.come(21, {0})
    assert run.lifecycle.next_again() == GroupRequest(task(70), first)
    assert not run.lifecycle.to_ask_again
