"""The policy on several ranks: the curve of one rank, the same model on disk, and nothing left
over.
"""

import functools
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest
from safetensors.torch import load_file

from rollmesh.core.config import LossWeight, ProximalRule, TrainerConfig
from rollmesh.core.errors import NotFinite
from rollmesh.envs.guess import GuessEnv
from rollmesh.serve.client.samples import Sample
from rollmesh.trainer.algorithms.step_report import StepReport
from rollmesh.trainer.models.tiny import TinyShape, texts_of, write_tiny_model
from rollmesh.trainer.policy import Policy
from rollmesh.trainer.ranked import RankedPolicy
from rollmesh.trainer.weights.transfer import Payload, write_folder
from tests.unit.trainer.samples import new_sample

SETTINGS = TrainerConfig(
    learning_rate=1e-3,
    entropy_coef=0.01,
    max_logprob_gap=1e9,
    max_token_gap=1e9,
    microbatch_tokens=150,  # so that ranks have different numbers of forwards
)
ALIKE = 1e-4
"""The tolerance; 20 steps were within 3e-7 by loss, 2e-5 by gradient norm."""


STEPS = {policy_version: 2 - policy_version for policy_version in range(5)}
"""The number of steps before each version that the batches name; none of them is the newest."""


def batch(step: int) -> list[Sample]:
    """Five groups of siblings of many lengths; no number of ranks but one divides them."""
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
    report = policy.step(batch(step), step, step_of_version=STEPS)
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
    """One rank's reports, and its policy at the end."""

    @functools.cache
    def of(settings: TrainerConfig) -> tuple[list[StepReport], Policy]:
        policy = Policy(str(model_folder), settings)
        steps = range(settings.num_steps)
        return [policy.step(batch(each), each, step_of_version=STEPS) for each in steps], policy

    return of


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_ranks", "num_minibatches", "loss_weight", "proximal", "num_steps"),
    [
        (2, 1, "token", "recompute", 20),
        (4, 1, "token", "recompute", 20),
        (2, 3, "token", "recompute", 6),
        (4, 3, "rollout", "loglinear", 6),
        (2, 3, "rollout", "recorded", 6),
    ],
)
def test_any_number_of_ranks_has_the_same_curve(
    num_ranks: int,
    num_minibatches: int,
    loss_weight: LossWeight,
    proximal: ProximalRule,
    num_steps: int,
    model_folder: Path,
    alone: Alone,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    settings = msgspec.structs.replace(
        SETTINGS,
        num_minibatches=num_minibatches,
        loss_weight=loss_weight,
        proximal=proximal,
        num_steps=num_steps,
    )
    expected, one = alone(settings)
    settings = msgspec.structs.replace(settings, num_ranks=num_ranks)
    with RankedPolicy(str(model_folder), settings, tmp_path) as policy:
        reports = [step_and_end(policy, step) for step in range(num_steps)]
        policy.save(tmp_path / "many", 1)
        parts = policy.export(tmp_path / "parts", 2)
        write_folder(Payload(2, str(tmp_path / "parts"), parts))
        probe = policy.probe()
    for report, other in zip(reports, expected, strict=True):
        figures, of_one = report.figures(), other.figures()
        ages, of_one_by_age = figures.pop("importance_by_age"), of_one.pop("importance_by_age")
        assert figures == pytest.approx(of_one, abs=ALIKE)
        assert ages.keys() == of_one_by_age.keys()
        assert all(ages[age] == pytest.approx(of_one_by_age[age], abs=ALIKE) for age in ages)
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
    handed = load_file(tmp_path / "parts" / "model.safetensors")
    assert all(handed[name].equal(weights[name]) for name in weights | handed)
    totals = [sum(piece.num_bytes for piece in part.pieces) for part in parts]
    assert len(totals) == num_ranks
    assert max(totals) < 2 * min(totals)
    assert [each.message for each in caplog.records if "tensors." in each.message] == []


@pytest.mark.slow
def test_ranks_train_and_write_the_same_adapters_as_one_rank(
    model_folder: Path, alone: Alone, tmp_path: Path
) -> None:
    settings = msgspec.structs.replace(SETTINGS, lora_rank=4, learning_rate=0.01, num_steps=4)
    expected, one = alone(settings)
    one.export(tmp_path / "one", 1)
    one.save(tmp_path / "one-checkpoint")
    settings = msgspec.structs.replace(settings, num_ranks=2)
    with RankedPolicy(str(model_folder), settings, tmp_path) as policy:
        reports = [step_and_end(policy, step) for step in range(4)]
        assert policy.export(tmp_path / "two", 1) == ()
        policy.save(tmp_path / "two-checkpoint")
    for report, other in zip(reports, expected, strict=True):
        assert report.loss == pytest.approx(other.loss, abs=ALIKE)
        assert report.grad_norm == pytest.approx(other.grad_norm, abs=ALIKE)
    assert reports[0].grad_norm > 0.0
    for name in ("one/adapter_model.safetensors", "one-checkpoint/model.safetensors"):
        weights, others = (
            load_file(tmp_path / name),
            load_file(tmp_path / name.replace("one", "two")),
        )
        assert weights.keys() == others.keys()
        assert all((weights[each] - others[each]).abs().max() < ALIKE for each in weights)
    config = "adapter_config.json"
    assert (tmp_path / "one" / config).read_text() == (tmp_path / "two" / config).read_text()


@pytest.mark.slow
def test_all_ranks_skip_a_step_that_is_not_finite_and_write_no_such_weights(
    model_folder: Path, tmp_path: Path
) -> None:
    wild = {"learning_rate": 3e37, "weight_decay": 11.0}
    settings = msgspec.structs.replace(SETTINGS, num_ranks=2, advantage="mean", **wild)
    huge = [
        msgspec.structs.replace(sample, reward=6e38 * (sample.rollout_id.index == 0))
        for sample in batch(0)
    ]
    with RankedPolicy(str(model_folder), settings, tmp_path) as policy:
        before = policy.probe()
        report = policy.step(huge, 0, step_of_version=STEPS)
        policy.end_step(0)
        assert (report.num_skipped, report.num_skipped_in_row) == (1, 1)
        assert policy.probe() == before
        report = step_and_end(policy, 1)  # a finite gradient, and a rate that no weight survives
        assert report.num_skipped == 0
        for write in (
            lambda: policy.export(tmp_path / "v1", 1),
            lambda: policy.save(tmp_path / "v1"),
            lambda: policy.snapshot(tmp_path / "v1"),
        ):
            with pytest.raises(NotFinite, match="NaN or infinity"):
                write()
    assert not (tmp_path / "v1").exists()


@pytest.mark.slow
def test_ranks_that_leave_their_devices_and_return_train_the_same_bit_for_bit(
    model_folder: Path, tmp_path: Path
) -> None:
    settings = msgspec.structs.replace(SETTINGS, num_ranks=2)
    reports: dict[str, list[dict[str, object]]] = {}
    for name in ("stays", "leaves"):
        with RankedPolicy(str(model_folder), settings, tmp_path) as policy:
            reports[name] = []
            for step in range(3):
                reports[name].append(step_and_end(policy, step).figures())
                if name == "leaves":
                    policy.offload()
                    policy.save(tmp_path / f"away-{step}")
                    policy.reload()
            (tmp_path / name).mkdir()
            policy.snapshot(tmp_path / name)
            while not policy.is_snapshot_written():
                pass
            policy.save(tmp_path / f"saved-{name}")
    assert reports["leaves"] == reports["stays"]
    files = {
        name: {
            path.relative_to(tmp_path / name): path.read_bytes()
            for path in (tmp_path / name).rglob("*.safetensors")
            if "random" not in path.name
        }
        for name in reports
    }
    assert len(files["stays"]) == 2, "weights and optimiser"
    assert files["leaves"] == files["stays"]
    away = load_file(tmp_path / "away-2" / "model.safetensors")
    saved = load_file(tmp_path / "saved-stays" / "model.safetensors")
    assert away.keys() == saved.keys()
    assert all(away[name].equal(saved[name]) for name in saved)
