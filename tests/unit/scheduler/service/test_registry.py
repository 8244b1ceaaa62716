"""Pipelines and nodes that join and leave."""

import pytest

from rollmesh.scheduler.planning.state import GpuNode, NodePhase, PipelinePhase, PipelineState
from rollmesh.scheduler.service import registry
from rollmesh.scheduler.service.registry import PipelineRegistry, RunClaims
from rollmesh.scheduler.service.scheduler import FleetScheduler
from rollmesh.wire.scheduling import (
    GENERATION_CLUSTER,
    AdmitPipeline,
    DrainNode,
    GpuPriority,
    JoinNode,
    KillPipeline,
    NodeBeat,
    PipelineSpec,
    RegisterPipeline,
    RequestGpus,
    TakeGpus,
    TicketState,
    UndrainNode,
    UnregisterPipeline,
    WorkerPhase,
)
from tests.unit.scheduler.service.stage import TRAIN, Stage


def spec(name: str = "a", **fields: object) -> PipelineSpec:
    given = {"clusters": {TRAIN: (0,)}, "generation": (0, 1), **fields}
    return PipelineSpec(pipeline_id=name, **given)  # type: ignore[arg-type]  # of the spec


# W15


def test_a_repeated_registration_changes_nothing() -> None:
    stage = Stage()
    stage.pipeline("a", train=(0,), generation=(0, 1))
    stage.train("a", "t")
    rows = {table: dict(rows) for table, rows in stage.kept.tables.items()}
    stage.send(RegisterPipeline("again", stage.of("a").spec))
    assert stage.answers["again"].ok
    assert stage.of("a").phase is PipelinePhase.ADMITTED
    changed = {table for table, kept in stage.kept.tables.items() if kept != rows[table]}
    assert changed == {"answers"}
    assert stage.train("a", "t2") is TicketState.GRANTED


def test_another_spec_under_the_same_name_is_refused_in_one_line() -> None:
    stage = Stage()
    stage.pipeline("a", train=(0,), generation=(0, 1))
    stage.send(RegisterPipeline("other", spec(weight=2.0)))
    answer = stage.answers["other"]
    assert not answer.ok
    assert answer.error == "a is registered with another spec (weight); unregister it first"
    assert stage.of("a").spec.weight == 1.0


class BeginsAnew(PipelineRegistry):
    """The fault: a repeated registration removes the admission."""

    def on_ask(self, route: bytes, ask: object) -> None:
        if (
            isinstance(ask, RegisterPipeline)
            and ask.spec.pipeline_id in self._state.pipeline_records
        ):
            name = ask.spec.pipeline_id
            self._state.fleet.pipelines[name].phase = PipelinePhase.REGISTERED
        super().on_ask(route, ask)  # type: ignore[arg-type]  # what it is given


class Forgetful(FleetScheduler):
    REGISTRY = BeginsAnew


def test_were_admission_reset_by_it_requests_would_be_refused() -> None:
    stage = Stage(kind=Forgetful)
    stage.pipeline("a", train=(0,), generation=(0, 1))
    stage.send(RegisterPipeline("again", stage.of("a").spec))
    assert stage.train("a", "t") is TicketState.REFUSED


# joining


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        (spec("a/b"), "a name is one word"),
        (spec(clusters={GENERATION_CLUSTER: (0,)}), "is reserved"),
        (spec(generation=(0, 99)), "99"),
    ],
)
def test_a_spec_that_cannot_be_is_refused_in_one_line(wrong: PipelineSpec, text: str) -> None:
    stage = Stage()
    stage.send(RegisterPipeline("r", wrong))
    assert not stage.answers["r"].ok
    assert text in stage.answers["r"].error
    assert "\n" not in stage.answers["r"].error
    assert not stage.scheduler.state.pipeline_records


def test_a_repeated_request_is_done_once_and_answered_each_time() -> None:
    stage = Stage()
    stage.pipeline("a")
    stage.send(KillPipeline("k", "a"))
    stage.send(AdmitPipeline("again", "a"))
    stage.send(KillPipeline("k", "a"))
    assert stage.of("a").phase is PipelinePhase.ADMITTED
    stage.answers.clear()
    stage.send(KillPipeline("k", "a"))
    assert stage.answers["k"].ok


@pytest.mark.parametrize("ask", [AdmitPipeline, KillPipeline, UnregisterPipeline])
def test_what_is_asked_of_an_unknown_pipeline_is_refused(ask: type) -> None:
    stage = Stage()
    stage.pipeline("a")
    stage.send(ask("k", "x"))
    assert not stage.answers["k"].ok
    assert stage.answers["k"].error == "no pipeline 'x'; a registered"


# leaving


def test_a_leaving_pipeline_sleeps_first_and_then_nothing_is_left_of_it() -> None:
    stage = Stage()
    stage.pipeline("a", train=(0,))
    stage.train("a", "t")
    stage.generate("a", "g")
    stage.act()
    stage.send(UnregisterPipeline("u", "a"))
    assert "u" not in stage.answers
    assert stage.train("a", "t2") is TicketState.REFUSED
    stage.act()
    assert stage.awake("a") == []
    assert "u" not in stage.answers, "its trainer has not given up its GPUs"
    stage.release("a", "r")
    assert stage.answers["u"].ok
    state = stage.scheduler.state
    assert state.fleet.owners == state.occupants == {}
    assert state.fleet.pipelines == {}
    assert state.intents == {}
    kept = {table for table, rows in stage.kept.tables.items() if rows}
    assert kept == {"nodes", "answers", "tickets", "ended", "credits", "numbers"}


class Hurried(RunClaims):
    """The fault: a leaving pipeline has nothing from then on, even where an engine is awake."""

    def release_all(self, pipeline: PipelineState, why: str, *, with_trainer: bool = True) -> None:
        super().release_all(pipeline, why, with_trainer=True)


class HurriedTenants(PipelineRegistry):
    RUN_CLAIMS = Hurried


class LeavesAtOnce(FleetScheduler):
    REGISTRY = HurriedTenants


def left_while_training(kind: type[FleetScheduler]) -> Stage:
    """Pipeline a trains while it is unregistered; b waits for a GPU of it."""
    stage = Stage(2, kind=kind)
    stage.pipeline("a", train=(0, 1), generation=())
    stage.pipeline("b", train=(1,), generation=())
    stage.train("a", "ta")
    stage.train("b", "tb")
    stage.send(UnregisterPipeline("u", "a"))
    return stage


def test_a_trainer_whose_pipeline_leaves_keeps_its_gpus_until_it_releases_them() -> None:
    stage = left_while_training(FleetScheduler)
    stage.run(1)
    stage.begin()  # also in the scheduler's next life
    stage.run(30)
    assert stage.state("tb") is TicketState.QUEUED
    stage.release("a", "r")
    stage.wait_for("tb", TicketState.GRANTED, 5)
    assert list(stage.scheduler.state.fleet.pipelines) == ["b"]


def test_a_pipeline_that_leaves_with_an_untaken_offer_has_nothing() -> None:
    stage = Stage(2)
    stage.pipeline("a", train=(0, 1), generation=())
    stage.send(RequestGpus("ta", "a", TRAIN, GpuPriority.ACTOR_TRAINING))
    offered = stage.moved["ta"]
    stage.send(UnregisterPipeline("u", "a"))
    assert offered.state is TicketState.OFFERED
    assert stage.state("ta") is TicketState.REFUSED
    assert stage.answers["u"].ok
    stage.send(TakeGpus("ta", offered.offer))  # it was on its way
    assert stage.state("ta") is TicketState.REFUSED
    assert stage.scheduler.state.occupants == {}


def test_were_it_forgotten_at_once_two_would_stand_on_its_gpus() -> None:
    stage = left_while_training(LeavesAtOnce)
    assert stage.state("tb") is TicketState.GRANTED, "and a's trainer has received nothing"


def test_a_leaving_pipeline_that_is_killed_is_forgotten_whatever_it_held() -> None:
    stage = left_while_training(FleetScheduler)
    stage.send(KillPipeline("k", "a"))
    assert stage.answers["u"].ok
    assert stage.state("tb") is TicketState.GRANTED


def test_a_pipeline_that_leaves_its_promised_gpus_leaves_all_idle() -> None:
    stage = Stage()
    stage.pipeline("a", train=(0,), generation=(0, 1))
    stage.pipeline("b", train=(0, 1), generation=())
    stage.generate("a", "g")
    stage.act()
    stage.coordinators["a"].is_hung = True
    stage.train("b", "b1")  # promised, while a's workers go to sleep
    stage.send(UnregisterPipeline("ub", "b"))
    stage.send(UnregisterPipeline("ua", "a"))
    stage.coordinators["a"].is_hung = False
    stage.act()
    assert stage.answers["ua"].ok
    assert stage.answers["ub"].ok
    assert stage.state("b1") is TicketState.REFUSED
    assert stage.scheduler.state.fleet.owners == stage.scheduler.state.occupants == {}


def test_a_promised_wake_is_not_sent_for_a_pipeline_that_has_left() -> None:
    stage = Stage(2)
    stage.pipeline("a", train=(0, 1), generation=(0, 1))
    coordinator = stage.pipeline("b", generation=(0, 1))
    stage.generate("a", "g")
    stage.act()
    stage.coordinators["a"].is_hung = True
    stage.generate("b", "g2")
    stage.run(8)
    assert stage.scheduler.state.intents
    stage.send(UnregisterPipeline("u", "b"))
    assert stage.answers["u"].ok
    stage.coordinators["a"].is_hung = False
    stage.run(3)
    assert not coordinator.num_received
    assert stage.awake("a") == [0, 1]


def test_a_killed_pipeline_has_nothing_whatever_its_coordinator_sent_last() -> None:
    stage = Stage(2)
    stage.pipeline("a", train=(0,), generation=(0, 1))
    stage.generate("a", "g")
    stage.act()
    coordinator = stage.coordinators.pop("a")
    stage.run(stage.settings.coordinator_grace_s + 2)
    assert stage.of("a").phase is PipelinePhase.QUARANTINED
    assert set(stage.scheduler.state.occupants) == {0, 1}
    stage.send(KillPipeline("k", "a"))
    assert stage.of("a").phase is PipelinePhase.REGISTERED
    assert stage.scheduler.state.fleet.owners == stage.scheduler.state.occupants == {}
    assert coordinator.num_received == 1
    stage.send(coordinator.hello(), coordinator.route)
    assert stage.scheduler.state.fleet.owners == stage.scheduler.state.occupants == {}


def test_a_repeated_unregister_after_a_restart_is_answered() -> None:
    stage = Stage()
    stage.pipeline("a")
    stage.generate("a", "g")
    stage.act()
    stage.send(UnregisterPipeline("u", "a"))
    stage.begin()
    stage.run(4)
    stage.send(UnregisterPipeline("u", "a"))
    assert stage.answers["u"].ok


# nodes


def test_a_node_that_comes_back_has_its_gpu_numbers_again() -> None:
    stage = Stage(2)
    stage.send(JoinNode("n1", "n1", 2))
    stage.send(JoinNode("n2", "n2", 4))
    stage.run(stage.settings.node_grace_s + 1)
    state = stage.scheduler.state.fleet
    assert {name: node.phase for name, node in state.nodes.items()} == {
        "n0": NodePhase.UP,
        "n1": NodePhase.DOWN,
        "n2": NodePhase.DOWN,
    }
    stage.send(JoinNode("n2-again", "n2", 4, ("big",)))
    assert state.nodes["n2"] == GpuNode(name="n2", gpus=(4, 5, 6, 7), labels=("big",))
    stage.send(NodeBeat("n1"))
    assert state.nodes["n1"].phase is NodePhase.UP
    assert stage.scheduler.state.counts["node.returned"] == 1


def test_a_node_that_has_changed_is_refused() -> None:
    stage = Stage(2)
    stage.send(JoinNode("again", "n0", 3))
    assert stage.answers["again"].error == "node 'n0' had 2 GPUs and comes back with 3; rename it"
    for number, num_gpus in enumerate((0, -1, 2**62)):
        stage.send(JoinNode(f"none-{number}", "n1", num_gpus))
        assert "use 1 to 1024" in stage.answers[f"none-{number}"].error
    for number, name in enumerate(("", "a b", "a/b", "a\n")):
        stage.send(JoinNode(f"name-{number}", name, 2))
        assert "one word" in stage.answers[f"name-{number}"].error


def test_a_node_that_drains_puts_its_workers_to_sleep() -> None:
    stage = Stage(2)
    stage.pipeline("a", generation=(0, 1))
    stage.generate("a", "g")
    stage.act()
    stage.send(DrainNode("d", "n0"))
    stage.act()
    assert not stage.awake("a")
    assert stage.train("a", "t") is TicketState.QUEUED
    stage.send(DrainNode("d2", "nowhere"))
    assert not stage.answers["d2"].ok


def test_a_ticket_outlives_a_leave_that_has_its_key() -> None:
    stage = Stage(2)
    stage.pipeline("a", generation=(0, 1))
    stage.train("a", "same")
    stage.send(UnregisterPipeline("same", "a"))
    stage.release("a", "r")
    assert stage.answers["same"].ok
    stage.run(2 * stage.settings.memory_s)
    assert not stage.scheduler.state.reply_targets


def test_a_drain_that_is_undone_wakes_what_waits() -> None:
    stage = Stage(2)
    stage.pipeline("a", generation=(0, 1))
    stage.send(DrainNode("d", "n0"))
    stage.generate("a", "g")
    stage.run(1.0)
    assert not stage.awake("a")
    stage.send(UndrainNode("u", "n0"))
    stage.act()
    assert stage.awake("a") == [0, 1]
    stage.send(UndrainNode("u2", "nowhere"))
    assert "no node 'nowhere'; n0 known" in stage.answers["u2"].error


def phase_of(stage: Stage, name: str) -> NodePhase:
    return stage.scheduler.state.fleet.nodes[name].phase


def test_a_drained_node_that_was_but_silent_is_still_drained() -> None:
    stage = Stage(0)
    join = JoinNode("n1", "n1", 2)
    stage.send(join)
    stage.send(DrainNode("d", "n1"))
    stage.run(stage.settings.node_grace_s + 1)
    assert phase_of(stage, "n1") is NodePhase.DOWN
    stage.begin()
    stage.send(NodeBeat("n1"))
    assert phase_of(stage, "n1") is NodePhase.DRAINING
    stage.run(stage.settings.memory_s + stage.settings.node_grace_s)
    stage.send(join)
    assert phase_of(stage, "n1") is NodePhase.DRAINING
    stage.send(JoinNode("anew", "n1", 2))
    assert phase_of(stage, "n1") is NodePhase.UP


def test_a_node_that_is_down_is_drained_or_used_when_it_is_back() -> None:
    stage = Stage(0)
    stage.send(JoinNode("n1", "n1", 2))
    for ask, phase in (
        (DrainNode("d", "n1"), NodePhase.DRAINING),
        (UndrainNode("u", "n1"), NodePhase.UP),
    ):
        stage.run(stage.settings.node_grace_s + 1)
        stage.send(ask)
        assert phase_of(stage, "n1") is NodePhase.DOWN
        stage.send(NodeBeat("n1"))
        assert phase_of(stage, "n1") is phase


def test_what_was_promised_on_a_node_that_dies_waits_for_it() -> None:
    stage = Stage(0)
    stage.send(JoinNode("n1", "n1", 2))
    stage.pipeline("a", train=(0,), generation=(0, 1))
    stage.generate("a", "g")
    stage.act()
    stage.coordinators["a"].is_hung = True
    stage.train("a", "t")
    stage.run(stage.settings.node_grace_s + 1)
    assert not stage.of("a").holds
    assert list(stage.scheduler.state.fleet.requests) == ["t"]
    assert {worker.phase for worker in stage.of("a").workers} == {WorkerPhase.LOST}
    stage.coordinators["a"].is_hung = False
    for _ in range(16):
        stage.send(NodeBeat("n1"))
        stage.run(0.5)
    assert stage.state("t") is TicketState.GRANTED


def test_names_are_bounded_in_length_and_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "MAX_NODES", 1)
    stage = Stage()  # it has a node
    asks = [
        JoinNode("long", "n" * 129, 1),
        JoinNode("label", "n0", 1, ("x" * 129,)),
        JoinNode("labels", "n0", 1, tuple(f"l{n}" for n in range(65))),
        JoinNode("many", "another", 1),
    ]
    for ask in asks:
        stage.send(ask)
        assert not stage.answers[ask.key].ok
    assert len(stage.scheduler.state.node_records) == 1
