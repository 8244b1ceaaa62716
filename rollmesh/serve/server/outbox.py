"""Finished groups on their way to their sinks: sent until acked, at least once.

    HELD --sent--> SENT --silence--> HELD (sent again, each time later)
    HELD | SENT --GroupAcked--> ACKED --told the router--> forgotten
    HELD | SENT --CancelRun--> forgotten
    HELD | SENT --no ack within delivery_timeout_s--> GroupLost, forgotten; the router decides

Invariants: a parcel is held until its sink acked it, nobody wants it, or its time is over; its
bytes are counted all that time; parcels of one sink go out in the order in which they were packed,
and an ack of a later one says that the earlier were lost. The machine knows sizes only: its shell
keeps the payloads by group id. Driven by duties.py.
"""

import enum

import msgspec

from rollmesh.core.ids import GroupId
from rollmesh.wire.machine import ROUTER, Received, Send, Ticked
from rollmesh.wire.messages import GroupAcked, GroupDelivered, GroupFinished, GroupLost


class ParcelState(enum.StrEnum):
    """HELD <-> SENT -> ACKED, see above."""

    HELD = "held"
    SENT = "sent"
    ACKED = "acked"


class OutboxSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How patiently a parcel waits for its ack."""

    resend_s: float = 2.0
    """Silence after the first sending; doubles with each."""
    max_resend_s: float = 30.0
    delivery_timeout_s: float = 600.0
    """A parcel that is not acked in this time is given up."""


class Packed(msgspec.Struct, frozen=True):
    """Event: a group is finished; its payload of `num_bytes` waits in the shell."""

    message: GroupFinished
    sink: str
    num_bytes: int


class Unwanted(msgspec.Struct, frozen=True):
    """Event: nobody wants this group any more."""

    group_id: GroupId


class Forget(msgspec.Struct, frozen=True):
    """Action: drop everything that is held of this group."""

    group_id: GroupId


Event = Packed | Unwanted | Received | Ticked
Action = Send | Forget


class Parcel(msgspec.Struct):
    """One finished group."""

    message: GroupFinished
    sink: str
    num_bytes: int
    state: ParcelState = ParcelState.HELD
    sent_as: int = 0
    """Place of its last sending among all sendings."""
    wait_s: float = 0.0
    due_s: float = 0.0
    lost_s: float = 0.0
    """When it is given up."""


class Outbox:
    """All parcels of one worker."""

    def __init__(self, settings: OutboxSettings) -> None:
        self.settings = settings
        self.parcels: dict[GroupId, Parcel] = {}
        self.unacked_bytes = 0
        self.num_resent = 0
        self._num_sendings = 0

    def step(self, event: Event, now_s: float) -> list[Action]:
        """What to do about `event`; total, and deterministic."""
        match event:
            case Packed(message, sink, num_bytes):
                if message.group_id in self.parcels:
                    return []
                parcel = Parcel(
                    message,
                    sink,
                    num_bytes,
                    wait_s=self.settings.resend_s,
                    lost_s=now_s + self.settings.delivery_timeout_s,
                )
                self.parcels[message.group_id] = parcel
                self.unacked_bytes += num_bytes
                return [self._send(parcel, now_s)]
            case Unwanted(group_id):
                return [Forget(group_id)] if self._take_out(group_id) else []
            case Received(route, GroupAcked(group_id)):
                return self._acked(route, group_id, now_s)
            case Received():
                return []
            case Ticked():
                lost = [each for each in self.parcels.values() if now_s >= each.lost_s]
                given_up = [action for each in lost for action in self._give_up(each)]
                return given_up + [self._send_again(p, now_s) for p in self._due(now_s)]

    def readdress(self, group_id: GroupId, attempt: int, sink: str) -> None:
        """The router calls what is held a later attempt, or its client listens elsewhere."""
        parcel = self.parcels[group_id]
        attempt = max(parcel.message.attempt, attempt)
        parcel.message = msgspec.structs.replace(parcel.message, attempt=attempt)
        if sink != parcel.sink:
            parcel.sink, parcel.due_s = sink, 0.0

    def _acked(self, route: bytes, group_id: GroupId, now_s: float) -> list[Action]:
        parcel = self._take_out(group_id)
        if parcel is None:
            return []
        parcel.state = ParcelState.ACKED
        actions: list[Action] = [
            Send(ROUTER, GroupDelivered(group_id, parcel.message.attempt)),
            Forget(group_id),
        ]
        # A sink acks in the order of arrival: what was sent to it before this was lost on the way.
        lost = [
            other
            for other in self.parcels.values()
            if other.state is ParcelState.SENT
            and other.sent_as < parcel.sent_as
            and other.sink.encode() == route
        ]
        return actions + [self._send_again(other, now_s) for other in lost]

    def _give_up(self, parcel: Parcel) -> list[Action]:
        message = parcel.message
        self._take_out(message.group_id)
        reason = f"{parcel.sink} did not ack in {self.settings.delivery_timeout_s:g} s"
        lost = GroupLost(message.group_id, message.attempt, reason)
        return [Send(ROUTER, lost), Forget(message.group_id)]

    def _take_out(self, group_id: GroupId) -> Parcel | None:
        parcel = self.parcels.pop(group_id, None)
        if parcel is not None:
            self.unacked_bytes -= parcel.num_bytes
        return parcel

    def _due(self, now_s: float) -> list[Parcel]:
        due = [parcel for parcel in self.parcels.values() if now_s >= parcel.due_s]
        for parcel in due:
            parcel.state = ParcelState.HELD
        return due

    def _send_again(self, parcel: Parcel, now_s: float) -> Send:
        self.num_resent += 1
        parcel.wait_s = min(2 * parcel.wait_s, self.settings.max_resend_s)
        return self._send(parcel, now_s)

    def _send(self, parcel: Parcel, now_s: float) -> Send:
        self._num_sendings += 1
        parcel.sent_as = self._num_sendings
        parcel.state = ParcelState.SENT
        parcel.due_s = now_s + parcel.wait_s
        return Send(parcel.sink.encode(), parcel.message)
