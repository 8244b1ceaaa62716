"""kill -9 while a version's weights are written: the older version is intact, nothing else is
left.
"""

import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from rollmesh.envs.guess import GuessEnv
from rollmesh.tensors.segment import SHARED_MEMORY, sweep
from rollmesh.trainer.models.folders import load_model
from rollmesh.trainer.models.tiny import TinyShape, texts_of, write_tiny_model
from rollmesh.trainer.weights.folder import BackgroundLoop, WeightVersions


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["writing", "written"])
def test_a_writer_that_is_killed_leaves_the_older_version_and_no_newer(
    stage: str, tmp_path: Path
) -> None:
    model, versions = tmp_path / "model", tmp_path / "weights"
    write_tiny_model(model, texts_of(GuessEnv()), TinyShape(), seed=0)
    argv = [sys.executable, "-m", "tests.flow.weights_writer", str(model), str(versions), stage]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout
        laid = Path(writer.stdout.readline().strip())
        writer.kill()
    assert {path.name for path in versions.iterdir()} == {"v000001", "v000002.part"}
    background = BackgroundLoop("publisher")
    WeightVersions(versions, background)
    background.close()
    assert [path.name for path in versions.iterdir()] == ["v000001"]
    again = AutoModelForCausalLM.from_pretrained(versions / "v000001")
    for one, other in zip(again.parameters(), load_model(model).parameters(), strict=True):
        assert one.equal(other)
    sweep(SHARED_MEMORY)  # as any launch or orphan reaper does
    assert not laid.exists()
