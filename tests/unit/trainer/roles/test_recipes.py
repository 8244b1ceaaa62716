"""The calls of one step of each recipe, on the roles of one rank without a controller.

Roles that train are saved together, each in its folder, and continue from there.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from rollmesh.core.config import TrainerConfig
from rollmesh.core.errors import CheckpointError, ConfigError
from rollmesh.trainer.checkpoints.recovery_plan import LoopState
from rollmesh.trainer.checkpoints.store import CheckpointStore
from rollmesh.trainer.controller.controller import RankPlan, RoleCall
from rollmesh.trainer.controller.rendezvous import RankContext
from rollmesh.trainer.controller.spec import Topology
from rollmesh.trainer.controller.torchrun import PlainRank
from rollmesh.trainer.roles.models import LanguageModel, ScalarModel
from rollmesh.trainer.roles.recipes import PPO_EPOCHS, RECIPES, SavedRoles, role_specs
from tests.unit.trainer.roles.rows import drawn

LENGTHS = (5, 12, 12, 7, 9, 4)
TRAINER = TrainerConfig(learning_rate=1e-2)
ROLES = ("actor", "reference", "critic", "scorer")


@pytest.fixture
def trainer(
    context: RankContext, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[PlainRank]:
    monkeypatch.setenv("WORLD_SIZE", "1")
    losses = {"critic": {"trace": 1.0}}
    specs = role_specs(ROLES, str(folder), TRAINER, losses)
    with PlainRank(RankPlan(topology=Topology(1), roles=specs)) as rank:
        yield rank


def test_reference_keeps_the_actors_first_weights(trainer: PlainRank) -> None:
    rows = drawn(1, *LENGTHS)
    before = trainer.call("reference.logprobs", rows)
    for step in range(2):
        RECIPES["sft"].step(trainer, rows, step)
    assert all(map(torch.equal, trainer.call("reference.logprobs", rows), before))
    assert not any(map(torch.equal, trainer.call("actor.logprobs", rows), before))
    with pytest.raises(ConfigError, match="frozen"):
        trainer.call("reference.train_text", rows, 2)


def test_first_step_of_each_recipe_matches_its_formula(trainer: PlainRank) -> None:
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


def test_siblings_are_compared_only_within_their_group(
    trainer: PlainRank, context: RankContext, folder: Path
) -> None:
    rows = drawn(3, *LENGTHS)
    grouped = [
        {**row, "reward": reward, "group": group}
        for row, reward, group in zip(rows, (5, 5, 3, 1, 7, 7), "aabbcc", strict=True)
    ]
    # 3 and 1 are each 1 from their mean, and spread by the root of 2.
    due = (0.0, 0.0, math.sqrt(0.5), -math.sqrt(0.5), 0.0, 0.0)
    by_hand = LanguageModel(context, str(folder), {"learning_rate": 1e-2})
    report = by_hand.train_policy(
        [{**row, "advantages": each} for row, each in zip(rows, due, strict=True)], 0
    )
    assert RECIPES["grpo"].step(trainer, grouped, 0) == pytest.approx(report, abs=1e-3)


def test_ppo_clips_against_the_start_of_the_step_not_of_the_run(
    trainer: PlainRank, context: RankContext, folder: Path
) -> None:
    rows = [{**row, "reward": float(at)} for at, row in enumerate(drawn(4, *LENGTHS))]
    actor = LanguageModel(context, str(folder), {"learning_rate": 1e-2})
    critic = ScalarModel(context, str(folder), {"learning_rate": 1e-2}, {"trace": 1.0})
    for step in range(2):
        columns = critic.advantages(rows) | {"proximal": actor.logprobs(rows)}
        prepared = [
            {**row, **{name: column[at] for name, column in columns.items()}}
            for at, row in enumerate(rows)
        ]
        for _ in range(PPO_EPOCHS):
            values, policy = critic.train_values(prepared, step), actor.train_policy(prepared, step)
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


SAVED_TRAINER = {"learning_rate": 1e-2}
LEARNERS = ("actor", "scorer")


class LocalCaller:
    """Calls roles of this process by name, as a controller calls those of its ranks."""

    def __init__(self, roles: Mapping[str, object]) -> None:
        self._roles = roles

    def call(self, what: RoleCall | str, *args: Any, **kwargs: Any) -> Any:
        role, _, name = str(what).partition(".")
        method: Callable[..., Any] = getattr(self._roles[role], name)
        return method(*args, **kwargs)


def new(context: RankContext, folder: Path) -> LocalCaller:
    actor, scorer = (
        make(context, str(folder), SAVED_TRAINER) for make in (LanguageModel, ScalarModel)
    )
    return LocalCaller(
        {"actor": actor, "scorer": scorer, "reference": LanguageModel(context, str(folder))}
    )


def train(roles: LocalCaller, *steps: int) -> list[Any]:
    """Return the metrics of each step that both learners report."""
    learn = {"actor": "train_text", "scorer": "train_rewards"}
    rows = [drawn(step, 5, 12, 9, 4) for step in steps]
    return [
        roles.call(f"{role}.{learn[role]}", each, step, [1.0] * 4)
        for step, each in zip(steps, rows, strict=True)
        for role in LEARNERS
    ]


def test_learning_roles_resume_bit_by_bit(
    context: RankContext, folder: Path, tmp_path: Path
) -> None:
    one, other = new(context, folder), new(context, folder)
    train(one, 0, 1)
    shelf = CheckpointStore(tmp_path)
    assert shelf.begin(LoopState(num_steps=2), SavedRoles(one, LEARNERS))
    saved = shelf.settled(30.0)
    assert saved is not None
    assert sorted(each.name for each in saved.folder.iterdir() if each.is_dir()) == [*LEARNERS]
    expected = train(one, 2, 3)
    newest = CheckpointStore(tmp_path).newest()
    assert newest is not None
    assert shelf.restore(newest, SavedRoles(other, LEARNERS)).num_steps == 2
    assert train(other, 2, 3) == expected


def test_frozen_role_has_no_snapshot(context: RankContext, folder: Path, tmp_path: Path) -> None:
    roles = SavedRoles(new(context, folder), ["reference"])
    roles.snapshot(tmp_path)
    assert roles.is_snapshot_written()
    roles.restore(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_another_roles_checkpoint_is_refused(
    context: RankContext, folder: Path, tmp_path: Path
) -> None:
    roles = new(context, folder)
    shelf = CheckpointStore(tmp_path)
    assert shelf.begin(LoopState(num_steps=0), SavedRoles(roles, ["actor"]))
    saved = shelf.settled(30.0)
    assert saved is not None
    with pytest.raises(CheckpointError, match="scorer/model: written by another model"):
        shelf.restore(saved, SavedRoles(roles, LEARNERS))
