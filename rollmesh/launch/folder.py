"""The files of a run that launch writes: config, state, pids, addresses, telemetry and its part of
the summary.

- An older run of the same name is moved aside or resumed, never overwritten.
- A folder has one launch at a time, which holds a lock.
- Files that others read are replaced whole.
- Once the run has begun, a write that fails is kept as `fault` and does not end the run.
- Where the folder is moved meanwhile, what launch writes goes to its new place.
- The folder has the permissions of run.mode, also if an earlier version made it for all.
"""

import fcntl
import os
import socket
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec

from rollmesh.core.config import Config
from rollmesh.core.errors import ConfigError
from rollmesh.core.file_modes import make_folder
from rollmesh.core.process import Ready
from rollmesh.core.run_state import (
    EVAL_MESH,
    STATE_FILE,
    SUMMARY_FILE,
    TO_RESUME,
    RunState,
    read_record,
    running_record,
)

ADDRESSES = "addresses.json"
SUMMARY = SUMMARY_FILE
LOCK = "lock"
LAUNCH = "launch"
JOURNAL = "journal"
"""Of the folder's client, a trainer's or an evaluation's, which holds a lock there."""
MAX_PIDS = 1000
"""A worker that dies again and again adds one each time."""


class Pid(msgspec.Struct, frozen=True):
    """A line of pids.json: a process that was started, whether or not it still runs."""

    role: str
    pid: int
    started_s: float
    """Unix time."""
    host: str = ""


class RunFolder:
    """Where one run leaves its files."""

    def __init__(self, config: Config, *, resume: bool = False, resume_command: str = "") -> None:
        """Make the folder, moving an older one aside, or resume the run that is there.

        Then write the settings and the state; raise ConfigError if that fails. `resume_command` is
        shown to people once the run has ended before it was done.
        """
        self.path = config.run_folder()
        self._record = running_record(resume_command)
        self.fault = ""
        """What could not be written since, in one line."""
        self._ready: dict[str, Ready] = {}
        if resume:
            check_unfinished(config)
        try:
            if not resume:
                move_aside(self.path)
            make_folder(self.path, config.run.mode)
            self.logs.mkdir(exist_ok=resume)
            self._unlock = weakref.finalize(self, os.close, locked(self.path))
            self._folder = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            self._close = weakref.finalize(self, os.close, self._folder)
            (self.path / SUMMARY).unlink(missing_ok=True)
            settings = msgspec.json.format(msgspec.json.encode(config), indent=2)
            replace(config_path(config), settings + b"\n")
            self._write_record()
        except OSError as error:
            verb = "go on with" if resume else "make"
            raise ConfigError(
                f"run.folder = {config.run.folder}: cannot {verb} {self.path} there: {why(error)}; "
                "name another"
            ) from None
        self._pids = read_pids(self.path)

    @property
    def logs(self) -> Path:
        """Where the processes log."""
        return self.path / "logs"

    def moved_to(self) -> str:
        """Where the folder is now if it was moved since; '' if it is in its place, or removed."""
        ours = os.fstat(self._folder)
        with suppress(OSError):
            if os.path.samestat(ours, self.path.stat()):
                return ""
        with suppress(OSError):
            place = os.readlink(f"/proc/self/fd/{self._folder}")
            if os.path.samestat(ours, os.stat(place)):
                return place
        return ""

    def _at(self, name: str) -> Path:
        """A file of the folder, wherever that is now."""
        return Path(self.moved_to() or self.path) / name

    def add_pid(self, role: str, pid: int, unix_s: float) -> None:
        """Record a process that was started; every launch and the last MAX_PIDS others stay."""
        self._pids.append(Pid(role, pid, unix_s, socket.gethostname()))
        others = [at for at, row in enumerate(self._pids) if row.role != LAUNCH]
        if len(others) > MAX_PIDS:
            del self._pids[others[0]]
        with self._writing("pids.json"):
            replace(self._at("pids.json"), msgspec.json.encode(self._pids))

    def add_address(self, ready: Ready) -> None:
        """Record where a process serves."""
        self._ready[ready.role] = ready
        with self._writing(ADDRESSES):
            replace(self._at(ADDRESSES), msgspec.json.encode(self._ready))

    def add_telemetry(self, line: bytes) -> None:
        """Append a line to telemetry.jsonl."""
        path = self._at("telemetry.jsonl")
        with self._writing(path.name), path.open("ab") as file:
            file.write(line + b"\n")

    def add_to_summary(self, more: dict[str, Any]) -> dict[str, Any]:
        """Put `more` into summary.json beside what the trainer wrote; the whole."""
        path = self._at(SUMMARY)
        summary = read_summary(path) | more
        with self._writing(path.name):
            replace(path, msgspec.json.format(msgspec.json.encode(summary), indent=2) + b"\n")
        return summary

    def end(self, state: RunState, cause: str = "", **more: Any) -> dict[str, Any]:
        """Write how the run ended into state.json, and with `more` into summary.json; return the
        summary."""
        self._record = msgspec.structs.replace(self._record, state=state, cause=cause)
        with self._writing(STATE_FILE):
            self._write_record()
        told = {"ended": state.value, "cause": cause}
        if state in TO_RESUME:
            told["resume"] = self._record.resume
        return self.add_to_summary({key: each for key, each in told.items() if each} | more)

    def _write_record(self) -> None:
        content = msgspec.json.format(msgspec.json.encode(self._record), indent=2) + b"\n"
        replace(self._at(STATE_FILE), content, is_durable=True)

    @contextmanager
    def _writing(self, name: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.fault = f"{self.path / name} could not be written: {why(error)}"


def config_path(config: Config) -> Path:
    """Where the run's processes read their settings."""
    return config.run_folder() / "config.json"


def check_unfinished(config: Config) -> None:
    """ConfigError if the folder holds no run, or one that has reached its goal."""
    path, num_steps = config.run_folder(), config.trainer.num_steps
    if not config_path(config).is_file():
        raise ConfigError(f"{path}: no run to go on with; begin one without --resume")
    record = read_record(path)
    num_done = read_summary(path / SUMMARY).get("num_steps") or 0
    if record and record.state is RunState.DONE and num_done >= num_steps:
        raise ConfigError(
            f"{path}: this run is done, with {num_done} of {num_steps} steps; to go on, raise "
            "trainer.num_steps, and else begin anew without --resume"
        )


def was_cut_off(config: Config) -> bool:
    """Whether the folder holds a run that died, failed, or still runs."""
    record = read_record(config.run_folder())
    ended_in_order = record is not None and record.state in (RunState.DONE, RunState.STOPPED)
    return config_path(config).is_file() and not ended_in_order


def locked(folder: Path, inside: str = "") -> int:
    """A descriptor that its one launch holds while it lives; ConfigError if there is one.

    `inside` names a folder there whose lock is meant.
    """
    lock = os.open(folder / inside / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        raise ConfigError(f"{folder}: another process runs this; end that first") from None
    return lock


def move_aside(folder: Path) -> None:
    """Rename `folder`, if it is there, to `folder.N` with the next free N.

    ConfigError if its run or evaluation goes on: that has files open there, and would go on beside
    ours.
    """
    if not folder.exists():
        return
    for inside in ("", EVAL_MESH, JOURNAL):
        if (folder / inside / LOCK).exists():
            os.close(locked(folder, inside))
    numbers = [
        int(each.suffix[1:]) for each in folder.parent.glob(f"{folder.name}.*") if is_old(each)
    ]
    folder.rename(folder.with_name(f"{folder.name}.{max(numbers, default=0) + 1}"))


def is_old(folder: Path) -> bool:
    """Whether it bears a number, as older runs do."""
    return folder.suffix[1:].isdecimal()


def read_summary(path: Path) -> dict[str, Any]:
    """What the trainer wrote; nothing if it came to nothing."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.MsgspecError):
        return {}


def read_pids(path: Path) -> list[Pid]:
    """What a run folder's pids.json holds; nothing if there is none."""
    try:
        return msgspec.json.decode((path / "pids.json").read_bytes(), type=list[Pid])
    except (OSError, msgspec.MsgspecError):
        return []


def read_addresses(path: Path) -> dict[str, Ready]:
    """Where the processes of a run folder serve, by role; nothing if none has said so."""
    try:
        return msgspec.json.decode((path / ADDRESSES).read_bytes(), type=dict[str, Ready])
    except (OSError, msgspec.MsgspecError):
        return {}


def why(error: OSError) -> str:
    """The system's reason, in the middle of a sentence."""
    return str(error.strerror).lower()


def replace(path: Path, content: bytes, *, is_durable: bool = False) -> None:
    """Write a file whole or not at all; where `is_durable`, a crash of the machine keeps it too."""
    part = path.with_name(f"{path.name}.part")
    with part.open("wb") as file:
        file.write(content)
        if is_durable:
            file.flush()
            os.fsync(file.fileno())
    os.replace(part, path)
