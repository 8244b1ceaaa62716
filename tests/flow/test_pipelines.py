"""Two real pipelines, each with engines on all four slots and a trainer on two: both train to their
end, no slot ever has two owners, and a scheduler that is killed meanwhile costs them nothing.
"""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from rollmesh.envs.guess import GuessEnv
from rollmesh.launch.folder import read_pids
from rollmesh.trainer.models.tiny import TinyShape, write_tiny_model
from rollmesh.trainer.models.warmstart import texts_of
from rollmesh.wire.scheduling import GENERATION_CLUSTER, WorkerPhase
from tests.flow.demo import follow, read
from tests.flow.shared_fleet import TRAINS_ON, SharedFleet, handed_over
from tests.flow.trained_mesh import Story

NUM_STEPS = 5
LIMIT_S = 240.0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny one with random weights."""
    folder = tmp_path_factory.mktemp("tiny") / "model"
    write_tiny_model(folder, texts_of(GuessEnv()), TinyShape(), seed=0)
    return folder


@pytest.fixture
def fleet(tmp_path: Path, model: Path) -> Iterator[SharedFleet]:
    fleet = SharedFleet(tmp_path, model)
    yield fleet
    fleet.close()


def check_ended(fleet: SharedFleet, runs: dict[str, subprocess.Popen[str]]) -> None:
    """Both came to their end, with nothing lost and nothing left."""
    for pipeline, process in runs.items():
        out, _ = process.communicate(timeout=LIMIT_S)
        assert process.returncode == 0, out
        run = fleet.folder / pipeline
        summary = read(run / "summary.json")
        assert (summary["num_steps"], summary["num_lost"]) == (NUM_STEPS, 0)
        assert summary["success_untrained"] is not None
        assert Story(run).num_steps_taken == dict.fromkeys(range(NUM_STEPS), 1)
        assert [row for row in read_pids(run) if psutil.pid_exists(row.pid)] == []
    for view in fleet.view().pipelines:
        assert (view.has_demand, view.holds, view.waits) == (False, {}, ())
        assert {worker.phase for worker in view.workers} == {WorkerPhase.ASLEEP}


def check_slots(fleet: SharedFleet) -> None:
    """Each had its trainer on its own two, and engines on others, one after the other."""
    stood = fleet.stood()
    assert [each for rows in stood.values() for each in handed_over(rows)] == []
    for pipeline, trains_on in TRAINS_ON.items():
        was_there = {
            (gpu, cluster)
            for gpu, rows in stood.items()
            for name, cluster, *_ in rows
            if name == pipeline
        }
        trained = {gpu for gpu, cluster in was_there if cluster == "actor_train"}
        assert trained == {*trains_on}
        assert any(cluster == GENERATION_CLUSTER for _, cluster in was_there)


@pytest.mark.timeout(300)
def test_two_pipelines_share_four_slots_and_both_train_to_their_end(fleet: SharedFleet) -> None:
    check_ended(fleet, {pipeline: fleet.begin(pipeline) for pipeline in TRAINS_ON})
    check_slots(fleet)


@pytest.mark.timeout(300)
def test_a_scheduler_that_is_killed_in_mid_run_costs_them_nothing(fleet: SharedFleet) -> None:
    runs = {pipeline: fleet.begin(pipeline) for pipeline in TRAINS_ON}
    before = fleet.view().scheduler
    next(row for row in follow(fleet.folder / "math" / "metrics.jsonl") if row["step"] >= 1)
    fleet.kill_scheduler()
    check_ended(fleet, runs)
    check_slots(fleet)
    assert fleet.view().scheduler != before
