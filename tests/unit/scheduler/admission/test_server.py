"""The admission server places, registers, kills and removes pipelines, and keeps no state."""

import os
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from rollmesh.core.errors import AddressError, ConfigError, UserError
from rollmesh.core.secret_files import hash_token
from rollmesh.scheduler.admission.fleet_file import PipelineTable
from rollmesh.scheduler.admission.server import (
    DEAD,
    LEAVING,
    AdmissionServer,
    AskScheduler,
    FleetSnapshot,
    Registered,
    TokenFiles,
    kill_run,
)
from rollmesh.scheduler.admission.transport import AdmissionAnswer, SchedulerQuestion
from rollmesh.scheduler.planning.state import PipelinePhase
from rollmesh.wire.scheduling import (
    AdmitPipeline,
    CheckKill,
    KillPipeline,
    PipelineSpec,
    ReadScheduler,
    RegisterPipeline,
    UnregisterPipeline,
)
from tests.unit.scheduler.admission.claimed_run import ClaimedRun, claimed_run
from tests.unit.scheduler.admission.fleet import Fleet

US = os.getuid()


@pytest.fixture(autouse=True)
def journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the scheduler's journal, which is the working directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def server(ask: AskScheduler) -> AdmissionServer:
    return AdmissionServer(ask, TokenFiles(Path()))


def register(fleet: Fleet, name: str, table: PipelineTable, key: str = "k") -> PipelineSpec:
    unplaced = PipelineSpec(pipeline_id=name, clusters={}, generation=())
    answer = server(fleet.ask).on(RegisterPipeline(key, unplaced), msgspec.json.encode(table), US)
    assert answer.ok
    spec = msgspec.json.decode(answer.body, type=Registered).spec
    assert fleet.state.pipelines[name].spec == spec
    return spec


def test_sizes_are_placed_on_nodes_with_the_labels() -> None:
    fleet = Fleet()
    table = PipelineTable(clusters={"actor_train": 2}, workers=2, tp=2, labels=("l40",), weight=3.0)
    spec = register(fleet, "math", table)
    assert spec.generation == (4, 5, 6, 7)
    assert set(spec.clusters["actor_train"]) < {4, 5, 6, 7}
    assert (spec.tp, spec.weight) == (2, 3.0)


def test_a_device_map_written_by_hand_is_kept() -> None:
    table = PipelineTable(clusters={"actor_train": (0, 1)}, generation=(0, 1, 2, 3))
    spec = register(Fleet(), "math", table)
    assert (spec.clusters, spec.generation) == ({"actor_train": (0, 1)}, (0, 1, 2, 3))


def test_a_registered_pipeline_keeps_its_place() -> None:
    fleet, table = Fleet(), PipelineTable(clusters={"actor_train": 2}, workers=4)
    before = register(fleet, "math", table)
    beside = PipelineTable(generation=before.generation)
    for number in range(4):
        register(fleet, f"other-{number}", beside)
    assert register(fleet, "new", table).generation != before.generation
    assert register(fleet, "math", table) == before


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (PipelineTable(clusters={"actor_train": (0, 9)}), "9"),
        (PipelineTable(generation=(3, 4), tp=2), "math"),
        (PipelineTable(workers=5, labels=("h200",)), "math"),
        (PipelineTable(workers=1, labels=("b200",)), "b200"),
    ],
)
def test_requests_that_do_not_fit_are_refused_before_the_scheduler_sees_them(
    table: PipelineTable, message: str
) -> None:
    fleet = Fleet()
    with pytest.raises(UserError, match=message) as caught:
        register(fleet, "math", table)
    assert "\n" not in str(caught.value)
    assert not any(isinstance(each, RegisterPipeline) for each in fleet.asked)


def test_a_malformed_body_is_refused() -> None:
    unplaced = PipelineSpec(pipeline_id="math", clusters={}, generation=())
    with pytest.raises(ConfigError, match="malformed admission"):
        server(Fleet().ask).on(RegisterPipeline("k", unplaced), b"{'", US)


def test_other_questions_are_forwarded_to_the_scheduler() -> None:
    fleet = Fleet()
    admission = server(fleet.ask)
    refused = admission.on(AdmitPipeline("a", "math"), b"", US)
    assert (refused.ok, refused.error) == (False, "no pipeline 'math'")
    register(fleet, "math", PipelineTable(workers=2))
    assert admission.on(AdmitPipeline("b", "math"), b"", US).ok
    assert fleet.state.pipelines["math"].phase is PipelinePhase.ADMITTED
    assert admission.on(UnregisterPipeline("c", "math"), b"", US).ok
    assert not fleet.state.pipelines


def test_gpus_are_reported_free_only_when_the_processes_have_ended(tmp_path: Path) -> None:
    fleet, seen = Fleet(), list[tuple[str, int | None]]()
    register(fleet, "math", PipelineTable(workers=2))
    with claimed_run(tmp_path) as run:
        fleet.runs["math"] = run.claim

        def ask(question: SchedulerQuestion, patience_s: float) -> AdmissionAnswer:
            seen.append((type(question).__name__, run.launch.poll()))
            return fleet.ask(question, patience_s)

        answer = server(ask).on(KillPipeline("k", "math"), b"", US)
    assert (answer.ok, msgspec.json.decode(answer.body)) == (True, 1)
    assert seen == [("ReadScheduler", None), ("CheckKill", None), ("KillPipeline", -9)]
    killed = fleet.asked[-1]
    assert isinstance(killed, KillPipeline)
    assert (killed.key, killed.run_id) == ("k", run.claimed.run_id)


def test_no_process_is_killed_without_the_schedulers_agreement(tmp_path: Path) -> None:
    fleet = Fleet()
    register(fleet, "math", PipelineTable(workers=2))
    with claimed_run(tmp_path) as run:
        fleet.runs["math"] = run.claim

        def ask(question: SchedulerQuestion, patience_s: float) -> AdmissionAnswer:
            is_check = isinstance(question, CheckKill)
            return (
                AdmissionAnswer(ok=False, error="no")
                if is_check
                else fleet.ask(question, patience_s)
            )

        assert server(ask).on(KillPipeline("k", "math"), b"", US) == AdmissionAnswer(
            ok=False, error="no"
        )
        assert run.launch.poll() is None
    assert not any(isinstance(each, KillPipeline) for each in fleet.asked)


def test_processes_that_may_not_be_killed_keep_their_gpus(tmp_path: Path) -> None:
    fleet = Fleet()
    register(fleet, "math", PipelineTable(workers=2))
    with claimed_run(tmp_path) as run:
        fleet.runs["math"] = run.claim
        with pytest.raises(UserError, match="user 65534 may not end it"):
            server(fleet.ask).on(KillPipeline("k", "math"), b"", 65534)
        assert run.launch.poll() is None
    assert not any(isinstance(each, KillPipeline) for each in fleet.asked)


def test_without_a_claimed_run_only_a_users_confirmation_frees_the_gpus() -> None:
    fleet = Fleet()
    register(fleet, "math", PipelineTable(workers=2))
    with pytest.raises(UserError, match=r"no run has the name math, .* then pass --dead"):
        server(fleet.ask).on(KillPipeline("k", "math"), b"", US)
    assert server(fleet.ask).on(KillPipeline("k", "math"), DEAD, US).ok
    assert not fleet.state.pipelines


def test_admission_reads_the_fleet_from_the_services_explanation() -> None:
    fleet = Fleet()
    register(fleet, "math", PipelineTable(clusters={"actor_train": 1}, workers=2))
    answer = fleet.ask(fleet.asked[0])
    state = msgspec.json.decode(answer.body, type=FleetSnapshot).state()
    assert [node.gpus for node in state.nodes.values()] == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert state.pipelines["math"].spec == fleet.state.pipelines["math"].spec


def test_a_slow_leave_is_reported_and_a_failed_one_is_an_error() -> None:
    fleet = Fleet()
    register(fleet, "math", PipelineTable(workers=2))

    def ask(question: SchedulerQuestion, patience_s: float) -> AdmissionAnswer:
        if isinstance(question, UnregisterPipeline):
            raise AddressError("no answer")
        return fleet.ask(question, patience_s)

    with pytest.raises(AddressError, match="no answer"):
        server(ask).on(UnregisterPipeline("k", "math"), b"", US)
    fleet.state.pipelines["math"].phase = PipelinePhase.LEAVING
    assert server(ask).on(UnregisterPipeline("k", "math"), b"", US) == AdmissionAnswer(
        ok=True, body=LEAVING
    )


def test_a_registered_pipeline_has_a_token_of_its_own_that_only_admissions_user_can_read(
    journal: Path,
) -> None:
    fleet = Fleet()
    for name in ("math", "code", "math"):
        register(fleet, name, PipelineTable(workers=2))
    asked = [each for each in fleet.asked if isinstance(each, RegisterPipeline)]
    math, code, again = [each.token_hash for each in asked]
    assert math == again != code
    file = journal / "tokens" / "math"
    assert hash_token(file.read_text().strip()) == math
    assert file.read_text().strip() not in repr(fleet.asked)
    modes = {each: each.stat().st_mode & 0o777 for each in (file, file.parent)}
    assert list(modes.values()) == [0o600, 0o700]


def test_requests_of_admission_carry_the_operators_token(journal: Path) -> None:
    fleet = Fleet()
    register(fleet, "math", PipelineTable(workers=2))
    server(fleet.ask).on(AdmitPipeline("a", "math"), b"", US)
    token = (journal / "admission.token").read_text().strip()
    signed = [each for each in fleet.asked if not isinstance(each, ReadScheduler)]
    assert [getattr(each, "token", "") for each in signed] == [token, token]


@pytest.mark.parametrize("name", ["../math", "a/b", "", " "])
def test_an_invalid_name_creates_no_file(name: str, journal: Path) -> None:
    with pytest.raises(ConfigError, match="a name is one word"):
        register(Fleet(), name, PipelineTable(workers=2))
    assert not (journal / "tokens").exists()


@pytest.fixture
def run(tmp_path: Path) -> Iterator[ClaimedRun]:
    with claimed_run(tmp_path) as run:
        yield run


def rewrite(run: ClaimedRun, **fields: object) -> None:
    message = msgspec.json.decode(run.record.read_bytes()) | fields
    run.record.write_bytes(msgspec.json.encode(message))


def test_the_launch_and_all_processes_with_its_mark_end_and_no_other(run: ClaimedRun) -> None:
    role, agent = run.start(f"{run.mark}/router.1"), run.start(f"{run.mark}/worker.2/agent.1")
    neighbour, other = run.start(f"{run.mark}0/router.1"), run.start("")
    assert kill_run(run.claim, "math", US) == 3
    assert [each.wait() for each in (run.launch, role, agent)] == [-9] * 3
    assert (neighbour.poll(), other.poll()) == (None, None)


def test_a_pid_that_was_reused_is_not_killed(run: ClaimedRun) -> None:
    rewrite(run, life="1")
    role = run.start(f"{run.mark}/router.1")
    assert kill_run(run.claim, "math", US) == 1
    assert role.wait() == -9
    assert run.launch.poll() is None


def test_killing_a_run_that_has_ended_is_no_error(run: ClaimedRun) -> None:
    run.launch.kill()
    run.launch.wait()
    assert kill_run(run.claim, "math", US) == 0


@pytest.mark.parametrize("pid", [-1, 0, 1, 2**64, "7"])
def test_a_record_with_a_pid_of_no_launch_is_refused_in_one_line(
    pid: object, run: ClaimedRun
) -> None:
    rewrite(run, pid=pid)
    with pytest.raises(ConfigError, match="is not one of a claimed run; end it by hand"):
        kill_run(run.claim, "math", US)
    assert run.launch.poll() is None


def test_the_record_of_another_pipelines_run_is_refused(run: ClaimedRun) -> None:
    with pytest.raises(ConfigError, match="is that of another run; end it by hand"):
        kill_run(run.claim, "code", US)
    assert run.launch.poll() is None


def test_another_users_run_is_not_killed(run: ClaimedRun) -> None:
    with pytest.raises(UserError, match=rf"is of user {US}: user 65534 may not end it"):
        kill_run(run.claim, "math", 65534)
    assert run.launch.poll() is None


def test_admission_does_not_kill_itself(run: ClaimedRun) -> None:
    rewrite(run, pid=os.getpid())
    with pytest.raises(UserError, match="not of a run of this machine"):
        kill_run(run.claim, "math", US)


def test_processes_of_another_machine_are_not_killed(run: ClaimedRun) -> None:
    elsewhere = msgspec.structs.replace(run.claim, host="another-machine", place="x/1/0")
    with pytest.raises(UserError, match=r"is on another-machine.*--dead"):
        kill_run(elsewhere, "math", US)
    assert run.launch.poll() is None
