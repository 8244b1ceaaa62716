"""The ranks that hold one policy: sums over them, and the model that they share.

    SingleRank      one rank: sums are its own, the model is whole
    ShardedRanks    several: sums are over all heads, each holds a shard of the model (FSDP2,
                    torch.distributed.fsdp.fully_shard) and has rows of its own

- Gradients are summed over ranks and never averaged: the loss is divided by the tokens, or
  rollouts, of all ranks, so their number changes only the duration of a step.
- Every forward and backward of a sharded model is a collective: all ranks do as many, and a rank
  without rows left repeats one with weight 0.
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

from rollmesh.core.errors import ConfigError, NotFinite


class Ranks(Protocol):
    """Collective operations that a policy uses."""

    is_first: bool
    """Whether this rank writes files."""
    rank: int
    size: int
    """Rank `rank` of `size` holds that part of every weight's rows, as torch.chunk splits them."""

    def sum(self, values: Sequence[float]) -> list[float]:
        """The sum of each value over ranks."""

    def max(self, value: float) -> float:
        """The maximum over ranks."""

    def shard(self, model: PreTrainedModel) -> None:
        """Keep this rank's part of the model; before an optimiser is made."""

    def full_state(self, model: PreTrainedModel) -> dict[str, Tensor] | None:
        """The full weights on the host; None if the model itself holds them."""

    def owned(self, weights: Mapping[str, Tensor]) -> set[str]:
        """Names of the weights that this rank exports; each is exported by one rank."""


class SingleRank:
    """The only rank of a policy."""

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
    """One of several ranks."""

    def __init__(self, mesh: DeviceMesh, exporters: Sequence[int] = ()) -> None:
        """`mesh` is that of all data-parallel heads; `exporters` are the ranks that export weights
        (default: all)."""
        self._exporters = list(exporters or range(mesh.size()))
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
                # Applies to this module only. Gloo supports sums only.
                part.set_force_sum_reduction_for_comms(True)
                part.set_gradient_divide_factor(1.0)

    def full_state(self, model: PreTrainedModel) -> dict[str, Tensor] | None:
        return {name: full_tensor(shard).cpu() for name, shard in named_weights(model).items()}

    def owned(self, weights: Mapping[str, Tensor]) -> set[str]:
        if self.rank not in self._exporters:
            return set()
        sizes = {name: weight.numel() for name, weight in weights.items()}
        return balance(sizes, len(self._exporters))[self._exporters.index(self.rank)]

    def _reduced(self, values: Sequence[float], how: "dist.ReduceOp.RedOpType") -> list[float]:
        reduced = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(reduced, how, self._group)
        results: list[float] = reduced.tolist()
        return results


def _layers(model: PreTrainedModel) -> list[nn.Module]:
    """The units that FSDP gathers: modules that the model's author marked as not to be split."""
    names = model._no_split_modules or ()  # noqa: SLF001 - transformers has no public name
    return [part for part in model.modules() if type(part).__name__ in names]


def balance(sizes: Mapping[str, int], num: int) -> list[set[str]]:
    """Split names into `num` sets of similar size: the largest first, to the smallest set."""
    totals = [0] * num
    names: list[set[str]] = [set() for _ in totals]
    for name in sorted(sizes, key=lambda name: -sizes[name]):
        least = totals.index(min(totals))
        totals[least] += sizes[name]
        names[least].add(name)
    return names


def named_weights(model: PreTrainedModel) -> dict[str, Tensor]:
    """The weights that a folder of the model has, by name; shards if it is sharded."""
    # Tied weights have two names; a folder has them once.
    names = dict(model.named_parameters(remove_duplicate=False))
    second = names.keys() - dict(model.named_parameters()).keys()
    state = model.state_dict()
    return {name: state[name] for name in state if name not in second}


@torch.no_grad()
def is_finite(model: PreTrainedModel, ranks: Ranks) -> bool:
    """Whether no parameter holds NaN or infinity; a collective with the same result everywhere."""
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
    """The error for weights with NaN or infinity that were to be written as `what`."""
    return NotFinite(
        f"{what}: not written, since the weights hold NaN or infinity; the newest checkpoint has "
        "finite ones: lower trainer.learning_rate, then --resume"
    )


def check_finite(model: PreTrainedModel, ranks: Ranks, what: object) -> None:
    """Raise NotFinite, on all ranks, if a parameter holds NaN or infinity; a collective."""
    if not is_finite(model, ranks):
        raise not_finite_error(what)


def full_tensor(tensor: Tensor) -> Tensor:
    """The full tensor; a collective if it is sharded."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


AUTO = "auto"


def resolve_device(name: str, num_ranks: int = 1) -> torch.device:
    """Return the device called `name`; `auto` is cuda if there is a GPU for each rank of this host.

    Raises ConfigError if there is no such device.
    """
    if name == AUTO:
        return torch.device("cuda" if torch.cuda.device_count() >= num_ranks else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f'device = "{name}": {str(error).splitlines()[0]}') from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f'device = "{name}": torch finds no GPU; "cpu" always works')
    return device
