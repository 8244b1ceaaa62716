"""PlainRank: the methods of a TrainController for a process that a plain torchrun started.

    torchrun --nproc-per-node 2 train.py      each process has its own rows and its own roles

- There is no controller: every process runs the loop on its own data. Tensors stay tensors, there
  is no store and no fetch buffer, and `clear_batches` and `end_step` have nothing to free.
- A call is local, unless it states how numbers are reduced: then it is a collective, and every rank
  makes it. The loop gives all ranks of a tensor-parallel group the same data.
"""

import os
from collections.abc import Sequence
from typing import Any, Self

import torch
import torch.distributed as dist

from rollmesh.core.addresses import address_towards
from rollmesh.core.errors import ConfigError
from rollmesh.tensors.handles import transform
from rollmesh.tensors.torch_bridge import Tensor
from rollmesh.trainer.controller.answers import Reduce, decode_values, encode_values, merge_answers
from rollmesh.trainer.controller.controller import RankPlan, RoleCall, TensorUsage
from rollmesh.trainer.controller.dispatch import Arguments, HeadShare, dispatch_locally
from rollmesh.trainer.controller.rendezvous import (
    RoleRegistry,
    backend_of,
    bind_collectives,
    gather,
    make_context,
    select_device,
)
from rollmesh.trainer.controller.spec import rank_device
from rollmesh.trainer.staleness import Staleness

NOTHING = TensorUsage((), (), ())


class PlainRank:
    """One rank of a torchrun job."""

    def __init__(self, plan: RankPlan, staleness: Staleness | None = None) -> None:
        """Use topology, roles, device and threads of `plan`; raise ConfigError if torchrun started
        another number of processes, or none."""
        num_ranks = os.environ.get("WORLD_SIZE")
        if num_ranks is None:
            raise ConfigError(
                "WORLD_SIZE is not set: start this by torchrun, or use a TrainController"
            )
        if int(num_ranks) != plan.topology.num_ranks:
            raise ConfigError(
                f"torchrun started {num_ranks} ranks, the plan has {plan.topology.num_ranks}"
            )
        self._plan = plan
        self._staleness = staleness
        self._roles: RoleRegistry | None = None
        self._is_ours = False
        """Whether the process group was made here, and so must be destroyed here."""

    def start(self) -> None:
        """Join the process group, if that has not been done, and make the roles."""
        plan, device = self._plan, device_here(self._plan.device)
        select_device(device)
        if not dist.is_initialized():
            bind_collectives(address_towards(os.environ.get("MASTER_ADDR", "")))
            dist.init_process_group(backend_of(device))
            self._is_ours = True
        torch.set_num_threads(plan.num_threads)
        context = make_context(dist.get_rank(), plan.topology, device)
        self._roles = RoleRegistry(plan.roles, context)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Leave the process group, if it was made here."""
        self._roles = None
        if self._is_ours and dist.is_initialized():
            dist.destroy_process_group()

    @property
    def staleness(self) -> Staleness | None:
        """The pacing of the batches that are trained here, read-only; None if there is none."""
        return self._staleness

    def take(self, batch: Any, step: int) -> Any:
        """Return `batch` unchanged; it is local and freed with its last reference."""
        del step
        return batch

    def call(self, what: RoleCall | str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of a role of this process, on its own rows.

        Rows of the answer are local. Numbers are local too, unless the call states how they are
        reduced over all heads. Raises ConfigError if there is no such method, and anything that it
        raises.
        """
        assert self._roles is not None, "start comes first"
        call = RoleCall(what) if isinstance(what, str) else what
        own, num_rows = dispatch_locally(Arguments(args, kwargs), call.rule, Tensor)
        role, _, method = call.method.partition(".")
        answer = self._roles.fitting(role, method, own.args, own.kwargs)(*own.args, **own.kwargs)
        if call.reduce == Reduce():
            return answer
        return self._joint(answer, num_rows, call.reduce)

    def end_step(self, step: int) -> TensorUsage:
        """Do nothing; nothing is held."""
        del step
        return NOTHING

    def clear_batches(self, *targets: Any) -> TensorUsage:
        """Do nothing; nothing is held."""
        del targets
        return NOTHING

    def _joint(self, answer: Any, num_rows: int, reduce: Reduce) -> Any:
        """The answer with numbers of all heads and rows of this process."""
        without_tensors = transform(answer, Tensor, lambda found: [None] * len(found))
        bodies = gather(encode_values((without_tensors, num_rows)))
        heads = [decode_values(bodies[rank]) for rank in self._plan.topology.heads()]
        joint = merge_answers(
            [each for each, _ in heads], _shares([num for _, num in heads]), reduce
        )
        return _with_numbers_of(answer, joint, has_rows=num_rows > 0)


def device_here(device: str) -> str:
    """Return the own device of this process, by the number that torchrun gave it on its host."""
    local_rank, num_sharing = (
        int(os.environ.get(name, default))
        for name, default in (("LOCAL_RANK", "0"), ("LOCAL_WORLD_SIZE", "1"))
    )
    return rank_device(device, local_rank, torch.cuda.device_count(), num_sharing)


def _shares(num_rows: Sequence[int]) -> list[HeadShare] | None:
    """The shares of heads, with all rows numbered consecutively."""
    if not any(num_rows):
        return None
    starts = [sum(num_rows[:head]) for head in range(len(num_rows))]
    return [
        HeadShare(tuple(range(at, at + num)), num) for at, num in zip(starts, num_rows, strict=True)
    ]


def _with_numbers_of(own: Any, joint: Any, has_rows: bool) -> Any:
    match own:
        case dict():
            return {k: _with_numbers_of(own[k], joint[k], has_rows) for k in own}
        case list() if has_rows:
            return own
        case list() | tuple():
            inner = [_with_numbers_of(*each, has_rows) for each in zip(own, joint, strict=True)]
            return inner if isinstance(own, list) else tuple(inner)
        case int() | float():
            return joint
    return own
