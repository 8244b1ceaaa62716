"""One rank's part: of one moment, whole, and restored bit by bit."""

import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rollmesh.core.errors import SavepointError
from rollmesh.trainer.algorithms.optimizer import ModelOptimizer
from rollmesh.trainer.ranks import SingleRank
from rollmesh.trainer.savepoints.imprint import Imprint
from rollmesh.trainer.savepoints.manifest import seal
from tests.disks import full_disk
from tests.unit.trainer.savepoints.subjects import (
    SETTINGS,
    Small,
    Trained,
    same,
    wait_until_written,
    write,
)


def test_what_is_restored_trains_as_if_nothing_had_been(tmp_path: Path) -> None:
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


def test_before_the_first_step_there_is_something_to_restore_as_well(tmp_path: Path) -> None:
    one, other = Trained(seed=1), Trained(seed=2)
    folder = write(one, tmp_path / "it")
    one.train(2)
    other.train(1)
    other.restore(folder)
    other.train(2)
    assert same(other.values(), one.values())


def test_a_copy_is_of_the_moment_when_it_was_taken(tmp_path: Path) -> None:
    one, other = Trained(seed=1), Trained(seed=2)
    one.train()
    expected = one.values()
    may_write = threading.Event()
    (tmp_path / "it").mkdir()

    def wait(_: Path) -> None:
        may_write.wait(60.0)  # a test that fails does not hang

    one.imprint.take(tmp_path / "it", wait)
    one.train(5)
    assert not one.is_snapshot_written()
    may_write.set()
    wait_until_written(one.imprint)
    other.restore(tmp_path / "it")
    assert same(other.values(), expected)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_gpu_goes_on_with_other_weights_than_are_written(tmp_path: Path) -> None:
    one, other = Trained(seed=1, device="cuda"), Trained(seed=2, device="cuda")
    one.train()
    expected = one.values()
    (tmp_path / "it").mkdir()
    one.snapshot(tmp_path / "it")
    one.train(5)
    wait_until_written(one.imprint)
    after = one.values()
    other.restore(tmp_path / "it")
    assert same(other.values(), expected)
    other.train(5)
    assert same(other.values(), after)


def test_what_has_moved_is_saved_from_where_it_is(tmp_path: Path) -> None:
    """A trainer on a shared fleet leaves its GPU between steps: what it had is elsewhere then."""
    one, other = Trained(seed=1), Trained(seed=2)
    write(one, tmp_path / "1")
    for each in one.model.parameters():
        each.data = each.data.clone()  # as Module.to does it
    for moments in one.descent._optimizer.state.values():  # noqa: SLF001 - as Descent.move does
        moments.update({name: each.clone() for name, each in moments.items()})
    one.train()
    expected = one.values()
    write(one, tmp_path / "2")
    other.restore(tmp_path / "2")
    assert same(other.values(), expected)


def test_memory_is_taken_once_and_used_again(tmp_path: Path) -> None:
    one, other = Trained(seed=1), Trained(seed=2)

    def memory() -> int:
        return one.imprint._tray._memory.data_ptr()  # noqa: SLF001 - nothing else tells of it

    write(one, tmp_path / "1")
    before = memory()
    one.train()
    expected = one.values()
    write(one, tmp_path / "2")
    assert memory() == before
    other.restore(tmp_path / "2")
    assert same(other.values(), expected)


def test_weights_that_do_not_train_are_not_kept(tmp_path: Path) -> None:
    def new(seed: int) -> tuple[Small, Imprint]:
        model = Small(seed)
        model.first.requires_grad_(False)
        return model, Imprint(model, ModelOptimizer(model, SETTINGS), SingleRank())

    (one, imprint), (other, others) = new(1), new(2)
    (tmp_path / "it").mkdir()
    imprint.take(tmp_path / "it")
    wait_until_written(imprint)
    frozen = other.first.clone()
    others.restore(tmp_path / "it")
    assert other.last.equal(one.last)
    assert other.first.equal(frozen)
    assert not other.first.equal(one.first)


def test_another_model_is_refused(tmp_path: Path) -> None:
    folder = write(Trained(seed=1, width=3), tmp_path / "it")
    with pytest.raises(SavepointError, match=r"model: is of another model: first is F32 \[3, 5\]"):
        Trained(seed=1, width=4).restore(folder)


def test_every_byte_of_its_files_is_told_of(tmp_path: Path) -> None:
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


def test_a_disk_that_refuses_is_told_once_and_the_next_goes_well(tmp_path: Path) -> None:
    one = Trained(seed=1)
    with full_disk(1000), pytest.raises(SavepointError, match="File too large"):
        write(one, tmp_path / "1")
    assert one.is_snapshot_written(), "there is nothing under way"
    seal(write(one, tmp_path / "2"))


def test_a_folder_that_is_gone_is_told_and_not_made_again(tmp_path: Path) -> None:
    one = Trained(seed=1)
    one.snapshot(tmp_path / "absent")
    with pytest.raises(SavepointError, match="absent"):
        wait_until_written(one.imprint)
    assert not (tmp_path / "absent").exists()


def test_fewer_ranks_before_leave_this_ones_chance_alone(tmp_path: Path) -> None:
    one = Trained(seed=1)
    folder = write(one, tmp_path / "it")
    (folder / "random-0.safetensors").unlink()
    torch.manual_seed(5)
    one.restore(folder)
    assert torch.rand(1) == torch.rand(1, generator=torch.Generator().manual_seed(5))
