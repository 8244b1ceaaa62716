"""Calls on their way through all ranks.

    STAGING -> RUNNING -> ended      staging: ranks fetch the arguments, and run nothing
    STAGING -> ended                 some rank cannot have them, so none runs it

Invariants: no rank begins a call before all have its arguments, so a fetch that fails never leaves
the others alone in a collective; calls run in the order in which they were made, at every rank; a
call ends once, with an answer of each rank or with an error that names one. Pure; driven by
crew.py.

The ranks as their controller sees them: who is there, what they were asked, when all is lost.

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

from rollmesh.core.errors import CallFailed, RankError, RankGone
from rollmesh.wire.frames import Buffer
from rollmesh.wire.machine import Received, Ticked
from rollmesh.wire.ranks import (
    CallEnded,
    CallStaged,
    ControllerBeat,
    DropCall,
    EndRank,
    FormGroup,
    RankBeat,
    RankHello,
    RankLeft,
    RankMessage,
    RankReady,
    ReadTensors,
    RunCall,
    StageCall,
    TensorsTold,
)


class RankCallState(enum.StrEnum):
    """STAGING -> RUNNING, and then it is forgotten"""

    STAGING = "staging"
    RUNNING = "running"


class CallRequested(msgspec.Struct, frozen=True):
    """Event: call this method at all ranks."""

    call_id: int
    role: str
    method: str
    step: int
    """The train step that tags the answers, or -1."""
    bodies: tuple[bytes, ...]
    """The arguments for each rank; empty for who follows a head."""


class SendToAll(msgspec.Struct, frozen=True):
    """Action: tell all ranks."""

    message: RankMessage
    bodies: tuple[Buffer, ...] = ()
    """One for each, where they have any."""


class CallAnswered(msgspec.Struct, frozen=True):
    """Action: the call has been run at all ranks; `bodies` are their answers."""

    call_id: int
    bodies: tuple[Buffer, ...]


class CallRaised(msgspec.Struct, frozen=True):
    """Action: the call has no answer."""

    call_id: int
    error: RankError


CallAction = SendToAll | CallAnswered | CallRaised


class _OpenCall(msgspec.Struct):
    made: CallRequested
    state: RankCallState = RankCallState.STAGING
    staged: set[int] = msgspec.field(default_factory=set)
    answers: dict[int, Buffer] = msgspec.field(default_factory=dict)
    errors: dict[int, str] = msgspec.field(default_factory=dict)
    settled_by_s: float | None = None
    """When the others must have come out of it."""

    @property
    def name(self) -> str:
        return f"{self.made.role}.{self.made.method}"


class RankCalls:
    """All that are open."""

    def __init__(self, num_ranks: int, settle_s: float) -> None:
        self._num_ranks = num_ranks
        self._settle_s = settle_s
        self._calls: dict[int, _OpenCall] = {}
        """As they were made."""

    def make(self, made: CallRequested, ended_step: int) -> Iterator[CallAction]:
        """A new one."""
        self._calls[made.call_id] = _OpenCall(made)
        message = StageCall(ended_step, made.call_id, made.role, made.method, made.step)
        yield SendToAll(message, made.bodies)

    def staged(self, message: CallStaged, ended_step: int) -> Iterator[CallAction]:
        """A rank has the arguments, or cannot have them."""
        call = self._calls.get(message.call_id)
        if call is None or call.state is not RankCallState.STAGING:
            return
        call.staged.add(message.rank)
        if message.error:
            call.errors[message.rank] = message.error
        if len(call.staged) == self._num_ranks and call.errors:
            yield SendToAll(DropCall(ended_step, message.call_id))
            yield self._failed(call)
        yield from self._release(ended_step)

    def ended(self, message: CallEnded, body: Buffer, now_s: float) -> Iterator[CallAction]:
        """A rank has run it."""
        call = self._calls.get(message.call_id)
        if call is None or call.state is not RankCallState.RUNNING:
            return
        call.answers[message.rank] = body
        if message.error:
            call.errors[message.rank] = message.error
            if call.settled_by_s is None:
                call.settled_by_s = now_s + self._settle_s
        if len(call.answers) < self._num_ranks:
            return
        if call.errors:
            yield self._failed(call)
        else:
            del self._calls[message.call_id]
            bodies = tuple([call.answers[rank] for rank in range(self._num_ranks)])
            yield CallAnswered(message.call_id, bodies)

    def stuck(self, now_s: float) -> RankGone | None:
        """A rank that did not come out of a call at which another had failed."""
        for call in self._calls.values():
            if call.settled_by_s is not None and now_s >= call.settled_by_s:
                inside = min(set(range(self._num_ranks)) - call.answers.keys())
                rank, error = min(call.errors.items())
                why = f"it did not come out of {call.name}, at which rank {rank} failed: {error}"
                return RankGone(inside, why)
        return None

    def fail(self, error: RankError) -> Iterator[CallAction]:
        """Nothing comes of those that are open."""
        calls, self._calls = self._calls, {}
        for call_id in calls:
            yield CallRaised(call_id, error)

    def _release(self, ended_step: int) -> Iterator[CallAction]:
        """Run what can be run: who is not staged holds up who came later."""
        for call_id, call in self._calls.items():
            if len(call.staged) < self._num_ranks:
                return
            if call.state is RankCallState.STAGING:
                call.state = RankCallState.RUNNING
                yield SendToAll(RunCall(ended_step, call_id))

    def _failed(self, call: _OpenCall) -> CallRaised:
        del self._calls[call.made.call_id]
        rank, error = min(call.errors.items())
        return CallRaised(call.made.call_id, CallFailed(call.name, rank, error))


NO_STEP = -1
"""Before the first."""


class RankGroupSettings(msgspec.Struct, frozen=True, kw_only=True):
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


class RankGroupState(enum.StrEnum):
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


class TensorsQueried(msgspec.Struct, frozen=True):
    """Event: all ranks free what has ended and what `shard_ids` names, and tell what is left."""

    ask_id: int
    ended_step: int
    """NO_STEP where none has ended since."""
    shard_ids: bytes = b""


class RankExited(msgspec.Struct, frozen=True):
    """Event: its process has ended."""

    rank: int
    cause: str


class EndRequested(msgspec.Struct, frozen=True):
    """Event: nothing more will be asked."""

    reason: str


class SendToRank(msgspec.Struct, frozen=True):
    """Action: send this to a rank."""

    route: bytes
    message: RankMessage
    body: Buffer = b""


class RanksFormed(msgspec.Struct, frozen=True):
    """Action: all ranks are ready."""


class TensorReport(msgspec.Struct, frozen=True):
    """Action: what was asked of tensors is known, but for the ranks in `missing`."""

    ask_id: int
    told: tuple[TensorsTold, ...]
    missing: tuple[int, ...]


class RanksLost(msgspec.Struct, frozen=True):
    """Action: end all ranks, at once."""

    error: RankGone


Event = Received | CallRequested | TensorsQueried | RankExited | EndRequested | Ticked
Action = SendToRank | RanksFormed | CallAnswered | CallRaised | TensorReport | RanksLost


class _Rank(msgspec.Struct):
    heard_s: float
    route: bytes
    """Of the process that was started for it; messages of other routes are not its."""
    state: RankState = RankState.STARTING
    owner: str = ""
    num_heard: int = 0
    num_told: int = 0


class _TensorQuery(msgspec.Struct):
    until_s: float
    told: dict[int, TensorsTold] = msgspec.field(default_factory=dict)


class RankGroup:
    """See the module."""

    def __init__(self, routes: Sequence[bytes], settings: RankGroupSettings, now_s: float) -> None:
        """`routes` are those of the processes that were started, by rank."""
        num_ranks = len(routes)
        self.state = RankGroupState.FORMING
        self.num_foreign = 0
        """Messages of routes that are no rank's, which changed nothing."""
        self.ended_step = NO_STEP
        self._settings = settings
        self._ranks = [_Rank(now_s, route) for route in routes]
        self._calls = RankCalls(num_ranks, settings.settle_s)
        self._early: list[CallRequested] = []
        """Made before all were ready."""
        self._asks: dict[int, _TensorQuery] = {}
        self._error = RankError("the controller has ended")
        self._formed_by_s = now_s + settings.start_s
        self._beat_at_s = now_s

    def step(self, event: Event, now_s: float) -> list[Action]:
        """What to do about `event`; total, and deterministic."""
        match event:
            case Received(route, message, body):
                return list(self._hear(route, message, body, now_s))
            case CallRequested():
                return list(self._make(event))
            case TensorsQueried():
                return list(self._ask(event, now_s))
            case RankExited(rank, cause):
                return list(self._exited(rank, cause))
            case EndRequested(reason):
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
        if self.state is not RankGroupState.FORMING:
            return
        if all(each.state is RankState.READY for each in self._ranks):
            self.state = RankGroupState.READY
            yield RanksFormed()
            early, self._early = self._early, []
            for made in early:
                yield from self._told_all(self._calls.make(made, self.ended_step))

    def _exited(self, number: int, cause: str) -> Iterator[Action]:
        self._ranks[number].state = RankState.GONE
        if self.state is RankGroupState.ENDING:
            yield from self._end_first()
        else:
            yield from self._break(RankGone(number, cause))

    def _end(self, reason: str) -> Iterator[Action]:
        if self.state in (RankGroupState.BROKEN, RankGroupState.ENDING):
            return
        if self.state is RankGroupState.FORMING:
            yield from self._break(RankGone(self._first_unready(), f"not ready yet, and {reason}"))
            return
        self.state = RankGroupState.ENDING
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
        if self.state is RankGroupState.BROKEN:
            return
        self.state, self._error = RankGroupState.BROKEN, error
        for rank in self._ranks:
            rank.state = RankState.GONE
        yield from self._give_up(error)
        yield RanksLost(error)

    def _give_up(self, error: RankError) -> Iterator[Action]:
        """What is open ends with this."""
        early, self._early = self._early, []
        yield from (CallRaised(made.call_id, error) for made in early)
        yield from self._told_all(self._calls.fail(error))
        yield from [self._sum(ask_id) for ask_id in list(self._asks)]

    # what is asked

    def _make(self, made: CallRequested) -> Iterator[Action]:
        match self.state:
            case RankGroupState.FORMING:
                self._early.append(made)
            case RankGroupState.READY:
                yield from self._told_all(self._calls.make(made, self.ended_step))
            case RankGroupState.ENDING | RankGroupState.BROKEN:
                yield CallRaised(made.call_id, self._error)

    def _ask(self, ask: TensorsQueried, now_s: float) -> Iterator[Action]:
        self.ended_step = max(self.ended_step, ask.ended_step)
        self._asks[ask.ask_id] = _TensorQuery(now_s + self._settings.told_s)
        if self.state is RankGroupState.READY:
            yield from self._tell_all(ReadTensors(self.ended_step, ask.ask_id), ask.shard_ids)
        else:
            yield self._sum(ask.ask_id)

    def _told(self, message: TensorsTold) -> Iterator[Action]:
        ask = self._asks.get(message.ask_id)
        if ask is not None:
            ask.told[message.rank] = message
            if len(ask.told) == len(self._ranks):
                yield self._sum(message.ask_id)

    def _sum(self, ask_id: int) -> TensorReport:
        told = self._asks.pop(ask_id).told
        missing = tuple([rank for rank in range(len(self._ranks)) if rank not in told])
        return TensorReport(ask_id, tuple([said for _, said in sorted(told.items())]), missing)

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
            is_late = self.state is RankGroupState.FORMING and now_s >= self._formed_by_s
            if is_late and rank.state is not RankState.READY:
                return RankGone(number, f"not ready {self._settings.start_s:.0f} s after its start")
        return self._calls.stuck(now_s)

    # who is told

    def _told_all(self, actions: Iterable[CallAction]) -> Iterator[Action]:
        for action in actions:
            if isinstance(action, SendToAll):
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
            yield SendToRank(rank.route, message, body)
