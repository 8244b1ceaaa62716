"""After a slow step of the service, silent processes get another chance, but only once."""

from rollmesh.scheduler.planning.state import NodePhase, PipelinePhase
from rollmesh.scheduler.service.scheduler import FleetScheduler
from rollmesh.wire.scheduling import JoinNode, NodeBeat, TicketState, WorkerPhase
from tests.unit.scheduler.service.harness import SchedulerHarness

QUARANTINED, ADMITTED = PipelinePhase.QUARANTINED, PipelinePhase.ADMITTED
SLOW_S = 1.5
"""Seconds between two steps: more than four ticks."""
TURN_S = 0.01


class ForgivesEverySilence(FleetScheduler):
    """The fault: silence during a slow step never counts."""

    def _was_held_up(self, before_s: float) -> bool:
        return self.state.now_s - before_s > 1.0


def two_pipelines(kind: type[FleetScheduler] = FleetScheduler) -> SchedulerHarness:
    """Return pipelines a and b, each with an engine awake; a has one more on a second node."""
    harness = SchedulerHarness(2, kind=kind)
    harness.send(JoinNode("n1", "n1", 1))
    harness.pipeline("a", train=(), generation=(0, 2))
    harness.pipeline("b", train=(), generation=(1,))
    harness.generate("a", "ga")
    harness.generate("b", "gb")
    harness.run(2)
    assert (harness.awake("a"), harness.awake("b")) == ([0, 1], [0])
    return harness


def run_slowly(harness: SchedulerHarness, seconds: float, *, beats: bool = False) -> None:
    """Run only slow steps; each receives all messages sent since the last one."""
    end_s = harness.now_s + seconds
    while harness.now_s < end_s:
        harness.now_s += SLOW_S
        if beats:
            harness.send(NodeBeat("n1"))
        harness.beat()
        harness.run(TURN_S)


def test_a_loop_that_is_always_slow_fences_only_silent_processes() -> None:
    harness = two_pipelines()
    harness.coordinators["a"].is_silent = True
    run_slowly(harness, 2 * harness.settings.coordinator_grace_s, beats=True)
    assert (harness.of("a").phase, harness.of("b").phase) == (QUARANTINED, ADMITTED)
    assert harness.awake("b") == [0]


def test_a_loop_that_is_always_slow_detects_a_dead_node() -> None:
    harness = two_pipelines()
    run_slowly(harness, 2 * harness.settings.node_grace_s)
    assert harness.scheduler.state.fleet.nodes["n1"].phase is NodePhase.DOWN
    assert harness.of("a").workers[1].phase is WorkerPhase.LOST


def test_a_loop_that_is_always_slow_ends_a_late_resize() -> None:
    harness = two_pipelines()
    harness.coordinators["b"].hung = {0}
    harness.pipeline("c", train=(1,), generation=())
    harness.train("c", "t")
    settings = harness.settings
    run_slowly(harness, 1.5 * (settings.resize_deadline_s + settings.slack_s), beats=True)
    assert harness.of("b").phase is QUARANTINED


def test_a_slow_loop_withdraws_requests_that_are_not_renewed() -> None:
    harness = two_pipelines()
    harness.pipeline("c", train=(1,), generation=())
    harness.pipeline("d", train=(1,), generation=())
    harness.train("c", "held")
    harness.wait_for("held", TicketState.GRANTED)
    harness.train("d", "t")
    del harness.open["t"]
    run_slowly(harness, 2 * harness.settings.patience_s, beats=True)
    assert "t" not in harness.scheduler.state.fleet.requests


def test_a_loop_that_forgives_every_silence_fences_no_process() -> None:
    harness = two_pipelines(ForgivesEverySilence)
    harness.coordinators["a"].is_silent = True
    run_slowly(harness, 120.0)
    assert harness.of("a").phase is ADMITTED
    assert harness.scheduler.state.fleet.nodes["n1"].phase is NodePhase.UP


def test_one_long_delay_fences_no_process() -> None:
    harness = two_pipelines()
    for _ in range(20):
        harness.send(NodeBeat("n1"))
        harness.run(1)
    harness.now_s += 600.0
    harness.run(TURN_S)
    harness.run(0.5)
    assert (harness.of("a").phase, harness.of("b").phase) == (ADMITTED, ADMITTED)
    assert harness.scheduler.state.fleet.nodes["n1"].phase is NodePhase.UP
