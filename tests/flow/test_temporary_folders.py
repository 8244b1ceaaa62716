"""Importing the trainer leaves no empty folder among the temporary files."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
@pytest.mark.parametrize("module", ["trainer.process", "trainer.models.tiny", "trainer.ranked"])
def test_importing_the_trainer_leaves_nothing_in_tmpdir(module: str, tmp_path: Path) -> None:
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    environment.pop("TORCHINDUCTOR_CACHE_DIR", None)
    argv = [sys.executable, "-c", f"import rollmesh.{module}"]
    subprocess.run(argv, env=environment, check=True)
    assert list(tmp_path.iterdir()) == []
