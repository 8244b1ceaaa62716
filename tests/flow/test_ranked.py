"""The policy on several ranks: the curve of one, the same model on disk, and nothing left over."""

import functools
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest
from safetensors.torch import load_file

from rollmesh.core.config import LossWeight, TrainerConfig
from rollmesh.envs.guess import GuessEnv
from rollmesh.serve.client.samples import Sample
from rollmesh.trainer.policy import Policy, StepReport
from rollmesh.trainer.ranked import RankedPolicy
from rollmesh.trainer.tiny import TinyShape, write_tiny_model
from rollmesh.trainer.warmstart import texts_of
from tests.unit.trainer.samples import new_sample

SETTINGS = TrainerConfig(
    learning_rate=1e-3,
    entropy_coef=0.01,
    max_logprob_gap=1e9,
    microbatch_tokens=150,  # so that ranks have different numbers of forwards
)
ALIKE = 1e-4
"""The bound of the promise; 20 steps were within 3e-7 by loss, 2e-5 by gradient norm."""


def batch(step: int) -> list[Sample]:
    """Five groups of siblings, of many lengths: no number of ranks but one divides them."""
    chance = np.random.default_rng(step)
    samples = []
    for group in range(5):
        for sibling in range(int(chance.integers(2, 5))):
            length = int(chance.integers(4, 40))
            num_sampled = int(chance.integers(1, length - 2))
            samples.append(
                new_sample(
                    chance.integers(0, 100, length).tolist(),
                    [0] * (length - num_sampled) + [1] * num_sampled,
                    seq=group,
                    index=sibling,
                    reward=float(chance.random()),
                    logprobs=np.full(length, -4.0),
                    policy_version=np.arange(length) // 8,
                )
            )
    return samples


def gaps_of(report: StepReport) -> list[list[tuple[float, ...]]]:
    return [[msgspec.structs.astuple(run) for run in each] for each in report.gaps]


def step_and_end(policy: RankedPolicy, step: int) -> StepReport:
    report = policy.step(batch(step), step)
    policy.end_step(step)
    return report


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ranked") / "model"
    write_tiny_model(folder, texts_of(GuessEnv()), TinyShape(), seed=0)
    return folder


Alone = Callable[[TrainerConfig], tuple[list[StepReport], Policy]]


@pytest.fixture(scope="module")
def alone(model_folder: Path) -> Alone:
    """One rank's reports, and its policy then."""

    @functools.cache
    def of(settings: TrainerConfig) -> tuple[list[StepReport], Policy]:
        policy = Policy(str(model_folder), settings)
        return [policy.step(batch(step), step) for step in range(settings.num_steps)], policy

    return of


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_ranks", "num_minibatches", "loss_weight", "num_steps"),
    [(2, 1, "token", 20), (4, 1, "token", 20), (2, 3, "token", 6), (4, 3, "rollout", 6)],
)
def test_any_number_of_ranks_gives_the_curve_of_one(
    num_ranks: int,
    num_minibatches: int,
    loss_weight: LossWeight,
    num_steps: int,
    model_folder: Path,
    alone: Alone,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    settings = msgspec.structs.replace(
        SETTINGS, num_minibatches=num_minibatches, loss_weight=loss_weight, num_steps=num_steps
    )
    expected, one = alone(settings)
    settings = msgspec.structs.replace(settings, num_ranks=num_ranks)
    with RankedPolicy(str(model_folder), settings, tmp_path) as policy:
        reports = [step_and_end(policy, step) for step in range(num_steps)]
        policy.save(tmp_path / "many", 1)
        probe = policy.probe()
    for report, other in zip(reports, expected, strict=True):
        for name, value in other.figures().items():
            assert getattr(report, name) == pytest.approx(value, abs=ALIKE), name
        # Sample by sample and run by run, in the order in which the samples were given.
        assert [[run[0] for run in each] for each in gaps_of(report)] == [
            [run[0] for run in each] for each in gaps_of(other)
        ]
        of_all = [run for each in gaps_of(other) for run in each]
        assert [run for each in gaps_of(report) for run in each] == [
            pytest.approx(run, abs=10 * ALIKE) for run in of_all
        ]
    assert probe.logprobs == pytest.approx(one.probe().logprobs, abs=ALIKE)
    one.save(tmp_path / "one", 1)
    weights, others = (load_file(tmp_path / n / "model.safetensors") for n in ("many", "one"))
    assert weights.keys() == others.keys()
    assert all((weights[name] - others[name]).abs().max() < ALIKE for name in weights)
    assert [each.message for each in caplog.records if "tensors." in each.message] == []
