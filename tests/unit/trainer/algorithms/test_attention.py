"""Packed sequences: logits and gradients are those of each sequence alone."""

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

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

from rollmesh.trainer.algorithms.packing import PACKED, enable_packing, packed_logits

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
    """Two ranks that wait for each other over little work cost more CPU than the work."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def new_qwen(num_kv_heads: int = 2, window: int | None = None) -> PreTrainedModel:
    """Double precision, with weights large enough that every position attends to all."""
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
    """An attention that weighs every position differently."""
    return (torch.log_softmax(logits_KV, -1)[:, 3] * scale_K).sum()


@pytest.mark.parametrize("num_kv_heads", [4, 2, 1])
@pytest.mark.parametrize("window", [None, WINDOW])
@settings(deadline=None, max_examples=8)
@given(lengths=st.lists(st.integers(1, 3 * WINDOW), min_size=1, max_size=7))
def test_sequences_packed_say_and_learn_what_they_do_alone(
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
    """An attention that scales its scores otherwise than by the width of a head."""
    config = GraniteConfig(
        **SMALL, num_key_value_heads=2, attention_multiplier=0.9, initializer_range=0.3
    )
    return GraniteForCausalLM(config)


@pytest.mark.parametrize("new", [lambda: new_qwen(window=WINDOW), new_granite])
def test_model_whose_attention_is_the_interfaces_packs(new: Callable[[], PreTrainedModel]) -> None:
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


class Frank(Qwen3ForCausalLM):  # type: ignore[misc]  # transformers is untyped
    """A model that computes the logits of all positions, whether they are wanted or not."""

    def forward(self, input_ids: Tensor, **kwargs: Any) -> CausalLMOutputWithPast:
        told: CausalLMOutputWithPast = super().forward(input_ids, **kwargs)
        return told


def test_model_that_cannot_keep_some_logits_is_read_at_those() -> None:
    _, ours = qwen_twins(2, None)
    starts, kept = [0, 4, 8, 17], torch.tensor([0, 7, 16])
    expected = packed_logits(ours, tokens_of([17]), starts, kept)
    frank = Frank(ours.config).double().eval()
    frank.load_state_dict(ours.state_dict())
    told = packed_logits(frank, tokens_of([17]), starts, kept)
    assert (told - expected).abs().max() < 1e-9


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
def test_model_that_cannot_be_packed_says_so_and_takes_a_sequence_at_a_time(
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
