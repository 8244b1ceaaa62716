"""The ranks as their controller sees them: who is there, what they were asked, when all is lost.

    a rank   STARTING -> MET -> READY -> GONE            met: it has said hello, and waits for all
    the crew FORMING -> READY -> ENDING                  BROKEN from anywhere: a rank is gone

The invariants of calls.py hold, and:

- A rank is the route of the process that was started for it. A message of any other route changes
  nothing and is counted.
- A rank that ended, fell silent, lost a message or did not return from a call that failed at others
  breaks the crew, since collectives need all ranks. All that is open ends with RankGone, and so
  does every later request.
- Answers about tensors may be incomplete: they name the ranks that sent none.
- Every message to a rank carries the newest ended step.
- Ranks end the last first, and rank 0, in whose store the others meet, alone.

Pure; driven by hub.py.
"""

import enum
from collections.abc import Iterable, Iterator, Sequence

import msgspec

from rollmesh.core.errors import RankError, RankGone
from rollmesh.trainer.controller.calls import Answered, CallAction, CallMade, Calls, Failed, ToAll
from rollmesh.wire.frames import Buffer
from rollmesh.wire.machine import Received, Ticked
from rollmesh.wire.ranks import (
    CallEnded,
    CallStaged,
    ControllerBeat,
    EndRank,
    FormGroup,
    RankBeat,
    RankHello,
    RankLeft,
    RankMessage,
    RankReady,
    ReadTensors,
    TensorsTold,
)

NO_STEP = -1
"""Before the first."""


class CrewSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How patient a controller is."""

    start_s: float = 120.0
    """Until all ranks are ready."""
    beat_s: float = 0.5
    silence_s: float = 30.0
    """A rank that is not heard for so long is gone."""
    settle_s: float = 10.0
    """What ranks have to come out of a call at which another failed."""
    told_s: float = 10.0
    """What they have to say what they hold."""


class CrewState(enum.StrEnum):
    """FORMING -> READY -> ENDING; BROKEN from anywhere"""

    FORMING = "forming"
    READY = "ready"
    ENDING = "ending"
    BROKEN = "broken"


class RankState(enum.StrEnum):
    """STARTING -> MET -> READY -> GONE"""

    STARTING = "starting"
    MET = "met"
    READY = "ready"
    GONE = "gone"


class TensorsAsked(msgspec.Struct, frozen=True):
    """Event: all ranks free what has ended and what `shard_ids` names, and tell what is left."""

    ask_id: int
    ended_step: int
    """NO_STEP where none has ended since."""
    shard_ids: bytes = b""


class RankExited(msgspec.Struct, frozen=True):
    """Event: its process has ended."""

    rank: int
    cause: str


class EndAsked(msgspec.Struct, frozen=True):
    """Event: nothing more will be asked."""

    reason: str


class Tell(msgspec.Struct, frozen=True):
    """Action: send this to a rank."""

    route: bytes
    message: RankMessage
    body: Buffer = b""


class Formed(msgspec.Struct, frozen=True):
    """Action: all ranks are ready."""


class Told(msgspec.Struct, frozen=True):
    """Action: what was asked of tensors is known, but for the ranks in `missing`."""

    ask_id: int
    told: tuple[TensorsTold, ...]
    missing: tuple[int, ...]


class Broken(msgspec.Struct, frozen=True):
    """Action: end all ranks, at once."""

    error: RankGone


Event = Received | CallMade | TensorsAsked | RankExited | EndAsked | Ticked
Action = Tell | Formed | Answered | Failed | Told | Broken


class _Rank(msgspec.Struct):
    heard_s: float
    route: bytes
    """Of the process that was started for it; messages of other routes are not its."""
    state: RankState = RankState.STARTING
    owner: str = ""
    num_heard: int = 0
    num_told: int = 0


class _Ask(msgspec.Struct):
    until_s: float
    told: dict[int, TensorsTold] = msgspec.field(default_factory=dict)


class Crew:
    """See the module."""

    def __init__(self, routes: Sequence[bytes], settings: CrewSettings, now_s: float) -> None:
        """`routes` are those of the processes that were started, by rank."""
        num_ranks = len(routes)
        self.state = CrewState.FORMING
        self.num_foreign = 0
        """Messages of routes that are no rank's, which changed nothing."""
        self.ended_step = NO_STEP
        self._settings = settings
        self._ranks = [_Rank(now_s, route) for route in routes]
        self._calls = Calls(num_ranks, settings.settle_s)
        self._early: list[CallMade] = []
        """Made before all were ready."""
        self._asks: dict[int, _Ask] = {}
        self._error = RankError("the controller has ended")
        self._formed_by_s = now_s + settings.start_s
        self._beat_at_s = now_s

    def step(self, event: Event, now_s: float) -> list[Action]:
        """What to do about `event`; total, and deterministic."""
        match event:
            case Received(route, message, body):
                return list(self._hear(route, message, body, now_s))
            case CallMade():
                return list(self._make(event))
            case TensorsAsked():
                return list(self._ask(event, now_s))
            case RankExited(rank, cause):
                return list(self._exited(rank, cause))
            case EndAsked(reason):
                return list(self._end(reason))
            case Ticked():
                return list(self._tick(now_s))

    def owners(self) -> set[str]:
        """Where ranks serve their tensors, as far as they are known."""
        return {rank.owner for rank in self._ranks}

    def _hear(self, route: bytes, message: object, body: Buffer, now_s: float) -> Iterator[Action]:
        number = getattr(message, "rank", NO_STEP) if isinstance(message, RankMessage) else NO_STEP
        if not 0 <= number < len(self._ranks) or route != self._ranks[number].route:
            self.num_foreign += 1
            return
        rank = self._ranks[number]
        if rank.state is RankState.GONE:
            return
        rank.heard_s, rank.num_heard = now_s, rank.num_heard + 1
        match message:
            case RankHello():
                yield from self._meet(rank)
            case RankReady():
                yield from self._form(rank, message)
            case RankBeat() if message.num_said != rank.num_heard - 1:
                num_lost = message.num_said - rank.num_heard + 1
                yield from self._break(RankGone(number, f"{num_lost} of its messages were lost"))
            case RankLeft():
                yield from self._exited(number, message.reason)
            case CallStaged():
                yield from self._told_all(self._calls.staged(message, self.ended_step))
            case CallEnded():
                yield from self._told_all(self._calls.ended(message, body, now_s))
            case TensorsTold():
                yield from self._told(message)

    # lives

    def _meet(self, rank: _Rank) -> Iterator[Action]:
        rank.state = RankState.MET
        if all(each.state is RankState.MET for each in self._ranks):
            yield from self._tell_all(FormGroup(self.ended_step))

    def _form(self, rank: _Rank, ready: RankReady) -> Iterator[Action]:
        rank.state, rank.owner = RankState.READY, ready.owner
        if self.state is not CrewState.FORMING:
            return
        if all(each.state is RankState.READY for each in self._ranks):
            self.state = CrewState.READY
            yield Formed()
            early, self._early = self._early, []
            for made in early:
                yield from self._told_all(self._calls.make(made, self.ended_step))

    def _exited(self, number: int, cause: str) -> Iterator[Action]:
        self._ranks[number].state = RankState.GONE
        if self.state is CrewState.ENDING:
            yield from self._end_first()
        else:
            yield from self._break(RankGone(number, cause))

    def _end(self, reason: str) -> Iterator[Action]:
        if self.state in (CrewState.BROKEN, CrewState.ENDING):
            return
        if self.state is CrewState.FORMING:
            yield from self._break(RankGone(self._first_unready(), f"not ready yet, and {reason}"))
            return
        self.state = CrewState.ENDING
        yield from self._give_up(self._error)
        for rank in reversed(self._ranks[1:]):
            yield from self._tell(rank, EndRank(self.ended_step, reason))
        yield from self._end_first()

    def _first_unready(self) -> int:
        states = [rank.state is RankState.READY for rank in self._ranks]
        return states.index(False)

    def _end_first(self) -> Iterator[Action]:
        first, *others = self._ranks
        if all(each.state is RankState.GONE for each in others):
            yield from self._tell(first, EndRank(self.ended_step, "the others have ended"))

    def _break(self, error: RankGone) -> Iterator[Action]:
        if self.state is CrewState.BROKEN:
            return
        self.state, self._error = CrewState.BROKEN, error
        for rank in self._ranks:
            rank.state = RankState.GONE
        yield from self._give_up(error)
        yield Broken(error)

    def _give_up(self, error: RankError) -> Iterator[Action]:
        """What is open ends with this."""
        early, self._early = self._early, []
        yield from (Failed(made.call_id, error) for made in early)
        yield from self._told_all(self._calls.fail(error))
        yield from [self._sum(ask_id) for ask_id in list(self._asks)]

    # what is asked

    def _make(self, made: CallMade) -> Iterator[Action]:
        match self.state:
            case CrewState.FORMING:
                self._early.append(made)
            case CrewState.READY:
                yield from self._told_all(self._calls.make(made, self.ended_step))
            case CrewState.ENDING | CrewState.BROKEN:
                yield Failed(made.call_id, self._error)

    def _ask(self, ask: TensorsAsked, now_s: float) -> Iterator[Action]:
        self.ended_step = max(self.ended_step, ask.ended_step)
        self._asks[ask.ask_id] = _Ask(now_s + self._settings.told_s)
        if self.state is CrewState.READY:
            yield from self._tell_all(ReadTensors(self.ended_step, ask.ask_id), ask.shard_ids)
        else:
            yield self._sum(ask.ask_id)

    def _told(self, message: TensorsTold) -> Iterator[Action]:
        ask = self._asks.get(message.ask_id)
        if ask is not None:
            ask.told[message.rank] = message
            if len(ask.told) == len(self._ranks):
                yield self._sum(message.ask_id)

    def _sum(self, ask_id: int) -> Told:
        told = self._asks.pop(ask_id).told
        missing = tuple([rank for rank in range(len(self._ranks)) if rank not in told])
        return Told(ask_id, tuple([said for _, said in sorted(told.items())]), missing)

    # time

    def _tick(self, now_s: float) -> Iterator[Action]:
        if lost := self._lost(now_s):
            yield from self._break(lost)
        late = [ask_id for ask_id, ask in self._asks.items() if now_s >= ask.until_s]
        yield from [self._sum(ask_id) for ask_id in late]
        if now_s >= self._beat_at_s:
            self._beat_at_s = now_s + self._settings.beat_s
            for rank in self._ranks:
                yield from self._tell(rank, ControllerBeat(self.ended_step, rank.num_told))

    def _lost(self, now_s: float) -> RankGone | None:
        """Whom time tells to be gone."""
        for number, rank in enumerate(self._ranks):
            silent_s = now_s - rank.heard_s
            if rank.state is RankState.READY and silent_s >= self._settings.silence_s:
                return RankGone(number, f"silent for {silent_s:.0f} s")
            is_late = self.state is CrewState.FORMING and now_s >= self._formed_by_s
            if is_late and rank.state is not RankState.READY:
                return RankGone(number, f"not ready {self._settings.start_s:.0f} s after its start")
        return self._calls.stuck(now_s)

    # who is told

    def _told_all(self, actions: Iterable[CallAction]) -> Iterator[Action]:
        for action in actions:
            if isinstance(action, ToAll):
                bodies = action.bodies or (b"",) * len(self._ranks)
                for rank, body in zip(self._ranks, bodies, strict=True):
                    yield from self._tell(rank, action.message, body)
            else:
                yield action

    def _tell_all(self, message: RankMessage, body: Buffer = b"") -> Iterator[Action]:
        for rank in self._ranks:
            yield from self._tell(rank, message, body)

    def _tell(self, rank: _Rank, message: RankMessage, body: Buffer = b"") -> Iterator[Action]:
        if rank.state in (RankState.MET, RankState.READY):
            rank.num_told += 1
            yield Tell(rank.route, message, body)
