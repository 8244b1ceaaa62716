"""The run-folder files that launch writes: config, state, pids, addresses, telemetry and its part
of the summary.

- An older run of the same name is moved aside or resumed, never overwritten.
- A lock admits one launch per folder.
- Files that other processes read are replaced atomically.
- Once the run has begun, a failed write is kept as `fault` and does not end the run.
- If the folder is moved during the run, launch writes to the new place.
- The folder has the permissions of run.mode, also if an earlier version made it world-readable.
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
from rollmesh.core.files import make_folder
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
"""Lock folder of the run's client (a trainer or an evaluation)."""
MAX_PIDS = 1000
"""Limit of pids.json: a worker in a crash loop adds one entry per restart."""


class Pid(msgspec.Struct, frozen=True):
    """A line of pids.json: a process that was started, whether or not it still runs."""

    role: str
    pid: int
    started_s: float
    """Unix time."""
    host: str = ""


class RunFolder:
    """The folder of one run."""

    def __init__(self, config: Config, *, resume: bool = False, resume_command: str = "") -> None:
        """Create the folder, moving an older one aside, or resume the run in it.

        Then write the settings and the state; raise ConfigError if that fails. `resume_command` is
        shown to users if the run ends before it is done.
        """
        self.path = config.run_folder()
        self._record = running_record(resume_command)
        self.fault = ""
        """The last failed write, in one line."""
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
            verb = "resume" if resume else "make"
            raise ConfigError(
                f"run.folder = {config.run.folder}: cannot {verb} {self.path} there: {why(error)}; "
                "name another"
            ) from None
        self._pids = read_pids(self.path)

    @property
    def logs(self) -> Path:
        """The folder of the processes' logs."""
        return self.path / "logs"

    def moved_to(self) -> str:
        """Return the folder's new path if it was moved; '' if it is in its place, or removed."""
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
        """Return the path of a file in the folder, wherever the folder is now."""
        return Path(self.moved_to() or self.path) / name

    def add_pid(self, role: str, pid: int, unix_s: float, host: str = "") -> None:
        """Record a process that was started on `host`, or on this machine; keep every launch and
        the last MAX_PIDS others.
        """
        self._pids.append(Pid(role, pid, unix_s, host or socket.gethostname()))
        others = [at for at, row in enumerate(self._pids) if row.role != LAUNCH]
        if len(others) > MAX_PIDS:
            del self._pids[others[0]]
        with self._writing("pids.json"):
            replace(self._at("pids.json"), msgspec.json.encode(self._pids))

    def add_address(self, ready: Ready) -> None:
        """Record the address of a process."""
        self._ready[ready.role] = ready
        with self._writing(ADDRESSES):
            replace(self._at(ADDRESSES), msgspec.json.encode(self._ready))

    def add_telemetry(self, line: bytes) -> None:
        """Append a line to telemetry.jsonl."""
        path = self._at("telemetry.jsonl")
        with self._writing(path.name), path.open("ab") as file:
            file.write(line + b"\n")

    def add_to_summary(self, more: dict[str, Any]) -> dict[str, Any]:
        """Merge `more` into summary.json, which the trainer also writes; return the merged
        summary.
        """
        path = self._at(SUMMARY)
        summary = read_summary(path) | more
        with self._writing(path.name):
            replace(path, msgspec.json.format(msgspec.json.encode(summary), indent=2) + b"\n")
        return summary

    def end(self, state: RunState, cause: str = "", **more: Any) -> dict[str, Any]:
        """Write how the run ended into state.json, and with `more` into summary.json; return the
        summary.
        """
        self._record = msgspec.structs.replace(self._record, state=state, cause=cause)
        with self._writing(STATE_FILE):
            self._write_record()
        fields = {"ended": state.value, "cause": cause}
        if state in TO_RESUME:
            fields["resume"] = self._record.resume
        return self.add_to_summary({key: each for key, each in fields.items() if each} | more)

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
    """Return the path from which the run's processes read their settings."""
    return config.run_folder() / "config.json"


def check_unfinished(config: Config) -> None:
    """Raise ConfigError if the folder holds no run, or a run that is done."""
    if not config_path(config).is_file():
        raise ConfigError(f"{config.run_folder()}: no run to resume; start one without --resume")
    if done := why_done(config):
        raise ConfigError(f"{done}; to start again, leave out --resume")


def why_done(config: Config) -> str:
    """Return that the run in the folder has done all its steps, in a line; '' if it has not."""
    path, num_steps = config.run_folder(), config.trainer.num_steps
    record = read_record(path)
    num_done = read_summary(path / SUMMARY).get("num_steps") or 0
    if record is None or record.state is not RunState.DONE or num_done < num_steps:
        return ""
    return (
        f"{path}: this run is done, with {num_done} of {num_steps} steps; to continue, raise "
        "trainer.num_steps"
    )


def was_cut_off(config: Config) -> bool:
    """Return whether the folder holds a run that died, failed, or still runs."""
    record = read_record(config.run_folder())
    ended_in_order = record is not None and record.state in (RunState.DONE, RunState.STOPPED)
    return config_path(config).is_file() and not ended_in_order


def locked(folder: Path, inside: str = "") -> int:
    """Take the folder's lock and return its descriptor, which holds it; ConfigError if it is taken.

    `inside` names a subfolder whose lock is taken instead.
    """
    lock = os.open(folder / inside / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        raise ConfigError(
            f"{folder}: another process is using this folder; stop it first"
        ) from None
    return lock


def move_aside(folder: Path) -> None:
    """Rename `folder`, if it exists, to `folder.N` with the next free N.

    Raise ConfigError if its run or evaluation still runs: it has files open in the folder.
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
    """Return whether the folder has a number, as moved runs do."""
    return folder.suffix[1:].isdecimal()


def read_summary(path: Path) -> dict[str, Any]:
    """Return the content of summary.json; empty if there is none."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.MsgspecError):
        return {}


def read_pids(path: Path) -> list[Pid]:
    """Return the content of a run folder's pids.json; empty if there is none."""
    try:
        return msgspec.json.decode((path / "pids.json").read_bytes(), type=list[Pid])
    except (OSError, msgspec.MsgspecError):
        return []


def read_addresses(path: Path) -> dict[str, Ready]:
    """Return the addresses of a run's processes by role; empty if there are none."""
    try:
        return msgspec.json.decode((path / ADDRESSES).read_bytes(), type=dict[str, Ready])
    except (OSError, msgspec.MsgspecError):
        return {}


def why(error: OSError) -> str:
    """Return the system's reason, in lower case."""
    return str(error.strerror).lower()


def replace(path: Path, content: bytes, *, is_durable: bool = False) -> None:
    """Write a file atomically; if `is_durable`, it survives a crash of the machine."""
    part = path.with_name(f"{path.name}.part")
    with part.open("wb") as file:
        file.write(content)
        if is_durable:
            file.flush()
            os.fsync(file.fileno())
    os.replace(part, path)
