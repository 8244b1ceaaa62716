"""The ranks of a controller, and the calls that run on them, as a state machine.

    a rank       STARTING -> MET -> READY -> GONE        met: it has connected, and waits for all
    the group    FORMING -> READY -> ENDING              BROKEN from anywhere: a rank is lost
    a call       STAGING -> RUNNING -> ended             staging: ranks fetch its arguments
                 STAGING -> ended                        a rank cannot fetch them: no rank runs it

- No rank begins a call before all have its arguments, so a failed fetch leaves no rank alone in a
  collective. Calls run in one order at all ranks, and end once: with all answers, or an error.
- A rank that ends, is silent, loses a message, or does not return from a call that failed elsewhere
  breaks the group, since collectives need all ranks. Everything open then ends with RankGone.
- A rank is identified by the route of its process; messages of other routes are counted only. The
  route of a rank that was started elsewhere is that of its first hello with the right plan.
- Every message carries the newest ended step. Rank 0, whose store the others use, ends last.
"""

import enum
from collections.abc import Iterable, Iterator, Sequence

import msgspec

from rollmesh.core.config import TrainerConfig
from rollmesh.core.errors import CallFailed, RankError, RankGone
from rollmesh.wire.frames import Buffer
from rollmesh.wire.machine import Received, Ticked
from rollmesh.wire.ranks import (
    LATE,
    AbortRank,
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
    TensorsReported,
)


class RankCallState(enum.StrEnum):
    """STAGING -> RUNNING, then forgotten"""

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
    """The arguments for each rank; empty for ranks that are not heads."""


class SendToAll(msgspec.Struct, frozen=True):
    """Action: send to all ranks."""

    message: RankMessage
    bodies: tuple[Buffer, ...] = ()
    """One for each rank, or none."""


class CallAnswered(msgspec.Struct, frozen=True):
    """Action: the call has run at all ranks; `bodies` are their answers."""

    call_id: int
    bodies: tuple[Buffer, ...]


class CallRaised(msgspec.Struct, frozen=True):
    """Action: the call failed."""

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
    """When the other ranks must have returned from it."""

    @property
    def name(self) -> str:
        return f"{self.made.role}.{self.made.method}"


class RankCalls:
    """The open calls."""

    def __init__(self, num_ranks: int, settle_s: float) -> None:
        self._num_ranks = num_ranks
        self._settle_s = settle_s
        self._calls: dict[int, _OpenCall] = {}
        """In the order in which they were made."""

    def make(self, made: CallRequested, ended_step: int) -> Iterator[CallAction]:
        """Begin a call."""
        self._calls[made.call_id] = _OpenCall(made)
        message = StageCall(ended_step, made.call_id, made.role, made.method, made.step)
        yield SendToAll(message, made.bodies)

    def staged(self, message: CallStaged, ended_step: int) -> Iterator[CallAction]:
        """Handle that a rank has the arguments, or failed to fetch them."""
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
        """Handle that a rank has run a call."""
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

    def stuck(self, now_s: float, received_s: Sequence[float] = ()) -> tuple[int, str] | None:
        """Return a rank that did not return from a call that failed at another rank, and why.

        `received_s` has the time of each rank's newest message: of several, the rank that is silent
        longest is the cause, and others wait for it in a collective.
        """
        for call in self._calls.values():
            if call.settled_by_s is not None and now_s >= call.settled_by_s:
                inside = sorted(set(range(self._num_ranks)) - call.answers.keys())
                if received_s:
                    inside.sort(key=lambda each: received_s[each])
                rank, error = min(call.errors.items())
                why = f"it did not return from {call.name}, which failed at rank {rank}: {error}"
                return inside[0], why
        return None

    def fail(self, error: RankError) -> Iterator[CallAction]:
        """Fail all open calls."""
        calls, self._calls = self._calls, {}
        for call_id in calls:
            yield CallRaised(call_id, error)

    def _release(self, ended_step: int) -> Iterator[CallAction]:
        """Run staged calls in order; one that is not staged blocks later ones."""
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
"""Before the first step has ended."""


_TRAINER = TrainerConfig()


class RankGroupSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Timeouts of a controller."""

    start_s: float = _TRAINER.rank_start_timeout_s
    """Time until all ranks are ready."""
    exit_s: float = _TRAINER.rank_exit_timeout_s
    """Time for ranks to end by themselves."""
    beat_s: float = 0.5
    silence_s: float = 30.0
    """A rank that is silent for this time is lost."""
    settle_s: float = 10.0
    """Time for ranks to return from a call that failed at another rank."""
    report_timeout_s: float = 10.0
    """Time for ranks to report what they hold."""


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
    """Event: have all ranks free ended steps and `shard_ids`, and report what is left."""

    ask_id: int
    ended_step: int
    """NO_STEP: no step has ended since."""
    shard_ids: bytes = b""


class RankExited(msgspec.Struct, frozen=True):
    """Event: the process of a rank has ended."""

    rank: int
    cause: str


class EndRequested(msgspec.Struct, frozen=True):
    """Event: end the ranks; there are no more requests."""

    reason: str


class SendToRank(msgspec.Struct, frozen=True):
    """Action: send to one rank."""

    route: bytes
    message: RankMessage
    body: Buffer = b""


class RanksFormed(msgspec.Struct, frozen=True):
    """Action: all ranks are ready."""


class TensorReport(msgspec.Struct, frozen=True):
    """Action: the result of a query of tensors; ranks in `missing` sent no report."""

    ask_id: int
    reports: tuple[TensorsReported, ...]
    missing: tuple[int, ...]


class RanksLost(msgspec.Struct, frozen=True):
    """Action: kill all ranks."""

    error: RankGone


class RankJoined(msgspec.Struct, frozen=True):
    """Action: log that a rank that was started elsewhere has joined, or why it may not."""

    rank: int
    host: str
    refusal: str = ""


Event = Received | CallRequested | TensorsQueried | RankExited | EndRequested | Ticked
Action = (
    SendToRank | RanksFormed | CallAnswered | CallRaised | TensorReport | RanksLost | RankJoined
)


class _Rank(msgspec.Struct):
    received_s: float
    route: bytes
    """Route of the process that was started for this rank; b'' before it has joined."""
    is_external: bool
    """Whether it was started elsewhere, and so joins by its hello."""
    host: str = ""
    state: RankState = RankState.STARTING
    owner: str = ""
    num_received: int = 0
    num_sent: int = 0


class _TensorQuery(msgspec.Struct):
    until_s: float
    reports: dict[int, TensorsReported] = msgspec.field(default_factory=dict)


REPLACE_BEATS = 8
"""A rank that waits for others and is silent for this many beats may be replaced."""


class RankGroup:
    """The state machine; hub.py is its shell."""

    def __init__(
        self,
        routes: Sequence[bytes],
        settings: RankGroupSettings,
        now_s: float,
        plan: str = "",
        device: str = "",
    ) -> None:
        """`routes` are those of the started processes, by rank; b'' for one that is started
        elsewhere, whose hello must have this plan and type of device."""
        num_ranks = len(routes)
        self.state = RankGroupState.FORMING
        self.num_foreign = 0
        """Messages of routes that belong to no rank."""
        self.ended_step = NO_STEP
        self._settings = settings
        self._plan = plan
        self._device = device
        self._store = ""
        self._is_met = False
        """Whether all ranks have been asked to form the group."""
        self._ranks = [_Rank(now_s, route, not route) for route in routes]
        self._has_external = not all(routes)
        self._calls = RankCalls(num_ranks, settings.settle_s)
        self._early: list[CallRequested] = []
        """Calls that were made before all ranks were ready."""
        self._queries: dict[int, _TensorQuery] = {}
        self._error = RankError("the controller has ended")
        self._formed_by_s = now_s + settings.start_s
        self._beat_at_s = now_s

    def step(self, event: Event, now_s: float) -> list[Action]:
        """Return what to do about `event`; deterministic."""
        match event:
            case Received(route, message, body):
                return list(self._receive(route, message, body, now_s))
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
        """Addresses at which ranks serve their tensors, as far as known."""
        return {rank.owner for rank in self._ranks}

    def missing(self) -> list[int]:
        """Ranks that have not joined."""
        return [at for at, rank in enumerate(self._ranks) if rank.state is RankState.STARTING]

    def _receive(
        self, route: bytes, message: object, body: Buffer, now_s: float
    ) -> Iterator[Action]:
        number = getattr(message, "rank", NO_STEP) if isinstance(message, RankMessage) else NO_STEP
        if not 0 <= number < len(self._ranks):
            self.num_foreign += 1
            return
        rank = self._ranks[number]
        if isinstance(message, RankHello) and rank.is_external and route != rank.route:
            yield from self._admit(rank, route, message, now_s)
        if route != rank.route:
            self.num_foreign += 1
        elif rank.state is not RankState.GONE:
            rank.received_s, rank.num_received = now_s, rank.num_received + 1
            yield from self._handle(number, message, body, now_s)

    def _handle(self, number: int, message: object, body: Buffer, now_s: float) -> Iterator[Action]:
        rank = self._ranks[number]
        match message:
            case RankHello():
                rank.host, self._store = message.host, message.store or self._store
                yield from self._meet(rank)
            case RankReady():
                yield from self._form(rank, message)
            case RankBeat() if message.num_sent != rank.num_received - 1:
                num_lost = message.num_sent - rank.num_received + 1
                yield from self._break(self._gone(number, f"{num_lost} of its messages were lost"))
            case RankLeft():
                yield from self._exited(number, message.reason)
            case CallStaged():
                yield from self._send_actions(self._calls.staged(message, self.ended_step))
            case CallEnded():
                yield from self._send_actions(self._calls.ended(message, body, now_s))
            case TensorsReported():
                yield from self._report(message)

    # states of ranks

    def _admit(self, rank: _Rank, route: bytes, hello: RankHello, now_s: float) -> Iterator[Action]:
        """Take a process that was started elsewhere as this rank, or send it the reason why not."""
        refusal = self._refusal(rank, hello, now_s)
        yield RankJoined(hello.rank, hello.host, refusal)
        if refusal:
            yield SendToRank(route, AbortRank(self.ended_step, refusal))
        else:
            rank.route, rank.num_received, rank.num_sent = route, 0, 0

    def _refusal(self, rank: _Rank, hello: RankHello, now_s: float) -> str:
        """Why a process may not join as this rank; '' if it may."""
        is_silent = now_s - rank.received_s >= REPLACE_BEATS * self._settings.beat_s
        if self._is_met or self.state is not RankGroupState.FORMING:
            return LATE
        if rank.route and not is_silent:
            return f"rank {hello.rank} has joined from {rank.host}; give each rank its own number"
        if hello.plan != self._plan:
            return (
                "its model.path or [trainer] differs from the trainer's; start it with the same "
                "settings"
            )
        if hello.device != self._device:
            return (
                f"it computes on {hello.device}, and the trainer's ranks on {self._device}; set "
                "trainer.device"
            )
        return ""

    def _meet(self, rank: _Rank) -> Iterator[Action]:
        rank.state = RankState.MET
        if all(each.state is RankState.MET for each in self._ranks):
            self._is_met = True
            yield from self._send_all(FormGroup(self.ended_step, self._store))

    def _form(self, rank: _Rank, ready: RankReady) -> Iterator[Action]:
        rank.state, rank.owner = RankState.READY, ready.owner
        if self.state is not RankGroupState.FORMING:
            return
        if all(each.state is RankState.READY for each in self._ranks):
            self.state = RankGroupState.READY
            yield RanksFormed()
            early, self._early = self._early, []
            for made in early:
                yield from self._send_actions(self._calls.make(made, self.ended_step))

    def _exited(self, number: int, cause: str) -> Iterator[Action]:
        self._ranks[number].state = RankState.GONE
        if self.state is RankGroupState.ENDING:
            yield from self._end_first()
        else:
            yield from self._break(self._gone(number, cause))

    def _end(self, reason: str) -> Iterator[Action]:
        if self.state in (RankGroupState.BROKEN, RankGroupState.ENDING):
            return
        if self.state is RankGroupState.FORMING:
            cause = f"not ready yet, and {reason}"
            yield from self._break(self._gone(self._first_unready(), cause))
            return
        self.state = RankGroupState.ENDING
        yield from self._fail_open(self._error)
        for rank in reversed(self._ranks[1:]):
            yield from self._send(rank, EndRank(self.ended_step, reason))
        yield from self._end_first()

    def _first_unready(self) -> int:
        states = [rank.state is RankState.READY for rank in self._ranks]
        return states.index(False)

    def _end_first(self) -> Iterator[Action]:
        first, *others = self._ranks
        if all(each.state is RankState.GONE for each in others):
            yield from self._send(first, EndRank(self.ended_step, "the others have ended"))

    def _break(self, error: RankGone) -> Iterator[Action]:
        if self.state is RankGroupState.BROKEN:
            return
        self.state, self._error = RankGroupState.BROKEN, error
        abort = AbortRank(self.ended_step, str(error))
        for rank in self._ranks:
            if rank.is_external:
                yield from self._send(rank, abort)
            rank.state = RankState.GONE
        yield from self._fail_open(error)
        yield RanksLost(error)

    def _fail_open(self, error: RankError) -> Iterator[Action]:
        """Fail all open requests."""
        early, self._early = self._early, []
        yield from (CallRaised(made.call_id, error) for made in early)
        yield from self._send_actions(self._calls.fail(error))
        yield from [self._end_query(ask_id) for ask_id in list(self._queries)]

    # requests

    def _make(self, made: CallRequested) -> Iterator[Action]:
        match self.state:
            case RankGroupState.FORMING:
                self._early.append(made)
            case RankGroupState.READY:
                yield from self._send_actions(self._calls.make(made, self.ended_step))
            case RankGroupState.ENDING | RankGroupState.BROKEN:
                yield CallRaised(made.call_id, self._error)

    def _ask(self, ask: TensorsQueried, now_s: float) -> Iterator[Action]:
        self.ended_step = max(self.ended_step, ask.ended_step)
        self._queries[ask.ask_id] = _TensorQuery(now_s + self._settings.report_timeout_s)
        if self.state is RankGroupState.READY:
            yield from self._send_all(ReadTensors(self.ended_step, ask.ask_id), ask.shard_ids)
        else:
            yield self._end_query(ask.ask_id)

    def _report(self, message: TensorsReported) -> Iterator[Action]:
        ask = self._queries.get(message.ask_id)
        if ask is not None:
            ask.reports[message.rank] = message
            if len(ask.reports) == len(self._ranks):
                yield self._end_query(message.ask_id)

    def _end_query(self, ask_id: int) -> TensorReport:
        reports = self._queries.pop(ask_id).reports
        missing = tuple([rank for rank in range(len(self._ranks)) if rank not in reports])
        return TensorReport(ask_id, tuple(reports[rank] for rank in sorted(reports)), missing)

    # time

    def _tick(self, now_s: float) -> Iterator[Action]:
        if lost := self._lost(now_s):
            yield from self._break(lost)
        late = [ask_id for ask_id, ask in self._queries.items() if now_s >= ask.until_s]
        yield from [self._end_query(ask_id) for ask_id in late]
        if now_s >= self._beat_at_s:
            self._beat_at_s = now_s + self._settings.beat_s
            for rank in self._ranks:
                yield from self._send(rank, ControllerBeat(self.ended_step, rank.num_sent))

    def _lost(self, now_s: float) -> RankGone | None:
        """The first rank that is lost by a timeout."""
        for number, rank in enumerate(self._ranks):
            silent_s = now_s - rank.received_s
            if rank.state is RankState.READY and silent_s >= self._settings.silence_s:
                return self._gone(number, f"silent for {silent_s:.0f} s")
            is_late = self.state is RankGroupState.FORMING and now_s >= self._formed_by_s
            if is_late and rank.state is not RankState.READY:
                return self._gone(number, self._lateness(rank))
        stuck = self._calls.stuck(now_s, [rank.received_s for rank in self._ranks])
        return self._gone(*stuck) if stuck else None

    def _lateness(self, rank: _Rank) -> str:
        start_s = self._settings.start_s
        if not rank.is_external or rank.state is not RankState.STARTING:
            return f"not ready {start_s:.0f} s after its start"
        missing = ", ".join(map(str, self.missing()))
        return (
            f"it has not joined in {start_s:.0f} s (missing: {missing}); start it by torchrun or "
            "`rollmesh rank`, or raise trainer.rank_start_timeout_s"
        )

    def _gone(self, number: int, cause: str) -> RankGone:
        return RankGone(number, cause, self._ranks[number].host if self._has_external else "")

    # messages to ranks

    def _send_actions(self, actions: Iterable[CallAction]) -> Iterator[Action]:
        for action in actions:
            if isinstance(action, SendToAll):
                bodies = action.bodies or (b"",) * len(self._ranks)
                for rank, body in zip(self._ranks, bodies, strict=True):
                    yield from self._send(rank, action.message, body)
            else:
                yield action

    def _send_all(self, message: RankMessage, body: Buffer = b"") -> Iterator[Action]:
        for rank in self._ranks:
            yield from self._send(rank, message, body)

    def _send(self, rank: _Rank, message: RankMessage, body: Buffer = b"") -> Iterator[Action]:
        if rank.state in (RankState.MET, RankState.READY):
            rank.num_sent += 1
            yield SendToRank(rank.route, message, body)
