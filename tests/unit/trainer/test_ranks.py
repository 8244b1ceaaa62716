"""Ranks that hold one policy: the layers of any model are sharded, and gathered whole again."""

from collections.abc import Callable

import pytest
import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from rollmesh.trainer.controller.rendezvous import RankContext
from rollmesh.trainer.ranks import ShardedRanks, balance

VOCAB = 32


@pytest.fixture
def team(context: RankContext) -> ShardedRanks:
    return ShardedRanks(context.mesh["data"])


def new_gpt2() -> PreTrainedModel:
    """A model whose layers are not at model.model.layers."""
    ends = {"bos_token_id": 0, "eos_token_id": 1}
    return GPT2LMHeadModel(GPT2Config(vocab_size=VOCAB, n_embd=16, n_layer=3, n_head=2, **ends))


def new_qwen3() -> PreTrainedModel:
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 3, "head_dim": 8}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    return Qwen3ForCausalLM(Qwen3Config(vocab_size=VOCAB, **sizes, **heads))


@pytest.mark.parametrize("new", [new_gpt2, new_qwen3])
def test_each_layer_of_any_model_is_gathered_by_itself(
    team: ShardedRanks, new: Callable[[], PreTrainedModel]
) -> None:
    model = new().eval()
    before = {name: each.clone() for name, each in model.state_dict().items()}
    token_ids_1T = torch.arange(5)[None]
    expected = model(input_ids=token_ids_1T).logits.detach()
    team.shard(model)
    gathered = [part for part in model.modules() if isinstance(part, FSDPModule)]
    assert len(gathered) == 3 + 1, "three layers, and what is in none of them"
    assert all(isinstance(each, DTensor) for each in model.parameters())
    torch.testing.assert_close(model(input_ids=token_ids_1T).logits.detach(), expected)
    state = team.full_state(model)
    assert state is not None
    tied = before.keys() - state.keys()
    assert tied <= {"lm_head.weight"}, "a weight under two names is there once"
    for name, each in state.items():
        torch.testing.assert_close(each, before[name])


def test_model_without_named_layers_is_gathered_as_one(team: ShardedRanks) -> None:
    model = new_qwen3()
    model._no_split_modules = None  # noqa: SLF001 - as a model's author may leave it
    team.shard(model)
    assert [isinstance(part, FSDPModule) for part in model.modules()].count(True) == 1
    assert isinstance(model, FSDPModule)


def test_ranks_that_share_no_memory_with_the_first_export_nothing(context: RankContext) -> None:
    weights = {"a": torch.ones(2), "b": torch.ones(3)}
    mesh = context.mesh["data"]
    assert ShardedRanks(mesh, [0]).owned(weights) == {"a", "b"}
    assert ShardedRanks(mesh, [1]).owned(weights) == set()


@pytest.mark.parametrize("num", [1, 2, 3, 8])
def test_weights_are_divided_evenly_and_each_once(num: int) -> None:
    sizes = {f"layer.{at}": 1 + at % 7 for at in range(50)}
    hands = balance(sizes, num)
    assert sorted(name for hand in hands for name in hand) == sorted(sizes)
    totals = [sum(sizes[name] for name in hand) for hand in hands]
    assert max(totals) - min(totals) <= 1  # the smallest, which are dealt last
