"""One rank's part: of one moment, complete, and restored bit by bit."""

import random
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from rollmesh.core.errors import CheckpointError
from rollmesh.trainer.algorithms.optimizer import ModelOptimizer
from rollmesh.trainer.checkpoints.manifest import seal
from rollmesh.trainer.checkpoints.snapshot import RankSnapshot, restore_rng_state, rng_state
from rollmesh.trainer.ranks import SingleRank
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
def test_all_generators_draw_what_they_drew_next(num_before: int) -> None:
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
