"""Losses and advantages by name: built in, of the user's own, and wrong ones."""

from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
import torch

from rollmesh.core.config import TrainerConfig
from rollmesh.core.errors import UserError
from rollmesh.trainer.algorithms.loss import LossResult, TokenTerms, ppo_loss
from rollmesh.trainer.algorithms.registry import ADVANTAGES, LOSSES, find_advantage, find_loss
from rollmesh.trainer.controller.rendezvous import RankContext
from rollmesh.trainer.policy import Policy
from rollmesh.trainer.roles.models import LanguageModel
from tests.unit.trainer.exact import SETTINGS, pair
from tests.unit.trainer.roles.rows import drawn

HERE = "tests.unit.trainer.algorithms.test_registry"


def tenfold_loss(terms: TokenTerms, settings: TrainerConfig) -> LossResult:
    loss = ppo_loss(terms, settings)
    return loss._replace(value=10.0 * loss.value)


def doubled_rewards(rewards: Sequence[float]) -> list[float]:
    return [2.0 * reward for reward in rewards]


def one_too_few(rewards: Sequence[float]) -> list[float]:
    return list(rewards[1:])


def not_finite(rewards: Sequence[float]) -> list[float]:
    return [float("nan") for _ in rewards]


NOT_A_FUNCTION = 7


def test_the_defaults_are_ppo_and_grpo() -> None:
    settings = TrainerConfig()
    assert find_loss(settings.loss) is LOSSES["ppo"]
    assert find_advantage(settings.advantage) is ADVANTAGES["grpo"]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("gpso", ["trainer.loss", "'gspo'", "gspo, ppo"]),
        ("nonsense", ["trainer.loss", '"nonsense"', "gspo, ppo", "package.module:function"]),
        ("no_such_module:loss", ["trainer.loss", "no_such_module"]),
        (f"{HERE}:missing", ["trainer.loss", "missing", "gspo, ppo"]),
        (f"{HERE}:NOT_A_FUNCTION", ["trainer.loss", "NOT_A_FUNCTION"]),
    ],
)
def test_a_wrong_loss_is_one_line_with_key_value_and_known_names(
    name: str, expected: list[str]
) -> None:
    with pytest.raises(UserError) as caught:
        find_loss(name)
    assert all(part in str(caught.value) for part in [name, *expected])
    assert "\n" not in str(caught.value)


def test_a_wrong_advantage_names_its_own_key() -> None:
    with pytest.raises(UserError, match=r"trainer\.advantage = \"gpro\".*leave_one_out"):
        find_advantage("gpro")


def test_a_module_in_the_working_directory_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "losses_of_a_user.py").write_text("def constant(rewards):\n    return rewards\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [each for each in __import__("sys").path if each])
    assert find_advantage("losses_of_a_user:constant")([1.0, 2.0]) == [1.0, 2.0]


@pytest.mark.parametrize("name", ["one_too_few", "not_finite"])
def test_an_advantage_must_return_one_finite_number_for_each_reward(name: str) -> None:
    with pytest.raises(UserError, match=rf"trainer\.advantage = .*{name}"):
        find_advantage(f"{HERE}:{name}")([1.0, 0.0])


def test_a_policy_trains_by_the_loss_and_the_advantage_of_the_user(tiny_folder: Path) -> None:
    samples = [
        msgspec.structs.replace(sample, reward=reward)
        for sample, reward in zip(pair(tiny_folder), (1.0, 0.0), strict=True)
    ]
    losses = {}
    for loss in ("ppo", f"{HERE}:tenfold_loss"):
        settings = msgspec.structs.replace(
            SETTINGS, loss=loss, advantage=f"{HERE}:doubled_rewards", max_grad_norm=1e9
        )
        losses[loss] = Policy(str(tiny_folder), settings).step(samples, 0).loss
    plain, tenfold = losses.values()
    assert plain < 0.0
    assert tenfold == pytest.approx(10.0 * plain)


def test_a_role_trains_by_the_loss_of_the_user(tiny_folder: Path, context: RankContext) -> None:
    rows = [row | {"advantages": 1.0} for row in drawn(1, 5, 7)]
    plain, tenfold = (
        LanguageModel(context, str(tiny_folder), {"loss": loss}).train_policy(rows, 0)["loss"]
        for loss in ("ppo", f"{HERE}:tenfold_loss")
    )
    assert tenfold == pytest.approx(10.0 * plain)


def test_a_policy_with_an_unknown_loss_is_refused_before_its_model_is_loaded() -> None:
    settings = msgspec.structs.replace(SETTINGS, loss="gpso")
    with pytest.raises(UserError, match=r"trainer\.loss"):
        Policy("no such folder", settings)


@pytest.mark.parametrize("loss", sorted(LOSSES))
def test_tokens_with_weight_0_have_no_gradient_in_any_built_in_loss(loss: str) -> None:
    logprobs_N = torch.tensor([-1.0, -2.0, -0.5], requires_grad=True)
    terms = TokenTerms(
        logprobs_N=logprobs_N,
        entropies_N=torch.zeros(3),
        proximal_N=torch.tensor([-1.0, -2.0, float("nan")]),
        recorded_N=torch.tensor([-1.0, -9.0, -0.5]),
        advantages_N=torch.ones(3),
        weights_N=torch.tensor([1.0, 0.0, 1.0]),
        samples_N=torch.tensor([4, 4, 9]),
    )
    torch.autograd.backward(find_loss(loss)(terms, SETTINGS).value)
    assert logprobs_N.grad is not None
    assert logprobs_N.grad.tolist() == pytest.approx([-1.0, 0.0, 0.0])
