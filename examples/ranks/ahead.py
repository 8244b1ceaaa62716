"""Batches drawn ahead of the step that trains them, and never older than they may be.

Each stands for a group of rollouts that engines would sample. A StalenessManager says how many may
be under way: see rollmesh/trainer/staleness.py. Driven by train.py.
"""

from collections.abc import Callable
from typing import Generic, TypeVar

from rollmesh.core.ids import GroupId
from rollmesh.trainer.staleness import (
    BatchTaken,
    GroupAdmitted,
    GroupArrived,
    StalenessManager,
    StalenessSettings,
    StepPublished,
    TakeBatch,
)

_Batch = TypeVar("_Batch")


class Ahead(Generic[_Batch]):
    """Of what `draw` gives for 0, 1, 2..."""

    def __init__(self, draw: Callable[[int], _Batch], max_staleness: int) -> None:
        """A step may train what weights of up to `max_staleness` steps before have sampled."""
        self.staleness = StalenessManager(
            StalenessSettings(batch=1, max_staleness=max_staleness, max_concurrent=8)
        )
        self._draw = draw
        self._num_drawn = 0
        self._drawn: dict[GroupId, _Batch] = {}

    def next(self, step: int) -> _Batch:
        """What `step` trains."""
        while self.staleness.capacity:
            group_id = GroupId("ahead", self._num_drawn)
            self.staleness.step(GroupAdmitted(group_id, 1))
            self._drawn[group_id] = self._draw(self._num_drawn)
            self._num_drawn += 1
            self.staleness.step(GroupArrived(group_id, 1, self.staleness.published_step))
        for action in self.staleness.step(TakeBatch(step)):
            if isinstance(action, BatchTaken):
                return self._drawn.pop(action.group_ids[0])
        raise AssertionError("what is drawn at once is never too old")

    def trained(self, step: int) -> None:
        """Weights after `step` sample from now on."""
        self.staleness.step(StepPublished(step + 1))
