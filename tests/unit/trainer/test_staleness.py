"""The age bound holds in any order of events, and pacing neither starves nor bursts."""

import sys
import threading
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollmesh.core.config import StalenessFormula, StalePolicy
from rollmesh.trainer.staleness import (
    Action,
    BatchTaken,
    GroupAdmitted,
    GroupArrived,
    GroupEnded,
    GroupStale,
    StalenessManager,
    StalenessSettings,
    StalenessState,
    StepPublished,
    StepRetaken,
    TakeBatch,
)
from tests.unit.trainer.staleness_run import GROUP, Run, Sizes, group, manager, sizes


def ask(m: StalenessManager, *seqs: int) -> None:
    for seq in seqs:
        m.step(GroupAdmitted(group(seq), GROUP))


def arrive(m: StalenessManager, seq: int, oldest_step: int, num: int = GROUP) -> None:
    m.step(GroupArrived(group(seq), num, oldest_step, (oldest_step,) * num))


def taken(actions: Sequence[Action]) -> list[int]:
    return [g.seq for each in actions if isinstance(each, BatchTaken) for g in each.group_ids]


def test_capacity_at_start_is_one_batch_per_step_of_the_bound() -> None:
    assert manager(batch=4, max_staleness=2).capacity == 12
    assert manager(batch=4, max_staleness=0).capacity == 4


def test_capacity_after_recovery_does_not_grow_with_the_step() -> None:
    limits = manager(batch=4, max_staleness=2).settings
    assert StalenessManager(limits, published_step=268).capacity == 12


def test_ready_groups_of_a_journal_count_at_once() -> None:
    limits = manager(batch=8, max_staleness=2).settings
    m = StalenessManager(limits, 268, policy_version=300)
    m.step(GroupAdmitted(group(0), GROUP, asked_step=266))
    arrive(m, 0, 266)
    ask(m, 1)
    assert (m.ready, m.running, m.capacity) == (4, 4, 16)
    assert m.oldest_version == 300, "names of steps before the recovery are unknown"


def test_group_requested_again_is_counted_once() -> None:
    m = manager()
    ask(m, 0, 0)
    assert m.running == GROUP
    arrive(m, 0, 0)
    ask(m, 0)
    assert (m.running, m.ready) == (0, GROUP)


def test_repeated_arrival_changes_nothing() -> None:
    m = manager(max_staleness=9)
    ask(m, 0, 1)
    arrive(m, 0, 5)
    arrive(m, 0, 3)
    arrive(m, 1, 5)
    assert taken(m.step(TakeBatch(6))) == [0, 1]
    arrive(m, 0, 5)
    assert (m.ready, m.training, m.histogram) == (0, 2 * GROUP, {1: 2 * GROUP})


def test_group_of_an_earlier_incarnation_keeps_its_age() -> None:
    m = StalenessManager(manager(batch=GROUP, max_staleness=2).settings, published_step=268)
    m.step(GroupAdmitted(group(0), GROUP, asked_step=266))
    ask(m, 1)
    arrive(m, 1, 268)
    assert m.step(TakeBatch(268)) == [], "the next step could not take it any more"


def test_capacity_is_limited_by_running() -> None:
    m = manager(batch=16, max_staleness=2, max_concurrent=20)
    ask(m, 0, 1, 2)
    assert (m.running, m.capacity) == (12, 8)


def test_training_rollouts_count_until_their_step_is_published() -> None:
    m = manager()
    ask(m, 0, 1, 2, 3)
    for seq in range(4):
        arrive(m, seq, 0)
    assert m.capacity == 0
    assert taken(m.step(TakeBatch(0))) == [0, 1]
    assert (m.training, m.ready, m.consumed, m.capacity) == (8, 8, 0, 0)
    m.step(StepPublished(1))
    assert (m.training, m.ready, m.consumed, m.capacity) == (0, 8, 8, 8)


def test_groups_that_lost_siblings_fill_a_batch_together() -> None:
    m = manager()
    ask(m, 0, 1, 2)
    arrive(m, 0, 0, num=3)
    arrive(m, 1, 0, num=4)
    assert m.step(TakeBatch(0)) == []
    arrive(m, 2, 0, num=1)
    assert taken(m.step(TakeBatch(0))) == [0, 1, 2]


def test_groups_beyond_a_batch_do_not_reduce_the_next_capacity() -> None:
    m = manager(batch=4, max_staleness=1)
    ask(m, 0, 1, 2)
    for seq in (0, 1, 2):
        arrive(m, seq, 0, num=3)
    assert taken(m.step(TakeBatch(0))) == [0, 1]
    assert (m.training, m.ready, m.capacity) == (6, 3, 1)


def test_no_group_is_requested_that_would_begin_too_old() -> None:
    m = manager(batch=4, max_staleness=1)
    for step in (0, 1):
        ask(m, step)
        arrive(m, step, 0, num=1)
        assert taken(m.step(TakeBatch(step, num_rollouts=1))) == [step]
    assert (m.training, m.capacity) == (2, 0), "by the formula there would be room for six"
    m.step(StepPublished(1))
    assert m.capacity == 7


def test_pacing_follows_a_larger_batch_size() -> None:
    m = manager(batch=4, max_staleness=0)
    ask(m, 0)
    arrive(m, 0, 0)
    assert (m.step(TakeBatch(0, num_rollouts=8)), m.capacity) == ([], 4)
    ask(m, 1)
    arrive(m, 1, 0)
    assert taken(m.step(TakeBatch(0, num_rollouts=8))) == [0, 1]
    m.step(StepPublished(1))
    ask(m, 2)
    arrive(m, 2, 1, num=1)
    assert taken(m.step(TakeBatch(1, num_rollouts=1))) == [2]
    m.step(StepPublished(2))
    assert m.capacity == 4


def test_oldest_group_is_taken_first() -> None:
    m = manager(batch=GROUP, max_staleness=3)
    ask(m, 0)
    m.step(StepPublished(1))
    ask(m, 1)
    arrive(m, 1, 1)
    arrive(m, 0, 0)
    assert taken(m.step(TakeBatch(1))) == [0]


def test_a_step_takes_all_that_the_next_could_not_take() -> None:
    m = manager(batch=GROUP, max_staleness=1)
    ask(m, 0, 1)
    m.step(StepPublished(1))
    arrive(m, 0, 0)
    arrive(m, 1, 0)
    assert taken(m.step(TakeBatch(1))) == [0, 1]


def test_step_waits_for_a_straggler_that_the_next_step_could_not_take() -> None:
    m = manager(batch=GROUP)
    ask(m, 0, 1)
    arrive(m, 1, 0)
    assert taken(m.step(TakeBatch(0))) == [1]
    m.step(StepPublished(1))
    ask(m, 2)
    arrive(m, 2, 1)
    assert m.step(TakeBatch(1)) == []
    arrive(m, 0, 0)
    assert taken(m.step(TakeBatch(1))) == [0]


def test_step_does_not_wait_for_a_rollout_that_is_too_old() -> None:
    m = manager(batch=GROUP)
    ask(m, 0)
    m.step(StepPublished(2))
    ask(m, 1)
    arrive(m, 1, 2)
    assert taken(m.step(TakeBatch(2))) == [1]


@pytest.mark.parametrize("policy", ["mask", "drop", "requeue"])
def test_other_stale_policies_wait_for_no_rollout(policy: StalePolicy) -> None:
    m = manager(batch=GROUP, policy=policy)
    ask(m, 0)
    m.step(StepPublished(1))
    ask(m, 1)
    arrive(m, 1, 1)
    assert taken(m.step(TakeBatch(1))) == [1]


@pytest.mark.parametrize("policy", ["wait", "mask", "drop", "requeue"])
def test_group_past_the_bound_leaves_with_its_age(policy: StalePolicy) -> None:
    m = manager(batch=GROUP, policy=policy)
    ask(m, 0)
    arrive(m, 0, 0)
    assert m.step(TakeBatch(5)) == [GroupStale(group(0), 5)]
    assert m.ready == 0


def test_masked_rollouts_that_keep_a_token_train_at_the_bound() -> None:
    m = manager(batch=2, policy="mask")
    ask(m, 0)
    m.step(GroupArrived(group(0), 3, oldest_step=0, newest_steps=(2, 4, 5)))
    assert m.step(TakeBatch(5)) == [BatchTaken(5, (group(0),), oldest_step=4)]
    assert (m.training, m.histogram) == (2, {1: 2})


def test_redone_step_has_its_groups_whatever_their_age() -> None:
    m = manager()
    ask(m, 0, 1)
    arrive(m, 0, 0)
    m.step(StepRetaken(7, (group(0), group(1), group(9))))
    assert (m.running, m.ready, m.training) == (0, 0, 8)
    m.step(StepPublished(8))
    assert (m.training, m.consumed) == (0, 8)


def test_redone_step_counts_the_rollouts_that_masking_left() -> None:
    def arrived() -> StalenessManager:
        m = manager(batch=2, policy="mask")
        ask(m, 0, 1)
        m.step(GroupArrived(group(0), 3, oldest_step=0, newest_steps=(2, 4, 5)))
        m.step(GroupArrived(group(1), 4, oldest_step=5, newest_steps=(5,) * 4))
        return m

    first, again = arrived(), arrived()
    [taken] = first.step(TakeBatch(5))
    assert isinstance(taken, BatchTaken)
    again.step(StepRetaken(5, taken.group_ids, taken.oldest_step))
    assert again.state == first.state
    assert again.histogram == {1: 2}
    for m in (first, again):
        m.step(StepPublished(6))
    assert (again.consumed, first.consumed) == (2, 2)


def test_counts_continue_from_a_checkpoint() -> None:
    m = manager()
    ask(m, 0, 1, 2)
    for seq in range(3):
        arrive(m, seq, 0)
    m.step(TakeBatch(0))
    again = StalenessManager(m.settings, published_step=1, restored=m.state)
    assert (again.consumed, again.histogram, again.training) == (8, {0: 8}, 0)
    assert again.capacity == 16


def test_oldest_version_is_that_of_the_oldest_open_token() -> None:
    m = manager(max_staleness=9)
    m.step(StepPublished(0, policy_version=3))
    oldest = [m.oldest_version]
    ask(m, 0)
    m.step(StepPublished(4, policy_version=8))
    m.step(StepPublished(6, policy_version=9))
    ask(m, 1)
    oldest.append(m.oldest_version)
    arrive(m, 0, 5)  # of the step before the newest that is published: 8 was the newest till then
    oldest.append(m.oldest_version)
    m.step(GroupEnded(group(0)))
    assert [*oldest, m.oldest_version] == [None, 3, 8, 9]


@pytest.mark.parametrize("event", [GroupArrived(group(9), 4, 0), GroupEnded(group(9))])
def test_unknown_groups_change_nothing(event: GroupArrived | GroupEnded) -> None:
    m = manager()
    assert m.step(event) == []
    assert m.state == StalenessState(capacity=16)


@pytest.fixture
def hasty_threads() -> Iterator[None]:
    """Make threads switch as often as possible."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("hasty_threads")
def test_public_state_is_consistent_from_any_thread() -> None:
    m = manager(batch=1000, max_staleness=0, max_concurrent=1000)
    seen, is_over = list[StalenessState](), threading.Event()

    def look() -> None:
        while not is_over.is_set():
            seen.append(m.state)

    looker = threading.Thread(target=look)
    looker.start()
    while looker.is_alive() and len(seen) < 30_000:
        ask(m, 0)
        arrive(m, 0, 0)
        m.step(GroupEnded(group(0)))
    is_over.set()
    looker.join()
    assert len(seen) >= 30_000
    assert all(each.capacity + each.running + each.ready == 1000 for each in seen)


@pytest.mark.parametrize("formula", ["under_way", "known"])
@pytest.mark.parametrize("policy", ["wait", "mask", "drop", "requeue"])
@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 2**32), sizes=sizes())
def test_age_bound_holds_and_training_never_starves(
    policy: StalePolicy, formula: StalenessFormula, seed: int, sizes: Sizes
) -> None:
    run = Run(policy, seed, sizes, formula)
    for _ in range(200):
        run.go_on()
        run.check()
    # However it stands there: once every straggler has ended, be it by its deadline, steps go on.
    goal, num_rounds = run.step + 5, 0
    while run.step < goal:
        num_rounds += 1
        assert num_rounds < 500, "nothing moves any more"
        run.publish()
        run.ask()
        for group_id in sorted(run.running):
            run.end(group_id)
        run.take()
        run.check()
    assert policy != "wait" or not run.stale, "pacing lets nothing grow too old"


@pytest.mark.parametrize(("formula", "capacity"), [("under_way", 48), ("known", 448)])
def test_capacity_drifts_only_by_the_known_formula(
    formula: StalenessFormula, capacity: int
) -> None:
    """Fifty steps that train the accepted half of four groups."""
    m = manager(batch=16, max_staleness=2, max_concurrent=10_000, formula=formula)
    for step in range(50):
        ask(m, *range(4 * step, 4 * step + 4))
        for seq in (4 * step, 4 * step + 1):
            arrive(m, seq, step)
            m.step(GroupEnded(group(seq + 2)))
        assert len(taken(m.step(TakeBatch(step, num_rollouts=8)))) == 2
        m.step(StepPublished(step + 1))
    assert (m.capacity, m.consumed) == (capacity, 400)


def test_known_formula_does_not_burst_after_a_recovery() -> None:
    pace = StalenessSettings(batch=4, max_staleness=2, max_concurrent=10_000, formula="known")
    assert StalenessManager(pace, published_step=268).capacity == 12
    restored = StalenessState(consumed=4 * 260)
    assert StalenessManager(pace, 268, 300, restored).capacity == 12
