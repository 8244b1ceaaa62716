"""A restarted engine starts with the newest published weights."""

from pathlib import Path

import pytest

from rollmesh.cli.processes import with_newest
from rollmesh.core.model_folders import MODEL_FILES

UNTRAINED = ["--model-dir", "the/model", "--weight-version", "0"]


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    for number in (7, 8):
        folder = tmp_path / f"v{number:06d}"
        folder.mkdir()
        for name in (*MODEL_FILES, "model.safetensors"):
            (folder / name).write_text("")
    return tmp_path


def test_an_engine_starts_with_the_newest_published_weights(weights: Path) -> None:
    words = with_newest([*UNTRAINED, "--newest-of", str(weights), "--num-threads", "1"])
    newest = ["--model-dir", str(weights / "v000008"), "--weight-version", "8"]
    assert words == [*UNTRAINED, "--num-threads", "1", *newest]


def test_an_engine_starts_untrained_where_nothing_was_published(tmp_path: Path) -> None:
    assert with_newest([*UNTRAINED, "--newest-of", str(tmp_path / "weights")]) == UNTRAINED
    assert with_newest(UNTRAINED) == UNTRAINED
