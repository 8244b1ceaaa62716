"""The record of a run that has a pipeline's name: a file with the mark of its processes.

- The mark never crosses a socket: a process that knows it could have its carriers ended.
- The file is 0600 in a folder 0700, on the host of the run's launch.
- A record counts only if a regular file holds it that its owner alone can read and write, and if it
  names the run and the pipeline that it is read for.
- Processes are ended only if they carry the mark, began after the launch, and run as the file's
  owner, unless that is root.
"""

import os
import stat
from pathlib import Path
from typing import Annotated

import msgspec

from rollmesh.core.errors import ConfigError
from rollmesh.core.process import start_ticks
from rollmesh.core.secret_file import make_secret_file
from rollmesh.core.warden import kill_marked

FOLDER = ".claims"
"""Its folder, beside the folders of runs."""
MAX_BYTES = 2**16
FIRST_PID, MAX_PID = 2, 2**22
"""A launch is never the first process of a machine or a container."""


class Claimed(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the file holds."""

    run_id: Annotated[str, msgspec.Meta(min_length=1)]
    pipeline_id: str
    mark: Annotated[str, msgspec.Meta(min_length=8)]
    """The processes of the run carry it, or a longer one."""
    pid: Annotated[int, msgspec.Meta(ge=FIRST_PID, le=MAX_PID)]
    """The run's launch."""
    life: Annotated[str, msgspec.Meta(pattern="^[0-9]{1,19}$")]
    """When the launch started, in clock ticks since boot."""
    place: Annotated[str, msgspec.Meta(min_length=1)]
    """Where `pid` and `life` are true: boot, pid namespace and user."""


class Record(msgspec.Struct, frozen=True):
    """A record that was read, and its file's owner."""

    claimed: Claimed
    uid: int

    @property
    def is_alive(self) -> bool:
        """Whether the run's launch still runs."""
        return start_ticks(self.claimed.pid) == self.claimed.life

    def holds(self, pid: int) -> bool:
        """Whether this process, which carries the mark, may be one of the run's."""
        ticks, uid = start_ticks(pid), uid_of(pid)
        is_later = ticks.isdecimal() and int(ticks) >= int(self.claimed.life)
        return is_later and (self.uid == 0 or uid == self.uid)

    def end_marked(self) -> int:
        """SIGKILL to the run's processes, until none is left; return how many there were."""
        return kill_marked(self.claimed.mark, self.holds)


def write_claimed(runs: Path, claimed: Claimed) -> Path:
    """Write the record below the folder of runs; return its path, or raise ConfigError."""
    folder = runs.absolute() / FOLDER
    path = folder / f"{claimed.run_id}.json"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        make_secret_file(path, msgspec.json.encode(claimed))
    except OSError as error:
        reason = str(error.strerror).lower()
        raise ConfigError(
            f"run.folder = {runs}: cannot make {path}: {reason}; name another"
        ) from None
    return path


def read_claimed(path: str, run_id: str, pipeline_id: str) -> Record:
    """Read the record of a run at `path`, which a peer named; ConfigError if it cannot be trusted.

    The owner is the caller's to judge.
    """
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        descriptor = os.open(path, flags)
    except (OSError, ValueError) as error:
        reason = str(getattr(error, "strerror", None) or error).lower()
        raise ConfigError(f"its record {path!r} cannot be read ({reason})") from None
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
            raise ConfigError(f"its record {path!r} is no file that its owner alone can read")
        raw = file.read(MAX_BYTES)
    try:
        claimed = msgspec.json.decode(raw, type=Claimed)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        raise ConfigError(f"its record {path!r} is not one of a claimed run") from None
    if (claimed.run_id, claimed.pipeline_id) != (run_id, pipeline_id):
        raise ConfigError(f"its record {path!r} is that of another run")
    return Record(claimed, status.st_uid)


def place() -> str:
    """This machine since its boot, this pid namespace and this user, as one word.

    Processes of another place cannot all be seen or ended from here. '' if unknown (not Linux).
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return ""
    return f"{boot}/{namespace}/{os.getuid()}"


def is_same_machine(one: str, other: str) -> bool:
    """Whether two places are known and differ by their user at most."""
    machine = one.rpartition("/")[0]
    return bool(machine) and machine == other.rpartition("/")[0]


def uid_of(pid: int) -> int:
    """The real user id of a process; -1 if it has ended."""
    try:
        with open(f"/proc/{pid}/status") as file:
            for line in file:
                if line.startswith("Uid:"):
                    return int(line.split()[1])
    except OSError:
        pass
    return -1
