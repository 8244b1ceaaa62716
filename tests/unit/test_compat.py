"""The names of AReaL do what its users expect, where that was right.

The promises about staleness are those of AReaL's published tests; the wording is ours.
"""

import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from rollmesh.compat import (
    ArealStalenessManager,
    clear_fetch_buffer,
    clear_node,
    collect_shards,
    fetch_buffer_stats,
    flatten_shard_ids,
    storage_stats,
)
from rollmesh.core.errors import OwnerGone, TensorError
from tests.unit.tensors.relaying_peers import Mesh, process_of


class Version:
    def __init__(self, policy_version: int = 0) -> None:
        self.now = policy_version

    def get_version(self) -> int:
        return self.now


def known(
    max_concurrent: int = 100, batch: int = 16, max_staleness: int = 2, policy_version: int = 0
) -> ArealStalenessManager:
    return ArealStalenessManager(Version(policy_version), max_concurrent, batch, max_staleness)


def times(num: int, *calls: Callable[[], None]) -> None:
    for _ in range(num):
        for call in calls:
            call()


def stats(manager: ArealStalenessManager) -> tuple[int, int, int, int]:
    found = manager.get_stats()
    return found.enqueued, found.running, found.accepted, found.rejected


def run(manager: ArealStalenessManager, num: int) -> None:
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
    manager = ArealStalenessManager(clock, 1000, 4, 1)
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
    calls = [(enqueue, submit, accept), (enqueue, submit, reject), (enqueue, submit)]
    threads = [threading.Thread(target=times, args=(500, *each)) for each in calls * 2]
    threads += [threading.Thread(target=times, args=(500, manager.get_capacity))] * 1
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert stats(manager) == (0, 1000, 1000, 1000)


def test_a_slow_consumer_stops_the_burst() -> None:
    clock = Version()
    manager = ArealStalenessManager(clock, 1000, 4, 1)
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
    manager = ArealStalenessManager(clock, 100, 4, 1)
    run(manager, 1)
    for clock.now in range(1, 101):
        assert manager.get_capacity() >= 4
        run(manager, 4)
        times(4, manager.on_rollout_accepted)
    assert manager.get_stats().running == 1


def test_it_drifts_where_a_step_consumes_less_than_a_batch() -> None:
    """Fifty steps that train what was accepted of sixteen, half of it: room for 448, and not 48."""
    clock = Version()
    manager = ArealStalenessManager(clock, 10_000, 16, 2)
    for clock.now in range(1, 51):
        run(manager, 16)
        times(8, manager.on_rollout_accepted, manager.on_rollout_rejected)
    assert manager.get_capacity() == 448


NONE = {"num_tensors": 0, "total_bytes": 0}


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[Mesh]:
    made = Mesh(tmp_path)
    yield made
    made.close()


def test_shards_are_collected_by_owner_and_once(mesh: Mesh) -> None:
    first, second = mesh.process(7001), mesh.process(7002)
    a, b = first.remotize([torch.ones(1), torch.ones(2)])
    c = second.remotize(torch.ones(3))
    nested = {"x": [b, a], "y": (c, {"again": b}), "z": [None, 1.0]}
    assert collect_shards(nested) == {
        "tcp://127.0.0.1:7001": [b.shard_id, a.shard_id],
        "tcp://127.0.0.1:7002": [c.shard_id],
    }
    assert flatten_shard_ids(nested) == [b.shard_id, a.shard_id, c.shard_id]
    assert flatten_shard_ids([nested, nested]) == flatten_shard_ids(nested)


def test_what_holds_no_handle_has_no_shards() -> None:
    assert collect_shards([torch.ones(1), {"x": None}]) == {}
    assert flatten_shard_ids([]) == []


def test_stats_count_bytes_on_both_sides(mesh: Mesh) -> None:
    owner, consumer = mesh.process(7001), mesh.consumer()
    with process_of(owner):
        assert storage_stats() == fetch_buffer_stats() == NONE
        handles = owner.remotize([torch.ones(8, 512)[:, :2], torch.zeros(4, dtype=torch.bfloat16)])
        assert storage_stats() == {"num_tensors": 2, "total_bytes": 64 + 8}
        assert fetch_buffer_stats() == NONE
    with process_of(consumer):
        consumer.localize(handles)
        assert fetch_buffer_stats() == {"num_tensors": 2, "total_bytes": 64 + 8}
        assert storage_stats() == NONE


def test_clearing_the_buffer_is_selective(mesh: Mesh) -> None:
    owner, consumer = mesh.process(7001), mesh.consumer()
    handles = owner.remotize([torch.ones(1) for _ in range(4)])
    with process_of(consumer):
        consumer.localize(handles)
        assert clear_fetch_buffer([]) == 0
        assert fetch_buffer_stats()["num_tensors"] == 4
        assert clear_fetch_buffer([handles[1].shard_id, 12345]) == 1
        assert fetch_buffer_stats()["num_tensors"] == 3
        assert clear_fetch_buffer(None) == 3
        assert fetch_buffer_stats() == NONE
        assert clear_fetch_buffer() == 0


def test_clearing_a_node_clears_here_and_there(mesh: Mesh) -> None:
    owner, consumer = mesh.process(7001), mesh.consumer()
    handles = owner.remotize([torch.ones(1) for _ in range(4)])
    with process_of(consumer):
        consumer.localize(handles)
        for node, ids in collect_shards(handles[:3]).items():
            assert clear_node(node, ids) == 3
        assert fetch_buffer_stats()["num_tensors"] == 1
    with process_of(owner):
        assert storage_stats()["num_tensors"] == 1
        assert clear_node(handles[3].owner, [handles[3].shard_id]) == 1
        assert storage_stats() == NONE


def test_a_failed_clear_is_not_swallowed(mesh: Mesh) -> None:
    owner, consumer = mesh.process(7001), mesh.consumer()
    handle = owner.remotize(torch.ones(1))
    mesh.backend.stores.clear()
    with process_of(consumer), pytest.raises(OwnerGone, match=handle.owner):
        clear_node(handle.owner, [handle.shard_id])


def test_who_clears_handles_is_told_to_clear_ids(mesh: Mesh) -> None:
    owner = mesh.process(7001)
    handles: Any = owner.remotize([torch.ones(1)])
    with process_of(owner):
        for clear in (clear_fetch_buffer, partial(clear_node, handles[0].owner)):
            with pytest.raises(TensorError, match=r"flatten_shard_ids\(handles\)"):
                clear(handles)
        assert storage_stats()["num_tensors"] == 1
