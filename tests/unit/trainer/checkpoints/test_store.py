"""Checkpoints are complete or absent, the newest intact one is found, and disk errors end
nothing."""

import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from rollmesh.core.config import TrainerConfig
from rollmesh.core.errors import CheckpointError
from rollmesh.trainer.checkpoints.recovery_plan import LoopState
from rollmesh.trainer.checkpoints.store import Checkpointable, CheckpointStore, SavedCheckpoint
from rollmesh.trainer.policy import Policy
from tests.disks import full_disk
from tests.unit.trainer.checkpoints.trained import Trained, same

STATE = LoopState(
    num_steps=7,
    policy_version=5,
    step_of_version={4: 6, 5: 7},
    num_tasks=130,
    ended={"r1": [(0, 7), (9, 12)], "r2": [(0, 1)]},
    staleness={"taken": 12},
    tally={"num_trained": 96, "outcomes": {"completed": 3}},
    offsets={"metrics.jsonl": 4711},
)


def at(num_steps: int) -> LoopState:
    return LoopState(num_steps=num_steps)


def save(store: CheckpointStore, state: LoopState, subject: Checkpointable) -> SavedCheckpoint:
    assert store.begin(state, subject)
    saved = store.settled(30.0)
    assert saved is not None
    assert not store.is_writing
    return saved


def names(folder: Path) -> list[str]:
    return sorted(each.name for each in (folder / "savepoints").iterdir())


def events_of(caplog: pytest.LogCaptureFixture, event: str) -> list[str]:
    return [each.message for each in caplog.records if event in each.message]


def test_loop_state_is_restored(tmp_path: Path) -> None:
    one, other = Trained(1), Trained(2)
    one.train(2)
    save(CheckpointStore(tmp_path), STATE, one)
    again = CheckpointStore(tmp_path)
    found = again.newest()
    assert found is not None
    assert again.restore(found, other) == STATE
    assert same(other.values(), one.values())


def test_a_folder_without_checkpoints_has_none(tmp_path: Path) -> None:
    assert CheckpointStore(tmp_path).newest() is None
    assert list(tmp_path.iterdir()) == []


class Slow(Trained):
    """A target whose snapshot is written only when the test allows it."""

    def __init__(self) -> None:
        super().__init__()
        self.may_write = threading.Event()

    def snapshot(self, folder: Path) -> None:
        self.rank_snapshot.take(folder, self._wait)

    def _wait(self, _: Path) -> None:
        self.may_write.wait(60.0)  # a failing test does not hang


def test_no_second_checkpoint_begins_while_one_is_written(tmp_path: Path) -> None:
    store, slow = CheckpointStore(tmp_path), Slow()
    assert store.begin(at(1), slow)
    assert not store.begin(at(2), slow)
    assert store.is_writing
    assert store.settled() is None
    assert store.settled(0.01) is None
    slow.may_write.set()
    saved = store.settled(30.0)
    assert saved is not None
    assert saved.state == at(1)
    assert store.begin(at(3), slow)
    assert store.settled(30.0) is not None


def test_newest_two_checkpoints_are_kept(tmp_path: Path) -> None:
    store, one = CheckpointStore(tmp_path), Trained()
    for number in range(4):
        save(store, at(number), one)
    assert names(tmp_path) == ["000003-step-2", "000004-step-3"]
    found = CheckpointStore(tmp_path).newest()
    assert found is not None
    assert found.state == at(3)


def damage_nothing_was_sealed(folder: Path) -> None:
    folder.rename(folder.with_suffix(".part"))


def damage_half_removed(folder: Path) -> None:
    folder.rename(folder.with_suffix(".gone"))


def damage_bit(folder: Path) -> None:
    path = folder / "model/model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def damage_cut(folder: Path) -> None:
    os.truncate(folder / "optimizer/optimizer.safetensors", 100)


def damage_manifest(folder: Path) -> None:
    (folder / "manifest.json").unlink()


@pytest.mark.parametrize(
    ("damage", "word"),
    [
        (damage_nothing_was_sealed, "checkpoint.cut_off"),
        (damage_half_removed, ""),
        (damage_bit, "model.safetensors: wrong checksum"),
        (damage_cut, "optimizer.safetensors: 100 bytes"),
        (damage_manifest, "incomplete: it has no manifest"),
    ],
)
def test_damaged_checkpoint_is_named_and_left_and_the_one_before_is_found(
    damage: Callable[[Path], None],
    word: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    one = Trained()
    store = CheckpointStore(tmp_path)
    for number in (1, 2):
        one.train()
        newest = save(store, at(number), one)
    damage(newest.folder)
    before = names(tmp_path)
    again = CheckpointStore(tmp_path)
    found = again.newest()
    assert found is not None
    assert found.state == at(1)
    assert len(events_of(caplog, word)) == 1 if word else True
    assert names(tmp_path) == before
    # A name is not reused, and a damaged checkpoint is no reason to remove an intact one.
    broken = [newest.folder.name] * newest.folder.exists()
    save(again, at(2), one)
    assert names(tmp_path) == ["000001-step-1", *broken, "000003-step-2"]
    save(again, at(3), one)
    assert names(tmp_path) == [*broken, "000003-step-2", "000004-step-3"]


def test_disk_error_is_one_line_and_the_next_checkpoint_is_tried(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store, one = CheckpointStore(tmp_path), Trained()
    save(store, at(1), one)
    with full_disk(300):
        assert store.begin(at(2), one)
        assert store.settled(30.0) is None
    assert not store.is_writing
    [line] = events_of(caplog, "checkpoint.failed")
    assert "File too large" in line
    while names(tmp_path) != ["000001-step-1"]:
        pass  # the failed one is removed in the background
    found = CheckpointStore(tmp_path).newest()
    assert found is not None
    assert found.state == at(1)
    save(store, at(3), one)
    assert names(tmp_path) == ["000001-step-1", "000003-step-3"]


def test_folder_that_cannot_be_created_is_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "savepoints").touch()
    store = CheckpointStore(tmp_path)
    assert store.begin(at(1), Trained())
    assert not store.is_writing
    assert len(events_of(caplog, "checkpoint.failed")) == 1
    with pytest.raises(CheckpointError, match="savepoints: Not a directory"):
        store.newest()


def test_checkpoint_is_renamed_only_after_it_is_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    acts: list[tuple[str, str]] = []
    fsync, rename = os.fsync, os.rename

    def seen_fsync(file: int) -> None:
        acts.append(("sync", os.readlink(f"/proc/self/fd/{file}").removeprefix(f"{tmp_path}/")))
        fsync(file)

    def seen_rename(self: Path, target: Path) -> Path:
        acts.append(("rename", str(self.relative_to(tmp_path))))
        rename(self, target)
        return target

    monkeypatch.setattr(os, "fsync", seen_fsync)
    monkeypatch.setattr(Path, "rename", seen_rename)
    saved = save(CheckpointStore(tmp_path), at(1), Trained())
    part = "savepoints/000001-step-1.part"
    at_rename = acts.index(("rename", part))
    files = [each for each in saved.folder.rglob("*") if each.name != "manifest.json"]
    own = [("sync", f"{part}/{each.relative_to(saved.folder)}") for each in files]
    at_manifest = acts.index(("sync", f"{part}/manifest.json"))
    assert {*own} <= {*acts[:at_rename]}
    assert {each for each in own if each[1].endswith((".json", "tensors"))} <= {*acts[:at_manifest]}
    assert at_manifest < acts.index(("sync", part)) < at_rename
    assert ("sync", "savepoints") in acts[at_rename:]


def test_model_folder_links_the_newest_checkpoint(tiny_folder: Path, tmp_path: Path) -> None:
    policy = Policy(str(tiny_folder), TrainerConfig())
    store = CheckpointStore(tmp_path)
    saved = [save(store, at(number), policy) for number in (1, 2, 3)][-1]
    assert saved.model is not None
    weights = tmp_path / "checkpoint/model.safetensors"
    assert weights.samefile(saved.model / "model.safetensors")
    shutil.rmtree(tmp_path / "savepoints")
    AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint")
    assert sorted(each.name for each in tmp_path.iterdir()) == ["checkpoint"]


def test_state_that_transformers_cannot_load_gets_no_model_folder(tmp_path: Path) -> None:
    saved = save(CheckpointStore(tmp_path), at(1), Trained())
    assert saved.model is None
    assert not (tmp_path / "checkpoint").exists()


def test_another_models_checkpoint_is_refused(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    saved = save(store, at(1), Trained(width=3))
    with pytest.raises(CheckpointError, match="written by another model"):
        store.restore(saved, Trained(width=4))
