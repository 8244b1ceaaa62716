"""State machine that decides which process starts, restarts or stops, and when the run is over.

- Pure: time is an argument, and the supervisor executes the actions.
- A child starts only when all that it needs is available; nothing starts once the run stops.
- A child whose heartbeats stop is killed and restarted.
- Deaths of a child count until it was ready again, however long its loads are.
- ENDED means that every child is gone.

    child   WAITING --> HELD --> STARTING --> READY     DONE <-- STARTING (a task, exit code 0)
                         ^  |        |          |
                         |  v        v          v
                        BACKING_OFF <+----------+       and from anywhere: --> STOPPING --> GONE

A child is HELD while it loads its libraries and its gate is closed. A drained worker is GONE; one
that recycled itself is BACKING_OFF for zero seconds. On a cluster a child is PENDING between
StartChild and HELD, until a node has a place for it.

    mesh    STARTING --> RUNNING --> SAVING --> STOPPING --> ENDED
               |                        ^
               +------------------------+

The mesh is SAVING while the trainer, which gets SIGTERM first, writes its checkpoint, and STOPPING
once the others have it too. Children that still run at stop_timeout_s are killed.
"""

import enum
from collections.abc import Collection
from pathlib import Path

import msgspec

from rollmesh.core.config import LaunchConfig
from rollmesh.core.process import FAILED, INTERRUPTED, OK, RECYCLED, USAGE
from rollmesh.core.run_state import RunState
from rollmesh.launch.plan import ChildPlan, OnDeath, roles_in

STOP_RESERVE_S = 1.0
"""The part of stop_timeout_s that is left to the others when the trainer uses up its own."""


WARN_FRACTION = 1 / 3
"""The fraction of hang_timeout_s after which missing heartbeats are shown."""
OUT_OF_MEMORY = "out of memory"
MAX_DOUBLINGS = 30
"""Limit for the delay of a restart, so that it remains a finite number before it is capped."""

RESTARTED_AFTER_READY = (OnDeath.RESTART, OnDeath.REPLACE, OnDeath.CONTINUE)
"""After their first report, a usage error of these children is a death like any other."""
RESTARTED = (*RESTARTED_AFTER_READY, OnDeath.FINISH)


class ChildState(enum.Enum):
    """The state of one process."""

    WAITING = "waiting"
    PENDING = "pending"
    HELD = "held"
    STARTING = "starting"
    READY = "ready"
    DONE = "done"
    BACKING_OFF = "backing_off"
    STOPPING = "stopping"
    GONE = "gone"


class MeshState(enum.Enum):
    """The state of the run."""

    STARTING = "starting"
    RUNNING = "running"
    SAVING = "saving"
    STOPPING = "stopping"
    ENDED = "ended"


class ChildPending(msgspec.Struct, frozen=True):
    """A child waits for a place on a node."""

    role: str
    why: str


class ChildPlaced(msgspec.Struct, frozen=True):
    """A child's process runs, and the address of its listening socket is known."""

    role: str


class ChildReady(msgspec.Struct, frozen=True):
    """A child is ready."""

    role: str


class ChildExited(msgspec.Struct, frozen=True):
    """A child's process has ended."""

    role: str
    code: int
    """Negative for a signal."""
    last_line: str = ""
    """The last line of its output."""
    pid: int = 0
    """0 if there was no process."""
    cause: str = ""
    """The cause, in a few words."""


class HeartbeatReceived(msgspec.Struct, frozen=True):
    """A child sent a heartbeat."""

    role: str


class StopRequested(msgspec.Struct, frozen=True):
    """The user asked for a stop; a second request kills."""


class RunAborted(msgspec.Struct, frozen=True):
    """The run cannot continue: all children are killed."""

    reason: str


class TimePassed(msgspec.Struct, frozen=True):
    """Time has passed."""


class StartChild(msgspec.Struct, frozen=True):
    """Start the child's process."""

    role: str


class ReleaseGate(msgspec.Struct, frozen=True):
    """Open the child's gate."""

    role: str


class TerminateChild(msgspec.Struct, frozen=True):
    """Send SIGTERM to the child."""

    role: str


class KillChild(msgspec.Struct, frozen=True):
    """Send SIGKILL to the child and all that it started."""

    role: str


class NotifyRouter(msgspec.Struct, frozen=True):
    """Report to the router that this worker's process has ended."""

    role: str
    pid: int
    cause: str


class Notice(msgspec.Struct, frozen=True):
    """Show a line to the user."""

    line: str


class RunEnd(msgspec.Struct, frozen=True):
    """The exit code of launch, and the reason."""

    code: int
    reason: str

    @property
    def state(self) -> RunState:
        """The run's final state."""
        by_code = {OK: RunState.DONE, INTERRUPTED: RunState.STOPPED}
        return by_code.get(self.code, RunState.FAILED)

    @property
    def cause(self) -> str:
        """The reason of a failure; '' for other ends."""
        return self.reason if self.state is RunState.FAILED else ""


Event = (
    ChildPending
    | ChildPlaced
    | ChildReady
    | ChildExited
    | HeartbeatReceived
    | RunAborted
    | StopRequested
    | TimePassed
)
Action = StartChild | ReleaseGate | TerminateChild | KillChild | NotifyRouter | Notice


class ChildRecord:
    """The machine's record of one process."""

    def __init__(self, plan: ChildPlan) -> None:
        self.plan = plan
        self.state = ChildState.WAITING
        self.has_address = True
        """Whether the address of its listening socket is known."""
        self.pending_for = ""
        """The missing resources of a pending child, as shown to the user."""
        self.since_s = 0.0
        """When the state was entered."""
        self.started_s = 0.0
        """When its process was started."""
        self.has_served = False
        """Whether a process of this role was ever ready: then its settings work."""
        self.back_off_s = 0.0
        self.deaths_s: list[float] = []
        """Deaths that count against max_restarts."""
        self.last_heartbeat_s: float | None = None
        """When its process sent its last heartbeat; None before the first."""
        self.died_loading = False
        """Whether its last process ended before it was ready."""
        self.is_quiet = False
        """Whether a warning about missing heartbeats was shown."""
        self.killed_for = ""
        """Why launch killed it during the run; '' if it did not."""

    def enter(self, state: ChildState, now_s: float) -> None:
        """Change state."""
        self.state = state
        self.since_s = now_s

    @property
    def runs(self) -> bool:
        """Whether there is a process."""
        return is_running_state(self.state) or self.state is ChildState.STOPPING

    @property
    def is_optional(self) -> bool:
        """Whether the run counts as running without it: it was given up, or awaits a node."""
        is_pending = self.state is ChildState.PENDING and self.plan.is_worker
        return is_pending or self.state is ChildState.GONE

    @property
    def is_available(self) -> bool:
        """Whether the children that need it may start."""
        return self.state in (ChildState.READY, ChildState.DONE)


class SupervisionMachine:
    """The machine; `step` is its only input."""

    def __init__(
        self,
        plans: list[ChildPlan],
        settings: LaunchConfig,
        remote: Collection[str] = (),
        logs: Path | None = None,
    ) -> None:
        """The addresses of `remote` roles become known only when these are placed. `logs` is the
        folder of the children's output, if they have one.
        """
        self.state = MeshState.STARTING
        self.end: RunEnd | None = None
        """Set when the run begins to stop."""
        self.children = {plan.role: ChildRecord(plan) for plan in plans}
        for role in remote:
            self.children[role].has_address = False
        self._settings = settings
        self._logs = logs
        self._stopping_since_s = 0.0
        self._stepped_s: float | None = None

    def step(self, event: Event, now_s: float) -> list[Action]:
        """Return the actions that follow from `event`."""
        self._skip_suspension(now_s)
        match event:
            case HeartbeatReceived(role):
                return (
                    self._on_heartbeat(self.children[role], now_s) if role in self.children else []
                )
            case StopRequested():
                return self._on_stop_asked(now_s)
            case RunAborted(reason):
                return self._on_aborted(RunEnd(FAILED, reason), now_s)
            case ChildPending(role, why) if role in self.children:
                return self._on_pending(self.children[role], why, now_s)
            case ChildPlaced(role) if role in self.children:
                return self._on_placed(self.children[role], now_s)
            case ChildReady(role) if role in self.children:
                return self._on_reported(self.children[role], now_s)
            case ChildExited(role) if role in self.children:
                return [*self._on_exited(self.children[role], event, now_s), *self._advance(now_s)]
            case _:
                return self._advance(now_s)

    def _on_stop_asked(self, now_s: float) -> list[Action]:
        if self.end is None:
            return [*self._stop(RunEnd(INTERRUPTED, "stopped"), now_s), *self._advance(now_s)]
        return [KillChild(role) for role, child in self.children.items() if child.runs]

    def _skip_suspension(self, now_s: float) -> None:
        """Do not count heartbeats as missing while launch itself did not run, as on a suspended
        machine.
        """
        suspended_s = 0.0 if self._stepped_s is None else now_s - self._stepped_s
        self._stepped_s = now_s
        if suspended_s < self._settings.suspended_s:
            return
        for child in self.children.values():
            if child.last_heartbeat_s is not None:
                child.last_heartbeat_s += suspended_s

    def _on_heartbeat(self, child: ChildRecord, now_s: float) -> list[Action]:
        was_quiet_s = (
            now_s - child.last_heartbeat_s
            if child.is_quiet and child.last_heartbeat_s is not None
            else 0.0
        )
        child.last_heartbeat_s, child.is_quiet = now_s, False
        return [Notice(f"{child.plan.role} responds again after {was_quiet_s:.0f} s")] * (
            was_quiet_s > 0 and not child.killed_for
        )

    def _on_silence(self, now_s: float) -> list[Action]:
        """Warn about missing heartbeats, and later kill the process."""
        actions: list[Action] = []
        timeout_s = self._settings.hang_timeout_s
        for child in self.children.values():
            if (
                child.last_heartbeat_s is None
                or child.killed_for
                or not (timeout_s and is_running_state(child.state))
            ):
                continue
            silent_s, role = now_s - child.last_heartbeat_s, child.plan.role
            if silent_s >= timeout_s:
                child.killed_for = f"no heartbeat for {timeout_s:g} s"
                actions.append(KillChild(role))
            elif silent_s >= timeout_s * WARN_FRACTION and not child.is_quiet:
                child.is_quiet = True
                line = f"{role} has not responded for {silent_s:.0f} s: is it suspended?"
                end = f"it is killed after {timeout_s:g} s (launch.hang_timeout_s)"
                actions.append(Notice(f"{line} {end}"))
        return actions

    def _on_aborted(self, end: RunEnd, now_s: float) -> list[Action]:
        if self.end is None:
            self._stop(end, now_s)
        return [KillChild(role) for role, child in self.children.items() if child.runs]

    def _on_pending(self, child: ChildRecord, why: str, now_s: float) -> list[Action]:
        if child.state in (ChildState.HELD, ChildState.STARTING):
            child.enter(ChildState.PENDING, now_s)
        is_new = child.state is ChildState.PENDING and child.pending_for != why
        child.pending_for = why
        return [Notice(f"{child.plan.role}: {why}")] * (is_new and bool(why))

    def _on_placed(self, child: ChildRecord, now_s: float) -> list[Action]:
        child.has_address, child.pending_for = True, ""
        if child.state is ChildState.PENDING:
            child.enter(ChildState.HELD, now_s)
        return self._advance(now_s)

    def _on_reported(self, child: ChildRecord, now_s: float) -> list[Action]:
        if child.state is ChildState.STARTING:
            child.enter(ChildState.READY, now_s)
            child.has_served = True
        return self._advance(now_s)

    def _on_exited(self, child: ChildRecord, event: ChildExited, now_s: float) -> list[Action]:
        was = child.state
        if child.killed_for:
            event = msgspec.structs.replace(event, cause=child.killed_for)
        child.pending_for = ""
        child.died_loading = was in (ChildState.HELD, ChildState.STARTING)
        child.last_heartbeat_s, child.is_quiet = None, False
        child.enter(ChildState.GONE, now_s)
        if self.end is not None or not is_running_state(was):
            return []
        actions: list[Action] = []
        if child.plan.is_worker and event.pid:
            actions.append(NotifyRouter(event.role, event.pid, event.cause))
        actions += self._on_death(child, event, now_s)
        child.killed_for = ""
        return actions

    def _on_death(self, child: ChildRecord, event: ChildExited, now_s: float) -> list[Action]:
        if event.code == OK and child.plan.on_death is OnDeath.NEXT:
            child.enter(ChildState.DONE, now_s)
            return []
        if event.code == OK and child.plan.on_death is OnDeath.FINISH:
            return self._stop(RunEnd(OK, "done"), now_s)
        # A usage error of the trainer, however late, is for the user to fix.
        is_restarted = child.has_served and child.plan.on_death in RESTARTED_AFTER_READY
        if event.code == USAGE and not is_restarted:
            return self._stop(RunEnd(USAGE, event.last_line.removeprefix("rollmesh: ")), now_s)
        if event.code == OK and child.plan.on_death is OnDeath.REPLACE:
            note = f"{event.role} was drained and is not restarted"
            return [Notice(note + self._no_worker_left())]
        if child.plan.on_death in RESTARTED:
            return self._restart(child, event, now_s)
        return self._stop(RunEnd(FAILED, how_it_ended(event, child)), now_s)

    def _restart(self, child: ChildRecord, event: ChildExited, now_s: float) -> list[Action]:
        window_s = self._settings.restart_window_s
        if not child.died_loading:
            child.deaths_s = [at_s for at_s in child.deaths_s if now_s - at_s < window_s]
        if event.code == RECYCLED and child.plan.is_rank:
            # The trainer has not noticed yet that it lost the rank's last process.
            delay_s = max(self._settings.restart_delay_s, 2 * child.back_off_s)
            child.back_off_s = min(self._settings.max_restart_delay_s, delay_s)
            child.enter(ChildState.BACKING_OFF, now_s)
            return []
        if event.code == RECYCLED and now_s - child.started_s >= self._settings.min_recycle_s:
            child.back_off_s = 0.0
            child.enter(ChildState.BACKING_OFF, now_s)
            return [Notice(f"{event.role} recycled itself: {event.last_line}")]
        child.deaths_s.append(now_s)
        num_deaths = len(child.deaths_s)
        if num_deaths <= self._settings.max_restarts:
            delay_s = self._settings.restart_delay_s * 2 ** min(num_deaths - 1, MAX_DOUBLINGS)
            child.back_off_s = min(self._settings.max_restart_delay_s, delay_s)
            child.enter(ChildState.BACKING_OFF, now_s)
            if child.plan.is_rank and event.code == OK:
                return []
            return [Notice(f"{how_it_ended(event, child)}; restart in {child.back_off_s:g} s")]
        is_quick = now_s - child.deaths_s[0] < window_s
        when = f"within {window_s:g} s" if is_quick else "before it was ready again"
        reason = f"{how_it_ended(event, child)}, death {num_deaths} {when}"
        log = f"{event.role}.out"
        reason += f"; see {self._logs / log}" if self._logs and log not in reason else ""
        if child.plan.on_death is OnDeath.CONTINUE:
            return [Notice(f"{reason}; the run continues without it")]
        return self._stop(RunEnd(FAILED, reason), now_s)

    def _advance(self, now_s: float) -> list[Action]:
        """Return the actions that time and the other children's states allow."""
        if self.end is not None:
            return self._advance_stop(now_s)
        late = self._overdue(now_s)
        limit_s = self._ready_timeout_s(late) if late else 0.0
        if late is not None and late.has_served:
            late.killed_for = f"not ready within {limit_s:g} s"
            return [KillChild(late.plan.role)]
        if late is not None:
            reason = f"{late.plan.role} was not ready within {limit_s:g} s"
            return [*self._stop(RunEnd(FAILED, reason), now_s), *self._advance_stop(now_s)]
        if all(each.is_available or each.is_optional for each in self.children.values()):
            self.state = MeshState.RUNNING
        actions = self._on_silence(now_s)
        for child in self.children.values():
            if self._may_start(child, now_s):
                child.enter(ChildState.HELD, now_s)
                child.started_s = now_s
                actions.append(StartChild(child.plan.role))
            if child.state is ChildState.HELD and self._are_available(child.plan.gate):
                child.enter(ChildState.STARTING, now_s)
                actions += [ReleaseGate(child.plan.role)] if child.plan.gate else []
        return actions

    def _may_start(self, child: ChildRecord, now_s: float) -> bool:
        if child.state is ChildState.WAITING:
            return self._are_available(child.plan.needs) and all(
                self.children[role].has_address for role in roles_in(child.plan.argv)
            )
        is_rested = now_s - child.since_s >= child.back_off_s
        return child.state is ChildState.BACKING_OFF and is_rested

    def _no_worker_left(self) -> str:
        """Return a warning if the run has no worker of its own left; else ''."""
        workers = [child for child in self.children.values() if child.plan.is_worker]
        if any(child.state is not ChildState.GONE for child in workers):
            return ""
        return "; this run has no worker left, so groups wait until one joins (`rollmesh worker`)"

    def _are_available(self, roles: tuple[str, ...]) -> bool:
        return all(self.children[role].is_available for role in roles)

    def _overdue(self, now_s: float) -> ChildRecord | None:
        for child in self.children.values():
            is_starting = child.state is ChildState.STARTING and child.plan.reports
            if is_starting and now_s - child.since_s >= self._ready_timeout_s(child):
                return child
        return None

    def _ready_timeout_s(self, child: ChildRecord) -> float:
        return child.plan.ready_timeout_s or self._settings.ready_timeout_s

    def _stop(self, end: RunEnd, now_s: float) -> list[Action]:
        """Begin to stop: the trainer first."""
        self.end = end
        self.state = MeshState.SAVING
        self._stopping_since_s = now_s
        for child in self.children.values():
            if not child.runs:
                child.enter(ChildState.GONE, now_s)
        return self._terminate(OnDeath.FINISH, now_s)

    def _advance_stop(self, now_s: float) -> list[Action]:
        took_s = now_s - self._stopping_since_s
        running = [child for child in self.children.values() if child.runs]
        saving = any(child.plan.on_death is OnDeath.FINISH for child in running)
        actions: list[Action] = []
        is_time = took_s >= self._settings.stop_timeout_s - STOP_RESERVE_S
        if self.state is MeshState.SAVING and (is_time or not saving):
            self.state = MeshState.STOPPING
            actions += self._terminate(None, now_s)
        if not running:
            self.state = MeshState.ENDED
        elif took_s >= self._settings.stop_timeout_s:
            actions += [KillChild(child.plan.role) for child in running]
        return actions

    def _terminate(self, only: OnDeath | None, now_s: float) -> list[Action]:
        terminated = [
            child
            for child in self.children.values()
            if child.runs
            and child.state is not ChildState.STOPPING
            and (only is None or child.plan.on_death is only)
        ]
        for child in terminated:
            child.enter(ChildState.STOPPING, now_s)
        return [TerminateChild(child.plan.role) for child in terminated]


def is_running_state(state: ChildState) -> bool:
    """Return whether an exit in this state is unexpected."""
    return state in (
        ChildState.PENDING,
        ChildState.HELD,
        ChildState.STARTING,
        ChildState.READY,
    )


def how_it_ended(event: ChildExited, child: ChildRecord) -> str:
    """Return the first half of the line for the user."""
    loads = child.plan.loads if child.died_loading else ""
    while_loading = f" while loading {loads}" if loads else ""
    if event.code == INTERRUPTED:
        return f"{event.role} was stopped by a signal that launch did not send"
    if event.code == OK:
        return f"{event.role} exited with code 0 before launch stopped it"
    last = f": {event.last_line}" if event.last_line else ""
    if child.killed_for:
        return f"{event.role} was killed{while_loading}: {event.cause}{last}"
    how = (
        f"exited with code {event.code}"
        if event.code >= 0
        else f"was killed by signal {-event.code}"
    )
    if event.cause == OUT_OF_MEMORY:
        how = "ran out of memory"
    return f"{event.role} {how}{while_loading}{last}"
