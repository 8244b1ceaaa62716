"""The policy in training: exact log-probs, correct reports, and steps in the right direction."""

import itertools
import math
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from transformers import Gemma2Config, Gemma2ForCausalLM

from rollmesh.core.config import LossWeight, ProximalRule
from rollmesh.core.errors import ModelError, NoRoom
from rollmesh.core.ids import GroupId, RolloutId
from rollmesh.serve.client.samples import SampledRun
from rollmesh.trainer.policy import Policy
from rollmesh.trainer.ranks import SingleRank
from rollmesh.trainer.weights.transfer import Payload, write_folder
from tests.disks import no_new_folders
from tests.unit.trainer.exact import LONG, SETTINGS, forwards, pair, recorded, two_groups
from tests.unit.trainer.samples import new_sample


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
    # The same as with a sibling of equal length whose ratio is 0.
    silent = msgspec.structs.replace(good, logprobs=np.full_like(good.logprobs, 1e9))
    blind = msgspec.structs.replace(settings, max_logprob_gap=1e30, max_token_gap=1e30)
    expected = Policy(str(tiny_folder), blind)
    assert expected.step([silent, bad], 0).grad_norm == pytest.approx(report.grad_norm)
    assert masked.probe().logprobs == pytest.approx(expected.probe().logprobs, abs=1e-6)


def test_recorded_nan_is_masked_and_harms_nothing(tiny_folder: Path) -> None:
    good, bad = pair(tiny_folder)
    broken = msgspec.structs.replace(bad, logprobs=np.where(bad.loss_mask, np.nan, 0).astype("f4"))
    policy = Policy(str(tiny_folder), SETTINGS)
    report = policy.step([good, broken], 0)
    assert (report.num_masked, report.num_masked_tokens) == (1, 0)
    assert math.isfinite(report.loss)
    assert math.isfinite(report.kl)
    assert np.isfinite(policy.probe().logprobs).all()


@pytest.mark.parametrize("value", [-50.0, np.nan, -np.inf])
def test_token_far_off_is_masked_alone_and_counts_in_the_mean(
    value: float, tiny_folder: Path
) -> None:
    settings = msgspec.structs.replace(SETTINGS, max_logprob_gap=0.5)
    good, bad = pair(tiny_folder)
    spiked = good.logprobs.copy()
    spiked[2] = value
    policy = Policy(str(tiny_folder), settings)
    report = policy.step([msgspec.structs.replace(good, logprobs=spiked), bad], 0)
    assert (report.num_masked, report.num_masked_tokens, report.num_tokens) == (0, 1, 5)
    # The same as with a ratio of 0 for that token; the others keep their weights.
    silent = good.logprobs.copy()
    silent[2] = 1e9
    blind = msgspec.structs.replace(settings, max_logprob_gap=1e30, max_token_gap=1e30)
    expected = Policy(str(tiny_folder), blind)
    silenced = expected.step([msgspec.structs.replace(good, logprobs=silent), bad], 0)
    assert silenced.grad_norm == pytest.approx(report.grad_norm)
    assert policy.probe().logprobs == pytest.approx(expected.probe().logprobs, abs=1e-6)


def test_a_long_sample_with_one_token_that_is_far_off_trains(tiny_folder: Path) -> None:
    samples = []
    for index in range(2):
        token_ids = [at % (40 + index) + 1 for at in range(400)]
        exact = recorded(tiny_folder, token_ids)
        exact[300] -= 3.0
        mask, reward = [0] + [1] * 399, float(index)
        samples.append(new_sample(token_ids, mask, index=index, reward=reward, logprobs=exact))
    report = Policy(str(tiny_folder), SETTINGS).step(samples, 0)
    assert (report.num_masked, report.num_masked_tokens) == (0, 2)
    assert report.grad_norm > 0.0


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


FAST = msgspec.structs.replace(
    SETTINGS, num_minibatches=2, learning_rate=0.05, max_importance_weight=1e9
)


@pytest.mark.parametrize("proximal", ["loglinear", "recorded"])
def test_tokens_of_the_current_weights_need_no_extra_forward(
    proximal: ProximalRule, tiny_folder: Path
) -> None:
    """Their recorded log-probs are the proximal ones, so the step equals one that recomputes
    them."""
    reports, samples = [], two_groups(tiny_folder)
    for rule, num_forwards in (("recompute", 4), (proximal, 2)):
        policy = Policy(str(tiny_folder), msgspec.structs.replace(FAST, proximal=rule))
        with forwards() as kept:
            report = policy.step(samples, 0)
        assert len(kept) == num_forwards
        assert report.clip_fraction > 0.0
        reports.append(
            (report.clip_fraction, report.grad_norm, report.loss, *policy.probe().logprobs)
        )
    assert reports[1] == pytest.approx(reports[0], abs=1e-4)


@pytest.mark.parametrize(
    ("proximal", "clipped"), [("recompute", 0.0), ("loglinear", 0.0), ("recorded", 0.6)]
)
def test_stale_token_is_clipped_only_if_its_recording_is_proximal(
    proximal: ProximalRule, clipped: float, tiny_folder: Path
) -> None:
    settings = msgspec.structs.replace(
        SETTINGS, proximal=proximal, num_minibatches=2, learning_rate=1e-6
    )
    far = [
        msgspec.structs.replace(each, logprobs=each.logprobs - np.float32(0.4))
        for each in two_groups(tiny_folder, policy_version=3)
    ]
    report = Policy(str(tiny_folder), settings).step(far, 9, step_of_version={3: 7})
    assert report.importance_by_age.keys() == {"2"}
    assert report.clip_fraction == pytest.approx(clipped)


@pytest.mark.parametrize("proximal", ["recompute", "loglinear", "recorded"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_recorded_nan_is_masked_in_any_minibatch_and_at_any_age(
    proximal: ProximalRule, value: float, tiny_folder: Path
) -> None:
    policy = Policy(str(tiny_folder), msgspec.structs.replace(FAST, proximal=proximal))
    samples = two_groups(tiny_folder)
    for at in (1, 3):
        broken = np.where(samples[at].loss_mask, value, 0).astype("f4")
        runs = (SampledRun(2, 8),)
        samples[at] = msgspec.structs.replace(samples[at], logprobs=broken, runs=runs)
    report = policy.step(samples, 0)
    assert (report.num_masked, report.num_masked_tokens) == (0, 4)
    assert math.isfinite(report.loss)
    assert math.isfinite(report.grad_norm)
    assert np.isfinite(policy.probe().logprobs).all()


def test_model_that_does_not_pack_gives_the_same_logprobs(tmp_path: Path) -> None:
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


def test_step_without_samples_changes_nothing_and_reports_it(tiny_folder: Path) -> None:
    report = Policy(str(tiny_folder), SETTINGS).step([], 0)
    assert (report.num_tokens, report.loss, report.grad_norm) == (0, 0.0, 0.0)
    assert math.isfinite(report.entropy)


class Others(SingleRank):
    """Other ranks: one of them has `most` batches, and `sums` is added to each sum."""

    def __init__(self, most: int = 1, sums: float = 0.0) -> None:
        self._most = most
        self._sums = sums

    def sum(self, values: Sequence[float]) -> list[float]:
        return [value + self._sums for value in values]

    def max(self, value: float) -> float:
        return max(value, self._most)


def test_forward_size_changes_only_the_number_of_forwards(tiny_folder: Path) -> None:
    small = msgspec.structs.replace(SETTINGS, microbatch_tokens=1)
    samples = pair(tiny_folder)
    one, many = (Policy(str(tiny_folder), each) for each in (SETTINGS, small))
    for step in range(3):
        for policy, expected in ((one, [5]), (many, [2, 3])):
            with forwards() as kept:
                policy.step(samples, step)
            assert kept == expected
    assert many.probe().logprobs == pytest.approx(one.probe().logprobs, abs=1e-5)


def test_rank_with_fewer_batches_joins_every_collective_and_adds_nothing(tiny_folder: Path) -> None:
    settings = msgspec.structs.replace(SETTINGS, num_minibatches=2)
    alone, beside = (Policy(str(tiny_folder), settings, each) for each in (None, Others(most=2)))
    other = [
        msgspec.structs.replace(each, rollout_id=RolloutId(GroupId("r", 1), at))
        for at, each in enumerate(pair(tiny_folder))
    ]
    for step in range(2):
        samples = pair(tiny_folder) + other
        report, expected = beside.step(samples, step), alone.step(samples, step)
        gap_max = expected.logprob_gap_max  # that of the samples of other ranks
        assert msgspec.structs.replace(report, logprob_gap_max=gap_max) == expected
    assert beside.probe() == alone.probe()


def test_rank_without_samples_joins_every_collective_and_adds_nothing(tiny_folder: Path) -> None:
    policy = Policy(str(tiny_folder), SETTINGS, Others(most=2, sums=4.0))
    before = policy.probe()
    with forwards() as kept:
        report = policy.step([], 0)
    # Two minibatches of two batches, for their proximal weights and for themselves.
    assert kept == [1] * 8
    assert (report.num_tokens, report.grad_norm) == (4, 0.0)
    assert policy.probe() == before


@pytest.mark.parametrize(("loss_weight", "as_many"), [("token", 5.0), ("rollout", 2.0)])
def test_weight_of_a_ranks_samples_is_their_share_of_all(
    loss_weight: LossWeight, as_many: float, tiny_folder: Path
) -> None:
    settings = msgspec.structs.replace(SETTINGS, loss_weight=loss_weight)
    one = Policy(str(tiny_folder), settings).step(pair(tiny_folder), 0)
    half = Policy(str(tiny_folder), settings, Others(sums=as_many)).step(pair(tiny_folder), 0)
    assert half.grad_norm == pytest.approx(one.grad_norm / 2)


@pytest.mark.parametrize("lora_rank", [0, 2])
def test_weights_that_the_disk_refuses_are_reported_in_one_line(
    lora_rank: int, tiny_folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "weights").touch()  # where a folder belongs
    policy = Policy(str(tiny_folder), msgspec.structs.replace(SETTINGS, lora_rank=lora_rank))
    with pytest.raises(ModelError, match=r"weights/v000001: cannot be written: not a directory"):
        policy.export(tmp_path / "weights" / "v000001", 1)
    policy.close()


@pytest.mark.parametrize("lora_rank", [0, 2])
def test_weights_refused_by_a_full_disk_are_exported_once_there_is_space(
    lora_rank: int, tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = Policy(str(tiny_folder), msgspec.structs.replace(SETTINGS, lora_rank=lora_rank))
    folder = tmp_path / "v000001"
    full = no_new_folders(monkeypatch, tmp_path)
    with full, pytest.raises(NoRoom, match=r"v000001: cannot be written: no space left on device"):
        policy.export(folder, 1)
    write_folder(Payload(1, str(folder), policy.export(folder, 1)))
    assert (folder / ("adapter_config.json" if lora_rank else "model.safetensors")).is_file()
    policy.close()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_policy_offloaded_between_steps_trains_the_same(tiny_folder: Path, tmp_path: Path) -> None:
    settings = msgspec.structs.replace(SETTINGS, device="cuda")
    stays, leaves = (Policy(str(tiny_folder), settings) for _ in range(2))
    samples = two_groups(tiny_folder)
    for step in range(3):
        stays.step(samples, step)
        leaves.step(samples, step)
        before = torch.cuda.memory_allocated()
        leaves.offload()
        assert torch.cuda.memory_allocated() < before
        folder = tmp_path / str(step)
        folder.mkdir()
        leaves.snapshot(folder)
        leaves.reload()
        assert leaves.probe() == stays.probe()


def test_offload_without_a_gpu_changes_nothing(tiny_folder: Path) -> None:
    policy, samples = Policy(str(tiny_folder), SETTINGS), two_groups(tiny_folder)
    policy.step(samples, 0)
    before = policy.probe()
    policy.offload()
    policy.reload()
    assert policy.probe() == before
    policy.step(samples, 1)
    assert policy.probe() != before
