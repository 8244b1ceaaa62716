"""Shared arguments are merged with files and overrides into the settings."""

from pathlib import Path

import pytest

from rollmesh.cli.options import (
    add_process_options,
    add_set,
    add_share,
    add_view,
    config_of,
    parser,
    share_of,
)
from rollmesh.core.errors import ConfigError
from rollmesh.core.share import Share


def test_overrides_win_over_the_file_and_the_file_over_defaults(tmp_path: Path) -> None:
    path = tmp_path / "mesh.toml"
    path.write_text('[run]\nname = "filed"\nseed = 3\n')
    arguments = parser("router", "")
    add_process_options(arguments)
    options = arguments.parse_args(["--config", str(path), "--set", "run.seed=4"])
    config = config_of(options, {"run": {"name": "default", "folder": "elsewhere"}})
    assert (config.run.name, config.run.seed, config.run.folder) == ("filed", 4, "elsewhere")


def test_set_may_be_given_several_times() -> None:
    arguments = parser("up", "")
    add_set(arguments)
    options = arguments.parse_args(["--set", "run.seed=4", "--set", "run.name=x"])
    assert options.overrides == ["run.seed=4", "run.name=x"]


def test_the_view_is_live_by_default() -> None:
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
    add_process_options(arguments)
    with pytest.raises(ConfigError, match=line.replace(".", r"\.")):
        config_of(arguments.parse_args(["--set", override]))


def test_a_share_is_the_address_of_a_scheduler_and_a_pipeline_id() -> None:
    arguments = parser("up", "")
    add_share(arguments)
    words = ["--scheduler", "tcp://h:7070", "--pipeline", "math"]
    assert share_of(arguments.parse_args(words)) == Share("tcp://h:7070", "math")
    named = [*words, "--pipeline-token", "math.token"]
    assert share_of(arguments.parse_args(named)) == Share("tcp://h:7070", "math", "math.token")
    assert share_of(arguments.parse_args([])) is None


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--scheduler", "tcp://h:7070"], "--pipeline is missing"),
        (["--pipeline", "math"], "--scheduler is missing"),
        (["--scheduler", "h:7070", "--pipeline", "math"], "--scheduler h:7070: write it as tcp:"),
    ],
)
def test_half_a_share_is_refused_in_one_line(words: list[str], line: str) -> None:
    arguments = parser("up", "")
    add_share(arguments)
    with pytest.raises(ConfigError, match=line):
        share_of(arguments.parse_args(words))
