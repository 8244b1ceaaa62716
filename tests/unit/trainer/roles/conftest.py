"""A small model folder."""

from pathlib import Path

import pytest

from rollmesh.trainer.models.tiny import TinyShape, write_tiny_model

SHAPE = TinyShape(width=32, num_layers=1, mlp_width=64)


@pytest.fixture(scope="package")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("roles") / "model"
    write_tiny_model(folder, ["a"], SHAPE, seed=0)
    return folder
