"""Decides which process starts, starts again or stops, and when the run is over.

- Pure: time is passed in, and the supervisor carries the actions out.
- A child starts only when all it needs is there; once the run stops, nothing starts.
- A child whose heartbeats stop is killed and started again.
- ENDED means that every child is gone.

    child   WAITING --> HELD --> STARTING --> READY     DONE <-- STARTING (a task, exit code 0)
                         ^  |        |          |
                         |  v        v          v
                        BACKING_OFF <+----------+       and from anywhere: --> STOPPING --> GONE

A child is HELD while it loads its libraries and what its gate waits for is not there yet. A worker
that was drained is GONE; one that recycled itself is BACKING_OFF for no time.

    mesh    STARTING --> RUNNING --> SAVING --> STOPPING --> ENDED
               |                        ^
               +------------------------+

The mesh is SAVING while the trainer, told first, writes what there is; STOPPING when the others
are told too; what still runs at stop_timeout_s is killed.
"""

import enum

import msgspec

from rollmesh.core.config import LaunchConfig
from rollmesh.core.process import FAILED, INTERRUPTED, OK, RECYCLED, USAGE
from rollmesh.core.run_state import RunState
from rollmesh.launch.causes import OUT_OF_MEMORY
from rollmesh.launch.plan import ChildPlan, OnDeath

FIRST_BACK_OFF_S = 0.5
LONGEST_BACK_OFF_S = 10.0
LOOP_WINDOW_S = 60.0
SHORTEST_LIFE_S = 10.0
"""Who recycles itself sooner would do nothing else: that counts as a death."""
SPARE_S = 1.0
"""The part of stop_timeout_s that the others have when the trainer uses up its own."""


QUIET_SHARE = 1 / 3
"""The part of hang_timeout_s after which missing heartbeats are shown."""
LULL_S = 10.0
"""Launch steps ten times a second; where it did not for so long, its machine was suspended."""
HUNG = "no heartbeat for "
"""How the cause of a hung child's end begins."""

OUTLAST = (OnDeath.RESTART, OnDeath.REPLACE, OnDeath.GIVE_UP)
"""Whose mistakes, once they have served, are a death like others."""
STARTED_AGAIN = (*OUTLAST, OnDeath.FINISH)


class ChildState(enum.Enum):
    """Where one process stands."""

    WAITING = "waiting"
    HELD = "held"
    STARTING = "starting"
    READY = "ready"
    DONE = "done"
    BACKING_OFF = "backing_off"
    STOPPING = "stopping"
    GONE = "gone"


class MeshState(enum.Enum):
    """Where the run stands."""

    STARTING = "starting"
    RUNNING = "running"
    SAVING = "saving"
    STOPPING = "stopping"
    ENDED = "ended"


class Reported(msgspec.Struct, frozen=True):
    """A child serves."""

    role: str


class Exited(msgspec.Struct, frozen=True):
    """A child's process is gone."""

    role: str
    code: int
    """Negative: the signal that ended it."""
    last_line: str = ""
    """The last that it said on stderr."""
    pid: int = 0
    """0 if there was no process."""
    cause: str = ""
    """What ended it, in a few words."""


class Beaten(msgspec.Struct, frozen=True):
    """A heartbeat of a child came."""

    role: str


class StopAsked(msgspec.Struct, frozen=True):
    """The user wants an end; asked again, at once."""


class Aborted(msgspec.Struct, frozen=True):
    """The run cannot continue: all of it is killed."""

    reason: str


class Ticked(msgspec.Struct, frozen=True):
    """Time went by."""


class Start(msgspec.Struct, frozen=True):
    """Start the child's process."""

    role: str


class Release(msgspec.Struct, frozen=True):
    """Let the child go on from its gate."""

    role: str


class Tell(msgspec.Struct, frozen=True):
    """Tell the child to stop: SIGTERM."""

    role: str


class Kill(msgspec.Struct, frozen=True):
    """End the child and all that it started: SIGKILL."""

    role: str


class TellRouter(msgspec.Struct, frozen=True):
    """Tell the router that this worker's process is gone."""

    role: str
    pid: int
    cause: str


class Note(msgspec.Struct, frozen=True):
    """Something for people to know."""

    line: str


class End(msgspec.Struct, frozen=True):
    """Why the run ended, and what launch exits with."""

    code: int
    reason: str

    @property
    def state(self) -> RunState:
        """The state of the run that ended so."""
        by_code = {OK: RunState.DONE, INTERRUPTED: RunState.STOPPED}
        return by_code.get(self.code, RunState.FAILED)

    @property
    def cause(self) -> str:
        """Why the run failed; '' if it did not."""
        return self.reason if self.state is RunState.FAILED else ""


Event = Reported | Exited | Beaten | Aborted | StopAsked | Ticked
Action = Start | Release | Tell | Kill | TellRouter | Note


class Child:
    """One process as the machine sees it."""

    def __init__(self, plan: ChildPlan) -> None:
        self.plan = plan
        self.state = ChildState.WAITING
        self.since_s = 0.0
        """When the state was entered."""
        self.started_s = 0.0
        """When its process was."""
        self.has_served = False
        """Whether a process of this role ever reported: then it is not the settings' fault."""
        self.back_off_s = 0.0
        self.deaths_s: list[float] = []
        """Within the last minute."""
        self.beat_s: float | None = None
        """When its process sent its last heartbeat; None before the first."""
        self.died_loading = False
        """Whether its last process ended before it reported."""
        self.is_quiet = False
        """Whether a line has said that heartbeats are missing."""
        self.is_hung = False
        """Whether it was killed for that."""

    def enter(self, state: ChildState, now_s: float) -> None:
        """Change state."""
        self.state = state
        self.since_s = now_s

    @property
    def runs(self) -> bool:
        """Whether there is a process."""
        return was_alive(self.state) or self.state is ChildState.STOPPING

    @property
    def is_there(self) -> bool:
        """Whether those that need it may start."""
        return self.state in (ChildState.READY, ChildState.DONE)


class Supervision:
    """The machine."""

    def __init__(self, plans: list[ChildPlan], settings: LaunchConfig) -> None:
        self.state = MeshState.STARTING
        self.end: End | None = None
        """Set when the run begins to stop."""
        self.children = {plan.role: Child(plan) for plan in plans}
        self._settings = settings
        self._stopping_since_s = 0.0
        self._stepped_s: float | None = None

    def step(self, event: Event, now_s: float) -> list[Action]:
        """Return the actions that follow from `event`."""
        self._skip_lull(now_s)
        match event:
            case Beaten(role):
                return self._on_beat(self.children[role], now_s) if role in self.children else []
            case StopAsked():
                return self._on_stop_asked(now_s)
            case Aborted(reason):
                return self._on_aborted(End(FAILED, reason), now_s)
            case Reported(role) if role in self.children:
                return self._on_reported(self.children[role], now_s)
            case Exited(role) if role in self.children:
                return [*self._on_exited(self.children[role], event, now_s), *self._go_on(now_s)]
            case _:
                return self._go_on(now_s)

    def _on_stop_asked(self, now_s: float) -> list[Action]:
        if self.end is None:
            return [*self._stop(End(INTERRUPTED, "stopped"), now_s), *self._go_on(now_s)]
        return [Kill(role) for role, child in self.children.items() if child.runs]

    def _skip_lull(self, now_s: float) -> None:
        """Where launch itself did not run, as on a suspended machine, no heartbeat is missing."""
        lull_s = 0.0 if self._stepped_s is None else now_s - self._stepped_s
        self._stepped_s = now_s
        if lull_s < LULL_S:
            return
        for child in self.children.values():
            if child.beat_s is not None:
                child.beat_s += lull_s

    def _on_beat(self, child: Child, now_s: float) -> list[Action]:
        was_quiet_s = now_s - child.beat_s if child.is_quiet and child.beat_s is not None else 0.0
        child.beat_s, child.is_quiet = now_s, False
        return [Note(f"{child.plan.role} answers again after {was_quiet_s:.0f} s")] * (
            was_quiet_s > 0 and not child.is_hung
        )

    def _on_silence(self, now_s: float) -> list[Action]:
        """Show missing heartbeats in a line, and later kill the process."""
        actions: list[Action] = []
        timeout_s = self._settings.hang_timeout_s
        for child in self.children.values():
            if child.beat_s is None or child.is_hung or not (timeout_s and was_alive(child.state)):
                continue
            silent_s, role = now_s - child.beat_s, child.plan.role
            if silent_s >= timeout_s:
                child.is_hung = True
                actions.append(Kill(role))
            elif silent_s >= timeout_s * QUIET_SHARE and not child.is_quiet:
                child.is_quiet = True
                line = f"{role} has not answered for {silent_s:.0f} s: is it suspended?"
                end = f"it is killed after {timeout_s:g} s (launch.hang_timeout_s)"
                actions.append(Note(f"{line} {end}"))
        return actions

    def _on_aborted(self, end: End, now_s: float) -> list[Action]:
        if self.end is None:
            self._stop(end, now_s)
        return [Kill(role) for role, child in self.children.items() if child.runs]

    def _on_reported(self, child: Child, now_s: float) -> list[Action]:
        if child.state is ChildState.STARTING:
            child.enter(ChildState.READY, now_s)
            child.has_served = True
        return self._go_on(now_s)

    def _on_exited(self, child: Child, event: Exited, now_s: float) -> list[Action]:
        was = child.state
        if child.is_hung:
            cause = f"{HUNG}{self._settings.hang_timeout_s:g} s"
            event = msgspec.structs.replace(event, cause=cause)
        child.died_loading = was in (ChildState.HELD, ChildState.STARTING)
        child.beat_s, child.is_quiet, child.is_hung = None, False, False
        child.enter(ChildState.GONE, now_s)
        if self.end is not None or not was_alive(was):
            return []
        told: list[Action] = []
        if child.plan.is_worker and event.pid:
            told.append(TellRouter(event.role, event.pid, event.cause))
        return told + self._on_death(child, event, now_s)

    def _on_death(self, child: Child, event: Exited, now_s: float) -> list[Action]:
        if event.code == OK and child.plan.on_death is OnDeath.NEXT:
            child.enter(ChildState.DONE, now_s)
            return []
        if event.code == OK and child.plan.on_death is OnDeath.FINISH:
            return self._stop(End(OK, "done"), now_s)
        # What a trainer complains of, however late, is its user's to mend.
        may_outlast = child.has_served and child.plan.on_death in OUTLAST
        if event.code == USAGE and not may_outlast:
            return self._stop(End(USAGE, event.last_line.removeprefix("rollmesh: ")), now_s)
        if event.code == OK and child.plan.on_death is OnDeath.REPLACE:
            note = f"{event.role} was drained and is not started again"
            return [Note(note + self._no_worker_left())]
        if child.plan.on_death in STARTED_AGAIN:
            return self._restart(child, event, now_s)
        return self._stop(End(FAILED, how_it_ended(event, child)), now_s)

    def _restart(self, child: Child, event: Exited, now_s: float) -> list[Action]:
        if event.code == RECYCLED and now_s - child.started_s >= SHORTEST_LIFE_S:
            child.back_off_s = 0.0
            child.enter(ChildState.BACKING_OFF, now_s)
            return [Note(f"{event.role} has recycled itself: {event.last_line}")]
        recent = [at_s for at_s in child.deaths_s if now_s - at_s < LOOP_WINDOW_S]
        child.deaths_s = [*recent, now_s]
        num_deaths = len(child.deaths_s)
        if num_deaths <= self._settings.max_restarts:
            child.back_off_s = min(LONGEST_BACK_OFF_S, FIRST_BACK_OFF_S * 2 ** (num_deaths - 1))
            child.enter(ChildState.BACKING_OFF, now_s)
            return [Note(f"{how_it_ended(event, child)}; started again in {child.back_off_s:g} s")]
        reason = f"{how_it_ended(event, child)}, the death number {num_deaths} within a minute"
        if child.plan.on_death is OnDeath.GIVE_UP:
            return [Note(f"{reason}; the run goes on without it")]
        return self._stop(End(FAILED, reason), now_s)

    def _go_on(self, now_s: float) -> list[Action]:
        """What time and the others' states allow."""
        if self.end is not None:
            return self._go_on_stopping(now_s)
        late = self._late(now_s)
        if late is not None and late.has_served:
            return [Kill(late.plan.role)]
        if late is not None:
            limit_s = self._settings.ready_timeout_s
            reason = f"{late.plan.role} did not report within {limit_s:g} s"
            return [*self._stop(End(FAILED, reason), now_s), *self._go_on_stopping(now_s)]
        given_up = ChildState.GONE
        if all(c.is_there or c.state is given_up for c in self.children.values()):
            self.state = MeshState.RUNNING
        actions = self._on_silence(now_s)
        for child in self.children.values():
            if self._may_start(child, now_s):
                child.enter(ChildState.HELD, now_s)
                child.started_s = now_s
                actions.append(Start(child.plan.role))
            if child.state is ChildState.HELD and self._are_there(child.plan.gate):
                child.enter(ChildState.STARTING, now_s)
                actions += [Release(child.plan.role)] if child.plan.gate else []
        return actions

    def _may_start(self, child: Child, now_s: float) -> bool:
        if child.state is ChildState.WAITING:
            return self._are_there(child.plan.needs)
        is_rested = now_s - child.since_s >= child.back_off_s
        return child.state is ChildState.BACKING_OFF and is_rested

    def _no_worker_left(self) -> str:
        """A warning where the run has no worker of its own left; else nothing."""
        workers = [child for child in self.children.values() if child.plan.is_worker]
        if any(child.state is not ChildState.GONE for child in workers):
            return ""
        return "; no worker of this run is left, so groups wait until one joins (`rollmesh worker`)"

    def _are_there(self, roles: tuple[str, ...]) -> bool:
        return all(self.children[role].is_there for role in roles)

    def _late(self, now_s: float) -> Child | None:
        for child in self.children.values():
            is_starting = child.state is ChildState.STARTING and child.plan.reports
            if is_starting and now_s - child.since_s >= self._settings.ready_timeout_s:
                return child
        return None

    def _stop(self, end: End, now_s: float) -> list[Action]:
        """Begin to stop: the trainer first."""
        self.end = end
        self.state = MeshState.SAVING
        self._stopping_since_s = now_s
        for child in self.children.values():
            if not child.runs:
                child.enter(ChildState.GONE, now_s)
        return self._tell(OnDeath.FINISH, now_s)

    def _go_on_stopping(self, now_s: float) -> list[Action]:
        took_s = now_s - self._stopping_since_s
        running = [child for child in self.children.values() if child.runs]
        saving = any(child.plan.on_death is OnDeath.FINISH for child in running)
        actions: list[Action] = []
        is_time = took_s >= self._settings.stop_timeout_s - SPARE_S
        if self.state is MeshState.SAVING and (is_time or not saving):
            self.state = MeshState.STOPPING
            actions += self._tell(None, now_s)
        if not running:
            self.state = MeshState.ENDED
        elif took_s >= self._settings.stop_timeout_s:
            actions += [Kill(child.plan.role) for child in running]
        return actions

    def _tell(self, only: OnDeath | None, now_s: float) -> list[Action]:
        told = [
            child
            for child in self.children.values()
            if child.runs
            and child.state is not ChildState.STOPPING
            and (only is None or child.plan.on_death is only)
        ]
        for child in told:
            child.enter(ChildState.STOPPING, now_s)
        return [Tell(child.plan.role) for child in told]


def was_alive(state: ChildState) -> bool:
    """Whether an exit in this state is news."""
    return state in (ChildState.HELD, ChildState.STARTING, ChildState.READY)


def how_it_ended(event: Exited, child: Child) -> str:
    """The first half of a line for people."""
    loads = child.plan.loads if child.died_loading else ""
    while_loading = f" while it loaded {loads}" if loads else ""
    if event.code == INTERRUPTED:
        return f"{event.role} was stopped by a signal that launch did not send"
    if event.code == OK:
        return f"{event.role} ended, which launch did not ask for"
    if event.cause.startswith(HUNG):
        return f"{event.role} was killed{while_loading}: {event.cause}"
    how = (
        f"ended with code {event.code}" if event.code >= 0 else f"was ended by signal {-event.code}"
    )
    if event.cause == OUT_OF_MEMORY:
        how = "ran out of memory"
    last = f": {event.last_line}" if event.last_line else ""
    return f"{event.role} {how}{while_loading}{last}"
