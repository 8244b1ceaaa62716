"""`rollmesh up --on slurm` on three nodes of a Slurm cluster: to the end, and through faults."""

import sys
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from rollmesh.cli.runs import SETTINGS
from rollmesh.core.orphans import MARK_VARIABLE
from rollmesh.launch.folder import read_pids
from rollmesh.testing.sglang_server import write_sglang_python
from tests.flow.demo import SHORT, read
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

    def until_step(self, number: int, num_restarts: int = 0) -> None:
        """Wait until so many steps are done, after the trainer was started again so often."""

        def is_done() -> bool:
            restarts, steps = self._rows("recoveries.jsonl"), self._rows("metrics.jsonl")
            before = restarts[-1]["num_steps"] if restarts else 0
            return (
                len(restarts) >= num_restarts
                and bool(steps)
                and steps[-1]["step"] >= before + number
            )

        self._cluster.wait_until(is_done, ENDS_WITHIN_S, self._report)

    def restart_soon(self) -> None:
        """Wait until the job is queued again, and let it start before Slurm would.

        A node refuses a job in the second in which it was queued again: credential revoked.
        """
        self._cluster.wait_for_job(self.id, ("PENDING",), ENDS_WITHIN_S)
        self._cluster.run("scontrol", "update", f"JobId={self.id}", "StartTime=now+2")

    def ended(self) -> str:
        """Wait for its end; return its state."""
        states = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
        return self._cluster.wait_for_job(self.id, states, ENDS_WITHIN_S)

    def output(self) -> str:
        """The output of the script."""
        return (self.run.with_suffix(".slurm") / f"{self.id}.out").read_text()

    def _report(self) -> str:
        return f"{self._cluster.job(self.id)}\n{self.output()}"

    def _rows(self, name: str) -> list[dict[str, Any]]:
        """The complete rows of a file of the run."""
        path = self.run / name
        lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
        return [msgspec.json.decode(line) for line in lines]

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


def test_a_job_trains_to_its_end_with_ranks_and_servers_on_other_nodes(
    cluster: SlurmCluster, model: Path, tmp_path: Path
) -> None:
    settings = {
        "slurm.gpus_per_node": 4,
        "trainer.num_ranks": 2,
        "trainer.num_local_ranks": 1,
        "engine.launch": "sglang",
        "engine.python": write_python(tmp_path),
        "engine.num_servers": 2,
        "engine.gpus_each": 2,
    }
    job = Job(cluster, model, tmp_path, **settings)
    assert job.ended() == "COMPLETED", job.output()
    nodes = job.nodes()
    assert {nodes.pop(role) for role in ("launch", "router", "trainer", "dashboard")} == {"n0"}
    assert nodes.pop("rank-1") == "n1"
    assert nodes == dict.fromkeys(("engine-0", "engine-1", "worker-0", "worker-1"), "n2")
    assert sorted((tmp_path / "servers").read_text().splitlines()) == ["n2 0,1", "n2 2,3"]
    summary = read(job.run / "summary.json")
    assert (summary["ended"], summary["num_steps"]) == ("done", SHORT["trainer.num_steps"])
    assert (summary["num_lost"], summary["num_dropped"]) == (0, 0)
    assert job.processes() == []


def write_python(folder: Path) -> Path:
    """Write a stand-in for a Python with SGLang that records the node and GPUs of each server."""
    server = write_sglang_python(folder)
    program = folder / "recording-python"
    program.write_text(
        f'#!/bin/sh\n[ "$1" = -m ] && echo "$(hostname) $CUDA_VISIBLE_DEVICES" >>{folder}/servers\n'
        f'exec {server} "$@"\n'
    )
    program.chmod(0o755)
    return program


def test_a_job_survives_lost_nodes_and_its_time_limit_until_it_is_cancelled(
    cluster: SlurmCluster, model: Path, tmp_path: Path
) -> None:
    settings = {
        "trainer.num_steps": 100_000,  # it never ends by itself
        "trainer.checkpoint_steps": 2,
        "launch.node_timeout_s": 3,
    }
    job = Job(cluster, model, tmp_path, **settings)
    job.until_step(2)
    cluster.kill_node("n2")
    cluster.wait_until(lambda: job.nodes()["worker-1"] == "n1", ENDS_WITHIN_S, job.output)
    cluster.report_lost("n2")
    cluster.run("scancel", "--batch", "--signal=USR1", job.id)  # as Slurm before the limit
    job.restart_soon()
    job.until_step(2, num_restarts=1)
    cluster.kill_node("n0")
    cluster.report_lost("n0")
    job.restart_soon()  # on other nodes: Slurm still has a kill of the old script to send to n0
    job.until_step(2, num_restarts=2)
    assert {"n0", "n2"}.isdisjoint(job.nodes().values())
    assert job.processes()
    cluster.run("scancel", job.id)
    assert job.ended() == "CANCELLED"
    assert job.processes() == []
    summary = read(job.run / "summary.json")
    assert (summary["ended"], summary["num_lives"], summary["num_lost"]) == ("stopped", 3, 0)
    assert read(job.run / "state.json")["resume"].endswith("--resume --nodes 3")
