"""Clients of groups that cannot run are notified of the reason, repeatedly; others are not."""

import msgspec

from rollmesh.serve.router.blocked_reasons import NOTIFY_BEATS, STANDING_BEATS
from rollmesh.wire.machine import Send
from rollmesh.wire.messages import (
    CancelGroup,
    ClientHello,
    GroupMoved,
    GroupStarted,
    GroupState,
    WorkerLeft,
)
from tests.unit.serve.router.scripted_router import ScriptedRouter, ask, beat, group, hello, only

STANDING_S, NOTIFY_S = (
    float(STANDING_BEATS),
    float(NOTIFY_BEATS),
)  # one heartbeat takes a second in this file


def reasons(sends: list[Send]) -> list[str]:
    return [moved.reason for moved in only(sends, GroupMoved) if moved.reason]


def test_the_client_of_a_group_whose_env_is_not_served_is_notified_repeatedly(
    router: ScriptedRouter,
) -> None:
    router.worker("w0")
    router.asks(ask(1, env="typo"))
    assert not reasons(router.advance(STANDING_S, "w0", "c"))
    assert router.group_scheduler.blocked_reasons.standing() == []
    sends = router.advance(1, "w0", "c")
    cause = "no worker has served env 'typo' for 20 s; there are workers of guess"
    assert reasons(sends) == [cause]
    [moved] = [each for each in only(sends, GroupMoved) if each.reason]
    assert (moved.group_id, moved.state) == (group(1), GroupState.QUEUED)
    assert router.group_scheduler.blocked_reasons.standing() == [cause]
    assert len(reasons(router.advance(3 * NOTIFY_S, "w0", "c"))) == 3
    assert router.state(1) is GroupState.QUEUED, "a worker may still join"


def test_each_client_is_notified_of_one_group_of_many(router: ScriptedRouter) -> None:
    router.receive("d", ClientHello("d", keep=True))
    for seq in range(6):
        router.asks(ask(seq, client="c" if seq < 4 else "d"))
    sends = router.advance(STANDING_S + 1, "c")
    notified = [moved.group_id.seq for moved in only(sends, GroupMoved) if moved.reason]
    assert sorted(notified) == [0, 4]
    [cause] = router.group_scheduler.blocked_reasons.standing()
    assert cause == "no worker has served env 'guess' for 20 s; there is no worker"


def test_a_new_worker_ends_the_cause(router: ScriptedRouter) -> None:
    router.asks(ask(1, env="echo"))
    router.advance(STANDING_S + 1, "c")
    assert router.group_scheduler.blocked_reasons.standing()
    router.receive("w1", hello("w1", env="echo"))
    router.advance(0.5, "c")
    assert router.group_scheduler.blocked_reasons.standing() == []


def test_a_cause_ends_with_the_last_waiting_group(router: ScriptedRouter) -> None:
    router.asks(ask(1))
    router.advance(STANDING_S + 1, "c")
    router.receive("c", CancelGroup(group(1), "enough"))
    router.advance(0.5, "c")
    assert router.group_scheduler.blocked_reasons.standing() == []


WAITS_FOR = "held_bytes: 9 held, worker.max_held_bytes = 8"


def send_full_beats(router: ScriptedRouter, *workers: str) -> None:
    for name in workers:
        sends = beat(name, accepting=False)
        router.receive(name, msgspec.structs.replace(sends, waits_for=WAITS_FOR))


def test_groups_whose_workers_are_all_full_wait_and_their_clients_are_notified(
    router: ScriptedRouter,
) -> None:
    router.worker("w0")
    router.worker("w1")
    send_full_beats(router, "w0", "w1")
    router.asks(ask(1))
    assert router.state(1) is GroupState.QUEUED
    sends = []
    for _ in range(STANDING_BEATS + 1):
        send_full_beats(router, "w0", "w1")
        sends += router.advance(1, "c")
    cause = f"over_budget: for 20 s no worker of env 'guess' has room; w0 waits for {WAITS_FOR}"
    assert reasons(sends) == [cause]
    assert router.group_scheduler.blocked_reasons.standing()[0].startswith("over_budget: ")
    router.receive("w1", beat("w1"))
    router.advance(0.5, "c")
    assert router.group_scheduler.blocked_reasons.standing() == []
    assert router.state(1) is GroupState.ASSIGNED


def test_a_full_worker_is_no_cause_while_another_has_room(router: ScriptedRouter) -> None:
    router.worker("w0")
    router.worker("w1")
    router.asks(ask(1, n=8))
    router.asks(ask(2, n=8))
    router.asks(ask(3, n=8))
    for _ in range(STANDING_BEATS + 1):
        send_full_beats(router, "w1")
        assert not reasons(router.advance(1, "c"))
        router.receive("w0", beat("w0", num_running=8))
    assert router.state(3) is GroupState.QUEUED
    assert router.group_scheduler.blocked_reasons.standing() == []


def test_replacing_workers_is_no_cause(router: ScriptedRouter) -> None:
    router.worker("w0")
    router.asks(ask(1, n=8))
    router.asks(ask(2, n=8))
    for pid in range(2, 6):
        router.receive("w0", WorkerLeft("w0", "stopped"))
        assert not reasons(router.advance(STANDING_S / 2, "c"))
        router.worker("w0", pid=pid)
        assert not reasons(router.advance(STANDING_S / 2, "w0", "c"))


def test_an_environment_that_a_worker_is_loading_is_no_cause(router: ScriptedRouter) -> None:
    router.asks(ask(1))
    router.receive("w0", msgspec.structs.replace(hello("w0"), loads_for_s=120.0))
    assert not reasons(router.advance(STANDING_S + 1, "c"))
    assert router.group_scheduler.blocked_reasons.standing() == []


DEAD = "http://e is fenced: does not answer: connection refused"


def test_no_serving_engine_is_reported_as_the_only_cause(
    router: ScriptedRouter,
) -> None:
    router.asks(ask(1, env="typo"))
    router.group_scheduler.blocked_reasons.see_engines(DEAD)
    assert not reasons(router.advance(STANDING_S, "c"))
    sends = router.advance(1, "c")
    assert reasons(sends) == [f"no engine serves: {DEAD} (for 20 s)"]
    assert router.group_scheduler.blocked_reasons.standing() == [
        f"no engine serves: {DEAD} (for 20 s)"
    ]
    assert len(reasons(router.advance(3 * NOTIFY_S, "c"))) == 3
    router.group_scheduler.blocked_reasons.see_engines("")
    sends = router.advance(NOTIFY_S, "c")
    assert all(each.startswith("no worker has served env 'typo'") for each in reasons(sends))
    assert reasons(sends)


def test_the_client_of_a_running_group_is_notified_when_no_engine_serves(
    router: ScriptedRouter,
) -> None:
    router.worker("w0")
    router.asks(ask(1))
    router.receive("w0", GroupStarted(group(1), 1))
    router.group_scheduler.blocked_reasons.see_engines(DEAD)
    sends = router.advance(STANDING_S + 1, "w0", "c")
    [moved] = [each for each in only(sends, GroupMoved) if each.reason]
    assert (moved.group_id, moved.state) == (group(1), GroupState.RUNNING)
    assert moved.reason.startswith(f"no engine serves: {DEAD}")


def test_an_idle_engine_without_requests_is_no_cause(
    router: ScriptedRouter,
) -> None:
    router.group_scheduler.blocked_reasons.see_engines(DEAD)
    router.advance(STANDING_S + 1, "c")
    assert router.group_scheduler.blocked_reasons.standing() == []
