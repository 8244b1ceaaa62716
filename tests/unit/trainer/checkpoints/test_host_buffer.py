"""Ranks hold, write and read their own rows; together they write the files that one rank would
write."""

import math
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from rollmesh.core.errors import CheckpointError
from rollmesh.tensors.segment import SHARED_MEMORY
from rollmesh.trainer.checkpoints.manifest import record_pieces, seal, verify, write_pieces
from rollmesh.trainer.checkpoints.snapshot import (
    ALIGN,
    HostBuffer,
    TensorRows,
    read_rows,
    rows_of_rank,
)
from rollmesh.trainer.controller.rendezvous import RankContext
from rollmesh.trainer.models.folders import TensorSpec
from rollmesh.trainer.ranks import ShardedRanks, SingleRank

DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8, torch.bool]


@st.composite
def tensors(draw: st.DrawFn) -> dict[str, Tensor]:
    """Random tensors of any shape and type, by name."""
    shapes = draw(st.lists(st.lists(st.integers(0, 7), max_size=2), min_size=1, max_size=6))
    made = {}
    for number, shape in enumerate(shapes):
        dtype = draw(st.sampled_from(DTYPES))
        made[f"t{number}"] = torch.randint(0, 2, shape).to(dtype)
    return made


def slots_at(rank: int, num_ranks: int, whole: dict[str, Tensor]) -> list[TensorRows]:
    """The rows that a rank has; scalars belong to the first."""
    slots = []
    for name, tensor in whole.items():
        what = TensorSpec(name, tensor.dtype, tuple(tensor.shape))
        if not tensor.dim():
            slots.append(TensorRows(what, tensor, 0, rank == 0))
            continue
        share = math.ceil(len(tensor) / num_ranks)
        first = min(share * rank, len(tensor))
        slots.append(TensorRows(what, tensor[first : first + share], first, is_writer=True))
    return slots


@given(tensors(), tensors(), st.integers(1, 4))
def test_ranks_write_the_files_that_one_would(
    model: dict[str, Tensor], optimizer: dict[str, Tensor], num_ranks: int
) -> None:
    with tempfile.TemporaryDirectory(
        dir=SHARED_MEMORY
    ) as folder:  # a memory folder, where a sync is free
        check_that_ranks_write_one(Path(folder), model, optimizer, num_ranks)


def check_that_ranks_write_one(
    folder: Path, model: dict[str, Tensor], optimizer: dict[str, Tensor], num_ranks: int
) -> None:
    whole = {"model": model, "optimizer": optimizer}
    for name in whole:
        (folder / name).mkdir()
    for rank in reversed(range(num_ranks)):  # in any order
        own = {name: slots_at(rank, num_ranks, each) for name, each in whole.items()}
        buffer = HostBuffer(own, is_first=rank == 0)
        buffer.fill(own)
        parts = buffer.parts()
        assert all(len(each) <= 2 for each in parts.values()) or num_ranks > 1
        record_pieces(
            folder, str(rank), {path: write_pieces(folder / path, parts[path]) for path in parts}
        )
    seal(folder)
    verify(folder)
    for name, each in whole.items():
        found = load_file(folder / name / f"{name}.safetensors")
        assert found.keys() == each.keys()
        assert all(found[key].equal(each[key]) for key in each)
        assert all(found[key].dtype == each[key].dtype for key in each)


def test_buffer_is_as_large_as_the_rows_and_is_refilled() -> None:
    tensor = torch.zeros(1000)
    slots = {"model": slots_at(0, 1, {"t": tensor})}
    buffer = HostBuffer(slots, is_first=True)
    buffer.fill(slots)
    [head, (_, before)] = buffer.parts()["model/model.safetensors"]
    assert len(head[1]) < 200
    tensor += 1
    assert not any(before), "what trains goes on beside it"
    buffer.fill(slots)
    [_, (_, after)] = buffer.parts()["model/model.safetensors"]
    assert bytes(after) == tensor.numpy().tobytes()
    assert len(after) == tensor.nbytes <= buffer._memory.nbytes <= tensor.nbytes + ALIGN  # noqa: SLF001 - nothing else tells


def test_unsharded_tensor_is_written_by_the_first_rank() -> None:
    tensor = torch.arange(6.0).view(2, 3)
    [slot] = rows_of_rank([("a", tensor)], SingleRank())
    assert slot.is_writer
    assert slot.first_row == 0
    assert slot.rows.data_ptr() == tensor.data_ptr(), "the very rows that train"
    second = SingleRank()
    second.is_first = False
    assert [each.is_writer for each in rows_of_rank([("a", tensor)], second)] == [False]


def test_shard_is_written_by_its_own_rank(context: RankContext) -> None:
    tensor = torch.arange(6.0).view(3, 2)
    shard = DTensor.from_local(tensor, context.mesh["data"], [Shard(0)])
    [slot] = rows_of_rank([("a", shard)], ShardedRanks(context.mesh["data"]))
    assert slot.is_writer
    assert slot.whole.shape == (3, 2)
    assert slot.rows.data_ptr() == tensor.data_ptr()


def test_tensor_not_split_by_rows_is_refused(context: RankContext) -> None:
    odd = DTensor.from_local(torch.zeros(2, 2), context.mesh["data"], [Replicate()])
    with pytest.raises(AssertionError, match="a is not split by rows"):
        rows_of_rank([("a", odd)], ShardedRanks(context.mesh["data"]))


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
        slots = rows_of_rank([("a", tensor), ("scalar", scalar)], SingleRank())
        slots[0] = slots[0]._replace(rows=rows, first_row=first)
        read_rows(folder, slots)
        assert scalar == 7
        chunks.append(rows)
    assert torch.cat(chunks).equal(tensor)


@pytest.mark.parametrize(
    ("here", "error"),
    [
        ({"a": torch.zeros(2, 3)}, r"a is F32 \[2, 2\] there and F32 \[2, 3\] here"),
        ({"a": torch.zeros(2, 2).half()}, r"a is F32 \[2, 2\] there and F16 \[2, 2\] here"),
        ({"b": torch.zeros(2, 2)}, r"a is F32 \[2, 2\] there and absent here"),
        ({"a": torch.zeros(2, 2), "b": torch.zeros(1)}, r"b is absent there and F32 \[1\] here"),
    ],
)
def test_another_model_is_refused_before_anything_changes(
    tmp_path: Path, here: dict[str, Tensor], error: str
) -> None:
    save_file({"a": torch.ones(2, 2)}, tmp_path / "it.safetensors")
    slots: list[TensorRows] = rows_of_rank(here.items(), SingleRank())
    with pytest.raises(CheckpointError, match=error):
        read_rows(tmp_path, slots)
    assert not any(each.any() for each in here.values())


def test_file_that_is_not_safetensors_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "it.safetensors").write_bytes(b"junk")
    with pytest.raises(CheckpointError, match=r"it\.safetensors: ") as caught:
        read_rows(tmp_path, [])
    assert "\n" not in str(caught.value)
