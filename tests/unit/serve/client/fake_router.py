"""A scripted router, and a worker's connection to a sink, for tests of programs that use a
client."""

import weakref
from typing import ClassVar, TypeVar

from rollmesh.core.ids import GroupId
from rollmesh.core.types import GroupRecord, Outcome, RolloutRecord, Task
from rollmesh.wire.frames import Packet, decode_ask, encode_record
from rollmesh.wire.messages import (
    AnyMessage,
    AskGroup,
    ClientHello,
    GroupAcked,
    GroupFinished,
    GroupMoved,
    GroupState,
    ResultRefused,
    RouterHello,
)
from rollmesh.wire.sockets import Dialer, Hub, wait

M = TypeVar("M")


class FakeRouter:
    """A hub that answers hellos, confirms requests, and records the messages that it receives."""

    open_here: ClassVar["weakref.WeakSet[FakeRouter]"] = weakref.WeakSet()
    """Looked up by ticket, because a worker's messages do not pass through a router."""

    def __init__(self) -> None:
        self.open_here.add(self)
        self.asks: dict[GroupId, tuple[AskGroup, bool]] = {}
        """Each request, and whether it belongs to an evaluation."""
        self.hub = Hub("tcp://127.0.0.1:0")
        self.packets: list[tuple[bytes, Packet]] = []
        self.routes: dict[GroupId, bytes] = {}
        """The client of each group."""

    def expect(self, kind: type[M]) -> tuple[bytes, M, Packet]:
        """Remove and return the next message of this kind."""
        for _ in range(200):
            for at, (route, packet) in enumerate(self.packets):
                if isinstance(packet.message, kind):
                    del self.packets[at]
                    return route, packet.message, packet
            self.receive()
        raise AssertionError(f"no {kind.__name__}")

    def receive(self) -> None:
        if self.hub.socket.closed:
            return
        wait([self.hub], None, 0.1)
        for route, packet in self.hub.receive():
            match packet.message:
                case ClientHello():
                    self.send(route, RouterHello(0.1))
                case AskGroup(group_id):
                    self.routes[group_id] = route
                    self.asks[group_id] = packet.message, decode_ask(packet.body).is_eval
                    self.send(route, GroupMoved(group_id, GroupState.QUEUED, 0, ""))
            self.packets.append((route, packet))

    def send(self, route: bytes, message: AnyMessage) -> None:
        self.hub.send(route, Packet(message, "i1"))

    @classmethod
    def ask_of(cls, group_id: GroupId) -> tuple[AskGroup, bool]:
        """Return the request of this id that any router of this process received."""
        for _ in range(200):
            for router in list(cls.open_here):
                if group_id in router.asks:
                    return router.asks[group_id]
                router.receive()
        raise AssertionError(f"no request for {group_id}")


def finished(group_id: GroupId, attempt: int = 1, *, complete: bool = True) -> GroupFinished:
    """Return the header of a result, with the ticket of its group."""
    ask, _ = FakeRouter.ask_of(group_id)
    return GroupFinished(group_id, attempt, "w1", complete, ask.ticket)


def result_of(group_id: GroupId, attempt: int = 1, task_id: str = "t") -> Packet:
    """Return a complete result as a worker makes it, of rollouts without tokens."""
    ask, is_eval = FakeRouter.ask_of(group_id)
    indices = range(ask.num_samples)
    rollouts = [RolloutRecord(index=index, outcome=Outcome.COMPLETED) for index in indices]
    record = GroupRecord(task=Task(id=task_id), rollouts=rollouts, is_eval=is_eval)
    return Packet(finished(group_id, attempt), "", encode_record(record), (b"", b""))


def send_result(worker: Dialer, group_id: GroupId, attempt: int = 1, task_id: str = "t") -> None:
    """Send a complete result as a worker does."""
    worker.send(result_of(group_id, attempt, task_id))


def next_answer(worker: Dialer) -> GroupAcked | ResultRefused:
    """Return the sink's next answer."""
    for _ in range(200):
        wait([worker], None, 0.1)
        for packet in worker.receive(1):
            assert isinstance(packet.message, GroupAcked | ResultRefused)
            return packet.message
    raise AssertionError("no answer")


def next_ack(worker: Dialer) -> GroupAcked:
    answer = next_answer(worker)
    assert isinstance(answer, GroupAcked), answer
    return answer


def deliver(sink: str, group_id: GroupId, attempt: int = 1, task_id: str = "t") -> GroupAcked:
    """Send a complete result and return the sink's ack."""
    worker = Dialer(sink, f"w{attempt}")
    send_result(worker, group_id, attempt, task_id)
    ack = next_ack(worker)
    worker.close()
    return ack
