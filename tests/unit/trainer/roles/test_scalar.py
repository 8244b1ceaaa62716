"""A critic or reward model: transformers' own numbers, and advantages that all ranks agree on."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification

from rollmesh.core.errors import ConfigError
from rollmesh.trainer.controller.rendezvous import RankContext
from rollmesh.trainer.roles.losses import gae
from rollmesh.trainer.roles.models import ScalarModel
from tests.unit.trainer.roles.rows import drawn

LENGTHS = (5, 12, 12, 7, 9, 4)
TRAINER = {"learning_rate": 1e-2}


@pytest.fixture(scope="module")
def scorer_folder(
    context: RankContext, folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A reward model that has learned something, as we save it."""
    saved = tmp_path_factory.mktemp("scorer") / "model"
    role = ScalarModel(context, str(folder), TRAINER)
    for step in range(3):
        role.train_rewards(drawn(step, *LENGTHS), step)
    role.save(str(saved))
    return saved


def head_one_by_one(folder: Path, rows: list[dict[str, Any]]) -> list[Tensor]:
    """[T] of each row, by stock transformers."""
    model = AutoModelForTokenClassification.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        return [model(each["token_ids"].long()[None]).logits[0, :, 0] for each in rows]


def told(rows: list[dict[str, Any]], **columns: list[Any]) -> list[dict[str, Any]]:
    """The rows with these columns."""
    return [
        {**each, **{name: column[at] for name, column in columns.items()}}
        for at, each in enumerate(rows)
    ]


def test_of_a_language_model_a_new_head_says_nothing_of_anything(
    context: RankContext, folder: Path
) -> None:
    role, rows = ScalarModel(context, str(folder)), drawn(1, *LENGTHS)
    assert role.rewards(rows) == [0.0] * 6
    assert [each.count_nonzero().item() for each in role.values(rows)] == [0] * 6


@pytest.mark.parametrize("max_tokens", [20, 4096])
def test_values_stand_before_each_trained_token_and_a_reward_at_the_last(
    context: RankContext, scorer_folder: Path, max_tokens: int
) -> None:
    rows = drawn(1, *LENGTHS)
    heads = head_one_by_one(scorer_folder, rows)
    role = ScalarModel(context, str(scorer_folder), {"microbatch_tokens": max_tokens})
    for row, head_T, values_N in zip(rows, heads, role.values(rows), strict=True):
        assert values_N.tolist() == pytest.approx(head_T[:-1][row["loss_mask"][1:]], abs=1e-5)
    assert role.rewards(rows) == pytest.approx([float(each[-1]) for each in heads], abs=1e-5)


def test_a_reward_model_of_sequence_classification_is_taken_as_it_is(
    context: RankContext, folder: Path, tmp_path: Path
) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = AutoModelForSequenceClassification.from_pretrained(
            folder, num_labels=1, dtype=torch.float32
        )
    model.save_pretrained(tmp_path)
    rows = drawn(1, *LENGTHS)
    with torch.no_grad():
        expected = [float(model(each["token_ids"].long()[None]).logits) for each in rows]
    assert ScalarModel(context, str(tmp_path)).rewards(rows) == pytest.approx(expected, abs=1e-5)


def test_a_reward_model_learns_which_of_two_is_better(context: RankContext, folder: Path) -> None:
    role, rows = ScalarModel(context, str(folder), TRAINER), drawn(2, *LENGTHS)
    first = role.train_rewards(rows, 0)
    assert first["loss"] == pytest.approx(math.log(2))
    assert first["won"] == 0.0
    for step in range(1, 6):
        last = role.train_rewards(rows, step)
    assert (last["won"], last["loss"] < first["loss"], last["num"]) == (1.0, True, 3.0)
    rewards = role.rewards(rows)
    assert all(better > worse for better, worse in zip(rewards[::2], rewards[1::2], strict=True))


def test_advantages_are_whitened_over_rows_that_weigh_something(
    context: RankContext, scorer_folder: Path
) -> None:
    rows = told(drawn(3, *LENGTHS), reward=[1.0, 0.0, 2.0, 0.0, 1.0, 50.0])
    role = ScalarModel(context, str(scorer_folder), TRAINER, {"discount": 0.9, "trace": 0.8})
    columns = role.advantages(rows, [1.0] * 5 + [0.0])
    plain = []
    for row, values_N, returns_N in zip(rows, columns["values"], columns["returns"], strict=True):
        rewards_N = torch.zeros(len(values_N))
        rewards_N[-1] = row["reward"]
        expected = gae(rewards_N, values_N, 0.9, 0.8)
        assert torch.equal(returns_N, expected.returns_N)
        plain.append(expected.advantages_N)
    real = torch.cat(plain[:5])
    whitened = torch.cat(columns["advantages"][:5])
    assert (float(whitened.mean()), float(whitened.std(correction=0))) == pytest.approx(
        (0.0, 1.0), abs=1e-5
    )
    assert whitened.tolist() == pytest.approx(
        ((real - real.mean()) / real.std(correction=0)).tolist(), abs=1e-4
    )


def test_each_token_pays_for_leaving_the_reference(context: RankContext, folder: Path) -> None:
    rows = told(
        drawn(4, 6),
        reward=[1.0],
        proximal=[torch.tensor([-1.0, -1.0, -1.0])],
        reference=[torch.tensor([-3.0, -1.0, 0.0])],
    )
    rows[0]["loss_mask"] = torch.arange(6) > 2
    role = ScalarModel(context, str(folder), TRAINER, {"kl_coef": 0.1, "trace": 1.0})
    (returns_N,) = role.advantages(rows)["returns"]
    assert returns_N.tolist() == pytest.approx([1.0 - 0.2 + 0.1, 1.0 + 0.1, 1.0 + 0.1])


def test_a_critic_comes_closer_to_the_returns_and_is_held_by_its_clip(
    context: RankContext, folder: Path
) -> None:
    rows = drawn(5, *LENGTHS)
    free = ScalarModel(context, str(folder), TRAINER, {"value_clip": 1e9})
    held = ScalarModel(context, str(folder), TRAINER, {"value_clip": 0.05})
    rows = told(rows, returns=[2.0] * 6, values=free.values(rows))
    losses = [free.train_values(rows, step)["loss"] for step in range(8)]
    assert losses[0] == pytest.approx(2.0)
    assert losses[-1] < 0.5 * losses[0]
    reports = [held.train_values(rows, step) for step in range(8)]
    assert reports[-1]["clip_fraction"] > 0.5
    assert reports[-1]["loss"] > losses[-1]


def test_a_frozen_critic_does_not_learn(context: RankContext, folder: Path) -> None:
    with pytest.raises(ConfigError, match="frozen"):
        ScalarModel(context, str(folder)).train_rewards(drawn(6, 4, 4), 0)
