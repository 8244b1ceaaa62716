"""The scheduler's promises to clients, as short message sequences on a clock."""

import weakref

import msgspec
import pytest

from rollmesh.serve.router.group_scheduler import MAX_QUEUED_BYTES, MAX_SAMPLES
from rollmesh.wire.header import Message
from rollmesh.wire.machine import Send
from rollmesh.wire.messages import (
    AskRefused,
    AttemptFailed,
    CancelGroup,
    CancelRun,
    ClientBeat,
    ClientHello,
    ClientLeft,
    EnvFailed,
    GroupDelivered,
    GroupFailed,
    GroupMoved,
    GroupStarted,
    GroupState,
    HeldGroup,
    RouterHello,
    RunGroup,
)
from tests.unit.serve.router.scripted_router import (
    SETTINGS,
    SETTLED_S,
    ScriptedRouter,
    ask,
    beat,
    group,
    hello,
    only,
    running,
)


def test_a_group_goes_whole_to_one_worker_with_its_body_unchanged(router: ScriptedRouter) -> None:
    router.worker("w0")
    sends = router.asks(ask(1), body=b"\x00opaque")
    [run] = [s for s in sends if isinstance(s.message, RunGroup)]
    assert run == Send(b"w0", RunGroup(group(1), 1, 4, "tcp://sink"), b"\x00opaque")
    assert only(sends, GroupMoved) == [GroupMoved(group(1), GroupState.ASSIGNED, 1, "w0")]


def test_the_ticket_of_a_request_reaches_its_worker_and_no_client(router: ScriptedRouter) -> None:
    router.worker("w0")
    sends = router.asks(msgspec.structs.replace(ask(1), ticket=b"ticket of group"))
    [run] = only(sends, RunGroup)
    assert run.ticket == b"ticket of group"
    assert not [each for each in sends if b"ticket" in repr(each).encode() and each.route == b"c"]


def test_a_group_is_ended_only_by_a_message_that_carries_its_ticket(router: ScriptedRouter) -> None:
    router.worker("w0")
    router.worker("w1")
    router.asks(msgspec.structs.replace(ask(1), ticket=b"ticket"))
    assert not router.receive("w1", GroupDelivered(group(1), 1))
    assert not router.receive("c2", CancelGroup(group(1), "mine now"))
    assert group(1) in router.group_scheduler.table.groups
    [moved] = only(router.receive("w0", GroupDelivered(group(1), 1, b"ticket")), GroupMoved)
    assert moved.state is GroupState.DONE


def test_a_cancellation_by_another_client_blocks_no_later_request(router: ScriptedRouter) -> None:
    router.worker("w0")
    router.receive("c2", CancelGroup(group(1), "before it was asked", b"guess"))
    assert only(router.asks(msgspec.structs.replace(ask(1), ticket=b"ticket")), RunGroup)
    [moved] = only(router.receive("c", CancelGroup(group(1), "enough", b"ticket")), GroupMoved)
    assert moved.state is GroupState.CANCELLED
    assert not router.receive("c2", CancelGroup(group(1), "again", b"guess"))
    late = router.asks(msgspec.structs.replace(ask(1), ticket=b"ticket"))
    assert not only(late, RunGroup)


def test_a_group_is_not_handed_to_a_client_that_does_not_know_its_ticket(
    router: ScriptedRouter,
) -> None:
    running(router)
    foreign = msgspec.structs.replace(ask(1), sink="tcp://thief", client_id="c2", ticket=b"guess")
    [failed] = only(router.receive("c2", foreign), GroupFailed)
    assert failed.reason.startswith("bad_ask: ")
    assert router.group_scheduler.table.groups[group(1)].sink == "tcp://sink"


def test_an_attempt_whose_result_was_malformed_is_followed_by_another(
    router: ScriptedRouter,
) -> None:
    running(router)
    router.worker("w1")
    failed = AttemptFailed(group(1), 1, "w0", "malformed result: no rollouts")
    assert not only(router.receive("another", failed), RunGroup)
    sends = router.receive("c", failed)
    assert next(s.route for s in sends if isinstance(s.message, CancelRun)) == b"w0"
    [run] = [s for s in sends if isinstance(s.message, RunGroup)]
    assert (run.route, run.message.attempt) == (b"w1", 2)  # type: ignore[union-attr]
    assert not only(router.receive("c", failed), RunGroup)  # sent twice, it counts once


def test_malformed_results_fail_a_group_only_after_its_last_attempt(
    router: ScriptedRouter,
) -> None:
    running(router)
    ended: list[GroupFailed] = []
    for attempt in range(1, SETTINGS.max_attempts + 1):
        assert not ended
        failed = AttemptFailed(group(1), attempt, "w0", "malformed result: no rollouts")
        ended += only(router.receive("c", failed), GroupFailed)
        router.receive("w0", beat("w0"))
        router.receive("w0", GroupStarted(group(1), attempt + 1))
    [failed_group] = ended
    assert failed_group.reason.startswith("attempts_exhausted: ")
    assert "w0: malformed result" in failed_group.reason


def test_a_request_waits_for_the_first_worker(router: ScriptedRouter) -> None:
    [moved] = only(router.asks(ask(1)), GroupMoved)
    assert moved == GroupMoved(group(1), GroupState.QUEUED, 0, "")
    assert only(router.worker("w0"), RunGroup)


def test_a_delivered_group_is_forgotten_and_its_slots_are_free(router: ScriptedRouter) -> None:
    running(router)
    [moved] = only(router.receive("w0", GroupDelivered(group(1), 1)), GroupMoved)
    assert moved == GroupMoved(group(1), GroupState.DONE, 1, "w0")
    assert router.is_empty()
    [worker] = router.group_scheduler.membership.workers
    assert (worker.load, worker.groups) == (0, {})


def test_tombstones_are_removed_after_their_time(router: ScriptedRouter) -> None:
    running(router)
    router.receive("w0", GroupDelivered(group(1), 1))
    assert group(1) in router.group_scheduler.table.tombstones
    router.advance(4, "w0", "c")
    assert group(1) not in router.group_scheduler.table.tombstones


def test_a_full_queue_refuses_with_a_retry_time(router: ScriptedRouter) -> None:
    for seq in range(8):
        router.asks(ask(seq))
    [refused] = only(router.asks(ask(8)), AskRefused)
    assert refused.group_id == group(8)
    assert refused.retry_after_s > 0
    assert router.state(8) is None


def test_a_request_for_no_samples_fails_at_once(router: ScriptedRouter) -> None:
    [failed] = only(router.asks(ask(1, n=0)), GroupFailed)
    assert "num_samples" in failed.reason


def test_a_request_without_a_client_fails_at_once(router: ScriptedRouter) -> None:
    [failed] = only(router.asks(ask(1, client="")), GroupFailed)
    assert "client" in failed.reason
    assert router.is_empty()


@pytest.mark.parametrize("mistake", [{"client_id": ""}, {"num_samples": 2**40}])
@pytest.mark.parametrize("is_running", [False, True])
def test_an_invalid_request_does_not_affect_an_existing_group(
    router: ScriptedRouter, is_running: bool, mistake: dict[str, str | int]
) -> None:
    if is_running:
        running(router)
    router.asks(ask(1))
    [failed] = only(router.receive("c", msgspec.structs.replace(ask(1), **mistake)), GroupFailed)
    assert failed.reason.startswith("bad_ask: ")
    router.asks(ask(1))
    router.worker("w0")
    assert router.holder(1) == "w0"
    group_here = router.group_scheduler.table.groups[group(1)]
    assert (group_here.client_id, group_here.num_samples) == ("c", 4)


def test_an_env_that_cannot_load_fails_waiting_and_later_requests(router: ScriptedRouter) -> None:
    router.asks(ask(1))
    sends = router.receive("w0", EnvFailed("w0", "guess", "no module named x"))
    assert only(sends, GroupFailed) == [GroupFailed(group(1), "env_failed: no module named x")]
    [failed] = only(router.asks(ask(2)), GroupFailed)
    assert failed.reason == "env_failed: no module named x"
    assert router.is_empty()


def test_a_worker_that_loads_the_env_clears_its_failure(router: ScriptedRouter) -> None:
    router.receive("w0", EnvFailed("w0", "guess", "flaky"))
    router.worker("w1")
    assert only(router.asks(ask(1)), RunGroup)


def test_one_workers_load_failure_fails_nothing_while_another_serves_the_env(
    router: ScriptedRouter,
) -> None:
    router.worker("w1")
    assert not only(router.receive("w0", EnvFailed("w0", "guess", "flaky")), GroupFailed)
    assert only(router.asks(ask(1)), RunGroup)


def test_a_cancellation_stops_a_running_group(router: ScriptedRouter) -> None:
    running(router)
    sends = router.receive("c", CancelGroup(group(1), "stale"))
    assert only(sends, CancelRun, "w0") == [CancelRun(group(1), "stale")]
    assert only(sends, GroupMoved)[0].state is GroupState.CANCELLED
    assert router.is_empty()


@pytest.mark.parametrize("message", [ClientBeat("c", 3), beat("w0"), ClientHello("c")])
def test_an_unknown_peer_gets_a_hello_so_that_it_reports_everything_again(
    router: ScriptedRouter, message: Message
) -> None:
    assert only(router.receive("peer", message), RouterHello, "peer") == [RouterHello(1.0)]


def test_results_go_to_the_new_address_of_a_client_that_moved(router: ScriptedRouter) -> None:
    running(router)
    moved = msgspec.structs.replace(ask(1, attempts=1), sink="tcp://new-sink")
    router.asks(moved)
    [run] = only(router.advance(0.5, "w0"), RunGroup)
    assert (run.sink, run.attempt) == ("tcp://new-sink", 1)


def test_turns_follow_client_weights(router: ScriptedRouter) -> None:
    router.receive("heavy", ClientHello("heavy", weight=2))
    for seq in range(6):
        router.asks(ask(seq, n=8, client="heavy" if seq < 4 else "light"))
    runs = only(router.worker("w0"), RunGroup)
    while runs and len(runs) < 6:
        delivered = router.receive("w0", GroupDelivered(runs[-1].group_id, 1))
        runs += only(delivered, RunGroup)
    assert [run.group_id.seq for run in runs] == [0, 1, 4, 2, 3, 5]


# environments


def test_the_failure_of_an_envs_only_worker_ends_all_waiting_groups(router: ScriptedRouter) -> None:
    router.worker("w0")
    for seq in (1, 2, 3):
        router.asks(ask(seq))
    sends = router.receive("w0", EnvFailed("w0", "guess", "no module named x"))
    reasons = {failed.group_id.seq: failed.reason for failed in only(sends, GroupFailed)}
    assert reasons == dict.fromkeys((1, 2, 3), "env_failed: no module named x")
    assert router.is_empty()


def test_a_delivery_after_its_clients_goodbye_counts_as_done(
    router: ScriptedRouter,
) -> None:
    running(router)
    router.receive("c", ClientLeft("c"))
    assert router.group_scheduler.table.num_in[GroupState.CANCELLED] == 1
    for _ in range(2):
        router.receive("w0", GroupDelivered(group(1), 1))
        counts = {state: n for state, n in router.group_scheduler.table.num_in.items() if n}
        assert counts == {GroupState.DONE: 1}


# overload


def test_a_client_that_floods_the_queue_does_not_block_others(router: ScriptedRouter) -> None:
    for seq in range(8):
        router.asks(ask(seq, client="flood"))
    router.receive("c", ClientHello("c"))
    for seq in range(8, 12):
        assert only(router.asks(ask(seq)), GroupMoved)  # the share of 8 of one of two clients
    assert only(router.asks(ask(12)), AskRefused)
    assert only(router.asks(ask(13, client="flood")), AskRefused)


def test_successive_clients_never_queue_more_than_twice_the_limit(
    router: ScriptedRouter,
) -> None:
    for seq in range(64):
        router.asks(ask(seq, client=f"c{seq // 8}"))
    assert router.group_scheduler.table.num_waiting == 2 * SETTINGS.max_queued_groups


def test_waiting_bytes_are_bounded(router: ScriptedRouter) -> None:
    assert not only(router.asks(ask(1), body=bytes(MAX_QUEUED_BYTES)), AskRefused)
    [refused] = only(router.asks(ask(2), body=b"x"), AskRefused)
    assert refused.reason.startswith("overloaded: ")
    router.receive("c", CancelGroup(group(1), "too long"))
    assert not only(router.asks(ask(2), body=b"x"), AskRefused)


def test_a_request_that_can_never_fit_fails_at_once(router: ScriptedRouter) -> None:
    [failed] = only(router.asks(ask(1), body=bytes(MAX_QUEUED_BYTES + 1)), GroupFailed)
    assert failed.reason.startswith("bad_ask: ")


@pytest.mark.parametrize("num_samples", [-1, 0, MAX_SAMPLES + 1, 10**7])
def test_a_request_for_an_invalid_number_of_samples_fails_at_once(
    router: ScriptedRouter, num_samples: int
) -> None:
    router.worker("w0")
    [failed] = only(router.asks(ask(1, n=num_samples)), GroupFailed)
    assert failed.reason.startswith("bad_ask: num_samples must be ")
    assert router.is_empty()


# after a restart of the router


def test_a_claimed_group_is_not_run_twice_after_a_restart(router: ScriptedRouter) -> None:
    router.asks(ask(1, attempts=1))
    assert not only(router.receive("w1", hello("w1")), RunGroup)
    sends = router.worker("w0", HeldGroup(group(1), 1, False))
    assert only(sends, GroupMoved) == [GroupMoved(group(1), GroupState.RUNNING, 1, "w0")]
    assert not only(router.advance(10, "w0", "w1", "c"), RunGroup, "w1")
    assert router.holder(1) == "w0"


def test_a_claim_may_arrive_before_its_request(router: ScriptedRouter) -> None:
    router.worker("w0", HeldGroup(group(1), 2, False))
    sends = router.asks(ask(1, n=4, attempts=1))
    assert only(sends, GroupMoved) == [GroupMoved(group(1), GroupState.RUNNING, 2, "w0")]
    [worker] = router.group_scheduler.membership.workers
    assert worker.load == 4
    assert not only(router.advance(9, "w0", "c"), RunGroup)
    router.receive("w0", GroupDelivered(group(1), 2))
    assert worker.load == 0


def test_a_group_in_its_last_attempt_waits_for_its_worker_after_a_restart(
    router: ScriptedRouter,
) -> None:
    assert not only(router.asks(ask(1, attempts=3)), GroupFailed)
    router.worker("w0", HeldGroup(group(1), 3, False))
    assert router.holder(1) == "w0"
    assert not only(router.advance(9, "w0", "c"), GroupFailed)


def test_a_group_without_attempts_left_fails_when_no_worker_claims_it(
    router: ScriptedRouter,
) -> None:
    router.worker("w0")
    router.asks(ask(1, attempts=3))
    [failed] = only(router.advance(SETTLED_S, "w0", "c"), GroupFailed)
    assert failed.reason.startswith("attempts_exhausted: 3 have begun")
    assert router.is_empty()


def test_excused_attempts_are_known_after_a_restart(router: ScriptedRouter) -> None:
    router.worker("w0")
    router.asks(msgspec.structs.replace(ask(1, attempts=5), excused=3))
    [run] = only(router.advance(SETTLED_S, "w0", "c"), RunGroup)
    assert run.attempt == 6
    [failed] = only(
        router.asks(msgspec.structs.replace(ask(2, attempts=5), excused=2)), GroupFailed
    )
    assert failed.reason == "attempts_exhausted: 3 have begun"


@pytest.mark.parametrize("excused", [-(2**40), 2**40])
def test_impossible_numbers_of_excused_attempts_are_clamped(
    router: ScriptedRouter, excused: int
) -> None:
    router.advance(SETTLED_S, "c")
    sends = router.asks(msgspec.structs.replace(ask(1, attempts=3), excused=excused))
    assert bool(only(sends, GroupFailed)) is (excused < 0)


def test_unclaimed_groups_are_queued_after_three_heartbeats(router: ScriptedRouter) -> None:
    router.worker("w0")
    assert not only(router.asks(ask(1, attempts=1)), RunGroup)
    [run] = only(router.advance(SETTLED_S, "w0", "c"), RunGroup)
    assert run.attempt == 2


def test_a_new_request_does_not_wait_for_claims(router: ScriptedRouter) -> None:
    router.worker("w0")
    assert only(router.asks(ask(1, attempts=0)), RunGroup)


def test_a_running_group_that_no_client_claims_is_cancelled(router: ScriptedRouter) -> None:
    router.worker("w0", HeldGroup(group(1), 1, False))
    [cancel] = only(router.advance(SETTLED_S, "w0"), CancelRun, "w0")
    assert cancel.group_id == group(1)
    assert router.is_empty()


def test_a_finished_result_that_no_client_claims_is_left_to_its_sink(
    router: ScriptedRouter,
) -> None:
    router.worker("w0", HeldGroup(group(1), 1, True))
    assert not only(router.advance(SETTLED_S, "w0"), CancelRun)
    assert router.is_empty()


def test_a_request_claimed_after_the_takeover_is_still_recognised(router: ScriptedRouter) -> None:
    router.advance(5)
    router.asks(ask(1, attempts=1))
    assert router.state(1) is GroupState.QUEUED
    router.worker("w0", HeldGroup(group(1), 1, False))
    assert router.state(1) is GroupState.RUNNING


def test_a_start_from_an_unknown_worker_is_answered_with_a_hello(router: ScriptedRouter) -> None:
    assert only(router.receive("w0", GroupStarted(group(1), 1)), RouterHello, "w0")


class Body(bytearray):
    """A request body that can be weakly referenced."""


def test_nothing_retains_the_request_of_an_ended_group(router: ScriptedRouter) -> None:
    """Not even the timer entry of its deadline in an hour."""
    router.worker("w0")
    bodies = []
    for seq, end in enumerate([GroupDelivered(group(0), 1), CancelGroup(group(1), "no"), None]):
        body = Body(b"task")
        bodies.append(weakref.ref(body))
        asked = msgspec.structs.replace(ask(seq, n=1), deadline_s=3600.0)
        router.asks(asked, body)  # type: ignore[arg-type]
        router.receive("w0", GroupStarted(group(seq), 1))
        router.receive("w0" if seq == 0 else "c", end or ClientLeft("c"))
        del body
    assert router.is_empty()
    assert [body() for body in bodies] == [None, None, None]
