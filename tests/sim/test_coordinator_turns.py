"""Engines that hang, are slow or not up yet, and the resizes of healthy ones."""

from rollmesh.serve.coordinator.worker import EngineOp
from rollmesh.wire.scheduling import WorkerPhase
from tests.unit.serve.coordinator.simulated_engines import SimulatedEngines
from tests.unit.serve.coordinator.test_machine import awake


def test_a_hanging_engine_delays_the_next_resize_only_for_its_turn() -> None:
    engines = awake(0, 1)
    engines.engine(0).is_hung = True
    first = engines.resize(False, 0, turn_s=5.0)
    second = engines.resize(False, 1, turn_s=5.0)
    engines.run(4.0)
    assert engines.phases() == [WorkerPhase.SLEEPING, WorkerPhase.AWAKE]
    engines.run(3.0)
    assert engines.phases() == [WorkerPhase.SLEEPING, WorkerPhase.ASLEEP]
    assert (engines.answers()[-1].resize_id, engines.answers()[-1].error) == (second.resize_id, "")
    engines.run(14.0)
    assert engines.truth(0).phase is WorkerPhase.LOST
    assert engines.answers()[-1].resize_id == first.resize_id
    assert "worker 0" in engines.answers()[-1].error


def test_a_slow_engine_ends_its_resize_after_its_turn() -> None:
    engines = SimulatedEngines(3)
    engines.run(1.0)
    engines.engine(0).fails[EngineOp.LOAD] = "slow"
    slow = engines.resize(True, 0, turn_s=2.0)
    engines.resize(True, 1, turn_s=2.0)
    engines.run(4.0)
    third = engines.resize(True, 2, turn_s=2.0)
    engines.run(2.0)
    assert engines.phases() == [WorkerPhase.WAKING, WorkerPhase.AWAKE, WorkerPhase.AWAKE]
    engines.engine(0).fails.clear()
    engines.run(2.0)
    assert engines.truth(0).phase is WorkerPhase.AWAKE
    results = [(answer.resize_id, answer.error) for answer in engines.answers()]
    assert results[-2:] == [(third.resize_id, ""), (slow.resize_id, "")]


def test_an_engine_that_has_never_been_seen_is_absent_and_not_lost() -> None:
    engines = SimulatedEngines()
    engines.engine(1).is_hung = True
    engines.run(engines.settings.settle_s + 30.0)
    assert {hello.workers[1].phase for hello in engines.hellos()} == {WorkerPhase.ABSENT}
    engines.resize(True, 0)
    engines.run(2.0)
    assert engines.phases() == [WorkerPhase.AWAKE, WorkerPhase.ABSENT]


def test_a_slow_engine_comes_up_although_another_engine_of_its_resize_must_sleep() -> None:
    engines = SimulatedEngines()
    engines.run(1.0)
    engines.engine(0).fails[EngineOp.LOAD] = "slow"
    slow = engines.resize(True, 0, 1, turn_s=2.0)
    engines.run(3.0)
    assert engines.phases() == [WorkerPhase.WAKING, WorkerPhase.AWAKE]
    sleep = engines.resize(False, 1, turn_s=2.0)  # a trainer needs its GPU
    engines.run(2.0)
    assert engines.phases() == [WorkerPhase.WAKING, WorkerPhase.ASLEEP]
    results = [(answer.resize_id, answer.error) for answer in engines.answers()]
    assert results[-1:] == [(sleep.resize_id, "")], "a slow engine is no fault"
    engines.engine(0).fails.clear()
    engines.run(2.0)
    assert engines.phases() == [WorkerPhase.AWAKE, WorkerPhase.ASLEEP]
    results = [(answer.resize_id, answer.error) for answer in engines.answers()]
    assert results[-1:] == [(slow.resize_id, "")]


def test_an_engine_that_must_sleep_before_its_turn_to_wake_stays_asleep() -> None:
    engines = SimulatedEngines(3)
    engines.run(1.0)
    engines.engine(0).fails[EngineOp.LOAD] = "slow"
    engines.resize(True, 0, turn_s=3.0)
    engines.resize(True, 1, 2, turn_s=3.0)
    engines.resize(False, 2, turn_s=3.0)
    engines.run(5.0)
    assert engines.phases() == [WorkerPhase.WAKING, WorkerPhase.AWAKE, WorkerPhase.ASLEEP]
