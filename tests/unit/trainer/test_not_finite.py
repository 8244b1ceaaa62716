"""Gradients that are not finite change nothing, and such weights are never written."""

import math
import threading
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from rollmesh.core.config import JournalConfig
from rollmesh.core.errors import NotFinite
from rollmesh.core.types import GroupRecord, Outcome, Task
from rollmesh.serve.client.samples import Sample
from rollmesh.testing.client import rollout
from rollmesh.trainer.algorithms.optimizer import MAX_SKIPPED
from rollmesh.trainer.controller.rendezvous import RankContext
from rollmesh.trainer.policy import Policy
from rollmesh.trainer.roles.models import LanguageModel
from tests.unit.trainer.exact import SETTINGS, pair, two_groups
from tests.unit.trainer.roles.rows import drawn
from tests.unit.trainer.trainer_incarnations import TrainerIncarnation, TrainerIncarnations

HUGE = 6e38
"""A reward whose advantage float32 holds, and whose gradient it does not."""
MEAN = msgspec.structs.replace(SETTINGS, advantage="mean")


def overflowing(folder: Path) -> list[Sample]:
    """A group whose gradient is not finite."""
    good, bad = pair(folder)
    return [msgspec.structs.replace(good, reward=HUGE), bad]


@pytest.fixture
def broken_folder(tiny_folder: Path, tmp_path: Path) -> Path:
    """A model with one weight that is NaN."""
    folder = tmp_path / "broken"
    folder.mkdir()
    for path in tiny_folder.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    weights = load_file(folder / "model.safetensors")
    next(iter(weights.values())).view(-1)[0] = math.nan
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_a_gradient_that_is_not_finite_changes_nothing_and_is_counted(tiny_folder: Path) -> None:
    policy = Policy(str(tiny_folder), MEAN)
    before = policy.probe()
    report = policy.step(overflowing(tiny_folder), 0)
    assert (report.num_skipped, report.num_skipped_in_row) == (1, 1)
    assert policy.probe() == before
    assert msgspec.json.decode(msgspec.json.encode(report.figures()))["grad_norm"] is None
    report = policy.step(pair(tiny_folder), 1)
    assert (report.num_skipped, report.num_skipped_in_row) == (0, 0)
    assert policy.probe() != before
    assert np.isfinite(policy.probe().logprobs).all()


def test_minibatches_beside_one_that_is_skipped_train(tiny_folder: Path) -> None:
    settings = msgspec.structs.replace(MEAN, num_minibatches=2)
    policy, samples = Policy(str(tiny_folder), settings), two_groups(tiny_folder)
    before = policy.probe()
    report = policy.step([*overflowing(tiny_folder), *samples[2:]], 0)
    assert (report.num_skipped, report.num_skipped_in_row) == (1, 0)
    assert math.isfinite(report.loss)
    assert math.isfinite(report.grad_norm)
    assert policy.probe() != before


@pytest.mark.parametrize("lora_rank", [0, 2])
def test_weights_that_are_not_finite_are_neither_published_nor_saved(
    broken_folder: Path, tmp_path: Path, lora_rank: int
) -> None:
    settings = msgspec.structs.replace(SETTINGS, lora_rank=lora_rank)
    policy, folder = Policy(str(broken_folder), settings), tmp_path / "written"
    for write in (
        lambda: policy.export(folder, 1),
        lambda: policy.save(folder),
        lambda: policy.snapshot(folder),
    ):
        with pytest.raises(NotFinite, match=r"written: not written.*NaN or infinity") as caught:
            write()
        assert "\n" not in str(caught.value)
    assert not folder.exists()
    policy.close()


def train(incarnation: TrainerIncarnation, num_groups: int) -> list[BaseException]:
    """Run the loop to its end on groups whose gradient is not finite; return the error."""
    ends: list[BaseException] = []

    def run() -> None:
        try:
            incarnation.loop.run(incarnation.recovery)
        except NotFinite as error:
            ends.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    for _ in range(num_groups):
        group_id, task = incarnation.receive_ask()
        rollouts = [rollout(at, Outcome.COMPLETED, (1,)) for at in range(2)]
        rollouts[0].reward, rollouts[1].reward = -1e30, 1e30
        record = GroupRecord(task=Task(id=task.id), rollouts=rollouts)
        incarnation.deliver(group_id, record, logprobs=(-60.0, -60.0))
    thread.join()
    return ends


def test_five_skipped_steps_in_a_row_end_the_run_in_one_line(begin: TrainerIncarnations) -> None:
    settings = {"advantage": "mean", "num_steps": 9, "max_staleness": 20}
    # A weight of e^20, times such a reward, is more than float32 holds.
    settings |= {"max_importance_weight": 1e9, "max_token_gap": 1e9}
    named = [f"trainer.{name}={value}" for name, value in settings.items()]
    incarnation = begin(JournalConfig(), "run.name=run", *named)
    [end] = train(incarnation, MAX_SKIPPED)
    assert MAX_SKIPPED == 5
    assert str(end).startswith("step 4: the loss or the gradient of the last 5 optimiser steps")
    assert [row["num_skipped"] for row in incarnation.rows("metrics.jsonl")] == [1] * 5
    assert incarnation.tally.summary()["num_skipped_steps"] == 5


@pytest.mark.parametrize("method", ["train_text", "train_policy", "train_preference"])
def test_a_role_skips_what_is_not_finite_and_ends_after_five(
    context: RankContext, tiny_folder: Path, method: str
) -> None:
    role = LanguageModel(context, str(tiny_folder), {"learning_rate": 1e-2})
    rows = [each | {"advantages": math.inf, "reference": math.nan} for each in drawn(1, 4, 4)]
    for each in rows:
        each["temperature"] = 1e-44 if method == "train_text" else 1.0
    before = role.logprobs(drawn(2, 4))
    for step in range(MAX_SKIPPED - 1):
        assert getattr(role, method)(rows, step)["num_skipped"] == 1.0
    with pytest.raises(NotFinite, match="of the last 5 optimiser steps was not finite"):
        getattr(role, method)(rows, MAX_SKIPPED - 1)
    assert all(map(torch.equal, role.logprobs(drawn(2, 4)), before))


def test_a_role_whose_weights_are_not_finite_is_not_saved(
    context: RankContext, broken_folder: Path, tmp_path: Path
) -> None:
    role = LanguageModel(context, str(broken_folder), {})
    for save in (role.save, role.snapshot):
        with pytest.raises(NotFinite):
            save(str(tmp_path / "saved"))
    assert not (tmp_path / "saved").exists()
