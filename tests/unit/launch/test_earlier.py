"""Engines that start in a run begin with the newest weights that it published."""

from pathlib import Path

import pytest

from rollmesh.core.config import Config, ModelConfig, RunConfig
from rollmesh.launch.earlier import Earlier, find_earlier

FILES = ("config.json", "tokenizer.json", "model.safetensors")


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return Config(
        run=RunConfig(name="demo", folder=str(tmp_path)), model=ModelConfig(path="the/model")
    )


def write(folder: Path, *names: str) -> Path:
    folder.mkdir(parents=True)
    for name in names:
        (folder / name).write_text("")
    return folder


def test_a_run_that_published_nothing_begins_with_its_model(config: Config) -> None:
    assert find_earlier(config) == Earlier(Path("the/model"), 0)


def test_the_newest_folder_that_is_a_whole_model_counts(config: Config) -> None:
    weights = config.run_folder() / "weights"
    write(weights / "v000009", *FILES)
    newest = write(weights / "v000010", *FILES)
    write(weights / "v000011", "adapter_config.json", "adapter_model.safetensors")
    write(weights / "v000012.part", *FILES)
    write(weights / "v000013", "config.json", "tokenizer.json")
    assert find_earlier(config) == Earlier(newest, 10)
