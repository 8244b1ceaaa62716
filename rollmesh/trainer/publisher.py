"""Bringing new weights to every engine of the fleet: one target, and engines driven towards it.

    WAITING -> BEGINNING -> PAUSING -> FLUSHING -> LOADING -> RESUMING -> SCORING -> FINISHING
    FINISHING --the router agrees--> done, forgotten
    PAUSING .. SCORING --a call fails or takes too long--> UNDOING -> FAILING -> WAITING (retried)
    BEGINNING --refused--> WAITING;  FINISHING --the lease lapsed--> WAITING

Invariants: an engine is touched only under a lease and given back before the lease ends; it counts
as updated only when it scored the probe as the trainer does and not as before; what fails is
resumed, fenced by the router and tried again. A publication ends when every engine that is awake is
at the target or has failed; afterwards engines that come (back) with other weights are brought up
too. Pure; driven by publish.py and by the simulator.
"""

import enum

import msgspec

from rollmesh.wire.fleet import (
    BeginUpdate,
    EnginePhase,
    EngineRow,
    FinishUpdate,
    FleetAnswered,
    FleetAsk,
    ReadFleet,
)
from rollmesh.wire.machine import ROUTER, Received, Send, Ticked


class PublisherSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How patient the publisher is."""

    lease_s: float = 30.0
    probe_tolerance: float = 0.1
    """Mean difference of log-probs that still counts as equal."""
    repeat_s: float = 0.5
    """An ask that the router has not answered is sent again."""
    read_s: float = 1.0
    """The fleet table is read this often."""
    retry_s: float = 2.0
    """An engine that failed is tried again after this time."""
    lease_share: float = 0.8
    """Calls that take more of the lease than this are given up; the rest is for undoing."""


class Probe(msgspec.Struct, frozen=True):
    """What the new weights say of a fixed text, by the trainer's own reckoning."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    """Of all tokens but the first."""


class PublishReport(msgspec.Struct, frozen=True, kw_only=True):
    """How a publication went."""

    policy_version: int
    updated: tuple[str, ...]
    """Engines that serve it."""
    failed: tuple[str, ...]
    """`url: why` of engines that do not; they are fenced and tried again."""
    wall_s: float
    gap_s: float
    """Longest time that one engine was paused."""


class UpdatePhase(enum.StrEnum):
    """See the module's drawing."""

    WAITING = "waiting"
    BEGINNING = "beginning"
    PAUSING = "pausing"
    FLUSHING = "flushing"
    LOADING = "loading"
    RESUMING = "resuming"
    SCORING = "scoring"
    FINISHING = "finishing"
    UNDOING = "undoing"
    FAILING = "failing"


NEXT_PHASE = {
    UpdatePhase.PAUSING: UpdatePhase.FLUSHING,
    UpdatePhase.FLUSHING: UpdatePhase.LOADING,
    UpdatePhase.LOADING: UpdatePhase.RESUMING,
    UpdatePhase.RESUMING: UpdatePhase.SCORING,
    UpdatePhase.SCORING: UpdatePhase.FINISHING,
}
"""After a call that succeeded."""


class PublishAsked(msgspec.Struct, frozen=True):
    """Bring the weights in `folder` to all engines; a newer target replaces an older one."""

    policy_version: int
    folder: str
    probe: Probe | None = None


class EngineCalled(msgspec.Struct, frozen=True):
    """The answer to CallEngine; a late one is ignored."""

    url: str
    serial: int
    ok: bool
    detail: str = ""
    logprobs: tuple[float, ...] = ()
    """After SCORING."""


class CallEngine(msgspec.Struct, frozen=True):
    """Do what `phase` says (UNDOING: resume) at the engine."""

    url: str
    serial: int
    phase: UpdatePhase
    target: PublishAsked


class PublishEnded(msgspec.Struct, frozen=True):
    """The publication is over."""

    report: PublishReport


Event = PublishAsked | EngineCalled | Received | Ticked
Action = Send | CallEngine | PublishEnded


class _Update:
    """One engine on its way to the target."""

    def __init__(self, url: str, target: PublishAsked) -> None:
        self.url = url
        self.target = target
        self.phase = UpdatePhase.WAITING
        self.serial = 0
        self.ask: FleetAsk | None = None
        """What the router has not answered yet."""
        self.sent_s = 0.0
        self.begun_s = 0.0
        self.paused_s = 0.0
        self.not_before_s = 0.0
        self.failure = ""
        """Why the last try failed; '' before the first has."""


class Publisher:
    """See the module."""

    def __init__(self, settings: PublisherSettings | None = None) -> None:
        self._settings = settings or PublisherSettings()
        self._target: PublishAsked | None = None
        self._previous: Probe | None = None
        self._is_open = False
        """The target's end has not been reported yet."""
        self._asked_s = 0.0
        self._gap_s = 0.0
        self._table: tuple[EngineRow, ...] | None = None
        """Read since the target was set."""
        self._first_ask_id = 0
        self._updates: dict[str, _Update] = {}
        self._verified: dict[str, int] = {}
        """What we brought to each engine; an equal number may be another run's weights."""
        self._failures: dict[str, str] = {}
        self._num_asks = 0
        self._num_calls = 0
        self._read_s = float("-inf")

    def phases(self) -> dict[str, UpdatePhase]:
        """Engines that are not at the target yet."""
        return {url: update.phase for url, update in self._updates.items()}

    def step(self, event: Event, now_s: float) -> list[Action]:
        """Take one event; late answers change nothing."""
        actions: list[Action] = []
        match event:
            case PublishAsked():
                actions += self._on_asked(event, now_s)
            case EngineCalled():
                actions += self._on_called(event, now_s)
            case Received(message=FleetAnswered() as answer):
                actions += self._on_answered(answer, now_s)
        return [*actions, *self._tend(now_s), *self._report(now_s)]

    # the target

    def _on_asked(self, target: PublishAsked, now_s: float) -> list[Action]:
        current = self._target
        if current and target.policy_version <= current.policy_version:
            return []
        ended = self._end(now_s) if self._is_open else []
        self._previous = current.probe if current else None
        self._target = target
        self._is_open = True
        self._asked_s, self._gap_s = now_s, 0.0
        self._table = None
        self._failures.clear()
        for update in self._updates.values():
            update.not_before_s = now_s
        self._first_ask_id = self._num_asks + 1
        self._read_s = float("-inf")
        return ended

    def _report(self, now_s: float) -> list[Action]:
        if not self._is_open or self._table is None:
            return []
        if all(self._is_settled(row) for row in self._table):
            return self._end(now_s)
        return []

    def _is_settled(self, row: EngineRow) -> bool:
        if row.phase in (EnginePhase.ASLEEP, EnginePhase.GONE):
            return True
        return self._is_current(row) or row.url in self._failures

    def _is_current(self, row: EngineRow) -> bool:
        assert self._target
        is_ready = row.phase is EnginePhase.READY
        versions = {row.policy_version, self._verified.get(row.url)}
        return is_ready and versions == {self._target.policy_version}

    def _end(self, now_s: float) -> list[Action]:
        assert self._target
        self._is_open = False
        report = PublishReport(
            policy_version=self._target.policy_version,
            updated=tuple(row.url for row in self._table or () if self._is_current(row)),
            failed=tuple(f"{url}: {why}" for url, why in self._failures.items()),
            wall_s=now_s - self._asked_s,
            gap_s=self._gap_s,
        )
        return [PublishEnded(report)]

    # the router's answers

    def _on_answered(self, answer: FleetAnswered, now_s: float) -> list[Action]:
        actions: list[Action] = []
        for update in list(self._updates.values()):
            if update.ask and update.ask.ask_id == answer.ask_id:
                update.ask = None
                actions += self._on_verdict(update, answer, now_s)
        if self._target and answer.ask_id >= self._first_ask_id:
            self._table = answer.engines
            self._reconcile(answer.engines)
        return actions

    def _on_verdict(self, update: _Update, answer: FleetAnswered, now_s: float) -> list[Action]:
        """The router's word on the update's own ask."""
        phase = update.phase
        if phase is UpdatePhase.BEGINNING and answer.ok:
            return self._call(update, UpdatePhase.PAUSING, now_s)
        if phase is UpdatePhase.FINISHING and answer.ok:
            del self._updates[update.url]
            self._verified[update.url] = update.target.policy_version
            self._failures.pop(update.url, None)
            return []
        if phase is UpdatePhase.FINISHING:
            update.failure = answer.error
        self._wait(update, now_s)
        return []

    def _reconcile(self, table: tuple[EngineRow, ...]) -> None:
        """Begin an update of every engine that needs one, forget those that need none."""
        assert self._target
        for row in table:
            is_out = row.phase in (EnginePhase.ASLEEP, EnginePhase.GONE)
            is_needed = not is_out and not self._is_current(row)
            update = self._updates.get(row.url)
            if is_needed and update is None:
                self._updates[row.url] = _Update(row.url, self._target)
            elif not is_needed and update and update.phase is UpdatePhase.WAITING:
                del self._updates[row.url]
        known = {row.url for row in table}
        self._verified = {url: at for url, at in self._verified.items() if url in known}
        for url, update in list(self._updates.items()):
            if url not in known and update.phase is UpdatePhase.WAITING:
                del self._updates[url]

    # the engines' answers

    def _on_called(self, called: EngineCalled, now_s: float) -> list[Action]:
        update = self._updates.get(called.url)
        if update is None or called.serial != update.serial:
            return []
        if update.phase is UpdatePhase.UNDOING:
            return self._finish(update, UpdatePhase.FAILING, now_s)
        failure = "" if called.ok else called.detail or "it does not say why"
        if update.phase is UpdatePhase.RESUMING:
            self._gap_s = max(self._gap_s, now_s - update.paused_s)
        if update.phase is UpdatePhase.SCORING and not failure:
            failure = self._judge(called.logprobs, update.target)
        if failure:
            return self._undo(update, f"{update.phase.value}: {failure}", now_s)
        following = NEXT_PHASE[update.phase]
        if following is UpdatePhase.SCORING and update.target.probe is None:
            following = UpdatePhase.FINISHING
        if following is UpdatePhase.FINISHING:
            return self._finish(update, following, now_s)
        return self._call(update, following, now_s)

    def _judge(self, logprobs: tuple[float, ...], target: PublishAsked) -> str:
        """Why these scores are not those of the target's weights, or ''."""
        probe, previous = target.probe, self._previous
        assert probe
        if len(logprobs) != len(probe.logprobs):
            return f"scored {len(logprobs)} tokens of {len(probe.logprobs)}"
        gap = mean_gap(logprobs, probe.logprobs)
        # Written so that a gap of NaN fails.
        if not gap <= self._settings.probe_tolerance:
            return f"its log-probs differ from the trainer's by {gap:.3f} on average"
        if target is self._target and previous and previous.token_ids == probe.token_ids:
            drift = mean_gap(probe.logprobs, previous.logprobs)
            # Noise moves both distances alike, weights that did not change only one of them.
            if gap > mean_gap(logprobs, previous.logprobs) + drift / 2:
                return "it still scores as the version before"
        return ""

    # steps

    def _begin(self, update: _Update, now_s: float) -> list[Action]:
        assert self._target
        update.target = self._target
        update.failure = ""
        update.begun_s = now_s
        update.phase = UpdatePhase.BEGINNING
        policy_version = update.target.policy_version
        lease_s = self._settings.lease_s
        ask = BeginUpdate(self._next_ask(), update.url, policy_version, lease_s)
        return self._ask(update, ask, now_s)

    def _call(self, update: _Update, phase: UpdatePhase, now_s: float) -> list[Action]:
        if phase is UpdatePhase.PAUSING:
            update.paused_s = now_s
        self._num_calls += 1
        update.phase, update.serial = phase, self._num_calls
        return [CallEngine(update.url, update.serial, phase, update.target)]

    def _undo(self, update: _Update, failure: str, now_s: float) -> list[Action]:
        update.failure = failure
        return self._call(update, UpdatePhase.UNDOING, now_s)

    def _finish(self, update: _Update, phase: UpdatePhase, now_s: float) -> list[Action]:
        """Give the engine back, updated (FINISHING) or not (FAILING)."""
        update.phase = phase
        ok = phase is UpdatePhase.FINISHING
        policy_version = update.target.policy_version
        ask = FinishUpdate(self._next_ask(), update.url, policy_version, ok, update.failure)
        return self._ask(update, ask, now_s)

    def _wait(self, update: _Update, now_s: float) -> None:
        """Try again later; at once where what failed was on its way to an older target."""
        is_target = update.target is self._target
        if update.failure and is_target:
            self._failures[update.url] = update.failure
        update.phase = UpdatePhase.WAITING
        update.serial = 0
        update.ask = None
        update.not_before_s = now_s + self._settings.retry_s * is_target

    def _ask(self, update: _Update, ask: FleetAsk, now_s: float) -> list[Action]:
        update.ask, update.sent_s = ask, now_s
        return [Send(ROUTER, ask)]

    def _next_ask(self) -> int:
        self._num_asks += 1
        return self._num_asks

    # time

    def _tend(self, now_s: float) -> list[Action]:
        actions: list[Action] = []
        if self._target and now_s >= self._read_s + self._settings.read_s:
            self._read_s = now_s
            actions.append(Send(ROUTER, ReadFleet(self._next_ask())))
        for update in list(self._updates.values()):
            actions += self._tend_update(update, now_s)
        return actions

    def _tend_update(self, update: _Update, now_s: float) -> list[Action]:
        if update.phase is UpdatePhase.WAITING:
            return self._begin(update, now_s) if now_s >= update.not_before_s else []
        spent_s = now_s - update.begun_s
        if spent_s >= self._settings.lease_s:
            # The router has taken the engine back by now.
            update.failure = update.failure or "the router did not answer in time"
            self._wait(update, now_s)
            return []
        is_late = spent_s >= self._settings.lease_s * self._settings.lease_share
        if is_late and update.phase in NEXT_PHASE:
            return self._undo(update, f"{update.phase.value}: took too long", now_s)
        if update.ask and now_s >= update.sent_s + self._settings.repeat_s:
            return self._ask(update, update.ask, now_s)
        return []


def mean_gap(left: tuple[float, ...], right: tuple[float, ...]) -> float:
    """Mean absolute difference of two equally long, non-empty sequences."""
    return sum(abs(a - b) for a, b in zip(left, right, strict=True)) / max(1, len(left))
