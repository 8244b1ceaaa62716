"""Weights are stored byte for byte for other processes, and written as stock safetensors in
shards."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from structlog.testing import capture_logs

from rollmesh.engine.shared_memory import SharedSegment
from rollmesh.tensors.segment import SHARED_MEMORY, AttachedSegment
from rollmesh.trainer.weights.transfer import ALIGNMENT, WeightBuffer, write_shards
from tests.unit.trainer.weights.random_weights import random_weights, read


def test_every_kind_of_tensor_is_found_as_it_was(tmp_path: Path) -> None:
    weights = random_weights(seed=0)
    buffer = WeightBuffer()
    part = buffer.store(weights, set(weights), tmp_path)
    assert {name: tensor.dtype for name, tensor in weights.items()} == {
        name: tensor.dtype for name, tensor in read(part).items()
    }
    for name, tensor in read(part).items():
        assert torch.equal(tensor, weights[name]), name
    assert all(piece.offset % ALIGNMENT == 0 for piece in part.pieces)
    assert not list(tmp_path.iterdir())
    buffer.close()


def test_transposed_tensor_is_stored_in_its_logical_order(tmp_path: Path) -> None:
    weights = {"w": torch.arange(6.0).view(2, 3).t()}
    buffer = WeightBuffer()
    part = buffer.store(weights, {"w"}, tmp_path)
    assert torch.equal(read(part)["w"], weights["w"])
    buffer.close()


def test_next_version_reuses_the_memory(tmp_path: Path) -> None:
    buffer = WeightBuffer()
    first = buffer.store(random_weights(seed=0), {"matrix"}, tmp_path)
    newer = random_weights(seed=1)
    second = buffer.store(newer, {"matrix"}, tmp_path)
    assert second == first
    assert torch.equal(read(second)["matrix"], newer["matrix"])
    buffer.close()


def test_rank_stores_only_its_own_tensors(tmp_path: Path) -> None:
    buffer = WeightBuffer()
    part = buffer.store(random_weights(seed=0), {"vector", "scalar"}, tmp_path)
    assert [piece.name for piece in part.pieces] == ["vector", "scalar"]
    buffer.close()


def test_closed_buffer_is_unlinked_and_stays_mapped_for_its_readers(
    tmp_path: Path,
) -> None:
    weights = random_weights(seed=0)
    buffer = WeightBuffer()
    part = buffer.store(weights, set(weights), tmp_path)
    seen = AttachedSegment(part.path)
    buffer.close()
    assert not Path(part.path).exists()
    assert SharedSegment(part.path, part.pieces) == part
    [vector] = [piece for piece in part.pieces if piece.name == "vector"]
    data = seen.view(vector.offset, vector.num_bytes)
    assert data.tobytes() == weights["vector"].numpy().tobytes()


def test_too_small_shared_memory_falls_back_to_a_logged_file_beside_the_versions(
    tmp_path: Path,
) -> None:
    weights = random_weights(seed=0)
    buffer = WeightBuffer(shared=tmp_path / "absent")
    with capture_logs() as logs:
        part = buffer.store(weights, set(weights), tmp_path / "weights")
    assert Path(part.path).parent == tmp_path / "weights"
    assert torch.equal(read(part)["matrix"], weights["matrix"])
    [event] = [each for each in logs if each["event"] == "weights.beside_memory"]
    assert event["folder"] == str(tmp_path / "absent")
    buffer.close()
    assert not list((tmp_path / "weights").iterdir())


@pytest.mark.parametrize("folder", [SHARED_MEMORY])
def test_nothing_is_left_in_shared_memory(folder: Path, tmp_path: Path) -> None:
    before = set(folder.glob("rollmesh-*"))
    buffer = WeightBuffer()
    buffer.store(random_weights(seed=0), {"matrix"}, tmp_path)
    assert set(folder.glob("rollmesh-*")) - before
    buffer.close()
    assert set(folder.glob("rollmesh-*")) <= before


WEIGHTS = random_weights(seed=3)


@pytest.fixture
def parts(tmp_path: Path) -> Iterator[tuple[SharedSegment, SharedSegment]]:
    """Two ranks' shares."""
    buffers = WeightBuffer(), WeightBuffer()
    of_first = {"matrix", "counts", "nothing"}
    shares = of_first, WEIGHTS.keys() - of_first
    first, second = (
        buffer.store(WEIGHTS, share, tmp_path)
        for buffer, share in zip(buffers, shares, strict=True)
    )
    yield first, second
    for buffer in buffers:
        buffer.close()


def assert_are_ours(found: dict[str, torch.Tensor]) -> None:
    assert found.keys() == WEIGHTS.keys()
    for name, tensor in found.items():
        assert tensor.dtype == WEIGHTS[name].dtype
        assert torch.equal(tensor, WEIGHTS[name]), name


def test_small_weights_are_one_file(
    parts: tuple[SharedSegment, SharedSegment], tmp_path: Path
) -> None:
    write_shards(tmp_path, parts)
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]
    assert_are_ours(load_file(tmp_path / "model.safetensors"))


@pytest.mark.parametrize("max_bytes", [1, 200, 960])
def test_large_weights_are_shards_with_an_index(
    parts: tuple[SharedSegment, SharedSegment], tmp_path: Path, max_bytes: int
) -> None:
    write_shards(tmp_path, parts, max_bytes)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_bytes())
    found: dict[str, torch.Tensor] = {}
    for name in sorted(set(index["weight_map"].values())):
        shard = load_file(tmp_path / name)
        num_bytes = sum(tensor.nbytes for tensor in shard.values())
        assert num_bytes <= max_bytes or len(shard) == 1
        assert {index["weight_map"][each] for each in shard} == {name}
        found |= shard
    assert_are_ours(found)
    assert index["metadata"]["total_size"] == sum(each.nbytes for each in found.values())
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
