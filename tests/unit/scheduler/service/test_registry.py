"""Registry: pipelines and nodes that join and leave."""

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
from tests.unit.scheduler.service.harness import TRAIN, SchedulerHarness


def spec(name: str = "a", **fields: object) -> PipelineSpec:
    given = {"clusters": {TRAIN: (0,)}, "generation": (0, 1), **fields}
    return PipelineSpec(pipeline_id=name, **given)  # type: ignore[arg-type]  # of the spec


# W15: a registration that is repeated


def test_a_repeated_registration_changes_nothing() -> None:
    harness = SchedulerHarness()
    harness.pipeline("a", train=(0,), generation=(0, 1))
    harness.train("a", "t")
    rows = {table: dict(rows) for table, rows in harness.kept.tables.items()}
    harness.send(RegisterPipeline("again", harness.of("a").spec))
    assert harness.answers["again"].ok
    assert harness.of("a").phase is PipelinePhase.ADMITTED
    changed = {table for table, kept in harness.kept.tables.items() if kept != rows[table]}
    assert changed == {"answers"}
    assert harness.train("a", "t2") is TicketState.GRANTED


def test_another_spec_under_the_same_name_is_refused_in_one_line() -> None:
    harness = SchedulerHarness()
    harness.pipeline("a", train=(0,), generation=(0, 1))
    harness.send(RegisterPipeline("other", spec(weight=2.0)))
    answer = harness.answers["other"]
    assert not answer.ok
    assert answer.error == "a is registered with another spec (weight); unregister it first"
    assert harness.of("a").spec.weight == 1.0


class ResetsAdmission(PipelineRegistry):
    """The fault: a repeated registration removes the admission."""

    def on_ask(self, route: bytes, ask: object) -> None:
        if (
            isinstance(ask, RegisterPipeline)
            and ask.spec.pipeline_id in self._state.pipeline_records
        ):
            name = ask.spec.pipeline_id
            self._state.fleet.pipelines[name].phase = PipelinePhase.REGISTERED
        super().on_ask(route, ask)  # type: ignore[arg-type]  # passed on unchanged


class ResettingScheduler(FleetScheduler):
    REGISTRY = ResetsAdmission


def test_if_registration_reset_admission_requests_would_be_refused() -> None:
    harness = SchedulerHarness(kind=ResettingScheduler)
    harness.pipeline("a", train=(0,), generation=(0, 1))
    harness.send(RegisterPipeline("again", harness.of("a").spec))
    assert harness.train("a", "t") is TicketState.REFUSED


# joining


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        (spec("a/b"), "a name is one word"),
        (spec(clusters={GENERATION_CLUSTER: (0,)}), "is reserved"),
        (spec(generation=(0, 99)), "99"),
    ],
)
def test_an_invalid_spec_is_refused_in_one_line(wrong: PipelineSpec, text: str) -> None:
    harness = SchedulerHarness()
    harness.send(RegisterPipeline("r", wrong))
    assert not harness.answers["r"].ok
    assert text in harness.answers["r"].error
    assert "\n" not in harness.answers["r"].error
    assert not harness.scheduler.state.pipeline_records


def test_a_repeated_request_is_carried_out_once_and_answered_each_time() -> None:
    harness = SchedulerHarness()
    harness.pipeline("a")
    harness.send(KillPipeline("k", "a"))
    harness.send(AdmitPipeline("again", "a"))
    harness.send(KillPipeline("k", "a"))
    assert harness.of("a").phase is PipelinePhase.ADMITTED
    harness.answers.clear()
    harness.send(KillPipeline("k", "a"))
    assert harness.answers["k"].ok


@pytest.mark.parametrize("ask", [AdmitPipeline, KillPipeline, UnregisterPipeline])
def test_requests_about_an_unknown_pipeline_are_refused(ask: type) -> None:
    harness = SchedulerHarness()
    harness.pipeline("a")
    harness.send(ask("k", "x"))
    assert not harness.answers["k"].ok
    assert harness.answers["k"].error == "no pipeline 'x'; a registered"


# leaving


def test_a_leaving_pipeline_sleeps_first_and_leaves_no_state() -> None:
    harness = SchedulerHarness()
    harness.pipeline("a", train=(0,))
    harness.train("a", "t")
    harness.generate("a", "g")
    harness.act()
    harness.send(UnregisterPipeline("u", "a"))
    assert "u" not in harness.answers
    assert harness.train("a", "t2") is TicketState.REFUSED
    harness.act()
    assert harness.awake("a") == []
    assert "u" not in harness.answers, "its trainer has not given up its GPUs"
    harness.release("a", "r")
    assert harness.answers["u"].ok
    state = harness.scheduler.state
    assert state.fleet.owners == state.occupants == {}
    assert state.fleet.pipelines == {}
    assert state.intents == {}
    kept = {table for table, rows in harness.kept.tables.items() if rows}
    assert kept == {"nodes", "answers", "tickets", "ended", "credits", "numbers"}


class ReleasesAtOnce(RunClaims):
    """The fault: a leaving pipeline holds nothing from then on, even if an engine is awake."""

    def release_all(self, pipeline: PipelineState, why: str, *, with_trainer: bool = True) -> None:
        super().release_all(pipeline, why, with_trainer=True)


class HurriedRegistry(PipelineRegistry):
    RUN_CLAIMS = ReleasesAtOnce


class LeavesAtOnce(FleetScheduler):
    REGISTRY = HurriedRegistry


def left_while_training(kind: type[FleetScheduler]) -> SchedulerHarness:
    """Pipeline a trains while it is unregistered; b waits for one of its GPUs."""
    harness = SchedulerHarness(2, kind=kind)
    harness.pipeline("a", train=(0, 1), generation=())
    harness.pipeline("b", train=(1,), generation=())
    harness.train("a", "ta")
    harness.train("b", "tb")
    harness.send(UnregisterPipeline("u", "a"))
    return harness


def test_a_trainer_whose_pipeline_leaves_keeps_its_gpus_until_it_releases_them() -> None:
    harness = left_while_training(FleetScheduler)
    harness.run(1)
    harness.begin()  # also after a restart of the scheduler
    harness.run(30)
    assert harness.state("tb") is TicketState.QUEUED
    harness.release("a", "r")
    harness.wait_for("tb", TicketState.GRANTED, 5)
    assert list(harness.scheduler.state.fleet.pipelines) == ["b"]


def test_a_pipeline_that_leaves_with_an_untaken_offer_holds_nothing() -> None:
    harness = SchedulerHarness(2)
    harness.pipeline("a", train=(0, 1), generation=())
    harness.send(RequestGpus("ta", "a", TRAIN, GpuPriority.ACTOR_TRAINING))
    offered = harness.moved["ta"]
    harness.send(UnregisterPipeline("u", "a"))
    assert offered.state is TicketState.OFFERED
    assert harness.state("ta") is TicketState.REFUSED
    assert harness.answers["u"].ok
    harness.send(TakeGpus("ta", offered.offer))  # sent before the refusal arrived
    assert harness.state("ta") is TicketState.REFUSED
    assert harness.scheduler.state.occupants == {}


def test_if_a_leaving_pipeline_were_forgotten_at_once_two_would_use_its_gpus() -> None:
    harness = left_while_training(LeavesAtOnce)
    assert harness.state("tb") is TicketState.GRANTED, "and a's trainer has received nothing"


def test_a_leaving_pipeline_that_is_killed_is_forgotten_whatever_it_held() -> None:
    harness = left_while_training(FleetScheduler)
    harness.send(KillPipeline("k", "a"))
    assert harness.answers["u"].ok
    assert harness.state("tb") is TicketState.GRANTED


def test_leaving_pipelines_free_their_promised_gpus() -> None:
    harness = SchedulerHarness()
    harness.pipeline("a", train=(0,), generation=(0, 1))
    harness.pipeline("b", train=(0, 1), generation=())
    harness.generate("a", "g")
    harness.act()
    harness.coordinators["a"].is_hung = True
    harness.train("b", "b1")  # promised while a's workers go to sleep
    harness.send(UnregisterPipeline("ub", "b"))
    harness.send(UnregisterPipeline("ua", "a"))
    harness.coordinators["a"].is_hung = False
    harness.act()
    assert harness.answers["ua"].ok
    assert harness.answers["ub"].ok
    assert harness.state("b1") is TicketState.REFUSED
    assert harness.scheduler.state.fleet.owners == harness.scheduler.state.occupants == {}


def test_a_promised_wake_is_not_sent_for_a_pipeline_that_has_left() -> None:
    harness = SchedulerHarness(2)
    harness.pipeline("a", train=(0, 1), generation=(0, 1))
    coordinator = harness.pipeline("b", generation=(0, 1))
    harness.generate("a", "g")
    harness.act()
    harness.coordinators["a"].is_hung = True
    harness.generate("b", "g2")
    harness.run(8)
    assert harness.scheduler.state.intents
    harness.send(UnregisterPipeline("u", "b"))
    assert harness.answers["u"].ok
    harness.coordinators["a"].is_hung = False
    harness.run(3)
    assert not coordinator.num_received
    assert harness.awake("a") == [0, 1]


def test_a_killed_pipeline_holds_nothing_whatever_its_coordinator_sent_last() -> None:
    harness = SchedulerHarness(2)
    harness.pipeline("a", train=(0,), generation=(0, 1))
    harness.generate("a", "g")
    harness.act()
    coordinator = harness.coordinators.pop("a")
    harness.run(harness.settings.coordinator_grace_s + 2)
    assert harness.of("a").phase is PipelinePhase.QUARANTINED
    assert set(harness.scheduler.state.occupants) == {0, 1}
    harness.send(KillPipeline("k", "a"))
    assert harness.of("a").phase is PipelinePhase.REGISTERED
    assert harness.scheduler.state.fleet.owners == harness.scheduler.state.occupants == {}
    assert coordinator.num_received == 1
    harness.send(coordinator.hello(), coordinator.route)
    assert harness.scheduler.state.fleet.owners == harness.scheduler.state.occupants == {}


def test_a_repeated_unregister_after_a_restart_is_answered() -> None:
    harness = SchedulerHarness()
    harness.pipeline("a")
    harness.generate("a", "g")
    harness.act()
    harness.send(UnregisterPipeline("u", "a"))
    harness.begin()
    harness.run(4)
    harness.send(UnregisterPipeline("u", "a"))
    assert harness.answers["u"].ok


# nodes


def test_a_node_that_returns_keeps_its_gpu_numbers() -> None:
    harness = SchedulerHarness(2)
    harness.send(JoinNode("n1", "n1", 2))
    harness.send(JoinNode("n2", "n2", 4))
    harness.run(harness.settings.node_grace_s + 1)
    state = harness.scheduler.state.fleet
    assert {name: node.phase for name, node in state.nodes.items()} == {
        "n0": NodePhase.UP,
        "n1": NodePhase.DOWN,
        "n2": NodePhase.DOWN,
    }
    harness.send(JoinNode("n2-again", "n2", 4, ("big",)))
    assert state.nodes["n2"] == GpuNode(name="n2", gpus=(4, 5, 6, 7), labels=("big",))
    harness.send(NodeBeat("n1"))
    assert state.nodes["n1"].phase is NodePhase.UP
    assert harness.scheduler.state.counts["node.returned"] == 1


def test_a_node_that_has_changed_is_refused() -> None:
    harness = SchedulerHarness(2)
    harness.send(JoinNode("again", "n0", 3))
    assert harness.answers["again"].error == "node 'n0' had 2 GPUs and comes back with 3; rename it"
    for number, num_gpus in enumerate((0, -1, 2**62)):
        harness.send(JoinNode(f"none-{number}", "n1", num_gpus))
        assert "use 1 to 1024" in harness.answers[f"none-{number}"].error
    for number, name in enumerate(("", "a b", "a/b", "a\n")):
        harness.send(JoinNode(f"name-{number}", name, 2))
        assert "one word" in harness.answers[f"name-{number}"].error


def test_a_node_that_drains_puts_its_workers_to_sleep() -> None:
    harness = SchedulerHarness(2)
    harness.pipeline("a", generation=(0, 1))
    harness.generate("a", "g")
    harness.act()
    harness.send(DrainNode("d", "n0"))
    harness.act()
    assert not harness.awake("a")
    assert harness.train("a", "t") is TicketState.QUEUED
    harness.send(DrainNode("d2", "nowhere"))
    assert not harness.answers["d2"].ok


def test_a_ticket_and_an_unregister_with_the_same_key_are_both_answered() -> None:
    harness = SchedulerHarness(2)
    harness.pipeline("a", generation=(0, 1))
    harness.train("a", "same")
    harness.send(UnregisterPipeline("same", "a"))
    harness.release("a", "r")
    assert harness.answers["same"].ok
    harness.run(2 * harness.settings.memory_s)
    assert not harness.scheduler.state.reply_targets


def test_undraining_a_node_wakes_waiting_workers() -> None:
    harness = SchedulerHarness(2)
    harness.pipeline("a", generation=(0, 1))
    harness.send(DrainNode("d", "n0"))
    harness.generate("a", "g")
    harness.run(1.0)
    assert not harness.awake("a")
    harness.send(UndrainNode("u", "n0"))
    harness.act()
    assert harness.awake("a") == [0, 1]
    harness.send(UndrainNode("u2", "nowhere"))
    assert "no node 'nowhere'; n0 known" in harness.answers["u2"].error


def phase_of(harness: SchedulerHarness, name: str) -> NodePhase:
    return harness.scheduler.state.fleet.nodes[name].phase


def test_a_drained_node_stays_drained_after_a_silence() -> None:
    harness = SchedulerHarness(0)
    join = JoinNode("n1", "n1", 2)
    harness.send(join)
    harness.send(DrainNode("d", "n1"))
    harness.run(harness.settings.node_grace_s + 1)
    assert phase_of(harness, "n1") is NodePhase.DOWN
    harness.begin()
    harness.send(NodeBeat("n1"))
    assert phase_of(harness, "n1") is NodePhase.DRAINING
    harness.run(harness.settings.memory_s + harness.settings.node_grace_s)
    harness.send(join)
    assert phase_of(harness, "n1") is NodePhase.DRAINING
    harness.send(JoinNode("later", "n1", 2))
    assert phase_of(harness, "n1") is NodePhase.UP


def test_a_node_that_is_down_is_drained_or_used_when_it_returns() -> None:
    harness = SchedulerHarness(0)
    harness.send(JoinNode("n1", "n1", 2))
    for ask, phase in (
        (DrainNode("d", "n1"), NodePhase.DRAINING),
        (UndrainNode("u", "n1"), NodePhase.UP),
    ):
        harness.run(harness.settings.node_grace_s + 1)
        harness.send(ask)
        assert phase_of(harness, "n1") is NodePhase.DOWN
        harness.send(NodeBeat("n1"))
        assert phase_of(harness, "n1") is phase


def test_a_request_for_gpus_of_a_dead_node_waits_for_it() -> None:
    harness = SchedulerHarness(0)
    harness.send(JoinNode("n1", "n1", 2))
    harness.pipeline("a", train=(0,), generation=(0, 1))
    harness.generate("a", "g")
    harness.act()
    harness.coordinators["a"].is_hung = True
    harness.train("a", "t")
    harness.run(harness.settings.node_grace_s + 1)
    assert not harness.of("a").holds
    assert list(harness.scheduler.state.fleet.requests) == ["t"]
    assert {worker.phase for worker in harness.of("a").workers} == {WorkerPhase.LOST}
    harness.coordinators["a"].is_hung = False
    for _ in range(16):
        harness.send(NodeBeat("n1"))
        harness.run(0.5)
    assert harness.state("t") is TicketState.GRANTED


def test_names_are_bounded_in_length_and_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "MAX_NODES", 1)
    harness = SchedulerHarness()  # the harness has added a node
    asks = [
        JoinNode("long", "n" * 129, 1),
        JoinNode("label", "n0", 1, ("x" * 129,)),
        JoinNode("labels", "n0", 1, tuple(f"l{n}" for n in range(65))),
        JoinNode("many", "another", 1),
    ]
    for ask in asks:
        harness.send(ask)
        assert not harness.answers[ask.key].ok
    assert len(harness.scheduler.state.node_records) == 1
