"""A router by hand, and a worker's way to a sink, for tests of what stands on a client."""

from typing import TypeVar

from rollmesh.core.ids import GroupId
from rollmesh.core.types import GroupRecord, Task
from rollmesh.wire.bodies import encode_record
from rollmesh.wire.frames import Packet
from rollmesh.wire.messages import (
    AnyMessage,
    AskGroup,
    ClientHello,
    GroupAcked,
    GroupFinished,
    GroupMoved,
    GroupState,
    RouterHello,
)
from rollmesh.wire.sockets import Dialer, Hub, wait

M = TypeVar("M")


class FakeRouter:
    """A hub that answers hellos, confirms asks, and remembers what it is told."""

    def __init__(self) -> None:
        self.hub = Hub("tcp://127.0.0.1:0")
        self.packets: list[tuple[bytes, Packet]] = []
        self.routes: dict[GroupId, bytes] = {}
        """Who asked for a group."""

    def expect(self, kind: type[M]) -> tuple[bytes, M, Packet]:
        """The next message of this kind, removed; others stay."""
        for _ in range(200):
            for at, (route, packet) in enumerate(self.packets):
                if isinstance(packet.message, kind):
                    del self.packets[at]
                    return route, packet.message, packet
            wait([self.hub], None, 0.1)
            for route, packet in self.hub.receive():
                match packet.message:
                    case ClientHello():
                        self.say(route, RouterHello(0.1))
                    case AskGroup(group_id):
                        self.routes[group_id] = route
                        self.say(route, GroupMoved(group_id, GroupState.QUEUED, 0, ""))
                self.packets.append((route, packet))
        raise AssertionError(f"no {kind.__name__}")

    def say(self, route: bytes, message: AnyMessage) -> None:
        self.hub.send(route, Packet(message, "i1"))


def send_result(worker: Dialer, group_id: GroupId, attempt: int = 1, task_id: str = "t") -> None:
    """Send a complete result as a worker does."""
    body = encode_record(GroupRecord(task=Task(id=task_id)))
    worker.send(Packet(GroupFinished(group_id, attempt, "w1", True), "", body, (b"", b"")))


def next_ack(worker: Dialer) -> GroupAcked:
    for _ in range(200):
        wait([worker], None, 0.1)
        for packet in worker.receive(1):
            assert isinstance(packet.message, GroupAcked)
            return packet.message
    raise AssertionError("no ack")


def deliver(sink: str, group_id: GroupId, attempt: int = 1, task_id: str = "t") -> GroupAcked:
    """Send a complete result; the sink's ack."""
    worker = Dialer(sink, f"w{attempt}")
    send_result(worker, group_id, attempt, task_id)
    ack = next_ack(worker)
    worker.close()
    return ack
