"""Results on their way to their sinks: sent until they are acked, at least once.

    HELD --sent--> SENT --its sink is silent--> one result of it is sent again, each time later
                   SENT --a later result is acked--> sent again
    HELD | SENT --GroupAcked--> ACKED --the router is informed--> removed
    HELD | SENT --CancelRun--> removed
    HELD | SENT --ResultRefused by the sink--> GroupLost, removed; the router decides
    HELD | SENT --no ack in delivery_timeout_s--> GroupLost, removed; the router decides
    SENT --the worker leaves, and the sink owes an ack for absent_s--> returned, removed

- A result's bytes are counted until it is removed. Results of one sink are sent in order, and an
  ack of a later one means that earlier ones were lost.
- Pure: the machine knows sizes; the worker has the payloads by group id.
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


class PendingState(enum.StrEnum):
    """HELD -> SENT -> ACKED, see above."""

    HELD = "held"
    SENT = "sent"
    ACKED = "acked"


class OutboxSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Retry intervals and timeouts of a result."""

    resend_s: float = 2.0
    """Silence after the first sending; doubles with each."""
    max_resend_s: float = 30.0
    delivery_timeout_s: float = 600.0
    """A result that is not acked in this time is given up."""
    absent_s: float = 30.0
    """A sink that acks nothing for this time is away: longer than the restart of a trainer, shorter
    than a drained worker is waited for.
    """


class Packed(msgspec.Struct, frozen=True):
    """Event: a group has finished; the shell holds its payload of `num_bytes`."""

    message: GroupFinished
    sink: str
    num_bytes: int


class Unwanted(msgspec.Struct, frozen=True):
    """Event: this group is no longer wanted."""

    group_id: GroupId


class Forget(msgspec.Struct, frozen=True):
    """Action: drop everything that is held of this group."""

    group_id: GroupId


Event = Packed | Unwanted | Received | Ticked
Action = Send | Forget


class PendingResult(msgspec.Struct):
    """One finished group."""

    message: GroupFinished
    sink: str
    num_bytes: int
    state: PendingState = PendingState.HELD
    first_as: int = 0
    """Number of its first sending to this sink, among all sendings."""
    sent_as: int = 0
    """Number of its last sending."""
    wait_s: float = 0.0
    due_s: float = 0.0
    owed_s: float = 0.0
    """Time of its first sending to this sink, or of the sink's last message after that."""
    lost_s: float = 0.0
    """When it is given up."""


class Outbox:
    """All undelivered results of one worker."""

    def __init__(self, settings: OutboxSettings) -> None:
        self.settings = settings
        self.results: dict[GroupId, PendingResult] = {}
        self.unacked_bytes = 0
        self.num_resent = 0
        self._num_sendings = 0

    def step(self, event: Event, now_s: float) -> list[Action]:
        """Return the actions for `event`; total and deterministic."""
        match event:
            case Packed(message, sink, num_bytes):
                if message.group_id in self.results:
                    return []
                result = PendingResult(
                    message,
                    sink,
                    num_bytes,
                    wait_s=self.settings.resend_s,
                    lost_s=now_s + self.settings.delivery_timeout_s,
                )
                self.results[message.group_id] = result
                self.unacked_bytes += num_bytes
                return [self._send(result, now_s)]
            case Unwanted(group_id):
                return [Forget(group_id)] if self._take_out(group_id) else []
            case Received(route, GroupAcked(group_id)):
                return self._acked(route, group_id, now_s)
            case Received(route, ResultRefused() as refused):
                return self._refused(route, refused)
            case Received():
                return []
            case Ticked():
                lost = [each for each in self.results.values() if now_s >= each.lost_s]
                given_up = [action for each in lost for action in self._overdue(each)]
                return given_up + [self._send_again(p, now_s) for p in self._due(now_s)]

    def readdress(self, group_id: GroupId, attempt: int, sink: str, ticket: bytes) -> None:
        """Take over what a repeated RunGroup names: a later attempt, another sink or ticket."""
        result = self.results[group_id]
        attempt = max(result.message.attempt, attempt)
        result.message = msgspec.structs.replace(result.message, attempt=attempt, ticket=ticket)
        if sink != result.sink:
            result.sink, result.due_s, result.first_as = sink, 0.0, 0
            result.state = PendingState.HELD

    def is_stuck(self, now_s: float) -> bool:
        """Return whether only results for sinks that are away are left."""
        latest_s = now_s - self.settings.absent_s
        return all(
            result.state is PendingState.SENT and result.owed_s <= latest_s
            for result in self.results.values()
        )

    def give_back(self) -> list[Forget]:
        """Return all results to the router: the worker leaves, and they run again elsewhere."""
        return [Forget(group_id) for group_id in list(self.results) if self._take_out(group_id)]

    def _acked(self, route: bytes, group_id: GroupId, now_s: float) -> list[Action]:
        result = self._take_out(group_id)
        if result is None:
            return []
        result.state = PendingState.ACKED
        actions: list[Action] = [
            Send(ROUTER, GroupDelivered(group_id, result.message.attempt, result.message.ticket)),
            Forget(group_id),
        ]
        others = self._of_sink(route)
        for other in others:
            other.owed_s = now_s
        for other in (lost := self._lost(result, others)):
            other.wait_s = self.settings.resend_s / 2  # the sink is there
        return actions + [self._send_again(other, now_s) for other in lost]

    def _lost(self, acked: PendingResult, others: list[PendingResult]) -> list[PendingResult]:
        """Return those of the sink's other results that are to be sent again.

        A sink acks in the order of arrival, so what was sent before was lost on the way. For a
        result that was sent more than once it is unknown which copy arrived: of those in between,
        one is sent again for each ack, so that a sink that is merely slow gets few twice.
        """
        # Later sendings come first: usually these are all.
        earlier = [each for each in others if each.sent_as < acked.sent_as]
        lost = [each for each in earlier if each.sent_as < acked.first_as]
        return lost or sorted(earlier, key=lambda result: result.sent_as)[:1]

    def _of_sink(self, route: bytes) -> list[PendingResult]:
        """Return what was sent to the sink of this route and is not acked."""
        return [
            result
            for result in self.results.values()
            if result.state is PendingState.SENT and result.sink.encode() == route
        ]

    def _refused(self, route: bytes, refused: ResultRefused) -> list[Action]:
        result = self.results.get(refused.group_id)
        if result is None or result.sink.encode() != route:
            return []
        return self._give_up(result, f"{result.sink} refused its result: {refused.reason}")

    def _overdue(self, result: PendingResult) -> list[Action]:
        waited = f"in {self.settings.delivery_timeout_s:g} s"
        return self._give_up(result, f"{result.sink} did not ack {waited}")

    def _give_up(self, result: PendingResult, reason: str) -> list[Action]:
        message = result.message
        self._take_out(message.group_id)
        lost = GroupLost(message.group_id, message.attempt, reason)
        return [Send(ROUTER, lost), Forget(message.group_id)]

    def _take_out(self, group_id: GroupId) -> PendingResult | None:
        result = self.results.pop(group_id, None)
        if result is not None:
            self.unacked_bytes -= result.num_bytes
        return result

    def _due(self, now_s: float) -> list[PendingResult]:
        """Return what was never sent to its sink and, of the rest, one for each sink, the
        oldest.
        """
        due = [result for result in self.results.values() if now_s >= result.due_s]
        fresh = [result for result in due if result.state is PendingState.HELD]
        of_sink: dict[str, list[PendingResult]] = {}
        for result in due:
            if result.state is PendingState.SENT:
                of_sink.setdefault(result.sink, []).append(result)
        return fresh + [self._probe(results, now_s) for results in of_sink.values()]

    def _probe(self, results: list[PendingResult], now_s: float) -> PendingResult:
        """Return one result of a silent sink; its others wait as long as this one."""
        probe = min(results, key=lambda result: result.sent_as)
        probe.wait_s = max(result.wait_s for result in results)
        wait_s = min(2 * probe.wait_s, self.settings.max_resend_s)
        for result in results:
            result.wait_s, result.due_s = probe.wait_s, now_s + wait_s
        return probe

    def _send_again(self, result: PendingResult, now_s: float) -> Send:
        self.num_resent += 1
        result.wait_s = min(2 * result.wait_s, self.settings.max_resend_s)
        return self._send(result, now_s)

    def _send(self, result: PendingResult, now_s: float) -> Send:
        self._num_sendings += 1
        result.sent_as = self._num_sendings
        result.first_as = result.first_as or self._num_sendings
        if result.state is PendingState.HELD:
            result.state, result.owed_s = PendingState.SENT, now_s
        result.due_s = now_s + result.wait_s
        return Send(result.sink.encode(), result.message)
