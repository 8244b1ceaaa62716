"""The run folder: nothing is overwritten, and readers see whole files."""

import os
import shutil
import socket
from pathlib import Path

import msgspec
import pytest

from rollmesh.core.config import Config, RunConfig, TrainerConfig, load_config
from rollmesh.core.errors import ConfigError
from rollmesh.core.process import Ready
from rollmesh.core.run_state import EVAL_MESH, RunState, RunStatus, read_record, status_of
from rollmesh.launch import folder as folder_module
from rollmesh.launch.folder import (
    JOURNAL,
    SUMMARY,
    RunFolder,
    config_path,
    locked,
    read_addresses,
    read_pids,
    read_summary,
    was_cut_off,
)


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return Config(run=RunConfig(name="demo", folder=str(tmp_path)))


def test_the_settings_are_written_as_they_were_resolved(config: Config) -> None:
    folder = RunFolder(config)
    assert load_config(config_path(config)) == config
    assert folder.logs.is_dir()


def test_older_runs_are_moved_aside_in_order(config: Config, tmp_path: Path) -> None:
    for number in range(3):
        (RunFolder(config).path / "mark").write_text(str(number))
    marks = {path.parent.name: path.read_text() for path in tmp_path.glob("*/mark")}
    assert marks == {"demo": "2", "demo.1": "0", "demo.2": "1"}


def test_a_gap_in_the_numbers_is_not_filled(config: Config, tmp_path: Path) -> None:
    (tmp_path / "demo.7").mkdir()
    (tmp_path / "demo.notes").mkdir()
    RunFolder(config)
    RunFolder(config)
    assert (tmp_path / "demo.8").is_dir()


def test_every_process_that_was_started_is_recorded(config: Config) -> None:
    folder = RunFolder(config)
    folder.add_pid("router", 11, 100.0)
    folder.add_pid("worker-0", 12, 101.0)
    pids = msgspec.json.decode((folder.path / "pids.json").read_bytes())
    assert pids == [
        {"role": "router", "pid": 11, "started_s": 100.0, "host": socket.gethostname()},
        {"role": "worker-0", "pid": 12, "started_s": 101.0, "host": socket.gethostname()},
    ]
    assert [row.pid for row in read_pids(folder.path)] == [11, 12]


def test_each_launch_and_the_latest_processes_are_recorded(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folder_module, "MAX_PIDS", 3)
    folder = RunFolder(config)
    folder.add_pid("launch", 100, 0.0)
    for pid in range(10):
        folder.add_pid("worker-0", pid, 0.0)
    assert [row.pid for row in read_pids(folder.path)] == [100, 7, 8, 9]


def test_the_address_of_a_process_is_recorded_and_replaced_by_its_successor(config: Config) -> None:
    folder = RunFolder(config)
    assert read_addresses(folder.path) == {}
    for pid in (11, 12):
        folder.add_address(Ready("router", pid, "tcp://127.0.0.1:5", "http://127.0.0.1:6"))
    assert read_addresses(folder.path) == {
        "router": Ready("router", 12, "tcp://127.0.0.1:5", "http://127.0.0.1:6")
    }


def test_the_summary_keeps_what_the_trainer_wrote(config: Config) -> None:
    folder = RunFolder(config)
    (folder.path / "summary.json").write_text('{"num_lost": 0, "wall_s": 1}')
    whole = {"num_lost": 0, "wall_s": 2.5}
    assert folder.add_to_summary({"wall_s": 2.5}) == whole
    assert msgspec.json.decode((folder.path / "summary.json").read_bytes()) == whole


def test_a_run_whose_trainer_wrote_nothing_has_a_summary_too(config: Config) -> None:
    folder = RunFolder(config)
    assert folder.add_to_summary({"ended": "stopped"}) == {"ended": "stopped"}
    assert not list(folder.path.glob("*.part"))


def test_a_folder_that_cannot_be_created_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    config = Config(run=RunConfig(folder=str(tmp_path / "file")))
    with pytest.raises(ConfigError, match=r"run.folder = .*file: cannot make .*not a directory"):
        RunFolder(config)


def test_a_removed_folder_is_reported_and_raises_nothing(config: Config) -> None:
    folder = RunFolder(config)
    shutil.rmtree(folder.path)
    folder.add_pid("router", 1, 0.0)
    folder.add_telemetry(b"{}")
    assert folder.add_to_summary({"wall_s": 2.5}) == {"wall_s": 2.5}
    assert folder.fault.endswith("summary.json could not be written: no such file or directory")


def test_writes_follow_a_folder_that_was_moved(config: Config, tmp_path: Path) -> None:
    folder = RunFolder(config)
    assert folder.moved_to() == ""
    folder.path.rename(tmp_path / "moved")
    RunFolder(config)  # another run uses the old path now
    assert folder.moved_to() == str(tmp_path / "moved")
    folder.end(RunState.FAILED, "it was moved")
    records = [read_record(tmp_path / name) for name in ("demo", "moved")]
    assert [each and each.state for each in records] == [RunState.RUNNING, RunState.FAILED]
    shutil.rmtree(tmp_path / "moved")
    assert folder.moved_to() == "", "it was removed"


def resumed(config: Config) -> RunFolder:
    return RunFolder(config, resume=True)


def test_a_resumed_run_keeps_its_files(config: Config, tmp_path: Path) -> None:
    first = RunFolder(config)
    first.add_pid("launch", 11, 100.0)
    first.add_telemetry(b"{}")
    first.add_to_summary({"ended": "stopped", "num_steps": 3})
    del first
    folder = resumed(config)
    folder.add_pid("launch", 12, 200.0)
    assert [path.name for path in tmp_path.iterdir()] == ["demo"]
    assert [row.pid for row in read_pids(folder.path)] == [11, 12]
    assert (folder.path / "telemetry.jsonl").read_bytes() == b"{}\n"
    assert not (folder.path / "summary.json").exists()  # it is running again


def test_a_resumed_run_writes_its_new_settings(config: Config) -> None:
    RunFolder(config)
    longer = msgspec.structs.replace(config, trainer=TrainerConfig(num_steps=9))
    resumed(longer)
    assert load_config(config_path(config)) == longer


@pytest.mark.parametrize("has_folder", [False, True])
def test_a_folder_without_a_run_is_not_resumed(config: Config, has_folder: bool) -> None:
    if has_folder:
        config.run_folder().mkdir()
    with pytest.raises(ConfigError, match=r"demo: no run to resume; start one without"):
        resumed(config)
    assert config.run_folder().exists() == has_folder


def test_a_run_that_reached_its_goal_is_done(config: Config) -> None:
    RunFolder(config).end(RunState.DONE, num_steps=200)
    with pytest.raises(ConfigError, match=r"this run is done, with 200 of 200 steps; .* raise"):
        resumed(config)
    longer = msgspec.structs.replace(config, trainer=TrainerConfig(num_steps=201))
    assert resumed(longer).path == config.run_folder()


def test_how_a_run_ended_is_in_its_state_and_its_summary(config: Config) -> None:
    folder = RunFolder(config, resume_command="rollmesh up --resume")
    record = read_record(folder.path)
    assert record
    assert (record.state, record.is_alive()) == (RunState.RUNNING, True)
    (folder.path / SUMMARY).write_text('{"num_steps": 7}')
    cause, resume = "router exited with code 1", "rollmesh up --resume"
    failed = {"num_steps": 7, "ended": "failed", "cause": cause, "resume": resume, "wall_s": 2.5}
    assert folder.end(RunState.FAILED, cause, wall_s=2.5) == failed
    assert read_summary(folder.path / SUMMARY) == failed
    records = status_of(read_record(folder.path), None, 0.0)
    assert records == RunStatus(RunState.FAILED, cause, resume)


def test_a_run_that_is_done_has_nothing_to_resume(config: Config) -> None:
    folder = RunFolder(config, resume_command="rollmesh up --resume")
    assert folder.end(RunState.DONE) == {"ended": "done"}
    assert status_of(read_record(folder.path), None, 0.0) == RunStatus(RunState.DONE)


def test_a_resumed_run_is_running(config: Config) -> None:
    RunFolder(config).end(RunState.FAILED, "boom")
    folder = resumed(config)
    assert status_of(read_record(folder.path), None, 0.0) == RunStatus(RunState.WAITING)


def test_a_folder_has_one_launch_at_a_time(config: Config) -> None:
    folder = RunFolder(config)
    with pytest.raises(ConfigError, match=r"demo: another process is using this folder"):
        resumed(config)
    del folder
    resumed(config)


@pytest.mark.parametrize("inside", [EVAL_MESH, JOURNAL])
def test_a_running_evaluation_is_not_moved_aside_by_another_that_names_its_folder(
    config: Config, tmp_path: Path, inside: str
) -> None:
    """An evaluation has no lock of its own: the mesh in it has one, and the journal."""
    held = config.run_folder() / inside
    held.mkdir(parents=True)
    lock = locked(held)
    with pytest.raises(ConfigError, match=r"demo: another process is using this folder"):
        RunFolder(config)
    assert [path.name for path in tmp_path.iterdir()] == ["demo"]
    os.close(lock)
    RunFolder(config)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["demo", "demo.1"]


def test_a_run_was_cut_off_unless_it_is_done_or_was_stopped(config: Config) -> None:
    was_so = [was_cut_off(config)]
    folder = RunFolder(config)
    was_so.append(was_cut_off(config))
    (folder.path / SUMMARY).write_text('{"num_steps": 3}')  # the summary of a failed trainer
    was_so.append(was_cut_off(config))
    for state in (RunState.FAILED, RunState.STOPPED, RunState.DONE):
        folder.end(state)
        was_so.append(was_cut_off(config))
    assert was_so == [False, True, True, True, False, False]


def test_a_running_run_is_not_moved_aside(config: Config, tmp_path: Path) -> None:
    folder = RunFolder(config)
    with pytest.raises(ConfigError, match=r"demo: another process is using this folder"):
        RunFolder(config)
    assert [path.name for path in tmp_path.iterdir()] == ["demo"]
    assert load_config(config_path(config)) == config
    del folder
    RunFolder(config)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["demo", "demo.1"]
