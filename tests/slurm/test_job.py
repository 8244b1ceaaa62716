"""`rollmesh up --on slurm` on a Slurm cluster of three nodes, with a tiny model."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from rollmesh.cli.runs import SETTINGS
from rollmesh.core.orphans import MARK_VARIABLE
from rollmesh.launch.folder import read_pids
from tests.flow.demo import SHORT, read
from tests.slurm.cluster import SlurmCluster, why_not

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
ENDS_WITHIN_S = 200.0


@pytest.fixture(scope="module")
def cluster() -> Iterator[SlurmCluster]:
    if why := why_not():
        pytest.skip(why)
    with SlurmCluster() as cluster:
        yield cluster


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with random weights."""
    folder = tmp_path_factory.mktemp("model") / "tiny"
    argv = [sys.executable, "-m", "rollmesh.cli.main", "make-model", str(folder), "--seed", "1"]
    subprocess.run(argv, check=True, capture_output=True)
    return folder


class Job:
    """A run as a job; its files are in `folder`."""

    def __init__(self, cluster: SlurmCluster, model: Path, folder: Path, **settings: Any) -> None:
        self.run = folder / "runs" / "demo"
        self._cluster = cluster
        (folder / "mesh.json").write_bytes(msgspec.json.encode(SETTINGS))
        argv = [sys.executable, "-m", "rollmesh.cli.main", "up", "mesh.json", "--on", "slurm"]
        argv += ["--nodes", "3", "--no-live"]
        for key, value in {**SHORT, "model.path": model, "run.seed": 1, **settings}.items():
            argv += ["--set", f"{key}={value}"]
        lines = cluster.run(*argv, folder=folder).stdout.splitlines()
        self.id = lines[0].split()[1]
        """The job's id."""

    def ended(self) -> str:
        """Wait for its end; return its state."""
        states = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
        return self._cluster.wait_for_job(self.id, states, ENDS_WITHIN_S)

    def output(self) -> str:
        """The output of the script."""
        return (self.run.with_suffix(".slurm") / f"{self.id}.out").read_text()

    def processes(self) -> list[psutil.Process]:
        """Those on any node that carry the job's mark."""
        found = []
        for each in psutil.process_iter():
            try:
                mark = each.environ().get(MARK_VARIABLE, "")
            except psutil.Error:
                continue
            if mark.partition("/")[0] == f"slurm-{self.id}":
                found.append(each)
        return found

    def nodes(self) -> dict[str, str]:
        """The node of each role's newest process."""
        return {row.role: row.host for row in read_pids(self.run)}


def test_a_job_trains_to_its_end_on_three_nodes(
    cluster: SlurmCluster, model: Path, tmp_path: Path
) -> None:
    job = Job(cluster, model, tmp_path)
    assert job.ended() == "COMPLETED", job.output()
    nodes = job.nodes()
    assert {nodes[role] for role in ("launch", "router", "trainer", "dashboard")} == {"n0"}
    assert {nodes["engine-0"], nodes["worker-0"]} == {"n1"}
    assert nodes["worker-1"] == "n2"
    summary = read(job.run / "summary.json")
    assert (summary["ended"], summary["num_steps"]) == ("done", SHORT["trainer.num_steps"])
    assert (summary["num_lost"], summary["num_dropped"]) == (0, 0)
    assert job.processes() == []
