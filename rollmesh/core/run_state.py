"""The state of a run, as its folder shows it to every reader.

    WAITING -> RUNNING -> DONE, STOPPED or FAILED    launch writes it to state.json
                  |
                  +-> KILLED                         launch is gone and wrote no end
                  +-> SILENT                         no telemetry, and launch cannot be checked

- Launch writes RUNNING when it begins and one of ENDED when it ends; readers derive the rest.
- Launch is checked by its pid and start time, so that neither a full disk nor a changed clock makes
  a living launch look dead.
"""

import enum
import os
import secrets
from pathlib import Path

import msgspec

from rollmesh.core.process import pid_space, start_ticks

STATE_FILE = "state.json"
SUMMARY_FILE = "summary.json"
EVAL_MESH = "mesh"
"""The run folder of an evaluation's own mesh, in the evaluation's folder."""
SILENT_AFTER_S = 10.0
"""A run whose launch cannot be checked counts as silent after this time without telemetry."""
KILLED_CAUSE = "launch ended without a report: it was killed, or its machine went down"


class RunState(enum.StrEnum):
    """WAITING -> RUNNING -> DONE | STOPPED | FAILED | KILLED, and RUNNING <-> SILENT"""

    WAITING = "waiting"
    """Begun; no telemetry yet."""
    RUNNING = "running"
    SILENT = "silent"
    DONE = "done"
    """All train steps are done."""
    STOPPED = "stopped"
    """By a signal to launch."""
    FAILED = "failed"
    KILLED = "killed"


ENDED = frozenset({RunState.DONE, RunState.STOPPED, RunState.FAILED, RunState.KILLED})
TO_RESUME = ENDED - {RunState.DONE}


class RunRecord(msgspec.Struct, frozen=True, kw_only=True):
    """state.json."""

    state: RunState
    """RUNNING, DONE, STOPPED or FAILED."""
    cause: str = ""
    """Why the run failed, in one line."""
    resume: str = ""
    """The command that resumes the run; '' if there is none."""
    pid: int = 0
    """The process that owns the run: launch, or a trainer started by hand."""
    start_ticks: str = ""
    """When that process started, as /proc/PID/stat has it."""
    pid_space: str = ""
    """Where `pid` is valid; '' if unknown."""

    def is_alive(self) -> bool | None:
        """Return whether the run's process is alive; None if it cannot be checked from here."""
        if not (self.pid and self.pid_space and self.pid_space == pid_space()):
            return None
        return start_ticks(self.pid) == self.start_ticks


class RunStatus(msgspec.Struct, frozen=True):
    """The state, cause and resume command that readers show."""

    state: RunState
    cause: str = ""
    resume: str = ""


MARK_FILE = ".folder-id"


def make_folder_mark(folder: Path) -> str:
    """Return the random text in a run folder by which other machines recognise it; make it if it is
    missing, '' if there is no folder.
    """
    if not folder.is_dir():
        return ""
    try:
        with (folder / MARK_FILE).open("x") as file:
            file.write(secrets.token_hex(16))
    except OSError:
        pass
    return folder_mark(folder)


def folder_mark(folder: Path) -> str:
    """Return the text that `make_folder_mark` wrote; '' if there is none."""
    try:
        return (folder / MARK_FILE).read_text()
    except OSError:
        return ""


def running_record(resume: str) -> RunRecord:
    """The record of a run that this process begins."""
    pid = os.getpid()
    space, ticks = pid_space(), start_ticks(pid)
    return RunRecord(
        state=RunState.RUNNING, resume=resume, pid=pid, start_ticks=ticks, pid_space=space
    )


def read_record(folder: Path) -> RunRecord | None:
    """Read state.json, or the summary of a run from before there was one; None without either."""
    try:
        return msgspec.json.decode((folder / STATE_FILE).read_bytes(), type=RunRecord)
    except (OSError, msgspec.MsgspecError):
        return _from_summary(folder)


def status_of(record: RunRecord | None, seen_s: float | None, unix_s: float) -> RunStatus:
    """Derive the state at `unix_s` of a run whose files gained a line at `seen_s` last."""
    if record is None:
        return RunStatus(_by_lines(seen_s, unix_s))
    if record.state in ENDED:
        resume = record.resume if record.state in TO_RESUME else ""
        return RunStatus(record.state, record.cause, resume)
    is_alive = record.is_alive()
    if is_alive is None:
        return RunStatus(_by_lines(seen_s, unix_s))
    if not is_alive:
        return RunStatus(RunState.KILLED, KILLED_CAUSE, record.resume)
    return RunStatus(RunState.WAITING if seen_s is None else RunState.RUNNING)


def _by_lines(seen_s: float | None, unix_s: float) -> RunState:
    if seen_s is None:
        return RunState.WAITING
    return RunState.RUNNING if unix_s - seen_s < SILENT_AFTER_S else RunState.SILENT


def _from_summary(folder: Path) -> RunRecord | None:
    try:
        summary = msgspec.json.decode((folder / SUMMARY_FILE).read_bytes(), type=dict[str, object])
    except (OSError, msgspec.MsgspecError):
        return None
    ended = summary.get("ended")
    if not isinstance(ended, str):
        return None
    if ended in (RunState.DONE, RunState.STOPPED):
        return RunRecord(state=RunState(ended))
    return RunRecord(state=RunState.FAILED, cause=ended)
