"""The ranks that hold one policy together: what they add up, and the model that they share.

    Alone    one rank: sums are its own, the model is whole
    Team     several: sums are over all heads, each holds a shard of the model (FSDP2,
             torch.distributed.fsdp.fully_shard) and sees rows of its own

Gradients are summed over ranks and never averaged: the loss is divided by the tokens, or rollouts,
of all of them, so that their number changes nothing but the time that a step takes. Every forward
and every backward of a shared model is a collective: all ranks do as many, and who has no row left
repeats one that weighs nothing. Driven by the policy, on the step thread.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from rollmesh.core.errors import NotFinite


class Ranks(Protocol):
    """What a policy asks of those that it trains with."""

    is_first: bool
    """Of all ranks, this one writes files."""
    rank: int
    size: int
    """Which of how many: it holds that part of every weight's rows, as torch.chunk cuts them."""

    def sum(self, values: Sequence[float]) -> list[float]:
        """Each added up over ranks."""

    def max(self, value: float) -> float:
        """The largest of all ranks'."""

    def shard(self, model: PreTrainedModel) -> None:
        """Keep this rank's part of it; before an optimiser is made."""

    def full_state(self, model: PreTrainedModel) -> dict[str, Tensor] | None:
        """Its whole weights on the host; None where it holds them itself."""

    def owned(self, weights: Mapping[str, Tensor]) -> set[str]:
        """Which of them this rank hands over; each is handed over by one."""


class SingleRank:
    """See the module."""

    is_first = True
    rank, size = 0, 1

    def sum(self, values: Sequence[float]) -> list[float]:
        return list(values)

    def max(self, value: float) -> float:
        return value

    def shard(self, model: PreTrainedModel) -> None:
        del model

    def full_state(self, model: PreTrainedModel) -> dict[str, Tensor] | None:
        del model
        return None

    def owned(self, weights: Mapping[str, Tensor]) -> set[str]:
        return set(weights)


class ShardedRanks:
    """See the module; `mesh` is that of all data-parallel heads."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self.is_first = mesh.get_rank() == 0
        self.rank, self.size = mesh.get_local_rank(), mesh.size()
        self._mesh = mesh
        self._group = mesh.get_group()

    def sum(self, values: Sequence[float]) -> list[float]:
        return self._reduced(values, dist.ReduceOp.SUM)

    def max(self, value: float) -> float:
        return self._reduced([value], dist.ReduceOp.MAX)[0]

    def shard(self, model: PreTrainedModel) -> None:
        for layer in _layers(model):
            fully_shard(layer, mesh=self._mesh)
        fully_shard(model, mesh=self._mesh)
        for part in model.modules():
            if isinstance(part, FSDPModule):
                # For itself alone, and not for its parts. Gloo adds up, and no more.
                part.set_force_sum_reduction_for_comms(True)
                part.set_gradient_divide_factor(1.0)

    def full_state(self, model: PreTrainedModel) -> dict[str, Tensor] | None:
        return {name: full_tensor(shard).cpu() for name, shard in named_weights(model).items()}

    def owned(self, weights: Mapping[str, Tensor]) -> set[str]:
        sizes = {name: weight.numel() for name, weight in weights.items()}
        return balance(sizes, self.size)[self.rank]

    def _reduced(self, values: Sequence[float], how: "dist.ReduceOp.RedOpType") -> list[float]:
        reduced = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(reduced, how, self._group)
        full_tensor: list[float] = reduced.tolist()
        return full_tensor


def _layers(model: PreTrainedModel) -> list[nn.Module]:
    """What is gathered at a time: the modules that their author says are not to be split."""
    names = model._no_split_modules or ()  # noqa: SLF001 - transformers has no other word
    return [part for part in model.modules() if type(part).__name__ in names]


def balance(sizes: Mapping[str, int], num: int) -> list[set[str]]:
    """Names for each of `num`, about as much each: the largest first, to who has least."""
    totals = [0] * num
    names: list[set[str]] = [set() for _ in totals]
    for name in sorted(sizes, key=lambda name: -sizes[name]):
        least = totals.index(min(totals))
        totals[least] += sizes[name]
        names[least].add(name)
    return names


def named_weights(model: PreTrainedModel) -> dict[str, Tensor]:
    """What a folder of it has, by name; of a shared model the shards."""
    # Weights that are tied are one under two names; a folder has them once.
    names = dict(model.named_parameters(remove_duplicate=False))
    second = names.keys() - dict(model.named_parameters()).keys()
    state = model.state_dict()
    return {name: state[name] for name in state if name not in second}


@torch.no_grad()
def is_finite(model: PreTrainedModel, ranks: Ranks) -> bool:
    """Whether no parameter holds NaN or infinity; a collective, with the same answer everywhere."""
    names = dict(model.named_parameters())
    local = [
        each.to_local() if isinstance(each, DTensor) else each
        for name, each in named_weights(model).items()
        if name in names
    ]
    sizes = [
        torch.linalg.vector_norm(each, ord=math.inf)
        for each in local
        if each.is_floating_point() and each.numel()
    ]
    num_others = sum(not math.isfinite(float(each)) for each in sizes)
    return ranks.max(float(num_others)) == 0.0


def not_finite_error(what: object) -> NotFinite:
    """The error where weights that are wanted for `what` hold NaN or infinity."""
    return NotFinite(
        f"{what}: not written, since the weights hold NaN or infinity; the newest savepoint has "
        "finite ones: lower trainer.learning_rate, then --resume"
    )


def check_finite(model: PreTrainedModel, ranks: Ranks, what: object) -> None:
    """Raise NotFinite, at all ranks, where a parameter holds NaN or infinity; a collective."""
    if not is_finite(model, ranks):
        raise not_finite_error(what)


def full_tensor(tensor: Tensor) -> Tensor:
    """All of it, wherever its parts are; a collective, where they are apart."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
