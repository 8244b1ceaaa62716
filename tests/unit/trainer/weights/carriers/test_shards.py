"""What is written is what stock safetensors reads, in shards of bounded size."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rollmesh.engine.in_memory import Part
from rollmesh.trainer.weights.carriers.hold import Hold
from rollmesh.trainer.weights.carriers.shards import write_shards
from tests.unit.trainer.weights.carriers.weights import random_weights

WEIGHTS = random_weights(seed=3)


@pytest.fixture
def parts(tmp_path: Path) -> Iterator[tuple[Part, Part]]:
    """Two ranks' shares."""
    holds = Hold(), Hold()
    of_first = {"matrix", "counts", "nothing"}
    shares = of_first, WEIGHTS.keys() - of_first
    first, second = (
        hold.lay(WEIGHTS, share, tmp_path) for hold, share in zip(holds, shares, strict=True)
    )
    yield first, second
    for hold in holds:
        hold.close()


def assert_are_ours(found: dict[str, torch.Tensor]) -> None:
    assert found.keys() == WEIGHTS.keys()
    for name, tensor in found.items():
        assert tensor.dtype == WEIGHTS[name].dtype
        assert torch.equal(tensor, WEIGHTS[name]), name


def test_what_fits_is_one_file(parts: tuple[Part, Part], tmp_path: Path) -> None:
    write_shards(tmp_path, parts)
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]
    assert_are_ours(load_file(tmp_path / "model.safetensors"))


@pytest.mark.parametrize("max_bytes", [1, 200, 960])
def test_what_does_not_fit_is_shards_that_an_index_names(
    parts: tuple[Part, Part], tmp_path: Path, max_bytes: int
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
