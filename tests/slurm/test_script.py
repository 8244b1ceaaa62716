"""The script of a job runs without Slurm: its programs, and `rollmesh up`, are small scripts."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from rollmesh.cli.runs import SETTINGS
from tests.flow.demo import Running

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
[[ $1 == requeue ]] && echo "$*" >>requeued
"""
PYTHON = """\
#!{python}
# `rollmesh up` runs until it is stopped, or to its end if it resumes.
import os, pathlib, signal, sys

argv = sys.argv[1:]
if "prepare" in argv:
    os.execv({python!r}, [{python!r}, *argv])
signal.pthread_sigmask(signal.SIG_BLOCK, {{signal.SIGTERM}})
run = pathlib.Path("runs/demo")
run.mkdir(parents=True, exist_ok=True)
(run / "config.json").touch()
print(*argv[2:], flush=True)
if "--resume" not in argv:
    signal.sigwait({{signal.SIGTERM}})
    sys.exit(130)
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


def test_a_job_is_submitted_stops_before_its_time_limit_and_resumes(
    path: str, model: Path, tmp_path: Path
) -> None:
    python = tmp_path / "bin" / "python"
    python.write_text(PYTHON.format(python=sys.executable))
    python.chmod(0o755)
    argv = [sys.executable, "-m", "rollmesh.cli.main", "up", "mesh.json", "--on", "slurm"]
    argv += ["--nodes", "2", "--set", f"model.path={model}", "--set", f"slurm.python={python}"]
    (tmp_path / "mesh.json").write_bytes(msgspec.json.encode(SETTINGS))
    environment = {**os.environ, "PATH": path}
    done = subprocess.run(
        argv, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
    )
    script = tmp_path / "runs" / "demo.slurm" / "job.sh"
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
        assert job.stdout
        assert job.stdout.readline().startswith("up mesh.json --on slurm ")
        job.send_signal(signal.SIGUSR1)
        out, _ = job.communicate()
    assert job.returncode == 130, out
    assert (tmp_path / "requeued").read_text() == "requeue 7\n"
    with started("1") as job:
        out, _ = job.communicate()
    assert job.returncode == 0, out
    assert out.endswith(" --resume\n")


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
