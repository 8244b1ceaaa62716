"""Roles return the numbers that transformers returns, however their rows are packed."""

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
from rollmesh.trainer.roles.models import LanguageModel, ScalarModel
from tests.unit.trainer.roles.rows import drawn, row
from tests.unit.trainer.roles.stock import one_by_one, write_soft_capped

LENGTHS = (5, 12, 12, 7, 9, 4)
UNCLIPPED = {"learning_rate": 1e-2, "max_grad_norm": 1e9}


@pytest.fixture(params=["qwen3", "gemma2"])
def any_folder(request: pytest.FixtureRequest, folder: Path, tmp_path: Path) -> Path:
    """A model that packs, and one that does not: its attention has a soft cap."""
    if request.param == "qwen3":
        return folder
    write_soft_capped(tmp_path)
    return tmp_path


def assert_alike(ours: list[Tensor], others: list[Tensor], bound: float = 2e-5) -> None:
    assert [len(each) for each in ours] == [len(each) for each in others]
    assert max(float((a - b).abs().max()) for a, b in zip(ours, others, strict=True)) < bound


@pytest.mark.parametrize("max_tokens", [1, 25, 4096])
def test_logprobs_are_those_of_each_row_alone(
    context: RankContext, any_folder: Path, max_tokens: int
) -> None:
    rows = drawn(1, *LENGTHS)
    rows[1]["temperature"] = 0.7
    role = LanguageModel(context, str(any_folder), {"microbatch_tokens": max_tokens})
    assert_alike(role.logprobs(rows, [1.0] * 5 + [0.0]), one_by_one(any_folder, rows))


def test_text_loss_equals_that_of_transformers(context: RankContext, folder: Path) -> None:
    rows = drawn(2, *LENGTHS)
    logprobs = torch.cat(one_by_one(folder, rows))
    report = LanguageModel(context, str(folder), UNCLIPPED).train_text(rows, 0)
    assert report["loss"] == pytest.approx(-float(logprobs.mean()), rel=1e-5)
    assert report["num"] == len(logprobs)


@pytest.mark.parametrize("method", ["train_text", "train_preference", "train_policy"])
def test_a_step_is_the_same_however_its_rows_are_packed(
    context: RankContext, any_folder: Path, method: str
) -> None:
    rows = drawn(3, *LENGTHS)
    for at, each in enumerate(rows):
        each |= {"advantages": at - 2.5, "reference": -3.0}
    reports, after = [], []
    for max_tokens in (1, 20, 4096):
        role = LanguageModel(
            context, str(any_folder), UNCLIPPED | {"microbatch_tokens": max_tokens}
        )
        reports.append(getattr(role, method)(rows, 0))
        after.append(role.logprobs(rows))
    for report, logprobs in zip(reports[1:], after[1:], strict=True):
        assert report == pytest.approx(reports[0], rel=1e-4, abs=1e-5)
        # AdamW makes a whole step of a gradient's sign, so that what is near 0 may turn.
        assert_alike(logprobs, after[0], 1e-2)
    assert float((after[0][0] - one_by_one(any_folder, rows)[0]).abs().max()) > 0.05


def test_padding_has_no_weight(context: RankContext, folder: Path) -> None:
    rows = drawn(4, *LENGTHS)
    plain, padded = (LanguageModel(context, str(folder), UNCLIPPED) for _ in range(2))
    report = plain.train_text(rows[:4], 0)
    assert padded.train_text(rows, 0, [1.0] * 4 + [0.0] * 2) == report
    assert all(map(torch.equal, padded.logprobs(rows), plain.logprobs(rows)))


def test_step_with_only_padding_still_runs_its_forward(
    context: RankContext, any_folder: Path
) -> None:
    role = LanguageModel(context, str(any_folder), UNCLIPPED)
    rows = [each | {"reference": -3.0} for each in drawn(4, 5, 6)]
    report = role.train_preference(rows, 0, [0.0, 0.0])
    assert (report["loss"], report["grad_norm"], report["num"]) == (0.0, 0.0, 0.0)


def test_model_without_a_trainer_is_frozen(context: RankContext, folder: Path) -> None:
    role, rows = LanguageModel(context, str(folder)), drawn(5, *LENGTHS)
    with pytest.raises(ConfigError, match="trainer: a role without it is frozen"):
        role.train_text(rows, 0)
    assert_alike(role.logprobs(rows), one_by_one(folder, rows))


def test_preference_loss_begins_at_log_2(context: RankContext, folder: Path) -> None:
    role, rows = LanguageModel(context, str(folder), UNCLIPPED), drawn(6, *LENGTHS)
    for each, logprobs in zip(rows, role.logprobs(rows), strict=True):
        each["reference"] = logprobs
    first = role.train_preference(rows, 0)
    assert first["loss"] == pytest.approx(math.log(2))
    assert first["num"] == 3.0
    second = role.train_preference(rows, 1)
    assert second["loss"] < first["loss"]
    assert (second["won"], second["margin"] > 0) == (1.0, True)


def test_policy_step_favours_higher_rewards_and_reports_the_change(
    context: RankContext, folder: Path
) -> None:
    rows = drawn(7, 8, 8)
    role = LanguageModel(context, str(folder), UNCLIPPED)
    before = role.logprobs(rows)
    for each, logprobs, advantage in zip(rows, before, (1.0, -1.0), strict=True):
        each |= {"advantages": advantage, "proximal": logprobs, "reference": logprobs}
    first = role.train_policy(rows, 0)
    assert first["kl"] == pytest.approx(0, abs=1e-6)
    assert first["clip_fraction"] == 0.0
    better, worse = (
        float((now - then).sum()) for now, then in zip(role.logprobs(rows), before, strict=True)
    )
    assert better > 0 > worse
    drift = torch.cat(role.logprobs(rows)) - torch.cat(before)
    second = role.train_policy(rows, 1)
    assert second["kl"] == pytest.approx(float((drift.square() / 2).mean()), rel=1e-4)
    assert second["clip_fraction"] > 0


def test_kl_penalty_is_added_to_the_loss(context: RankContext, folder: Path) -> None:
    rows = [row([5, 6, 7, 8], advantages=0.0, reference=-9.0)]
    plain, dear = (
        LanguageModel(context, str(folder), UNCLIPPED, {"kl_coef": coef}) for coef in (0.0, 0.5)
    )
    assert plain.train_policy(rows, 0)["loss"] == 0.0
    report = dear.train_policy(rows, 0)
    assert report["loss"] == pytest.approx(0.5 * report["kl"])
    assert report["kl"] > 0


def test_tokens_of_an_older_policy_are_weighted_by_importance(
    context: RankContext, folder: Path
) -> None:
    rows = drawn(8, 9)
    role = LanguageModel(context, str(folder), UNCLIPPED | {"max_importance_weight": 4.0})
    logprobs = role.logprobs(rows)[0]
    recorded_T = torch.zeros(9)
    recorded_T[rows[0]["loss_mask"]] = logprobs - math.log(3.0)
    rows[0] |= {"advantages": 1.0, "logprobs": recorded_T}
    assert role.train_policy(rows, 0)["loss"] == pytest.approx(-3.0, rel=1e-4)


def test_saved_model_gives_the_same_logprobs(
    context: RankContext, folder: Path, tmp_path: Path
) -> None:
    role, rows = LanguageModel(context, str(folder), UNCLIPPED), drawn(9, *LENGTHS)
    role.train_text(rows, 0)
    role.save(str(tmp_path / "saved"))
    assert_alike(role.logprobs(rows), one_by_one(tmp_path / "saved", rows))


TRAINER = {"learning_rate": 1e-2}


@pytest.fixture(scope="module")
def scorer_folder(
    context: RankContext, folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A saved reward model after a few train steps."""
    saved = tmp_path_factory.mktemp("scorer") / "model"
    role = ScalarModel(context, str(folder), TRAINER)
    for step in range(3):
        role.train_rewards(drawn(step, *LENGTHS), step)
    role.save(str(saved))
    return saved


def head_one_by_one(folder: Path, rows: list[dict[str, Any]]) -> list[Tensor]:
    """Return the numbers [T] of each row, by plain transformers."""
    model = AutoModelForTokenClassification.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        return [model(each["token_ids"].long()[None]).logits[0, :, 0] for each in rows]


def with_columns(rows: list[dict[str, Any]], **columns: list[Any]) -> list[dict[str, Any]]:
    """Return the rows with these columns added."""
    return [
        {**each, **{name: column[at] for name, column in columns.items()}}
        for at, each in enumerate(rows)
    ]


def test_new_head_on_a_language_model_returns_zero(context: RankContext, folder: Path) -> None:
    role, rows = ScalarModel(context, str(folder)), drawn(1, *LENGTHS)
    assert role.rewards(rows) == [0.0] * 6
    assert [each.count_nonzero().item() for each in role.values(rows)] == [0] * 6


@pytest.mark.parametrize("max_tokens", [20, 4096])
def test_values_are_before_each_trained_token_and_a_reward_at_the_last(
    context: RankContext, scorer_folder: Path, max_tokens: int
) -> None:
    rows = drawn(1, *LENGTHS)
    heads = head_one_by_one(scorer_folder, rows)
    role = ScalarModel(context, str(scorer_folder), {"microbatch_tokens": max_tokens})
    for each, head_T, values_N in zip(rows, heads, role.values(rows), strict=True):
        assert values_N.tolist() == pytest.approx(head_T[:-1][each["loss_mask"][1:]], abs=1e-5)
    assert role.rewards(rows) == pytest.approx([float(each[-1]) for each in heads], abs=1e-5)


def test_sequence_classification_model_is_used_unchanged(
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


def test_advantages_are_whitened_over_rows_with_weight(
    context: RankContext, scorer_folder: Path
) -> None:
    rows = with_columns(drawn(3, *LENGTHS), reward=[1.0, 0.0, 2.0, 0.0, 1.0, 50.0])
    role = ScalarModel(context, str(scorer_folder), TRAINER, {"discount": 0.9, "trace": 0.8})
    columns = role.advantages(rows, [1.0] * 5 + [0.0])
    plain = []
    for each, values_N, returns_N in zip(rows, columns["values"], columns["returns"], strict=True):
        rewards_N = torch.zeros(len(values_N))
        rewards_N[-1] = each["reward"]
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


def test_kl_penalty_applies_to_each_token(context: RankContext, folder: Path) -> None:
    rows = with_columns(
        drawn(4, 6),
        reward=[1.0],
        proximal=[torch.tensor([-1.0, -1.0, -1.0])],
        reference=[torch.tensor([-3.0, -1.0, 0.0])],
    )
    rows[0]["loss_mask"] = torch.arange(6) > 2
    role = ScalarModel(context, str(folder), TRAINER, {"kl_coef": 0.1, "trace": 1.0})
    (returns_N,) = role.advantages(rows)["returns"]
    assert returns_N.tolist() == pytest.approx([1.0 - 0.2 + 0.1, 1.0 + 0.1, 1.0 + 0.1])


def test_critic_approaches_the_returns_within_its_clip(context: RankContext, folder: Path) -> None:
    rows = drawn(5, *LENGTHS)
    free = ScalarModel(context, str(folder), TRAINER, {"value_clip": 1e9})
    held = ScalarModel(context, str(folder), TRAINER, {"value_clip": 0.05})
    rows = with_columns(rows, returns=[2.0] * 6, values=free.values(rows))
    losses = [free.train_values(rows, step)["loss"] for step in range(8)]
    assert losses[0] == pytest.approx(2.0)
    assert losses[-1] < 0.5 * losses[0]
    reports = [held.train_values(rows, step) for step in range(8)]
    assert reports[-1]["clip_fraction"] > 0.5
    assert reports[-1]["loss"] > losses[-1]


def test_a_frozen_critic_does_not_learn(context: RankContext, folder: Path) -> None:
    with pytest.raises(ConfigError, match="frozen"):
        ScalarModel(context, str(folder)).train_rewards(drawn(6, 4, 4), 0)
