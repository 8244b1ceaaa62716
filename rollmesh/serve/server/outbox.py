"""Finished groups on their way to their sinks: sent until acked, at least once.

    HELD --sent--> SENT --its sink is silent--> one of that sink's is sent again, each time later
                   SENT --a later one is acked--> sent again
    HELD | SENT --GroupAcked--> ACKED --told the router--> forgotten
    HELD | SENT --CancelRun--> forgotten
    HELD | SENT --ResultRefused by its sink--> GroupLost, forgotten; the router decides
    HELD | SENT --no ack within delivery_timeout_s--> GroupLost, forgotten; the router decides
    SENT --its worker leaves, and the sink owes an ack for absent_s--> given back, forgotten

Invariants: a parcel is held until its sink acked it, nobody wants it, or its time is over; its
bytes are counted all that time; parcels of one sink go out in the order in which they were packed,
and an ack of a later one says that the earlier were lost. What a sink does not read waits in its
socket's queue, so a silent one does not get all of them again and again. The machine knows sizes
only: its shell keeps the payloads by group id. Driven by duties.py.
"""

import enum

import msgspec

from rollmesh.core.ids import GroupId
from rollmesh.wire.machine import ROUTER, Received, Send, Ticked
from rollmesh.wire.messages import (
    GroupAcked,
    GroupDelivered,
    GroupFinished,
    GroupLost,
    ResultRefused,
)


class ParcelState(enum.StrEnum):
    """HELD -> SENT -> ACKED, see above."""

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
    absent_s: float = 30.0
    """Who acks nothing for so long is away: longer than it takes to start a trainer again, shorter
    than anybody waits for a worker that he has told to leave."""


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
    first_as: int = 0
    """Place of its first sending to this sink among all sendings."""
    sent_as: int = 0
    """Of its last."""
    wait_s: float = 0.0
    due_s: float = 0.0
    owed_s: float = 0.0
    """Its first sending to this sink, or the sink's last word after that."""
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
            case Received(route, ResultRefused() as refused):
                return self._refused(route, refused)
            case Received():
                return []
            case Ticked():
                lost = [each for each in self.parcels.values() if now_s >= each.lost_s]
                given_up = [action for each in lost for action in self._overdue(each)]
                return given_up + [self._send_again(p, now_s) for p in self._due(now_s)]

    def readdress(self, group_id: GroupId, attempt: int, sink: str, ticket: bytes) -> None:
        """Take over what a repeated RunGroup names: a later attempt, another sink or ticket."""
        parcel = self.parcels[group_id]
        attempt = max(parcel.message.attempt, attempt)
        parcel.message = msgspec.structs.replace(parcel.message, attempt=attempt, ticket=ticket)
        if sink != parcel.sink:
            parcel.sink, parcel.due_s, parcel.first_as = sink, 0.0, 0
            parcel.state = ParcelState.HELD

    def is_stuck(self, now_s: float) -> bool:
        """Whether nothing is left but what waits for sinks that are away."""
        latest_s = now_s - self.settings.absent_s
        return all(
            parcel.state is ParcelState.SENT and parcel.owed_s <= latest_s
            for parcel in self.parcels.values()
        )

    def give_back(self) -> list[Forget]:
        """The worker leaves: what is here runs again, elsewhere."""
        return [Forget(group_id) for group_id in list(self.parcels) if self._take_out(group_id)]

    def _acked(self, route: bytes, group_id: GroupId, now_s: float) -> list[Action]:
        parcel = self._take_out(group_id)
        if parcel is None:
            return []
        parcel.state = ParcelState.ACKED
        actions: list[Action] = [
            Send(ROUTER, GroupDelivered(group_id, parcel.message.attempt, parcel.message.ticket)),
            Forget(group_id),
        ]
        others = self._of_sink(route)
        for other in others:
            other.owed_s = now_s
        for other in (lost := self._lost(parcel, others)):
            other.wait_s = self.settings.resend_s / 2  # the sink is there
        return actions + [self._send_again(other, now_s) for other in lost]

    def _lost(self, acked: Parcel, others: list[Parcel]) -> list[Parcel]:
        """Of the `others` of its sink, those to be sent again.

        A sink acks in the order of arrival, so what was sent before was lost on the way. Of one
        that was sent more than once nobody knows which has come: of what lies between, one is sent
        again for each ack, so that a sink that is merely slow gets little twice.
        """
        # What was sent later goes first: mostly that is all there is.
        earlier = [each for each in others if each.sent_as < acked.sent_as]
        lost = [each for each in earlier if each.sent_as < acked.first_as]
        return lost or sorted(earlier, key=lambda parcel: parcel.sent_as)[:1]

    def _of_sink(self, route: bytes) -> list[Parcel]:
        """What was sent to the sink of this route, and is not acked."""
        return [
            parcel
            for parcel in self.parcels.values()
            if parcel.state is ParcelState.SENT and parcel.sink.encode() == route
        ]

    def _refused(self, route: bytes, refused: ResultRefused) -> list[Action]:
        parcel = self.parcels.get(refused.group_id)
        if parcel is None or parcel.sink.encode() != route:
            return []
        return self._give_up(parcel, f"{parcel.sink} refused its result: {refused.reason}")

    def _overdue(self, parcel: Parcel) -> list[Action]:
        waited = f"in {self.settings.delivery_timeout_s:g} s"
        return self._give_up(parcel, f"{parcel.sink} did not ack {waited}")

    def _give_up(self, parcel: Parcel, reason: str) -> list[Action]:
        message = parcel.message
        self._take_out(message.group_id)
        lost = GroupLost(message.group_id, message.attempt, reason)
        return [Send(ROUTER, lost), Forget(message.group_id)]

    def _take_out(self, group_id: GroupId) -> Parcel | None:
        parcel = self.parcels.pop(group_id, None)
        if parcel is not None:
            self.unacked_bytes -= parcel.num_bytes
        return parcel

    def _due(self, now_s: float) -> list[Parcel]:
        """What was never sent to its sink; of the rest one for each sink, longest on its way."""
        due = [parcel for parcel in self.parcels.values() if now_s >= parcel.due_s]
        fresh = [parcel for parcel in due if parcel.state is ParcelState.HELD]
        of_sink: dict[str, list[Parcel]] = {}
        for parcel in due:
            if parcel.state is ParcelState.SENT:
                of_sink.setdefault(parcel.sink, []).append(parcel)
        return fresh + [self._probe(parcels, now_s) for parcels in of_sink.values()]

    def _probe(self, parcels: list[Parcel], now_s: float) -> Parcel:
        """One of those of a silent sink; the others wait as long as it will."""
        probe = min(parcels, key=lambda parcel: parcel.sent_as)
        probe.wait_s = max(parcel.wait_s for parcel in parcels)
        wait_s = min(2 * probe.wait_s, self.settings.max_resend_s)
        for parcel in parcels:
            parcel.wait_s, parcel.due_s = probe.wait_s, now_s + wait_s
        return probe

    def _send_again(self, parcel: Parcel, now_s: float) -> Send:
        self.num_resent += 1
        parcel.wait_s = min(2 * parcel.wait_s, self.settings.max_resend_s)
        return self._send(parcel, now_s)

    def _send(self, parcel: Parcel, now_s: float) -> Send:
        self._num_sendings += 1
        parcel.sent_as = self._num_sendings
        parcel.first_as = parcel.first_as or self._num_sendings
        if parcel.state is ParcelState.HELD:
            parcel.state, parcel.owed_s = ParcelState.SENT, now_s
        parcel.due_s = now_s + parcel.wait_s
        return Send(parcel.sink.encode(), parcel.message)
