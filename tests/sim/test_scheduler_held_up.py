"""After a slow turn of the service, silent processes get another chance, but only once."""

from rollmesh.scheduler.planning.state import NodePhase, PipelinePhase
from rollmesh.scheduler.service.scheduler import FleetScheduler
from rollmesh.wire.scheduling import JoinNode, NodeBeat, TicketState, WorkerPhase
from tests.unit.scheduler.service.harness import SchedulerHarness

QUARANTINED, ADMITTED = PipelinePhase.QUARANTINED, PipelinePhase.ADMITTED
SLOW_S = 1.5
"""Seconds between two turns: more than four ticks."""
TURN_S = 0.01


class ForgivesAlways(FleetScheduler):
    """The fault: silence during a slow turn never counts."""

    def _was_held_up(self, before_s: float) -> bool:
        return self.state.now_s - before_s > 1.0


def two(kind: type[FleetScheduler] = FleetScheduler) -> SchedulerHarness:
    """Pipelines a and b, each with an engine awake; a has one more on a node of an agent."""
    harness = SchedulerHarness(2, kind=kind)
    harness.send(JoinNode("n1", "n1", 1))
    harness.pipeline("a", train=(), generation=(0, 2))
    harness.pipeline("b", train=(), generation=(1,))
    harness.generate("a", "ga")
    harness.generate("b", "gb")
    harness.run(2)
    assert (harness.awake("a"), harness.awake("b")) == ([0, 1], [0])
    return harness


def crawl(harness: SchedulerHarness, seconds: float, *, beats: bool = False) -> None:
    """Turns that are all slow; each receives all messages sent meanwhile."""
    end_s = harness.now_s + seconds
    while harness.now_s < end_s:
        harness.now_s += SLOW_S
        if beats:
            harness.send(NodeBeat("n1"))
        harness.beat()
        harness.run(TURN_S)


def test_a_loop_that_is_always_slow_fences_only_silent_processes() -> None:
    harness = two()
    harness.coordinators["a"].is_silent = True
    crawl(harness, 2 * harness.settings.coordinator_grace_s, beats=True)
    assert (harness.of("a").phase, harness.of("b").phase) == (QUARANTINED, ADMITTED)
    assert harness.awake("b") == [0]


def test_a_loop_that_is_always_slow_sees_that_a_node_is_dead() -> None:
    harness = two()
    crawl(harness, 2 * harness.settings.node_grace_s)
    assert harness.scheduler.state.fleet.nodes["n1"].phase is NodePhase.DOWN
    assert harness.of("a").workers[1].phase is WorkerPhase.LOST


def test_a_loop_that_is_always_slow_ends_a_resize_that_is_late() -> None:
    harness = two()
    harness.coordinators["b"].hung = {0}
    harness.pipeline("c", train=(1,), generation=())
    harness.train("c", "t")
    settings = harness.settings
    crawl(harness, 1.5 * (settings.resize_deadline_s + settings.slack_s), beats=True)
    assert harness.of("b").phase is QUARANTINED


def test_a_request_that_is_not_renewed_is_withdrawn_by_a_slow_loop_too() -> None:
    harness = two()
    harness.pipeline("c", train=(1,), generation=())
    harness.pipeline("d", train=(1,), generation=())
    harness.train("c", "held")
    harness.wait_for("held", TicketState.GRANTED)
    harness.train("d", "t")
    del harness.open["t"]
    crawl(harness, 2 * harness.settings.patience_s, beats=True)
    assert "t" not in harness.scheduler.state.fleet.requests


def test_a_loop_that_forgives_at_each_turn_fences_no_process() -> None:
    harness = two(ForgivesAlways)
    harness.coordinators["a"].is_silent = True
    crawl(harness, 120.0)
    assert harness.of("a").phase is ADMITTED
    assert harness.scheduler.state.fleet.nodes["n1"].phase is NodePhase.UP


def test_one_long_delay_fences_no_process() -> None:
    harness = two()
    for _ in range(20):
        harness.send(NodeBeat("n1"))
        harness.run(1)
    harness.now_s += 600.0
    harness.run(TURN_S)
    harness.run(0.5)
    assert (harness.of("a").phase, harness.of("b").phase) == (ADMITTED, ADMITTED)
    assert harness.scheduler.state.fleet.nodes["n1"].phase is NodePhase.UP
