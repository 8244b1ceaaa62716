"""A tiny model, and a Slurm cluster of three nodes."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.slurm.cluster import SlurmCluster, why_not


@pytest.fixture(scope="module")
def cluster() -> Iterator[SlurmCluster]:
    if why := why_not():
        pytest.skip(why)
    with SlurmCluster() as cluster:
        yield cluster


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with random weights."""
    folder = tmp_path_factory.mktemp("model") / "tiny"
    argv = [sys.executable, "-m", "rollmesh.cli.main", "make-model", str(folder), "--seed", "1"]
    subprocess.run(argv, check=True, capture_output=True)
    return folder
