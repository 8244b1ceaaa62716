"""A group scheduler on a clock that the test advances, with short helpers for messages of its
peers."""

from typing import TypeVar

from rollmesh.core.config import RouterConfig
from rollmesh.core.ids import GroupId
from rollmesh.serve.router.group_scheduler import GroupScheduler
from rollmesh.serve.router.status import entries, held
from rollmesh.wire.header import Message
from rollmesh.wire.machine import Received, Send, Ticked
from rollmesh.wire.messages import (
    AskGroup,
    ClientBeat,
    GroupStarted,
    GroupState,
    HeldGroup,
    WorkerBeat,
    WorkerHello,
)

M = TypeVar("M", bound=Message)
SETTINGS = RouterConfig(
    beat_s=1.0, missed_beats=3, max_attempts=3, client_grace_s=10.0, max_queued_groups=8
)
SETTLED_S = 3.0
CLIENT = b"client"


def group(seq: int) -> GroupId:
    return GroupId("r1", seq)


def hello(worker: str, *holds: HeldGroup, env: str = "guess", pid: int = 1) -> WorkerHello:
    return WorkerHello(worker, env, 8, pid, "here", holds, started_s=float(pid))


def beat(worker: str, num_running: int = 0, accepting: bool = True, lag_s: float = 0) -> WorkerBeat:
    return WorkerBeat(worker, num_running, accepting, 0, lag_s, 0, 0, 0, 0)


def ask(
    seq: int, *, n: int = 4, attempts: int = 0, client: str = "c", env: str = "guess", prio: int = 0
) -> AskGroup:
    return AskGroup(group(seq), client, env, n, "tcp://sink", attempts, prio)


class ScriptedRouter:
    """A group scheduler that receives the messages of a test."""

    def __init__(self, settings: RouterConfig = SETTINGS, started_s: float = 0.0) -> None:
        self.now_s = started_s
        self.group_scheduler = GroupScheduler(settings, started_s)

    def receive(self, route: bytes | str, message: Message, body: bytes = b"") -> list[Send]:
        route = route.encode() if isinstance(route, str) else route
        return self.group_scheduler.step(Received(route, message, body), self.now_s)  # type: ignore[arg-type]

    def worker(self, name: str, *holds: HeldGroup, pid: int = 1) -> list[Send]:
        return self.receive(name, hello(name, *holds, pid=pid))

    def asks(self, message: AskGroup, body: bytes = b"ask") -> list[Send]:
        return self.receive(message.client_id, message, body)

    def advance(self, seconds: float, *beating: str) -> list[Send]:
        """Advance the clock by half heartbeats; the named workers and the client `c` send one each
        time."""
        sends: list[Send] = []
        for _ in range(round(seconds / 0.5)):
            self.now_s += 0.5
            for name in beating:
                sends += self.receive(name, ClientBeat(name, 0) if name == "c" else beat(name))
            sends += self.group_scheduler.step(Ticked(), self.now_s)
        return sends

    def state(self, seq: int) -> GroupState | None:
        found = self.group_scheduler.table.groups.get(group(seq))
        return found.state if found else None

    def holder(self, seq: int) -> str:
        return self.group_scheduler.table.groups[group(seq)].worker_id

    def is_empty(self) -> bool:
        table = self.group_scheduler.table
        counted = {**held(self.group_scheduler), **entries(self.group_scheduler)}
        return not table.held and not any(counted.values())


def only(sends: list[Send], kind: type[M], route: bytes | str | None = None) -> list[M]:
    wanted = route.encode() if isinstance(route, str) else route
    return [s.message for s in sends if isinstance(s.message, kind) and wanted in (None, s.route)]


def running(router: ScriptedRouter, seq: int = 1, worker: str = "w0") -> None:
    """Register a worker that runs one group."""
    router.worker(worker)
    router.asks(ask(seq))
    router.receive(worker, GroupStarted(group(seq), 1))
    assert router.state(seq) is GroupState.RUNNING
