"""The known formula admits as its users know it, by the names that they know.

The promises are those of AReaL's published tests of its StalenessManager; the words are ours.
"""

import threading
from collections.abc import Callable

import pytest

from rollmesh.trainer.compat import KnownStaleness


class Version:
    def __init__(self, policy_version: int = 0) -> None:
        self.now = policy_version

    def get_version(self) -> int:
        return self.now


def known(
    max_concurrent: int = 100, batch: int = 16, max_staleness: int = 2, policy_version: int = 0
) -> KnownStaleness:
    return KnownStaleness(Version(policy_version), max_concurrent, batch, max_staleness)


def times(num: int, *deeds: Callable[[], None]) -> None:
    for _ in range(num):
        for deed in deeds:
            deed()


def stats(manager: KnownStaleness) -> tuple[int, int, int, int]:
    found = manager.get_stats()
    return found.enqueued, found.running, found.accepted, found.rejected


def run(manager: KnownStaleness, num: int) -> None:
    times(num, manager.on_rollout_enqueued, manager.on_rollout_submitted)


def test_running_rollouts_limit_what_is_submitted() -> None:
    manager = known(max_concurrent=10, batch=100)
    assert manager.get_capacity() == 10
    run(manager, 7)
    assert manager.get_capacity() == 3


def test_staleness_limits_what_is_submitted() -> None:
    manager = known(max_concurrent=1000, batch=4, max_staleness=1)
    assert manager.get_capacity() == 8
    run(manager, 5)
    times(3, manager.on_rollout_accepted)
    assert manager.get_capacity() == 3


def test_each_version_makes_room_for_a_batch() -> None:
    clock = Version()
    manager = KnownStaleness(clock, 1000, 4, 1)
    capacities = []
    for clock.now in range(4):
        capacities.append(manager.get_capacity())
    assert capacities == [8, 12, 16, 20]
    clock.now = 10**6
    assert manager.get_capacity() == 1000


def test_capacity_can_be_negative() -> None:
    manager = known(max_concurrent=2, batch=1, max_staleness=0)
    run(manager, 5)
    assert manager.get_capacity() == -4


def test_bounds_below_one_count_as_one() -> None:
    assert known(max_concurrent=0, batch=10).get_capacity() == 1
    assert known(batch=0, max_staleness=0).get_capacity() == 1
    assert known(batch=0, max_staleness=3).get_pending_limit() == 0


def test_a_batch_for_each_step_of_the_bound_may_wait() -> None:
    assert known(batch=16, max_staleness=2).get_pending_limit() == 48


def test_no_staleness_is_one_batch_at_a_time() -> None:
    manager = known(batch=4, max_staleness=0)
    run(manager, 4)
    times(4, manager.on_rollout_accepted)
    assert manager.get_capacity() == 0


def test_what_is_rejected_makes_room() -> None:
    manager = known(batch=4, max_staleness=0)
    run(manager, 4)
    times(4, manager.on_rollout_rejected)
    assert (manager.get_capacity(), stats(manager)) == (4, (0, 0, 0, 4))


def test_counts_are_a_copy() -> None:
    manager = known()
    manager.get_stats().running = 99
    assert stats(manager) == (0, 0, 0, 0)


def test_counts_add_up_over_threads() -> None:
    manager = known(max_concurrent=10**6, batch=10**6)
    enqueue, submit = manager.on_rollout_enqueued, manager.on_rollout_submitted
    accept, reject = manager.on_rollout_accepted, manager.on_rollout_rejected
    deeds = [(enqueue, submit, accept), (enqueue, submit, reject), (enqueue, submit)]
    threads = [threading.Thread(target=times, args=(500, *each)) for each in deeds * 2]
    threads += [threading.Thread(target=times, args=(500, manager.get_capacity))] * 1
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert stats(manager) == (0, 1000, 1000, 1000)


def test_a_slow_consumer_stops_the_burst() -> None:
    clock = Version()
    manager = KnownStaleness(clock, 1000, 4, 1)
    num_submitted = 0
    for clock.now in range(3):
        while manager.get_capacity() > 0:
            run(manager, 1)
            manager.on_rollout_accepted()
            num_submitted += 1
    assert num_submitted == 16


@pytest.mark.parametrize("policy_version", [0, 5, 10, 50])
def test_recovery_has_room_for_a_batch_per_step_of_the_bound(policy_version: int) -> None:
    manager = known(batch=16, policy_version=policy_version)
    manager.on_version_recovered(policy_version)
    assert manager.get_capacity() == 48
    assert stats(manager) == (0, 0, 16 * policy_version, 0)


@pytest.mark.parametrize("num_running", [1, 5, 16])
def test_recovery_keeps_what_runs(num_running: int) -> None:
    manager = known(batch=16, policy_version=10)
    run(manager, num_running)
    manager.on_version_recovered(10)
    assert manager.get_capacity() == 48 - num_running
    assert stats(manager)[1] == num_running


def test_recovery_at_step_268_admits_twelve_and_not_a_thousand() -> None:
    manager = known(max_concurrent=10_000, batch=4, policy_version=268)
    assert manager.get_capacity() == 1084
    manager.on_version_recovered(268)
    assert manager.get_capacity() == 12


def test_it_bounds_counts_and_no_age() -> None:
    """A straggler may be as old as the run is long (docs/explanation/staleness.md)."""
    clock = Version()
    manager = KnownStaleness(clock, 100, 4, 1)
    run(manager, 1)
    for clock.now in range(1, 101):
        assert manager.get_capacity() >= 4
        run(manager, 4)
        times(4, manager.on_rollout_accepted)
    assert manager.get_stats().running == 1


def test_it_drifts_where_a_step_consumes_less_than_a_batch() -> None:
    """Fifty steps that train what was accepted of sixteen, half of it: room for 448, and not 48."""
    clock = Version()
    manager = KnownStaleness(clock, 10_000, 16, 2)
    for clock.now in range(1, 51):
        run(manager, 16)
        times(8, manager.on_rollout_accepted, manager.on_rollout_rejected)
    assert manager.get_capacity() == 448
