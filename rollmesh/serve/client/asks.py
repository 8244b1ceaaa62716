"""The machine of open asks: groups that were requested and have not ended.

    OPEN --------silence, AskRefused, a new router: sent again--------> OPEN
    OPEN --result at the sink, GroupFailed, CANCELLED, cancelled here,
           its deadline, refused for longer than its patience--------> removed

- An ask is kept until it ended at the sink, and sent again, whatever the network and the router
  lose. Requests are idempotent by their group id.
- An ended ask leaves nothing but, for a while, its CancelGroup.
- A turn in which nothing is due costs the same for any number of open asks.
"""

import math

import msgspec

from rollmesh.core.ids import GroupId, new_ticket
from rollmesh.serve.client.journal_entries import Again, GroupTried
from rollmesh.wire.frames import Buffer
from rollmesh.wire.machine import ROUTER, Received, Send, Ticked
from rollmesh.wire.messages import (
    AskGroup,
    AskRefused,
    AttemptFailed,
    CancelGroup,
    ClientBeat,
    ClientHello,
    ClientLeft,
    GroupFailed,
    GroupMoved,
    GroupState,
    RouterHello,
)


class AskSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Identity, address and retry intervals of the client."""

    client_id: str
    sink: str
    """ZMQ address of this client's sink."""
    beat_s: float = 0.5
    """Heartbeat interval, until a RouterHello sets another."""
    confirm_beats: int = 4
    """A request is repeated after this many heartbeats without a message about it."""
    reassert_beats: int = 40
    """The same, once the router has sent a message about it."""
    num_cancels: int = 3
    """How often a CancelGroup is sent."""
    weight: int = 1
    """This client's share of turns against the others'."""
    keep: bool = False
    """Whether its groups continue while it is away."""


PATIENCE_S = 600.0
LONGEST_WAIT_S = 15.0
"""Longest time between two repetitions of a refused request."""
MOMENT_S = 0.001
"""A deadline that has passed is sent as this, since 0 is no deadline."""


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """Event: the program wants a group; `body` is an encoded GroupAsk."""

    group_id: GroupId
    env: str
    num_samples: int
    priority: int = 0
    deadline_s: float = 0.0
    """Seconds after which it ends without a result; 0 is no limit."""
    patience_s: float = PATIENCE_S
    """Seconds for which a request is repeated when the queue is full; at 0 the first refusal ends
    it.
    """
    attempts: int = 0
    """Attempts that may have begun, if an earlier process asked."""
    excused: int = 0
    """Attempts of these that do not count."""
    asked_step: int = 0
    num_drawn: int = 0
    is_eval: bool = False
    again: Again | None = None
    """The fields of GroupAsked in journal_entries.py; not sent to the router."""
    body: Buffer = b""
    ticket: bytes = msgspec.field(default_factory=new_ticket)
    """Secret of the group: a result without it is refused."""


class Cancelled(msgspec.Struct, frozen=True):
    """Event: the program no longer wants a group."""

    group_id: GroupId
    reason: str


class Arrived(msgspec.Struct, frozen=True):
    """Event: the sink has kept the end of the group."""

    group_id: GroupId


class ResultFailed(msgspec.Struct, frozen=True):
    """Event: the sink refused an attempt's result because it did not fit the request."""

    group_id: GroupId
    attempt: int
    worker_id: str
    reason: str


class Closed(msgspec.Struct, frozen=True):
    """Event: the program leaves."""

    for_good: bool = False
    """No later client continues what it keeps."""


class AskEnded(msgspec.Struct, frozen=True):
    """Action, and the sink's event: this group ends without a result, for this reason."""

    group_id: GroupId
    reason: str
    """Begins with a code; see wire/messages.py."""
    retry_after_s: float = 0.0
    """For `overloaded`: seconds until a new request is useful."""


class Waits(msgspec.Struct, frozen=True):
    """Action: report to the program why its groups have waited for long."""

    reason: str


Event = Asked | Cancelled | Arrived | ResultFailed | Closed | Received | Ticked
Action = Send | AskEnded | Waits | GroupTried
"""GroupTried is to be journaled: how many attempts of a kept group have begun."""


class _Ask(msgspec.Struct):
    asked: Asked
    attempts: int
    ends_s: float
    excused: int = 0
    """Attempts of `attempts` that do not count."""
    repeat_s: float = 0.0
    refused_since_s: float = math.inf
    num_refusals: int = 0

    @property
    def due_s(self) -> float:
        return min(self.ends_s, self.repeat_s)


class _Cancel(msgspec.Struct):
    reason: str
    ticket: bytes
    num_left: int
    repeat_s: float


class AskMachine:
    """The open requests of one client."""

    def __init__(self, settings: AskSettings) -> None:
        self.settings = settings
        self.router = ""
        """Router incarnation of the last message; '' before the first."""
        self.beat_s = settings.beat_s
        self.open: dict[GroupId, _Ask] = {}
        self._cancels: dict[GroupId, _Cancel] = {}
        self._awaits_hello = True
        self._next_beat_s = -math.inf
        self._next_due_s = math.inf
        """No request and no cancel is due earlier."""
        self._refused_ids: dict[GroupId, None] = {}
        """Requests that wait after a refusal, longest waiting first."""

    @property
    def num_cancels(self) -> int:
        """Number of cancels that are still being repeated."""
        return len(self._cancels)

    def find(self, group_id: GroupId) -> Asked | None:
        """Return the open ask of this group, if there is one."""
        ask = self.open.get(group_id)
        return ask.asked if ask else None

    def step(self, event: Event, now_s: float) -> list[Action]:
        """Return the actions for `event`; total and deterministic."""
        match event:
            case Asked():
                return self._asked(event, now_s)
            case Cancelled(group_id, reason):
                return self._cancelled(group_id, reason, now_s)
            case Arrived(group_id):
                self._forget(group_id)
                return self._fill_place(now_s)
            case ResultFailed(group_id, attempt, worker_id, reason):
                failed = AttemptFailed(group_id, attempt, worker_id, reason)
                return [Send(ROUTER, failed)] if group_id in self.open else []
            case Closed(for_good):
                left = ClientLeft(self.settings.client_id)
                return [Send(ROUTER, left)] if for_good or not self.settings.keep else []
            case Received():
                return self._received(event, now_s)
            case Ticked():
                return self._ticked(now_s)

    def _asked(self, asked: Asked, now_s: float) -> list[Action]:
        if asked.group_id in self.open:
            return []
        ends_s = now_s + asked.deadline_s if asked.deadline_s > 0 else math.inf
        ask = self.open[asked.group_id] = _Ask(asked, asked.attempts, ends_s, asked.excused)
        self._note_due(ends_s)
        # Before the first RouterHello no router knows this client; the hello sends all open
        # requests.
        return [self._send(ask, now_s)] if self.router else []

    def _cancelled(self, group_id: GroupId, reason: str, now_s: float) -> list[Action]:
        ask = self._forget(group_id)
        if ask is None:
            return []
        if not self.router and not ask.attempts:
            return [AskEnded(group_id, reason)]  # it was never sent
        cancel = _Cancel(reason, ask.asked.ticket, self.settings.num_cancels, now_s)
        self._cancels[group_id] = cancel
        return [AskEnded(group_id, reason), *self._send_cancel(group_id, cancel, now_s)]

    def _received(self, event: Received, now_s: float) -> list[Action]:
        actions: list[Action] = []
        is_new = bool(event.router) and event.router != self.router
        if is_new:
            self.router = event.router
            actions += self._introduce(now_s)
        match event.message:
            case RouterHello(beat_s):
                self.beat_s = beat_s
                if not self._awaits_hello:
                    actions += self._introduce(now_s)
                elif not is_new:
                    self._awaits_hello = False
            case GroupMoved():
                actions += self._moved(event.message, now_s)
            case GroupFailed(group_id, reason):
                actions += self._end(group_id, reason)
            case AskRefused():
                actions += self._refused(event.message, now_s)
            case _:
                pass
        return actions

    def _introduce(self, now_s: float) -> list[Action]:
        """Introduce this client and all its open requests to a router that does not know it.

        The router answers with a RouterHello; one that it sends unasked means that it has lost its
        state.
        """
        self._awaits_hello = True
        self._note_due(now_s)
        actions: list[Action] = [Send(ROUTER, self._hello())]
        actions += [self._send(ask, now_s) for ask in self.open.values()]
        return actions

    def _moved(self, moved: GroupMoved, now_s: float) -> list[Action]:
        if moved.state in (GroupState.CANCELLED, GroupState.DONE, GroupState.FAILED):
            self._cancels.pop(moved.group_id, None)
        ask = self.open.get(moved.group_id)
        if ask is None:
            return []
        actions = self._count_tries(ask, moved)
        ask.refused_since_s, ask.num_refusals = math.inf, 0
        if moved.state is GroupState.CANCELLED:
            return [*actions, *self._end(moved.group_id, "cancelled: by the router")]
        # DONE follows our own ack and FAILED comes with its reason: a request that is still open
        # crossed one of them, or its result is lost. Repeating it soon settles either.
        has_ended = moved.state in (GroupState.DONE, GroupState.FAILED)
        beats = self.settings.confirm_beats if has_ended else self.settings.reassert_beats
        self._repeat_at(ask, now_s + beats * self.beat_s)
        return [*actions, Waits(moved.reason)] if moved.reason else actions

    def _count_tries(self, ask: _Ask, moved: GroupMoved) -> list[Action]:
        known = ask.attempts, ask.excused
        ask.attempts = max(ask.attempts, moved.attempt)
        ask.excused = max(ask.excused, moved.excused)
        has_changed = known != (ask.attempts, ask.excused)
        # A later request implies the first attempt anyway.
        if not self.settings.keep or not has_changed or (ask.attempts, ask.excused) <= (1, 0):
            return []
        return [GroupTried(moved.group_id, ask.attempts, ask.excused)]

    def _refused(self, refused: AskRefused, now_s: float) -> list[Action]:
        """The queue is full: repeat the request, later each time, while it has patience."""
        ask = self.open.get(refused.group_id)
        if ask is None:
            return []
        ask.refused_since_s = min(ask.refused_since_s, now_s)
        least_s = max(refused.retry_after_s, 0.0)
        wait_s = max(least_s, min(least_s * 2.0**ask.num_refusals, LONGEST_WAIT_S))
        if now_s + wait_s > ask.refused_since_s + ask.asked.patience_s:
            return self._end(refused.group_id, refused.reason, least_s)
        ask.num_refusals += 1
        self._refused_ids[refused.group_id] = None
        self._repeat_at(ask, now_s + wait_s)
        return []

    def _fill_place(self, now_s: float) -> list[Action]:
        """Repeat the longest refused request: a group of this client has ended, so there is
        room.
        """
        first = next(iter(self._refused_ids), None)
        return [self._send(self.open[first], now_s)] if first and self.router else []

    def _forget(self, group_id: GroupId) -> _Ask | None:
        self._refused_ids.pop(group_id, None)
        return self.open.pop(group_id, None)

    def _end(self, group_id: GroupId, reason: str, retry_after_s: float = 0.0) -> list[Action]:
        if self._forget(group_id) is None:
            return []
        return [AskEnded(group_id, reason, retry_after_s)]

    def _ticked(self, now_s: float) -> list[Action]:
        actions: list[Action] = []
        if now_s >= self._next_beat_s:
            self._next_beat_s = now_s + self.beat_s
            beat = ClientBeat(self.settings.client_id, len(self.open))
            actions.append(Send(ROUTER, beat if self.router else self._hello()))
        if now_s >= self._next_due_s:
            actions += self._look_at_all(now_s)
        return actions

    def _look_at_all(self, now_s: float) -> list[Action]:
        """Send what is due, end what is late, and compute when to look again."""
        actions: list[Action] = []
        self._next_due_s = math.inf
        for group_id, ask in list(self.open.items()):
            if now_s >= ask.ends_s:
                late = f"deadline: no result within {round(ask.asked.deadline_s, 3):g} s"
                actions += self._cancelled(group_id, late, now_s)
            elif now_s >= ask.repeat_s and self.router:
                actions.append(self._send(ask, now_s))
            else:
                self._note_due(ask.due_s if self.router else ask.ends_s)
        for group_id, cancel in list(self._cancels.items()):
            if not self.router:
                continue
            if now_s >= cancel.repeat_s:
                actions += self._send_cancel(group_id, cancel, now_s)
            else:
                self._note_due(cancel.repeat_s)
        return actions

    def _note_due(self, at_s: float) -> None:
        self._next_due_s = min(self._next_due_s, at_s)

    def _repeat_at(self, ask: _Ask, at_s: float) -> None:
        ask.repeat_s = at_s
        self._note_due(ask.due_s)

    def _hello(self) -> ClientHello:
        settings = self.settings
        return ClientHello(settings.client_id, settings.weight, settings.keep)

    def _send(self, ask: _Ask, now_s: float) -> Send:
        self._repeat_at(ask, now_s + self.settings.confirm_beats * self.beat_s)
        asked = ask.asked
        self._refused_ids.pop(asked.group_id, None)
        message = AskGroup(
            group_id=asked.group_id,
            client_id=self.settings.client_id,
            env=asked.env,
            num_samples=asked.num_samples,
            sink=self.settings.sink,
            attempts=ask.attempts,
            priority=asked.priority,
            deadline_s=max(ask.ends_s - now_s, MOMENT_S) if ask.ends_s < math.inf else 0.0,
            excused=ask.excused,
            ticket=asked.ticket,
        )
        return Send(ROUTER, message, asked.body)

    def _send_cancel(self, group_id: GroupId, cancel: _Cancel, now_s: float) -> list[Action]:
        cancel.num_left -= 1
        cancel.repeat_s = now_s + self.settings.confirm_beats * self.beat_s
        self._note_due(cancel.repeat_s)
        if cancel.num_left <= 0:
            del self._cancels[group_id]
        return [Send(ROUTER, CancelGroup(group_id, cancel.reason, cancel.ticket))]
