"""The protocol between launch and the processes that it starts, and what forked children close.

- `--ready-fd N`: the child writes one JSON line, a Ready, to this descriptor when it is reachable.
- `--listen-fd N`: a listening socket that launch owns and the child serves on; or a bound one that
  keeps its port, for a child whose server cannot inherit a socket.
- `--go-fd N`: the child loads its libraries, then waits until launch closes the other end.
- ROLLMESH_BEAT_FD: a thread of the child writes a byte to this descriptor every BEAT_S, so that
  launch notices a process that is suspended.
- The child dies with its parent.
"""

import asyncio
import contextlib
import ctypes
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import Protocol
from weakref import WeakSet

import msgspec

from rollmesh.core.addresses import advertised, is_wildcard, with_host
from rollmesh.core.errors import AddressError

MAX_PORT = 65_535
OK, FAILED, USAGE, INTERRUPTED = 0, 1, 2, 130
"""Exit codes: done; a fault; a mistake that the user can fix, explained in one line; stopped by a
signal before it was done (launch restarts the process unless it sent the signal).
"""
RECYCLED = 75
"""Exit code: it exited cleanly and wants to be replaced (EX_TEMPFAIL of sysexits.h)."""

LAUNCHER_VARIABLE = "ROLLMESH_LAUNCHER"
"""Environment: the pid of the launch process, set for the processes that it starts."""

BEAT_VARIABLE = "ROLLMESH_BEAT_FD"
"""Environment: the descriptor for heartbeats, set by launch for the processes that it starts."""
BEAT_S = 2.0

_PR_SET_PDEATHSIG = 1
_STATE, _STARTED = 0, 19
"""Fields of /proc/PID/stat after the name."""
_DEAD = ("Z", "X")


class Ready(msgspec.Struct, frozen=True):
    """A child's report that it is reachable."""

    role: str
    pid: int
    address: str
    """Its http:// or tcp:// address; '' if it serves nothing."""
    http_address: str = ""
    """The HTTP address of a process that has both (the router)."""


def announce(ready_fd: int | None, ready: Ready) -> None:
    """Write `ready` to the descriptor, if there is one, and close it."""
    if ready_fd is None:
        return
    with os.fdopen(ready_fd, "wb") as pipe:
        pipe.write(msgspec.json.encode(ready) + b"\n")


def wait_for_go(go_fd: int | None) -> None:
    """Wait until launch opens the gate, if there is one."""
    if go_fd is not None:
        with os.fdopen(go_fd, "rb") as pipe:
            pipe.read()


def listen(bind: str, listen_fd: int | None = None) -> socket.socket:
    """Return a listening TCP socket: the inherited one, or a new one at `host:port`.

    AddressError if the address is taken or malformed; port 0 picks a free one.
    """
    if listen_fd is not None:
        return socket.socket(fileno=listen_fd)
    return _bound(bind, socket.create_server, backlog=1024)


def reserve(bind: str) -> socket.socket:
    """Return a bound TCP socket that does not listen, for a program that cannot inherit a socket.

    While it is open, the system gives the port to no other program, and a program that sets
    SO_REUSEADDR can listen there (Linux). AddressError as in `listen`.
    """
    return _bound(bind, _reserved)


def _reserved(address: tuple[str, int], family: socket.AddressFamily) -> socket.socket:
    reserved = socket.socket(family, socket.SOCK_STREAM)
    try:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind(address)
    except BaseException:
        reserved.close()
        raise
    return reserved


def _bound(bind: str, make: Callable[..., socket.socket], **options: int) -> socket.socket:
    host, _, port = bind.rpartition(":")
    host = host.strip("[]")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    if not port.isdecimal() or int(port) > MAX_PORT:
        raise AddressError(
            f"{bind}: cannot listen there: its port is not a number up to {MAX_PORT}; "
            "write it as HOST:PORT"
        )
    try:
        return make((host, int(port)), family=family, **options)
    except (OSError, ValueError) as error:
        why = str(getattr(error, "strerror", None) or error).lower()
        why = why.partition(" (while attempting")[0]  # create_server repeats the address
        raise AddressError(f"{bind}: cannot listen there: {why}; choose another") from None


def local_http_address(listening: socket.socket) -> str:
    """Return `http://host:port` of a listening socket for this machine: on loopback if it listens
    on all interfaces.
    """
    host, port = listening.getsockname()[:2]
    return with_host(f"http://:{port}", "127.0.0.1" if is_wildcard(host) else host)


def http_address(listening: socket.socket, advertise: str = "", peer: str = "") -> str:
    """Return `http://host:port` of a listening socket for other processes; see `advertised`."""
    host, port = listening.getsockname()[:2]
    return advertised(with_host(f"http://:{port}", host), advertise, peer)


def die_with_parent() -> None:
    """Ask Linux for SIGKILL when the parent dies; elsewhere launch kills its children."""
    if sys.platform == "linux":
        parent = os.getppid()
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os.kill(os.getpid(), signal.SIGKILL)


def pid_space() -> str:
    """Return the scope in which our pids are valid: this boot's pid namespace, pid_namespaces(7);
    '' if unknown.

    Containers may share a host's name, and machines a container's.
    """
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return f"{file.read().strip()}/{os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def start_ticks(pid: int) -> str:
    """Return when the process started, in clock ticks since boot, which clock changes do not move.

    '' if it has ended, or if the system has no /proc; see proc_pid_stat(5).
    """
    try:
        with open(f"/proc/{pid}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[_STATE] in _DEAD else fields[_STARTED]


def is_launched() -> bool:
    """Return whether our parent is a launch process."""
    return os.environ.get(LAUNCHER_VARIABLE) == str(os.getppid())


def attach_to_launcher() -> None:
    """Die with our parent and send it heartbeats, if it is a launch process.

    A process that was started by hand outlives its shell.
    """
    number = os.environ.pop(BEAT_VARIABLE, "")
    if is_launched():
        die_with_parent()
        if number.isdecimal():
            os.set_inheritable(int(number), False)
            threading.Thread(target=_beat, args=(int(number),), name="beat", daemon=True).start()


def _beat(descriptor: int) -> None:
    """Write heartbeats until launch is gone; a blocked event loop or a train step does not delay
    them.
    """
    os.set_blocking(descriptor, False)
    while True:
        try:
            os.write(descriptor, b".")
        except BlockingIOError:
            pass  # launch is suspended, and the pipe is full
        except OSError:
            return
        time.sleep(BEAT_S)


class Stop:
    """Records a SIGTERM or SIGINT; a second one exits the process at once, even if it is
    blocked.
    """

    def __init__(self, wake: Callable[[], object] = bool) -> None:
        """`wake` is called in the handler of the first signal."""
        self.is_asked = False
        self._wake = wake
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)

    def _on_signal(self, *_: object) -> None:
        if self.is_asked:
            os._exit(FAILED)
        self.is_asked = True
        self._wake()


def stop_event(loop: asyncio.AbstractEventLoop) -> asyncio.Event:
    """Return an event that the first SIGTERM or SIGINT sets; a second one exits the process at
    once.
    """
    stop = asyncio.Event()

    def wake() -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: the process is about to exit
            loop.call_soon_threadsafe(stop.set)

    Stop(wake)
    return stop


class Closable(Protocol):
    """A socket or a file."""

    def close(self) -> None:
        """Close it in this process only; a second call does nothing."""


_opened: WeakSet[Closable] = WeakSet()


def close_in_children(opened: Closable) -> None:
    """Close `opened` in processes that are forked from now on, before they run any code.

    A data loader's workers may outlive the process that forked them; with its connections and locks
    they would make a dead owner look alive. References are weak.
    """
    _opened.add(opened)


def _close_all() -> None:
    for each in [*_opened]:
        each.close()


os.register_at_fork(after_in_child=_close_all)
