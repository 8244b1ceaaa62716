"""The scheduler's verbs are found, and its processes are started by the fleet file."""

import subprocess
import sys
from pathlib import Path

import pytest

from rollmesh.cli.main import load, main
from rollmesh.cli.scheduler import VERBS
from rollmesh.scheduler.admission.fleet_file import read_fleet
from rollmesh.scheduler.service.journal import FILE_NAME


def test_help_lists_every_verb(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["scheduler", "--help"]) == 0
    out = capsys.readouterr().out
    assert all(f"\n  {name} " in out for name in VERBS)


@pytest.mark.parametrize("name", VERBS)
def test_every_verb_can_be_loaded(name: str) -> None:
    assert callable(load(VERBS[name]))


def test_an_unknown_verb_is_one_line_and_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["scheduler", "dance"]) == 2
    assert capsys.readouterr().err.startswith("rollmesh: no verb 'dance' of the scheduler; did you")


def test_init_writes_a_fleet_and_never_overwrites_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "scheduler.toml"
    assert main(["scheduler", "init", str(path)]) == 0
    assert list(read_fleet(path).pipelines) == ["math", "code"]
    path.write_text("")
    assert main(["scheduler", "init", str(path)]) == 2
    assert "exists already" in capsys.readouterr().err
    assert path.read_text() == ""


def error_line(verb: str, path: Path) -> str:
    """Run `rollmesh scheduler VERB PATH` in a process; return its error line."""
    words = [sys.executable, "-m", "rollmesh.cli.main", "scheduler", verb, str(path)]
    ended = subprocess.run(words, capture_output=True, text=True, timeout=100, check=False)
    assert ended.returncode == 2
    assert "Traceback" not in ended.stderr
    return next(line for line in ended.stderr.splitlines() if line.startswith("rollmesh: "))


@pytest.mark.parametrize(
    ("verb", "text", "error"),
    [
        ("serve", "polcy = 'fair'", "unknown key 'polcy'"),
        ("admission", "polcy = 'fair'", "unknown key 'polcy'"),
        ("up", "polcy = 'fair'", "unknown key 'polcy'"),
        ("serve", "bind = 'tcp://0.0.0.0:0'", "others can reach it"),
        ("admission", "admission = 'tcp://h:1'", "admission: 'tcp://h:1' is not a path"),
    ],
)
def test_a_mistake_in_the_file_is_one_line(
    verb: str, text: str, error: str, tmp_path: Path
) -> None:
    path = tmp_path / "scheduler.toml"
    path.write_text(f'http_bind = "127.0.0.1:0"\njournal = "{tmp_path / "journal"}"\n{text}')
    assert error in error_line(verb, path)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("[fair]\nquantum = 3", "[fair]: unknown key 'quantum'; known keys: quantum_s, "),
        ("[service]\nstall_s = -3", "[service].stall_s: -3 is not a valid time"),
    ],
)
def test_settings_are_checked_before_the_service_starts(
    text: str, error: str, tmp_path: Path
) -> None:
    path = tmp_path / "scheduler.toml"
    path.write_text(text)
    assert f"{path}: {error}" in error_line("serve", path)


def test_a_damaged_journal_is_one_line_with_the_remedy(tmp_path: Path) -> None:
    path, journal = tmp_path / "scheduler.toml", tmp_path / "journal"
    path.write_text(f'bind = "tcp://127.0.0.1:0"\nhttp_bind = "127.0.0.1:0"\njournal = "{journal}"')
    journal.mkdir()
    (journal / FILE_NAME).write_bytes(b"no journal " * 1000)
    error = error_line("serve", path)
    assert f"{journal / FILE_NAME} is not a scheduler's journal: " in error
    assert f"; restore a copy, or move {journal} away to start with an empty" in error


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["--scheduler", "tcp://127.0.0.1:1", "--gpus", "0"], "--gpus 0: a node has at least one"),
        (["--scheduler", "nowhere", "--gpus", "1"], "write it as tcp://host:port"),
        (["--scheduler", "tcp://10.0.0.1:1", "--gpus", "1"], "need keys"),
    ],
)
def test_a_mistake_is_one_line(
    words: list[str], error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["scheduler", "agent", *words]) == 2
    assert error in capsys.readouterr().err.splitlines()[-1]


def test_ray_that_is_not_installed_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "scheduler.toml"
    path.touch()
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "rollmesh.scheduler.nodes.ray", raising=False)
    assert main(["scheduler", "ray", str(path)]) == 2
    assert "scheduler ray needs Ray: pip install '.[ray]'" in capsys.readouterr().err


def test_a_fleet_for_ray_needs_a_fixed_port(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "scheduler.toml"
    path.write_text('bind = "tcp://127.0.0.1:0"')
    assert main(["scheduler", "ray", str(path)]) == 2
    assert "use a fixed port" in capsys.readouterr().err
