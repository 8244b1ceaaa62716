"""Shared arguments make the settings that files and overrides say."""

from pathlib import Path

import pytest

from rollmesh.cli.options import add_room, add_set, add_view, config_of, parser
from rollmesh.core.errors import ConfigError


def test_overrides_lie_over_the_file_and_the_file_over_defaults(tmp_path: Path) -> None:
    path = tmp_path / "mesh.toml"
    path.write_text('[run]\nname = "filed"\nseed = 3\n')
    arguments = parser("router", "")
    add_room(arguments)
    options = arguments.parse_args(["--config", str(path), "--set", "run.seed=4"])
    config = config_of(options, {"run": {"name": "default", "folder": "elsewhere"}})
    assert (config.run.name, config.run.seed, config.run.folder) == ("filed", 4, "elsewhere")


def test_set_may_be_given_again() -> None:
    arguments = parser("up", "")
    add_set(arguments)
    options = arguments.parse_args(["--set", "run.seed=4", "--set", "run.name=x"])
    assert options.overrides == ["run.seed=4", "run.name=x"]


def test_the_view_is_live_unless_told_otherwise() -> None:
    arguments = parser("up", "")
    add_view(arguments)
    assert arguments.parse_args([]).is_live
    assert not arguments.parse_args(["--no-live"]).is_live


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("router.max_worker=3", "unknown key 'router.max_worker'"),
        ("trainer.num_steps=many", "trainer.num_steps"),
        ("run.seed", "write it as section.key=value"),
    ],
)
def test_a_wrong_override_is_named(override: str, line: str) -> None:
    arguments = parser("router", "")
    add_room(arguments)
    with pytest.raises(ConfigError, match=line.replace(".", r"\.")):
        config_of(arguments.parse_args(["--set", override]))
