"""A tiny model, and a Slurm cluster of five nodes, of which a test loses two."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from rollmesh.envs.guess import GuessEnv
from rollmesh.trainer.models.tiny import TinyShape, texts_of, write_tiny_model
from tests.slurm.cluster import SlurmCluster, why_not


@pytest.fixture(scope="session")
def cluster() -> Iterator[SlurmCluster]:
    if why := why_not():
        pytest.skip(why)
    with SlurmCluster(num_nodes=5, num_gpus=4) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with random weights."""
    folder = tmp_path_factory.mktemp("model") / "tiny"
    write_tiny_model(folder, texts_of(GuessEnv()), TinyShape(), seed=0)
    return folder
