"""The policy in training: exact log-probs, honest reports, and steps in the right direction."""

import contextlib
import itertools
import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Qwen3ForCausalLM,
)
from transformers.modeling_outputs import CausalLMOutputWithPast

from rollmesh.core.config import LossWeight, TrainerConfig
from rollmesh.core.ids import GroupId, RolloutId
from rollmesh.serve.client.runs import SampledRun
from rollmesh.serve.client.samples import Sample
from rollmesh.trainer.policy import Policy
from rollmesh.trainer.team import Alone
from tests.unit.trainer.samples import new_sample

SETTINGS = TrainerConfig(learning_rate=1e-3, max_logprob_gap=0.05)
LONG, SHORT = [1, 2, 3, 4, 5, 6], [1, 2, 7, 8]


def recorded(
    folder: Path, token_ids: list[int], temperature: float = 1.0
) -> npt.NDArray[np.float64]:
    """Log-probs of `token_ids` by transformers alone; 0 for the first."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        logits = model(torch.tensor([token_ids])).logits[0].double() / temperature
    logprobs = torch.log_softmax(logits[:-1], -1)[range(len(token_ids) - 1), token_ids[1:]]
    return np.array([0.0, *logprobs.tolist()])


def pair(folder: Path, temperature: float = 1.0, policy_version: int = 0) -> list[Sample]:
    """A group of two rollouts, the first better, with exact recordings."""
    masks = [[0, 0, 1, 0, 1, 1], [0, 0, 1, 1]]
    return [
        new_sample(
            token_ids,
            mask,
            index=index,
            reward=1.0 - index,
            logprobs=recorded(folder, token_ids, temperature),
            temperature=temperature,
            policy_version=policy_version,
        )
        for index, (token_ids, mask) in enumerate(zip((LONG, SHORT), masks, strict=True))
    ]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_recorded_logprobs_are_recomputed_exactly(tiny_folder: Path, temperature: float) -> None:
    report = Policy(str(tiny_folder), SETTINGS).step(pair(tiny_folder, temperature), 0)
    assert report.logprob_gap_max is not None
    assert report.logprob_gap_max < 1e-4
    assert report.kl == pytest.approx(0.0, abs=1e-6)
    assert (report.num_tokens, report.num_masked) == (5, 0)


def test_step_makes_the_better_rollout_likelier(tiny_folder: Path, tmp_path: Path) -> None:
    policy = Policy(str(tiny_folder), SETTINGS)
    good, bad = pair(tiny_folder)
    for step in range(3):
        policy.step([good, bad], step)
    policy.save(tmp_path / "after")
    gains = [
        (recorded(tmp_path / "after", s.token_ids.tolist()) - s.logprobs)[s.loss_mask].mean()
        for s in (good, bad)
    ]
    assert gains[0] > 0.05 > -0.05 > gains[1]


def test_equal_rewards_change_nothing(tiny_folder: Path, tmp_path: Path) -> None:
    policy = Policy(str(tiny_folder), SETTINGS)
    samples = [msgspec.structs.replace(sample, reward=1.0) for sample in pair(tiny_folder)]
    report = policy.step(samples, 0)
    policy.save(tmp_path / "after")
    assert (report.loss, report.grad_norm) == (0.0, 0.0)
    assert recorded(tmp_path / "after", LONG) == pytest.approx(recorded(tiny_folder, LONG))


@pytest.mark.parametrize("loss_weight", ["token", "rollout"])
def test_sample_that_these_weights_did_not_make_is_masked_but_counts_in_the_mean(
    loss_weight: LossWeight, tiny_folder: Path
) -> None:
    settings = msgspec.structs.replace(SETTINGS, loss_weight=loss_weight)
    good, bad = pair(tiny_folder)
    false = msgspec.structs.replace(good, logprobs=good.logprobs - np.float32(0.1))
    masked = Policy(str(tiny_folder), settings)
    report = masked.step([false, bad], 0)
    assert report.num_masked == 1
    assert report.logprob_gap_max == pytest.approx(0.1, abs=1e-3)
    # Alone with a sibling of its tokens' number that has no say, since its ratio is 0.
    silent = msgspec.structs.replace(good, logprobs=np.full_like(good.logprobs, 1e9))
    blind = msgspec.structs.replace(settings, max_logprob_gap=1e30)
    expected = Policy(str(tiny_folder), blind)
    assert expected.step([silent, bad], 0).grad_norm == pytest.approx(report.grad_norm)
    assert masked.probe().logprobs == pytest.approx(expected.probe().logprobs, abs=1e-6)


def test_gap_is_measured_on_the_weights_held_alone(tiny_folder: Path, tmp_path: Path) -> None:
    policy = Policy(str(tiny_folder), SETTINGS)
    samples = pair(tiny_folder)
    assert policy.step(samples, 0).logprob_gap_max is not None
    stale = policy.step(samples, 1)  # the weights moved on, under no name
    assert (stale.logprob_gap_max, stale.logprob_gap_mean, stale.num_masked) == (None, None, 0)
    assert stale.kl > 0.0
    policy.save(tmp_path / "v1", policy_version=1)
    policy.save(tmp_path / "checkpoint")  # a copy does not change what they are called
    fresh = pair(tmp_path / "v1", policy_version=1)
    gap = policy.step([*fresh, *samples], 2).logprob_gap_max
    assert gap is not None
    assert gap < 1e-4


@pytest.mark.parametrize("num_minibatches", [1, 2])
def test_gaps_come_run_by_run_in_the_order_of_the_samples(
    tiny_folder: Path, num_minibatches: int
) -> None:
    settings = msgspec.structs.replace(SETTINGS, num_minibatches=num_minibatches)
    samples = []
    for seq, (long, short) in enumerate([pair(tiny_folder), pair(tiny_folder, policy_version=5)]):
        off = msgspec.structs.replace(
            long,
            rollout_id=RolloutId(GroupId("r", seq), 0),
            logprobs=long.logprobs - np.array([0, 0, 0.01, 0, 0.02, 0.03], np.float32),
            runs=(SampledRun(1, 0, "a"), SampledRun(2, 0, "b")),
        )
        samples += [off, msgspec.structs.replace(short, rollout_id=RolloutId(GroupId("r", seq), 1))]
    report = Policy(str(tiny_folder), settings).step(samples, 0)
    assert (report.held_policy_version, report.num_masked) == (0, 0)
    for first, second in (report.gaps[:2], report.gaps[2:]):
        told = [(gap.num_tokens, gap.total, gap.largest) for gap in (*first, *second)]
        expected = [(1, 0.01, 0.01), (2, 0.05, 0.03), (2, 0.0, 0.0)]
        assert told == [pytest.approx(each, abs=1e-4) for each in expected]


def test_drift_of_older_weights_is_told_and_masks_nothing(tiny_folder: Path) -> None:
    policy = Policy(str(tiny_folder), SETTINGS)
    far = [
        msgspec.structs.replace(sample, logprobs=sample.logprobs - np.float32(0.3))
        for sample in pair(tiny_folder, policy_version=5)
    ]
    report = policy.step(far, 0)
    assert (report.num_masked, report.logprob_gap_max) == (0, None)
    largest = [gap.largest for each in report.gaps for gap in each]
    assert largest == pytest.approx([0.3, 0.3], abs=1e-4)


def test_recording_that_is_no_number_is_masked_and_harms_nothing(tiny_folder: Path) -> None:
    good, bad = pair(tiny_folder)
    broken = msgspec.structs.replace(bad, logprobs=np.where(bad.loss_mask, np.nan, 0).astype("f4"))
    policy = Policy(str(tiny_folder), SETTINGS)
    report = policy.step([good, broken], 0)
    assert report.num_masked == 1
    assert math.isfinite(report.loss)
    assert math.isfinite(report.kl)
    assert np.isfinite(policy.probe().logprobs).all()


def test_minibatches_step_more_often_and_clip_against_the_first_weights(
    tiny_folder: Path,
) -> None:
    settings = msgspec.structs.replace(SETTINGS, num_minibatches=2, learning_rate=0.05)
    first, second = pair(tiny_folder), pair(tiny_folder)
    for index, sample in enumerate(second):
        other = new_sample([], [], seq=1, index=index).rollout_id
        second[index] = msgspec.structs.replace(sample, rollout_id=other)
    once = Policy(str(tiny_folder), msgspec.structs.replace(settings, num_minibatches=1))
    assert once.step([*first, *second], 0).clip_fraction == 0.0
    report = Policy(str(tiny_folder), settings).step([*first, *second], 0)
    assert report.clip_fraction > 0.0
    assert report.kl == pytest.approx(0.0, abs=1e-6)  # the proximal weights made the samples
    assert report.num_tokens == 10


def test_model_that_does_not_pack_says_what_it_says_alone(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = Gemma2Config(
        vocab_size=50,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=16,
        attn_logit_softcapping=2.0,  # not ours
    )
    Gemma2ForCausalLM(config).save_pretrained(tmp_path)
    report = Policy(str(tmp_path), SETTINGS).step(pair(tmp_path), 0)
    assert report.logprob_gap_max == pytest.approx(0.0, abs=1e-4)
    assert report.num_tokens == 5


def test_learning_rate_rises_over_the_warmup(tiny_folder: Path) -> None:
    settings = msgspec.structs.replace(SETTINGS, warmup_steps=4)
    policy = Policy(str(tiny_folder), settings)
    rates = [policy.step(pair(tiny_folder), step).learning_rate for step in (0, 1, 3, 9)]
    assert rates == pytest.approx([0.25e-3, 0.5e-3, 1e-3, 1e-3])


def test_entropy_bonus_spreads_the_policy(tiny_folder: Path) -> None:
    settings = msgspec.structs.replace(SETTINGS, entropy_coef=1.0)
    policy = Policy(str(tiny_folder), settings)
    samples = [msgspec.structs.replace(sample, reward=1.0) for sample in pair(tiny_folder)]
    entropies = [policy.step(samples, step).entropy for step in range(4)]
    assert all(later > earlier for earlier, later in itertools.pairwise(entropies))


def test_step_without_samples_changes_nothing_and_says_so(tiny_folder: Path) -> None:
    report = Policy(str(tiny_folder), SETTINGS).step([], 0)
    assert (report.num_tokens, report.loss, report.grad_norm) == (0, 0.0, 0.0)
    assert math.isfinite(report.entropy)


def test_report_goes_into_a_metrics_row(tiny_folder: Path) -> None:
    report = Policy(str(tiny_folder), SETTINGS).step(pair(tiny_folder), 0)
    row = report.figures()
    assert msgspec.json.decode(msgspec.json.encode(row)) == pytest.approx(row)


class Others(Alone):
    """Other ranks: one of them has `most` to do, and each sum is larger by what they have."""

    def __init__(self, most: int = 1, sums: float = 0.0) -> None:
        self._most = most
        self._sums = sums

    def total(self, values: Sequence[float]) -> list[float]:
        return [value + self._sums for value in values]

    def most(self, value: float) -> float:
        return max(value, self._most)


@contextlib.contextmanager
def forwards() -> Iterator[list[int]]:
    """At how many positions each forward of the model is read."""
    kept: list[int] = []

    def note(module: torch.nn.Module, _: object, output: CausalLMOutputWithPast) -> None:
        if isinstance(module, Qwen3ForCausalLM) and output.logits is not None:
            kept.append(output.logits.shape[1])

    hook = torch.nn.modules.module.register_module_forward_hook(note)
    yield kept
    hook.remove()


def test_how_much_a_forward_takes_changes_nothing_but_their_number(tiny_folder: Path) -> None:
    small = msgspec.structs.replace(SETTINGS, microbatch_tokens=1)
    samples = pair(tiny_folder)
    one, many = (Policy(str(tiny_folder), each) for each in (SETTINGS, small))
    for step in range(3):
        for policy, expected in ((one, [5]), (many, [2, 3])):
            with forwards() as kept:
                policy.step(samples, step)
            assert kept == expected
    assert many.probe().logprobs == pytest.approx(one.probe().logprobs, abs=1e-5)


def test_a_rank_with_less_to_do_than_others_takes_part_and_adds_nothing(tiny_folder: Path) -> None:
    settings = msgspec.structs.replace(SETTINGS, num_minibatches=2)
    alone, beside = (Policy(str(tiny_folder), settings, each) for each in (None, Others(most=2)))
    other = [
        msgspec.structs.replace(each, rollout_id=RolloutId(GroupId("r", 1), at))
        for at, each in enumerate(pair(tiny_folder))
    ]
    for step in range(2):
        samples = pair(tiny_folder) + other
        report, expected = beside.step(samples, step), alone.step(samples, step)
        gap_max = expected.logprob_gap_max  # of the other, it is what the others say
        assert msgspec.structs.replace(report, logprob_gap_max=gap_max) == expected
    assert beside.probe() == alone.probe()


def test_a_rank_without_samples_takes_part_and_adds_nothing(tiny_folder: Path) -> None:
    policy = Policy(str(tiny_folder), SETTINGS, Others(most=2, sums=4.0))
    before = policy.probe()
    with forwards() as kept:
        report = policy.step([], 0)
    # Two minibatches of two batches, for their proximal weights and for themselves.
    assert kept == [1] * 8
    assert (report.num_tokens, report.grad_norm) == (4, 0.0)
    assert policy.probe() == before


@pytest.mark.parametrize(("loss_weight", "as_many"), [("token", 5.0), ("rollout", 2.0)])
def test_a_ranks_samples_weigh_what_they_are_of_all(
    loss_weight: LossWeight, as_many: float, tiny_folder: Path
) -> None:
    settings = msgspec.structs.replace(SETTINGS, loss_weight=loss_weight)
    one = Policy(str(tiny_folder), settings).step(pair(tiny_folder), 0)
    half = Policy(str(tiny_folder), settings, Others(sums=as_many)).step(pair(tiny_folder), 0)
    assert half.grad_norm == pytest.approx(one.grad_norm / 2)
