"""The whole machine: effects of one pipeline on the others, and that nothing ever blocks."""

import math

import pytest

from rollmesh.scheduler.planning.plan import PlanBuilder
from rollmesh.scheduler.planning.planner import PolicyResult
from rollmesh.scheduler.planning.policies.fair import Fair
from rollmesh.scheduler.planning.state import PipelinePhase
from rollmesh.scheduler.service.coordinators import CoordinatorTracker
from rollmesh.scheduler.service.scheduler import FleetScheduler
from rollmesh.scheduler.service.state import Action, Event
from rollmesh.scheduler.service.tickets import TicketQueue, TicketRequest
from rollmesh.wire.machine import Received, Send
from rollmesh.wire.scheduling import (
    GENERATION_CLUSTER,
    GpuPriority,
    NotifyReleaseGpus,
    NotifyReleaseThenRequestGpus,
    ReadScheduler,
    ReportProgress,
    RequestGpus,
    TicketMoved,
    TicketState,
    WorkerPhase,
    WorkersResized,
)
from tests.unit.scheduler.service.harness import QUICK, TRAIN, Program, SchedulerHarness, run_all

GRANTED, QUEUED, RELEASED = TicketState.GRANTED, TicketState.QUEUED, TicketState.RELEASED
MANY = 100


# W1: many waiting requests never block a release


def contested(kind: type[FleetScheduler], num_pipelines: int = MANY) -> SchedulerHarness:
    """One pipeline holds the GPUs that all the others wait for."""
    harness = SchedulerHarness(1, kind=kind)
    for number in range(num_pipelines):
        harness.pipeline(f"p{number}", train=(0,), generation=())
        harness.train(f"p{number}", f"k{number}")
    return harness


def test_a_hundred_waiting_requests_do_not_block_a_release() -> None:
    harness = contested(FleetScheduler)
    for number in range(MANY):
        assert harness.state(f"k{number}") is GRANTED
        assert harness.release(f"p{number}", f"r{number}") is RELEASED


class FourAtATime(FleetScheduler):
    """The fault: each waiting request occupies one of four places until it is answered."""

    def step(self, event: Event, now_s: float, is_last: bool = True) -> list[Action]:
        waiting = sum(each.state is QUEUED for each in self.state.tickets.values())
        if (
            waiting >= 4
            and isinstance(event, Received)
            and isinstance(event.message, TicketRequest)
        ):
            return []
        return super().step(event, now_s, is_last)


def test_with_four_places_for_waiters_a_release_is_never_served() -> None:
    harness = contested(FourAtATime, 6)
    assert harness.release("p0", "r0") is QUEUED
    harness.run(harness.settings.patience_s / 2)
    assert harness.state("r0") is QUEUED


# W2: an error in a cycle ends nothing


class FailsOnce(Fair):
    """A policy whose first plan fails."""

    num_left = 1

    def generate(self, builder: PlanBuilder) -> PolicyResult:
        if self.num_left:
            self.num_left -= 1
            raise ZeroDivisionError("division by zero")
        return super().generate(builder)


class EndsWithItsFirstError(FleetScheduler):
    """The fault: after an error no further plan is made, and the process continues."""

    def _may_plan(self) -> bool:
        return not self.state.problems and super()._may_plan()


def test_a_plan_that_fails_is_logged_and_the_next_event_plans_again() -> None:
    harness = SchedulerHarness(policy=FailsOnce(QUICK))
    harness.pipeline("a")
    harness.run(1)
    assert harness.generate("a", "g") is QUEUED
    harness.run(1)
    assert harness.state("g") is GRANTED
    assert harness.scheduler.state.problems == [
        "no plan of generation: ZeroDivisionError: division by zero"
    ]
    assert any("division by zero" in note.detail for note in harness.notes)
    harness.send(ReadScheduler("read"))
    assert harness.answers["read"].ok


def test_if_the_policy_always_fails_fixed_clusters_are_still_granted() -> None:
    harness = SchedulerHarness(policy=FailsOnce(QUICK))
    harness.policy.num_left = -1  # type: ignore[attr-defined]  # of this policy
    harness.pipeline("a", train=(0, 1))
    assert harness.train("a", "a1") is GRANTED
    assert len(harness.scheduler.state.problems) == 1, "logged once, not with each plan"


def test_a_loop_that_ends_with_its_first_error_answers_no_further_request() -> None:
    harness = SchedulerHarness(policy=FailsOnce(QUICK), kind=EndsWithItsFirstError)
    harness.pipeline("a")
    harness.generate("a", "g")
    harness.run(30)
    assert harness.state("g") is QUEUED


# W3, W4: a pipeline's fault is its own


class BlamesAll(CoordinatorTracker):
    """The fault: a pipeline that fails quarantines all pipelines."""

    def quarantine(self, name: str, why: str, answered: int = 0) -> None:
        for each in self._state.pipeline_records:
            super().quarantine(each, why, answered)


class Unfenced(FleetScheduler):
    COORDINATORS = BlamesAll


def faulty(kind: type[FleetScheduler]) -> SchedulerHarness:
    """Pipeline a fails to put its engines to sleep; b generates on other GPUs."""
    harness = SchedulerHarness(4, kind=kind)
    harness.pipeline("a", train=(0,), generation=(0, 1))
    harness.pipeline("b", train=(2, 3), generation=(2, 3))
    harness.generate("a", "ga")
    harness.generate("b", "gb")
    harness.act()
    harness.coordinators["a"].error = "http://e:1 does not answer"
    harness.train("a", "ta")
    harness.act()
    return harness


def test_a_failed_resize_affects_no_other_pipeline() -> None:
    harness = faulty(FleetScheduler)
    assert harness.of("a").phase is PipelinePhase.QUARANTINED
    assert harness.of("b").phase is PipelinePhase.ADMITTED
    assert harness.awake("b") == [0, 1]
    assert harness.train("b", "tb") is QUEUED
    harness.act()
    assert harness.state("tb") is GRANTED


def test_if_a_fault_quarantined_all_pipelines_none_would_continue() -> None:
    harness = faulty(Unfenced)
    assert harness.of("b").phase is PipelinePhase.QUARANTINED
    assert harness.train("b", "tb") is QUEUED
    harness.act()
    assert harness.state("tb") is QUEUED


class WaitsForAll(FleetScheduler):
    """The fault: nothing is done while any resize is not answered, and none is ever late."""

    def step(self, event: Event, now_s: float, is_last: bool = True) -> list[Action]:
        for intent in self.state.intents.values():
            intent.until_s = math.inf
        is_answer = isinstance(event, Received) and isinstance(event.message, WorkersResized)
        if self.state.intents and not is_answer:
            return []
        return super().step(event, now_s, is_last)


def hung(kind: type[FleetScheduler]) -> SchedulerHarness:
    """Pipeline a hangs with all its engines; b can continue; d waits for GPUs of a and b."""
    harness = SchedulerHarness(4, kind=kind)
    harness.pipeline("a", train=(0,), generation=(0, 1))
    harness.pipeline("b", train=(2,), generation=(2, 3))
    harness.pipeline("d", train=(0, 2), generation=())
    harness.generate("a", "ga")
    harness.act()
    harness.coordinators["a"].is_hung = True
    harness.train("a", "ta")
    return harness


def test_a_hung_engine_delays_only_its_own_pipeline() -> None:
    harness = hung(FleetScheduler)
    run_all(harness, [Program("b", 5)])
    harness.run(harness.settings.resize_deadline_s + harness.settings.slack_s)
    assert harness.of("a").phase is PipelinePhase.QUARANTINED
    assert harness.state("ta") is QUEUED


def test_without_a_deadline_one_hung_engine_would_block_all_pipelines() -> None:
    harness = hung(WaitsForAll)
    Program("b", 1).poll(harness)
    harness.run(60)
    assert harness.state("b-0") is QUEUED


# W6: a release that comes while resizes are in progress is not lost


class AcksAtOnce(TicketQueue):
    """The fault: every waiting release is answered with the next resize."""

    def settle_releases(self) -> None:
        for pipeline_id, record in self._state.pipeline_records.items():
            if record.releasing:
                record.releasing = ""
                self._state.fleet.pipelines[pipeline_id].releasing.clear()
                for ticket in self._open(pipeline_id, GENERATION_CLUSTER):
                    if ticket.gives_up:
                        self._close(ticket, RELEASED)


class LosesReleases(FleetScheduler):
    TICKETS = AcksAtOnce


def released_while_waking(kind: type[FleetScheduler]) -> SchedulerHarness:
    harness = SchedulerHarness(2, kind=kind)
    harness.pipeline("a", generation=(0, 1))
    harness.generate("a", "g")
    assert harness.release("a", "r", GENERATION_CLUSTER) in (QUEUED, RELEASED)
    harness.act()
    return harness


def test_a_release_while_workers_wake_completes_when_they_sleep_again() -> None:
    harness = released_while_waking(FleetScheduler)
    assert harness.awake("a") == [0, 1]
    assert harness.state("r") is QUEUED
    harness.act()
    assert harness.state("r") is RELEASED
    assert harness.awake("a") == []


def test_a_release_that_is_acknowledged_with_the_next_commit_leaves_engines_awake() -> None:
    harness = released_while_waking(LosesReleases)
    assert harness.state("r") is RELEASED
    harness.run(20)
    assert harness.awake("a") == [0, 1]


# the cycle


def test_training_goes_through_a_full_cycle() -> None:
    harness = SchedulerHarness()
    harness.pipeline("a", train=(0, 1), generation=())
    assert harness.train("a", "k") is GRANTED
    assert set(harness.scheduler.state.occupants) == {0, 1}
    assert harness.release("a", "r") is RELEASED
    assert harness.scheduler.state.occupants == {}


def test_generation_goes_through_a_full_cycle() -> None:
    harness = SchedulerHarness(2)
    coordinator = harness.pipeline("a", generation=(0, 1))
    assert harness.generate("a", "g") is QUEUED
    (resize,) = coordinator.pending_resizes
    assert {(c.rank, c.wakes, c.epoch) for c in resize.changes} == {(0, True, 1), (1, True, 1)}
    assert resize.deadline_s == harness.settings.resize_deadline_s
    harness.act()
    assert harness.state("g") is GRANTED
    assert {worker.phase for worker in harness.of("a").workers} == {WorkerPhase.AWAKE}


@pytest.mark.parametrize("num_pipelines", [2, 5, 8])
def test_pipelines_that_share_all_gpus_complete(num_pipelines: int) -> None:
    harness = SchedulerHarness(4)
    names = [f"p{number}" for number in range(num_pipelines)]
    for number, name in enumerate(names):
        first = 2 * (number % 2)
        harness.pipeline(name, train=(first, first + 1))
    run_all(harness, [Program(name, 5) for name in names], limit_s=2000.0)
    harness.run(5)
    assert harness.scheduler.state.fleet.owners == {}


@pytest.mark.parametrize("gap_s", [0.0, 1.0, 6.0])
@pytest.mark.parametrize("order", ["ab", "ba"])
def test_after_training_took_all_engines_both_generate_again(order: str, gap_s: float) -> None:
    harness = SchedulerHarness(4)
    harness.pipeline("a", train=(0, 1))
    harness.pipeline("b", train=(2, 3))
    for rollout in range(5):
        for name in "ab":
            harness.train(name, f"{name}-t{rollout}")
        for name in "ab":
            harness.wait_for(f"{name}-t{rollout}", GRANTED)
        assert harness.awake("a") == harness.awake("b") == []
        for name in order:
            ask = NotifyReleaseThenRequestGpus(
                f"{name}-g{rollout}",
                name,
                TRAIN,
                GENERATION_CLUSTER,
                GpuPriority.GENERATION,
                rollout,
                rollout,
                16,
            )
            harness.ask(ask)
            harness.run(gap_s)
        for name in order:
            harness.wait_for(f"{name}-g{rollout}", GRANTED)


def test_a_pipeline_that_ends_early_blocks_no_other() -> None:
    harness = SchedulerHarness(4)
    harness.pipeline("a", train=(0, 1))
    harness.pipeline("b", train=(2, 3))
    run_all(harness, [Program("a", 1), Program("b", 5)])
    assert harness.awake("a") == []


# steps: plans, rows and messages


def test_events_that_arrive_together_make_one_plan() -> None:
    harness = SchedulerHarness(2)
    for name in ("a", "b"):
        harness.pipeline(name, train=(0,), generation=())
    state, now_s = harness.scheduler.state, harness.now_s
    num_plans = state.counts["plans"]
    first = RequestGpus("ka", "a", TRAIN, GpuPriority.ACTOR_TRAINING)
    second = RequestGpus("kb", "b", TRAIN, GpuPriority.ACTOR_TRAINING)
    harness.scheduler.step(Received(b"a", first), now_s, is_last=False)
    assert state.counts["plans"] == num_plans
    actions = harness.scheduler.step(Received(b"b", second), now_s)
    assert state.counts["plans"] == num_plans + 1
    messages = [each.message for each in actions if isinstance(each, Send)]
    states = {each.key: each.state for each in messages if isinstance(each, TicketMoved)}
    assert states == {"ka": TicketState.OFFERED, "kb": QUEUED}


def test_a_step_that_changes_nothing_writes_nothing_and_plans_nothing() -> None:
    harness = SchedulerHarness()
    harness.pipeline("a")
    harness.generate("a", "g")
    harness.run(3)
    harness.send(ReportProgress("a", "train", 1, 100, 50))
    harness.run(1)
    num_rows, num_plans = len(harness.rows), harness.scheduler.state.counts["plans"]
    harness.send(ReportProgress("a", "train", 1, 100, 50))
    harness.beat()
    assert len(harness.rows) == num_rows
    assert harness.scheduler.state.counts["plans"] == num_plans


def test_time_does_not_run_back() -> None:
    harness = SchedulerHarness()
    harness.pipeline("a")
    harness.run(5)
    at_s = harness.scheduler.state.now_s
    harness.now_s -= 3
    harness.train("a", "t")
    assert harness.scheduler.state.tickets["t"].asked_s == at_s


def test_a_scheduler_that_was_delayed_fences_no_process() -> None:
    harness = SchedulerHarness(2)
    harness.pipeline("a", train=(0,), generation=(0, 1))
    harness.generate("a", "g")
    harness.act()
    harness.coordinators["a"].is_hung = True
    harness.train("a", "t")
    harness.now_s += 1000.0
    harness.run(0.25)
    assert harness.of("a").phase is PipelinePhase.ADMITTED
    harness.coordinators["a"].is_hung = False
    harness.run(2)
    assert harness.state("t") is GRANTED
    harness.coordinators["a"].is_silent = True
    harness.run(harness.settings.coordinator_grace_s + 1)
    assert harness.of("a").phase is PipelinePhase.QUARANTINED


def test_messages_about_unknown_pipelines_change_nothing() -> None:
    harness = SchedulerHarness()
    num_rows = len(harness.rows)
    harness.send(NotifyReleaseGpus("r", "unknown", "nothing"))
    harness.send(WorkersResized("unknown", 1, ()))
    harness.send(ReportProgress("unknown", "train", 1, 1, 1))
    assert harness.state("r") is TicketState.REFUSED
    assert len(harness.rows) == num_rows + 2  # the ticket and the numbers
    assert not [note for note in harness.notes if note.is_warning]
