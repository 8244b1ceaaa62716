"""Weights are laid where another process finds them, byte for byte, and laid there again."""

from pathlib import Path

import pytest
import torch
from structlog.testing import capture_logs

from rollmesh.engine.in_memory import Part
from rollmesh.tensors.segment import SHARED_MEMORY, Attached
from rollmesh.trainer.weights.carriers.hold import ALIGNMENT, Hold
from tests.unit.trainer.weights.carriers.weights import random_weights, read


def test_every_kind_of_tensor_is_found_as_it_was(tmp_path: Path) -> None:
    weights = random_weights(seed=0)
    hold = Hold()
    part = hold.lay(weights, set(weights), tmp_path)
    assert {name: tensor.dtype for name, tensor in weights.items()} == {
        name: tensor.dtype for name, tensor in read(part).items()
    }
    for name, tensor in read(part).items():
        assert torch.equal(tensor, weights[name]), name
    assert all(piece.offset % ALIGNMENT == 0 for piece in part.pieces)
    assert not list(tmp_path.iterdir())
    hold.close()


def test_a_transposed_tensor_is_laid_in_its_own_order(tmp_path: Path) -> None:
    weights = {"w": torch.arange(6.0).view(2, 3).t()}
    hold = Hold()
    part = hold.lay(weights, {"w"}, tmp_path)
    assert torch.equal(read(part)["w"], weights["w"])
    hold.close()


def test_the_next_version_lies_in_the_same_memory(tmp_path: Path) -> None:
    hold = Hold()
    first = hold.lay(random_weights(seed=0), {"matrix"}, tmp_path)
    newer = random_weights(seed=1)
    second = hold.lay(newer, {"matrix"}, tmp_path)
    assert second == first
    assert torch.equal(read(second)["matrix"], newer["matrix"])
    hold.close()


def test_a_rank_lays_its_own_and_no_more(tmp_path: Path) -> None:
    hold = Hold()
    part = hold.lay(random_weights(seed=0), {"vector", "scalar"}, tmp_path)
    assert [piece.name for piece in part.pieces] == ["vector", "scalar"]
    hold.close()


def test_what_is_closed_has_no_name_any_more_and_lives_as_long_as_somebody_looks(
    tmp_path: Path,
) -> None:
    weights = random_weights(seed=0)
    hold = Hold()
    part = hold.lay(weights, set(weights), tmp_path)
    seen = Attached(part.path)
    hold.close()
    assert not Path(part.path).exists()
    assert Part(part.path, part.pieces) == part
    [vector] = [piece for piece in part.pieces if piece.name == "vector"]
    data = seen.view(vector.offset, vector.num_bytes)
    assert data.tobytes() == weights["vector"].numpy().tobytes()


def test_where_shared_memory_is_too_small_it_lies_beside_the_versions_and_that_is_said(
    tmp_path: Path,
) -> None:
    weights = random_weights(seed=0)
    hold = Hold(shared=tmp_path / "absent")
    with capture_logs() as told:
        part = hold.lay(weights, set(weights), tmp_path / "weights")
    assert Path(part.path).parent == tmp_path / "weights"
    assert torch.equal(read(part)["matrix"], weights["matrix"])
    [event] = [each for each in told if each["event"] == "weights.beside_memory"]
    assert event["folder"] == str(tmp_path / "absent")
    hold.close()
    assert not list((tmp_path / "weights").iterdir())


@pytest.mark.parametrize("folder", [SHARED_MEMORY])
def test_nothing_is_left_in_shared_memory(folder: Path, tmp_path: Path) -> None:
    before = set(folder.glob("rollmesh-*"))
    hold = Hold()
    hold.lay(random_weights(seed=0), {"matrix"}, tmp_path)
    assert set(folder.glob("rollmesh-*")) - before
    hold.close()
    assert set(folder.glob("rollmesh-*")) <= before
