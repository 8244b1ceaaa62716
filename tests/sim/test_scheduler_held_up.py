"""After a slow turn of the service, silent processes get another chance, but only once."""

from rollmesh.scheduler.planning.state import NodePhase, PipelinePhase
from rollmesh.scheduler.service.scheduler import FleetScheduler
from rollmesh.wire.scheduling import JoinNode, NodeBeat, TicketState, WorkerPhase
from tests.unit.scheduler.service.stage import Stage

QUARANTINED, ADMITTED = PipelinePhase.QUARANTINED, PipelinePhase.ADMITTED
SLOW_S = 1.5
"""Seconds between two turns: more than four ticks."""
TURN_S = 0.01


class ForgivesAlways(FleetScheduler):
    """The fault: silence during a slow turn never counts."""

    def _was_held_up(self, before_s: float) -> bool:
        return self.state.now_s - before_s > 1.0


def two(kind: type[FleetScheduler] = FleetScheduler) -> Stage:
    """Pipelines a and b, each with an engine awake; a has one more on a node of an agent."""
    stage = Stage(2, kind=kind)
    stage.send(JoinNode("n1", "n1", 1))
    stage.pipeline("a", train=(), generation=(0, 2))
    stage.pipeline("b", train=(), generation=(1,))
    stage.generate("a", "ga")
    stage.generate("b", "gb")
    stage.run(2)
    assert (stage.awake("a"), stage.awake("b")) == ([0, 1], [0])
    return stage


def crawl(stage: Stage, seconds: float, *, beats: bool = False) -> None:
    """Turns that are all slow; each receives all messages sent meanwhile."""
    end_s = stage.now_s + seconds
    while stage.now_s < end_s:
        stage.now_s += SLOW_S
        if beats:
            stage.send(NodeBeat("n1"))
        stage.beat()
        stage.run(TURN_S)


def test_a_loop_that_is_always_slow_fences_only_silent_processes() -> None:
    stage = two()
    stage.coordinators["a"].is_silent = True
    crawl(stage, 2 * stage.settings.coordinator_grace_s, beats=True)
    assert (stage.of("a").phase, stage.of("b").phase) == (QUARANTINED, ADMITTED)
    assert stage.awake("b") == [0]


def test_a_loop_that_is_always_slow_sees_that_a_node_is_dead() -> None:
    stage = two()
    crawl(stage, 2 * stage.settings.node_grace_s)
    assert stage.scheduler.state.fleet.nodes["n1"].phase is NodePhase.DOWN
    assert stage.of("a").workers[1].phase is WorkerPhase.LOST


def test_a_loop_that_is_always_slow_ends_a_resize_that_is_late() -> None:
    stage = two()
    stage.coordinators["b"].hung = {0}
    stage.pipeline("c", train=(1,), generation=())
    stage.train("c", "t")
    settings = stage.settings
    crawl(stage, 1.5 * (settings.resize_deadline_s + settings.slack_s), beats=True)
    assert stage.of("b").phase is QUARANTINED


def test_a_request_that_is_not_renewed_is_withdrawn_by_a_slow_loop_too() -> None:
    stage = two()
    stage.pipeline("c", train=(1,), generation=())
    stage.pipeline("d", train=(1,), generation=())
    stage.train("c", "held")
    stage.wait_for("held", TicketState.GRANTED)
    stage.train("d", "t")
    del stage.open["t"]
    crawl(stage, 2 * stage.settings.patience_s, beats=True)
    assert "t" not in stage.scheduler.state.fleet.requests


def test_a_loop_that_forgives_at_each_turn_fences_no_process() -> None:
    stage = two(ForgivesAlways)
    stage.coordinators["a"].is_silent = True
    crawl(stage, 120.0)
    assert stage.of("a").phase is ADMITTED
    assert stage.scheduler.state.fleet.nodes["n1"].phase is NodePhase.UP


def test_one_long_delay_fences_no_process() -> None:
    stage = two()
    for _ in range(20):
        stage.send(NodeBeat("n1"))
        stage.run(1)
    stage.now_s += 600.0
    stage.run(TURN_S)
    stage.run(0.5)
    assert (stage.of("a").phase, stage.of("b").phase) == (ADMITTED, ADMITTED)
    assert stage.scheduler.state.fleet.nodes["n1"].phase is NodePhase.UP
