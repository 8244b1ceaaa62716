"""One engine of a pipeline, as its coordinator drives it: out of the table and asleep, or awake.

    sleep   RESTING -> LEAVING -> DRAINING -> PAUSING -> RELEASING -> RESTING (asleep)
    wake    RESTING -> RESUMING -> LOADING -> PROBING -> JOINING -> RESTING (awake)

    LEAVING: until the table says ASLEEP.  JOINING: until it says that the engine serves.
    ABSENT until it answers for the first time;  found half asleep -> LOST, and on to sleep
    a step fails -> it is tried again;  the resize's deadline passes -> LOST, and on to sleep
    awake, and found without memory -> RESUMING, for repair_s, then LOST, and on to sleep
    asleep, and found with memory -> PAUSING, LOST if that fails

Invariants: nobody is sent to an engine whose memory is not there, nor memory released while the
table may send somebody; what is not known to be awake is out of the table; only one call to it is
under way. Pure; driven by machine.py, which sends what it asks for.
"""

import enum

from rollmesh.serve.coordinator.events import (
    UNVERSIONED,
    CallEngine,
    CoordinatorSettings,
    Deed,
    EngineDone,
    EngineSeen,
)
from rollmesh.wire.fleet import EnginePhase, EngineRow
from rollmesh.wire.scheduling import WorkerPhase, WorkerTruth

SERVES = frozenset({EnginePhase.READY, EnginePhase.UPDATING})
NOT_SEEN = "not looked at yet"


class Step(enum.StrEnum):
    """See the module."""

    RESTING = "resting"
    LEAVING = "leaving"
    DRAINING = "draining"
    PAUSING = "pausing"
    RELEASING = "releasing"
    RESUMING = "resuming"
    LOADING = "loading"
    PROBING = "probing"
    JOINING = "joining"


DEEDS = {
    Step.RESTING: Deed.LOOK,
    Step.DRAINING: Deed.LOOK,
    Step.PAUSING: Deed.PAUSE,
    Step.RELEASING: Deed.RELEASE,
    Step.RESUMING: Deed.RESUME,
    Step.LOADING: Deed.LOAD,
    Step.PROBING: Deed.PROBE,
}
NEXT = {
    Step.PAUSING: Step.RELEASING,
    Step.RESUMING: Step.LOADING,
    Step.LOADING: Step.PROBING,
    Step.PROBING: Step.JOINING,
}


class Worker:
    """See the module."""

    def __init__(self, rank: int, url: str, settings: CoordinatorSettings) -> None:
        self.rank = rank
        self.url = url
        self.phase = WorkerPhase.ABSENT
        """What the scheduler hears."""
        self.epoch = 0
        self.detail = NOT_SEEN
        self.step = Step.RESTING
        self.is_wanted_awake = False
        self.is_settled = False
        """Whether it was found asleep or awake, or told to be, since the coordinator began."""
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
        """Of one that is awake, and was found without its memory."""

    def truth(self) -> WorkerTruth:
        kv_tokens = self.kv_tokens if self.phase is WorkerPhase.AWAKE else 0
        return WorkerTruth(self.rank, self.phase, self.epoch, kv_tokens, self.detail)

    @property
    def is_out(self) -> bool:
        """Whether the table must not send anybody."""
        is_awake = self.step is Step.RESTING and self.phase is WorkerPhase.AWAKE
        return not (self.is_wanted_awake and (self.step is Step.JOINING or is_awake))

    @property
    def is_there(self) -> bool:
        """Whether it is as it is wanted."""
        wanted = WorkerPhase.AWAKE if self.is_wanted_awake else WorkerPhase.ASLEEP
        return self.phase is wanted

    # what it is told

    def want(self, is_awake: bool) -> None:
        """From now on it is to be so."""
        self.is_wanted_awake, self.is_settled = is_awake, True
        if self.is_there:
            return
        self.phase = WorkerPhase.WAKING if is_awake else WorkerPhase.SLEEPING
        self.detail = ""
        self._enter(Step.RESUMING if is_awake else Step.LEAVING)

    def give_up(self, why: str) -> None:
        """It did not get there in time: nobody knows how it is, and it is to sleep."""
        self.phase, self.detail = WorkerPhase.LOST, self.detail or why
        if self.is_wanted_awake:
            self.is_wanted_awake = False
            self._enter(Step.LEAVING)

    # what the engine answers

    def on_done(self, done: EngineDone, row: EngineRow | None, now_s: float) -> None:
        """The call to it is over; late answers change nothing."""
        if done.serial != self._serial:
            return
        self._serial = 0
        if self.step is Step.RESTING:
            self._next_call_s = now_s + self._settings.beat_s
            self._on_looked(done, row, now_s)
        elif self.step is Step.DRAINING:
            self._on_drained(done, now_s)
        elif not done.ok:
            self._on_failed(done.detail or "it does not say why", now_s)
        elif self.step is Step.RELEASING:
            self._arrive(WorkerPhase.ASLEEP)
        else:
            if self.step is Step.LOADING:
                self.policy_version, self.adapter = done.policy_version, done.adapter
            self._enter(NEXT[self.step])

    def _on_failed(self, why: str, now_s: float) -> None:
        self.detail = f"{self.step.value}: {why}"
        self._next_call_s = now_s + self._settings.retry_s
        if self.phase is WorkerPhase.ASLEEP:
            self.phase = WorkerPhase.LOST  # it was started anew, on GPUs that may be another's

    def _on_looked(self, done: EngineDone, row: EngineRow | None, now_s: float) -> None:
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
                self._enter(Step.RESUMING)
            elif self.phase is WorkerPhase.ASLEEP and not seen.is_released:
                self._enter(Step.PAUSING)

    def _settle(self, seen: EngineSeen, row: EngineRow | None) -> None:
        """Found at the start: awake where it has memory and serves, else it is to sleep.

        The table alone does not tell: a router that was started anew as well knows of no sleep.
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
            self._enter(Step.LEAVING)

    def _take(self, seen: EngineSeen) -> None:
        self.kv_tokens = seen.kv_tokens
        if not seen.is_released and seen.policy_version != UNVERSIONED:
            self.policy_version, self.adapter = seen.policy_version, seen.adapter

    def _on_drained(self, done: EngineDone, now_s: float) -> None:
        """Looked at while its legs leave; what does not answer is not waited for any longer."""
        seen = done.seen
        if done.ok and seen and seen.is_released:
            self._arrive(WorkerPhase.ASLEEP)
            return
        until_s = self._drained_from_s + self._settings.drain_s
        if done.ok and seen and seen.num_requests and now_s < until_s:
            self._next_call_s = now_s
            return
        self._enter(Step.PAUSING)

    # time, and the table

    def tend(self, row: EngineRow | None, now_s: float) -> None:
        """`row`: as the table has it now, None where it has not heard of the last ask yet."""
        is_repaired = self.phase is WorkerPhase.AWAKE and self.step is not Step.RESTING
        if is_repaired and now_s >= self._repaired_from_s + self._settings.repair_s:
            self.give_up(f"{self.step.value}: took too long")
        if self.step is Step.LEAVING and row and row.phase is EnginePhase.ASLEEP:
            self._drained_from_s = now_s
            self._enter(Step.DRAINING)
        elif self.step is Step.JOINING and row and row.phase in SERVES:
            self._arrive(WorkerPhase.AWAKE)
        elif self.step is Step.JOINING and row and row.phase is not EnginePhase.ASLEEP:
            self.detail = f"{row.phase.value}: {row.detail}"

    def call(self, serial: int, now_s: float) -> CallEngine | None:
        """What is to be done to it now, under that serial."""
        deed = DEEDS.get(self.step)
        if deed is None:
            return None
        if self._serial and now_s < self._called_s + self._settings.call_s:
            return None
        if not self._serial and now_s < self._next_call_s:
            return None
        self._serial, self._called_s = serial, now_s
        after_s = self._settings.look_s if self.step is Step.DRAINING else 0.0
        return CallEngine(self.url, serial, deed, self.policy_version, after_s)

    def _enter(self, step: Step) -> None:
        self.step, self._serial = step, 0
        self._next_call_s = float("-inf")

    def _arrive(self, phase: WorkerPhase) -> None:
        self.phase, self.detail = phase, ""
        self._enter(Step.RESTING)
        if not self.is_there:
            self.want(self.is_wanted_awake)
