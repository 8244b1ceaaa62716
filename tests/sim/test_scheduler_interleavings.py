"""Messages that are late, repeated or out of order, and events between two related messages.

Each test was added for a mutation of the service that no other test noticed.
"""

import msgspec
import pytest

from rollmesh.scheduler.planning.state import FIXED, Owner, PipelinePhase
from rollmesh.scheduler.service.coordinators import LIVE_S, CoordinatorTracker
from rollmesh.scheduler.service.scheduler import FleetScheduler
from rollmesh.wire.machine import Received, Send
from rollmesh.wire.messages import AnyMessage
from rollmesh.wire.scheduling import (
    GENERATION_CLUSTER,
    CoordinatorHello,
    JoinNode,
    NodeBeat,
    SchedulerHello,
    TicketState,
    UnregisterPipeline,
    WorkerPhase,
    WorkerTruth,
)
from tests.unit.scheduler.service.harness import TRAIN, SchedulerHarness

GRANTED, QUEUED, RELEASED = TicketState.GRANTED, TicketState.QUEUED, TicketState.RELEASED


def generating(num_gpus: int = 1) -> SchedulerHarness:
    """Return a fleet on which all engines of pipeline a are awake."""
    harness = SchedulerHarness(num_gpus)
    harness.pipeline("a", train=(), generation=range(num_gpus))
    harness.generate("a", "g")
    harness.act()
    assert harness.awake("a") == list(range(num_gpus))
    return harness


# hellos of a coordinator


def test_a_hello_is_answered_with_its_incarnation() -> None:
    harness = SchedulerHarness(1)
    coordinator = harness.pipeline("a", train=(), generation=(0,))
    hello = coordinator.hello()
    assert answer(harness, hello) == SchedulerHello("s1", newest_s=coordinator.started_s)
    assert answer(harness, msgspec.structs.replace(hello, pipeline_id="z")) == SchedulerHello("s1")


def answer(harness: SchedulerHarness, hello: CoordinatorHello) -> AnyMessage:
    """Return the answer to `hello`."""
    actions = harness.scheduler.step(Received(b"c", hello), harness.now_s)
    [text] = [each.message for each in actions if isinstance(each, Send) and each.route == b"c"]
    return text


class TrustsAnyHello(CoordinatorTracker):
    """The fault: an earlier process that is still alive replaces the newest one, and silences
    it.
    """

    def on_hello(self, route: bytes, hello: CoordinatorHello) -> None:
        link = self._state.links[hello.pipeline_id]
        before, link.last_seen_s = link.last_seen_s, 0.0
        super().on_hello(route, hello)
        link.last_seen_s = max(before, link.last_seen_s)


class ReplacesActiveCoordinators(FleetScheduler):
    COORDINATORS = TrustsAnyHello


@pytest.mark.parametrize(
    ("kind", "is_safe"), [(FleetScheduler, True), (ReplacesActiveCoordinators, False)]
)
def test_an_active_coordinator_is_not_replaced_by_one_with_an_earlier_clock(
    kind: type[FleetScheduler], is_safe: bool
) -> None:
    """Another process may become the next incarnation only when the current one is silent."""
    harness = SchedulerHarness(1, kind)
    coordinator = harness.pipeline("a", train=(), generation=(0,))
    coordinator.started_s = 5000.0
    harness.beat()
    earlier = msgspec.structs.replace(coordinator.hello(), started_s=4000.0)
    assert (answer(harness, earlier) == SchedulerHello("s1")) is is_safe
    coordinator.is_silent = True
    harness.run(LIVE_S + 1.0)
    assert answer(harness, earlier) == SchedulerHello("s1", newest_s=5000.0)


def test_an_earlier_hello_does_not_end_a_sleep() -> None:
    """An engine that slept earlier is awake and must sleep for another pipeline: its earlier
    report of sleep must not free its GPU.
    """
    harness = SchedulerHarness(1)
    coordinator = harness.pipeline("a", train=(), generation=(0,))
    harness.pipeline("b", generation=())
    asleep = coordinator.hello()
    harness.generate("a", "g")
    harness.act()
    coordinator.is_hung = True
    harness.train("b", "t")
    harness.send(asleep, coordinator.route)
    state = harness.scheduler.state
    assert state.occupants[0] == Owner("a", GENERATION_CLUSTER, 0)
    assert harness.state("t") is QUEUED
    coordinator.is_hung = False
    harness.act()
    assert harness.state("t") is GRANTED
    assert state.occupants[0] == Owner("b", TRAIN, FIXED)


def test_an_earlier_hello_does_not_end_a_wake() -> None:
    harness = generating()
    coordinator = harness.coordinators["a"]
    awake = coordinator.hello()
    harness.release("a", "r", GENERATION_CLUSTER)
    harness.act()
    coordinator.is_hung = True
    assert harness.generate("a", "g2", step=1) is QUEUED
    harness.send(awake, coordinator.route)
    assert harness.state("g2") is QUEUED
    assert harness.of("a").workers[0].phase is WorkerPhase.WAKING


def test_a_sleep_that_establishes_the_state_is_sent_once() -> None:
    """With a newer epoch each second, each sleep would overtake the one before and none would
    complete.
    """
    harness = generating(2)
    coordinator = harness.coordinators["a"]
    coordinator.move(0, WorkerPhase.LOST)
    harness.beat()
    coordinator.is_hung = True
    harness.run(1)
    assert [[c.rank for c in each.changes] for each in coordinator.pending_resizes] == [[1]]
    epoch = coordinator.pending_resizes[0].changes[0].epoch
    harness.run(5)
    assert [each.changes[0].epoch for each in coordinator.pending_resizes] == [epoch]


def test_a_late_resize_that_completes_readmits_its_pipeline() -> None:
    harness = generating()
    coordinator = harness.coordinators["a"]
    coordinator.is_hung = True
    harness.release("a", "r", GENERATION_CLUSTER)
    harness.run(harness.settings.resize_deadline_s + harness.settings.slack_s + 1)
    assert harness.of("a").phase is PipelinePhase.QUARANTINED
    num_resizes = harness.scheduler.state.counts["resizes"]
    coordinator.is_hung = False
    harness.run(5)
    assert harness.of("a").phase is PipelinePhase.ADMITTED
    assert harness.state("r") is RELEASED
    assert harness.scheduler.state.counts["resizes"] <= num_resizes + 1, (
        "a sleeping engine is not resized again"
    )


def test_the_wait_for_an_engine_that_is_lost_repeatedly_grows() -> None:
    """Putting it to sleep in between does not reset the wait."""
    harness = generating(2)
    coordinator = harness.coordinators["a"]
    for num_faults in range(1, 5):
        coordinator.move(0, WorkerPhase.LOST)
        harness.beat()
        assert harness.scheduler.state.pipeline_records["a"].num_faults == num_faults
        coordinator.move(0, WorkerPhase.ASLEEP)
        coordinator.is_hung = True  # the coordinator only does what readmits it
        for _ in range(100):
            if harness.of("a").phase is PipelinePhase.ADMITTED:
                break
            coordinator.is_hung = False
            harness.act()
            coordinator.is_hung = True
            harness.run(0.25)
        assert harness.of("a").phase is PipelinePhase.ADMITTED
        coordinator.is_hung = False


# registration and end


def test_nothing_is_sent_before_the_coordinators_state_is_known() -> None:
    """The coordinator may know newer epochs of an earlier registration, and would refuse all
    older ones.
    """
    harness = SchedulerHarness(1)
    coordinator = harness.pipeline("a", train=(), generation=(0,))
    link = harness.scheduler.state.links["a"]
    link.is_known, link.route = False, b""
    coordinator.truths = [WorkerTruth(0, WorkerPhase.ASLEEP, 7)]
    assert harness.generate("a", "g") is QUEUED
    assert harness.scheduler.state.counts["resizes"] == 0
    harness.beat()
    harness.act()
    assert harness.state("g") is GRANTED
    assert harness.scheduler.state.counts["pipeline.quarantined"] == 0


def test_a_leaving_pipeline_stays_leaving_when_one_of_its_engines_fails() -> None:
    harness = generating()
    coordinator = harness.coordinators["a"]
    harness.send(UnregisterPipeline("leave", "a"))
    coordinator.move(0, WorkerPhase.LOST)
    harness.beat()
    assert harness.of("a").phase is PipelinePhase.LEAVING
    coordinator.move(0, WorkerPhase.ASLEEP)
    harness.run(5)
    assert harness.answers["leave"].ok
    assert not harness.scheduler.state.occupants


def test_generation_is_released_although_one_of_its_nodes_is_down() -> None:
    harness = SchedulerHarness(1)
    harness.send(JoinNode("n", "n1", 1))
    coordinator = harness.pipeline("a", train=(), generation=(0, 1))
    harness.send(NodeBeat("n1"))
    harness.generate("a", "g")
    harness.act()
    assert harness.awake("a") == [0, 1]
    coordinator.move(1, WorkerPhase.LOST)
    harness.run(harness.settings.node_grace_s + 2)
    assert harness.of("a").workers[1].phase is WorkerPhase.LOST
    harness.release("a", "r", GENERATION_CLUSTER)
    harness.wait_for("r", RELEASED, 5)


def test_a_report_of_unknown_workers_changes_nothing() -> None:
    harness = generating()
    coordinator = harness.coordinators["a"]
    stray = WorkerTruth(1, WorkerPhase.AWAKE, 9)
    hello = CoordinatorHello("a", (*coordinator.truths, stray), coordinator.started_s)
    harness.send(hello, coordinator.route)
    harness.send(msgspec.structs.replace(hello, pipeline_id="z"), coordinator.route)
    assert harness.of("a").phase is PipelinePhase.ADMITTED
    assert harness.awake("a") == [0]
