"""`rollmesh doctor` in a folder with a model and a mesh.toml; and its checks, called here."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path

import pytest

from rollmesh.core.config import load_config
from rollmesh.core.process import OK, USAGE
from rollmesh.launch.doctor.findings import Finding, Level, MachinePlan, Part
from rollmesh.testing.model_folder import write_model_folder

SETTINGS = """
env = "guess"
[run]
folder = "{folder}/runs"
[model]
path = "{folder}/model"
max_context_tokens = 64
[journal]
max_bytes = 1048576
"""
ROOT = Path(__file__).parents[2]
UNSHARE = shutil.which("unshare") or ""
needs_mounts = pytest.mark.skipif(
    os.geteuid() != 0 or not UNSHARE, reason="only root can mount a small disk, by unshare"
)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / "mesh.toml").write_text(SETTINGS.format(folder=tmp_path))
    write_model_folder(tmp_path / "model")
    (tmp_path / "model/model.safetensors").write_bytes(head_of(1000) + bytes(2000))
    return tmp_path


def head_of(num_values: int) -> bytes:
    """The head of a safetensors file; the values are left out."""
    size = 2 * num_values
    head = {"w": {"dtype": "BF16", "shape": [num_values], "data_offsets": [0, size]}}
    text = json.dumps(head).encode()
    return len(text).to_bytes(8, "little") + text


class Report:
    """The output of the verb."""

    def __init__(self, code: int, lines: list[str]) -> None:
        self.code = code
        self.lines = lines

    def of(self, level: str, check: str) -> str:
        """The line of this level and check."""
        found = [each for each in self.lines if each.startswith(f"{level:<4} {check}")]
        assert found, "\n".join(self.lines)
        return found[0]

    @property
    def failures(self) -> list[str]:
        return [each for each in self.lines if each.startswith("FAIL")]


def doctor(home: Path, *more: str, before: tuple[str, ...] = (), **env: str) -> Report:
    argv = [*before, sys.executable, "-m", "rollmesh.cli.main", "doctor", "mesh.toml", *more]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", **env}
    done = subprocess.run(
        argv, cwd=home, env=environment, capture_output=True, text=True, check=False, timeout=300
    )
    report = Report(done.returncode, done.stdout.splitlines())
    assert done.returncode == (USAGE if report.failures else OK), done.stderr
    for line in report.lines:
        assert line.startswith(("ok   ", "warn ", "FAIL "))
        assert line.startswith("ok") or line.rpartition("; ")[2], line
    return report


def plan_of(home: Path, *overrides: str, parts: Collection[Part] = tuple(Part)) -> MachinePlan:
    """The settings of `home` with overrides, for checks that are called here."""
    config = load_config(home / "mesh.toml", [*overrides])
    return MachinePlan(config=config, parts=frozenset(parts))


def check_bad(finding: Finding, level: Level, *words: str) -> None:
    """Check the level and words of a finding, and that it has a remedy."""
    assert (finding.level, bool(finding.remedy)) == (level, True), finding.line
    for word in words:
        assert word in finding.line
