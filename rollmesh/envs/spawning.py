"""Programs as other users: the client of the spawner process, and the user ids of slots.

- `start_spawner_and_drop_rights` changes this process to the worker's user for good; the caller
  reads files that the worker's user cannot read before that.
- A program's exit code comes by a pipe of its own; the spawner sends no other message.
- A slot's user id is taken by a lock on a file that only our user can open: the workers of a host
  share a range, and a killed worker releases its ids.
- All processes of an id are killed before it is used and before it is released.
"""

import asyncio
import contextlib
import fcntl
import functools
import json
import os
import pwd
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from rollmesh.core.errors import ConfigError, InfraError
from rollmesh.envs import spawner

SPAWNER_VARIABLE = "ROLLMESH_SPAWNER_FD"
_CAP_SETGID, _CAP_SETUID = 6, 7
_TRIES = 3
ENDED = "the process that starts programs as other users has ended"


def account_of(user: str) -> pwd.struct_passwd:
    """Return the account with this name or id; ConfigError if there is none, it is root's, or this
    process cannot change to it."""
    try:
        account = pwd.getpwuid(int(user)) if user.isdecimal() else pwd.getpwnam(user)
    except KeyError:
        raise ConfigError(f"--user {user}: no such user") from None
    if account.pw_uid == 0 or account.pw_gid == 0:
        raise ConfigError(f"--user {user}: name a user that is not root and not of root's group")
    wanted = 1 << _CAP_SETGID | 1 << _CAP_SETUID
    if os.getuid() != 0 or os.geteuid() != 0 or _capabilities("CapEff") & wanted != wanted:
        raise ConfigError(
            f"--user {user}: start the worker as root with CAP_SETUID and CAP_SETGID, or without "
            "--user"
        )
    return account


@contextlib.contextmanager
def acting_as(account: pwd.struct_passwd) -> Iterator[None]:
    """Access files as this user while the block runs."""
    groups = os.getgroups()
    os.setgroups([account.pw_gid])
    os.setegid(account.pw_gid)
    os.seteuid(account.pw_uid)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(os.getgid())
        os.setgroups(groups)


def start_spawner_and_drop_rights(
    account: pwd.struct_passwd,
    first_uid: int,
    num_uids: int,
    before: Callable[[], object] = lambda: None,
) -> None:
    """Start a spawner, call `before`, and change to the account's user irreversibly.

    The worker keeps the slots' groups as supplementary groups, to read files that programs leave.
    ConfigError if the account's ids are in the slots' range or the right to change users remains.
    """
    taken = range(first_uid, first_uid + 2 * num_uids)
    if account.pw_uid in taken or account.pw_gid in taken:
        raise ConfigError(
            f"--user {account.pw_name}: its ids are among those of agents' programs, {taken.start} "
            f"to {taken.stop - 1}; change worker.isolation_first_uid"
        )
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    argv = [sys.executable, "-I", "-S", spawner.__file__]
    argv += map(str, (theirs.fileno(), account.pw_uid, first_uid, num_uids))
    _started.append(
        subprocess.Popen(argv, env={}, pass_fds=[theirs.fileno()], start_new_session=True)
    )
    theirs.close()
    before()
    os.set_inheritable(ours.fileno(), True)
    os.environ[SPAWNER_VARIABLE] = str(ours.detach())
    os.environ["HOME"] = account.pw_dir
    os.setgroups([account.pw_gid, *range(first_uid, first_uid + num_uids)])
    os.setresgid(account.pw_gid, account.pw_gid, account.pw_gid)
    os.setresuid(account.pw_uid, account.pw_uid, account.pw_uid)
    if _capabilities("CapPrm"):
        raise ConfigError(f"--user {account.pw_name}: this process keeps capabilities of root")


_started: list["subprocess.Popen[bytes]"] = []
"""The spawner ends after this process, so it is never waited for."""


def _capabilities(name: str) -> int:
    line = Path("/proc/self/status").read_text().partition(f"\n{name}:")[2].split()[0]
    return int(line, 16)


class Spawner:
    """The connection to this process's spawner."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    def has_ended(self) -> bool:
        """Whether its process is gone, so that programs can be neither started nor ended."""
        try:
            return not self._connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def run(
        self,
        uid: int,
        argv: Sequence[str],
        folder: Path,
        env: Mapping[str, str],
        output: int,
        control: int,
    ) -> int:
        """Start a program as `uid`; return the pipe of its exit code."""
        fields = {"argv": list(argv), "folder": str(folder), "env": dict(env)}
        return self._ask("run", uid, fields, output, control)

    def end(self, uid: int) -> None:
        """Kill all processes of `uid`; InfraError if some are left."""
        for _ in range(_TRIES):
            code = exit_code(self._ask("end", uid, {}))
            if code == 0:
                return
            if code != -signal.SIGKILL:  # else another process that ends this slot has killed it
                break
        raise InfraError(f"processes of user {uid} could not be ended")

    def kill(self, uid: int) -> None:
        """Kill all processes of `uid`, without waiting."""
        os.close(self._ask("end", uid, {}))

    def share(self, uid: int, folders: Sequence[Path]) -> None:
        """Let the worker's group read and remove files of `uid` in the folders."""
        exit_code(self._ask("share", uid, {"folders": list(map(str, folders))}))

    def _ask(self, action: str, uid: int, fields: Mapping[str, object], *more: int) -> int:
        request = os.memfd_create("rollmesh-request")
        reading, writing = os.pipe()
        try:
            with os.fdopen(os.dup(request), "wb") as file:
                file.write(json.dumps({"do": action, "uid": uid, **fields}).encode())
            os.lseek(request, 0, os.SEEK_SET)
            socket.send_fds(self._connection, [b"."], [request, writing, *more])
        except OSError as error:
            os.close(reading)
            raise InfraError(f"{ENDED}: {error.strerror}") from None
        finally:
            os.close(request)
            os.close(writing)
        return reading


def exit_code(reading: int) -> int:
    """Read the exit code from the spawner's pipe; InfraError if the spawner ended before."""
    with os.fdopen(reading, "rb") as file:
        raw = file.read()
    if not raw:
        raise InfraError(ENDED)
    return int(raw)


class Spawned:
    """A program that the spawner started; its exit code comes by the pipe `reading`."""

    def __init__(self, reading: int, kill: Callable[[], None]) -> None:
        self.returncode: int | None = None
        self.kill = kill
        """Kills all processes of its slot."""
        self._reading = reading
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[None] = self._loop.create_future()
        os.set_blocking(reading, False)
        self._loop.add_reader(reading, self._take)

    async def wait(self) -> int:
        """Return its exit code; negative for a signal."""
        await asyncio.shield(self._ended)
        if self.returncode is None:
            raise InfraError(ENDED)
        return self.returncode

    def _take(self) -> None:
        raw = os.read(self._reading, 64)
        self._loop.remove_reader(self._reading)
        os.close(self._reading)
        if raw:
            self.returncode = int(raw)
        if not self._ended.done():
            self._ended.set_result(None)


@functools.cache
def process_spawner() -> Spawner | None:
    """Return the spawner that this process inherited, if any; removes its variable."""
    number = os.environ.pop(SPAWNER_VARIABLE, "")
    if not number.isdecimal():
        return None
    os.set_inheritable(int(number), False)
    return Spawner(socket.socket(fileno=int(number)))


KILL_S = 5.0
PAUSE_S = 0.005
KILL_ALL = """import os, sys
uid = int(sys.argv[1])
os.setgroups([])
os.setresgid(uid, uid, uid)
os.setresuid(uid, uid, uid)
os.kill(-1, 9)
"""


@contextlib.contextmanager
def slot_uid(first: int, num: int) -> Iterator[int]:
    """Reserve a user id of the range while the block runs; InfraError if all are in use."""
    folder = Path(tempfile.gettempdir()) / f"rollmesh.uids.{os.geteuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if found.st_uid != os.geteuid() or found.st_mode & 0o022:
        raise InfraError(f"{folder}: it belongs to another user; remove it")
    for uid in range(first, first + num):
        lock = os.open(folder / str(uid), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(lock)
            continue
        try:
            end_processes(uid)
            yield uid
        finally:
            end_processes(uid)
            os.close(lock)
        return
    raise InfraError(f"all {num} user ids from {first} are in use; raise worker.isolation_num_uids")


def end_processes(uid: int) -> None:
    """Kill all processes of `uid` until none is left; InfraError after KILL_S."""
    if (spawner := process_spawner()) is not None:
        spawner.end(uid)
        return
    until_s = time.monotonic() + KILL_S
    while _any_of(uid):
        # A process that forks endlessly outruns a list of pids, but not one signal to all.
        subprocess.run([sys.executable, "-I", "-S", "-c", KILL_ALL, str(uid)], check=False)
        if time.monotonic() > until_s:
            raise InfraError(f"processes of user {uid} could not be ended within {KILL_S:g} s")
        time.sleep(PAUSE_S)


def _any_of(uid: int) -> bool:
    """Kill the current processes of `uid`; return whether there were any."""
    is_any = False
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            status = Path(f"/proc/{name}/status").read_text()
        except OSError:
            continue
        uids = status.partition("\nUid:")[2].partition("\n")[0].split()
        state = status.partition("\nState:")[2].split()
        if str(uid) in uids and state[:1] not in (["Z"], ["X"]):
            is_any = True
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(name), signal.SIGKILL)
    return is_any


def give_access(folder: Path, uid: int) -> None:
    """Give `uid` access to the folder and its content: as owner, or by its group without root."""
    group_only = process_spawner() is not None
    owner = -1 if group_only else uid
    if folder.parent.lstat().st_uid == os.geteuid():
        folder.parent.chmod(folder.parent.stat().st_mode | 0o011)
    os.chown(folder, owner, uid, follow_symlinks=False)
    folder.chmod(0o2770 if group_only else 0o700)
    for inside, folders, files in os.walk(folder):
        for name in (*folders, *files):
            path = os.path.join(inside, name)
            os.chown(path, owner, uid, follow_symlinks=False)
            if group_only and not os.path.islink(path):
                mode = os.lstat(path).st_mode & 0o777
                os.chmod(path, mode | (0o2070 if name in folders else mode >> 3 & 0o070 | 0o060))
