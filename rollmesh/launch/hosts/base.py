"""The interface between launch and the places where it starts processes.

    Supervisor --ChildOrder--> Host.start --> RunningChild --> ChildExited

- LocalHost starts children of launch itself; RemoteHost starts them by a runner on another node.
- A host places and starts processes. It restarts none: the supervision machine decides that.
"""

from collections.abc import Callable
from typing import NamedTuple, Protocol

import msgspec

from rollmesh.core.process import Ready
from rollmesh.launch.machine import ChildExited


class ChildOrder(msgspec.Struct, frozen=True, kw_only=True):
    """How to start one process."""

    role: str
    argv: tuple[str, ...]
    """The program and its arguments, to which the host adds --ready-fd, --go-fd and --listen-fd."""
    mark: str
    """A unique mark, by which everything that the process starts is found."""
    folder: str = ""
    """Its working folder; '' for that of its parent."""
    bind: str = ""
    """host:port of its listening socket, which outlives it; '' for none."""
    listens: bool = True
    """Whether the host listens on that socket; otherwise it only reserves the port."""
    num_gpus: int = 0
    num_cpus: float = 1
    variables: dict[str, str] = {}
    """Added to its environment."""
    files: tuple[str, ...] = ()
    """Paths of files that it reads. On another node it reads copies: each word of `argv` and each
    value of `variables` that is one of these paths becomes the path of the copy."""
    reports: bool = True
    """Whether it writes a line when it is ready."""
    has_gate: bool = False
    """Whether it waits for `release` before it does more than load its libraries."""
    is_worker: bool = False
    """Whether agents run beside it, so that its environment must contain no secrets."""


class RunningChild(Protocol):
    """One process, from its order to its exit."""

    @property
    def role(self) -> str:
        """Its role."""

    @property
    def host(self) -> str:
        """The name of its machine; '' for this one, or while it has no place."""

    @property
    def pid(self) -> int:
        """Its pid on its machine; 0 before the start and after the exit."""

    @property
    def address(self) -> str:
        """The http:// address of its listening socket; '' if it has none."""

    async def ended(self) -> ChildExited:
        """Return when the process and its descendants have ended; called once.

        OSError if it cannot be started.
        """

    def release(self) -> None:
        """Open its gate."""

    def terminate(self) -> None:
        """Send SIGTERM."""

    def kill(self) -> None:
        """Kill the process and all that it started."""


class ChildCallbacks(NamedTuple):
    """Callbacks for the events of a child."""

    started: Callable[[RunningChild], None]
    ready: Callable[[RunningChild, Ready], None]
    heartbeat: Callable[[RunningChild], None]
    """A heartbeat was received."""
    pending: Callable[[RunningChild, str], None]
    """No node has a place for the child yet; the line names the missing resources."""


class Host(Protocol):
    """A place for processes."""

    def start(self, order: ChildOrder, hooks: ChildCallbacks) -> RunningChild:
        """Start a process in the background; `ended` reports its end."""

    async def close(self) -> None:
        """End all that was started here, and release its sockets."""
