"""What one rank holds of each tensor, and reads of what others wrote."""

import math
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from rollmesh.core.errors import SavepointError
from rollmesh.trainer.controller.rendezvous import RankContext
from rollmesh.trainer.ranks import ShardedRanks, SingleRank
from rollmesh.trainer.savepoints.slots import Slot, read_rows, slots_of


def test_what_is_no_shard_is_the_first_ranks_to_write() -> None:
    tensor = torch.arange(6.0).view(2, 3)
    [slot] = slots_of([("a", tensor)], SingleRank())
    assert slot.is_ours
    assert slot.first_row == 0
    assert slot.rows.data_ptr() == tensor.data_ptr(), "the very rows that train"
    second = SingleRank()
    second.is_first = False
    assert [each.is_ours for each in slots_of([("a", tensor)], second)] == [False]


def test_a_shard_is_this_ranks_own(place: RankContext) -> None:
    tensor = torch.arange(6.0).view(3, 2)
    shard = DTensor.from_local(tensor, place.mesh["data"], [Shard(0)])
    [slot] = slots_of([("a", shard)], ShardedRanks(place.mesh["data"]))
    assert slot.is_ours
    assert slot.whole.shape == (3, 2)
    assert slot.rows.data_ptr() == tensor.data_ptr()


def test_what_is_split_in_another_way_is_not_written_wrongly(place: RankContext) -> None:
    odd = DTensor.from_local(torch.zeros(2, 2), place.mesh["data"], [Replicate()])
    with pytest.raises(AssertionError, match="a is not split by rows"):
        slots_of([("a", odd)], ShardedRanks(place.mesh["data"]))


@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=3).map(tuple),
    st.integers(1, 5),
)
def test_ranks_of_any_number_read_their_rows(
    tmp_path_factory: pytest.TempPathFactory, shape: tuple[int, ...], num_ranks: int
) -> None:
    folder = tmp_path_factory.mktemp("rows")
    tensor = torch.rand(shape)
    save_file({"a": tensor, "scalar": torch.tensor(7)}, folder / "it.safetensors")
    share = math.ceil(shape[0] / num_ranks)
    chunks = []
    for rank in range(num_ranks):
        first = min(rank * share, shape[0])
        rows = torch.full((min(share, shape[0] - first), *shape[1:]), -1.0)
        scalar = torch.tensor(-1)
        slots = slots_of([("a", tensor), ("scalar", scalar)], SingleRank())
        slots[0] = slots[0]._replace(rows=rows, first_row=first)
        read_rows(folder, slots)
        assert scalar == 7
        chunks.append(rows)
    assert torch.cat(chunks).equal(tensor)


@pytest.mark.parametrize(
    ("here", "told"),
    [
        ({"a": torch.zeros(2, 3)}, r"a is F32 \[2, 2\] there and F32 \[2, 3\] here"),
        ({"a": torch.zeros(2, 2).half()}, r"a is F32 \[2, 2\] there and F16 \[2, 2\] here"),
        ({"b": torch.zeros(2, 2)}, r"a is F32 \[2, 2\] there and absent here"),
        ({"a": torch.zeros(2, 2), "b": torch.zeros(1)}, r"b is absent there and F32 \[1\] here"),
    ],
)
def test_another_model_is_refused_before_anything_changes(
    tmp_path: Path, here: dict[str, Tensor], told: str
) -> None:
    save_file({"a": torch.ones(2, 2)}, tmp_path / "it.safetensors")
    slots: list[Slot] = slots_of(here.items(), SingleRank())
    with pytest.raises(SavepointError, match=told):
        read_rows(tmp_path, slots)
    assert not any(each.any() for each in here.values())


def test_a_file_that_is_none_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "it.safetensors").write_bytes(b"junk")
    with pytest.raises(SavepointError, match=r"it\.safetensors: ") as caught:
        read_rows(tmp_path, [])
    assert "\n" not in str(caught.value)
