"""Engines that hang, are slow or not there yet, and the resizes of those that are well."""

from rollmesh.serve.coordinator.worker import EngineOp
from rollmesh.wire.scheduling import WorkerPhase
from tests.unit.serve.coordinator.simulated_engines import SimulatedEngines
from tests.unit.serve.coordinator.test_machine import awake


def test_an_engine_that_hangs_keeps_the_next_resize_waiting_for_its_turn_only() -> None:
    yard = awake(0, 1)
    yard.toy(0).is_hung = True
    first = yard.resize(False, 0, turn_s=5.0)
    second = yard.resize(False, 1, turn_s=5.0)
    yard.run(4.0)
    assert yard.phases() == [WorkerPhase.SLEEPING, WorkerPhase.AWAKE]
    yard.run(3.0)
    assert yard.phases() == [WorkerPhase.SLEEPING, WorkerPhase.ASLEEP]
    assert (yard.answers()[-1].resize_id, yard.answers()[-1].error) == (second.resize_id, "")
    yard.run(14.0)
    assert yard.truth(0).phase is WorkerPhase.LOST
    assert yard.answers()[-1].resize_id == first.resize_id
    assert "worker 0" in yard.answers()[-1].error


def test_an_engine_that_is_slow_ends_its_resize_after_its_turn() -> None:
    yard = SimulatedEngines(3)
    yard.run(1.0)
    yard.toy(0).fails[EngineOp.LOAD] = "slow"
    slow = yard.resize(True, 0, turn_s=2.0)
    yard.resize(True, 1, turn_s=2.0)
    yard.run(4.0)
    third = yard.resize(True, 2, turn_s=2.0)
    yard.run(2.0)
    assert yard.phases() == [WorkerPhase.WAKING, WorkerPhase.AWAKE, WorkerPhase.AWAKE]
    yard.toy(0).fails.clear()
    yard.run(2.0)
    assert yard.truth(0).phase is WorkerPhase.AWAKE
    told = [(answer.resize_id, answer.error) for answer in yard.answers()]
    assert told[-2:] == [(third.resize_id, ""), (slow.resize_id, "")]


def test_an_engine_that_has_never_been_seen_is_absent_and_not_lost() -> None:
    yard = SimulatedEngines()
    yard.toy(1).is_hung = True
    yard.run(yard.settings.settle_s + 30.0)
    assert {hello.workers[1].phase for hello in yard.hellos()} == {WorkerPhase.ABSENT}
    yard.resize(True, 0)
    yard.run(2.0)
    assert yard.phases() == [WorkerPhase.AWAKE, WorkerPhase.ABSENT]


def test_an_engine_that_is_slow_comes_up_though_another_of_its_resize_is_told_to_sleep() -> None:
    yard = SimulatedEngines()
    yard.run(1.0)
    yard.toy(0).fails[EngineOp.LOAD] = "slow"
    slow = yard.resize(True, 0, 1, turn_s=2.0)
    yard.run(3.0)
    assert yard.phases() == [WorkerPhase.WAKING, WorkerPhase.AWAKE]
    sleep = yard.resize(False, 1, turn_s=2.0)  # a trainer wants its GPU
    yard.run(2.0)
    assert yard.phases() == [WorkerPhase.WAKING, WorkerPhase.ASLEEP]
    told = [(answer.resize_id, answer.error) for answer in yard.answers()]
    assert told[-1:] == [(sleep.resize_id, "")], "that one is slow is no fault"
    yard.toy(0).fails.clear()
    yard.run(2.0)
    assert yard.phases() == [WorkerPhase.AWAKE, WorkerPhase.ASLEEP]
    told = [(answer.resize_id, answer.error) for answer in yard.answers()]
    assert told[-1:] == [(slow.resize_id, "")]


def test_an_engine_that_is_told_to_sleep_before_its_turn_to_wake_stays_asleep() -> None:
    yard = SimulatedEngines(3)
    yard.run(1.0)
    yard.toy(0).fails[EngineOp.LOAD] = "slow"
    yard.resize(True, 0, turn_s=3.0)
    yard.resize(True, 1, 2, turn_s=3.0)
    yard.resize(False, 2, turn_s=3.0)
    yard.run(5.0)
    assert yard.phases() == [WorkerPhase.WAKING, WorkerPhase.AWAKE, WorkerPhase.ASLEEP]
