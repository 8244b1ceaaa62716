"""The coordinator's machine: resizes, in order and once; the truth, whatever happens."""

import pytest

from rollmesh.engine.fleet import ASLEEP
from rollmesh.serve.coordinator.machine import Coordinator
from rollmesh.serve.coordinator.worker import EngineOp
from rollmesh.wire.fleet import EnginePhase, SleepEngine
from rollmesh.wire.scheduling import ResizeWorkers, SchedulerHello, WorkerChange, WorkerPhase
from tests.unit.serve.coordinator.simulated_engines import SimulatedEngines


def test_a_fleet_that_sleeps_from_the_start_wakes_the_engine_that_is_told() -> None:
    yard = SimulatedEngines()
    yard.run(1.0)
    assert yard.phases() == [WorkerPhase.ASLEEP, WorkerPhase.ASLEEP]
    ask = yard.resize(True, 1)
    yard.run(2.0)
    assert yard.phases() == [WorkerPhase.ASLEEP, WorkerPhase.AWAKE]
    assert [yard.row(rank).phase for rank in (0, 1)] == [EnginePhase.ASLEEP, EnginePhase.READY]
    assert yard.answers()[-1].resize_id == ask.resize_id
    assert not yard.answers()[-1].error
    assert yard.toy(0).done == [EngineOp.LOOK] * len(yard.toy(0).done)


def awake(*ranks: int, num_engines: int = 2) -> SimulatedEngines:
    """A yard whose engines of these ranks are awake."""
    yard = SimulatedEngines(num_engines)
    yard.run(1.0)
    yard.resize(True, *ranks)
    yard.run(2.0)
    assert all(yard.truth(rank).phase is WorkerPhase.AWAKE for rank in ranks)
    return yard


def test_a_shrink_takes_the_engine_out_of_the_table_before_it_is_cut_and_released() -> None:
    yard = awake(0, 1)
    yard.toy(0).num_requests = 3
    yard.toy(0).done.clear()
    yard.resize(False, 0)
    assert yard.row(0).phase is EnginePhase.ASLEEP
    assert not yard.toy(0).is_released
    yard.run(1.0)
    assert yard.truth(0).phase is WorkerPhase.SLEEPING
    assert set(yard.toy(0).done) == {EngineOp.LOOK}
    yard.toy(0).num_requests = 0
    yard.run(1.0)
    assert yard.truth(0).phase is WorkerPhase.ASLEEP
    assert yard.toy(0).is_released
    assert yard.row(1).phase is EnginePhase.READY


def test_what_does_not_leave_is_cut_after_a_while() -> None:
    yard = awake(0, 1)
    yard.toy(0).num_requests = 3
    yard.resize(False, 0)
    yard.run(yard.settings.drain_s + 1.0)
    assert EngineOp.PAUSE in yard.toy(0).done
    assert yard.truth(0).phase is WorkerPhase.ASLEEP


def test_a_woken_engine_has_the_newest_weights_before_anybody_is_sent_there() -> None:
    yard = awake(0)
    yard.newest = 7
    yard.resize(True, 1)
    while yard.truth(1).phase is not WorkerPhase.AWAKE:
        yard.run(0.05)
        assert (yard.row(1).phase is EnginePhase.READY) <= (yard.toy(1).policy_version == 7)
    looks = [op for op in yard.toy(1).done if op is not EngineOp.LOOK]
    assert looks == [EngineOp.RESUME, EngineOp.LOAD, EngineOp.PROBE]
    assert yard.row(1).policy_version == 7


def test_resizes_are_carried_out_one_after_another() -> None:
    yard = awake(0, 1)
    yard.toy(0).num_requests = 3
    first, second = yard.resize(False, 0), yard.resize(False, 1)
    yard.run(2.0)
    assert yard.phases() == [WorkerPhase.SLEEPING, WorkerPhase.AWAKE]
    yard.toy(0).num_requests = 0
    yard.run(2.0)
    assert yard.phases() == [WorkerPhase.ASLEEP, WorkerPhase.ASLEEP]
    told = [answer.resize_id for answer in yard.answers()]
    assert told[-2:] == [first.resize_id, second.resize_id]


def test_of_a_resize_that_is_late_only_who_is_late_is_lost() -> None:
    """Not who is there, nor who is on its way in another one."""
    yard = SimulatedEngines(3)
    yard.run(1.0)
    yard.toy(0).fails[EngineOp.LOAD] = "slow"
    late = yard.resize(True, 0, 1, deadline_s=6.0, turn_s=2.0)
    yard.toy(2).fails[EngineOp.LOAD] = "slow"
    other = yard.resize(True, 2)
    yard.run(8.0)
    assert yard.answers()[-1].resize_id == late.resize_id
    assert yard.phases()[1:] == [WorkerPhase.AWAKE, WorkerPhase.WAKING]
    yard.toy(2).fails.clear()
    yard.run(2.0)
    assert (yard.answers()[-1].resize_id, yard.answers()[-1].error) == (other.resize_id, "")


def test_a_resize_that_failed_is_not_begun_anew_by_being_said_again() -> None:
    yard = SimulatedEngines()
    yard.run(1.0)
    yard.toy(0).fails[EngineOp.LOAD] = "slow"
    ask = yard.resize(True, 0, deadline_s=3.0)
    yard.run(5.0)
    yard.toy(0).fails.clear()
    error = yard.answers()[-1].error
    yard.hear(ask)
    yard.run(5.0)
    assert error
    assert (yard.answers()[-1].resize_id, yard.answers()[-1].error) == (ask.resize_id, error)
    assert yard.truth(0).phase is WorkerPhase.ASLEEP


def test_before_the_router_is_heard_no_engine_is_touched() -> None:
    """Whether one is awake stands in its table: what serves would be put to sleep."""
    yard = awake(0)
    yard.is_router_deaf = True
    yard.restart()
    num_done = len(yard.toy(0).done)
    yard.run(2.0)
    assert yard.toy(0).done[num_done:] == []
    yard.is_router_deaf = False
    yard.run(2.0)
    assert yard.truth(0).phase is WorkerPhase.AWAKE


def test_an_older_epoch_is_refused_and_changes_nothing() -> None:
    yard = awake(0)
    yard.resize(False, 0, epoch=7)
    yard.run(2.0)
    yard.resize(True, 0, epoch=6)
    yard.run(2.0)
    assert "epoch 7" in yard.answers()[-1].error
    assert yard.truth(0) == yard.answers()[-1].workers[0]
    assert yard.truth(0).phase is WorkerPhase.ASLEEP


def test_a_resize_that_is_said_again_is_answered_again_and_not_done_again() -> None:
    yard = SimulatedEngines()
    yard.run(1.0)
    ask = yard.resize(True, 0)
    yard.hear(ask)
    yard.run(2.0)
    yard.hear(ask)
    assert [answer.resize_id for answer in yard.answers()] == [ask.resize_id] * 2
    assert yard.toy(0).done.count(EngineOp.LOAD) == 1


def test_a_number_said_anew_by_a_scheduler_that_lost_its_journal_is_another_resize() -> None:
    yard = awake(0)
    yard.hear(ResizeWorkers("p", 1, (WorkerChange(0, False, 9),), 20.0))
    yard.run(2.0)
    assert yard.truth(0).phase is WorkerPhase.ASLEEP
    assert not yard.answers()[-1].error


def test_what_is_left_of_a_resize_is_that_resize_said_again() -> None:
    yard = SimulatedEngines()
    yard.run(1.0)
    both = WorkerChange(0, True, 1), WorkerChange(1, True, 1)
    yard.hear(ResizeWorkers("p", 1, both, 20.0))
    yard.hear(ResizeWorkers("p", 1, both[1:], 19.0))
    yard.run(5.0)
    yard.hear(ResizeWorkers("p", 1, both[:1], 15.0))
    assert [answer.error for answer in yard.answers()] == ["", ""]
    assert yard.toy(1).done.count(EngineOp.LOAD) == 1


def test_a_newer_resize_of_the_same_engine_overtakes() -> None:
    yard = SimulatedEngines()
    yard.run(1.0)
    yard.toy(0).fails[EngineOp.LOAD] = "no such folder"
    yard.resize(True, 0)
    yard.run(1.0)
    yard.resize(False, 0)
    yard.run(3.0)
    assert "overtaken" in yard.answers()[0].error
    assert not yard.answers()[1].error
    assert yard.truth(0).phase is WorkerPhase.ASLEEP


def test_what_fails_is_tried_again_within_the_deadline() -> None:
    yard = SimulatedEngines()
    yard.run(1.0)
    yard.toy(0).fails[EngineOp.LOAD] = "the folder was pruned"
    yard.resize(True, 0)
    yard.run(3.0)
    assert "pruned" in yard.truth(0).detail
    yard.toy(0).fails.clear()
    yard.run(3.0)
    assert not yard.answers()[-1].error
    assert yard.truth(0).phase is WorkerPhase.AWAKE


def test_an_engine_that_cannot_wake_in_time_is_lost_and_put_to_sleep_again() -> None:
    yard = SimulatedEngines()
    yard.run(1.0)
    yard.toy(0).fails[EngineOp.LOAD] = "no such folder"
    yard.resize(True, 0, deadline_s=5.0)
    yard.run(5.2)
    [answer] = yard.answers()
    assert "no such folder" in answer.error
    assert answer.workers[0].phase is WorkerPhase.LOST
    yard.run(3.0)
    assert yard.truth(0).phase is WorkerPhase.ASLEEP
    assert yard.toy(0).is_released
    assert yard.row(0).phase is EnginePhase.ASLEEP


def test_a_hung_engine_is_lost_alone_and_sleeps_when_it_is_back() -> None:
    yard = awake(0, 1)
    yard.toy(0).is_hung = True
    yard.resize(False, 0, deadline_s=5.0)
    yard.run(6.0)
    assert yard.truth(0).phase is WorkerPhase.LOST
    assert yard.truth(0).detail
    yard.resize(False, 1)
    yard.run(2.0)
    assert yard.truth(1).phase is WorkerPhase.ASLEEP
    yard.toy(0).is_hung = False
    yard.run(3.0)
    assert yard.truth(0).phase is WorkerPhase.ASLEEP
    assert yard.hellos()[-1].workers[0].phase is WorkerPhase.ASLEEP


class BelievesAnyAnswer(Coordinator):
    """The fault: what the process before is answered late is taken for its own."""

    def _on_scheduler(self, hello: SchedulerHello) -> None:
        super()._on_scheduler(hello)
        self._is_confirmed |= hello.newest_s < self._started_s


@pytest.mark.parametrize(("kind", "is_heard"), [(Coordinator, True), (BelievesAnyAnswer, False)])
@pytest.mark.parametrize("late_s", [0.0, 1000.0])
def test_who_hears_a_late_answer_to_the_process_before_still_goes_above_it(
    kind: type[Coordinator], is_heard: bool, late_s: float
) -> None:
    """Its clock was set back; once it is believed itself, it goes above nobody."""
    yard = SimulatedEngines(kind=kind, started_s=1400.5)
    yard.run(1.0)
    for newest_s in (late_s, 5000.0):
        yard.hear(SchedulerHello("s1", newest_s=newest_s))
    mine_s = yard.hellos()[-1].started_s
    assert (mine_s > 5000.0) is is_heard
    for newest_s in (mine_s, 9000.0):
        yard.hear(SchedulerHello("s1", newest_s=newest_s))
    yard.run(2.0)
    assert yard.hellos()[-1].started_s == mine_s


def test_the_truth_is_said_each_second_and_at_once_to_another_scheduler() -> None:
    yard = awake(0)
    yard.hear(SchedulerHello("s1"))
    yard.run(0.1)
    num = len(yard.hellos())
    yard.hear(SchedulerHello("s1"))
    assert len(yard.hellos()) == num
    yard.hear(SchedulerHello("s2"))
    assert len(yard.hellos()) == num + 1
    yard.run(3.1)
    assert len(yard.hellos()) >= num + 4
    yard.toy(0).kv_tokens = 123
    yard.run(3.0)
    assert yard.hellos()[-1].workers[0].kv_tokens == 123


def test_without_a_scheduler_nothing_changes_and_sleep_stays_leased() -> None:
    yard = awake(0)
    yard.asked.clear()
    yard.run(60.0)
    assert yard.phases() == [WorkerPhase.AWAKE, WorkerPhase.ASLEEP]
    leases = [each for each in yard.asked if isinstance(each, SleepEngine)]
    assert {each.url for each in leases} == {yard.urls[1]}
    assert len(leases) >= 60.0 / yard.settings.lease_s
    assert yard.row(1).detail == ASLEEP


def test_a_coordinator_that_comes_back_finds_what_is_awake_and_touches_nothing() -> None:
    yard = awake(0)
    yard.toy(0).num_requests = 3
    yard.restart()
    yard.run(2.0)
    assert yard.phases() == [WorkerPhase.AWAKE, WorkerPhase.ASLEEP]
    assert yard.toy(0).num_requests == 3
    assert yard.hellos()[-1].workers == yard.coordinator.truths()


def test_a_coordinator_that_comes_back_in_mid_resize_puts_what_is_half_awake_to_sleep() -> None:
    yard = SimulatedEngines()
    yard.run(1.0)
    yard.toy(0).fails[EngineOp.LOAD] = "slow"
    yard.resize(True, 0)
    yard.run(1.0)
    assert not yard.toy(0).is_released
    yard.restart()
    num = len(yard.hellos())
    yard.run(3.0)
    assert yard.phases() == [WorkerPhase.ASLEEP, WorkerPhase.ASLEEP]
    assert yard.toy(0).is_released
    first = yard.hellos()[num]
    assert first.workers[0].phase is not WorkerPhase.AWAKE


def test_the_first_truth_waits_for_a_silent_engine_only_for_a_while() -> None:
    yard = awake(0)
    yard.toy(1).is_hung = True
    yard.restart()
    num = len(yard.hellos())
    yard.run(yard.settings.settle_s - 1.0)
    assert len(yard.hellos()) == num
    yard.run(2.0)
    assert yard.hellos()[-1].workers[0].phase is WorkerPhase.AWAKE
    assert yard.hellos()[-1].workers[1].phase is WorkerPhase.ABSENT
    assert yard.hellos()[-1].workers[1].detail
    yard.toy(1).is_hung = False
    yard.run(3.0)
    assert yard.hellos()[-1].workers[1].phase is WorkerPhase.ASLEEP


def test_of_another_pipeline_or_worker_nothing_is_done() -> None:
    yard = SimulatedEngines()
    yard.run(1.0)
    yard.hear(ResizeWorkers("q", 1, (WorkerChange(0, True, 1),), 5.0))
    yard.hear(ResizeWorkers("p", 2, (WorkerChange(9, True, 1),), 5.0))
    yard.hear(ResizeWorkers("p", 3, (WorkerChange(0, True, 1),), 5.0, started_s=7.0))
    yard.run(2.0)
    assert [answer.resize_id for answer in yard.answers()] == [2]
    assert "no worker 9" in yard.answers()[0].error
    assert yard.phases() == [WorkerPhase.ASLEEP, WorkerPhase.ASLEEP]


def test_an_awake_engine_that_was_started_anew_asleep_is_brought_up_again() -> None:
    yard = awake(0)
    yard.toy(0).start_anew()
    yard.run(5.0)
    assert yard.truth(0).phase is WorkerPhase.AWAKE
    assert not yard.toy(0).is_released
    assert yard.row(0).phase is EnginePhase.READY
    assert {hello.workers[0].phase for hello in yard.hellos()[2:]} == {WorkerPhase.AWAKE}


def test_one_that_does_not_come_up_again_is_lost_and_sleeps() -> None:
    yard = awake(0)
    yard.toy(0).start_anew()
    yard.toy(0).fails[EngineOp.LOAD] = "no such folder"
    yard.run(yard.settings.repair_s - 2.0)
    assert yard.truth(0).phase is WorkerPhase.AWAKE
    assert yard.row(0).phase is EnginePhase.ASLEEP
    yard.run(8.0)
    assert yard.truth(0).phase is WorkerPhase.ASLEEP
    assert WorkerPhase.LOST in {hello.workers[0].phase for hello in yard.hellos()}


def test_a_sleeping_engine_that_was_started_anew_with_its_memory_gives_it_up_again() -> None:
    yard = awake(0)
    yard.toy(1).start_anew()
    yard.toy(1).is_released = False
    yard.run(3.0)
    assert yard.toy(1).is_released
    assert WorkerPhase.LOST not in {hello.workers[1].phase for hello in yard.hellos()}
    yard.toy(1).is_released = False
    yard.toy(1).fails[EngineOp.RELEASE] = "requests run"
    yard.run(3.0)
    assert yard.truth(1).phase is WorkerPhase.LOST
    yard.toy(1).fails.clear()
    yard.run(3.0)
    assert yard.truth(1).phase is WorkerPhase.ASLEEP


def test_a_router_that_was_started_anew_is_told_what_is_awake() -> None:
    yard = awake(0)
    yard.start_router()
    yard.run(2.0)
    assert [yard.row(rank).phase for rank in (0, 1)] == [EnginePhase.READY, EnginePhase.ASLEEP]
    yard.start_router(is_asleep=False)  # which knows none of them
    yard.run(2.0)
    assert [yard.row(rank).phase for rank in (0, 1)] == [EnginePhase.READY, EnginePhase.ASLEEP]
    yard.resize(True, 1)
    yard.run(2.0)
    assert yard.row(1).phase is EnginePhase.READY


def test_asks_that_the_router_did_not_hear_are_said_again() -> None:
    yard = awake(0)
    yard.is_router_deaf = True
    yard.resize(False, 0)
    yard.run(2.0)
    assert yard.truth(0).phase is WorkerPhase.SLEEPING
    assert set(yard.toy(0).done) <= {EngineOp.RESUME, EngineOp.LOAD, EngineOp.PROBE, EngineOp.LOOK}
    yard.is_router_deaf = False
    yard.run(2.0)
    assert yard.truth(0).phase is WorkerPhase.ASLEEP
