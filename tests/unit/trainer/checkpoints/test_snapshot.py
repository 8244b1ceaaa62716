"""One rank's part of a checkpoint is of one moment, complete, and restored bit by bit.

Together the ranks write the files that one rank would write.
"""

import math
import random
import tempfile
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from rollmesh.core.errors import CheckpointError
from rollmesh.tensors.segment import SHARED_MEMORY
from rollmesh.trainer.algorithms.optimizer import ModelOptimizer
from rollmesh.trainer.checkpoints.manifest import record_pieces, seal, verify, write_pieces
from rollmesh.trainer.checkpoints.snapshot import (
    ALIGN,
    HostBuffer,
    RankSnapshot,
    TensorRows,
    read_rows,
    restore_rng_state,
    rng_state,
    rows_of_rank,
)
from rollmesh.trainer.controller.rendezvous import RankContext
from rollmesh.trainer.models.folders import TensorSpec
from rollmesh.trainer.ranks import ShardedRanks, SingleRank
from tests.disks import full_disk
from tests.unit.trainer.checkpoints.trained import (
    SETTINGS,
    Small,
    Trained,
    same,
    wait_until_written,
    write,
)


def test_restored_state_trains_identically(tmp_path: Path) -> None:
    one, other = Trained(seed=1), Trained(seed=2)
    one.train(3)
    folder = write(one, tmp_path / "it")
    one.train(3)
    expected = one.values()
    other.train(1)
    other.restore(folder)
    assert not same(other.values(), expected)
    other.train(3)
    assert same(other.values(), expected)


def test_snapshot_before_the_first_step_can_be_restored(tmp_path: Path) -> None:
    one, other = Trained(seed=1), Trained(seed=2)
    folder = write(one, tmp_path / "it")
    one.train(2)
    other.train(1)
    other.restore(folder)
    other.train(2)
    assert same(other.values(), one.values())


def test_copy_is_of_the_moment_it_was_taken(tmp_path: Path) -> None:
    one, other = Trained(seed=1), Trained(seed=2)
    one.train()
    expected = one.values()
    may_write = threading.Event()
    (tmp_path / "it").mkdir()

    def wait(_: Path) -> None:
        may_write.wait(60.0)  # a failing test does not hang

    one.rank_snapshot.take(tmp_path / "it", wait)
    one.train(5)
    assert not one.is_snapshot_written()
    may_write.set()
    wait_until_written(one.rank_snapshot)
    other.restore(tmp_path / "it")
    assert same(other.values(), expected)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_gpu_continues_while_older_weights_are_written(tmp_path: Path) -> None:
    one, other = Trained(seed=1, device="cuda"), Trained(seed=2, device="cuda")
    one.train()
    expected = one.values()
    (tmp_path / "it").mkdir()
    one.snapshot(tmp_path / "it")
    one.train(5)
    wait_until_written(one.rank_snapshot)
    after = one.values()
    other.restore(tmp_path / "it")
    assert same(other.values(), expected)
    other.train(5)
    assert same(other.values(), after)


def test_moved_tensors_are_saved_from_their_new_place(tmp_path: Path) -> None:
    """A trainer on a shared fleet leaves its GPU between steps, so its tensors move."""
    one, other = Trained(seed=1), Trained(seed=2)
    write(one, tmp_path / "1")
    for each in one.model.parameters():
        each.data = each.data.clone()  # as Module.to does
    for moments in one.descent._optimizer.state.values():  # noqa: SLF001 - as ModelOptimizer.move does
        moments.update({name: each.clone() for name, each in moments.items()})
    one.train()
    expected = one.values()
    write(one, tmp_path / "2")
    other.restore(tmp_path / "2")
    assert same(other.values(), expected)


def test_host_memory_is_allocated_once_and_reused(tmp_path: Path) -> None:
    one, other = Trained(seed=1), Trained(seed=2)

    def memory() -> int:
        return one.rank_snapshot._host_buffer._memory.data_ptr()  # noqa: SLF001 - no public view of the memory

    write(one, tmp_path / "1")
    before = memory()
    one.train()
    expected = one.values()
    write(one, tmp_path / "2")
    assert memory() == before
    other.restore(tmp_path / "2")
    assert same(other.values(), expected)


def test_weights_that_do_not_train_are_not_kept(tmp_path: Path) -> None:
    def new(seed: int) -> tuple[Small, RankSnapshot]:
        model = Small(seed)
        model.first.requires_grad_(False)
        return model, RankSnapshot(model, ModelOptimizer(model, SETTINGS), SingleRank())

    (one, snapshot), (other, others) = new(1), new(2)
    (tmp_path / "it").mkdir()
    snapshot.take(tmp_path / "it")
    wait_until_written(snapshot)
    frozen = other.first.clone()
    others.restore(tmp_path / "it")
    assert other.last.equal(one.last)
    assert other.first.equal(frozen)
    assert not other.first.equal(one.first)


def test_another_model_is_refused(tmp_path: Path) -> None:
    folder = write(Trained(seed=1, width=3), tmp_path / "it")
    with pytest.raises(
        CheckpointError, match=r"model: written by another model: first is F32 \[3, 5\]"
    ):
        Trained(seed=1, width=4).restore(folder)


def test_every_byte_of_the_files_is_recorded(tmp_path: Path) -> None:
    folder = write(Trained(seed=1), tmp_path / "it")
    manifest = seal(folder)
    assert sorted(manifest.files) == [
        "model/model.safetensors",
        "optimizer/optimizer.safetensors",
        "random-0.safetensors",
    ]
    assert all(len(pieces) <= 3 for pieces in manifest.files.values()), "neighbours are one piece"
    weights = load_file(folder / "model/model.safetensors")
    assert weights.keys() == {"first", "scale", "last", "count"}, "as a model folder has them"


def test_disk_error_is_reported_once_and_the_next_snapshot_succeeds(tmp_path: Path) -> None:
    one = Trained(seed=1)
    with full_disk(1000), pytest.raises(CheckpointError, match="File too large"):
        write(one, tmp_path / "1")
    assert one.is_snapshot_written(), "there is nothing under way"
    seal(write(one, tmp_path / "2"))


def test_missing_folder_is_reported_and_not_recreated(tmp_path: Path) -> None:
    one = Trained(seed=1)
    one.snapshot(tmp_path / "absent")
    with pytest.raises(CheckpointError, match="absent"):
        wait_until_written(one.rank_snapshot)
    assert not (tmp_path / "absent").exists()


def test_rank_without_a_stored_state_keeps_its_generators(tmp_path: Path) -> None:
    one = Trained(seed=1)
    folder = write(one, tmp_path / "it")
    (folder / "random-0.safetensors").unlink()
    torch.manual_seed(5)
    one.restore(folder)
    assert torch.rand(1) == torch.rand(1, generator=torch.Generator().manual_seed(5))


def draw() -> list[float]:
    """Draw from each generator; normal numbers come in pairs, so one is left over."""
    ours = [random.random(), random.gauss(0, 1)]
    numpys = [float(np.random.random()), float(np.random.standard_normal())]
    return [*ours, *numpys, *torch.rand(3).tolist(), *torch.randn(3).tolist()]


@pytest.mark.parametrize("num_before", [0, 1, 2])
def test_all_generators_continue_with_the_same_numbers(num_before: int) -> None:
    for _ in range(num_before):
        draw()
    states = rng_state()
    expected = [draw() for _ in range(3)]
    assert [draw() for _ in range(3)] != expected
    restore_rng_state(states)
    assert [draw() for _ in range(3)] == expected


def test_reading_the_state_changes_nothing() -> None:
    states = rng_state()
    assert rng_state() == states
    expected = draw()
    restore_rng_state(states)
    rng_state()
    assert draw() == expected


def test_malformed_rng_state_is_refused_in_one_line() -> None:
    for data in (b"", b"junk" * 99, rng_state()[:-1]):
        with pytest.raises(
            CheckpointError, match="not a file of random generator states"
        ) as caught:
            restore_rng_state(data)
        assert "\n" not in str(caught.value)


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
def test_ranks_write_the_same_files_as_one_rank(
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
