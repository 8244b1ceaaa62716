"""Starts agents' programs as slot users for a worker that has no rights of its own.

    spawner.py FD WORKER_UID FIRST_UID NUM_UIDS

- It keeps CAP_SETUID and CAP_SETGID, which its worker has dropped. It is single-threaded and uses
  the standard library only (python -I -S).
- A request is a descriptor of a JSON object, in one message at the socket FD with the descriptors
  (request, status[, output, control]). A child process, which becomes the slot's user first, serves
  it; its exit code is written to `status`.
- Only user ids of the range are accepted. Neither the spawner's nor the worker's may be in it.
- A process that ends a slot has the slot's effective user id and a real one NUM_UIDS higher, so
  that it may signal the slot's processes and they may not signal it.
- It ends with its worker, at the end of the connection, after all processes of the slots.
"""

import contextlib
import ctypes
import fcntl
import json
import os
import select
import signal
import socket
import stat
import sys
import time
from typing import Any

PR_SET_DUMPABLE = 4
PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 36, 38
KILL_S = 5.0
PAUSE_S = 0.005
NOT_STARTED = 127
MAX_MESSAGE_BYTES = 64
MAX_DESCRIPTORS = 4
MAX_REQUEST_BYTES = 8 * 2**20
"""Linux takes at most 6 MiB of arguments and variables (execve(2))."""
CONTROL = 3
"""Descriptor of a program's control socket for its starter."""
prctl = ctypes.CDLL(None, use_errno=True).prctl


def main(argv: list[str]) -> None:
    """Serve requests until the worker has ended; then end all processes in the slots."""
    worker = socket.socket(fileno=int(argv[0]))
    worker_uid, first, num = map(int, argv[1:4])
    uids = range(first, first + num)
    if any(uid in range(first, first + 2 * num) for uid in (0, os.getuid(), worker_uid)):
        raise SystemExit(f"user ids from {first} on include one that is not a slot's")
    prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    waking, woken = os.pipe()
    os.set_blocking(waking, False)
    os.set_blocking(woken, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(woken, warn_on_full_buffer=False)
    children: dict[int, int] = {}
    used: set[int] = set()
    while True:
        readable, _, _ = select.select([worker.fileno(), waking], [], [])
        if waking in readable:
            os.read(waking, 4096)
            _reap(children)
        if worker.fileno() in readable and not _serve(worker, uids, children, used):
            break
    for uid in used:
        _fork(uid, num, {"do": "end"}, ())
    while _wait() is not None:
        pass


def _serve(worker: socket.socket, uids: range, children: dict[int, int], used: set[int]) -> bool:
    """Serve one request; return False at the end of the connection."""
    data, descriptors, _, _ = socket.recv_fds(
        worker, MAX_MESSAGE_BYTES, MAX_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC
    )
    if not data and not descriptors:
        return False
    status = descriptors[1] if len(descriptors) > 1 else -1
    try:
        if not stat.S_ISREG(os.fstat(descriptors[0]).st_mode):  # reading a pipe may block
            raise ValueError("its first descriptor is no file")
        request = json.loads(os.pread(descriptors[0], MAX_REQUEST_BYTES, 0))
        uid, action = int(request["uid"]), str(request["do"])
        if uid not in uids or action not in ("run", "end", "share"):
            raise ValueError(f"{action[:8]!a} as user {uid}")
        if (action == "run") != (len(descriptors) == MAX_DESCRIPTORS):
            raise ValueError(f"{len(descriptors)} descriptors")
        used.add(uid)
        pid = _fork(uid, len(uids), request, tuple(descriptors[2:]))
        children[pid] = os.dup(status)
    except Exception as error:  # noqa: BLE001 - door: a request may be any bytes
        line = f"spawner: request refused: {type(error).__name__}: {error}"[:200] + "\n"
        with contextlib.suppress(OSError):  # the log of its worker may be closed
            os.write(sys.stderr.fileno(), line.encode(errors="replace"))
        if status >= 0:
            _report(os.dup(status), NOT_STARTED)
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
    return True


def _fork(uid: int, num_uids: int, request: dict[str, Any], descriptors: tuple[int, ...]) -> int:
    """Serve a request in a child process; return its pid once it is the slot's user.

    The next request may end the slot, and an earlier child must not escape it as root.
    """
    waiting, changed = os.pipe()
    try:
        pid = os.fork()
    except OSError:
        os.close(waiting)
        os.close(changed)
        raise
    if pid:
        os.close(changed)
        os.read(waiting, 1)
        os.close(waiting)
        return pid
    code = NOT_STARTED
    try:
        signal.set_wakeup_fd(-1)
        os.setsid()
        is_end = request["do"] == "end"
        _become(uid, uid + num_uids if is_end else uid)
        os.close(changed)
        if is_end:
            code = _end()
        elif request["do"] == "share":
            code = _share(request["folders"])
        else:
            _run(request, *descriptors)
    finally:
        os._exit(code)


def _become(uid: int, real_uid: int) -> None:
    """Change to another user without capabilities, irreversibly."""
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(real_uid, uid, real_uid)
    prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    os.umask(0o007)


def _run(request: dict[str, Any], output: int, control: int) -> None:
    nothing = os.open(os.devnull, os.O_RDONLY)
    duplicates = [
        fcntl.fcntl(each, fcntl.F_DUPFD_CLOEXEC, CONTROL + 1) for each in (output, control)
    ]
    for number, descriptor in enumerate((nothing, duplicates[0], duplicates[0], duplicates[1])):
        os.dup2(descriptor, number, inheritable=True)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD, signal.SIGPIPE):
        signal.signal(number, signal.SIG_DFL)
    os.chdir(request["folder"])
    os.execve(request["argv"][0], request["argv"], request["env"])


def _end() -> int:
    """Kill all other processes of the slot's user; return 0 when none is left."""
    until_s = time.monotonic() + KILL_S
    while _is_any_left():
        # A process that forks endlessly outruns a list of pids, but not one signal to all.
        with contextlib.suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL)
        if time.monotonic() > until_s:
            return 1
        time.sleep(PAUSE_S)
    return 0


def _is_any_left() -> bool:
    """Whether another process of this user runs. kill(-1) succeeds even without any."""
    for name in os.listdir("/proc"):
        if not name.isdigit() or int(name) == os.getpid():
            continue
        try:
            with open(f"/proc/{name}/status") as file:
                status = file.read()
        except OSError:
            continue
        uids = status.partition("\nUid:")[2].partition("\n")[0].split()
        state = status.partition("\nState:")[2].split()
        if str(os.geteuid()) in uids and state[:1] not in (["Z"], ["X"]):
            return True
    return False


def _share(folders: list[str]) -> int:
    """Let the group, which the worker is in, read and remove files of the slot's user."""
    for folder in folders:
        for _, names, files, inside in os.fwalk(folder, follow_symlinks=False, onerror=None):
            for name in (*names, *files):
                try:
                    found = os.stat(name, dir_fd=inside, follow_symlinks=False)
                    if found.st_uid == os.getuid() and not stat.S_ISLNK(found.st_mode):
                        more = 0o770 if stat.S_ISDIR(found.st_mode) else 0o660
                        os.chmod(name, found.st_mode & 0o7777 | more, dir_fd=inside)
                except OSError:
                    continue
    return 0


def _reap(children: dict[int, int]) -> None:
    while (ended := _wait(os.WNOHANG)) is not None and ended[0]:
        pid, code = ended
        if pid in children:
            _report(children.pop(pid), code)


def _wait(flags: int = 0) -> tuple[int, int] | None:
    try:
        pid, status = os.waitpid(-1, flags)
    except ChildProcessError:
        return None
    return pid, os.waitstatus_to_exitcode(status) if pid else 0


def _report(status: int, code: int) -> None:
    with contextlib.suppress(OSError):  # the worker may not read it, or its pipe is full
        os.set_blocking(status, False)
        os.write(status, str(code).encode())
    os.close(status)


if __name__ == "__main__":
    main(sys.argv[1:])
