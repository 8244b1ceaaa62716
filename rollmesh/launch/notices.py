"""Terminal lines about a run's faults and recoveries, read from the files that its processes write.

- Each line is shown once; what was written before launch began is not shown.
- If the disk is too full for the trainer's log, launch reports its own failed write.
- Failed rollouts are shown once for each place in environment code, at most MAX_PLACES of them.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from rollmesh.core.files import FileTail
from rollmesh.core.types import ErrorPlace
from rollmesh.launch.folder import RunFolder
from rollmesh.launch.telemetry import Telemetry

MAX_PLACES = 16
"""The number of different rollout failures that the terminal shows."""


class ErrorRow(msgspec.Struct, frozen=True):
    """A line of the trainer's log that has a remedy: an error, or a warning with its `why`."""

    level: str
    fix: str
    error: str = ""
    why: str = ""

    def __str__(self) -> str:
        return f"the trainer: {self.error or self.why}; {self.fix}"


class ErrorTail:
    """Error lines that are written from now on."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self._fault = folder.fault
        self._tail = FileTail(folder.logs / "trainer.log")
        while self._tail.read():
            pass  # a resumed run has a long log

    def new(self) -> list[str]:
        """Return the lines since the last call."""
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
                continue  # it names no remedy
            if row.level == "error" or (row.level == "warning" and row.why):
                yield row


class FailureRow(msgspec.Struct, frozen=True):
    """A worker's latest failed rollout, as the router's /status reports it."""

    worker_id: str
    last_error: str = ""
    last_place: ErrorPlace | None = None
    last_task_id: str = ""


class RolloutFailures:
    """Failed rollouts of a run, one line for each cause."""

    def __init__(self, logs: Path) -> None:
        """`logs` is the folder of the workers' log files."""
        self._logs = logs
        self._seen: set[object] = set()

    def new(self, sample: Telemetry) -> list[str]:
        """Return a line for each cause that no earlier sample had."""
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
    """Return `worker-0: agent_error: ValueError: no (my_env.py:15 in run); task t7, log FILE`."""
    log = logs / f"{row.worker_id}.log"
    return f"{row.worker_id}: {row.last_error}; task {row.last_task_id}, log {log}"


class RecoveryRow(msgspec.Struct, frozen=True):
    """The part of a line of recoveries.jsonl that the terminal shows."""

    savepoint: str
    """Folder of the checkpoint; '' if there was none yet."""
    redone_steps: tuple[int, ...]
    num_ready: int
    num_open: int
    num_dropped: int
    lost: tuple[str, ...] = ()

    def __str__(self) -> str:
        begin = f"checkpoint {self.savepoint}" if self.savepoint else "its first weights"
        parts = [
            f"the trainer resumes from {begin}",
            f"steps to repeat: {len(self.redone_steps)}",
            f"groups ready: {self.num_ready}, open: {self.num_open}, dropped: {self.num_dropped}",
            *self.lost,
        ]
        return "; ".join(parts)


class RecoveryTail:
    """Trainer restarts that happen from now on."""

    def __init__(self, run_folder: Path) -> None:
        self._tail = FileTail(run_folder / "recoveries.jsonl")
        self._tail.read()

    def new(self) -> list[str]:
        """Return a line for each restart since the last call; other rows are skipped."""
        notices = []
        for line in self._tail.read():
            try:
                notices.append(str(msgspec.json.decode(line.data, type=RecoveryRow)))
            except msgspec.MsgspecError:
                continue
        return notices


class LoadRow(msgspec.Struct, frozen=True):
    """A line of an engine's log about its load."""

    event: str
    phase: str = ""
    amount: str = ""
    """How much of the phase is done, such as `3/8`; '' if unknown."""

    def __str__(self) -> str:
        return f"{self.phase} {self.amount}".strip()


class EngineLoads:
    """The progress of engines that load, by role, from the logs that they write from now on."""

    def __init__(self, logs: Path, roles: Iterable[str] = ()) -> None:
        self.states: dict[str, LoadRow] = {}
        """Engines that are loading."""
        self._tails = {role: FileTail(logs / f"{role}.log") for role in roles}
        for tail in self._tails.values():
            while tail.read():
                pass  # a resumed run has a log

    def read(self) -> None:
        """Fold new lines."""
        for role, tail in self._tails.items():
            for line in tail.read():
                try:
                    row = msgspec.json.decode(line.data, type=LoadRow)
                except msgspec.MsgspecError:
                    continue
                if row.event == "engine.loading":
                    self.states[role] = row
                elif row.event in ("engine.starting", "engine.serving"):
                    self.states.pop(role, None)
