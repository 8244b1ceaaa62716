"""User ids for agents' programs: one for each slot that runs, no two at a time on this host.

- An id is taken by a lock on a file that only our user can open, so that the workers of a host
  share one range and a killed worker gives its ids back.
- Whatever runs as an id is killed before the id is used and before it is given back.
"""

import contextlib
import fcntl
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from rollmesh.core.errors import InfraError
from rollmesh.envs.spawning import process_spawner

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
    """A user id of the range while the block runs; InfraError where all are in use."""
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
    """Kill every process of `uid` until none is left; InfraError after KILL_S."""
    if (spawner := process_spawner()) is not None:
        spawner.end(uid)
        return
    until_s = time.monotonic() + KILL_S
    while _any_of(uid):
        # A process that forks without end outruns a list of pids, but not one signal to them all.
        subprocess.run([sys.executable, "-I", "-S", "-c", KILL_ALL, str(uid)], check=False)
        if time.monotonic() > until_s:
            raise InfraError(f"processes of user {uid} could not be ended within {KILL_S:g} s")
        time.sleep(PAUSE_S)


def _any_of(uid: int) -> bool:
    """Kill what runs as `uid` now; whether there was any."""
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


def give(folder: Path, uid: int) -> None:
    """Let `uid` into the folder and all that is in it: as owner, or by its group without rights."""
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
