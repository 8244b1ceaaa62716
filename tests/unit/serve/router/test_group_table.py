"""The group table: invariants under lost messages, tombstones, deadlines, timers and flat
memory."""

import functools
import gc
import math
import sys
from collections import Counter
from operator import attrgetter

import msgspec
import pytest

from benchmarks.scale import SyntheticTraffic
from rollmesh.core.ids import GroupId
from rollmesh.serve.router.group_table import (
    FAILURE_NOTES,
    MAX_NOTES,
    SPARE_ENTRIES,
    Deadlines,
    Takeover,
    TakeoverOutcome,
    TimerHeap,
    Tombstones,
    left_s,
)
from rollmesh.serve.router.groups import MAX_ENDS, Group
from rollmesh.serve.router.status import cache_entries, entries, held
from rollmesh.wire.frames import Packet, encode
from rollmesh.wire.machine import Received, Ticked
from rollmesh.wire.messages import (
    CancelRun,
    GroupFailed,
    GroupMoved,
    GroupState,
    HeldGroup,
    RunGroup,
)
from tests.unit.serve.router.hostile_peers import CLIENTS, WORKERS, HostilePeer
from tests.unit.serve.router.lossy_network import NUM_GROUPS, LossyNetwork
from tests.unit.serve.router.scripted_router import (
    SETTLED_S,
    ScriptedRouter,
    ask,
    group,
    hello,
    only,
    running,
)

SEEDS = range(40)
HOSTILE_SEEDS = range(150)
NUM_EVENTS = 300


@functools.cache
def run_network(seed: int) -> LossyNetwork:
    """Run the network for a minute with faults, then for two minutes without."""
    network = LossyNetwork(seed)
    network.run(chaos_s=60.0, calm_s=120.0)
    return network


@pytest.mark.parametrize("seed", SEEDS)
def test_every_request_ends_once_though_messages_and_peers_are_lost(seed: int) -> None:
    network = run_network(seed)
    assert network.num_asked == NUM_GROUPS
    assert network.open == {}
    assert set(network.ends.values()) == {1}
    assert network.group_scheduler.table.groups == {}
    assert not any(
        GroupId("r1", seq) in network.group_scheduler.table.tombstones for seq in range(NUM_GROUPS)
    )
    assert sum(worker.load for worker in network.group_scheduler.membership.workers) == 0


def test_the_random_faults_reach_every_kind_of_event() -> None:
    num: Counter[str] = Counter()
    for seed in SEEDS:
        network = run_network(seed)
        num.update(network.group_scheduler.table.num)
        num["restarts"] += network.num_restarts
    corners = ("workers_lost", "workers_revived", "requeues", "returns", "claims", "restarts")
    assert not [corner for corner in corners if not num[corner]]


def test_invariants_hold_for_any_message_of_a_peer() -> None:
    num: Counter[str] = Counter()
    for seed in HOSTILE_SEEDS:
        peer, network = HostilePeer(seed), LossyNetwork(seed)
        for _ in range(NUM_EVENTS):
            event: Received | Ticked = Ticked()
            if peer.rng.random() < 0.25:
                network.now_s += peer.rng.choice((0.5, 0.5, 0.5, 1.0, 4.0, 30.0))
            else:
                route = peer.rng.choice((*WORKERS, *CLIENTS, "other")).encode()
                event = Received(route, peer.message(), b"task")
            for send in network.group_scheduler.step(event, network.now_s):
                encode(Packet(send.message, "i1", send.body))
            network.check()
        num.update(network.group_scheduler.table.num)
    corners = ("workers_lost", "workers_revived", "requeues", "returns", "claims", "refusals")
    assert not [corner for corner in corners if not num[corner]]


def done(seq: int) -> GroupMoved:
    return GroupMoved(GroupId("r1", seq), GroupState.DONE, 1, "")


def test_tombstones_are_bounded() -> None:
    tombstones = Tombstones(note_s=3.0)
    for seq in range(MAX_NOTES + 10):
        tombstones.add(done(seq), 1, 0.0)
    kept = [seq for seq in range(MAX_NOTES + 10) if GroupId("r1", seq) in tombstones]
    assert kept == list(range(10, MAX_NOTES + 10))
    tombstones.tear(3.0)
    assert not any(GroupId("r1", seq) in tombstones for seq in kept)


def test_failures_are_remembered_longer_than_other_ends() -> None:
    tombstones = Tombstones(note_s=3.0)
    tombstones.add(done(1), 1, 0.0)
    tombstones.add(GroupFailed(GroupId("r1", 2), "quarantined: it killed"), 3, 0.0)
    tombstones.tear(3.0)
    assert [GroupId("r1", seq) in tombstones for seq in (1, 2)] == [False, True]
    tombstones.tear(3.0 * FAILURE_NOTES)
    assert GroupId("r1", 2) not in tombstones


def waiting(seq: int) -> Group:
    return Group(GroupId("r1", seq), "guess", 4, "tcp://sink", "c")


def test_deadlines_are_due_in_order_and_once() -> None:
    groups = {each.group_id: each for each in map(waiting, range(3))}
    deadlines = Deadlines(groups)
    for each, deadline_s in zip(groups.values(), (3.0, 1.0, 9.0), strict=True):
        deadlines.set(each, deadline_s, now_s=0.0)
    assert [each.group_id.seq for each in deadlines.take_overdue(5.0)] == [1, 0]
    assert deadlines.take_overdue(5.0) == []


def test_a_group_that_has_ended_is_not_overdue() -> None:
    waits = waiting(1)
    groups = {waits.group_id: waits}
    deadlines = Deadlines(groups)
    deadlines.set(waits, 1.0, now_s=0.0)
    groups.clear()
    assert deadlines.take_overdue(5.0) == []


@pytest.mark.parametrize("deadline_s", [0.0, -1.0, math.nan, math.inf])
def test_an_invalid_deadline_sets_nothing(deadline_s: float) -> None:
    waits = waiting(1)
    Deadlines({waits.group_id: waits}).set(waits, deadline_s, now_s=0.0)
    assert left_s(waits, 0.0) == 0.0


# as stored by the scheduler


def test_a_group_ends_at_its_deadline_wherever_it_is(router: ScriptedRouter) -> None:
    router.worker("w0")
    for seq in (1, 2, 3):
        router.asks(msgspec.structs.replace(ask(seq), deadline_s=5.0))
    assert router.state(3) is GroupState.QUEUED
    assert not only(router.advance(4.5, "w0", "c"), GroupFailed)
    sends = router.advance(0.5, "w0", "c")
    reasons = [failed.reason for failed in only(sends, GroupFailed)]
    assert len(reasons) == 3
    assert all(reason.startswith("deadline: ") for reason in reasons)
    assert {cancel.group_id for cancel in only(sends, CancelRun, "w0")} >= {group(1), group(2)}
    assert router.is_empty()


def test_a_worker_receives_the_rest_of_the_deadline(router: ScriptedRouter) -> None:
    router.asks(msgspec.structs.replace(ask(1), deadline_s=5.0))
    router.advance(2, "c")
    [run] = only(router.worker("w0"), RunGroup)
    assert run.deadline_s == pytest.approx(3.0)


def test_a_late_duplicate_of_a_request_does_not_extend_its_deadline(router: ScriptedRouter) -> None:
    router.asks(msgspec.structs.replace(ask(1), deadline_s=5.0))
    router.advance(4, "c")
    router.asks(msgspec.structs.replace(ask(1), deadline_s=5.0))
    assert only(router.advance(1, "c"), GroupFailed)


def test_a_request_after_its_deadline_fails_at_once(router: ScriptedRouter) -> None:
    [failed] = only(router.asks(msgspec.structs.replace(ask(1), deadline_s=-1.0)), GroupFailed)
    assert failed.reason.startswith("deadline: ")


@pytest.fixture
def timers() -> TimerHeap:
    return TimerHeap(attrgetter("repeat_s"))


def put(timers: TimerHeap, seq: int, at_s: float) -> Group:
    group = Group(GroupId("r1", seq), "guess", 4, "tcp://sink", "c", repeat_s=at_s)
    timers.put(group)
    return group


def due(timers: TimerHeap, now_s: float) -> list[int]:
    return [group.group_id.seq for group in timers.take_due(now_s)]


def test_groups_are_due_in_order_and_once(timers: TimerHeap) -> None:
    for seq, at_s in ((0, 3.0), (1, 1.0), (2, 9.0)):
        put(timers, seq, at_s)
    assert due(timers, 5.0) == [1, 0]
    assert due(timers, 5.0) == []
    assert due(timers, 9.0) == [2]


@pytest.mark.parametrize("newest_s", [1.0, 7.0])
def test_a_group_is_due_only_at_its_newest_time(timers: TimerHeap, newest_s: float) -> None:
    group = put(timers, 0, 3.0)
    group.repeat_s = newest_s
    timers.put(group)
    found = [now_s for now_s in (0.5, 2.0, 4.0, 8.0) if due(timers, now_s)]
    assert found == [min(now_s for now_s in (2.0, 4.0, 8.0) if now_s >= newest_s)]


def test_a_group_postponed_while_it_is_due_is_not_due_again(timers: TimerHeap) -> None:
    put(timers, 0, 1.0)
    seen = []
    for entry in timers.take_due(5.0):
        seen.append(entry.group_id.seq)
        entry.repeat_s = 6.0
        timers.put(entry)
    assert seen == [0]
    assert due(timers, 6.0) == [0]


def test_entries_that_are_never_due_are_removed(timers: TimerHeap) -> None:
    for seq in range(5 * SPARE_ENTRIES):
        put(timers, seq, 1e6).repeat_s = math.inf
    assert len(timers) <= SPARE_ENTRIES + 1


def test_removal_keeps_all_entries_that_are_still_due(timers: TimerHeap) -> None:
    for seq in range(5 * SPARE_ENTRIES):
        entry = put(timers, seq, 1e6 + seq)
        if seq % 2:
            entry.repeat_s = math.inf
    assert due(timers, 1e9) == list(range(0, 5 * SPARE_ENTRIES, 2))


NUM_AT_ONCE = 10_000
"""Number of concurrent groups; `python -m benchmarks.scale` runs a million rollouts through one
scheduler.
"""
BLOCKS_PER_END, SPARE_BLOCKS = 11, 20
"""Allocated Python blocks per tombstone of a worker, and a constant. A retained group or client
name takes several.
"""


def num_blocks() -> int:
    gc.collect()
    return sys.getallocatedblocks()


@pytest.mark.usefixtures("young_heap")
def test_eighty_thousand_rollouts_leave_nothing_in_a_scheduler() -> None:
    traffic = SyntheticTraffic()
    left: list[int] = []
    num_ends: list[int] = []
    for _ in range(2):
        traffic.run(NUM_AT_ONCE)
        busy = cache_entries(traffic.group_scheduler, 0)
        assert busy["notes"] <= MAX_NOTES
        assert busy["agenda"] <= 2 * SPARE_ENTRIES
        traffic.rest()
        num_ends.append(traffic.group_scheduler.membership.num_ends)
        left.append(num_blocks())
    assert traffic.num_ended == traffic.num_asked == 2 * NUM_AT_ONCE
    counts = traffic.group_scheduler.table.num
    assert counts["workers_lost"] > 5
    assert counts["requeues"] > 50
    assert set(entries(traffic.group_scheduler).values()) | set(
        held(traffic.group_scheduler).values()
    ) == {0}
    assert not traffic.group_scheduler.table.of_client
    caches = cache_entries(traffic.group_scheduler, 0)
    assert 0 < caches["ended_workers"] <= MAX_ENDS
    assert {name for name, number in caches.items() if number} == {"ended_workers"}
    assert left[1] - left[0] <= BLOCKS_PER_END * (num_ends[1] - num_ends[0]) + SPARE_BLOCKS


NONE = {f"num_{outcome}": 0 for outcome in TakeoverOutcome}
LONG_S = 9.0
"""Run until everything is found and reported."""


def sends(router: ScriptedRouter) -> dict[str, int] | None:
    return router.group_scheduler.table.takeover.take_counts(router.now_s)


def test_the_takeover_is_logged_when_nothing_more_was_found_for_a_while() -> None:
    takeover = Takeover(wait_s=3.0)
    takeover.note(group(1), TakeoverOutcome.KEPT, 1.0)
    takeover.note(group(2), TakeoverOutcome.AGAIN, 1.0)
    takeover.note(group(2), TakeoverOutcome.KEPT, 2.0)
    assert takeover.take_counts(4.9) is None
    assert takeover.take_counts(5.0) == {**NONE, "num_kept": 2}
    assert takeover.take_counts(9.0) is None
    takeover.note(group(3), TakeoverOutcome.AGAIN, 9.0)
    assert takeover.take_counts(12.0) == {**NONE, "num_run_again": 1}


def test_a_router_that_found_nothing_logs_nothing(router: ScriptedRouter) -> None:
    router.worker("w0")
    router.asks(ask(1))
    router.advance(LONG_S, "w0", "c")
    assert sends(router) is None


def test_a_worker_that_was_lost_for_a_while_is_no_takeover(router: ScriptedRouter) -> None:
    running(router)
    router.advance(LONG_S, "c")
    assert router.state(1) is GroupState.QUEUED
    router.receive("w0", hello("w0", HeldGroup(group(1), 1, False)))
    assert router.state(1) is GroupState.RUNNING
    router.advance(LONG_S, "w0", "c")
    assert sends(router) is None


def test_a_late_claim_is_kept_and_not_run_again(router: ScriptedRouter) -> None:
    router.asks(ask(1, attempts=1))
    router.advance(SETTLED_S, "c")
    router.worker("w0", HeldGroup(group(1), 1, False))
    router.advance(LONG_S, "w0", "c")
    assert sends(router) == {**NONE, "num_kept": 1}


def test_the_outcome_of_each_group_is_counted_once(router: ScriptedRouter) -> None:
    for seq, attempts in ((1, 1), (2, 1), (3, 3)):
        router.asks(ask(seq, attempts=attempts))
    held = (
        HeldGroup(group(seq), 1, finished) for seq, finished in ((1, False), (4, False), (5, True))
    )
    router.worker("w0", *held)
    router.worker("w1", HeldGroup(group(6), 1, False))
    router.asks(ask(6, attempts=1))
    router.advance(LONG_S, "w0", "w1", "c")
    # Both sides report 1 and 6; no worker claims 2 and 3; no client requests 4; 5 goes to its sink.
    assert sends(router) == {
        "num_kept": 2,
        "num_run_again": 1,
        "num_dropped_unasked": 1,
        "num_dropped_exhausted": 1,
    }
