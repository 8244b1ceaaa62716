"""Training from a checkpoint continues exactly, on any number of ranks."""

import itertools
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from rollmesh.core.errors import CallFailed, CheckpointError
from rollmesh.envs.guess import GuessEnv
from rollmesh.tensors.segment import SHARED_MEMORY
from rollmesh.trainer.checkpoints.recovery_plan import LoopState
from rollmesh.trainer.checkpoints.store import Checkpointable, CheckpointStore, SavedCheckpoint
from rollmesh.trainer.models.tiny import TinyShape, texts_of, write_tiny_model
from rollmesh.trainer.policy import Policy
from rollmesh.trainer.ranked import RankedPolicy
from tests.flow.checkpoint_run import figures_of
from tests.flow.checkpoint_victims import EARLIER, LATER, Row
from tests.flow.test_ranked import SETTINGS, batch
from tests.house.source import ROOT

pytestmark = pytest.mark.slow

FIRST, ALL = 2, 4
"""Steps before the checkpoint, and in all."""
NUM_RANKS = 3
"""A number that divides the rows of no weight."""
ALIKE = 1e-6
"""Bound between different numbers of ranks, which sum in another order; these steps were within
6e-8 by weight.
"""

numbers = itertools.count()


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("savepoints") / "model"
    write_tiny_model(folder, texts_of(GuessEnv()), TinyShape(), seed=0)
    return folder


def weights_in(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "model.safetensors")


def furthest(some: dict[str, Tensor], others: dict[str, Tensor]) -> float:
    assert some.keys() == others.keys()
    return max(float((some[name] - others[name]).abs().max()) for name in some)


def wait_until_written(policy: RankedPolicy) -> None:
    """Wait until the snapshot is written or has failed."""
    while not policy.is_snapshot_written():
        pass


def save(run: Path, subject: Checkpointable) -> SavedCheckpoint:
    store = CheckpointStore(run)
    assert store.begin(LoopState(num_steps=FIRST), subject)
    saved = store.settled(60.0)
    assert saved is not None
    return saved


@pytest.fixture(scope="module")
def three(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankedPolicy]:
    """A policy on three ranks, in the state where the last test left it."""
    settings = msgspec.structs.replace(SETTINGS, num_ranks=NUM_RANKS)
    folder = tmp_path_factory.mktemp("three")
    with RankedPolicy(str(model_folder), settings, folder) as policy:
        train(policy, 0)
        yield policy


def train(policy: RankedPolicy, step: int) -> None:
    """Train on the batch of `step`, with a new group id."""
    number = next(numbers)
    policy.step(batch(step), number)
    policy.end_step(number)


def go_on(policy: RankedPolicy, folder: Path) -> dict[str, Tensor]:
    """Train from FIRST to ALL steps; return the weights."""
    for step in range(FIRST, ALL):
        train(policy, step)
    policy.save(folder)
    return weights_in(folder)


def test_new_process_continues_bit_by_bit(model_folder: Path, tmp_path: Path) -> None:
    policy = Policy(str(model_folder), SETTINGS)
    figures_of(policy, 0, FIRST)
    save(tmp_path, policy)
    expected = figures_of(policy, FIRST, ALL)
    policy.save(tmp_path / "straight")
    args = [str(tmp_path), str(model_folder), str(ALL), str(tmp_path / "resumed")]
    output = subprocess.run(
        [sys.executable, "-m", "tests.flow.checkpoint_run", *args],
        cwd=ROOT,
        check=True,
        capture_output=True,
    ).stdout
    assert msgspec.json.decode(output) == msgspec.to_builtins(expected, str_keys=True)
    assert furthest(weights_in(tmp_path / "resumed"), weights_in(tmp_path / "straight")) == 0.0


def test_kill_9_at_any_stage_leaves_the_checkpoint_before_or_after() -> None:
    with tempfile.TemporaryDirectory(
        dir=SHARED_MEMORY
    ) as folder:  # a memory folder, where a sync is free
        output = subprocess.run(
            [sys.executable, "-m", "tests.flow.checkpoint_victims", folder],
            cwd=ROOT,
            check=True,
            stdout=subprocess.PIPE,
        ).stdout
    rows = [msgspec.json.decode(line, type=Row) for line in output.splitlines()]
    assert [row for row in rows if row.fault or not row.was_killed] == []
    steps = [row.found_step for row in rows]
    assert steps == sorted(steps), "once it is sealed, it is the newest for good"
    assert steps.count(EARLIER) > 15
    assert steps.count(LATER) > 5


def test_ranks_continue_bit_by_bit_and_a_single_rank_within_rounding(
    three: RankedPolicy, model_folder: Path, tmp_path: Path
) -> None:
    saved = save(tmp_path, three)
    probe = three.probe()
    straight = go_on(three, tmp_path / "straight")
    assert three.probe() != probe, "now the ranks have the weights of their last layers gathered"
    CheckpointStore(tmp_path).restore(saved, three)
    assert three.probe() == probe
    assert furthest(go_on(three, tmp_path / "again"), straight) == 0.0
    alone = Policy(str(model_folder), SETTINGS)
    CheckpointStore(tmp_path).restore(saved, alone)
    figures_of(alone, FIRST, ALL)
    alone.save(tmp_path / "alone")
    assert 0.0 < furthest(weights_in(tmp_path / "alone"), straight) <= ALIKE


def test_ranks_continue_from_a_single_ranks_checkpoint(
    three: RankedPolicy, model_folder: Path, tmp_path: Path
) -> None:
    alone = Policy(str(model_folder), SETTINGS)
    figures_of(alone, 0, FIRST)
    saved = save(tmp_path, alone)
    figures_of(alone, FIRST, ALL)
    alone.save(tmp_path / "straight")
    CheckpointStore(tmp_path).restore(saved, three)
    resumed = go_on(three, tmp_path / "resumed")
    assert 0.0 < furthest(resumed, weights_in(tmp_path / "straight")) <= ALIKE


def test_ranks_write_a_model_folder_without_gathering(three: RankedPolicy, tmp_path: Path) -> None:
    three.save(tmp_path / "gathered")
    save(tmp_path, three)
    written = weights_in(tmp_path / "checkpoint")
    assert furthest(written, weights_in(tmp_path / "gathered")) == 0.0
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint")
    assert model.num_parameters() == sum(each.numel() for each in written.values())


def test_rank_that_cannot_write_is_named_and_training_continues(
    three: RankedPolicy, tmp_path: Path
) -> None:
    broken = tmp_path / "broken"
    (broken / "random-1.safetensors").mkdir(parents=True)
    three.snapshot(broken)
    with pytest.raises(CallFailed, match=r"random-1\.safetensors: Is a directory"):
        wait_until_written(three)
    train(three, ALL)
    assert save(tmp_path, three).state.num_steps == FIRST


def test_checkpoint_of_another_model_is_a_one_line_error_with_the_remedy(
    three: RankedPolicy, tmp_path: Path
) -> None:
    shape = TinyShape(width=32)
    write_tiny_model(tmp_path / "small", texts_of(GuessEnv()), shape, seed=0)
    saved = save(tmp_path, Policy(str(tmp_path / "small"), SETTINGS))
    with pytest.raises(CheckpointError, match=r"written by another model: .* restore model\.path"):
        CheckpointStore(tmp_path).restore(saved, three)
