"""PlainRank: what a TrainController is, for a process that a plain torchrun started.

    torchrun --nproc-per-node 2 train.py      each of both has rows of its own, and roles of its own

Nobody leads: every process runs the loop, on what it has itself. So there is no fetch buffer and no
store, tensors stay tensors (an empty Plane passes them), and `clear_batches` and `end_step` have
nothing to free. Invariants: a call is this process's own affair, unless it states how numbers are
reduced: that is a collective, and every rank makes it; ranks of a tensor-parallel group are given
the same by whoever writes the loop. Driven by a train loop.
"""

import os
from collections.abc import Sequence
from typing import Any, Self

import torch
import torch.distributed as dist

from rollmesh.core.errors import ConfigError
from rollmesh.tensors.nested import transform
from rollmesh.tensors.torch_bridge import Tensor
from rollmesh.trainer.controller.answers import Reduce, decode_values, encode_values, merge_answers
from rollmesh.trainer.controller.controller import RankPlan, RoleCall, TensorUsage
from rollmesh.trainer.controller.dispatch import Arguments, HeadShare, dispatch_locally
from rollmesh.trainer.controller.rendezvous import (
    RoleRegistry,
    backend_of,
    bind_collectives,
    gather,
    place_of,
)
from rollmesh.trainer.staleness import Staleness

NOTHING = TensorUsage((), (), ())


class PlainRank:
    """See the module."""

    def __init__(self, plan: RankPlan, staleness: Staleness | None = None) -> None:
        """Of `plan`, what processes that are there already need: topology, roles, device, threads.
        ConfigError where torchrun started another number of them, or none."""
        num_ranks = os.environ.get("WORLD_SIZE")
        if num_ranks is None:
            raise ConfigError(
                "WORLD_SIZE is not set: start this by torchrun, or lead ranks by a TrainController"
            )
        if int(num_ranks) != plan.topology.num_ranks:
            raise ConfigError(
                f"torchrun started {num_ranks} ranks, the plan has {plan.topology.num_ranks}"
            )
        self._plan = plan
        self._staleness = staleness
        self._cast: RoleRegistry | None = None
        self._is_ours = False
        """The process group, and so its end."""

    def start(self) -> None:
        """Meet the others, where that has not been done, and make the roles."""
        plan = self._plan
        if not dist.is_initialized():
            bind_collectives(os.environ.get("MASTER_ADDR", ""))
            dist.init_process_group(backend_of(plan.device))
            self._is_ours = True
        torch.set_num_threads(plan.num_threads)
        place = place_of(dist.get_rank(), plan.topology, plan.device)
        self._cast = RoleRegistry(plan.roles, place)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Part from the others, if it was here that they met."""
        self._cast = None
        if self._is_ours and dist.is_initialized():
            dist.destroy_process_group()

    @property
    def staleness(self) -> Staleness | None:
        """What paces the batches that are trained here, to look at; None where nothing does."""
        return self._staleness

    def take(self, batch: Any, step: int) -> Any:
        """It, as it is: it is this process's alone, and gone when nobody refers to it."""
        del step
        return batch

    def call(self, what: RoleCall | str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of an own role, on rows of one's own.

        Rows of the answer are of this process; numbers too, or, where the call states how they are
        reduced, of all heads. ConfigError where there is no such method; whatever it raises.
        """
        assert self._cast is not None, "start comes first"
        call = RoleCall(what) if isinstance(what, str) else what
        given, num_rows = dispatch_locally(Arguments(args, kwargs), call.rule, Tensor)
        role, _, method = call.method.partition(".")
        answer = self._cast.fitting(role, method, given.args, given.kwargs)(
            *given.args, **given.kwargs
        )
        if call.reduce == Reduce():
            return answer
        return self._joint(answer, num_rows, call.reduce)

    def end_step(self, step: int) -> TensorUsage:
        """Nothing is held, so nothing is freed, and nothing is left."""
        del step
        return NOTHING

    def clear_batches(self, *targets: Any) -> TensorUsage:
        """As `end_step`."""
        del targets
        return NOTHING

    def _joint(self, answer: Any, num_rows: int, reduce: Reduce) -> Any:
        """The answer with numbers of all heads, and rows of one's own."""
        said = transform(answer, Tensor, lambda found: [None] * len(found))
        bodies = gather(encode_values((said, num_rows)))
        heads = [decode_values(bodies[rank]) for rank in self._plan.topology.heads()]
        joint = merge_answers(
            [each for each, _ in heads], _shares([num for _, num in heads]), reduce
        )
        return _with_numbers_of(answer, joint, has_rows=num_rows > 0)


def _shares(num_rows: Sequence[int]) -> list[HeadShare] | None:
    """Whose rows are whose, if all are numbered through."""
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
