"""`rollmesh status` shows the state as tables or JSON; `rollmesh dashboard` lists the runs."""

import io
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console

from rollmesh.cli.main import main
from rollmesh.cli.mesh_state import MeshReport
from rollmesh.cli.status import print_json, status, tables_of
from rollmesh.core.process import OK, USAGE
from rollmesh.dashboard.rows import EngineTableRow, RouterRow
from rollmesh.testing.run_folder import FakeRun
from rollmesh.wire.worker_report import WorkerStatus


@pytest.fixture
def run(tmp_path: Path) -> FakeRun:
    run = FakeRun(tmp_path / "demo", num_steps=60)
    run.add_baseline(0.66)
    run.add_steps(12)
    return run


def rendered(router: RouterRow, width: int = 200) -> str:
    console = Console(width=width, file=io.StringIO())
    with console.capture() as capture:
        console.print(tables_of(MeshReport(0.0, None, router, [])))
    return capture.get()


def test_a_run_is_described_from_its_folder(
    run: FakeRun, capsys: pytest.CaptureFixture[str]
) -> None:
    assert status([str(run.folder)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "demo: silent, step 12 of 60"
    assert lines[1].startswith("reward 0.")
    assert ", untrained 0.660, success 0." in lines[1]
    assert lines[1].endswith("untrained 0.66, policy version 12, oldest sample 2")
    assert lines[2].startswith("launch cannot be checked from this machine; last seen at ")
    assert lines[3].startswith("groups: 12 queued, 2 assigned, 30 running; 176 done")
    [worker] = [line.split() for line in lines if line.startswith("worker-1")]
    assert worker[1:3] == ["ready", "guess"]
    [engine] = [line.split() for line in lines if line.startswith("http://127.0.0.1:30000")]
    assert engine[1:5] == ["READY", "12", "61", "3"]


def test_an_ended_run_is_shown_from_its_summary(
    run: FakeRun, capsys: pytest.CaptureFixture[str]
) -> None:
    run.finish()
    assert status([str(run.folder)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "demo: done, step 12 of 60"
    assert lines[1].split() == ["reward_untrained", "0.66"]
    assert not any("worker-0" in line or "pid" in line for line in lines)


def test_success_is_not_shown_for_dense_rewards(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = FakeRun(tmp_path / "dense", num_steps=60, is_dense=True)
    run.add_baseline(0.05)
    run.add_steps(12)
    assert status([str(run.folder)]) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[1].startswith("reward 0.0")
    assert "success" not in out


def test_reasons_for_waiting_are_shown_below_the_counts() -> None:
    text = rendered(RouterRow(queue={"queued": 3}, causes=["no worker has served env '[x]'"]))
    assert text.splitlines()[1].strip() == "no worker has served env '[x]'"


def test_a_workers_stall_and_last_error_are_shown_unparsed() -> None:
    rows = [
        WorkerStatus(
            "w0",
            env="echo",
            state="live",
            in_flight=3,
            loop_lag_s=0.25,
            stalled_in="Env.run (env.py:7)",
        ),
        WorkerStatus(
            "w1", env="echo", state="lost", num_attempts=9, num_failed=4, last_error="[red]no[/red]"
        ),
    ]
    text = rendered(
        RouterRow(workers=rows, engines=[EngineTableRow("u", "FENCED", detail="off by 0.5")])
    )
    lines = [line.rstrip() for line in text.splitlines()]
    assert [line.split() for line in lines if line[:3] in ("w0 ", "w1 ")] == [
        ["w0", "live", "echo", "3", "250", "0", "0", "0"],
        ["w1", "lost", "echo", "0", "0", "0", "9", "4"],
        ["w0", "is", "stalled", "in", "Env.run", "(env.py:7)"],
    ]
    assert "w1's last error: [red]no[/red]" in lines
    assert "u: off by 0.5" in lines


def test_a_workers_last_error_names_its_task_and_log(
    run: FakeRun, capsys: pytest.CaptureFixture[str]
) -> None:
    (run.folder / "logs").mkdir()
    error = "agent_error: ValueError: no (my_env.py:15 in run)"
    row = {"worker_id": "worker-1", "last_error": error, "last_task_id": "t7"}
    telemetry = {"time_s": run.now_s, "router": {"workers": [row]}}
    run.append("telemetry.jsonl", telemetry)
    assert status([str(run.folder)]) == 0
    log = run.folder / "logs" / "worker-1.log"
    text = f"worker-1's last error: {error}; task t7, log {log}"
    assert "".join(text.split()) in "".join(capsys.readouterr().out.split())


def test_a_narrow_terminal_folds_names_and_keeps_numbers() -> None:
    row = WorkerStatus(
        "gpu-node-17-48213-a1b2", env="my_package.envs:BugFixEnv", state="draining", in_flight=64
    )
    text = rendered(RouterRow(workers=[msgspec.structs.replace(row, num_attempts=12_345)]), 80)
    assert "12345" in text
    assert "draining" in text
    assert "\N{HORIZONTAL ELLIPSIS}" not in text


def test_json_holds_the_run_and_the_state_of_the_router(
    run: FakeRun, capsys: pytest.CaptureFixture[str]
) -> None:
    assert status([str(run.folder), "--json"]) == 0
    [line] = capsys.readouterr().out.splitlines()
    document: dict[str, Any] = msgspec.json.decode(line)
    assert document["run"]["name"] == "demo"
    assert [row["worker_id"] for row in document["router"]["workers"]] == ["worker-0", "worker-1"]


def test_a_watch_ends_by_ctrl_c(capsys: pytest.CaptureFixture[str]) -> None:
    looks = iter([MeshReport(1.0, None, None, [])])

    def look() -> MeshReport:
        for report in looks:
            return report
        raise KeyboardInterrupt

    print_json(look, is_watched=True)
    assert capsys.readouterr().out.count("\n") == 1


def test_without_a_folder_the_runs_are_listed_newest_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for number, name in enumerate(("old", "new")):
        run = FakeRun(tmp_path / "runs" / name, num_steps=60)
        run.add_steps(3 + number)
        os.utime(run.folder / "config.json", (1e9 + 1e5 * number, 1e9 + 1e5 * number))
    assert main(["dashboard"]) == OK
    first, second, hint = capsys.readouterr().out.splitlines()
    assert first.startswith("runs/new  2001-09-1")
    assert first.endswith("step 4 of 60")
    assert second.startswith("runs/old  2001-09-0")
    assert second.endswith("step 3 of 60")
    assert hint == "`rollmesh dashboard RUN_FOLDER` serves the dashboard of one"


def test_a_folder_without_runs_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["dashboard"]) == USAGE
    assert capsys.readouterr().err == "rollmesh: runs: contains no runs; name a run folder\n"
