"""The dispatcher finds verbs, reports mistakes in one line, and loads nothing heavy."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rollmesh.cli.main import VERBS, load, main


def test_help_lists_every_verb(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    assert all(f"\n  {name} " in out for name in VERBS)


def test_no_verb_is_a_mistake_that_shows_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "usage: rollmesh VERB" in capsys.readouterr().out


def test_an_unknown_verb_is_one_line_and_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["xyz"]) == 2
    captured = capsys.readouterr()
    assert captured.err == f"rollmesh: unknown verb 'xyz'; choose one of {', '.join(VERBS)}\n"


def test_a_mistyped_verb_is_answered_with_a_suggestion(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["statsu"]) == 2
    assert capsys.readouterr().err == "rollmesh: unknown verb 'statsu'; did you mean 'status'?\n"


@pytest.mark.parametrize("name", VERBS)
def test_every_verb_of_the_table_exists(name: str) -> None:
    assert callable(load(VERBS[name]))


def test_a_users_error_is_one_line_and_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "no/such/run"]) == 2
    assert capsys.readouterr().err.startswith("rollmesh: no/such/run: not a run folder")


def test_a_verb_whose_extra_is_not_installed_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.delitem(sys.modules, "rollmesh.trainer.models.tiny", raising=False)
    assert main(["make-model", str(tmp_path / "M")]) == 2
    printed = capsys.readouterr().err
    assert printed == "rollmesh: make-model needs torch: pip install '.[train]' in a checkout\n"


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("words", [["--help"], ["eval", "--help"]])
def test_a_closed_output_pipe_is_no_error(words: list[str], unbuffered: str) -> None:
    """Write into a closed pipe, as in `rollmesh --help | true`."""
    reading, writing = os.pipe()
    os.close(reading)
    ended = subprocess.run(
        [sys.executable, "-m", "rollmesh.cli.main", *words],
        stdout=writing,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
        check=False,
    )
    os.close(writing)
    assert (ended.returncode, ended.stderr) == (0, b"")
