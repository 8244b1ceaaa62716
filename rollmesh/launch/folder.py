"""The files of a run that launch itself writes.

Owns the run folder's place, config.json, pids.json, addresses.json, telemetry.jsonl and launch's
part of summary.json. Invariants: an older run of the same name is moved aside, never overwritten;
what others read while we write is replaced whole; once the run has begun, a full disk or a folder
that was removed is remembered as `fault` and ends nothing. Driven by `run` and the supervisor.
"""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from rollmesh.core.config import Config, write_config
from rollmesh.core.errors import ConfigError
from rollmesh.core.process import Ready

ADDRESSES = "addresses.json"
EVAL_MESH = "mesh"
"""The run folder of an evaluation's own mesh, in the evaluation's folder."""
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

    def __init__(self, config: Config) -> None:
        """Make the folder, moving an older one aside, and write the settings.

        ConfigError if that cannot be.
        """
        self.path = config.run_folder()
        self.fault = ""
        """What could not be written since, in one line."""
        self._pids: list[Pid] = []
        self._ready: dict[str, Ready] = {}
        try:
            move_aside(self.path)
            self.logs.mkdir(parents=True)
            write_config(config, config_path(config))
        except OSError as error:
            raise ConfigError(
                f"run.folder = {config.run.folder}: cannot make {self.path} there: {why(error)}; "
                "name another"
            ) from None

    @property
    def logs(self) -> Path:
        """Where the processes log."""
        return self.path / "logs"

    def add_pid(self, role: str, pid: int, unix_s: float) -> None:
        """Record a process that was started; the first, launch, and the last MAX_PIDS stay."""
        self._pids.append(Pid(role, pid, unix_s, socket.gethostname()))
        del self._pids[1:-MAX_PIDS]
        with self._writing("pids.json"):
            replace(self.path / "pids.json", msgspec.json.encode(self._pids))

    def add_address(self, ready: Ready) -> None:
        """Record where a process serves."""
        self._ready[ready.role] = ready
        with self._writing(ADDRESSES):
            replace(self.path / ADDRESSES, msgspec.json.encode(self._ready))

    def add_telemetry(self, line: bytes) -> None:
        """Append a line to telemetry.jsonl."""
        path = self.path / "telemetry.jsonl"
        with self._writing(path.name), path.open("ab") as file:
            file.write(line + b"\n")

    def add_to_summary(self, more: dict[str, Any]) -> dict[str, Any]:
        """Put `more` into summary.json beside what the trainer wrote; the whole."""
        path = self.path / "summary.json"
        summary = read_summary(path) | more
        with self._writing(path.name):
            replace(path, msgspec.json.format(msgspec.json.encode(summary), indent=2) + b"\n")
        return summary

    @contextmanager
    def _writing(self, name: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.fault = f"{self.path / name} could not be written: {why(error)}"


def config_path(config: Config) -> Path:
    """Where the run's processes read their settings."""
    return config.run_folder() / "config.json"


def move_aside(folder: Path) -> None:
    """Rename `folder`, if it is there, to `folder.N` with the next free N."""
    if not folder.exists():
        return
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


def replace(path: Path, content: bytes) -> None:
    """Write a file whole or not at all."""
    part = path.with_name(f"{path.name}.part")
    part.write_bytes(content)
    os.replace(part, path)
