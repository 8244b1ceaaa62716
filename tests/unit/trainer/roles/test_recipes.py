"""What a step of each recipe calls, on the roles of one rank that nobody leads."""

import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from rollmesh.core.config import TrainerConfig
from rollmesh.core.errors import ConfigError
from rollmesh.trainer.controller.controller import RankPlan
from rollmesh.trainer.controller.rendezvous import RankContext
from rollmesh.trainer.controller.spec import Topology
from rollmesh.trainer.controller.torchrun import PlainRank
from rollmesh.trainer.roles.language import LanguageModel
from rollmesh.trainer.roles.recipes import PPO_EPOCHS, RECIPES, role_specs
from rollmesh.trainer.roles.scalar import ScalarModel
from tests.unit.trainer.roles.rows import drawn

LENGTHS = (5, 12, 12, 7, 9, 4)
TRAINER = TrainerConfig(learning_rate=1e-2)
ROLES = ("actor", "reference", "critic", "scorer")


@pytest.fixture
def trainer(
    place: RankContext, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[PlainRank]:
    monkeypatch.setenv("WORLD_SIZE", "1")
    losses = {"critic": {"trace": 1.0}}
    specs = role_specs(ROLES, str(folder), TRAINER, losses)
    with PlainRank(RankPlan(topology=Topology(1), roles=specs)) as rank:
        yield rank


def test_the_reference_stays_what_the_actor_began_as(trainer: PlainRank) -> None:
    rows = drawn(1, *LENGTHS)
    before = trainer.call("reference.logprobs", rows)
    for step in range(2):
        RECIPES["sft"].step(trainer, rows, step)
    assert all(map(torch.equal, trainer.call("reference.logprobs", rows), before))
    assert not any(map(torch.equal, trainer.call("actor.logprobs", rows), before))
    with pytest.raises(ConfigError, match="frozen"):
        trainer.call("reference.train_text", rows, 2)


def test_a_first_step_of_each_is_what_its_formula_says(trainer: PlainRank) -> None:
    rows = [
        {**row, "reward": float(at % 2 == 0), "group": at // 2}
        for at, row in enumerate(drawn(2, *LENGTHS))
    ]
    logprobs = torch.cat(trainer.call("actor.logprobs", rows))
    reports = {name: recipe.step(trainer, rows, 0) for name, recipe in [*RECIPES.items()][::-1]}
    assert reports["reward"]["loss"] == pytest.approx(math.log(2)), "a head that says 0"
    assert reports["sft"]["loss"] == pytest.approx(-float(logprobs.mean()), rel=1e-5)
    assert {name: each["num"] for name, each in reports.items()} == {
        **dict.fromkeys(("ppo", "grpo", "sft"), len(logprobs)),
        **dict.fromkeys(("dpo", "reward"), 3),
    }


def test_siblings_are_compared_within_their_group_and_nowhere_else(
    trainer: PlainRank, place: RankContext, folder: Path
) -> None:
    rows = drawn(3, *LENGTHS)
    told = [
        {**row, "reward": reward, "group": group}
        for row, reward, group in zip(rows, (5, 5, 3, 1, 7, 7), "aabbcc", strict=True)
    ]
    # 3 and 1 are each 1 from their mean, and spread by the root of 2.
    due = (0.0, 0.0, math.sqrt(0.5), -math.sqrt(0.5), 0.0, 0.0)
    by_hand = LanguageModel(place, str(folder), {"learning_rate": 1e-2})
    report = by_hand.train_policy(
        [{**row, "advantages": each} for row, each in zip(rows, due, strict=True)], 0
    )
    assert RECIPES["grpo"].step(trainer, told, 0) == pytest.approx(report, abs=1e-3)


def test_a_step_of_ppo_is_held_near_where_it_began_and_not_where_training_did(
    trainer: PlainRank, place: RankContext, folder: Path
) -> None:
    rows = [{**row, "reward": float(at)} for at, row in enumerate(drawn(4, *LENGTHS))]
    actor = LanguageModel(place, str(folder), {"learning_rate": 1e-2})
    critic = ScalarModel(place, str(folder), {"learning_rate": 1e-2}, {"trace": 1.0})
    for step in range(2):
        columns = critic.advantages(rows) | {"proximal": actor.logprobs(rows)}
        told = [
            {**row, **{name: column[at] for name, column in columns.items()}}
            for at, row in enumerate(rows)
        ]
        for _ in range(PPO_EPOCHS):
            values, policy = critic.train_values(told, step), actor.train_policy(told, step)
        report = RECIPES["ppo"].step(trainer, rows, step)
        assert report["clip_fraction"] == policy["clip_fraction"] > 0
        assert report["loss"] == pytest.approx(policy["loss"], rel=1e-4, abs=1e-5)
        assert report["value_loss"] == pytest.approx(values["loss"], rel=1e-5)


@pytest.mark.parametrize("recipe", ["ppo", "grpo"])
def test_a_reward_that_cannot_be_trained_on_is_refused_in_one_line(
    trainer: PlainRank, recipe: str
) -> None:
    rows = [{**row, "reward": 1e39, "group": 0} for row in drawn(5, 4, 4)]
    with pytest.raises(ConfigError, match="reward: 1e\\+39 is larger than 1e\\+30"):
        RECIPES[recipe].step(trainer, rows, 0)
