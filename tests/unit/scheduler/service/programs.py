"""A small model of a pipeline's program: it generates and trains in turn, requesting GPUs each
time.

- A program proceeds only on messages it received, as hooks do.
"""

from rollmesh.wire.scheduling import (
    GENERATION_CLUSTER,
    GpuPriority,
    NotifyReleaseGpus,
    NotifyReleaseThenRequestGpus,
    RequestGpus,
    TicketState,
)
from tests.unit.scheduler.service.stage import TRAIN, Asked, Stage


class Program:
    """`num_rollouts` times: generate for `generates_s`, train for `trains_s`."""

    def __init__(
        self, name: str, num_rollouts: int, generates_s: float = 2.0, trains_s: float = 1.0
    ) -> None:
        self.name = name
        self._asks = list(_asks(name, num_rollouts))
        self._works_s = {GENERATION_CLUSTER: generates_s, TRAIN: trains_s}
        self._now: Asked | None = None
        self._until_s: float | None = None

    @property
    def is_done(self) -> bool:
        return not self._asks and self._now is None

    def poll(self, stage: Stage) -> None:
        """Request the next cluster once the last was held for long enough."""
        if self._now is not None:
            state = stage.state(self._now.key)
            if state in (TicketState.QUEUED, TicketState.OFFERED):
                return
            releases = isinstance(self._now, NotifyReleaseGpus)
            expected = TicketState.RELEASED if releases else TicketState.GRANTED
            assert state is expected, stage.moved[self._now.key]
            works_s = 0.0 if releases else self._works_s[self._now.cluster]
            if self._until_s is None:
                self._until_s = stage.now_s + works_s
            if stage.now_s < self._until_s:
                return
        self._now, self._until_s = (self._asks.pop(0) if self._asks else None), None
        if self._now:
            stage.ask(self._now)


def _asks(name: str, num_rollouts: int) -> list[Asked]:
    first = RequestGpus(f"{name}-0", name, TRAIN, GpuPriority.INITIALIZATION)
    asks: list[Asked] = [first]
    for step in range(num_rollouts):
        generates = NotifyReleaseThenRequestGpus(
            f"{name}-{step}-generate",
            name,
            TRAIN,
            GENERATION_CLUSTER,
            GpuPriority.GENERATION,
            step - 1,
            step,
            16,
        )
        trains = NotifyReleaseThenRequestGpus(
            f"{name}-{step}-train",
            name,
            GENERATION_CLUSTER,
            TRAIN,
            GpuPriority.ACTOR_TRAINING,
            step,
            step,
        )
        asks += [generates, trains]
    return [*asks, NotifyReleaseGpus(f"{name}-end", name, TRAIN, num_rollouts)]


def run_all(stage: Stage, programs: list[Program], limit_s: float = 600.0) -> None:
    """Run until all are done; fail the test if they are late."""
    end_s = stage.now_s + limit_s
    while not all(each.is_done for each in programs):
        for each in programs:
            each.poll(stage)
        stage.run(0.25)
        left = [each.name for each in programs if not each.is_done]
        assert stage.now_s < end_s, f"{left} are not done: {stage.open}"
