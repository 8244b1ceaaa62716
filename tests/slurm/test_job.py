"""`rollmesh up --on slurm` on a Slurm cluster of three nodes: to the end, and through faults."""

import sys
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from rollmesh.cli.runs import SETTINGS
from rollmesh.core.orphans import MARK_VARIABLE
from rollmesh.launch.folder import read_pids
from tests.flow.demo import SHORT, follow, read
from tests.slurm.cluster import SlurmCluster

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
ENDS_WITHIN_S = 200.0


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

    def until_step(self, number: int) -> None:
        """Wait until so many steps are done."""
        next(row for row in follow(self.run / "metrics.jsonl") if row["step"] >= number)

    def restart_now(self) -> None:
        """Wait until the job is queued again, and start it before Slurm would."""
        self._cluster.wait_for_job(self.id, ("PENDING",), ENDS_WITHIN_S)
        self._cluster.run("scontrol", "update", f"JobId={self.id}", "StartTime=now")

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


def test_the_processes_of_a_lost_node_run_elsewhere(
    cluster: SlurmCluster, model: Path, tmp_path: Path
) -> None:
    settings = {"trainer.num_steps": 60, "launch.node_timeout_s": 3}
    job = Job(cluster, model, tmp_path, **settings)
    job.until_step(2)
    cluster.kill_node("n2")
    try:
        cluster.wait_until(lambda: job.nodes()["worker-1"] == "n1", ENDS_WITHIN_S, job.output)
        assert job.ended() == "COMPLETED", job.output()
    finally:
        cluster.start_node("n2")
    summary = read(job.run / "summary.json")
    assert (summary["ended"], summary["num_lost"], summary["num_dropped"]) == ("done", 0, 0)
    assert job.processes() == []


def test_a_cancelled_job_leaves_nothing_behind(
    cluster: SlurmCluster, model: Path, tmp_path: Path
) -> None:
    job = Job(cluster, model, tmp_path, **{"trainer.num_steps": 10_000})
    job.until_step(2)
    assert job.processes()
    cluster.run("scancel", job.id)
    assert job.ended() == "CANCELLED"
    assert job.processes() == []
    assert read(job.run / "state.json")["resume"].endswith("--nodes 3 --resume")


def test_a_job_resumes_after_its_time_limit_and_after_its_first_node_was_lost(
    cluster: SlurmCluster, model: Path, tmp_path: Path
) -> None:
    settings = {"trainer.num_steps": 25, "trainer.checkpoint_steps": 2, "launch.node_timeout_s": 3}
    job = Job(cluster, model, tmp_path, **settings)
    job.until_step(2)
    cluster.run("scancel", "--batch", "--signal=USR1", job.id)  # as Slurm before the limit
    job.restart_now()
    job.until_step(8)
    cluster.kill_node("n0")
    try:
        cluster.wait_for_job(job.id, ("PENDING",), ENDS_WITHIN_S)
    finally:
        cluster.start_node("n0")
    job.restart_now()
    assert job.ended() == "COMPLETED", job.output()
    summary = read(job.run / "summary.json")
    assert (summary["ended"], summary["num_steps"]) == ("done", 25)
    assert summary["num_lives"] == 3
    assert job.processes() == []
