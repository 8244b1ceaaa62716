"""Batches drawn ahead of the step that trains them, within a bound on their staleness.

Each batch stands for a group of rollouts that engines would sample. A StalenessManager
(rollmesh/trainer/staleness.py) decides how many may be in progress.
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
    """Batches from `draw(0)`, `draw(1)`, ..."""

    def __init__(self, draw: Callable[[int], _Batch], max_staleness: int) -> None:
        """Allow a step to train samples of weights that are up to `max_staleness` steps old."""
        self.staleness = StalenessManager(
            StalenessSettings(batch=1, max_staleness=max_staleness, max_concurrent=8)
        )
        self._draw = draw
        self._num_drawn = 0
        self._drawn: dict[GroupId, _Batch] = {}

    def next(self, step: int) -> _Batch:
        """Return the batch of `step`."""
        while self.staleness.capacity:
            group_id = GroupId("ahead", self._num_drawn)
            self.staleness.step(GroupAdmitted(group_id, 1))
            self._drawn[group_id] = self._draw(self._num_drawn)
            self._num_drawn += 1
            self.staleness.step(GroupArrived(group_id, 1, self.staleness.published_step))
        for action in self.staleness.step(TakeBatch(step)):
            if isinstance(action, BatchTaken):
                return self._drawn.pop(action.group_ids[0])
        raise AssertionError("a batch trained at once is never too old")

    def trained(self, step: int) -> None:
        """Record that weights after `step` now sample."""
        self.staleness.step(StepPublished(step + 1))
