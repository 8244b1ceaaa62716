"""The ways to bound staleness that the simulator compares, behind one face; in rollouts.

    wait mask drop requeue   the StalenessManager of the product, as the pacer drives it
    wait, bound 0, 4, 8      the same with another bound; 0: each step waits for what it asked for
    known formula            ArealStalenessManager of compat.py, in groups, as AReaL uses it: the
                             oldest results first, whatever their age
    unbounded                the same without a bound on counts: what the fleet can do

Invariant: an arm knows of a group what a trainer knows: when it was asked for, and, of what has
come, which weights sampled it. Driven by _staleness_world.py.
"""

from typing import Protocol

import msgspec

from benchmarks._staleness_shape import Group, Shape
from rollmesh.compat import ArealStalenessManager
from rollmesh.core.config import StalePolicy
from rollmesh.core.ids import GroupId
from rollmesh.trainer.staleness import (
    BatchTaken,
    GroupAdmitted,
    GroupArrived,
    GroupStale,
    StalenessManager,
    StalenessSettings,
    StepPublished,
    TakeBatch,
)

FAR = 10**9


class Taken(msgspec.Struct):
    """What a step got, and what no step will get."""

    batch: list[GroupId] = []
    oldest_step: int = -FAR
    """Tokens of older weights do not train."""
    stale: list[GroupId] = []


class Arm(Protocol):
    """See the module."""

    name: str
    bound: int
    """No sample may be older, or FAR."""
    requeues: bool
    """Whether the task of a stale group is asked for again."""

    def capacity(self) -> int:
        """Rollouts that may be asked for."""

    def asked(self, group: Group) -> None:
        """It runs."""

    def arrived(self, group: Group, newest_steps: tuple[int, ...]) -> None:
        """It has ended; `newest_steps` are of its rollouts' last tokens."""

    def take(self, step: int, num_rollouts: int) -> Taken:
        """The trainer is free; `num_rollouts` are what it wants, 0 a batch."""

    def published(self, step: int) -> None:
        """Engines sample with the weights after `step` steps."""


class Managed:
    """Ours."""

    def __init__(self, name: str, policy: StalePolicy, shape: Shape, bound: int) -> None:
        self.name, self.bound = name, bound
        self.requeues = policy == "requeue"
        self._manager = StalenessManager(
            StalenessSettings(
                batch=shape.batch,
                max_staleness=bound,
                max_concurrent=shape.max_concurrent,
                policy=policy,
            )
        )

    def capacity(self) -> int:
        return self._manager.capacity

    def asked(self, group: Group) -> None:
        self._manager.step(GroupAdmitted(group.group_id, len(group.lengths)))

    def arrived(self, group: Group, newest_steps: tuple[int, ...]) -> None:
        num = len(group.lengths)
        self._manager.step(GroupArrived(group.group_id, num, group.asked_step, newest_steps))

    def take(self, step: int, num_rollouts: int) -> Taken:
        taken = Taken()
        for action in self._manager.step(TakeBatch(step, num_rollouts)):
            match action:
                case GroupStale():
                    taken.stale.append(action.group_id)
                case BatchTaken():
                    taken.batch, taken.oldest_step = [*action.group_ids], action.oldest_step
        return taken

    def published(self, step: int) -> None:
        self._manager.step(StepPublished(step))


class Known:
    """Theirs, or, with a bound that is FAR, none."""

    requeues = False
    bound = FAR
    """On counts alone, so it is none on age."""

    def __init__(self, name: str, shape: Shape, max_staleness: int) -> None:
        self.name = name
        self._size, self._batch = shape.group_size, shape.batch_groups
        self._version = 0
        most = shape.max_concurrent // shape.group_size
        self._known = ArealStalenessManager(self, most, shape.batch_groups, max_staleness)
        self._ready: list[tuple[float, GroupId]] = []

    def get_version(self) -> int:
        """Steps that have been published."""
        return self._version

    def capacity(self) -> int:
        return max(0, self._known.get_capacity()) * self._size

    def asked(self, group: Group) -> None:
        self._known.on_rollout_enqueued()
        self._known.on_rollout_submitted()

    def arrived(self, group: Group, newest_steps: tuple[int, ...]) -> None:
        del newest_steps
        self._known.on_rollout_accepted()
        self._ready.append((group.started_s, group.group_id))

    def take(self, step: int, num_rollouts: int) -> Taken:
        del step
        wanted = -(-num_rollouts // self._size) or self._batch
        if len(self._ready) < wanted:
            return Taken()
        self._ready.sort()
        batch = [group_id for _, group_id in self._ready[:wanted]]
        del self._ready[:wanted]
        return Taken(batch)

    def published(self, step: int) -> None:
        self._version = step


def arms(shape: Shape) -> list[Arm]:
    """All of them."""
    bound = shape.max_staleness
    waits = [Managed(f"wait, bound {far}", "wait", shape, far) for far in (0, 4, 8)]
    return [
        waits[0],
        Managed("wait", "wait", shape, bound),
        *waits[1:],
        Managed("mask", "mask", shape, bound),
        Managed("drop", "drop", shape, bound),
        Managed("requeue", "requeue", shape, bound),
        Known("known formula", shape, bound),
        Known("unbounded", shape, FAR),
    ]
