"""The status snapshot and its metrics."""

import msgspec

from rollmesh.core.metrics import Exposition
from rollmesh.serve.router.status import RouterStatus, figures_of, status_of
from rollmesh.wire.fleet import EnginePhase, EngineRow, FleetChanged
from rollmesh.wire.messages import CancelGroup, GroupDelivered
from tests.unit.serve.router.scripted_router import ScriptedRouter, ask, beat, group

TABLE = FleetChanged(1, (EngineRow("http://e:1", "i1", EnginePhase.READY, 12, 3, 4, ""),))


def a_status() -> RouterStatus:
    router = ScriptedRouter()
    router.worker("w0")
    for seq in range(4):
        router.asks(ask(seq))
    router.receive("w0", GroupDelivered(group(0), 1))
    router.receive("w0", beat("w0", num_running=4))
    return status_of("i9", router.group_scheduler, TABLE, {"malformed": 2})


def test_groups_are_counted_by_state() -> None:
    status = a_status()
    assert status.queue == {"queued": 1, "assigned": 2, "running": 0}
    assert (status.num_done, status.num_clients, status.incarnation) == (1, 1, "i9")
    assert status.counts["asks"] == 4
    assert status.counts["malformed"] == 2


def test_workers_and_engines_are_named() -> None:
    status = a_status()
    [worker], [engine] = status.workers, status.engines
    assert (worker.worker_id, worker.state, worker.in_flight, worker.pid) == ("w0", "live", 8, 1)
    assert (engine.phase, engine.policy_version, engine.num_waiting) == ("ready", 12, 4)


def test_a_snapshot_does_not_change_with_the_router() -> None:
    router = ScriptedRouter()
    status = status_of("i9", router.group_scheduler, TABLE, {})
    router.asks(ask(1))
    assert status.queue["queued"] == 0


def test_a_full_worker_reports_its_held_bytes_and_budget() -> None:
    router = ScriptedRouter()
    router.worker("w0")
    full = msgspec.structs.replace(
        beat("w0", accepting=False), held_bytes=9, waits_for="held_bytes: 9 held", unacked_bytes=4
    )
    router.receive("w0", full)
    router.now_s += 2.5
    router.receive("w0", full)
    router.now_s += 1.0
    router.receive("w0", full)
    [worker] = status_of("i9", router.group_scheduler, TABLE, {}).workers
    assert worker.longest_gap_s == 2.5
    assert (worker.held_bytes, worker.unacked_bytes) == (9, 4)
    assert worker.waits_for == "held_bytes: 9 held"


def test_request_bodies_are_counted_until_their_groups_end() -> None:
    router = ScriptedRouter()
    router.asks(ask(1), b"x" * 1000)
    router.asks(ask(1), b"x" * 1000)
    assert status_of("i9", router.group_scheduler, TABLE, {}).held_bytes == {"asks": 1000}
    router.receive("c", CancelGroup(group(1), "enough"))
    assert status_of("i9", router.group_scheduler, TABLE, {}).held_bytes == {"asks": 0}


def test_every_number_of_the_status_is_a_metric() -> None:
    exposition = Exposition("router")
    exposition.add(lambda: figures_of(a_status()))
    text = exposition.render().decode()
    assert 'rollmesh_router_groups{state="queued"} 1.0' in text
    assert 'rollmesh_router_groups_ended_total{state="done"} 1.0' in text
    assert 'rollmesh_router_events_total{event="asks"} 4.0' in text
    assert 'rollmesh_worker_up{worker_id="w0"} 1.0' in text
    assert 'rollmesh_entries{table="groups"} 3.0' in text
    assert 'rollmesh_entries{table="worker_groups"} 2.0' in text
    assert 'rollmesh_cache_entries{cache="engines"} 1.0' in text
    assert 'rollmesh_engine_policy_version{engine="http://e:1"} 12.0' in text
