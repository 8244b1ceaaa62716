"""A sleeping engine gets no requests until a WakeEngine request."""

import pytest

from rollmesh.engine.fleet import ContinueEngine
from rollmesh.engine.members import LAPSED
from rollmesh.engine.view import FleetView
from rollmesh.wire.fleet import (
    BeginUpdate,
    EngineFaulted,
    EnginePhase,
    FinishUpdate,
    PublisherLeft,
    RemoveEngine,
    SleepEngine,
    WakeEngine,
)
from rollmesh.wire.machine import Received
from tests.unit.engine.fleet_bench import A, B, Bench, ready

COORDINATOR = b"coordinator"


def test_an_engine_that_was_put_to_sleep_is_continued_and_probed_when_it_is_woken() -> None:
    bench = ready(A)
    assert bench.ask(SleepEngine(2, A, 5.0)).ok
    assert bench.phase() is EnginePhase.ASLEEP
    assert not bench.ask(BeginUpdate(3, A, 1, 5.0)).ok
    assert bench.ask(WakeEngine(4, A, 0)).ok
    assert isinstance(bench.pending[A], ContinueEngine)
    bench.answer(A)
    assert bench.phase() is EnginePhase.READY


def test_a_lapsed_lease_wakes_no_engine() -> None:
    bench = ready(A)
    bench.ask(SleepEngine(2, A, 5.0), COORDINATOR)
    bench.tick(1000.0)
    assert (bench.phase(), bench.row().detail) == (EnginePhase.ASLEEP, LAPSED)
    assert A not in bench.pending
    bench.take(bench.fleet.step(Received(COORDINATOR, PublisherLeft()), bench.now_s))
    assert bench.phase() is EnginePhase.ASLEEP
    assert bench.ask(SleepEngine(3, A, 5.0), b"restarted coordinator").ok
    assert bench.row().detail != LAPSED
    bench.ask(WakeEngine(4, A, 0), b"restarted coordinator")
    bench.answer(A)
    assert bench.phase() is EnginePhase.READY


def test_an_engine_may_sleep_before_it_has_ever_answered() -> None:
    bench = Bench()
    assert bench.ask(SleepEngine(1, A, 0.0)).ok
    bench.tick(10.0)
    assert bench.phase() is EnginePhase.ASLEEP
    assert not bench.pending
    bench.ask(WakeEngine(2, A, 0))
    bench.answer(A, policy_version=0)
    assert bench.phase() is EnginePhase.READY


@pytest.mark.parametrize("phase", [EnginePhase.JOINING, EnginePhase.FENCED])
def test_a_joining_or_fenced_engine_can_sleep(phase: EnginePhase) -> None:
    bench = ready(A) if phase is EnginePhase.FENCED else Bench(A)
    for _ in range(3):
        fault = EngineFaulted(A, "i1", "reset")
        bench.take(bench.fleet.step(Received(b"w", fault), bench.now_s))
    assert bench.phase() is phase
    assert bench.ask(SleepEngine(2, A, 5.0)).ok
    assert bench.phase() is EnginePhase.ASLEEP


def test_a_probe_answered_after_the_sleep_does_not_wake_the_engine() -> None:
    bench = ready(A)
    bench.tick(1.0)
    bench.ask(SleepEngine(2, A, 5.0))
    bench.answer(A)
    assert bench.phase() is EnginePhase.ASLEEP


def test_an_engine_cannot_be_put_to_sleep_during_an_update() -> None:
    bench = ready(A)
    bench.ask(BeginUpdate(2, A, 1, 5.0))
    refused = bench.ask(SleepEngine(3, A, 5.0), COORDINATOR)
    assert "being updated" in refused.error
    bench.ask(FinishUpdate(4, A, 1, True))
    assert bench.ask(SleepEngine(5, A, 5.0), COORDINATOR).ok
    assert not bench.ask(FinishUpdate(6, A, 1, True)).ok
    assert bench.phase() is EnginePhase.ASLEEP


def test_a_woken_engine_with_older_weights_waits_for_the_publisher() -> None:
    bench = ready(A, B)
    bench.ask(SleepEngine(2, A, 5.0), COORDINATOR)
    bench.ask(BeginUpdate(3, B, 1, 5.0))
    bench.ask(FinishUpdate(4, B, 1, True))
    bench.ask(WakeEngine(5, A, 0), COORDINATOR)
    bench.answer(A, policy_version=0)
    assert bench.phase(A) is EnginePhase.JOINING
    assert "the fleet is at 1" in bench.row(A).detail
    bench.ask(BeginUpdate(6, A, 1, 5.0))
    bench.ask(FinishUpdate(7, A, 1, True))
    assert bench.phase(A) is EnginePhase.READY


def test_a_removed_engine_that_is_put_to_sleep_joins_asleep() -> None:
    bench = ready(A)
    bench.ask(RemoveEngine(2, A))
    assert bench.ask(SleepEngine(3, A, 5.0)).ok
    assert bench.phase() is EnginePhase.ASLEEP


def test_callers_of_a_sleeping_fleet_wait() -> None:
    bench, view = ready(A, B), FleetView()
    bench.ask(SleepEngine(2, A, 5.0))
    view.update(bench.fleet.table(), "r")
    assert not view.is_paused(0)
    bench.ask(SleepEngine(3, B, 5.0))
    view.update(bench.fleet.table(), "r")
    assert view.choose("session", 0) is None
    assert view.is_paused(0)
    assert not view.why_never(0)
