"""A client of the simulated mesh: AskMachine and ResultSink, joined as in RolloutClient.

- Its journal is written synchronously, as in the process.
- A group ends once in all incarnations of its client, for a reason that begins with a code of
  wire/messages.py.
"""

from rollmesh.core.ids import GroupId
from rollmesh.serve.client.arrivals import Action as SinkAction
from rollmesh.serve.client.arrivals import Keep, Malformed, RecordDrop, ResultKept, ResultSink
from rollmesh.serve.client.asks import Action, Arrived, AskEnded, AskMachine, Event, ResultFailed
from rollmesh.serve.client.journal_entries import GroupTried
from rollmesh.testing.mesh_sim.kernel import Kernel, Node
from rollmesh.testing.mesh_sim.network import Network
from rollmesh.wire.frames import Buffer, Packet
from rollmesh.wire.machine import ROUTER, Received, Send

CODES = {
    "attempts_exhausted",
    "cancelled",
    "client_left",
    "deadline",
    "env_failed",
    "incomplete",
    "infra_error",
    "overloaded",
    "quarantined",
}


class GroupEnds:
    """A client that journals and acks results; subclasses decide what to request."""

    def __init__(self) -> None:
        self.reasons: dict[GroupId, str] = {}
        """Reason of each group's end; '' for a result."""

    def __contains__(self, group_id: object) -> bool:
        return group_id in self.reasons

    def __len__(self) -> int:
        return len(self.reasons)

    @property
    def num_results(self) -> int:
        return sum(not reason for reason in self.reasons.values())

    def add(self, group_id: GroupId, reason: str) -> None:
        """Record that the group has ended at its sink."""
        assert group_id not in self.reasons, f"{group_id} ended twice"
        code = reason.partition(":")[0]
        assert code in CODES or not reason, f"{group_id} ended for no known reason: {reason}"
        self.reasons[group_id] = reason


TICK_S = 0.1
BEAT_S = 0.2
FORGED = b"forged"
"""Prefix of the body of a result that no worker of the mesh has sent."""
MALFORMED = b"\xc1malformed"
"""Body of a worker's result that no client can read."""


class RequestingClient(Node):
    """A client that journals and acks results; subclasses decide what to request."""

    asks: AskMachine
    sink: ResultSink

    def __init__(self, name: str, kernel: Kernel, network: Network) -> None:
        super().__init__(name)
        self.endings = GroupEnds()
        self._kernel = kernel
        self._network = network
        network.attach(self, self._receive)

    def _kept(self, keep: Keep) -> None:
        """The result is safe and acked."""
        message = keep.message
        self.endings.add(message.group_id, "" if message.complete else "incomplete")

    def _booked(self, group_id: GroupId, reason: str) -> None:
        """The group ended without a result."""
        self.endings.add(group_id, reason)

    def _tried(self, tried: GroupTried) -> None:
        """More attempts at a group have begun."""

    def _tell(self, event: Event) -> None:
        """Step the asks and carry out their actions."""
        self._do_asks(self.asks.step(event, self._kernel.now_s(self)))

    def _receive(self, source: str, packet: Packet) -> None:
        event = Received(source.encode(), packet.message, packet.body, packet.router)
        if source == "router":
            self._tell(event)
            return
        for action in self.sink.step(event, self._kernel.now_s(self)):
            self._do_sink(action)

    def _do_asks(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Send():
                    assert action.route == ROUTER
                    packet = Packet(action.message, self.asks.router, action.body)
                    self._network.send(self, "router", packet)
                case AskEnded():
                    for booked in self.sink.step(action, self._kernel.now_s(self)):
                        self._do_sink(booked)
                case GroupTried():
                    self._tried(action)

    def _do_sink(self, action: SinkAction) -> None:
        match action:
            case Send():
                packet = Packet(action.message, "", action.body)
                self._network.send(self, action.route.decode(), packet)
            case Keep():
                self._check(action)
            case RecordDrop(group_id, reason):
                self._booked(group_id, reason)

    def _check(self, keep: Keep) -> None:
        message, body = keep.message, bytes(keep.body)
        assert not body.startswith(FORGED), f"{message.group_id} took a forged result"
        if fault := self._fault_in(body):
            for action in self.sink.step(Malformed(keep, fault), self._kernel.now_s(self)):
                self._do_sink(action)
            self._tell(ResultFailed(message.group_id, message.attempt, message.worker_id, fault))
        elif not self._network.strikes("not_kept"):
            self._keep(keep)

    def _fault_in(self, body: Buffer) -> str:
        """Return why a result cannot be used; '' if it can."""
        return "malformed result" if body == MALFORMED else ""

    def _keep(self, keep: Keep) -> None:
        for action in self.sink.step(ResultKept(keep), self._kernel.now_s(self)):
            self._do_sink(action)
        self._tell(Arrived(keep.message.group_id))
        self._kept(keep)
