"""Ended runs are not reported as alive, and a verb reads the run that was named."""

import io
import os
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import msgspec
import psutil
import pytest
from rich.console import Console

from rollmesh.cli.mesh_state import (
    MeshReport,
    newest,
    page_folder,
    report_of_folder,
    report_of_router,
    run_folder,
)
from rollmesh.cli.status import tables_of
from rollmesh.core.errors import AddressError, UserError
from rollmesh.core.run_state import RunRecord, RunState, running_record
from rollmesh.launch.folder import Pid
from rollmesh.testing.run_folder import FakeRun

GONE_PID = 999_999_999


@pytest.fixture
def run(tmp_path: Path) -> FakeRun:
    run = FakeRun(tmp_path / "demo", num_steps=60)
    run.add_baseline(0.66)
    run.add_steps(12)
    return run


def report_of(run: FakeRun, after_s: float = 1.0) -> MeshReport:
    return report_of_folder(run.folder, run.now_s + after_s)


def write_pids(run: FakeRun, host: str = "", **pids: int) -> None:
    """Write pids.json as launch does; each process is recorded with our own start time."""
    began_s = psutil.Process().create_time()
    rows = [Pid(role, pid, began_s, host or socket.gethostname()) for role, pid in pids.items()]
    (run.folder / "pids.json").write_bytes(msgspec.json.encode(rows))


def test_a_running_run_is_reported_with_its_mesh(run: FakeRun) -> None:
    report = report_of(run)
    assert report.run
    assert (report.run.name, report.run.phase, report.run.num_done) == ("demo", "running", 12)
    assert report.router
    assert [row.worker_id for row in report.router.workers] == ["worker-0", "worker-1"]
    assert [row.role for row in report.processes][:2] == ["engine-0", "router"]


def test_a_run_on_this_machine_lists_only_processes_that_are_alive(run: FakeRun) -> None:
    write_pids(run, launch=os.getpid(), router=GONE_PID)
    assert [row.role for row in report_of(run).processes] == []
    run.append(
        "telemetry.jsonl",
        {"time_s": run.now_s, "processes": [{"role": "launch", "pid": os.getpid()}]},
    )
    assert [row.role for row in report_of(run).processes] == ["launch"]


def test_a_run_whose_pid_belongs_to_another_process_now_was_killed(run: FakeRun) -> None:
    ours = running_record("rollmesh up --resume")
    run.write_record(msgspec.structs.replace(ours, start_ticks="1"))
    report = report_of(run)
    assert report.run
    assert report.run.phase == "killed"


def test_a_run_whose_launch_died_without_a_report_was_killed_and_can_be_resumed(
    run: FakeRun,
) -> None:
    write_pids(run, launch=GONE_PID)
    ours = running_record("rollmesh up --resume")
    run.write_record(msgspec.structs.replace(ours, pid=GONE_PID))
    report = report_of(run)
    assert report.run
    assert (report.run.phase, report.processes) == ("killed", [])
    assert report.run.cause.startswith("launch ended without a report")
    assert report.run.resume == "rollmesh up --resume"
    assert report.router  # its last known state


def test_a_living_launch_that_cannot_write_telemetry_is_running(run: FakeRun) -> None:
    # Telemetry ends on a full disk, and may end when the clock changes.
    run.write_record(running_record("rollmesh up --resume"))
    report = report_of(run, after_s=3600.0)
    assert report.run
    assert (report.run.phase, report.quiet_s) == ("running", 3600.0)
    assert "launch is alive but has written no telemetry for 3600 s" in rendered(report)


@pytest.mark.parametrize(
    ("summary", "phase", "cause"),
    [
        ({"ended": "done"}, "done", ""),
        ({"ended": "stopped"}, "stopped", ""),
        ({"ended": "router exited with code 1"}, "failed", "router exited with code 1"),
    ],
)
def test_a_run_without_a_state_file_is_read_from_its_summary(
    run: FakeRun, summary: dict[str, str], phase: str, cause: str
) -> None:
    (run.folder / "summary.json").write_bytes(msgspec.json.encode(summary))
    report = report_of(run)
    assert report.run
    assert (report.run.phase, report.run.cause) == (phase, cause)


@pytest.mark.parametrize("state", [RunState.FAILED, RunState.STOPPED])
def test_a_run_that_ended_before_it_was_done_is_never_called_finished(
    run: FakeRun, state: RunState
) -> None:
    cause = "router exited with code 1" if state is RunState.FAILED else ""
    run.finish(RunRecord(state=state, cause=cause, resume="rollmesh up --resume"))
    report = report_of(run)
    assert report.run
    assert (report.run.phase, report.run.cause) == (state, cause)
    lines = rendered(report).splitlines()
    assert lines[0] == f"demo: {state}, step 12 of 60"
    assert "to resume: rollmesh up --resume" in lines
    assert (f"cause: {cause}" in lines) == bool(cause)


def rendered(report: MeshReport) -> str:
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(tables_of(report))
    return "\n".join(line.rstrip() for line in console.export_text().splitlines())


def test_a_silent_run_of_another_machine_lists_no_process(run: FakeRun) -> None:
    write_pids(run, host="elsewhere", launch=GONE_PID)
    assert len(report_of(run).processes) == 6
    assert report_of(run, after_s=60.0).processes == []


def test_a_run_that_has_ended_has_no_mesh(run: FakeRun) -> None:
    run.finish()
    report = report_of(run)
    assert report.run
    assert report.run.phase == "done"
    assert report.run.summary["num_lost"] == 0
    assert (report.router, report.processes) == (None, [])


def test_a_long_run_is_reported_by_its_newest_lines(run: FakeRun) -> None:
    line = {"time_s": run.now_s, "processes": [], "router": {"workers": [{"worker_id": "w"}] * 50}}
    with (run.folder / "telemetry.jsonl").open("ab") as file:
        file.write((msgspec.json.encode(line) + b"\n") * 15_000)
    assert (run.folder / "telemetry.jsonl").stat().st_size > 12 * 2**20
    run.now_s += 36_000.0
    run.add_steps(1)
    report = report_of(run)
    assert report.run
    assert (report.run.phase, report.run.num_done) == ("running", 13)
    assert report.run.success_untrained == 0.66
    assert report.time_s == run.now_s


def test_a_run_that_has_just_begun_is_reported(tmp_path: Path) -> None:
    report = report_of(FakeRun(tmp_path / "new"))
    assert report.run
    assert (report.run.phase, report.time_s, report.router) == ("waiting", None, None)


def test_an_evaluation_is_reported_by_name_and_without_steps(tmp_path: Path) -> None:
    (tmp_path / "eval").mkdir()
    (tmp_path / "eval" / "eval.json").write_text("{}")
    mesh = FakeRun(tmp_path / "eval" / "mesh")
    mesh.add_steps(1)
    report = report_of(mesh)
    assert report.run
    assert (report.run.name, report.run.num_steps) == ("eval", 0)


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("127.0.0.1:5", "not an address of a router"),
        ("http://127.0.0.1:9", "does not answer"),
        ("http://[", "does not answer"),
    ],
)
def test_an_address_without_a_router_is_one_line(url: str, why: str) -> None:
    with pytest.raises(AddressError, match=why) as raised:
        report_of_router(url, 0.0)
    assert str(raised.value).startswith(f"--router {url}: ")
    assert "\n" not in str(raised.value)


class Answer(BaseHTTPRequestHandler):
    """Require a token, and answer nothing to a request with it."""

    def do_GET(self) -> None:
        knows = self.headers.get("Authorization") == "Bearer sesame"
        is_here = self.path == "/status"
        self.send_response(401 if not knows else 200 if is_here else 404)
        self.end_headers()
        self.wfile.write(b"[]" if is_here else b"{}")

    def log_message(self, *_: object) -> None:
        """Log nothing."""


@pytest.fixture
def guarded() -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), Answer) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_a_router_that_asks_for_a_token_gets_ours(
    guarded: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(AddressError, match="needs a token; set ROLLMESH_ADMIN_TOKEN"):
        report_of_router(guarded, 0.0)
    monkeypatch.setenv("ROLLMESH_ADMIN_TOKEN", "sesame")
    with pytest.raises(AddressError, match="is not a router"):
        report_of_router(guarded, 0.0)
    with pytest.raises(AddressError, match="status 404"):
        report_of_router(f"{guarded}/elsewhere", 0.0)


def make_model(folder: Path) -> Path:
    """Make a model folder: its config.json has the name of a run's settings file."""
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "qwen3"}')
    return folder


def test_the_newest_run_is_taken(tmp_path: Path) -> None:
    for number, name in enumerate(("b", "a", "c")):
        config = FakeRun(tmp_path / name).folder / "config.json"
        os.utime(config, (100 - number, 100 - number))
    make_model(tmp_path / "model")
    assert newest(tmp_path) == tmp_path / "b"


def test_the_run_folder_of_an_evaluation_is_that_of_its_mesh(tmp_path: Path) -> None:
    mesh = FakeRun(tmp_path / "eval" / "mesh")
    (tmp_path / "eval" / "eval.json").write_text("{}")
    assert run_folder(tmp_path / "eval") == mesh.folder


def test_the_page_folder_of_an_evaluation_is_its_own(tmp_path: Path) -> None:
    mesh = FakeRun(tmp_path / "eval" / "mesh")
    (tmp_path / "eval" / "eval.json").write_text("{}")
    assert page_folder(tmp_path / "eval") == tmp_path / "eval"
    assert page_folder(mesh.folder) == mesh.folder


def test_an_evaluation_on_an_existing_mesh_has_no_mesh_folder(tmp_path: Path) -> None:
    (tmp_path / "eval.json").write_text("{}")
    with pytest.raises(UserError, match="runs on an existing mesh; name that by --router"):
        run_folder(tmp_path)


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model")
    with pytest.raises(UserError, match="contains no runs"):
        newest(tmp_path)
    for folder in (tmp_path, model, tmp_path / "none"):
        with pytest.raises(UserError) as caught:
            run_folder(folder)
        assert str(caught.value) == f"{folder}: not a run folder; runs are in runs/NAME"
