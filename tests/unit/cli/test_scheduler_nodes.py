"""What is wrong with a node is told before it joins."""

import sys
from pathlib import Path

import pytest

from rollmesh.cli.main import main


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--scheduler", "tcp://127.0.0.1:1", "--gpus", "0"], "--gpus 0: a node has one at least"),
        (["--scheduler", "nowhere", "--gpus", "1"], "write it as tcp://host:port"),
        (["--scheduler", "tcp://10.0.0.1:1", "--gpus", "1"], "lets in nobody without keys"),
    ],
)
def test_a_mistake_is_one_line(
    words: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["scheduler", "agent", *words]) == 2
    assert told in capsys.readouterr().err.splitlines()[-1]


def test_ray_that_is_not_installed_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "scheduler.toml"
    path.touch()
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "rollmesh.scheduler.nodes.ray", raising=False)
    assert main(["scheduler", "ray", str(path)]) == 2
    assert "scheduler ray needs Ray: pip install '.[ray]'" in capsys.readouterr().err


def test_a_fleet_without_a_port_is_no_fleet_for_ray(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "scheduler.toml"
    path.write_text('bind = "tcp://127.0.0.1:0"')
    assert main(["scheduler", "ray", str(path)]) == 2
    assert "name a port" in capsys.readouterr().err
