"""Packed rows: no token is lost, doubled or padded, and weights do not depend on ranks.

Logits and gradients are those of each sequence alone.
"""

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    Llama4ForCausalLM,
    Llama4TextConfig,
    MambaConfig,
    MambaForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.modeling_outputs import CausalLMOutputWithPast

from rollmesh.core.config import LossWeight
from rollmesh.core.errors import ConfigError
from rollmesh.serve.client.samples import Sample
from rollmesh.trainer.algorithms.packing import (
    PACKED,
    TokenBatch,
    assign_minibatches,
    empty_batch,
    enable_packing,
    pack,
    packed_logits,
    token_weights,
)
from tests.unit.trainer.samples import new_sample


def packed(samples: list[Sample], max_tokens: int = 64) -> list[TokenBatch]:
    """The nth sample has advantage n and weight n + 0.5."""
    numbers: npt.NDArray[np.float32] = np.arange(len(samples), dtype=np.float32)
    return list(pack(samples, numbers, numbers + np.float32(0.5), max_tokens, "cpu"))


@st.composite
def some_samples(draw: st.DrawFn) -> list[Sample]:
    samples = []
    for index in range(draw(st.integers(1, 8))):
        mask = [0, *draw(st.lists(st.integers(0, 1), min_size=1, max_size=12)), 1]
        token_ids = draw(st.lists(st.integers(0, 3), min_size=len(mask), max_size=len(mask)))
        logprobs = [-float(n + 1) for n in range(len(mask))]
        temperature = draw(st.sampled_from([0.5, 1.0]))
        sample = new_sample(
            token_ids,
            mask,
            index=index,
            logprobs=logprobs,
            policy_version=index,
            temperature=temperature,
        )
        samples.append(sample)
    return samples


@settings(deadline=None, max_examples=60)
@given(some_samples(), st.integers(1, 40))
def test_every_trained_token_has_one_entry_with_all_that_was_recorded(
    samples: list[Sample], max_tokens: int
) -> None:
    seen = []
    for batch in packed(samples, max_tokens):
        kept = batch.kept_K[batch.kept_index_N]
        starts = np.array(batch.starts)
        which = np.searchsorted(starts, kept.numpy(), "right") - 1
        fields = (
            batch.samples_N,
            kept.numpy() + 1 - starts[which],
            batch.token_ids_T[kept],
            batch.targets_K[batch.kept_index_N],
            batch.temperatures_K[batch.kept_index_N],
            batch.recorded_N,
            batch.policy_versions_N,
            batch.advantages_N,
            batch.weights_N,
        )
        seen += list(zip(*(field.tolist() for field in fields), strict=True))
    expected = [
        (
            *(at, n, s.token_ids[n - 1], s.token_ids[n], s.temperature, s.logprobs[n]),
            *(s.policy_versions[n], at, at + 0.5),
        )
        for at, s in enumerate(samples)
        for n in np.flatnonzero(s.loss_mask)
    ]
    assert sorted(seen) == sorted(expected)


@settings(deadline=None, max_examples=60)
@given(some_samples(), st.integers(1, 40))
def test_tokens_of_all_batches_are_the_distinct_sequences_and_no_padding(
    samples: list[Sample], max_tokens: int
) -> None:
    sequences = []
    for batch in packed(samples, max_tokens):
        ends = zip(batch.starts, batch.starts[1:], strict=False)
        sequences += [tuple(batch.token_ids_T[start:end].tolist()) for start, end in ends]
        assert batch.starts[-1] == len(batch.token_ids_T)
        assert len(batch.starts) == 2 or len(batch.token_ids_T) <= max_tokens
    distinct = {(sample.token_ids.tobytes(), sample.temperature): sample for sample in samples}
    assert sorted(sequences) == sorted(tuple(s.token_ids[:-1].tolist()) for s in distinct.values())
    assert [len(each) for each in sequences] == sorted(len(each) for each in sequences)


def test_batches_are_filled_as_far_as_the_bound_allows() -> None:
    samples = [
        new_sample([at] * length, [0] * (length - 1) + [1], index=at)
        for at, length in enumerate([9, 2, 8, 3, 2, 30])
    ]
    batches = packed(samples, max_tokens=11)
    assert [batch.starts for batch in batches] == [(0, 1, 2, 4, 11), (0, 8), (0, 29)]


def test_samples_of_equal_tokens_share_a_sequence_and_keep_their_entries() -> None:
    samples = [
        new_sample([1, 2, 3], [0, 1, 1], index=0, logprobs=[0, -1, -2]),
        new_sample([1, 2, 4], [0, 1, 1], index=1, logprobs=[0, -3, -4]),
        new_sample([1, 2, 3], [0, 0, 1], index=2, logprobs=[0, 0, -5]),
    ]
    (batch,) = packed(samples)
    assert batch.token_ids_T.tolist() == [1, 2, 1, 2]
    assert batch.samples_N.tolist() == [0, 0, 2, 1, 1]
    assert batch.kept_K[batch.kept_index_N].tolist() == [0, 1, 1, 2, 3]
    assert batch.targets_K.tolist() == [2, 3, 2, 4]
    assert batch.recorded_N.tolist() == [-1, -2, -5, -3, -4]


def test_equal_tokens_of_another_temperature_have_a_sequence_of_their_own() -> None:
    pair = [new_sample([1, 2], [0, 1], index=at, temperature=at + 1.0) for at in range(2)]
    (batch,) = packed(pair)
    assert batch.temperatures_K.tolist() == [1.0, 2.0]


def test_empty_batch_is_one_token_that_does_not_train() -> None:
    batch = empty_batch("cpu")
    assert (batch.token_ids_T.tolist(), batch.starts) == ([0], (0, 1))
    of_tokens = [getattr(batch, name) for name in TokenBatch._fields if name.endswith("_N")]
    assert [len(each) for each in of_tokens] == [0] * 6


def test_temperature_of_zero_cannot_be_trained() -> None:
    with pytest.raises(ConfigError, match=r"sampling\.temperature must be above 0"):
        packed([new_sample([1, 2], [0, 1], temperature=0.0)])


def shares(samples: list[Sample], rule: LossWeight) -> list[float]:
    weights, total = token_weights(samples, rule)
    return list(weights / total)


def whole_and_parts() -> list[Sample]:
    """A rollout of 2 trained tokens, and one of 3 + 1 whose graph was cut into two."""
    return [
        new_sample([1, 2, 3], [0, 1, 1], index=0),
        new_sample([1, 2, 3, 4], [0, 1, 1, 1], index=1, weight=0.75),
        new_sample([1, 5], [0, 1], index=1, weight=0.25),
    ]


def test_with_token_weights_every_trained_token_has_equal_weight() -> None:
    assert shares(whole_and_parts(), "token") == pytest.approx([1 / 6] * 3)


def test_with_rollout_weights_every_rollout_has_equal_weight() -> None:
    # Two rollouts: 1/2 each, over 2 tokens of the one and 3 + 1 tokens of the other.
    assert shares(whole_and_parts(), "rollout") == pytest.approx([0.25, 0.125, 0.125])


@pytest.mark.parametrize("rule", ["token", "rollout"])
def test_weight_of_a_rollout_does_not_depend_on_its_number_of_samples(rule: LossWeight) -> None:
    other, *cut = whole_and_parts()
    uncut = new_sample([1, 2, 3, 4, 5], [0, 1, 1, 1, 1], index=1)
    in_two, in_one = shares([other, *cut], rule), shares([other, uncut], rule)
    assert 3 * in_two[1] + in_two[2] == pytest.approx(4 * in_one[1])
    assert in_two[0] == pytest.approx(in_one[0])


@pytest.mark.parametrize("rule", ["token", "rollout"])
def test_weights_over_several_ranks_equal_those_of_one(rule: LossWeight) -> None:
    samples = whole_and_parts()
    (ours, total), (theirs, other) = (
        token_weights(samples[:1], rule),
        token_weights(samples[1:], rule),
    )
    together = np.concatenate([ours, theirs]) / (total + other)
    assert together.tolist() == pytest.approx(shares(samples, rule))


def test_minibatches_are_whole_groups_in_turn() -> None:
    groups = [3, 3, 1, 2, 1, 3, 0]
    samples = [new_sample([1, 2], [0, 1], seq=seq, index=at) for at, seq in enumerate(groups)]
    assert assign_minibatches(samples, 3) == [0, 0, 1, 2, 1, 0, 0]
    assert assign_minibatches(samples, 9) == [0, 0, 1, 2, 1, 0, 3]
    assert assign_minibatches(samples, 1) == [0] * 7


VOCAB = 50
SMALL = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "head_dim": 8,
}
WINDOW = 5


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Use one thread: two ranks that wait for each other over little work cost more CPU than the
    work."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def new_qwen(num_kv_heads: int = 2, window: int | None = None) -> PreTrainedModel:
    """A model in double precision, with weights so large that every position attends to all."""
    torch.manual_seed(0)
    config = Qwen3Config(
        **SMALL,
        num_key_value_heads=num_kv_heads,
        initializer_range=0.3,
        use_sliding_window=window is not None,
        sliding_window=window,
        max_window_layers=1,
    )
    return Qwen3ForCausalLM(config).double().eval()


@functools.cache
def qwen_twins(num_kv_heads: int, window: int | None) -> tuple[PreTrainedModel, PreTrainedModel]:
    """Models with the same weights, with transformers' own attention and with ours."""
    ours = new_qwen(num_kv_heads, window)
    ours.set_attn_implementation(PACKED)
    return new_qwen(num_kv_heads, window), ours


def tokens_of(lengths: list[int]) -> Tensor:
    return torch.arange(sum(lengths)) * 31 % VOCAB


def attention_of(model: PreTrainedModel) -> str:
    return str(model.config._attn_implementation)  # noqa: SLF001 - there is no other word for it


def gradients(model: PreTrainedModel, loss: Tensor) -> list[Tensor]:
    model.zero_grad()
    torch.autograd.backward(loss)
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def loss_of(logits_KV: Tensor, scale_K: Tensor) -> Tensor:
    """A loss under which every position has a different gradient."""
    return (torch.log_softmax(logits_KV, -1)[:, 3] * scale_K).sum()


@pytest.mark.parametrize("num_kv_heads", [4, 2, 1])
@pytest.mark.parametrize("window", [None, WINDOW])
@settings(deadline=None, max_examples=8)
@given(lengths=st.lists(st.integers(1, 3 * WINDOW), min_size=1, max_size=7))
def test_packed_sequences_have_the_logits_and_gradients_of_each_alone(
    num_kv_heads: int, window: int | None, lengths: list[int]
) -> None:
    model, ours = qwen_twins(num_kv_heads, window)
    rows = torch.split(tokens_of(lengths), lengths)
    alone_TV = torch.cat([model(row[None]).logits[0] for row in rows])
    scale_T = torch.arange(1.0, len(alone_TV) + 1)
    kept = torch.arange(0, len(alone_TV), 2)
    expected = gradients(model, loss_of(alone_TV[kept], scale_T[kept]))
    starts = [0, *itertools.accumulate(lengths)]
    logits_KV = packed_logits(ours, torch.cat(rows), starts, kept)
    assert (logits_KV - alone_TV[kept]).abs().max() < 1e-9
    learned = gradients(ours, loss_of(logits_KV, scale_T[kept]))
    assert len(learned) == len(expected)
    for one, other in zip(learned, expected, strict=True):
        assert (one - other).abs().max() < 1e-9 * max(1.0, other.abs().max().item())


def new_granite() -> PreTrainedModel:
    """A model that scales its attention scores by another factor than the width of a head."""
    config = GraniteConfig(
        **SMALL, num_key_value_heads=2, attention_multiplier=0.9, initializer_range=0.3
    )
    return GraniteForCausalLM(config)


@pytest.mark.parametrize("new", [lambda: new_qwen(window=WINDOW), new_granite])
def test_model_with_the_standard_attention_interface_packs(
    new: Callable[[], PreTrainedModel],
) -> None:
    torch.manual_seed(0)
    model = new().eval()
    assert enable_packing(model)
    assert attention_of(model) == PACKED


def test_no_mask_is_built_for_packed_sequences() -> None:
    model = new_qwen(window=WINDOW)
    assert enable_packing(model)
    seen = []
    for layer in model.model.layers:
        layer.register_forward_pre_hook(
            lambda _, __, kwargs: seen.append(kwargs["attention_mask"]), with_kwargs=True
        )
    packed_logits(model, tokens_of([4, 4, 9]), [0, 4, 8, 17], torch.tensor([16]))
    assert seen == [None, None]


class AllLogitsModel(Qwen3ForCausalLM):  # type: ignore[misc]  # transformers is untyped
    """A model that always computes the logits of all positions."""

    def forward(self, input_ids: Tensor, **kwargs: Any) -> CausalLMOutputWithPast:
        output: CausalLMOutputWithPast = super().forward(input_ids, **kwargs)
        return output


def test_model_without_logits_to_keep_gives_the_kept_logits() -> None:
    _, ours = qwen_twins(2, None)
    starts, kept = [0, 4, 8, 17], torch.tensor([0, 7, 16])
    expected = packed_logits(ours, tokens_of([17]), starts, kept)
    all_logits = AllLogitsModel(ours.config).double().eval()
    all_logits.load_state_dict(ours.state_dict())
    logits_KV = packed_logits(all_logits, tokens_of([17]), starts, kept)
    assert (logits_KV - expected).abs().max() < 1e-9


def new_mamba() -> PreTrainedModel:
    """A model whose state runs along the row."""
    return MambaForCausalLM(MambaConfig(vocab_size=VOCAB, hidden_size=16, num_hidden_layers=2))


def new_bloom() -> PreTrainedModel:
    """A model with its own attention, which derives positions from the mask."""
    return BloomForCausalLM(BloomConfig(vocab_size=VOCAB, hidden_size=16, n_layer=2, n_head=2))


def new_gemma() -> PreTrainedModel:
    """A model whose attention has a soft cap."""
    config = Gemma2Config(**SMALL, num_key_value_heads=2, sliding_window=WINDOW)
    return Gemma2ForCausalLM(config)


def new_llama4() -> PreTrainedModel:
    """A model whose chunks are in the mask alone; only a sequence that is longer is affected."""
    config = Llama4TextConfig(
        **SMALL,
        num_key_value_heads=2,
        intermediate_size_mlp=32,
        num_local_experts=2,
        attention_chunk_size=64,
        no_rope_layers=[1, 1],
        initializer_range=0.3,
        pad_token_id=0,
    )
    return Llama4ForCausalLM(config)


def new_stretched() -> PreTrainedModel:
    """A model whose positions past 64 tokens depend on the longest sequence."""
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}
    config = Qwen3Config(
        **SMALL, num_key_value_heads=2, rope_parameters=rope, max_position_embeddings=64
    )
    return Qwen3ForCausalLM(config)


@pytest.mark.parametrize("new", [new_mamba, new_bloom, new_gemma, new_llama4, new_stretched])
def test_model_that_cannot_be_packed_is_logged_and_runs_one_sequence_at_a_time(
    new: Callable[[], PreTrainedModel], caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(0)
    model = new().eval()
    before = attention_of(model)
    row = tokens_of([9])
    expected = model(row[None]).logits[0]
    assert not enable_packing(model)
    assert attention_of(model) == before
    assert [r.message for r in caplog.records if "not_packed" in r.message] != []
    logits = packed_logits(model, row, [0, 9], torch.arange(9))
    assert torch.equal(logits, expected)
    with pytest.raises(AssertionError, match="does not pack"):
        packed_logits(model, row, [0, 4, 9], torch.arange(9))
