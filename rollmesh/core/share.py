"""A run's share of a fleet of GPUs: its pipeline and token, and the claim of the pipeline's name.

- The scheduler alone decides how many GPUs the share has at a time.
- A claim's record is a file, 0600 in a folder 0700, on the host of the run's launch. It holds the
  mark of the run's processes, which never crosses a socket: a process that knows it could have
  them killed.
- A record is trusted only if it is a regular file that its owner alone can access, and if it names
  the expected run and pipeline.
- Processes are killed only if they carry the mark, started after the launch, and run as the file's
  owner, unless that is root.
"""

import os
import stat
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import msgspec

from rollmesh.core.errors import ConfigError
from rollmesh.core.orphans import kill_marked
from rollmesh.core.process import start_ticks
from rollmesh.core.secret_files import make_secret_file, read_secret

CLAIMS_FOLDER = ".claims"
"""The records' folder, beside the folders of runs."""
MAX_CLAIM_BYTES = 2**16
FIRST_PID, MAX_PID = 2, 2**22
"""A launch is never the first process of a machine or a container."""


class RunClaimRecord(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
    rename={"started_ticks": "life"},
):
    """The content of a record."""

    run_id: Annotated[str, msgspec.Meta(min_length=1)]
    pipeline_id: str
    mark: Annotated[str, msgspec.Meta(min_length=8)]
    """Carried by the run's processes, possibly lengthened."""
    pid: Annotated[int, msgspec.Meta(ge=FIRST_PID, le=MAX_PID)]
    """Pid of the run's launch."""
    started_ticks: Annotated[str, msgspec.Meta(pattern="^[0-9]{1,19}$")]
    """When the launch started, in clock ticks since boot."""
    place: Annotated[str, msgspec.Meta(min_length=1)]
    """Where `pid` and `started_ticks` are valid: boot, pid namespace and user."""


class StoredClaim(msgspec.Struct, frozen=True):
    """A record that was read, and its file's owner."""

    claimed: RunClaimRecord
    uid: int

    @property
    def is_alive(self) -> bool:
        """Whether the run's launch still runs."""
        return start_ticks(self.claimed.pid) == self.claimed.started_ticks

    def holds(self, pid: int) -> bool:
        """Return whether this process, which carries the mark, may belong to the run."""
        ticks, uid = start_ticks(pid), uid_of(pid)
        is_later = ticks.isdecimal() and int(ticks) >= int(self.claimed.started_ticks)
        return is_later and (self.uid == 0 or uid == self.uid)

    def end_marked(self) -> int:
        """SIGKILL the run's processes until none is left; return how many there were."""
        return kill_marked(self.claimed.mark, self.holds)


def write_claim(runs: Path, claimed: RunClaimRecord) -> Path:
    """Write the record beside the folders of runs and return its path; ConfigError if that
    fails.
    """
    folder = runs.absolute() / CLAIMS_FOLDER
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


def read_claim(path: str, run_id: str, pipeline_id: str) -> StoredClaim:
    """Read the record of a run at `path`, which a peer named; ConfigError if it cannot be trusted.

    The caller must check the owner.
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
        raw = file.read(MAX_CLAIM_BYTES)
    try:
        claimed = msgspec.json.decode(raw, type=RunClaimRecord)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        raise ConfigError(f"its record {path!r} is not one of a claimed run") from None
    if (claimed.run_id, claimed.pipeline_id) != (run_id, pipeline_id):
        raise ConfigError(f"its record {path!r} is that of another run")
    return StoredClaim(claimed, status.st_uid)


def place() -> str:
    """Return this machine's boot, pid namespace and user as one word; '' if unknown (not Linux).

    Processes of another place cannot all be seen or killed from here.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return ""
    return f"{boot}/{namespace}/{os.getuid()}"


def is_same_machine(one: str, other: str) -> bool:
    """Return whether two places are known and differ at most by their user."""
    machine = one.rpartition("/")[0]
    return bool(machine) and machine == other.rpartition("/")[0]


def uid_of(pid: int) -> int:
    """Return the real user id of a process; -1 if it has ended."""
    try:
        with open(f"/proc/{pid}/status") as file:
            for line in file:
                if line.startswith("Uid:"):
                    return int(line.split()[1])
    except OSError:
        pass
    return -1


TOKEN_FILE_VARIABLE = "ROLLMESH_PIPELINE_TOKEN_FILE"
"""Environment: path of the file with the pipeline's token."""
FLEET_FILE = "scheduler.toml"
"""The fleet's file by default."""
JOURNAL = "scheduler"
"""The default folder of the scheduler's journal."""
TOKENS = "tokens"
"""The folder in the journal's folder with the token of each pipeline."""
TRAIN_CLUSTER = "actor_train"
"""Name of the cluster that a train step needs as a whole, and whose GPUs the trainer uses."""
KEYS = "keys"
"""The key folder in the journal's folder, made by `rollmesh scheduler up`."""


class Share(msgspec.Struct, frozen=True):
    """The part of a fleet that a run may use."""

    scheduler: str
    """tcp:// address of the scheduler."""
    pipeline_id: str
    """The pipeline's name at the scheduler."""
    token_file: str = ""
    """The file with its token; '' to search for it, see `token_file`."""

    @property
    def token(self) -> str:
        """The pipeline's token; '' if there is no file of it.

        ConfigError if others can read the file.
        """
        return read_token(self.pipeline_id, self.token_file)


def token_file(
    pipeline_id: str, named: str = "", environment: Mapping[str, str] = os.environ
) -> Path | None:
    """Return the file with a pipeline's token; None if there is none.

    It is `named`, else ROLLMESH_PIPELINE_TOKEN_FILE, else the one in the journal of this folder's
    scheduler.toml.
    """
    if given := named or environment.get(TOKEN_FILE_VARIABLE, ""):
        return Path(given)
    journal = _journal()
    path = journal / TOKENS / pipeline_id if journal else None
    return path if path and "/" not in pipeline_id and path.is_file() else None


def fleet_keys(token: Path | None = None) -> Path | None:
    """Return the keys that `rollmesh scheduler up` made in the journal's folder; None if there are
    none.

    `token` is the file of a pipeline's token in that folder; by default scheduler.toml names the
    journal.
    """
    journal = token.absolute().parent.parent if token else _journal()
    keys = journal.absolute() / KEYS if journal else None
    return keys if keys and keys.is_dir() else None


def _journal() -> Path | None:
    """Return the journal's folder of this folder's scheduler.toml."""
    try:
        return Path(str(tomllib.loads(Path(FLEET_FILE).read_text()).get("journal", JOURNAL)))
    except (OSError, ValueError):
        return None


def read_token(pipeline_id: str, named: str = "") -> str:
    """Return the token of a pipeline; '' if there is no file, ConfigError if others can read it."""
    path = token_file(pipeline_id, named)
    return read_secret(path) if path else ""
