"""Bring one target version to every engine of the fleet: a pure machine, one update per engine.

    WAITING -> BEGINNING -> DRAINING -> PAUSING -> FLUSHING -> LOADING -> RESUMING -> SCORING
    SCORING -> FINISHING --the router agrees--> done, forgotten
    DRAINING .. SCORING --a call fails or takes too long--> UNDOING -> FAILING -> WAITING (retried)
    DRAINING .. SCORING --a call cannot be sent--> the same call; the lease gets short --> WAITING
    BEGINNING --refused--> WAITING;  FINISHING --the lease lapsed--> WAITING

- An engine is touched only under a lease and returned before the lease ends.
- It is paused when idle, or when its drain took too long. Workers know of the lease: turns that can
  resume elsewhere have left. Each renewed lease is for the newest target.
- It counts as updated only when its scores of the probe match the trainer's (verdicts.py). After a
  failure it is resumed, fenced by the router and retried.
- An engine that only seems to ignore updates is fenced if another may serve. Otherwise it is used:
  without any engine there would be no further steps that could clear or prove it.
- A publication ends when every engine that is awake is at the target, has failed, or belongs to
  another publisher with a newer version. Engines that return with other weights are updated too,
  and those that the operator adds; engines that are being removed are not.
"""

import enum

import msgspec

from rollmesh.core.types import UNVERSIONED
from rollmesh.trainer.weights.verdicts import Probe, WakingEngines, WeightProof, judge
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

_OUT = frozenset({EnginePhase.ASLEEP, EnginePhase.DRAINING, EnginePhase.GONE})
"""Phases of engines that are not updated."""


class UpdatePhase(enum.StrEnum):
    """The state of one engine's update; the module draws the transitions."""

    WAITING = "waiting"
    BEGINNING = "beginning"
    DRAINING = "draining"
    PAUSING = "pausing"
    FLUSHING = "flushing"
    LOADING = "loading"
    RESUMING = "resuming"
    SCORING = "scoring"
    FINISHING = "finishing"
    UNDOING = "undoing"
    FAILING = "failing"


class PublishReport(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of a publication."""

    policy_version: int
    updated: tuple[str, ...]
    """Engines that serve the version."""
    failed: tuple[str, ...]
    """`url: why` of engines that do not; they are fenced and retried."""
    doubted: tuple[str, ...] = ()
    """Engines that serve it but seem to ignore updates, used because no other serves."""
    wall_s: float
    gap_s: float
    """Longest time for which one engine received no turns."""

    @property
    def is_refused(self) -> bool:
        """Whether engines failed and none serves it; false for an empty or sleeping fleet."""
        return bool(self.failed) and not self.updated


class PublishState(msgspec.Struct):
    """The publisher's last view of the engines; written on its thread, readable from any."""

    accepted_version: int = UNVERSIONED
    """The newest policy version that an engine serves, even if only since its publication ended."""
    all_asleep: bool = False
    """There are engines, and all of them sleep because their GPUs are used by others."""


# events


class PublishRequested(msgspec.Struct, frozen=True):
    """Bring the weights in `folder` to all engines; a newer target replaces an older one."""

    policy_version: int
    folder: str
    probe: Probe | None = None
    adapter: str = ""
    """The adapter's name if the folder holds an adapter; '' for whole weights."""


class PhaseResult(msgspec.Struct, frozen=True):
    """The result of RunPhase; a late one is ignored."""

    url: str
    serial: int
    ok: bool
    detail: str = ""
    logprobs: tuple[float, ...] = ()
    """Only after SCORING."""
    num_requests: int = 0
    """Running and waiting at the engine; only after DRAINING."""
    policy_version: int = UNVERSIONED
    """The version that the engine reports; only after SCORING."""
    is_local: bool = False
    """The call could not be sent because of a local shortage; the engine did not receive it."""


# actions


class RunPhase(msgspec.Struct, frozen=True):
    """Call the engine for `phase`: DRAINING reads its load, UNDOING resumes it."""

    url: str
    serial: int
    phase: UpdatePhase
    target: PublishRequested
    after_s: float = 0.0
    """Delay before the call."""


class PublishEnded(msgspec.Struct, frozen=True):
    report: PublishReport


class Accepted(msgspec.Struct, frozen=True):
    """An engine serves this version for the first time, perhaps after the publication ended without
    one."""

    policy_version: int


class Doubted(msgspec.Struct, frozen=True):
    """The engine seems to ignore updates, and is used because no other serves."""

    url: str
    why: str


class Superseded(msgspec.Struct, frozen=True):
    """Another live publisher has a newer version and keeps its engines."""

    policy_version: int
    """The target of this publisher."""
    by: int


Event = PublishRequested | PhaseResult | Received | Ticked
Action = Send | RunPhase | PublishEnded | Accepted | Doubted | Superseded


NEXT_PHASE = {
    UpdatePhase.DRAINING: UpdatePhase.PAUSING,
    UpdatePhase.PAUSING: UpdatePhase.FLUSHING,
    UpdatePhase.FLUSHING: UpdatePhase.LOADING,
    UpdatePhase.LOADING: UpdatePhase.RESUMING,
    UpdatePhase.RESUMING: UpdatePhase.SCORING,
    UpdatePhase.SCORING: UpdatePhase.FINISHING,
}
"""The phase after a call that succeeded."""


class PublisherSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Identity and timing of a publisher."""

    name: str = ""
    """Name shared by all incarnations of a run, so that a new one need not wait for old leases
    to end."""
    lease_s: float = 30.0
    probe_tolerance: float = 0.1
    """Mean difference of log-probs up to which scores count as equal."""
    repeat_s: float = 0.5
    """Interval at which an unanswered request to the router is repeated."""
    read_s: float = 1.0
    """Interval between reads of the fleet table."""
    retry_s: float = 2.0
    """Minimum time between the starts of two attempts at one engine. If calls have waited for a
    killed engine to restart, it is retried at once."""
    lease_share: float = 0.8
    """Share of the lease after which a call is given up; the rest is for undoing."""
    drain_leases: float = 2.0
    """Leases, each renewed, that turns which cannot be resumed may take to end."""
    renew_share: float = 0.3
    """Share of a lease after which it is renewed during a drain; the rest is for the phases that
    follow."""
    poll_s: float = 0.05
    """Delay before each read of a draining engine's load, so that turns sent before their senders
    knew of the lease have arrived."""


class _EngineUpdate:
    """One engine's update to the target."""

    def __init__(self, url: str, target: PublishRequested) -> None:
        self.url = url
        self.target = target
        self.phase = UpdatePhase.WAITING
        self.serial = 0
        self.ask: FleetAsk | None = None
        """The request that the router has not answered yet."""
        self.sent_s = 0.0
        self.begun_s = 0.0
        """When its lease was first requested."""
        self.renewed_s = 0.0
        """When the next lease was requested."""
        self.drained_from_s = 0.0
        self.not_before_s = 0.0
        self.failure = ""
        """Why the last attempt failed; '' before the first failure."""
        self.shortage = ""
        """Why the last call could not be sent from here; '' if it was sent."""


class Publisher:
    """The publisher machine: `step` takes events and returns actions."""

    def __init__(self, settings: PublisherSettings | None = None) -> None:
        self._settings = settings or PublisherSettings()
        self._target: PublishRequested | None = None
        self._proofs: dict[str, WeightProof] = {}
        """By engine: the last weights that it was proved to hold."""
        self._incarnations: dict[str, str] = {}
        """By engine: the process that its proof is about."""
        self._doubted: set[str] = set()
        """Engines reported as seeming to ignore updates."""
        self._is_accepted = False
        """Whether it was reported that an engine serves the target."""
        self._yielded_for: PublishRequested | None = None
        """The target for which it was reported that another publisher is newer."""
        self._is_open = False
        """Whether the target's end is still to be reported."""
        self._asked_s = 0.0
        self._gap_s = 0.0
        self._table: tuple[EngineRow, ...] | None = None
        """The last fleet table read since the target was set."""
        self._first_ask_id = 0
        self._updates: dict[str, _EngineUpdate] = {}
        self._verified: dict[str, int] = {}
        """By engine: the version brought to it by this publisher; an equal number may be another
        run's weights."""
        self._waking = WakingEngines()
        self._failures: dict[str, str] = {}
        self._num_asks = 0
        self._num_calls = 0
        self._read_s = float("-inf")

    def serving(self) -> tuple[str, ...]:
        """Return the engines that were ready in the last table; none before the first target."""
        table = self._table or ()
        return tuple(row.url for row in table if row.phase is EnginePhase.READY)

    def all_asleep(self) -> bool:
        """Return whether the last table had engines and all were asleep."""
        phases = {row.phase for row in self._table or ()} - {EnginePhase.GONE}
        return phases == {EnginePhase.ASLEEP}

    def phases(self) -> dict[str, UpdatePhase]:
        """Return the phase of each engine that is not at the target yet."""
        return {url: update.phase for url, update in self._updates.items()}

    def step(self, event: Event, now_s: float) -> list[Action]:
        """Process one event; late answers change nothing."""
        actions: list[Action] = []
        match event:
            case PublishRequested():
                actions += self._on_asked(event, now_s)
            case PhaseResult():
                actions += self._on_called(event, now_s)
            case Received(message=FleetAnswered() as answer):
                actions += self._on_answered(answer, now_s)
        return [*actions, *self._tend(now_s), *self._accept(), *self._report(now_s)]

    # the target

    def _on_asked(self, target: PublishRequested, now_s: float) -> list[Action]:
        current = self._target
        if current and target.policy_version <= current.policy_version:
            return []
        ended = self._end(now_s) if self._is_open else []
        self._target = target
        self._is_open, self._is_accepted = True, False
        self._asked_s, self._gap_s = now_s, 0.0
        self._table = None
        self._failures.clear()
        for update in self._updates.values():
            update.not_before_s = now_s
        self._first_ask_id = self._num_asks + 1
        self._read_s = float("-inf")
        return ended

    def _accept(self) -> list[Action]:
        """Report the first engine that serves the target."""
        if self._is_accepted or not any(map(self._is_current, self._table or ())):
            return []
        assert self._target
        self._is_accepted = True
        return [Accepted(self._target.policy_version)]

    def _report(self, now_s: float) -> list[Action]:
        if not self._is_open or self._table is None:
            return []
        if all(self._is_settled(row) for row in self._table):
            return self._end(now_s)
        return []

    def _is_settled(self, row: EngineRow) -> bool:
        return row.phase in _OUT or self._is_current(row) or row.url in self._failures

    def _is_current(self, row: EngineRow) -> bool:
        assert self._target
        is_ready = row.phase is EnginePhase.READY
        versions = {row.policy_version, self._verified.get(row.url)}
        is_at_it = versions == {self._target.policy_version}
        return is_ready and is_at_it and row.adapter == self._target.adapter

    def _end(self, now_s: float) -> list[Action]:
        assert self._target
        self._is_open = False
        report = PublishReport(
            policy_version=self._target.policy_version,
            updated=tuple(row.url for row in self._table or () if self._is_current(row)),
            failed=tuple(f"{url}: {why}" for url, why in self._failures.items()),
            doubted=tuple(sorted(self._doubted)),
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

    def _on_verdict(
        self, update: _EngineUpdate, answer: FleetAnswered, now_s: float
    ) -> list[Action]:
        """Handle the router's answer to the update's own request."""
        phase = update.phase
        if phase is UpdatePhase.BEGINNING and answer.ok:
            update.drained_from_s = now_s
            return self._call(update, UpdatePhase.DRAINING, now_s)
        if phase is UpdatePhase.DRAINING and answer.ok:
            update.begun_s = update.renewed_s
            return []
        if phase is UpdatePhase.FINISHING and answer.ok:
            self._gap_s = max(self._gap_s, now_s - update.drained_from_s)
            del self._updates[update.url]
            self._verified[update.url] = update.target.policy_version
            self._failures.pop(update.url, None)
            return []
        superseded = self._yield(answer.superseded_by)
        if phase is UpdatePhase.DRAINING:
            return [*superseded, *self._undo(update, f"{phase.value}: {answer.error}", now_s)]
        if phase is UpdatePhase.FINISHING or answer.superseded_by >= 0:
            update.failure = answer.error
        self._wait(update, now_s)
        return superseded

    def _yield(self, policy_version: int) -> list[Action]:
        """Report, once per target, that another publisher is newer, if `policy_version` is a
        version."""
        assert self._target
        if policy_version < 0 or self._yielded_for is self._target:
            return []
        self._yielded_for = self._target
        return [Superseded(self._target.policy_version, policy_version)]

    def _reconcile(self, table: tuple[EngineRow, ...]) -> None:
        """Begin an update of every engine that needs one; forget those that need none."""
        assert self._target
        self._waking.observe(table, self._verified)
        self._forget_restarted(table)
        for row in table:
            is_out = row.phase in _OUT
            is_new = row.policy_version == self._target.policy_version
            is_out = is_out or (is_new and self._waking.is_waking(row))
            is_needed = not is_out and not self._is_current(row)
            update = self._updates.get(row.url)
            if is_needed and update is None:
                self._updates[row.url] = _EngineUpdate(row.url, self._target)
            elif not is_needed and update and update.phase is UpdatePhase.WAITING:
                del self._updates[row.url]
        known = {row.url for row in table}
        leaving = (EnginePhase.DRAINING, EnginePhase.GONE)
        for url in (row.url for row in table if row.phase in leaving):
            self._failures.pop(url, None)
        self._verified = {url: at for url, at in self._verified.items() if url in known}
        for url, update in list(self._updates.items()):
            if url not in known and update.phase is UpdatePhase.WAITING:
                del self._updates[url]

    def _forget_restarted(self, table: tuple[EngineRow, ...]) -> None:
        """Drop proofs about processes that are gone: a new one may compute differently."""
        before = self._incarnations
        self._incarnations = {row.url: row.incarnation or before.get(row.url, "") for row in table}
        for url in [*self._proofs]:
            now = self._incarnations.get(url)
            # The incarnation is empty before the router has probed the process.
            if now is None or (before.get(url) or now) != now:
                del self._proofs[url]
                self._doubted.discard(url)

    # the engines' answers

    def _on_called(self, called: PhaseResult, now_s: float) -> list[Action]:
        update = self._updates.get(called.url)
        if update is None or called.serial != update.serial:
            return []
        update.shortage = called.detail if called.is_local else ""
        if update.phase is UpdatePhase.UNDOING:
            return self._finish(update, UpdatePhase.FAILING, now_s)
        if called.is_local:
            return self._call(update, update.phase, now_s)
        failure = "" if called.ok else called.detail or "it does not say why"
        doubted: list[Action] = []
        if update.phase is UpdatePhase.SCORING and not failure:
            failure, doubted = self._judge(called, update.target)
        if failure:
            return self._undo(update, f"{update.phase.value}: {failure}", now_s)
        if update.phase is UpdatePhase.DRAINING and self._drains_on(update, called, now_s):
            renewal = self._renew(update, now_s)
            return [*renewal, *self._call(update, UpdatePhase.DRAINING, now_s)]
        following = NEXT_PHASE[update.phase]
        if following is UpdatePhase.SCORING and update.target.probe is None:
            following = UpdatePhase.FINISHING
        if following is UpdatePhase.FINISHING:
            return [*doubted, *self._finish(update, following, now_s)]
        return self._call(update, following, now_s)

    def _drains_on(self, update: _EngineUpdate, called: PhaseResult, now_s: float) -> bool:
        until_s = update.drained_from_s + self._settings.lease_s * self._settings.drain_leases
        # The next phases need a lease that the router has confirmed.
        return update.ask is not None or (called.num_requests > 0 and now_s < until_s)

    def _judge(self, called: PhaseResult, target: PublishRequested) -> tuple[str, list[Action]]:
        """Return why the engine does not hold the target's weights (or ''), and what to report."""
        assert target.probe
        url, policy_version = called.url, target.policy_version
        if called.policy_version not in (UNVERSIONED, policy_version):
            return f"it says that it serves version {called.policy_version}", []
        proof, tolerance = self._proofs.get(url), self._settings.probe_tolerance
        verdict = judge(called.logprobs, policy_version, target.probe, proof, tolerance)
        if verdict.wrong or verdict.proof is None:
            return verdict.wrong, []
        self._proofs[url] = verdict.proof
        if not verdict.stuck:
            if verdict.proof is not proof:
                self._doubted.discard(url)
            return "", []
        if self._may_another_serve(url):
            return verdict.stuck, []
        reported = url in self._doubted
        self._doubted.add(url)
        return "", [] if reported else [Doubted(url, verdict.stuck)]

    def _may_another_serve(self, url: str) -> bool:
        """Return whether another engine serves, or is being updated and has not failed."""
        others = [row for row in self._table or () if row.url not in (url, *self._failures)]
        return any(row.phase is EnginePhase.READY or row.url in self._updates for row in others)

    # steps

    def _begin(self, update: _EngineUpdate, now_s: float) -> list[Action]:
        update.failure = update.shortage = ""
        update.begun_s = now_s
        update.phase = UpdatePhase.BEGINNING
        return self._lease(update, now_s)

    def _renew(self, update: _EngineUpdate, now_s: float) -> list[Action]:
        """Request another lease if the current one is running out and none is requested."""
        left_from_s = update.begun_s + self._settings.lease_s * self._settings.renew_share
        if update.ask or now_s < left_from_s:
            return []
        update.renewed_s = now_s
        return self._lease(update, now_s)

    def _lease(self, update: _EngineUpdate, now_s: float) -> list[Action]:
        """Request a lease for the current target."""
        assert self._target
        update.target = self._target
        policy_version = update.target.policy_version
        settings = self._settings
        ask = BeginUpdate(
            self._next_ask(), update.url, policy_version, settings.lease_s, settings.name
        )
        return self._ask(update, ask, now_s)

    def _call(self, update: _EngineUpdate, phase: UpdatePhase, now_s: float) -> list[Action]:
        self._num_calls += 1
        update.phase, update.serial = phase, self._num_calls
        after_s = self._settings.poll_s if phase is UpdatePhase.DRAINING else 0.0
        return [RunPhase(update.url, update.serial, phase, update.target, after_s)]

    def _undo(self, update: _EngineUpdate, failure: str, now_s: float) -> list[Action]:
        update.failure = failure
        update.ask = None
        return self._call(update, UpdatePhase.UNDOING, now_s)

    def _finish(self, update: _EngineUpdate, phase: UpdatePhase, now_s: float) -> list[Action]:
        """Return the engine to the router, updated (FINISHING) or not (FAILING)."""
        update.phase = phase
        ok = phase is UpdatePhase.FINISHING
        policy_version = update.target.policy_version
        ask = FinishUpdate(
            self._next_ask(),
            update.url,
            policy_version,
            ok,
            update.failure,
            update.target.adapter,
        )
        return self._ask(update, ask, now_s)

    def _wait(self, update: _EngineUpdate, now_s: float) -> None:
        """Retry later; at once if the failed attempt was for an older target."""
        is_target = update.target is self._target
        if update.failure and is_target:
            self._failures[update.url] = update.failure
        update.phase = UpdatePhase.WAITING
        update.serial = 0
        update.ask = None
        update.not_before_s = update.begun_s + self._settings.retry_s if is_target else now_s

    def _ask(self, update: _EngineUpdate, ask: FleetAsk, now_s: float) -> list[Action]:
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
            actions.append(Send(ROUTER, ReadFleet(self._next_ask(), self._target.policy_version)))
        for update in list(self._updates.values()):
            actions += self._tend_update(update, now_s)
        return actions

    def _tend_update(self, update: _EngineUpdate, now_s: float) -> list[Action]:
        if update.phase is UpdatePhase.WAITING:
            return self._begin(update, now_s) if now_s >= update.not_before_s else []
        spent_s = now_s - update.begun_s
        if spent_s >= self._settings.lease_s:
            # The router has taken the engine back by now.
            update.failure = update.failure or "the router did not answer in time"
            self._wait(update, now_s)
            return []
        is_late = spent_s >= self._settings.lease_s * self._settings.lease_share
        if is_late and update.phase in NEXT_PHASE and update.shortage:
            # The engine is not returned as failed: the next lease follows this one.
            update.failure = f"{update.phase.value}: {update.shortage}"
            self._wait(update, now_s)
            return []
        if is_late and update.phase in NEXT_PHASE:
            return self._undo(update, f"{update.phase.value}: took too long", now_s)
        if update.ask and now_s >= update.sent_s + self._settings.repeat_s:
            return self._ask(update, update.ask, now_s)
        return []
