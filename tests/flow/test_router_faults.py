"""A real router, and faults around it: each fault is reported by its name."""

import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path

import msgspec
import pytest
import zmq

from rollmesh.core.ids import GroupId
from rollmesh.core.process import listen
from rollmesh.wire.messages import (
    AskDrain,
    AskGroup,
    AskRefused,
    CancelRun,
    ClientBeat,
    ClientHello,
    ClientLeft,
    DrainAnswered,
    DrainWorker,
    EnvFailed,
    GroupDelivered,
    GroupFailed,
    GroupMoved,
    GroupState,
    RunGroup,
    WorkerBeat,
    WorkerHello,
)
from tests.flow.router_process import (
    PATIENCE_S,
    Peer,
    RouterProcess,
    ScriptedPeers,
    ask,
    has_started,
    until,
)

NEVER_MISSED = 10_000
"""More missed heartbeats than a test lasts."""


def check_group_served(router: RouterProcess, peers: ScriptedPeers, seq: int = 1000) -> None:
    """Check that a new client's group reaches a new worker."""
    address, name = router.ready.address, f"honest-{seq}"
    runner = peers.peer(address, name, WorkerBeat(name, 0, True, 0, 0.0, 0, 0, 0, 0))
    runner.send(WorkerHello(name, f"env-{seq}", 8, 1, "here"))
    asker = peers.peer(address, f"client-{seq}", ClientBeat(f"client-{seq}", 1))
    asker.send(AskGroup(GroupId("honest", seq), f"client-{seq}", f"env-{seq}", 1, "tcp://sink"))
    until(lambda: runner.of(RunGroup), runner, asker)


# workers die


def test_a_killed_local_worker_is_noticed_before_it_misses_heartbeats(
    tmp_path: Path, peers: ScriptedPeers
) -> None:
    # The router notices the end of the process.
    with RouterProcess(tmp_path, missed_beats=NEVER_MISSED) as router:
        asker = peers.client(router.ready.address)
        asker.send(ask(1))
        doomed = peers.process(router.ready.address, "doomed")
        has_started(doomed)
        runner = peers.worker(router.ready.address, "w1")
        until(lambda: router.worker("w1"), runner, asker)
        doomed.kill()
        until(lambda: runner.of(RunGroup), runner, asker)
        assert [run.attempt for run in runner.of(RunGroup)] == [2]
        until(lambda: not router.worker("doomed"), runner, asker)


def test_a_killed_remote_worker_is_noticed_by_its_missed_heartbeats(
    router: RouterProcess, peers: ScriptedPeers
) -> None:
    asker = peers.client(router.ready.address)
    asker.send(ask(1))
    doomed = peers.process(router.ready.address, "doomed", host="far-away")
    has_started(doomed)
    runner = peers.worker(router.ready.address, "w1")
    until(lambda: router.worker("w1"), runner, asker)
    doomed.kill()
    until(lambda: runner.of(RunGroup), runner, asker)
    assert [run.attempt for run in runner.of(RunGroup)] == [2]
    assert router.worker("doomed")["state"] == "lost"


# workers stall


def test_a_stopped_worker_delays_no_other_worker_before_it_is_noticed(
    tmp_path: Path, peers: ScriptedPeers
) -> None:
    with RouterProcess(tmp_path, missed_beats=NEVER_MISSED) as router:
        asker, stopped, runner = beside_a_stopped_worker(router, peers)
        for seq in range(1, 30):
            asker.send(ask(seq), body=bytes(10**6))
            until(partial(has_run_or_waits, runner, asker, seq), runner, asker)
            runner.send(GroupDelivered(GroupId("r1", seq), 1))
        assert router.worker("stopped")["state"] == "live"
        stopped.kill()


def beside_a_stopped_worker(
    router: RouterProcess, peers: ScriptedPeers
) -> tuple[Peer, "subprocess.Popen[bytes]", Peer]:
    """A client, a worker that is stopped during a group, and a worker that runs."""
    address = router.ready.address
    asker = peers.client(address)
    stopped = peers.process(address, "stopped", host="far-away")
    until(lambda: router.worker("stopped"), asker)
    asker.send(ask(0), body=bytes(10**6))
    has_started(stopped)
    stopped.send_signal(signal.SIGSTOP)
    runner = peers.worker(address, "w1")
    until(lambda: router.worker("w1"), runner, asker)
    return asker, stopped, runner


def test_a_group_of_a_stopped_worker_and_its_successor_counts_once(
    router: RouterProcess, peers: ScriptedPeers
) -> None:
    asker, stopped, runner = beside_a_stopped_worker(router, peers)
    until(lambda: router.worker("stopped")["state"] == "lost", runner, asker)
    until(lambda: has_run(runner, 0), runner, asker)
    stopped.send_signal(signal.SIGCONT)
    until(lambda: router.worker("stopped")["state"] == "live", runner, asker)
    runner.send(GroupDelivered(GroupId("r1", 0), 2))
    until(lambda: router.status()["queue"] == dict.fromkeys(OPEN, 0), runner, asker)
    done = [m for m in asker.of(GroupMoved) if m.state is GroupState.DONE]
    assert len({moved.group_id for moved in done}) == len(done)


OPEN = ("queued", "assigned", "running")


def has_run(runner: Peer, seq: int) -> bool:
    return any(run.group_id == GroupId("r1", seq) for run in runner.of(RunGroup))


def has_run_or_waits(runner: Peer, asker: Peer, seq: int) -> bool:
    """Whether the request was answered: its group went to the running worker, or to the one that
    was just stopped.
    """
    moves = [m for m in asker.of(GroupMoved) if m.group_id == GroupId("r1", seq)]
    return has_run(runner, seq) or any(m.worker_id == "stopped" for m in moves)


def test_a_blocked_loop_is_shown_and_given_up_only_past_its_limit(
    tmp_path: Path, peers: ScriptedPeers
) -> None:
    with RouterProcess(tmp_path, max_lag_s=5.0) as router:
        asker, busy = peers.client(router.ready.address), peers.worker(router.ready.address, "busy")
        asker.send(ask(1))
        until(lambda: busy.of(RunGroup), busy, asker)
        idle = peers.worker(router.ready.address, "idle")
        busy.beat = WorkerBeat("busy", 4, True, 0, 4.0, 0, 0, 0, 0, "run (my_env.py:7)")
        until(lambda: router.worker("busy").get("loop_lag_s") == 4.0, busy, idle, asker)
        assert router.worker("busy")["state"] == "live"
        assert router.worker("busy")["stalled_in"] == "run (my_env.py:7)"
        busy.beat = msgspec.structs.replace(busy.beat, loop_lag_s=6.0)
        until(lambda: idle.of(RunGroup), busy, idle, asker)
        until(lambda: router.worker("busy")["state"] == "stalled", busy, idle, asker)
        busy.beat = msgspec.structs.replace(busy.beat, loop_lag_s=0.0)
        until(lambda: busy.of(CancelRun), busy, idle, asker)
        until(lambda: router.worker("busy")["state"] == "live", busy, idle, asker)


# environments, drains, overload


def test_an_env_that_does_not_load_fails_all_waiting_groups_at_once(
    router: RouterProcess, peers: ScriptedPeers
) -> None:
    asker = peers.client(router.ready.address)
    for seq in range(3):
        asker.send(ask(seq))
    until(lambda: router.status()["queue"]["queued"] == 3, asker)
    failing = peers.peer(router.ready.address, "w0")
    failing.send(EnvFailed("w0", "guess", "no module named x"))
    until(lambda: len(asker.of(GroupFailed)) == 3, asker)
    asker.send(ask(3))
    until(lambda: len(asker.of(GroupFailed)) == 4, asker)
    assert {failed.reason for failed in asker.of(GroupFailed)} == {"env_failed: no module named x"}


def test_a_group_whose_env_has_no_worker_gets_the_reason_and_waits(
    tmp_path: Path, peers: ScriptedPeers
) -> None:
    with RouterProcess(tmp_path, beat_s=0.1, missed_beats=50) as router:
        asker, runner = peers.client(router.ready.address), peers.worker(router.ready.address, "w0")
        asker.send(AskGroup(GroupId("r1", 1), "c", "typo", 4, "tcp://sink"))
        until(lambda: asker.of(GroupMoved) and asker.of(GroupMoved)[-1].reason, asker, runner)
        [moved] = [each for each in asker.of(GroupMoved) if each.reason]
        assert moved.state is GroupState.QUEUED
        assert moved.reason.startswith("no worker has served env 'typo' for ")
        assert moved.reason.endswith("; there are workers of guess")
        until(router.causes, asker, runner)
        late = peers.peer(router.ready.address, "w1")
        late.send(WorkerHello("w1", "typo", 8, 1, "here"))
        until(lambda: late.of(RunGroup), late, asker, runner)
        until(lambda: not router.causes(), late, asker, runner)


def test_groups_that_wait_for_a_dead_engine_get_the_engine_as_reason(
    tmp_path: Path, peers: ScriptedPeers
) -> None:
    with closing(listen("127.0.0.1:0", None)) as refusing:
        url = f"http://127.0.0.1:{refusing.getsockname()[1]}"
    with RouterProcess(tmp_path, beat_s=0.1, missed_beats=50, engine=url) as router:
        asker = peers.client(router.ready.address)
        asker.send(AskGroup(GroupId("r1", 1), "c", "typo", 4, "tcp://sink"))
        until(lambda: asker.of(GroupMoved) and asker.of(GroupMoved)[-1].reason, asker)
        until(router.causes, asker)
        reasons = [moved.reason for moved in asker.of(GroupMoved) if moved.reason]
        for reason in (*reasons, *router.causes()):
            assert reason.startswith(f"no engine serves: {url} is joining: ")
            assert "worker" not in reason


def test_a_drain_reaches_its_worker_and_one_of_an_unknown_worker_is_refused(
    router: RouterProcess, peers: ScriptedPeers
) -> None:
    runner = peers.worker(router.ready.address, "w0")
    until(lambda: router.worker("w0"), runner)
    typist = peers.peer(router.ready.address, "cli")
    typist.send(AskDrain(1, "w9", ""))
    typist.send(AskDrain(2, "w0", "an update"))
    until(lambda: len(typist.of(DrainAnswered)) == 2, typist, runner)
    until(lambda: runner.of(DrainWorker), runner)
    unknown, known = typist.of(DrainAnswered)
    assert (unknown.ok, unknown.error) == (False, "no worker 'w9'; there are: w0")
    assert known == DrainAnswered(2, True, "")
    assert runner.of(DrainWorker)[0] == DrainWorker("an update")
    until(lambda: router.worker("w0")["state"] == "draining", runner)


def test_overload_is_answered_with_a_retry_time(tmp_path: Path, peers: ScriptedPeers) -> None:
    with RouterProcess(tmp_path, max_queued_groups=2) as router:
        asker = peers.client(router.ready.address)
        for seq in range(5):
            asker.send(ask(seq))
        until(lambda: len(asker.of(AskRefused)) == 3, asker)
        assert all(refused.retry_after_s > 0 for refused in asker.of(AskRefused))
        assert all(refused.reason.startswith("overloaded: ") for refused in asker.of(AskRefused))
        runner = peers.worker(router.ready.address, "w0")
        until(lambda: len(runner.of(RunGroup)) == 2, asker, runner)
        asker.send(ask(4))
        until(lambda: has_run(runner, 4), asker, runner)


# clients vanish


def test_a_client_that_vanishes_at_any_point_harms_no_other_client(
    router: RouterProcess, peers: ScriptedPeers
) -> None:
    runner = peers.worker(router.ready.address, "w0")
    until(lambda: router.worker("w0"), runner)
    for step_number in range(5):
        vanish_after(router, peers, runner, step_number)
        check_group_served(router, peers, step_number)
    assert router.process.poll() is None


def vanish_after(
    router: RouterProcess, peers: ScriptedPeers, runner: Peer, step_number: int
) -> None:
    """A client that stops after step `step_number`, without a message and with its answers
    unread.
    """
    name, group_id = f"passer-{step_number}", GroupId("passer", step_number)
    passer = peers.peer(router.ready.address, name)
    steps: list[Callable[[], None]] = [
        lambda: passer.send(ClientHello(name)),
        lambda: passer.send(AskGroup(group_id, name, "guess", 1, "tcp://x")),
        lambda: until(lambda: group_id in [run.group_id for run in runner.of(RunGroup)], runner),
        lambda: runner.send(GroupDelivered(group_id, 1)),
        lambda: passer.send(ClientLeft(name)),
    ]
    for step in steps[: step_number + 1]:
        step()
    passer.dialer.socket.close(linger=0)


# garbage

RANDOM_PEER = """
import sys
import zmq
from tests.nonsense import nonsense
socket = zmq.Context.instance().socket(zmq.DEALER)
socket.setsockopt(zmq.SNDTIMEO, 60000)
socket.connect(sys.argv[1])
for frames in nonsense(int(sys.argv[2]), int(sys.argv[3])):
    socket.send_multipart(frames)
socket.close(linger=60000)
"""


def test_garbage_from_many_peers_is_counted_and_the_mesh_continues(
    router: RouterProcess, peers: ScriptedPeers
) -> None:
    num_messages = 2000
    argv = [sys.executable, "-c", RANDOM_PEER, router.ready.address]
    random_peers = [subprocess.Popen([*argv, str(seed), str(num_messages)]) for seed in range(2)]
    check_group_served(router, peers)
    assert [random_peer.wait(PATIENCE_S) for random_peer in random_peers] == [0, 0]
    until(lambda: router.status()["counts"]["malformed"] == 2 * num_messages)
    assert router.status()["counts"]["packets_failed"] == 0
    check_group_served(router, peers, 2000)


@pytest.mark.parametrize("num_bytes", [2**26 + 1, 2**40])
def test_an_oversized_frame_closes_its_connection_and_nothing_else(
    router: RouterProcess, peers: ScriptedPeers, num_bytes: int
) -> None:
    host, port = router.ready.address.removeprefix("tcp://").split(":")
    raw: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.STREAM)
    raw.connect(f"tcp://{host}:{port}")
    route = raw.recv()
    assert raw.recv() == b""
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"NULL".ljust(20, b"\0") + bytes(32)
    raw.send_multipart([route, greeting])
    ready = b"\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER"
    raw.send_multipart([route, b"\x04" + bytes([len(ready)]) + ready])
    # The header of a long frame: no receiver will wait for so many bytes.
    raw.send_multipart([route, b"\x02" + num_bytes.to_bytes(8, "big") + b"x" * 1000])
    raw.setsockopt(zmq.RCVTIMEO, int(1000 * PATIENCE_S))
    while raw.recv_multipart()[-1] != b"":
        pass  # the router's own greeting; an empty frame means that the connection is closed
    raw.close(linger=0)
    check_group_served(router, peers)
