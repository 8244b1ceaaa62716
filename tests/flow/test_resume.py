"""A demo that was killed continues: by itself after its trainer died, by `--resume` after all
did.
"""

import os
import signal
import subprocess
from pathlib import Path

import msgspec
import psutil
import pytest

from rollmesh.launch.folder import read_pids
from rollmesh.testing.run_history import RunHistory
from tests.flow.demo import follow, read, start
from tests.flow.worker_mesh import look_until

SETTINGS = {"trainer.num_steps": 10_000, "trainer.checkpoint_steps": 3, "publish.lease_s": 3.0}
"""More steps than are done before a kill, however fast the machine."""
NUM_MORE = 6
"""Steps of the last incarnation, or fewer."""


def pids(run: Path) -> dict[str, int]:
    """The newest process of each role."""
    return {row.role: row.pid for row in read_pids(run)}


def until(run: Path, step: int) -> None:
    """Wait until that step is done."""
    next(row for row in follow(run / "metrics.jsonl") if row["step"] >= step)


def sealed_checkpoints(run: Path) -> list[Path]:
    """Complete checkpoints; one that is being written has a suffix."""
    return [each for each in (run / "savepoints").glob("*-step-*") if not each.suffix]


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Wait for the end; return the exit code and the output."""
    out, _ = process.communicate(timeout=100)
    return process.returncode, out


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_run_continues_after_its_trainer_or_all_of_it_was_killed(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "demo"
    with start(tmp_path, **SETTINGS) as process:
        until(run, 2)
        os.kill(pids(run)["trainer"], signal.SIGKILL)
        next(follow(run / "recoveries.jsonl"))
        look_until(lambda: sealed_checkpoints(run))
        processes = [psutil.Process(each) for each in pids(run).values() if psutil.pid_exists(each)]
        os.kill(pids(run)["launch"], signal.SIGKILL)
        ended(process)
    assert psutil.wait_procs(processes, timeout=60.0)[1] == []
    num_steps = max(RunHistory(run).num_steps_taken) + NUM_MORE
    settings = SETTINGS | {"trainer.num_steps": num_steps}
    with start(tmp_path, "--resume", **settings) as process:
        code, out = ended(process)
    assert code == 0, out
    assert "the trainer resumes from checkpoint" in out
    check_whole(run, num_steps)
    with start(tmp_path, "--resume", **settings) as process:
        assert ended(process)[0] == 2, "there is nothing to resume"


def check_whole(run: Path, num_steps: int) -> None:
    history, summary = RunHistory(run), read(run / "summary.json")
    assert history.num_steps_taken == dict.fromkeys(range(num_steps), 1)
    assert len(set(history.trained())) == len(history.trained())
    assert (summary["num_steps"], summary["num_lives"], summary["num_lost"]) == (num_steps, 3, 0)
    assert summary["ended"] == "done"
    assert summary["success_untrained"] is not None
    rows = (run / "metrics.jsonl").read_bytes().splitlines()
    steps = [msgspec.json.decode(row)["step"] for row in rows]
    assert steps == list(range(-1, num_steps)), (
        "the untrained policy is measured once, each step is reported once"
    )
    roles = [row.role for row in read_pids(run)]
    assert (roles.count("launch"), roles.count("warm-start")) == (2, 1)
