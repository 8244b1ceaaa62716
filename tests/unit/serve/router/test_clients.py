"""Groups of clients that join, fall silent, return or leave."""

import msgspec

from rollmesh.serve.client.asks import AskMachine, AskSettings, Closed
from rollmesh.serve.router.membership import Forgotten
from rollmesh.wire.machine import Send
from rollmesh.wire.messages import (
    CancelRun,
    ClientBeat,
    ClientHello,
    ClientLeft,
    GroupDelivered,
    GroupFailed,
    GroupLost,
    GroupMoved,
    GroupStarted,
    GroupState,
    RunGroup,
    WorkerBeat,
)
from tests.unit.serve.router.scripted_router import (
    SETTINGS,
    ScriptedRouter,
    ask,
    beat,
    group,
    hello,
    only,
    running,
)

AWAY_S = SETTINGS.beat_s * SETTINGS.missed_beats + 0.5
MAX_UNACKED = 1000


def test_a_clients_groups_end_when_it_leaves(router: ScriptedRouter) -> None:
    running(router)
    router.asks(ask(2, client="other"))
    assert only(router.receive("c", ClientLeft("c")), CancelRun, "w0")
    assert router.state(1) is None
    assert router.holder(2) == "w0"


def test_a_vanished_clients_groups_end_after_a_grace_period(router: ScriptedRouter) -> None:
    running(router)
    router.advance(12, "w0")
    assert router.state(1) is GroupState.RUNNING
    [failed] = only(router.advance(2, "w0"), GroupFailed)
    assert failed.reason.startswith("client_left: silent for")
    assert router.group_scheduler.table.num_in[GroupState.CANCELLED] == 1
    assert router.is_empty()
    assert router.group_scheduler.table.clients == {}


def test_a_client_that_returns_in_time_loses_nothing(router: ScriptedRouter) -> None:
    running(router)
    router.advance(12, "w0")
    router.receive(b"new-route", ClientHello("c"))
    router.advance(12, "w0")
    [moved] = only(router.receive("w0", GroupDelivered(group(1), 1)), GroupMoved, b"new-route")
    assert moved.state is GroupState.DONE


def test_a_client_with_keep_is_waited_for(router: ScriptedRouter) -> None:
    kept(router)
    running(router)
    router.advance(60, "w0")
    assert router.state(1) is GroupState.RUNNING
    router.receive("w0", GroupDelivered(group(1), 1))
    router.advance(1, "w0")
    assert router.is_empty()
    assert router.group_scheduler.table.clients == {}, "a client without groups is forgotten"


def test_a_kept_clients_groups_end_when_it_leaves(router: ScriptedRouter) -> None:
    asks = AskMachine(AskSettings(client_id="c", sink="tcp://sink", keep=True))
    assert asks.step(Closed(), 0.0) == []
    [left] = asks.step(Closed(for_good=True), 0.0)
    kept(router)
    running(router)
    router.asks(ask(2, client="other"))
    assert isinstance(left, Send)
    [cancel] = only(router.receive("c", left.message), CancelRun, "w0")
    assert cancel.group_id == group(1)
    assert router.state(1) is None
    assert router.holder(2) == "w0"
    assert router.group_scheduler.clients.take_forgotten() == [], "the group was not given up"


def test_a_kept_group_with_an_unclaimed_result_runs_again_when_its_client_requests_it(
    router: ScriptedRouter,
) -> None:
    router.receive("c", ClientHello("c", keep=True))
    running(router)
    router.advance(60, "w0")
    sends = router.receive("w0", GroupLost(group(1), 1, "no ack in 600 s"))
    assert not only(sends, RunGroup), "its result would have no receiver again"
    assert not only(sends, GroupFailed), (
        "a client that resumes must not take this for the end of its group"
    )
    assert router.is_empty()
    assert [run.attempt for run in only(router.asks(ask(1, attempts=1)), RunGroup)] == [2]


def test_a_result_that_was_given_up_is_computed_again_while_its_client_is_connected(
    router: ScriptedRouter,
) -> None:
    running(router)
    sends = router.receive("w0", GroupLost(group(1), 1, "no ack in 600 s"))
    assert [run.attempt for run in only(sends, RunGroup)] == [2]


def kept(router: ScriptedRouter, client: str = "c") -> None:
    router.receive(client, ClientHello(client, keep=True))


def test_a_kept_client_that_is_silent_for_an_hour_is_forgotten_with_one_log_line(
    router: ScriptedRouter,
) -> None:
    kept(router)
    running(router)
    router.asks(ask(2))
    router.receive("w0", GroupStarted(group(2), 1))
    router.advance(SETTINGS.kept_client_s, "w0")
    assert router.state(1) is GroupState.RUNNING
    sends = router.advance(1, "w0")
    assert [run.group_id for run in only(sends, CancelRun, "w0")] == [group(1), group(2)]
    [forgotten] = router.group_scheduler.clients.take_forgotten()
    assert forgotten == Forgotten("c", 2, "client_left: silent for 3600 s")
    assert router.group_scheduler.clients.take_forgotten() == []
    assert router.is_empty()
    assert router.group_scheduler.table.num_in[GroupState.CANCELLED] == 2


def test_a_forgotten_client_that_returns_loses_work_but_no_group(
    router: ScriptedRouter,
) -> None:
    kept(router)
    running(router)
    sends = router.advance(SETTINGS.kept_client_s + 1, "w0")
    assert not only(sends, GroupFailed), "the client may be frozen and receive it later"
    kept(router)
    [run] = only(router.asks(ask(1, attempts=1)), RunGroup, "w0")
    assert run.attempt == 2
    router.advance(20, "w0", "c")
    assert router.state(1) is not None


def test_a_kept_client_that_sends_once_an_hour_is_kept(router: ScriptedRouter) -> None:
    kept(router)
    running(router)
    for _ in range(3):
        router.advance(SETTINGS.kept_client_s - 1, "w0")
        router.receive("c", ClientBeat("c", 1))
    assert router.state(1) is not None


def test_groups_of_absent_clients_queue_behind_those_of_connected_ones(
    router: ScriptedRouter,
) -> None:
    kept(router, "away")
    for seq in (1, 2):
        router.asks(ask(seq, n=8, client="away", prio=5))
    router.advance(AWAY_S, "c")
    for seq in (3, 4):
        router.asks(ask(seq, n=8))
    runs = only(router.worker("w0"), RunGroup)
    while len(runs) < 4:
        runs += only(router.receive("w0", GroupDelivered(runs[-1].group_id, 1)), RunGroup)
    assert [run.group_id.seq for run in runs] == [3, 4, 1, 2], "the group continues"


def test_a_client_that_returned_has_its_turn_again(router: ScriptedRouter) -> None:
    kept(router, "away")
    router.asks(ask(1, n=8, client="away", prio=5))
    router.advance(AWAY_S, "c")
    router.asks(ask(2, n=8))
    router.receive("away", ClientBeat("away", 1))
    assert [run.group_id.seq for run in only(router.worker("w0"), RunGroup)] == [1]


def holds_unacked(worker: str, unacked_bytes: int) -> WorkerBeat:
    return msgspec.structs.replace(beat(worker), unacked_bytes=unacked_bytes)


def test_unclaimed_results_leave_half_of_a_worker_to_other_clients(
    router: ScriptedRouter,
) -> None:
    for name in ("w0", "w1"):
        router.receive(name, msgspec.structs.replace(hello(name), max_unacked_bytes=MAX_UNACKED))
    router.receive("w0", holds_unacked("w0", MAX_UNACKED // 2))
    router.receive("w1", holds_unacked("w1", MAX_UNACKED // 2 - 1))
    kept(router, "away")
    router.advance(0.5, "c")
    router.receive("w0", holds_unacked("w0", MAX_UNACKED // 2))
    router.receive("w1", holds_unacked("w1", MAX_UNACKED // 2))
    full = [msgspec.structs.replace(holds_unacked(w, 0), accepting=False) for w in ("w0", "w1")]
    for each in full:
        router.receive(each.worker_id, each)
    for seq in (1, 2):
        router.asks(ask(seq, n=8, client="away"))
    for _ in range(4):
        router.advance(1, "c")
        for each in full:
            router.receive(each.worker_id, each)
    assert router.receive("w0", holds_unacked("w0", MAX_UNACKED // 2)) == []
    [run] = only(router.receive("w1", holds_unacked("w1", MAX_UNACKED // 2 - 1)), RunGroup, "w1")
    assert run.group_id == group(1)
    [run] = only(router.asks(ask(3, n=8)), RunGroup, "w0")
    assert run.group_id == group(3), "connected clients have the other half"
    assert router.state(2) is GroupState.QUEUED
    router.receive("w0", GroupDelivered(group(3), 1))
    [run] = only(router.receive("w0", holds_unacked("w0", 0)), RunGroup, "w0")
    assert run.group_id == group(2), "it waited for room and then ran"
