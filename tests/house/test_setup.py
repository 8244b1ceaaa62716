"""Setup chooses the interpreter, and reports what is missing in one line."""

import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.house.source import ROOT

OLD = '#!/bin/sh\n[ "$1" = --version ] && echo Python 3.9.2 && exit\nexit 1\n'
NO_VENV = '#!/bin/sh\ncase "$2" in *ensurepip*) exit 1;; esac\n'


def make_venv(folder: Path, **pythons: str) -> subprocess.CompletedProcess[str]:
    """Run .ci/venv where the only interpreters are the given scripts."""
    tools = folder / "bin"
    tools.mkdir()
    for name in ("sh", "head", "rm"):
        found = shutil.which(name)
        assert found is not None
        (tools / name).symlink_to(found)
    for name, script in pythons.items():
        (tools / name).write_text(script)
        (tools / name).chmod(0o755)
    return subprocess.run(
        ["sh", str(ROOT / ".ci/venv"), str(folder / "venv")],
        env={"PATH": str(tools)},
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize(
    ("pythons", "line"),
    [
        ({}, "needs Python 3.11 or later; found none."),
        ({"python3": OLD}, "needs Python 3.11 or later; found Python 3.9.2 (python3)."),
        ({"python3": NO_VENV}, "python3 lacks the venv module"),
    ],
)
def test_a_missing_requirement_is_reported_in_one_line(
    tmp_path: Path, pythons: dict[str, str], line: str
) -> None:
    answer = make_venv(tmp_path, **pythons)
    assert answer.returncode == 2
    assert answer.stderr.startswith(f"rollmesh: {line}")
    assert answer.stderr.count("\n") == 1


def test_a_later_interpreter_is_taken_where_the_first_is_too_old(tmp_path: Path) -> None:
    maker = f'#!/bin/sh\n[ "$1" = -m ] && echo made > "{tmp_path}/made" || exit 0\n'
    answer = make_venv(tmp_path, python3=OLD, **{"python3.12": maker})
    assert answer.returncode == 0, answer.stderr
    assert (tmp_path / "made").exists()


def test_every_dependency_is_pinned_within_its_bounds() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    groups = project["dependency-groups"]
    asked = [*project["project"]["dependencies"], *groups["dev"], *groups["docs"]]
    for extra in ("train", "ray"):
        asked += project["project"]["optional-dependencies"][extra]
    lines = (ROOT / "constraints.txt").read_text("ascii").splitlines()
    pins = [Requirement(line) for line in lines if line and not line.startswith("#")]
    pinned = {canonicalize_name(pin.name): next(iter(pin.specifier)) for pin in pins}
    assert pinned[canonicalize_name("torch")].version == "2.13.0"
    for requirement in map(Requirement, asked):
        pin = pinned[canonicalize_name(requirement.name)]
        assert pin.operator == "=="
        assert requirement.specifier.contains(pin.version), requirement
