"""Faults of a run that the user can act on, one terminal line each.

- Each is shown once, and those from before launch began are not shown again.
- If the disk is too full for the trainer's log, the line comes from what launch could not write.
- Failed rollouts are shown once for each place in environment code, at most MAX_PLACES of them.
"""

from collections.abc import Iterator
from pathlib import Path

import msgspec

from rollmesh.core.tail import Tail
from rollmesh.core.types import ErrorPlace
from rollmesh.launch.folder import RunFolder
from rollmesh.launch.sampler import Telemetry

MAX_PLACES = 16
"""Different failures of rollouts that the terminal shows."""


class ErrorRow(msgspec.Struct, frozen=True):
    """A line of the trainer's log that has a remedy: an error, or a warning with its `why`."""

    level: str
    fix: str
    error: str = ""
    why: str = ""

    def __str__(self) -> str:
        return f"the trainer: {self.error or self.why}; {self.fix}"


class Complaints:
    """Those that come from now on."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self._fault = folder.fault
        self._tail = Tail(folder.logs / "trainer.log")
        while self._tail.read():
            pass  # a run that goes on has a long log

    def new(self) -> list[str]:
        """A line for each since the last call."""
        return [*self._own(), *map(str, self._of_trainer())]

    def _own(self) -> list[str]:
        if self._folder.fault == self._fault:
            return []
        self._fault = self._folder.fault
        return [self._fault]

    def _of_trainer(self) -> Iterator[ErrorRow]:
        for line in self._tail.read():
            try:
                row = msgspec.json.decode(line.data, type=ErrorRow)
            except msgspec.MsgspecError:
                continue  # it says nothing of what to do
            if row.level == "error" or (row.level == "warning" and row.why):
                yield row


class FailureRow(msgspec.Struct, frozen=True):
    """A worker's latest failed rollout, as the router's /status reports it."""

    worker_id: str
    last_error: str = ""
    last_place: ErrorPlace | None = None
    last_task_id: str = ""


class RolloutFailures:
    """Failed rollouts of a run, each cause once."""

    def __init__(self, logs: Path) -> None:
        """`logs` is the folder of the workers' log files."""
        self._logs = logs
        self._seen: set[object] = set()

    def new(self, sample: Telemetry) -> list[str]:
        """A line for each cause that no earlier sample had."""
        try:
            rows = msgspec.convert((sample.router or {}).get("workers", []), list[FailureRow])
        except msgspec.ValidationError:
            return []
        return [failure_line(row, self._logs) for row in rows if self._is_new(row)]

    def _is_new(self, row: FailureRow) -> bool:
        cause = row.last_place or ":".join(row.last_error.split(":")[:2])
        if not row.last_error or cause in self._seen or len(self._seen) >= MAX_PLACES:
            return False
        self._seen.add(cause)
        return True


def failure_line(row: FailureRow, logs: Path) -> str:
    """`worker-0: agent_error: ValueError: no (my_env.py:15 in run); task t7, log FILE`."""
    log = logs / f"{row.worker_id}.log"
    return f"{row.worker_id}: {row.last_error}; task {row.last_task_id}, log {log}"
