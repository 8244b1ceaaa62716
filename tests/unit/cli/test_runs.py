"""A run is resumed with its own settings, except those that may change; the demo's are valid."""

from pathlib import Path
from typing import Any

import pytest

from rollmesh.cli.options import add_set, parser
from rollmesh.cli.runs import (
    FIXED,
    SETTINGS,
    add_go_on,
    add_resume,
    add_until_done,
    setting,
    settings_of,
    with_model,
)
from rollmesh.core.config import Config, load_config, write_config
from rollmesh.core.errors import ConfigError


def test_the_settings_of_the_demo_are_valid() -> None:
    config = load_config(None, [], SETTINGS)
    assert (config.env, config.run.name) == ("guess", "demo")


def test_the_model_moves_with_the_run() -> None:
    config = with_model(load_config(None, ["run.folder=elsewhere"], SETTINGS))
    assert config.model.path == "elsewhere/demo/model"


DEFAULTS: dict[str, Any] = {"env": "echo", "trainer": {"num_steps": 7}}


def settings(folder: Path, *words: str) -> Config:
    """The settings of a verb called with these arguments, beside `--set run.folder`."""
    arguments = parser("demo", "")
    arguments.set_defaults(config=None)
    add_resume(arguments)
    add_go_on(arguments)
    add_until_done(arguments)
    add_set(arguments)
    options = arguments.parse_args(["--set", f"run.folder={folder}", *words])
    return settings_of(options, DEFAULTS)


@pytest.fixture
def begun(tmp_path: Path) -> Path:
    """A folder with a run of 30 steps."""
    overrides = [f"run.folder={tmp_path}", "trainer.num_steps=30", "run.seed=5"]
    config = load_config(None, overrides, DEFAULTS)
    write_config(config, config.run_folder() / "config.json")
    return tmp_path


def test_without_resume_the_verbs_own_defaults_apply(begun: Path) -> None:
    assert settings(begun).trainer.num_steps == 7


def test_a_resumed_run_keeps_the_settings_that_it_began_with(begun: Path) -> None:
    config = settings(begun, "--resume")
    assert (config.trainer.num_steps, config.run.seed) == (30, 5)


def test_a_setting_of_the_command_line_overrides_the_runs(begun: Path) -> None:
    config = settings(begun, "--resume", "--set", "trainer.num_steps=60")
    assert (config.trainer.num_steps, config.run.seed) == (60, 5)


def test_a_moved_run_is_resumed_in_its_new_folder(begun: Path, tmp_path: Path) -> None:
    (begun / "mesh").rename(tmp_path / "later")
    config = settings(begun, "--resume", "--set", "run.name=later")
    assert config.run_folder() == tmp_path / "later"
    assert config.run.seed == 5


def test_go_on_resumes_an_unfinished_run_and_starts_one_otherwise(
    begun: Path, tmp_path: Path
) -> None:
    assert settings(begun, "--go-on").trainer.num_steps == 30
    (begun / "mesh" / "summary.json").write_text('{"ended": "stopped"}')
    assert settings(begun, "--go-on").trainer.num_steps == 7
    assert settings(tmp_path / "nowhere", "--go-on").trainer.num_steps == 7


def test_until_done_resumes_a_stopped_run_too(begun: Path, tmp_path: Path) -> None:
    (begun / "mesh" / "summary.json").write_text('{"ended": "stopped"}')
    assert settings(begun, "--until-done").trainer.num_steps == 30
    assert settings(tmp_path / "nowhere", "--until-done").trainer.num_steps == 7


def test_a_folder_without_a_run_cannot_be_resumed(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"mesh: no run to resume; name it by run\.folder"):
        settings(tmp_path, "--resume")


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("run.seed=6", "run.seed = 6: the run began with 5, which cannot change"),
        ("trainer.samples_per_group=8", "trainer.samples_per_group = 8: the run began with 16"),
        ("env=guess", 'env = "guess": the run began with "echo"'),
    ],
)
def test_a_fixed_setting_cannot_change_on_resume(begun: Path, override: str, line: str) -> None:
    with pytest.raises(ConfigError) as raised:
        settings(begun, "--resume", "--set", override)
    assert str(raised.value).startswith(line)
    assert settings(begun, "--set", override) != settings(begun)  # a new run may change it


@pytest.mark.parametrize("name", FIXED)
def test_each_fixed_name_is_a_setting(name: str) -> None:
    assert setting(Config(), name) is not None


def test_changed_settings_are_printed_in_one_line(
    begun: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    overrides = ["--set", "trainer.num_steps=60", "--set", "publish.mode=tensor"]
    settings(begun, "--resume", *overrides)
    changed = 'trainer.num_steps = 60 (was 30), publish.mode = "tensor" (was "disk")'
    assert capsys.readouterr().out == (
        f"resuming {begun / 'mesh'} with changed settings: {changed}\n"
    )
    settings(begun, "--resume")
    assert capsys.readouterr().out == ""
