"""One engine of a pipeline as its coordinator sees it, and the values of the coordinator's machine.

    sleep   RESTING -> LEAVING -> DRAINING -> PAUSING -> RELEASING -> RESTING (asleep)
    wake    RESTING -> RESUMING -> LOADING -> PROBING -> JOINING -> RESTING (awake)

    LEAVING: until the table says ASLEEP.  JOINING: until it says that the engine serves.
    ABSENT until it answers for the first time;  found half asleep -> LOST, then sleep
    a step fails -> it is retried;  the resize's deadline passes -> LOST, then sleep
    awake, but found without memory -> RESUMING, for repair_s, then LOST, then sleep
    asleep, but found with memory -> PAUSING, LOST if that fails

- No request is routed to an engine without memory, and no memory is released while the table may
  route to it. An engine not known to be awake is out of the table.
- One call to an engine at a time. Each RunEngineOp is answered by one EngineOpDone with its serial;
  a later call to the same engine replaces the earlier one.
- Pure; machine.py sends what it requests.
"""

import enum
from typing import Final

import msgspec

from rollmesh.core.types import UNVERSIONED
from rollmesh.wire.fleet import EnginePhase, EngineRow
from rollmesh.wire.machine import Received, Send, Ticked
from rollmesh.wire.scheduling import WorkerPhase, WorkerTruth

SCHEDULER: Final = b"scheduler"
"""Route to the scheduler; the router's is wire.machine.ROUTER."""


class EngineOp(enum.StrEnum):
    """Operations on an engine."""

    LOOK = "look"
    """Read its state: EngineOpDone.seen."""
    PAUSE = "pause"
    """End running requests and hold new ones."""
    RELEASE = "release"
    """Flush and release its memory; nothing to do if already released."""
    RESUME = "resume"
    """Allocate its memory again; its weights are lost."""
    LOAD = "load"
    """Load the newest published weights, with the adapter if that is newer, or those it was started
    with; then generate."""
    PROBE = "probe"
    """Prove that it serves `policy_version`."""


class EngineSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """State of an engine."""

    is_released: bool
    is_moving: bool = False
    """A release or wake of its memory has begun and not ended: it has no weights."""
    policy_version: int = UNVERSIONED
    adapter: str = ""
    """Adapter of that version, if loaded."""
    num_requests: int = 0
    kv_tokens: int = 0
    """KV-cache tokens of running requests."""


class EngineOpDone(msgspec.Struct, frozen=True, kw_only=True):
    """Result of a RunEngineOp."""

    url: str
    serial: int
    ok: bool
    detail: str = ""
    """Why it failed, in one line."""
    seen: EngineSnapshot | None = None
    """State of the engine; set by LOOK."""
    policy_version: int = UNVERSIONED
    """Version of its weights now; set by LOAD."""
    adapter: str = ""
    """Adapter over these weights; set by LOAD."""


class RunEngineOp(msgspec.Struct, frozen=True):
    """Run `op` on the engine at `url` after `after_s`."""

    url: str
    serial: int
    op: EngineOp
    policy_version: int = UNVERSIONED
    """Version whose weights PROBE checks."""
    after_s: float = 0.0


class CoordinatorSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Pipeline, engines and timeouts of a coordinator."""

    pipeline_id: str
    urls: tuple[str, ...]
    """Engines by rank."""
    started_s: float = 0.0
    """Start of this process in unix time, by which the scheduler tells it from earlier ones."""
    lease_s: float = 15.0
    """Lease of a sleeping engine, renewed after a third of it."""
    beat_s: float = 1.0
    """Interval of reports to the scheduler and of checks of each engine."""
    read_s: float = 0.5
    """Interval of reading the fleet table."""
    hasty_s: float = 0.1
    """Interval of reading the fleet table while a change of it is awaited."""
    repeat_s: float = 0.5
    """A request to the router that does not show in the table is repeated after this time."""
    look_s: float = 0.05
    """Interval of checks of a draining engine."""
    drain_s: float = 5.0
    """Time for turns that cannot continue elsewhere; then they are cut."""
    retry_s: float = 1.0
    """Delay before a failed step is retried."""
    repair_s: float = 60.0
    """Time for an awake engine that was restarted to serve again."""
    call_s: float = 100_000.0
    """A call that its shell has not answered by then has failed; the shell's own limits are
    shorter."""
    settle_s: float = 10.0
    """The first report waits this long for engines that do not answer."""


CoordinatorEvent = Received | EngineOpDone | Ticked
CoordinatorAction = Send | RunEngineOp


SERVES = frozenset({EnginePhase.READY, EnginePhase.UPDATING})
NOT_CHECKED = "not looked at yet"


class WorkerStep(enum.StrEnum):
    RESTING = "resting"
    LEAVING = "leaving"
    DRAINING = "draining"
    PAUSING = "pausing"
    RELEASING = "releasing"
    RESUMING = "resuming"
    LOADING = "loading"
    PROBING = "probing"
    JOINING = "joining"


STEP_OPS = {
    WorkerStep.RESTING: EngineOp.LOOK,
    WorkerStep.DRAINING: EngineOp.LOOK,
    WorkerStep.PAUSING: EngineOp.PAUSE,
    WorkerStep.RELEASING: EngineOp.RELEASE,
    WorkerStep.RESUMING: EngineOp.RESUME,
    WorkerStep.LOADING: EngineOp.LOAD,
    WorkerStep.PROBING: EngineOp.PROBE,
}
NEXT_STEPS = {
    WorkerStep.PAUSING: WorkerStep.RELEASING,
    WorkerStep.RESUMING: WorkerStep.LOADING,
    WorkerStep.LOADING: WorkerStep.PROBING,
    WorkerStep.PROBING: WorkerStep.JOINING,
}


class EngineWorker:
    def __init__(self, rank: int, url: str, settings: CoordinatorSettings) -> None:
        self.rank = rank
        self.url = url
        self.phase = WorkerPhase.ABSENT
        """Phase that is reported to the scheduler."""
        self.epoch = 0
        self.detail = NOT_CHECKED
        self.step = WorkerStep.RESTING
        self.is_wanted_awake = False
        self.is_settled = False
        """Whether it was found asleep or awake, or ordered to be, since the coordinator began."""
        self.policy_version = UNVERSIONED
        self.adapter = ""
        self.kv_tokens = 0
        self._settings = settings
        self._serial = 0
        self._calls = 0
        self._called_s = 0.0
        self._next_call_s = float("-inf")
        self._drained_from_s = 0.0
        self._repaired_from_s = 0.0
        """When it was found awake without its memory."""

    def truth(self) -> WorkerTruth:
        kv_tokens = self.kv_tokens if self.phase is WorkerPhase.AWAKE else 0
        return WorkerTruth(self.rank, self.phase, self.epoch, kv_tokens, self.detail)

    @property
    def is_out(self) -> bool:
        """Whether the table must not route to it."""
        is_awake = self.step is WorkerStep.RESTING and self.phase is WorkerPhase.AWAKE
        return not (self.is_wanted_awake and (self.step is WorkerStep.JOINING or is_awake))

    @property
    def is_as_wanted(self) -> bool:
        """Whether it is in the wanted phase."""
        wanted = WorkerPhase.AWAKE if self.is_wanted_awake else WorkerPhase.ASLEEP
        return self.phase is wanted

    # orders

    def want(self, is_awake: bool) -> None:
        """Set the wanted phase and begin to move there."""
        self.is_wanted_awake, self.is_settled = is_awake, True
        if self.is_as_wanted:
            return
        self.phase = WorkerPhase.WAKING if is_awake else WorkerPhase.SLEEPING
        self.detail = ""
        self._enter(WorkerStep.RESUMING if is_awake else WorkerStep.LEAVING)

    def give_up(self, why: str) -> None:
        """The deadline passed: its state is unknown, and it is put to sleep."""
        self.phase, self.detail = WorkerPhase.LOST, self.detail or why
        if self.is_wanted_awake:
            self.is_wanted_awake = False
            self._enter(WorkerStep.LEAVING)

    # answers of the engine

    def on_done(self, done: EngineOpDone, row: EngineRow | None, now_s: float) -> None:
        """Handle the result of a call; late results change nothing."""
        if done.serial != self._serial:
            return
        self._serial = 0
        if self.step is WorkerStep.RESTING:
            self._next_call_s = now_s + self._settings.beat_s
            self._on_looked(done, row, now_s)
        elif self.step is WorkerStep.DRAINING:
            self._on_drained(done, now_s)
        elif not done.ok:
            self._on_failed(done.detail or "no reason given", now_s)
        elif self.step is WorkerStep.RELEASING:
            self._arrive(WorkerPhase.ASLEEP)
        else:
            if self.step is WorkerStep.LOADING:
                self.policy_version, self.adapter = done.policy_version, done.adapter
            self._enter(NEXT_STEPS[self.step])

    def _on_failed(self, why: str, now_s: float) -> None:
        self.detail = f"{self.step.value}: {why}"
        self._next_call_s = now_s + self._settings.retry_s
        if self.phase is WorkerPhase.ASLEEP:
            self.phase = WorkerPhase.LOST  # it was restarted, on GPUs that may belong to another

    def _on_looked(self, done: EngineOpDone, row: EngineRow | None, now_s: float) -> None:
        seen = done.seen
        if not done.ok or seen is None:
            self.detail = done.detail or "it does not answer"
        elif not self.is_settled:
            self._settle(seen, row)
        else:
            self.detail = ""
            self._take(seen)
            if self.phase is WorkerPhase.AWAKE and seen.is_released:
                self._repaired_from_s = now_s
                self._enter(WorkerStep.RESUMING)
            elif self.phase is WorkerPhase.ASLEEP and not seen.is_released:
                self._enter(WorkerStep.PAUSING)

    def _settle(self, seen: EngineSnapshot, row: EngineRow | None) -> None:
        """Decide on the state found at the start: awake if it has memory and serves, else it is put
        to sleep.

        The table alone does not show it: a restarted router knows of no sleep.
        """
        self.is_settled = True
        self._take(seen)
        is_served = row is not None and row.phase not in (EnginePhase.ASLEEP, EnginePhase.GONE)
        if seen.is_released:
            self._arrive(WorkerPhase.ASLEEP)
        elif is_served and not seen.is_moving:
            self.is_wanted_awake = True
            self._arrive(WorkerPhase.AWAKE)
        else:
            self.phase, self.detail = WorkerPhase.LOST, "found half asleep"
            self._enter(WorkerStep.LEAVING)

    def _take(self, seen: EngineSnapshot) -> None:
        self.kv_tokens = seen.kv_tokens
        if not seen.is_released and seen.policy_version != UNVERSIONED:
            self.policy_version, self.adapter = seen.policy_version, seen.adapter

    def _on_drained(self, done: EngineOpDone, now_s: float) -> None:
        """Check a draining engine; one that does not answer is not waited for."""
        seen = done.seen
        if done.ok and seen and seen.is_released:
            self._arrive(WorkerPhase.ASLEEP)
            return
        until_s = self._drained_from_s + self._settings.drain_s
        if done.ok and seen and seen.num_requests and now_s < until_s:
            self._next_call_s = now_s
            return
        self._enter(WorkerStep.PAUSING)

    # time and the table

    def update(self, row: EngineRow | None, now_s: float, *, is_removed: bool = False) -> None:
        """Advance steps that depend on the table; `row` is None until the table reflects the last
        request. An engine that the operator removed keeps its GPUs, but serves no requests."""
        is_repaired = self.phase is WorkerPhase.AWAKE and self.step is not WorkerStep.RESTING
        if is_repaired and now_s >= self._repaired_from_s + self._settings.repair_s:
            self.give_up(f"{self.step.value}: took too long")
        is_asleep = row is not None and row.phase is EnginePhase.ASLEEP
        if self.step is WorkerStep.LEAVING and (is_asleep or is_removed):
            self._drained_from_s = now_s
            self._enter(WorkerStep.DRAINING)
        elif self.step is WorkerStep.JOINING and (is_removed or (row and row.phase in SERVES)):
            self._arrive(WorkerPhase.AWAKE)
        elif self.step is WorkerStep.JOINING and row and row.phase is not EnginePhase.ASLEEP:
            self.detail = f"{row.phase.value}: {row.detail}"

    def call(self, serial: int, now_s: float) -> RunEngineOp | None:
        """The next call to it, if any, with that serial."""
        op = STEP_OPS.get(self.step)
        if op is None:
            return None
        if self._serial and now_s < self._called_s + self._settings.call_s:
            return None
        if not self._serial and now_s < self._next_call_s:
            return None
        self._serial, self._called_s = serial, now_s
        after_s = self._settings.look_s if self.step is WorkerStep.DRAINING else 0.0
        return RunEngineOp(self.url, serial, op, self.policy_version, after_s)

    def _enter(self, step: WorkerStep) -> None:
        self.step, self._serial = step, 0
        self._next_call_s = float("-inf")

    def _arrive(self, phase: WorkerPhase) -> None:
        self.phase, self.detail = phase, ""
        self._enter(WorkerStep.RESTING)
        if not self.is_as_wanted:
            self.want(self.is_wanted_awake)
