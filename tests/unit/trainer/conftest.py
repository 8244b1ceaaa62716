"""One tiny model folder for the whole session."""

from pathlib import Path

import pytest

from rollmesh.envs.guess import GuessEnv
from rollmesh.trainer.tiny import TinyShape, write_tiny_model
from rollmesh.trainer.warmstart import texts_of


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with random weights and the game's tokenizer."""
    folder = tmp_path_factory.mktemp("tiny") / "model"
    write_tiny_model(folder, texts_of(GuessEnv()), TinyShape(), seed=0)
    return folder
