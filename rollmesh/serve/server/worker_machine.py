"""The worker's state machine: its groups, from RunGroup to the sink's ack, and when it leaves.

    RunGroup --> RUNNING --Ended--> DELIVERING --GroupAcked, CancelRun--> forgotten
                    +---CancelRun--> ABORTING --Ended--> forgotten

    the worker:  SERVING --DrainWorker, StopAsked (finish), Stopping (abort)--> DRAINING
                 SERVING --WornOut--> WORN, which still serves --WornOut, urgent--> DRAINING
                 DRAINING --nothing left--> LEFT
                 DRAINING --only results for sinks that are away--> LEFT; unless it is worn out, the
                            router has these groups run again on other workers
                 DRAINING --no engine has served for stranded_s--> running groups are aborted, and
                            run again on other workers

- A group is here once, under the newest attempt number of the router. A router with a new
  incarnation gets the list of all groups before any other message.
- Acked groups are remembered, so a late RunGroup of one is answered and not run again.
- A worn worker reports that in its beats and leaves when the router lets it, with its results
  delivered.
- A worker is FULL when it holds its limit, and until it is under ROOM_SHARE of it or has no group.
- Pure. The body of a RunGroup is not opened.
"""

import enum

import msgspec

from rollmesh.core.ids import GroupId
from rollmesh.serve.server.outbox import Forget, Outbox, OutboxSettings, Packed, Unwanted
from rollmesh.wire.frames import Buffer
from rollmesh.wire.machine import ROUTER, Received, Send, Ticked
from rollmesh.wire.messages import (
    RELIEVED,
    CancelRun,
    DrainWorker,
    GroupAcked,
    GroupDelivered,
    GroupFinished,
    GroupReturned,
    GroupStarted,
    HeldGroup,
    ResultRefused,
    RouterHello,
    RunGroup,
    WorkerHello,
    WorkerLeft,
)

ROOM_SHARE = 0.8


class BudgetState(enum.Enum):
    """LIGHT or FULL."""

    LIGHT = "light"
    FULL = "full"


class Budget:
    """Whether the worker holds as much memory as it may."""

    def __init__(self, max_bytes: int) -> None:
        self.state = BudgetState.LIGHT
        self.held_bytes = 0
        """Bytes at the last measurement."""
        self._max_bytes = max_bytes

    def weigh(self, held_bytes: int, *, has_groups: bool) -> None:
        """Set the bytes held; `has_groups` says whether any of them will be freed without help."""
        self.held_bytes = held_bytes
        if not has_groups or held_bytes < ROOM_SHARE * self._max_bytes:
            self.state = BudgetState.LIGHT
        elif held_bytes >= self._max_bytes:
            self.state = BudgetState.FULL

    @property
    def waits_for(self) -> str:
        """Return what keeps the worker from taking groups; '' if nothing does."""
        if self.state is BudgetState.LIGHT:
            return ""
        return f"held_bytes: {self.held_bytes} held, worker.max_held_bytes = {self._max_bytes}"


class Stranded:
    """Whether a draining worker has waited for engines for too long; pure."""

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._from_s: float | None = None

    def look(self, now_s: float, *, drains: bool, any_serves: bool) -> bool:
        """Return whether it has."""
        if any_serves or not drains:
            self._from_s = None
            return False
        if self._from_s is None:
            self._from_s = now_s
        return now_s - self._from_s >= self._patience_s


MAX_REMEMBERED_GROUPS = 4096
"""Delivered groups that are remembered. Not as intervals: a worker sees only its share of a run, so
they would not grow together. For a forgotten one the sink answers that it is a duplicate.
"""


class WorkerState(enum.StrEnum):
    """SERVING -> WORN -> DRAINING -> LEFT, or without WORN."""

    SERVING = "serving"
    WORN = "worn"
    DRAINING = "draining"
    LEFT = "left"


class Cause(enum.StrEnum):
    """Why a worker leaves."""

    DRAINED = "drained"
    WORN_OUT = "recycled"
    STOPPED = "stopped"


class Leaving(msgspec.Struct, frozen=True):
    """Why this worker leaves."""

    cause: Cause
    reason: str

    def __str__(self) -> str:
        return f"{self.cause}: {self.reason}"


class WorkerMachineSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Identity and limits of the worker."""

    worker_id: str
    env: str
    max_rollouts: int
    max_unacked_bytes: int = 2**28
    max_held_bytes: int = 2**31
    pid: int = 0
    host: str = ""
    started_s: float = 0.0
    pid_space: str = ""
    hello_s: float = 0.5
    """The hello is repeated after this time, until a router answers."""
    outbox: OutboxSettings = OutboxSettings()
    stranded_s: float = 60.0
    """A draining worker waits this long for any engine to serve: longer than a publication, or the
    lease of a publisher that died in one.
    """


class GroupRunEnded(msgspec.Struct, frozen=True):
    """Event: a group has ended, aborted or not; the shell has its payload of `num_bytes`."""

    group_id: GroupId
    complete: bool
    num_bytes: int


class StopAsked(msgspec.Struct, frozen=True):
    """Event: the process was asked to end; it finishes what it has, for as long as it may."""

    reason: str


class Stopping(msgspec.Struct, frozen=True):
    """Event: the process ends now: running groups are aborted, finished ones are delivered."""

    reason: str


class EnginesSeen(msgspec.Struct, frozen=True):
    """Event: whether any engine serves now."""

    any_serves: bool


class WornOut(msgspec.Struct, frozen=True):
    """Event: the process has served long enough; it leaves as soon as it may."""

    reason: str
    is_urgent: bool = False
    """Whether it must leave without waiting for its turn."""


class Begin(msgspec.Struct, frozen=True):
    """Action: run this group."""

    group_id: GroupId
    num_samples: int
    body: Buffer
    deadline_s: float = 0.0
    """Seconds until its end at the sink; 0 is no limit."""


class Abort(msgspec.Struct, frozen=True):
    """Action: end this group's rollouts, then step Ended; their results are not wanted."""

    group_id: GroupId
    reason: str


class Left(msgspec.Struct, frozen=True):
    """Action: nothing is held any more; the process may end."""

    num_given_back: int = 0
    """Results whose sinks were away."""


Event = GroupRunEnded | StopAsked | Stopping | EnginesSeen | WornOut | Received | Ticked
Action = Send | Begin | Abort | Forget | Left


class Running(msgspec.Struct):
    """A group that runs here."""

    attempt: int
    num_samples: int
    sink: str
    ticket: bytes


class WorkerMachine:
    """The groups of one worker."""

    def __init__(self, settings: WorkerMachineSettings) -> None:
        self.settings = settings
        self.state = WorkerState.SERVING
        self.router = ""
        """Router incarnation of the last message; '' before the first."""
        self.leaving: Leaving | None = None
        """Why it drains."""
        self._worn = ""
        """Why it is WORN."""
        self.running: dict[GroupId, Running] = {}
        self.aborting: set[GroupId] = set()
        self.outbox = Outbox(settings.outbox)
        self.budget = Budget(settings.max_held_bytes)
        self._delivered: dict[GroupId, None] = {}
        self._awaits_hello = True
        self._next_hello_s = float("-inf")
        self._stranded = Stranded(settings.stranded_s)

    @property
    def num_rollouts(self) -> int:
        """Rollouts of the groups that run."""
        return sum(group.num_samples for group in self.running.values())

    @property
    def accepting(self) -> bool:
        """Whether it takes groups: False while draining or over a byte budget."""
        return self._takes_groups and not self.waits_for

    @property
    def waits_for(self) -> str:
        """Budget that keeps it from taking groups; '' if none does."""
        unacked, limit = self.outbox.unacked_bytes, self.settings.max_unacked_bytes
        if unacked >= limit:
            return f"unacked_bytes: {unacked} unacked, worker.max_unacked_bytes = {limit}"
        return self.budget.waits_for

    @property
    def _has_groups(self) -> bool:
        return bool(self.running or self.aborting or self.outbox.results)

    @property
    def _takes_groups(self) -> bool:
        return self.state in (WorkerState.SERVING, WorkerState.WORN)

    @property
    def num_remembered(self) -> int:
        """Delivered groups that it still remembers."""
        return len(self._delivered)

    def farewell(self) -> WorkerLeft:
        """Return the goodbye message."""
        settings = self.settings
        reason = str(self.leaving)
        return WorkerLeft(settings.worker_id, reason, settings.pid, settings.started_s)

    def holds(self) -> list[HeldGroup]:
        """Return the list of all groups, for a router that does not know this worker."""
        running = [HeldGroup(each, group.attempt, False) for each, group in self.running.items()]
        results = self.outbox.results.items()
        return running + [HeldGroup(each, result.message.attempt, True) for each, result in results]

    def weigh(self, held_bytes: int) -> None:
        """Set the bytes held in memory."""
        self.budget.weigh(held_bytes, has_groups=self._has_groups)

    def step(self, event: Event, now_s: float) -> list[Action]:
        """Return the actions for `event`; total and deterministic."""
        actions: list[Action] = []
        match event:
            case GroupRunEnded():
                actions += self._ended(event, now_s)
            case WornOut():
                self._wear_out(event)
            case StopAsked(reason):
                self._drain(Cause.STOPPED, reason)
            case Stopping(reason):
                self._drain(Cause.STOPPED, reason)
                actions += self._abort_all(reason)
            case EnginesSeen(any_serves):
                actions += self._see_engines(any_serves, now_s)
            case Received():
                actions += self._received(event, now_s)
            case Ticked():
                if self._awaits_hello and now_s >= self._next_hello_s:
                    actions.append(self._hello(now_s))
                actions += self.outbox.step(event, now_s)
        if self.state is WorkerState.DRAINING and self._may_leave(now_s):
            self.state = WorkerState.LEFT
            given_back = self.outbox.give_back()
            actions += [*given_back, Send(ROUTER, self.farewell()), Left(len(given_back))]
        return actions

    def _may_leave(self, now_s: float) -> bool:
        if self.running or self.aborting:
            return False
        if not self.outbox.results:
            return True
        assert self.leaving is not None
        return self.leaving.cause is not Cause.WORN_OUT and self.outbox.is_stuck(now_s)

    def _received(self, event: Received, now_s: float) -> list[Action]:
        actions: list[Action] = []
        is_new = bool(event.router) and event.router != self.router
        if is_new:
            self.router = event.router
            actions.append(self._hello(now_s))
        match event.message:
            case RouterHello():
                # The answer to our hello; one that comes unasked means that the router has lost its
                # state.
                if not self._awaits_hello:
                    actions.append(self._hello(now_s))
                elif not is_new:
                    self._awaits_hello = False
            case RunGroup():
                actions += self._asked_to_run(event.message, event.body)
            case CancelRun(group_id, reason):
                actions += self._abort(group_id, reason)
                actions += self.outbox.step(Unwanted(group_id), now_s)
            case DrainWorker(reason):
                is_relief = bool(self._worn) and reason == RELIEVED
                worn_out, drained = (Cause.WORN_OUT, self._worn), (Cause.DRAINED, reason)
                self._drain(*(worn_out if is_relief else drained))
            case GroupAcked(group_id) | ResultRefused(group_id):
                answered = self.outbox.step(event, now_s)
                if answered and isinstance(event.message, GroupAcked):
                    self._remember(group_id)
                actions += answered
            case _:
                pass
        return actions

    def _asked_to_run(self, ask: RunGroup, body: Buffer) -> list[Action]:
        group_id, attempt = ask.group_id, ask.attempt
        if group_id in self._delivered:
            return [Send(ROUTER, GroupDelivered(group_id, attempt, ask.ticket))]
        started = Send(ROUTER, GroupStarted(group_id, attempt))
        if running := self.running.get(group_id):
            # A router that had given this worker up counts a later attempt: the work continues
            # under that.
            # A client that restarted listens elsewhere.
            running.attempt = max(running.attempt, attempt)
            running.sink, running.ticket = ask.sink, ask.ticket
            return [started]
        if group_id in self.outbox.results:
            self.outbox.readdress(group_id, attempt, ask.sink, ask.ticket)
            return [started]
        if not self._takes_groups:
            return [Send(ROUTER, GroupReturned(group_id, attempt, "the worker is draining"))]
        if group_id in self.aborting:
            reason = "its last run is still coming to its end"
            return [Send(ROUTER, GroupReturned(group_id, attempt, reason))]
        self.running[group_id] = Running(attempt, ask.num_samples, ask.sink, ask.ticket)
        return [started, Begin(group_id, ask.num_samples, body, ask.deadline_s)]

    def _ended(self, ended: GroupRunEnded, now_s: float) -> list[Action]:
        group = self.running.pop(ended.group_id, None)
        if group is None:
            self.aborting.discard(ended.group_id)
            return [Forget(ended.group_id)]
        message = GroupFinished(
            ended.group_id,
            group.attempt,
            self.settings.worker_id,
            ended.complete,
            group.ticket,
        )
        actions: list[Action] = []
        actions += self.outbox.step(Packed(message, group.sink, ended.num_bytes), now_s)
        return actions

    def _abort(self, group_id: GroupId, reason: str) -> list[Action]:
        if self.running.pop(group_id, None) is None:
            return []
        self.aborting.add(group_id)
        return [Abort(group_id, reason)]

    def _abort_all(self, reason: str) -> list[Action]:
        return [each for group_id in [*self.running] for each in self._abort(group_id, reason)]

    def _see_engines(self, any_serves: bool, now_s: float) -> list[Action]:
        drains = self.state is WorkerState.DRAINING
        is_in_vain = self._stranded.look(now_s, drains=drains, any_serves=any_serves)
        return self._abort_all("it drains, and no engine serves") if is_in_vain else []

    def _wear_out(self, event: WornOut) -> None:
        if self.state is WorkerState.SERVING:
            self.state, self._worn = WorkerState.WORN, event.reason
        if event.is_urgent:
            self._drain(Cause.WORN_OUT, event.reason)

    def _drain(self, cause: Cause, reason: str) -> None:
        is_worn = self.leaving is not None and self.leaving.cause is Cause.WORN_OUT
        # A successor is waited for when a worker is drained on request, not when it leaves worn
        # out.
        if self._takes_groups or (is_worn and self.state is WorkerState.DRAINING):
            self.state, self.leaving = WorkerState.DRAINING, Leaving(cause, reason)

    def _hello(self, now_s: float) -> Send:
        self._awaits_hello = True
        self._next_hello_s = now_s + self.settings.hello_s
        settings = self.settings
        hello = WorkerHello(
            worker_id=settings.worker_id,
            env=settings.env,
            max_rollouts=settings.max_rollouts,
            pid=settings.pid,
            host=settings.host,
            started_s=settings.started_s,
            holds=tuple(self.holds()),
            pid_space=settings.pid_space,
            max_unacked_bytes=settings.max_unacked_bytes,
        )
        return Send(ROUTER, hello)

    def _remember(self, group_id: GroupId) -> None:
        self._delivered[group_id] = None
        if len(self._delivered) > MAX_REMEMBERED_GROUPS:
            del self._delivered[next(iter(self._delivered))]
