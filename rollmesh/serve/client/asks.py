"""What this client asked for and has not got yet: the truth that a router's queue only mirrors.

    OPEN --------silence, AskRefused, a new router: said again--------> OPEN
    OPEN --result at the sink, GroupFailed, CANCELLED, cancelled here--> forgotten

Invariants: an ask is kept until it ended at the sink, so whatever the network and the router lose,
it is said again; an ended ask leaves nothing behind but, for a while, its CancelGroup. All asks
are idempotent by their group id. Driven by client.py, and by the simulator.
"""

import msgspec

from rollmesh.core.ids import GroupId
from rollmesh.wire.frames import Buffer
from rollmesh.wire.machine import ROUTER, Received, Send, Ticked
from rollmesh.wire.messages import (
    AskGroup,
    AskRefused,
    CancelGroup,
    ClientBeat,
    ClientHello,
    ClientLeft,
    GroupFailed,
    GroupMoved,
    GroupState,
    RouterHello,
)


class AsksSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Who asks, and how patiently."""

    client_id: str
    sink: str
    """ZMQ address of this client's sink."""
    beat_s: float = 0.5
    """Until a RouterHello says otherwise."""
    confirm_beats: int = 4
    """An ask is said again after so many beats, unless the router spoke of it."""
    reassert_beats: int = 40
    """The same, once the router has spoken of it."""
    num_cancels: int = 3
    """How often a CancelGroup is said."""


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """Event: the program wants a group; `body` is an encoded GroupAsk."""

    group_id: GroupId
    env: str
    num_samples: int
    priority: int = 0
    body: Buffer = b""


class Cancelled(msgspec.Struct, frozen=True):
    """Event: the program no longer wants a group."""

    group_id: GroupId
    reason: str


class Arrived(msgspec.Struct, frozen=True):
    """Event: the sink has kept the group's end."""

    group_id: GroupId


class Closed(msgspec.Struct, frozen=True):
    """Event: the program leaves."""


class AskEnded(msgspec.Struct, frozen=True):
    """Action, and the sink's event: this group ends without a result, for this reason."""

    group_id: GroupId
    reason: str


Event = Asked | Cancelled | Arrived | Closed | Received | Ticked
Action = Send | AskEnded


class _Ask(msgspec.Struct):
    asked: Asked
    attempts: int = 0
    say_again_s: float = 0.0


class _Cancel(msgspec.Struct):
    reason: str
    num_left: int
    say_again_s: float


class Asks:
    """The open asks of one client."""

    def __init__(self, settings: AsksSettings) -> None:
        self.settings = settings
        self.router = ""
        """The incarnation last heard; '' before the first."""
        self.beat_s = settings.beat_s
        self.open: dict[GroupId, _Ask] = {}
        self._cancels: dict[GroupId, _Cancel] = {}
        self._awaits_hello = True
        self._next_beat_s = float("-inf")

    @property
    def num_cancels(self) -> int:
        """Cancels that are still being said."""
        return len(self._cancels)

    def step(self, event: Event, now_s: float) -> list[Action]:
        """What to do about `event`; total, and deterministic."""
        match event:
            case Asked():
                return self._asked(event, now_s)
            case Cancelled(group_id, reason):
                return self._cancelled(group_id, reason, now_s)
            case Arrived(group_id):
                self.open.pop(group_id, None)
                return []
            case Closed():
                return [Send(ROUTER, ClientLeft(self.settings.client_id))]
            case Received():
                return self._received(event, now_s)
            case Ticked():
                return self._ticked(now_s)

    def _asked(self, asked: Asked, now_s: float) -> list[Action]:
        if asked.group_id in self.open:
            return []
        ask = self.open[asked.group_id] = _Ask(asked)
        # Before the first RouterHello nobody knows us; the hello says all open asks.
        return [self._say(ask, now_s)] if self.router else []

    def _cancelled(self, group_id: GroupId, reason: str, now_s: float) -> list[Action]:
        if self.open.pop(group_id, None) is None:
            return []
        cancel = _Cancel(reason, self.settings.num_cancels, now_s)
        self._cancels[group_id] = cancel
        return [AskEnded(group_id, reason), *self._say_cancel(group_id, cancel, now_s)]

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
            case AskRefused(group_id, _, retry_after_s):
                if ask := self.open.get(group_id):
                    ask.say_again_s = now_s + max(retry_after_s, 0.0)
            case _:
                pass
        return actions

    def _introduce(self, now_s: float) -> list[Action]:
        """To a router that does not know us: who we are and all that we want.

        It answers with a RouterHello; one that comes unasked says that it has forgotten us.
        """
        self._awaits_hello = True
        actions: list[Action] = [Send(ROUTER, ClientHello(self.settings.client_id))]
        actions += [self._say(ask, now_s) for ask in self.open.values()]
        return actions

    def _moved(self, moved: GroupMoved, now_s: float) -> list[Action]:
        if moved.state in (GroupState.CANCELLED, GroupState.DONE, GroupState.FAILED):
            self._cancels.pop(moved.group_id, None)
        ask = self.open.get(moved.group_id)
        if ask is None:
            return []
        ask.attempts = max(ask.attempts, moved.attempt)
        if moved.state is GroupState.CANCELLED:
            return self._end(moved.group_id, "cancelled by the router")
        if moved.state in (GroupState.DONE, GroupState.FAILED):
            # DONE follows our own ack and FAILED comes with its reason: an ask that is still open
            # crossed one of them, or nobody holds its result. Saying it again settles either.
            ask.say_again_s = now_s + self.settings.confirm_beats * self.beat_s
            return []
        ask.say_again_s = now_s + self.settings.reassert_beats * self.beat_s
        return []

    def _end(self, group_id: GroupId, reason: str) -> list[Action]:
        return [AskEnded(group_id, reason)] if self.open.pop(group_id, None) else []

    def _ticked(self, now_s: float) -> list[Action]:
        actions: list[Action] = []
        if now_s >= self._next_beat_s:
            self._next_beat_s = now_s + self.beat_s
            client_id = self.settings.client_id
            known = bool(self.router)
            beat = ClientBeat(client_id, len(self.open)) if known else ClientHello(client_id)
            actions.append(Send(ROUTER, beat))
        if self.router:
            actions += [self._say(a, now_s) for a in self.open.values() if now_s >= a.say_again_s]
            for group_id, cancel in list(self._cancels.items()):
                if now_s >= cancel.say_again_s:
                    actions += self._say_cancel(group_id, cancel, now_s)
        return actions

    def _say(self, ask: _Ask, now_s: float) -> Send:
        ask.say_again_s = now_s + self.settings.confirm_beats * self.beat_s
        asked = ask.asked
        message = AskGroup(
            group_id=asked.group_id,
            client_id=self.settings.client_id,
            env=asked.env,
            num_samples=asked.num_samples,
            sink=self.settings.sink,
            attempts=ask.attempts,
            priority=asked.priority,
        )
        return Send(ROUTER, message, asked.body)

    def _say_cancel(self, group_id: GroupId, cancel: _Cancel, now_s: float) -> list[Action]:
        cancel.num_left -= 1
        cancel.say_again_s = now_s + self.settings.confirm_beats * self.beat_s
        if cancel.num_left <= 0:
            del self._cancels[group_id]
        return [Send(ROUTER, CancelGroup(group_id, cancel.reason))]
