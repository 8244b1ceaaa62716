"""Two real pipelines, each with engines on all four slots and a trainer on two: both train to their
end, no slot ever has two owners, and a killed scheduler does not affect them.
"""

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from rollmesh.core.process import INTERRUPTED, USAGE
from rollmesh.launch.folder import read_pids
from rollmesh.scheduler.planning.state import PipelinePhase
from rollmesh.testing.run_history import RunHistory
from rollmesh.wire.scheduling import GENERATION_CLUSTER, WorkerPhase
from tests.flow.demo import follow, read
from tests.flow.shared_fleet import RUN, TRAINS_ON, SharedFleet, direct_handovers
from tests.flow.test_update import Process
from tests.flow.trained_mesh import model as model  # the fixture
from tests.flow.worker_mesh import look_until

pytestmark = pytest.mark.slow

NUM_STEPS = 5
LIMIT_S = 240.0
EXACT = 1e-3
"""float32 on both sides is within 1e-5."""
FEW: dict[str, Any] = {**RUN["trainer"], "num_steps": 2}
MANY: dict[str, Any] = {**RUN["trainer"], "num_steps": 40}
"""Enough steps that its trainer still works when a test kills it after the second step."""


@pytest.fixture
def fleet(tmp_path: Path, model: Path) -> Iterator[SharedFleet]:
    fleet = SharedFleet(tmp_path, model)
    yield fleet
    fleet.close()


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Wait for the end; return the exit code and the output."""
    out, _ = process.communicate(timeout=LIMIT_S)
    return process.returncode, out


def check_trained(fleet: SharedFleet, name: str, num_steps: int = NUM_STEPS) -> None:
    """Check that the run reached its end and lost nothing."""
    run = fleet.folder / name
    summary = read(run / "summary.json")
    assert (summary["num_steps"], summary["num_lost"]) == (num_steps, 0)
    assert summary["success_untrained"] is not None
    assert RunHistory(run).num_steps_taken == dict.fromkeys(range(num_steps), 1)
    assert [row for row in read_pids(run) if psutil.pid_exists(row.pid)] == []


def check_given_back(fleet: SharedFleet) -> None:
    """Check that soon no pipeline holds or requests anything, and all may request again."""

    def are_at_rest() -> bool:
        return all(
            (view.has_demand, view.holds, view.waits) == (False, {}, ())
            and (view.phase, view.fault) == (PipelinePhase.ADMITTED, "")
            and {worker.phase for worker in view.workers} == {WorkerPhase.ASLEEP}
            for view in fleet.view().pipelines
        )

    look_until(are_at_rest)


def until(fleet: SharedFleet, pipeline: str, step: int) -> None:
    """Wait until that step is done."""
    rows = follow(fleet.folder / pipeline / "metrics.jsonl")
    next(row for row in rows if row["step"] >= step)


def check_slots(fleet: SharedFleet) -> None:
    """Check that each pipeline's trainer used its own two slots, and engines used other slots in
    turn.
    """
    history = fleet.slot_history()
    assert [each for rows in history.values() for each in direct_handovers(rows)] == []
    for pipeline, trains_on in TRAINS_ON.items():
        was_there = {
            (gpu, cluster)
            for gpu, rows in history.items()
            for name, cluster, *_ in rows
            if name == pipeline
        }
        trained = {gpu for gpu, cluster in was_there if cluster == "actor_train"}
        assert trained == {*trains_on}
        assert any(cluster == GENERATION_CLUSTER for _, cluster in was_there)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_two_pipelines_share_four_slots_and_both_train_to_their_end(
    fleet: SharedFleet, num_ranks: int
) -> None:
    """The trainer of one may have a rank on each of its slots."""
    ranked = {"trainer": RUN["trainer"] | {"num_ranks": num_ranks}}
    runs = {pipeline: fleet.begin(pipeline, **ranked) for pipeline in TRAINS_ON}
    for pipeline, process in runs.items():
        code, out = ended(process)
        assert code == 0, out
        check_trained(fleet, pipeline)
    check_given_back(fleet)
    check_slots(fleet)


@pytest.mark.timeout(300)
def test_a_scheduler_killed_during_a_run_does_not_affect_the_pipelines(fleet: SharedFleet) -> None:
    runs = {pipeline: fleet.begin(pipeline) for pipeline in TRAINS_ON}
    before = fleet.view().scheduler
    until(fleet, "math", step=1)
    fleet.kill_scheduler()
    for pipeline, process in runs.items():
        code, out = ended(process)
        assert code == 0, out
        check_trained(fleet, pipeline)
    check_given_back(fleet)
    check_slots(fleet)
    assert fleet.view().scheduler != before


@pytest.mark.timeout(300)
def test_a_stopped_pipeline_frees_its_slots_and_one_whose_trainer_dies_resumes(
    fleet: SharedFleet,
) -> None:
    stopped, resumed = fleet.begin("code"), fleet.begin("math", trainer=MANY)
    until(fleet, "math", step=1)
    pids = {row.role: row.pid for row in read_pids(fleet.folder / "math")}
    os.kill(pids["trainer"], signal.SIGKILL)
    until(fleet, "code", step=0)
    os.kill(stopped.pid, signal.SIGINT)
    assert ended(stopped)[0] in (0, INTERRUPTED), "it may have been done by then"
    code, out = ended(resumed)
    assert code == 0, out
    check_trained(fleet, "math", MANY["num_steps"])
    assert read(fleet.folder / "math" / "summary.json")["num_lives"] == 2
    check_given_back(fleet)


@pytest.mark.timeout(300)
def test_a_killed_launch_is_replaced_by_the_next_of_its_pipeline_without_manual_steps(
    fleet: SharedFleet,
) -> None:
    killed = fleet.begin("math", trainer=FEW)
    until(fleet, "math", step=0)
    before = [row.pid for row in read_pids(fleet.folder / "math")]
    os.kill(killed.pid, signal.SIGKILL)
    following = fleet.begin("math", trainer=FEW)
    code, out = ended(following)
    assert code == 0, out
    assert [pid for pid in before if psutil.pid_exists(pid)] == [killed.pid], "it is not reaped yet"
    check_trained(fleet, "math", FEW["num_steps"])
    check_given_back(fleet)
    assert [each for rows in fleet.slot_history().values() for each in direct_handovers(rows)] == []


@pytest.mark.timeout(300)
def test_one_of_two_simultaneous_runs_of_a_pipeline_is_refused_in_one_line(
    fleet: SharedFleet,
) -> None:
    runs = {name: fleet.begin("math", name, trainer=FEW) for name in ("one", "two")}
    results = {name: ended(process) for name, process in runs.items()}
    refused, trained = sorted(results, key=lambda name: results[name][0] == 0)
    code, out = results[refused]
    assert (code, out.count("\n")) == (USAGE, 1), out
    assert out.startswith("rollmesh: --pipeline math"), out
    assert "another run has that name and" in out
    assert not (fleet.folder / refused).exists()
    assert results[trained][0] == 0, results[trained][1]
    check_trained(fleet, trained, FEW["num_steps"])
    check_given_back(fleet)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", [{"num_ranks": 2}, {"lora_rank": 4, "max_staleness": 0}], ids=str)
def test_ranks_and_adapters_train_on_a_share_as_well(
    fleet: SharedFleet, kind: dict[str, int]
) -> None:
    code, out = ended(fleet.begin("math", trainer={**FEW, **kind}))
    assert code == 0, out
    check_trained(fleet, "math", FEW["num_steps"])
    check_given_back(fleet)
    exactness = read(fleet.folder / "math" / "summary.json")["exactness"]
    assert all(row["max_gap"] < EXACT for row in exactness), exactness


@pytest.fixture
def engines(model: Path) -> Iterator[list[str]]:
    """Addresses of four engines that were not started by the run."""
    begin = (
        "--model-dir",
        str(model),
        "--weight-version",
        "0",
        "--incremental-streaming-output",
        "--skip-tokenizer-init",
    )
    processes = [Process("rollmesh.engine.embedded", *begin) for _ in range(4)]
    yield [process.ready.address for process in processes]
    for process in processes:
        process.end()


@pytest.mark.timeout(300)
def test_engines_that_the_run_did_not_start_sleep_and_outlive_it(
    fleet: SharedFleet, engines: list[str]
) -> None:
    code, out = ended(fleet.begin("math", trainer=FEW, engine={"urls": engines}))
    assert code == 0, out
    check_trained(fleet, "math", FEW["num_steps"])
    check_given_back(fleet)
    infos = [httpx.get(f"{url}/server_info", trust_env=False).json() for url in engines]
    assert {each["memory_occupation"] for each in infos} == {"released"}
