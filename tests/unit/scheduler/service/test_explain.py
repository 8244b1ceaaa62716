"""A waiting pipeline sees the GPUs it needs, their owners, and what ends the wait."""

import msgspec
import pytest

from rollmesh.scheduler.planning.plan import Expand, Grant, Shrink, apply
from rollmesh.scheduler.planning.state import (
    ClusterRequest,
    Demand,
    FleetState,
    GpuNode,
    NodePhase,
    PipelinePhase,
)
from rollmesh.scheduler.service.explain import (
    ExplainContext,
    FleetExplanation,
    OpInProgress,
    PipelineView,
    explain_fleet,
)
from rollmesh.wire.scheduling import (
    GENERATION_CLUSTER,
    ClearProgress,
    DrainNode,
    GpuPriority,
    JoinNode,
    KillPipeline,
    NodeBeat,
    PipelineSpec,
    TicketState,
    UndrainNode,
    UnregisterPipeline,
    WorkerPhase,
)
from tests.unit.scheduler.service.harness import QUICK, SchedulerHarness


@pytest.fixture
def state() -> FleetState:
    """Two pipelines on four GPUs, both generate on all."""
    state = FleetState(now_s=100.0)
    state.add_node(GpuNode(name="a", gpus=(0, 1, 2, 3)))
    for name, train in (("math", (0, 1)), ("code", (2, 3))):
        spec = PipelineSpec(
            pipeline_id=name, clusters={"actor_train": train}, generation=(0, 1, 2, 3)
        )
        state.add_pipeline(spec).phase = PipelinePhase.ADMITTED
    return state


def ask(
    state: FleetState,
    name: str,
    seq: int,
    cluster: str = "actor_train",
    priority: GpuPriority = GpuPriority.ACTOR_TRAINING,
) -> str:
    key = f"{name}-{seq}"
    state.requests[key] = ClusterRequest(
        key=key,
        pipeline_id=name,
        cluster=cluster,
        priority=priority,
        seq=seq,
        asked_s=state.now_s,
    )
    return key


def wake(state: FleetState, name: str, *ranks: int) -> None:
    for rank in ranks:
        apply(state, Expand(name, rank))
        state.pipelines[name].workers[rank].phase = WorkerPhase.AWAKE


def view_of(state: FleetState, name: str, known: ExplainContext | None = None) -> PipelineView:
    (only,) = explain_fleet(state, known or ExplainContext(), name).pipelines
    return only


def test_each_missing_gpu_names_its_holder_and_since_when(state: FleetState) -> None:
    wake(state, "code", 0)
    state.now_s = 104.0
    ask(state, "math", 1)
    state.now_s = 107.5
    math = view_of(state, "math", ExplainContext(reserve_after_s=30.0))
    (wait,) = math.waits
    assert (wait.cluster, wait.priority, wait.for_s) == ("actor_train", "actor_training", 3.5)
    assert wait.missing == {0: "code generation worker 0, awake for 7.5 s"}
    assert wait.until == "their owners release them; after 26.5 s more no request may bypass it"
    assert "  GPU 0: code generation worker 0, awake for 7.5 s" in math.lines
    assert view_of(state, "code").lines[-1] == "waits for nothing"


def test_a_fixed_holder_is_named_by_its_cluster(state: FleetState) -> None:
    spec = PipelineSpec(pipeline_id="third", clusters={"critic": (1, 2)}, generation=())
    state.add_pipeline(spec).phase = PipelinePhase.ADMITTED
    apply(state, Grant(ask(state, "third", 1, "critic")))
    state.now_s = 109.0
    ask(state, "math", 2)
    assert view_of(state, "math").waits[0].missing == {1: "third critic, for 9.0 s"}
    assert "has critic on GPUs 1 2, 9.0 s" in view_of(state, "third").lines


def test_earlier_requests_are_named_only_where_they_want_the_same_gpus(state: FleetState) -> None:
    spec = PipelineSpec(pipeline_id="third", clusters={"critic": (1, 2)}, generation=())
    state.add_pipeline(spec).phase = PipelinePhase.ADMITTED
    ask(state, "third", 1, "critic")
    ask(state, "code", 2)
    ask(state, "math", 3)
    until = view_of(state, "math", ExplainContext(reserve_after_s=0.0)).waits[0].until
    assert "third critic first; no new request may bypass it" in until
    assert "code" not in until


def test_the_queue_is_shown_in_the_planners_order(state: FleetState) -> None:
    spec = PipelineSpec(pipeline_id="third", clusters={"reference": (0, 1)}, generation=())
    state.add_pipeline(spec).phase = PipelinePhase.ADMITTED
    ask(state, "third", 1, "reference", GpuPriority.REF_LOG_PROBS)
    state.now_s = 110.0
    ask(state, "math", 2)
    patient, short = ExplainContext(reserve_after_s=60.0), ExplainContext(reserve_after_s=5.0)
    assert "math actor_train first" in view_of(state, "third", patient).waits[0].until
    assert " first" not in view_of(state, "math", patient).waits[0].until
    assert "third reference first" in view_of(state, "math", short).waits[0].until


def test_a_promise_waits_for_engines_that_go_to_sleep_there(state: FleetState) -> None:
    wake(state, "code", 0, 2)
    key = ask(state, "math", 1)
    apply(state, Shrink("code", 0, key))
    apply(state, Grant(key))
    in_progress = (
        OpInProgress(pipeline_id="math", cluster="actor_train", stage="planned", since_s=100.0),
        OpInProgress(
            pipeline_id="code",
            cluster=GENERATION_CLUSTER,
            rank=0,
            stage="sent",
            since_s=100.0,
            until_s=160.0,
        ),
    )
    state.now_s = 101.0
    math = view_of(state, "math", ExplainContext(in_progress=in_progress))
    (wait,) = math.waits
    assert wait.until == "they are clear: it is promised them (planned)"
    assert wait.missing == {
        0: "code generation worker 0 goes to sleep (sent 1.0 s ago, at most 59.0 s more)"
    }
    assert not any(line.startswith("has ") for line in math.lines)
    assert any(line.startswith("has actor_train") for line in view_of(state, "math").lines)


def test_generation_that_waits_shows_its_share_and_its_next_turn(
    state: FleetState,
) -> None:
    wake(state, "code", 0, 1, 2, 3)
    math = state.pipelines["math"]
    math.demand = Demand(key="k", estimate=64, opened_s=100.0)
    math.waiting_s, math.credit_gpu_s = 100.0, 12.0
    state.now_s = 102.0
    view = view_of(state, "math", ExplainContext(again_s=105.0))
    (wait,) = view.waits
    assert wait.cluster == GENERATION_CLUSTER
    assert wait.until.endswith("planned again within 3.0 s")
    assert len(wait.missing) == 4
    assert "generates 64 rollouts more on 0 of 4 workers, owed 12.0 GPU seconds" in view.lines


@pytest.mark.parametrize(
    ("phase", "until"),
    [
        (PipelinePhase.REGISTERED, "it is admitted: rollmesh scheduler admit"),
        (PipelinePhase.QUARANTINED, "its coordinator reports all workers again"),
        (PipelinePhase.LEAVING, "never: the pipeline is leaving"),
    ],
)
def test_a_pipeline_that_gets_nothing_is_explained(
    state: FleetState, phase: PipelinePhase, until: str
) -> None:
    ask(state, "math", 1)
    state.pipelines["math"].phase = phase
    view = view_of(state, "math", ExplainContext(faults={"math": "no answer to a resize for 60 s"}))
    assert view.waits[0].until == until
    assert view.lines[0] == f"math: {phase}: no answer to a resize for 60 s"


def test_unavailable_gpus_show_the_reason(state: FleetState) -> None:
    wake(state, "code", 0)
    state.pipelines["code"].workers[0].phase = WorkerPhase.LOST
    state.nodes["a"].phase = NodePhase.DRAINING
    ask(state, "math", 1)
    missing = view_of(state, "math").waits[0].missing
    assert missing[0].endswith(", fenced until its coordinator reports; its node a is draining")
    assert missing[1] == "its node a is draining"


def test_the_whole_fleet_is_explained_and_an_unknown_name_is_refused(state: FleetState) -> None:
    wake(state, "code", 3)
    explanation = explain_fleet(
        state, ExplainContext(policy="fair", scheduler="i1", problems=("a plan failed",))
    )
    assert [each.pipeline_id for each in explanation.pipelines] == ["math", "code"]
    assert (explanation.num_free, explanation.policy, explanation.troubles) == (
        3,
        "fair",
        ("a plan failed",),
    )
    assert (
        explain_fleet(state, ExplainContext(), "maths").error
        == "no pipeline 'maths'; math, code known"
    )


def test_a_view_survives_json_unchanged(state: FleetState) -> None:
    ask(state, "math", 1)
    explanation = explain_fleet(state, ExplainContext())
    assert (
        msgspec.json.decode(msgspec.json.encode(explanation), type=FleetExplanation) == explanation
    )


# a whole scheduler


def lines(harness: SchedulerHarness, name: str) -> list[str]:
    return list(
        view_of(harness.scheduler.state.fleet, name, harness.scheduler.explain_context()).lines
    )


def test_an_idle_pipeline_waits_for_nothing() -> None:
    harness = SchedulerHarness(2)
    harness.pipeline("a", generation=(0, 1))
    assert lines(harness, "a") == [
        "a: admitted",
        "wants no generation; 0 of 2 workers awake",
        "waits for nothing",
    ]
    harness.coordinators["a"].is_silent = True
    harness.run(5.0)
    assert lines(harness, "a")[1] == "no run uses it: its coordinator is not connected"


def test_engines_that_have_not_reported_are_explained() -> None:
    harness = SchedulerHarness(2)
    harness.pipeline("a", generation=(0, 1)).is_silent = True
    harness.begin()
    harness.generate("a", "g")
    harness.run(harness.settings.settle_s + 1.0)
    text = lines(harness, "a")
    assert text[1] == "no run uses it: its coordinator is not connected"
    assert any(line.startswith("  until one of workers 0 1 has woken (planned") for line in text)
    assert not any("the next plan decides" in line for line in text), "a plan was made"
    harness.run(harness.settings.coordinator_grace_s)
    text = lines(harness, "a")
    assert text[0].startswith("a: quarantined: its coordinator is silent for ")
    assert any(
        line.startswith("  until its coordinator reports all workers again") for line in text
    )


def test_a_wake_waits_for_engines_that_go_to_sleep_there() -> None:
    harness = SchedulerHarness(2)
    harness.pipeline("b", generation=(0, 1))
    harness.generate("b", "g")
    harness.act()
    assert lines(harness, "b")[1] == (
        "generates 16 rollouts more on 2 of 2 workers (ranks 0 1), owed 0.0 GPU seconds"
    )
    harness.coordinators["b"].is_hung = True
    harness.pipeline("a", generation=(0, 1))
    harness.generate("a", "g2", target=0)
    harness.run(QUICK.hold_s + 5.0)
    text = lines(harness, "a")
    limit = "at most 17.0 s more"
    assert text[1].startswith("generates an unknown number of rollouts more on 0 of 2 workers; ")
    assert "waits for actor_infer (generation) since 5.0 s" in text
    assert any(line.startswith("  until one of worker 0 has woken (planned") for line in text)
    gpu = "  GPU 0: b generation worker 0 goes to sleep (sent 5.0 s ago, " + limit + ")"
    assert gpu in text
    assert f"; 0 goes to sleep (sent 5.0 s ago, {limit})" in lines(harness, "b")[1]
    harness.coordinators["b"].is_hung = False
    harness.run(1.0)
    assert "waits for nothing" in lines(harness, "a")


def test_a_full_quota_is_explained() -> None:
    harness = SchedulerHarness(4)
    harness.pipeline("a", max_gpus=2)
    harness.generate("a", "g")
    harness.act()
    text = lines(harness, "a")
    assert text[1].startswith("generates 16 rollouts more on 2 of 4 workers (ranks ")
    assert text[1].endswith("; no more than max_gpus = 2")
    assert text[-1] == "waits for nothing"


def test_a_quarantine_without_a_request_shows_its_end() -> None:
    harness = SchedulerHarness(2)
    coordinator = harness.pipeline("a", generation=(0, 1))
    coordinator.move(0, WorkerPhase.LOST)
    harness.beat()
    text = lines(harness, "a")
    assert text[0] == "a: quarantined: worker 0 is lost: unknown reason"
    assert text[-1] == (
        "gets no GPU until its coordinator reports all workers again; in 1.0 s or later"
    )
    coordinator.move(0, WorkerPhase.ASLEEP)
    harness.run(3.0)
    assert lines(harness, "a")[0] == "a: admitted"


def test_a_leaving_pipeline_shows_what_its_trainer_still_holds() -> None:
    harness = SchedulerHarness(2)
    harness.pipeline("a", generation=(0, 1))
    harness.train("a", "t")
    harness.send(UnregisterPipeline("u", "a"))
    last_line = "is removed when its workers are asleep, and actor_train is released"
    assert lines(harness, "a")[-1] == last_line


def test_a_registered_or_leaving_pipeline_shows_what_it_waits_for() -> None:
    harness = SchedulerHarness(2)
    harness.pipeline("a", generation=(0, 1))
    harness.generate("a", "g")
    harness.act()
    harness.coordinators["a"].is_hung = True
    harness.send(UnregisterPipeline("u", "a"))
    assert lines(harness, "a")[-1] == "is removed when its workers are asleep"
    harness.pipeline("b", generation=(0, 1))
    harness.send(KillPipeline("k", "b"))
    assert lines(harness, "b")[-1] == ("gets no GPU until it is admitted: rollmesh scheduler admit")


def test_generation_that_is_given_up_is_shown_until_all_sleep() -> None:
    harness = SchedulerHarness(2)
    harness.pipeline("a", generation=(0, 1))
    harness.generate("a", "g")
    harness.act()
    harness.coordinators["a"].is_hung = True
    harness.release("a", "r", GENERATION_CLUSTER)
    assert lines(harness, "a")[1].startswith(
        "releases generation; 0 of 2 workers are still awake; 0"
    )
    harness.coordinators["a"].is_hung = False
    harness.run(1.0)
    assert lines(harness, "a")[1] == "wants no generation; 0 of 2 workers awake"


def test_the_next_expected_request_is_shown_for_a_known_demand_history() -> None:
    harness = SchedulerHarness(2)
    harness.pipeline("a", generation=(0, 1))
    for step, when in ((0, ""), (1, ", and is expected to in 60.0 s")):
        harness.generate("a", f"g{step}", step=step)
        harness.act()
        harness.send(ClearProgress("a", "train", step))
        assert lines(harness, "a")[1].startswith(f"wants no generation{when}; ")
        harness.run(60.0)


def test_a_draining_or_down_node_is_the_reason_to_wait() -> None:
    harness = SchedulerHarness(0)
    harness.send(JoinNode("j", "n1", 2))
    harness.pipeline("a", generation=(0, 1))
    harness.send(DrainNode("d", "n1"))
    harness.train("a", "t")
    harness.generate("a", "g")
    undo = "  until node n1 is used again (rollmesh scheduler drain n1 --undo)"
    assert sum(line.startswith(undo) for line in lines(harness, "a")) == 2
    assert lines(harness, "a").count("  GPU 0: its node n1 is draining") == 2
    harness.run(harness.settings.node_grace_s + 1)
    text = lines(harness, "a")
    assert sum(line.startswith("  until node n1 is up again") for line in text) == 2
    harness.send(NodeBeat("n1"))
    harness.send(UndrainNode("u", "n1"))
    harness.act()
    assert not any("its node" in line for line in lines(harness, "a"))
    assert harness.state("t") is TicketState.GRANTED


def test_a_cluster_that_waited_long_is_not_bypassed() -> None:
    harness = SchedulerHarness(2)
    harness.pipeline("b", train=(0, 1), generation=())
    harness.train("b", "t")
    harness.act()
    harness.pipeline("a", train=(0,), generation=())
    harness.train("a", "t2")
    assert lines(harness, "a")[2:] == [
        "waits for actor_train (actor_training) since 0.0 s",
        "  until their owners release them; after 8.0 s more no request may bypass it",
        "  GPU 0: b actor_train, for 0.0 s",
    ]
    harness.run(9.0)
    assert "  until their owners release them; no new request may bypass it" in lines(harness, "a")
    harness.release("b", "r")
    harness.act()
    assert lines(harness, "a") == [
        "a: admitted",
        "has actor_train on GPU 0, 0.0 s",
        "wants no generation; 0 of 0 workers awake",
        "waits for nothing",
    ]
