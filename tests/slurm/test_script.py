"""The script of a job runs without Slurm: sbatch, srun and scontrol are small programs here."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from rollmesh.cli.runs import SETTINGS
from tests.flow.demo import SHORT, Running, follow, read

SBATCH = """\
#!/bin/bash
echo "7;cluster"
"""
SRUN = """\
#!/bin/bash
nodes=(a b)
while [[ $1 == --* ]]; do
    [[ $1 == --nodelist=* ]] && nodes=("${1#*=}")
    shift
done
for node in "${nodes[@]}"; do SLURMD_NODENAME=$node "$@" || exit; done
"""
SCONTROL = """\
#!/bin/bash
case "$*" in
    "show hostnames a,b") printf 'a\\nb\\n' ;;
    "--oneliner show node a,b") printf 'NodeName=%s NodeAddr=127.0.0.1\\n' a b ;;
    "requeue 7") echo "$*" >>requeued ;;
    *) echo "unknown: $*" >&2; exit 1 ;;
esac
"""
JOB = {
    "SLURM_JOB_ID": "7",
    "SLURM_JOB_NODELIST": "a,b",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURMD_NODENAME": "a",
}


@pytest.fixture
def path(tmp_path: Path) -> str:
    """A search path with Slurm's programs."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, text in (("sbatch", SBATCH), ("srun", SRUN), ("scontrol", SCONTROL)):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    return f"{folder}:{os.environ['PATH']}"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_job_is_submitted_stops_before_its_time_limit_and_resumes(
    path: str, model: Path, tmp_path: Path
) -> None:
    (tmp_path / "mesh.json").write_bytes(msgspec.json.encode(SETTINGS))
    argv = [sys.executable, "-m", "rollmesh.cli.main", "up", "mesh.json", "--on", "slurm"]
    argv += ["--nodes", "2", "--no-live"]
    settings = {"model.path": model, "run.seed": 1, "trainer.num_steps": 12}
    for key, value in {**SHORT, **settings}.items():
        argv += ["--set", f"{key}={value}"]
    environment = {**os.environ, "PATH": path}
    done = subprocess.run(
        argv, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
    )
    run, script = tmp_path / "runs" / "demo", tmp_path / "runs" / "demo.slurm" / "job.sh"
    assert done.stdout.startswith(f"job 7 is queued: {script}\n")

    def started(restarts: str) -> Running:
        return Running(
            ["bash", str(script)],
            env={**environment, **JOB, "SLURM_RESTART_COUNT": restarts},
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    with started("0") as job:
        next(row for row in follow(run / "metrics.jsonl") if row["step"] >= 2)
        job.send_signal(signal.SIGUSR1)
        out, _ = job.communicate()
    assert job.returncode == 130, out
    assert (tmp_path / "requeued").read_text() == "requeue 7\n"
    with started("1") as job:
        out, _ = job.communicate()
    assert job.returncode == 0, out
    summary = read(run / "summary.json")
    assert (summary["ended"], summary["num_steps"], summary["num_lives"]) == ("done", 12, 2)


def test_a_machine_without_slurm_is_refused_in_one_line(model: Path, tmp_path: Path) -> None:
    argv = [sys.executable, "-m", "rollmesh.cli.main", "up", os.devnull, "--on", "slurm"]
    argv += ["--nodes", "2", "--set", f"model.path={model}"]
    environment = {**os.environ, "PATH": str(tmp_path)}
    done = subprocess.run(
        argv, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert done.stderr.startswith("rollmesh: --on slurm: no sbatch on this machine")
    assert done.stderr.count("\n") == 1
