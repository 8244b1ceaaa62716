"""The worker's side of the spawner: programs run as slot users, though the worker has no rights.

- `split` starts the spawner and changes this process to the worker's user. Only what the worker's
  user cannot read is read before that, by the caller.
- A program's exit code comes by a pipe of its own; the spawner sends no other message.
"""

import asyncio
import contextlib
import functools
import json
import os
import pwd
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from rollmesh.core.errors import ConfigError, InfraError
from rollmesh.envs import spawner

SPAWNER_VARIABLE = "ROLLMESH_SPAWNER_FD"
_CAP_SETGID, _CAP_SETUID = 6, 7
_TRIES = 3
ENDED = "the process that starts programs as other users has ended"


def account_of(user: str) -> pwd.struct_passwd:
    """The account with this name or id, which is not root's; ConfigError if there is none or this
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


def split(
    account: pwd.struct_passwd,
    first_uid: int,
    num_uids: int,
    before: Callable[[], object] = lambda: None,
) -> None:
    """Start a spawner, call `before`, and change to the account's user, which cannot be undone.

    The worker keeps the slots' groups as supplementary groups, to read what programs leave.
    ConfigError if the account's ids are in the slots' range or the right to change users stays.
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
"""The spawner ends after this process, so nothing waits for it."""


def _capabilities(name: str) -> int:
    line = Path("/proc/self/status").read_text().partition(f"\n{name}:")[2].split()[0]
    return int(line, 16)


class Spawner:
    """The connection to this process's spawner."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    def has_ended(self) -> bool:
        """Whether its process is gone, so that no program can be started or ended any more."""
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
        words = {"argv": list(argv), "folder": str(folder), "env": dict(env)}
        return self._ask("run", uid, words, output, control)

    def end(self, uid: int) -> None:
        """Kill every process of `uid`; InfraError if some are left."""
        for _ in range(_TRIES):
            code = exit_code(self._ask("end", uid, {}))
            if code == 0:
                return
            if code != -signal.SIGKILL:  # else another process that ends this slot has killed it
                break
        raise InfraError(f"processes of user {uid} could not be ended")

    def kill(self, uid: int) -> None:
        """Have every process of `uid` killed, without waiting for it."""
        os.close(self._ask("end", uid, {}))

    def share(self, uid: int, folders: Sequence[Path]) -> None:
        """Let the worker's group read and remove what `uid` made in the folders."""
        exit_code(self._ask("share", uid, {"folders": list(map(str, folders))}))

    def _ask(self, action: str, uid: int, words: Mapping[str, object], *more: int) -> int:
        request = os.memfd_create("rollmesh-request")
        reading, writing = os.pipe()
        try:
            with os.fdopen(os.dup(request), "wb") as file:
                file.write(json.dumps({"do": action, "uid": uid, **words}).encode())
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
    """The exit code that the spawner writes to this pipe; InfraError if it ended before."""
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
        """Has every process of its slot killed."""
        self._reading = reading
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[None] = self._loop.create_future()
        os.set_blocking(reading, False)
        self._loop.add_reader(reading, self._take)

    async def wait(self) -> int:
        """Its exit code; negative for a signal."""
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
    """The spawner that this process was started with, if any; removes its variable."""
    number = os.environ.pop(SPAWNER_VARIABLE, "")
    if not number.isdecimal():
        return None
    os.set_inheritable(int(number), False)
    return Spawner(socket.socket(fileno=int(number)))
