"""The worker's rollout slots: how many rollouts run at once, who waits for one, how many failed.

Invariant: at most `max_rollouts` rollouts hold a slot; those that wait get theirs in the order of
their coming; a cancelled waiter takes nothing. Plain integers, so that the beat thread may read
them. Driven by groups.py.
"""

import asyncio
from contextlib import ExitStack
from types import TracebackType

from rollmesh.core.types import ErrorPlace


class Slots:
    """An `async with` per rollout."""

    def __init__(self, max_rollouts: int) -> None:
        self._free = asyncio.Semaphore(max_rollouts)
        self.num_open = 0
        """Rollouts that run or wait for a slot."""
        self.num_finished = 0
        """Rollouts that came to their end since the start, cancelled ones not counted."""
        self.num_failed = 0
        """Those of them that ended in an error."""
        self.last_error = ""
        self.last_place: ErrorPlace | None = None
        """Where in environment code `last_error` came from."""
        self.last_task_id = ""
        """The task whose rollout ended in `last_error`."""

    async def __aenter__(self) -> None:
        self.num_open += 1
        with ExitStack() as undo:
            undo.callback(self._close)
            await self._free.acquire()
            undo.pop_all()

    def _close(self) -> None:
        self.num_open -= 1

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._free.release()
        self.num_open -= 1
        self.num_finished += kind is None

    def note_failure(self, error: str, place: ErrorPlace | None, task_id: str) -> None:
        """Count a rollout that ended in an error."""
        self.num_failed += 1
        self.last_error, self.last_place, self.last_task_id = error, place, task_id
