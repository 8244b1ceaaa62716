"""A pipeline is registered where it fits, keeps its place, and is killed before it is forgotten."""

import os
from pathlib import Path

import msgspec
import pytest

from rollmesh.core.errors import AddressError, ConfigError, UserError
from rollmesh.scheduler.admission.asking import Answer, Question
from rollmesh.scheduler.admission.desk import DEAD, LEAVING, Desk, FleetSeen
from rollmesh.scheduler.admission.fleet_file import PipelineTable
from rollmesh.scheduler.planning.state import PipelinePhase
from rollmesh.wire.scheduling import (
    AdmitPipeline,
    CheckKill,
    KillPipeline,
    PipelineSpec,
    RegisterPipeline,
    UnregisterPipeline,
)
from tests.unit.scheduler.admission.claimed_run import claimed_run
from tests.unit.scheduler.admission.fleet import Fleet

US = os.getuid()


def register(fleet: Fleet, name: str, table: PipelineTable, key: str = "k") -> PipelineSpec:
    unplaced = PipelineSpec(pipeline_id=name, clusters={}, generation=())
    answer = Desk(fleet.ask).on(RegisterPipeline(key, unplaced), msgspec.json.encode(table), US)
    assert answer.ok
    spec = msgspec.json.decode(answer.body, type=PipelineSpec)
    assert fleet.state.pipelines[name].spec == spec
    return spec


def test_sizes_are_placed_on_nodes_with_the_labels() -> None:
    fleet = Fleet()
    table = PipelineTable(clusters={"actor_train": 2}, workers=2, tp=2, labels=("l40",), weight=3.0)
    spec = register(fleet, "math", table)
    assert spec.generation == (4, 5, 6, 7)
    assert set(spec.clusters["actor_train"]) < {4, 5, 6, 7}
    assert (spec.tp, spec.weight) == (2, 3.0)


def test_a_map_that_was_written_by_hand_is_kept() -> None:
    table = PipelineTable(clusters={"actor_train": (0, 1)}, generation=(0, 1, 2, 3))
    spec = register(Fleet(), "math", table)
    assert (spec.clusters, spec.generation) == ({"actor_train": (0, 1)}, (0, 1, 2, 3))


def test_a_pipeline_that_is_there_keeps_its_place() -> None:
    fleet, table = Fleet(), PipelineTable(clusters={"actor_train": 2}, workers=4)
    before = register(fleet, "math", table)
    beside = PipelineTable(generation=before.generation)
    for number in range(4):
        register(fleet, f"other-{number}", beside)
    assert register(fleet, "new", table).generation != before.generation
    assert register(fleet, "math", table) == before


@pytest.mark.parametrize(
    ("table", "told"),
    [
        (PipelineTable(clusters={"actor_train": (0, 9)}), "9"),
        (PipelineTable(generation=(3, 4), tp=2), "math"),
        (PipelineTable(workers=5, labels=("h200",)), "math"),
        (PipelineTable(workers=1, labels=("b200",)), "b200"),
    ],
)
def test_what_does_not_fit_is_refused_before_the_scheduler_hears_of_it(
    table: PipelineTable, told: str
) -> None:
    fleet = Fleet()
    with pytest.raises(UserError, match=told) as caught:
        register(fleet, "math", table)
    assert "\n" not in str(caught.value)
    assert not any(isinstance(each, RegisterPipeline) for each in fleet.asked)


def test_a_body_that_is_none_of_ours_is_refused() -> None:
    unplaced = PipelineSpec(pipeline_id="math", clusters={}, generation=())
    with pytest.raises(ConfigError, match="admission desk"):
        Desk(Fleet().ask).on(RegisterPipeline("k", unplaced), b"{'", US)


def test_the_other_questions_are_the_schedulers() -> None:
    fleet = Fleet()
    desk = Desk(fleet.ask)
    refused = desk.on(AdmitPipeline("a", "math"), b"", US)
    assert (refused.ok, refused.error) == (False, "no pipeline 'math'")
    register(fleet, "math", PipelineTable(workers=2))
    assert desk.on(AdmitPipeline("b", "math"), b"", US).ok
    assert fleet.state.pipelines["math"].phase is PipelinePhase.ADMITTED
    assert desk.on(UnregisterPipeline("c", "math"), b"", US).ok
    assert not fleet.state.pipelines


def test_gpus_are_called_free_only_when_the_processes_have_ended(tmp_path: Path) -> None:
    fleet, seen = Fleet(), list[tuple[str, int | None]]()
    register(fleet, "math", PipelineTable(workers=2))
    with claimed_run(tmp_path) as run:
        fleet.runs["math"] = run.claim

        def ask(question: Question, patience_s: float) -> Answer:
            seen.append((type(question).__name__, run.launch.poll()))
            return fleet.ask(question, patience_s)

        answer = Desk(ask).on(KillPipeline("k", "math"), b"", US)
    assert (answer.ok, msgspec.json.decode(answer.body)) == (True, 1)
    assert seen == [("ReadScheduler", None), ("CheckKill", None), ("KillPipeline", -9)]
    assert fleet.asked[-1] == KillPipeline("k", "math", run.claimed.run_id)


def test_nothing_is_ended_without_the_schedulers_agreement(tmp_path: Path) -> None:
    fleet = Fleet()
    register(fleet, "math", PipelineTable(workers=2))
    with claimed_run(tmp_path) as run:
        fleet.runs["math"] = run.claim

        def ask(question: Question, patience_s: float) -> Answer:
            is_check = isinstance(question, CheckKill)
            return Answer(ok=False, error="no") if is_check else fleet.ask(question, patience_s)

        assert Desk(ask).on(KillPipeline("k", "math"), b"", US) == Answer(ok=False, error="no")
        assert run.launch.poll() is None
    assert not any(isinstance(each, KillPipeline) for each in fleet.asked)


def test_processes_that_may_not_be_ended_keep_their_gpus(tmp_path: Path) -> None:
    fleet = Fleet()
    register(fleet, "math", PipelineTable(workers=2))
    with claimed_run(tmp_path) as run:
        fleet.runs["math"] = run.claim
        with pytest.raises(UserError, match="user 65534 may not end it"):
            Desk(fleet.ask).on(KillPipeline("k", "math"), b"", 65534)
        assert run.launch.poll() is None
    assert not any(isinstance(each, KillPipeline) for each in fleet.asked)


def test_without_a_claimed_run_only_a_user_who_knows_that_all_have_ended_frees_the_gpus() -> None:
    fleet = Fleet()
    register(fleet, "math", PipelineTable(workers=2))
    with pytest.raises(UserError, match=r"no run has the name math, .* then say --dead"):
        Desk(fleet.ask).on(KillPipeline("k", "math"), b"", US)
    assert Desk(fleet.ask).on(KillPipeline("k", "math"), DEAD, US).ok
    assert not fleet.state.pipelines


def test_the_desk_reads_what_the_service_says_of_itself() -> None:
    fleet = Fleet()
    register(fleet, "math", PipelineTable(clusters={"actor_train": 1}, workers=2))
    answer = fleet.ask(fleet.asked[0])
    state = msgspec.json.decode(answer.body, type=FleetSeen).state()
    assert [node.gpus for node in state.nodes.values()] == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert state.pipelines["math"].spec == fleet.state.pipelines["math"].spec


def test_who_leaves_slowly_is_said_to_leave_and_who_does_not_is_a_fault() -> None:
    fleet = Fleet()
    register(fleet, "math", PipelineTable(workers=2))

    def ask(question: Question, patience_s: float) -> Answer:
        if isinstance(question, UnregisterPipeline):
            raise AddressError("nobody answers")
        return fleet.ask(question, patience_s)

    with pytest.raises(AddressError, match="nobody answers"):
        Desk(ask).on(UnregisterPipeline("k", "math"), b"", US)
    fleet.state.pipelines["math"].phase = PipelinePhase.LEAVING
    assert Desk(ask).on(UnregisterPipeline("k", "math"), b"", US) == Answer(ok=True, body=LEAVING)
