"""The coordinator's state machine carries out resizes in order and once, and reports the true
state of its engines.
"""

import pytest

from rollmesh.engine.members import ASLEEP
from rollmesh.serve.coordinator.machine import Coordinator
from rollmesh.serve.coordinator.worker import EngineOp
from rollmesh.wire.fleet import AddEngine, DropEngine, EnginePhase, SleepEngine
from rollmesh.wire.machine import Received
from rollmesh.wire.scheduling import ResizeWorkers, SchedulerHello, WorkerChange, WorkerPhase
from tests.unit.serve.coordinator.simulated_engines import SimulatedEngines


def test_a_fleet_that_sleeps_from_the_start_wakes_only_the_requested_engine() -> None:
    engines = SimulatedEngines()
    engines.run(1.0)
    assert engines.phases() == [WorkerPhase.ASLEEP, WorkerPhase.ASLEEP]
    ask = engines.resize(True, 1)
    engines.run(2.0)
    assert engines.phases() == [WorkerPhase.ASLEEP, WorkerPhase.AWAKE]
    assert [engines.row(rank).phase for rank in (0, 1)] == [EnginePhase.ASLEEP, EnginePhase.READY]
    assert engines.answers()[-1].resize_id == ask.resize_id
    assert not engines.answers()[-1].error
    assert engines.engine(0).done == [EngineOp.LOOK] * len(engines.engine(0).done)


def awake(*ranks: int, num_engines: int = 2) -> SimulatedEngines:
    """Return simulated engines of which those of `ranks` are awake."""
    engines = SimulatedEngines(num_engines)
    engines.run(1.0)
    engines.resize(True, *ranks)
    engines.run(2.0)
    assert all(engines.truth(rank).phase is WorkerPhase.AWAKE for rank in ranks)
    return engines


def test_a_shrink_takes_the_engine_out_of_the_table_before_it_is_cut_and_released() -> None:
    engines = awake(0, 1)
    engines.engine(0).num_requests = 3
    engines.engine(0).done.clear()
    engines.resize(False, 0)
    assert engines.row(0).phase is EnginePhase.ASLEEP
    assert not engines.engine(0).is_released
    engines.run(1.0)
    assert engines.truth(0).phase is WorkerPhase.SLEEPING
    assert set(engines.engine(0).done) == {EngineOp.LOOK}
    engines.engine(0).num_requests = 0
    engines.run(1.0)
    assert engines.truth(0).phase is WorkerPhase.ASLEEP
    assert engines.engine(0).is_released
    assert engines.row(1).phase is EnginePhase.READY


def test_requests_that_do_not_end_are_aborted_after_a_while() -> None:
    engines = awake(0, 1)
    engines.engine(0).num_requests = 3
    engines.resize(False, 0)
    engines.run(engines.settings.drain_s + 1.0)
    assert EngineOp.PAUSE in engines.engine(0).done
    assert engines.truth(0).phase is WorkerPhase.ASLEEP


def test_a_woken_engine_has_the_newest_weights_before_it_receives_requests() -> None:
    engines = awake(0)
    engines.newest = 7
    engines.resize(True, 1)
    while engines.truth(1).phase is not WorkerPhase.AWAKE:
        engines.run(0.05)
        assert (engines.row(1).phase is EnginePhase.READY) <= (
            engines.engine(1).policy_version == 7
        )
    looks = [op for op in engines.engine(1).done if op is not EngineOp.LOOK]
    assert looks == [EngineOp.RESUME, EngineOp.LOAD, EngineOp.PROBE]
    assert engines.row(1).policy_version == 7


def test_resizes_are_carried_out_one_after_another() -> None:
    engines = awake(0, 1)
    engines.engine(0).num_requests = 3
    first, second = engines.resize(False, 0), engines.resize(False, 1)
    engines.run(2.0)
    assert engines.phases() == [WorkerPhase.SLEEPING, WorkerPhase.AWAKE]
    engines.engine(0).num_requests = 0
    engines.run(2.0)
    assert engines.phases() == [WorkerPhase.ASLEEP, WorkerPhase.ASLEEP]
    results = [answer.resize_id for answer in engines.answers()]
    assert results[-2:] == [first.resize_id, second.resize_id]


def test_a_late_resize_loses_only_its_late_engines() -> None:
    """Engines that are ready, or that another resize is moving, are not lost."""
    engines = SimulatedEngines(3)
    engines.run(1.0)
    engines.engine(0).fails[EngineOp.LOAD] = "slow"
    late = engines.resize(True, 0, 1, deadline_s=6.0, turn_s=2.0)
    engines.engine(2).fails[EngineOp.LOAD] = "slow"
    other = engines.resize(True, 2)
    engines.run(8.0)
    assert engines.answers()[-1].resize_id == late.resize_id
    assert engines.phases()[1:] == [WorkerPhase.AWAKE, WorkerPhase.WAKING]
    engines.engine(2).fails.clear()
    engines.run(2.0)
    assert (engines.answers()[-1].resize_id, engines.answers()[-1].error) == (other.resize_id, "")


def test_a_repeated_message_does_not_restart_a_failed_resize() -> None:
    engines = SimulatedEngines()
    engines.run(1.0)
    engines.engine(0).fails[EngineOp.LOAD] = "slow"
    ask = engines.resize(True, 0, deadline_s=3.0)
    engines.run(5.0)
    engines.engine(0).fails.clear()
    error = engines.answers()[-1].error
    engines.deliver(ask)
    engines.run(5.0)
    assert error
    assert (engines.answers()[-1].resize_id, engines.answers()[-1].error) == (ask.resize_id, error)
    assert engines.truth(0).phase is WorkerPhase.ASLEEP


def test_no_engine_is_touched_before_the_router_answers() -> None:
    """The router's table shows which engines are awake: without it a serving engine would be put
    to sleep.
    """
    engines = awake(0)
    engines.router_ignores = True
    engines.restart()
    num_done = len(engines.engine(0).done)
    engines.run(2.0)
    assert engines.engine(0).done[num_done:] == []
    engines.router_ignores = False
    engines.run(2.0)
    assert engines.truth(0).phase is WorkerPhase.AWAKE


def test_an_older_epoch_is_refused_and_changes_nothing() -> None:
    engines = awake(0)
    engines.resize(False, 0, epoch=7)
    engines.run(2.0)
    engines.resize(True, 0, epoch=6)
    engines.run(2.0)
    assert "epoch 7" in engines.answers()[-1].error
    assert engines.truth(0) == engines.answers()[-1].workers[0]
    assert engines.truth(0).phase is WorkerPhase.ASLEEP


def test_a_repeated_resize_is_answered_again_and_not_carried_out_again() -> None:
    engines = SimulatedEngines()
    engines.run(1.0)
    ask = engines.resize(True, 0)
    engines.deliver(ask)
    engines.run(2.0)
    engines.deliver(ask)
    assert [answer.resize_id for answer in engines.answers()] == [ask.resize_id] * 2
    assert engines.engine(0).done.count(EngineOp.LOAD) == 1


def test_a_reused_number_of_a_scheduler_that_lost_its_journal_is_another_resize() -> None:
    engines = awake(0)
    engines.deliver(ResizeWorkers("p", 1, (WorkerChange(0, False, 9),), 20.0))
    engines.run(2.0)
    assert engines.truth(0).phase is WorkerPhase.ASLEEP
    assert not engines.answers()[-1].error


def test_the_rest_of_a_resize_counts_as_a_repetition_of_it() -> None:
    engines = SimulatedEngines()
    engines.run(1.0)
    both = WorkerChange(0, True, 1), WorkerChange(1, True, 1)
    engines.deliver(ResizeWorkers("p", 1, both, 20.0))
    engines.deliver(ResizeWorkers("p", 1, both[1:], 19.0))
    engines.run(5.0)
    engines.deliver(ResizeWorkers("p", 1, both[:1], 15.0))
    assert [answer.error for answer in engines.answers()] == ["", ""]
    assert engines.engine(1).done.count(EngineOp.LOAD) == 1


def test_a_newer_resize_of_the_same_engine_overtakes() -> None:
    engines = SimulatedEngines()
    engines.run(1.0)
    engines.engine(0).fails[EngineOp.LOAD] = "no such folder"
    engines.resize(True, 0)
    engines.run(1.0)
    engines.resize(False, 0)
    engines.run(3.0)
    assert "overtaken" in engines.answers()[0].error
    assert not engines.answers()[1].error
    assert engines.truth(0).phase is WorkerPhase.ASLEEP


def test_a_failed_operation_is_retried_within_the_deadline() -> None:
    engines = SimulatedEngines()
    engines.run(1.0)
    engines.engine(0).fails[EngineOp.LOAD] = "the folder was pruned"
    engines.resize(True, 0)
    engines.run(3.0)
    assert "pruned" in engines.truth(0).detail
    engines.engine(0).fails.clear()
    engines.run(3.0)
    assert not engines.answers()[-1].error
    assert engines.truth(0).phase is WorkerPhase.AWAKE


def test_an_engine_that_cannot_wake_in_time_is_lost_and_put_to_sleep_again() -> None:
    engines = SimulatedEngines()
    engines.run(1.0)
    engines.engine(0).fails[EngineOp.LOAD] = "no such folder"
    engines.resize(True, 0, deadline_s=5.0)
    engines.run(5.2)
    [answer] = engines.answers()
    assert "no such folder" in answer.error
    assert answer.workers[0].phase is WorkerPhase.LOST
    engines.run(3.0)
    assert engines.truth(0).phase is WorkerPhase.ASLEEP
    assert engines.engine(0).is_released
    assert engines.row(0).phase is EnginePhase.ASLEEP


def test_only_the_hung_engine_is_lost_and_it_sleeps_when_it_is_back() -> None:
    engines = awake(0, 1)
    engines.engine(0).is_hung = True
    engines.resize(False, 0, deadline_s=5.0)
    engines.run(6.0)
    assert engines.truth(0).phase is WorkerPhase.LOST
    assert engines.truth(0).detail
    engines.resize(False, 1)
    engines.run(2.0)
    assert engines.truth(1).phase is WorkerPhase.ASLEEP
    engines.engine(0).is_hung = False
    engines.run(3.0)
    assert engines.truth(0).phase is WorkerPhase.ASLEEP
    assert engines.hellos()[-1].workers[0].phase is WorkerPhase.ASLEEP


class BelievesAnyAnswer(Coordinator):
    """The fault: a late answer to the previous process is taken for an answer to this one."""

    def _on_scheduler(self, hello: SchedulerHello) -> None:
        super()._on_scheduler(hello)
        self._is_confirmed |= hello.newest_s < self._started_s


@pytest.mark.parametrize(("kind", "is_raised"), [(Coordinator, True), (BelievesAnyAnswer, False)])
@pytest.mark.parametrize("late_s", [0.0, 1000.0])
def test_a_coordinator_raises_its_start_time_above_a_late_answer_to_its_predecessor(
    kind: type[Coordinator], is_raised: bool, late_s: float
) -> None:
    """The clock was set back. Once the scheduler has accepted its start time, a coordinator no
    longer raises it.
    """
    engines = SimulatedEngines(kind=kind, started_s=1400.5)
    engines.run(1.0)
    for newest_s in (late_s, 5000.0):
        engines.deliver(SchedulerHello("s1", newest_s=newest_s))
    mine_s = engines.hellos()[-1].started_s
    assert (mine_s > 5000.0) is is_raised
    for newest_s in (mine_s, 9000.0):
        engines.deliver(SchedulerHello("s1", newest_s=newest_s))
    engines.run(2.0)
    assert engines.hellos()[-1].started_s == mine_s


def test_the_state_is_reported_each_second_and_at_once_to_another_scheduler() -> None:
    engines = awake(0)
    engines.deliver(SchedulerHello("s1"))
    engines.run(0.1)
    num = len(engines.hellos())
    engines.deliver(SchedulerHello("s1"))
    assert len(engines.hellos()) == num
    engines.deliver(SchedulerHello("s2"))
    assert len(engines.hellos()) == num + 1
    engines.run(3.1)
    assert len(engines.hellos()) >= num + 4
    engines.engine(0).kv_tokens = 123
    engines.run(3.0)
    assert engines.hellos()[-1].workers[0].kv_tokens == 123


def test_without_a_scheduler_nothing_changes_and_sleep_stays_leased() -> None:
    engines = awake(0)
    engines.to_router.clear()
    engines.run(60.0)
    assert engines.phases() == [WorkerPhase.AWAKE, WorkerPhase.ASLEEP]
    leases = [each for each in engines.to_router if isinstance(each, SleepEngine)]
    assert {each.url for each in leases} == {engines.urls[1]}
    assert len(leases) >= 60.0 / engines.settings.lease_s
    assert engines.row(1).detail == ASLEEP


def test_a_restarted_coordinator_finds_the_awake_engines_and_changes_nothing() -> None:
    engines = awake(0)
    engines.engine(0).num_requests = 3
    engines.restart()
    engines.run(2.0)
    assert engines.phases() == [WorkerPhase.AWAKE, WorkerPhase.ASLEEP]
    assert engines.engine(0).num_requests == 3
    assert engines.hellos()[-1].workers == engines.coordinator.truths()


def test_a_coordinator_restarted_during_a_resize_puts_half_awake_engines_to_sleep() -> None:
    engines = SimulatedEngines()
    engines.run(1.0)
    engines.engine(0).fails[EngineOp.LOAD] = "slow"
    engines.resize(True, 0)
    engines.run(1.0)
    assert not engines.engine(0).is_released
    engines.restart()
    num = len(engines.hellos())
    engines.run(3.0)
    assert engines.phases() == [WorkerPhase.ASLEEP, WorkerPhase.ASLEEP]
    assert engines.engine(0).is_released
    first = engines.hellos()[num]
    assert first.workers[0].phase is not WorkerPhase.AWAKE


def test_the_first_report_waits_for_a_silent_engine_only_for_a_while() -> None:
    engines = awake(0)
    engines.engine(1).is_hung = True
    engines.restart()
    num = len(engines.hellos())
    engines.run(engines.settings.settle_s - 1.0)
    assert len(engines.hellos()) == num
    engines.run(2.0)
    assert engines.hellos()[-1].workers[0].phase is WorkerPhase.AWAKE
    assert engines.hellos()[-1].workers[1].phase is WorkerPhase.ABSENT
    assert engines.hellos()[-1].workers[1].detail
    engines.engine(1).is_hung = False
    engines.run(3.0)
    assert engines.hellos()[-1].workers[1].phase is WorkerPhase.ASLEEP


def test_messages_for_another_pipeline_or_worker_are_ignored() -> None:
    engines = SimulatedEngines()
    engines.run(1.0)
    engines.deliver(ResizeWorkers("q", 1, (WorkerChange(0, True, 1),), 5.0))
    engines.deliver(ResizeWorkers("p", 2, (WorkerChange(9, True, 1),), 5.0))
    engines.deliver(ResizeWorkers("p", 3, (WorkerChange(0, True, 1),), 5.0, started_s=7.0))
    engines.run(2.0)
    assert [answer.resize_id for answer in engines.answers()] == [2]
    assert "no worker 9" in engines.answers()[0].error
    assert engines.phases() == [WorkerPhase.ASLEEP, WorkerPhase.ASLEEP]


def test_an_awake_engine_that_was_restarted_asleep_is_brought_up_again() -> None:
    engines = awake(0)
    engines.engine(0).restart_process()
    engines.run(5.0)
    assert engines.truth(0).phase is WorkerPhase.AWAKE
    assert not engines.engine(0).is_released
    assert engines.row(0).phase is EnginePhase.READY
    assert {hello.workers[0].phase for hello in engines.hellos()[2:]} == {WorkerPhase.AWAKE}


def test_an_engine_that_does_not_come_up_again_is_lost_and_sleeps() -> None:
    engines = awake(0)
    engines.engine(0).restart_process()
    engines.engine(0).fails[EngineOp.LOAD] = "no such folder"
    engines.run(engines.settings.repair_s - 2.0)
    assert engines.truth(0).phase is WorkerPhase.AWAKE
    assert engines.row(0).phase is EnginePhase.ASLEEP
    engines.run(8.0)
    assert engines.truth(0).phase is WorkerPhase.ASLEEP
    assert WorkerPhase.LOST in {hello.workers[0].phase for hello in engines.hellos()}


def test_a_sleeping_engine_that_was_restarted_awake_releases_its_memory_again() -> None:
    engines = awake(0)
    engines.engine(1).restart_process()
    engines.engine(1).is_released = False
    engines.run(3.0)
    assert engines.engine(1).is_released
    assert WorkerPhase.LOST not in {hello.workers[1].phase for hello in engines.hellos()}
    engines.engine(1).is_released = False
    engines.engine(1).fails[EngineOp.RELEASE] = "requests run"
    engines.run(3.0)
    assert engines.truth(1).phase is WorkerPhase.LOST
    engines.engine(1).fails.clear()
    engines.run(3.0)
    assert engines.truth(1).phase is WorkerPhase.ASLEEP


def test_a_restarted_router_learns_which_engines_are_awake() -> None:
    engines = awake(0)
    engines.start_router()
    engines.run(2.0)
    assert [engines.row(rank).phase for rank in (0, 1)] == [EnginePhase.READY, EnginePhase.ASLEEP]
    engines.start_router(is_asleep=False)  # which knows none of the engines
    engines.run(2.0)
    assert [engines.row(rank).phase for rank in (0, 1)] == [EnginePhase.READY, EnginePhase.ASLEEP]
    engines.resize(True, 1)
    engines.run(2.0)
    assert engines.row(1).phase is EnginePhase.READY


def test_requests_that_the_router_did_not_receive_are_repeated() -> None:
    engines = awake(0)
    engines.router_ignores = True
    engines.resize(False, 0)
    engines.run(2.0)
    assert engines.truth(0).phase is WorkerPhase.SLEEPING
    assert set(engines.engine(0).done) <= {
        EngineOp.RESUME,
        EngineOp.LOAD,
        EngineOp.PROBE,
        EngineOp.LOOK,
    }
    engines.router_ignores = False
    engines.run(2.0)
    assert engines.truth(0).phase is WorkerPhase.ASLEEP


def test_an_engine_that_the_operator_removed_still_follows_the_scheduler() -> None:
    """Its GPUs are the scheduler's, whether or not it serves."""
    engines = awake(0, 1)
    engines.fleet.step(Received(b"operator", DropEngine(1, engines.urls[0])), engines.now_s)
    engines.run(1.0)
    for wakes in (False, True, False):
        ask = engines.resize(wakes, 0)
        engines.run(3.0)
        assert engines.truth(0).phase is (WorkerPhase.AWAKE if wakes else WorkerPhase.ASLEEP)
        assert (engines.answers()[-1].resize_id, engines.answers()[-1].error) == (ask.resize_id, "")
    assert engines.engine(0).is_released
    engines.fleet.step(Received(b"operator", AddEngine(2, engines.urls[0])), engines.now_s)
    engines.run(1.0)
    assert engines.row(0).phase is EnginePhase.ASLEEP
    engines.resize(True, 0)
    engines.run(3.0)
    assert engines.row(0).phase is EnginePhase.READY
