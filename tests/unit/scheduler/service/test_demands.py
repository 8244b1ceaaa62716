"""Durable demand and progress: what opens, corrects and closes it, and what does not."""

from rollmesh.scheduler.planning.state import Demand, PipelineState
from rollmesh.scheduler.service.demands import DemandTracker
from rollmesh.scheduler.service.scheduler import FleetScheduler
from rollmesh.wire.machine import Received, Send
from rollmesh.wire.scheduling import (
    GENERATION_CLUSTER,
    ClearProgress,
    HooksWired,
    KillPipeline,
    ReportProgress,
    SchedulerHello,
    TicketState,
)
from tests.unit.scheduler.service.harness import SchedulerHarness


def wanting(kind: type[FleetScheduler] = FleetScheduler) -> SchedulerHarness:
    """A pipeline that generates and has reported nothing yet."""
    harness = SchedulerHarness(kind=kind)
    harness.pipeline("a")
    harness.generate("a", "g0", target=128, step=0)
    harness.act()
    return harness


def demand(harness: SchedulerHarness) -> Demand | None:
    return harness.of("a").demand


def test_progress_corrects_the_estimate_and_is_not_added_to_it() -> None:
    harness = wanting()
    assert harness.of("a").remaining == 128
    harness.send(ReportProgress("a", "train", 1, 100, 30))
    harness.send(ReportProgress("a", "eval", 1, 10, 0))
    assert harness.of("a").remaining == 80


def test_a_stream_that_overshoots_takes_nothing_from_another() -> None:
    harness = wanting()
    harness.send(ReportProgress("a", "train", 1, 100, 130))
    harness.send(ReportProgress("a", "eval", 1, 10, 4))
    assert harness.of("a").remaining == 6


def test_a_report_never_opens_a_demand() -> None:
    harness = SchedulerHarness()
    harness.pipeline("a")
    harness.send(ReportProgress("a", "train", 1, 100, 0))
    assert demand(harness) is None
    assert not harness.of("a").progress
    assert not harness.awake("a")


def test_the_demand_is_closed_when_all_streams_are_retired() -> None:
    harness = wanting()
    harness.send(ReportProgress("a", "train", 1, 100, 100))
    harness.send(ReportProgress("a", "eval", 1, 10, 0))
    harness.send(ClearProgress("a", "train", 1))
    assert demand(harness) is not None
    harness.send(ClearProgress("a", "eval", 1))
    assert demand(harness) is None
    assert not harness.kept.tables["progress"]


def test_a_stream_whose_report_was_lost_can_be_retired() -> None:
    harness = wanting()
    harness.send(ClearProgress("a", "train", 1))
    assert demand(harness) is None


def test_late_messages_change_nothing() -> None:
    harness = wanting()
    harness.send(ReportProgress("a", "train", 2, 100, 30))
    for late in (
        ReportProgress("a", "train", 2, 100, 20),
        ReportProgress("a", "train", 1, 64, 60),
        ClearProgress("a", "train", 1),
    ):
        harness.send(late)
        assert harness.of("a").remaining == 70


def test_late_progress_of_a_rollout_does_not_close_the_next_demand() -> None:
    harness = wanting()
    harness.send(ReportProgress("a", "train", 1, 100, 90))
    harness.generate("a", "g1", target=64, step=1)
    for late in (ReportProgress("a", "train", 1, 100, 99), ClearProgress("a", "train", 1)):
        harness.send(late)
        assert demand(harness)
        assert harness.of("a").remaining == 64
    harness.send(ReportProgress("a", "train", 2, 64, 10))
    assert harness.of("a").remaining == 54


def test_a_second_request_for_the_same_rollout_keeps_its_progress() -> None:
    harness = wanting()
    harness.send(ReportProgress("a", "train", 1, 128, 28))
    harness.generate("a", "g0-again", target=128, step=0)
    assert harness.of("a").remaining == 100
    harness.send(ClearProgress("a", "train", 1))
    assert demand(harness) is None


def test_a_demand_outlives_its_requester() -> None:
    harness = SchedulerHarness()
    harness.pipeline("a").is_hung = True
    harness.generate("a", "g")
    harness.open.clear()
    harness.run(harness.settings.patience_s + 1)
    assert harness.scheduler.state.tickets["g"].state is TicketState.WITHDRAWN
    assert demand(harness) is not None


def test_a_demand_is_closed_by_its_release() -> None:
    harness = wanting()
    harness.send(ReportProgress("a", "train", 1, 100, 30))
    harness.release("a", "r", GENERATION_CLUSTER)
    assert demand(harness) is None
    assert not harness.of("a").progress


def test_a_demand_without_an_estimate_gets_a_worker() -> None:
    harness = SchedulerHarness()
    harness.pipeline("a")
    harness.generate("a", "g", target=0)
    harness.act()
    assert harness.state("g") is TicketState.GRANTED


class PlansOfNothing(DemandTracker):
    """The fault: a demand without an estimate is ignored (W11)."""

    def open(self, pipeline: PipelineState, key: str, estimate: int, step: int) -> None:
        if estimate > 0:
            super().open(pipeline, key, estimate, step)


class OverlooksUnknown(FleetScheduler):
    DEMANDS = PlansOfNothing


def test_without_its_floor_an_unknown_demand_would_never_wake() -> None:
    harness = SchedulerHarness(kind=OverlooksUnknown)
    harness.pipeline("a")
    harness.generate("a", "g", target=0)
    harness.run(30)
    assert harness.state("g") is TicketState.QUEUED
    assert not harness.awake("a")


def test_reports_within_a_bucket_make_no_plan_and_many_make_few() -> None:
    harness = wanting()
    harness.run(5)
    harness.send(ReportProgress("a", "train", 1, 1000, 0))
    harness.run(1)
    num = harness.scheduler.state.counts
    num_plans = num["plans"]
    for completed in range(1, 20):
        harness.send(ReportProgress("a", "train", 1, 1000, completed))
    assert num["plans"] == num_plans
    for completed in range(100, 900, 20):
        harness.send(ReportProgress("a", "train", 1, 1000, completed))
    assert num["plans"] == num_plans + 1
    harness.run(1)
    assert num["plans"] == num_plans + 2


def test_a_stalled_rollout_is_logged_once_with_the_holders_of_its_gpus() -> None:
    harness = wanting()
    harness.pipeline("b", train=(0,))
    harness.send(ReportProgress("a", "train", 1, 100, 3))
    harness.run(harness.settings.stall_s + 2)
    notes = [note for note in harness.notes if note.event == "rollout.stalled"]
    assert [note.pipeline_id for note in notes] == ["a"]
    assert "a/actor_infer on 0, 1, 2, 3" in notes[0].detail
    harness.send(ReportProgress("a", "train", 1, 100, 4))
    harness.run(harness.settings.stall_s + 2)
    assert len([note for note in harness.notes if note.event == "rollout.stalled"]) == 2


def test_a_pipeline_without_progress_since_its_request_is_logged_once() -> None:
    harness = wanting()
    harness.run(harness.settings.stall_s - 2)
    assert not [note for note in harness.notes if note.event == "rollout.stalled"]
    harness.run(harness.settings.stall_s)
    [result] = [note for note in harness.notes if note.event == "rollout.stalled"]
    assert result.pipeline_id == "a"
    assert "no first batch" in result.detail
    assert "a/actor_infer on 0, 1, 2, 3" in result.detail


def test_time_before_a_restart_of_the_scheduler_counts_for_no_stall() -> None:
    harness = wanting()
    harness.run(harness.settings.stall_s - 2)
    harness.begin()
    harness.run(harness.settings.stall_s - 2)
    assert not [note for note in harness.notes if note.event == "rollout.stalled"]
    harness.run(4)
    assert [note for note in harness.notes if note.event == "rollout.stalled"]


def test_the_time_to_the_next_request_is_learned_and_survives_a_restart() -> None:
    harness = wanting()
    harness.send(ClearProgress("a", "train", 1))
    harness.run(10.0)
    harness.train("a", "t0")
    harness.run(20.0)
    harness.release("a", "r0")
    harness.generate("a", "g1", target=64, step=1)
    learned = harness.of("a").demand_history
    assert learned.estimate == 64
    assert learned.until_s["ended"] == 30.0
    assert 15.0 < learned.until_s["actor_train/1"] <= 20.0, "from when it was granted"
    harness.begin()
    assert harness.of("a").demand_history == learned


def test_nothing_is_forecast_for_a_dead_run() -> None:
    harness = wanting()
    harness.send(ClearProgress("a", "train", 1))
    assert harness.of("a").demand_history.marks
    harness.send(KillPipeline("kill", "a"))
    assert not harness.of("a").demand_history.marks


def test_a_pipeline_that_gives_up_generation_is_not_expected_to_request_it_again() -> None:
    harness = wanting()
    harness.send(ClearProgress("a", "train", 1))
    assert harness.of("a").demand_history.marks
    harness.release("a", "r", GENERATION_CLUSTER)
    harness.run(30.0)
    assert not harness.of("a").demand_history.marks
    assert not harness.awake("a")


def test_a_connected_hook_reports_the_newest_batch_of_any_incarnation() -> None:
    harness = wanting()
    harness.send(ReportProgress("a", "train", 5000, 100, 30))
    assert harness.scheduler.demands.newest_batch("a") == 5000
    harness.release("a", "r", GENERATION_CLUSTER)
    harness.act()
    harness.begin()
    actions = harness.scheduler.step(Received(b"hooks", HooksWired("a")), harness.now_s)
    messages = [each.message for each in actions if isinstance(each, Send)]
    assert SchedulerHello("s2", newest_batch=5000) in messages
    assert harness.scheduler.demands.newest_batch("unknown") == 0
