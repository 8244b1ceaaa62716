"""A real router process, and peers on real sockets: some well-behaved, some dead, some
malicious.
"""

import subprocess
import sys
from functools import partial
from pathlib import Path

from rollmesh.core.ids import GroupId
from rollmesh.engine.table_sync import TableCopy
from rollmesh.wire.fleet import EnginePhase, FleetAnswered, JoinEngine, ReadFleet, TableMessage
from rollmesh.wire.frames import Packet
from rollmesh.wire.messages import (
    AskGroup,
    ClientHello,
    GroupDelivered,
    GroupMoved,
    GroupStarted,
    GroupState,
    HeldGroup,
    RunGroup,
    WorkerHello,
)
from tests.flow.router_process import Peer, RouterProcess, ScriptedPeers, ask, until


def test_a_group_goes_to_a_worker_and_its_body_unchanged(
    router: RouterProcess, peers: ScriptedPeers
) -> None:
    asker, runner = peers.client(router.ready.address), peers.worker(router.ready.address, "w0")
    asker.send(ask(1), body=b"\x00 not for routers \xff")
    until(lambda: runner.of(RunGroup) and asker.of(GroupMoved), runner, asker)
    [packet] = [p for p in runner.received if isinstance(p.message, RunGroup)]
    assert bytes(packet.body) == b"\x00 not for routers \xff"
    assert packet.router == router.status()["incarnation"]
    runner.send(GroupStarted(GroupId("r1", 1), 1))
    until(lambda: asker.of(GroupMoved)[-1].state is GroupState.RUNNING, asker)
    runner.send(GroupDelivered(GroupId("r1", 1), 1))
    until(lambda: asker.of(GroupMoved)[-1].state is GroupState.DONE, asker)
    states = [moved.state for moved in asker.of(GroupMoved)]
    assert states[-3:] == [GroupState.ASSIGNED, GroupState.RUNNING, GroupState.DONE]


def test_status_health_and_metrics_are_served(router: RouterProcess, peers: ScriptedPeers) -> None:
    runner = peers.worker(router.ready.address, "w0")
    until(lambda: router.status()["workers"], runner)
    status = router.status()
    [row] = status["workers"]
    assert (row["worker_id"], row["env"], row["state"]) == ("w0", "guess", "live")
    assert status["queue"] == {"queued": 0, "assigned": 0, "running": 0}
    assert router.get("/healthz") == b"ok\n"
    assert b'rollmesh_worker_up{worker_id="w0"} 1.0' in router.get("/metrics")


def test_garbage_on_the_wire_is_counted_and_survived(
    router: RouterProcess, peers: ScriptedPeers
) -> None:
    garbage_peer = peers.peer(router.ready.address, "vandal").dialer
    for frames in ([b""], [b"\xff" * 40], [b"", b"", b""], [b"\x93\x01\xa0\x91\xa1x", b""]):
        garbage_peer.socket.send_multipart(frames)
    until(lambda: router.status()["counts"]["malformed"] == 4)
    asker, runner = peers.client(router.ready.address), peers.worker(router.ready.address, "w0")
    asker.send(ask(1))
    until(lambda: runner.of(RunGroup), runner, asker)
    assert router.status()["counts"]["packets_failed"] == 0


def test_clients_that_request_and_leave_harm_no_other_client(
    router: RouterProcess, peers: ScriptedPeers
) -> None:
    for number in range(20):
        passer = peers.peer(router.ready.address, f"p{number}")
        passer.send(ClientHello(f"p{number}"))
        passer.send(AskGroup(GroupId(f"p{number}", 0), f"p{number}", "none", 4, "tcp://x"))
        passer.dialer.close()
    until(lambda: router.status()["num_clients"] >= 1)
    asker, runner = peers.client(router.ready.address), peers.worker(router.ready.address, "w0")
    asker.send(ask(1))
    until(lambda: runner.of(RunGroup), runner, asker)
    assert router.process.poll() is None


def test_a_peer_that_does_not_read_blocks_no_other_peer(
    router: RouterProcess, peers: ScriptedPeers
) -> None:
    starter, sleeper = (
        peers.peer(router.ready.address, "launch"),
        peers.peer(router.ready.address, "sleeper"),
    )
    for number in range(20):
        starter.send(JoinEngine(number, f"http://127.0.0.1:1/{'long' * 50}{number}"))
    until(lambda: len(starter.of(FleetAnswered)) == 20, starter)

    def has_overflowed() -> bool:
        # It requests far more than its queue of answers holds, and reads none of them.
        for _ in range(1000):
            sleeper.dialer.send(Packet(ReadFleet(1)))
        return bool(router.status()["counts"]["unsent"] > 0)

    until(has_overflowed)
    asker, runner = peers.client(router.ready.address), peers.worker(router.ready.address, "w0")
    asker.send(ask(1))
    until(lambda: runner.of(RunGroup), runner, asker)
    assert runner.of(RunGroup)[0].group_id == GroupId("r1", 1)


def test_a_restarted_router_learns_the_running_groups_and_runs_nothing_twice(
    tmp_path: Path, peers: ScriptedPeers
) -> None:
    with RouterProcess(tmp_path) as first:
        address = first.ready.address
        asker, runner = peers.client(address), peers.worker(address, "w0")
        asker.send(ask(1))
        until(lambda: runner.of(RunGroup), asker, runner)
        runner.send(GroupStarted(GroupId("r1", 1), 1))
        until(lambda: first.status()["queue"]["running"], asker, runner)
        first.process.kill()
        first.process.wait()
    before = runner.received[-1].router
    # Slow heartbeats leave the peers time for their claims, however busy the machine is.
    with RouterProcess(tmp_path, bind=address, beat_s=2.0):
        idle = peers.worker(address, "w1")
        # Their heartbeats continue; the answers show them that the router was restarted.
        for peer in (asker, runner, idle):
            until(partial(has_met_another, peer, before), asker, runner, idle)
        asker.send(ask(1, attempts=1))
        until(lambda: asker.of(GroupMoved)[-1].state is GroupState.QUEUED, asker, runner, idle)
        held = HeldGroup(GroupId("r1", 1), 1, False)
        runner.send(WorkerHello("w0", "guess", 8, 1, "here", (held,)))
        until(lambda: asker.of(GroupMoved)[-1].state is GroupState.RUNNING, asker, runner, idle)
        assert asker.of(GroupMoved)[-1].worker_id == "w0"
        runner.send(GroupDelivered(GroupId("r1", 1), 1))
        until(lambda: asker.of(GroupMoved)[-1].state is GroupState.DONE, asker, runner, idle)
    assert [run.attempt for run in runner.of(RunGroup)] == [1]
    assert idle.of(RunGroup) == []


def has_met_another(peer: Peer, router: str) -> bool:
    return bool(peer.received) and peer.received[-1].router != router


def test_an_engine_of_an_allowed_host_joins_on_request_and_the_table_reaches_the_workers(
    tmp_path: Path, peers: ScriptedPeers
) -> None:
    with RouterProcess(tmp_path, settings=('engine.allow_hosts=["127.0.0.0/8"]',)) as router:
        runner, starter = (
            peers.worker(router.ready.address, "w0"),
            peers.peer(router.ready.address, "launch"),
        )
        starter.send(JoinEngine(7, "http://127.0.0.1:1"))
        until(lambda: starter.of(FleetAnswered), starter)
        [answer] = starter.of(FleetAnswered)
        assert (answer.ask_id, answer.ok) == (7, True)
        until(lambda: table_of(runner).rows, runner)
        [row] = table_of(runner).rows.values()
        assert (row.url, row.phase) == ("http://127.0.0.1:1", EnginePhase.JOINING)


def table_of(worker: Peer) -> TableCopy:
    """The table that the worker's messages make."""
    copy = TableCopy()
    for packet in worker.received:
        if isinstance(packet.message, TableMessage):
            copy.take(packet.message, packet.router)
    return copy


def test_addresses_that_other_hosts_reach_need_keys_or_a_token(tmp_path: Path) -> None:
    for setting, part in (
        ("router.bind=tcp://0.0.0.0:0", "ROLLMESH_KEYS"),
        ("router.http_bind=0.0.0.0:0", "ROLLMESH_ADMIN_TOKEN"),
    ):
        argv = [sys.executable, "-m", "rollmesh.cli.main", "router", "--set", setting]
        done = subprocess.run(argv, capture_output=True, text=True, cwd=tmp_path, check=False)
        assert done.returncode == 2
        assert part in done.stderr
        assert len(done.stderr.splitlines()) == 1
