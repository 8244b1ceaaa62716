"""The demo's settings are settings, and its model stands in its own folder."""

from rollmesh.cli.demo import SETTINGS, with_model
from rollmesh.core.config import load_config


def test_the_demo_keeps_to_the_settings_that_exist() -> None:
    config = load_config(None, [], SETTINGS)
    assert (config.env, config.run.name) == ("guess", "demo")


def test_the_model_moves_with_the_run() -> None:
    config = with_model(load_config(None, ["run.folder=elsewhere"], SETTINGS))
    assert config.model.path == "elsewhere/demo/model"
