"""Bringing new weights to every engine of the fleet: one target, and engines driven towards it.

    WAITING -> BEGINNING -> DRAINING -> PAUSING -> FLUSHING -> LOADING -> RESUMING -> SCORING
    SCORING -> FINISHING --the router agrees--> done, forgotten
    DRAINING .. SCORING --a call fails or takes too long--> UNDOING -> FAILING -> WAITING (retried)
    DRAINING .. SCORING --a call cannot be sent--> the same call; the lease gets short --> WAITING
    BEGINNING --refused--> WAITING;  FINISHING --the lease lapsed--> WAITING

Invariants: an engine is touched only under a lease and given back before the lease ends; it is
paused when it has nothing to do, or its drain took too long (workers have heard of the lease: what
can go on elsewhere has left, what cannot is left to end, and each lease that is renewed meanwhile
is for the target of then); it counts as updated only when it scored the probe as the trainer does
(verdict.py); what fails is resumed, fenced by the router and tried again. An engine that only seems
to ignore updates is fenced where another may serve, and else used: without any engine there would
be no further steps that could clear or prove it. A publication ends when every engine that is awake
is at the target, has failed, or is another publisher's that is further; engines that come (back)
with other weights are brought up too. Pure; driven by publish.py and by the simulator.
"""

import msgspec

from rollmesh.engine.answers import UNVERSIONED
from rollmesh.trainer.weights.events import (
    Accepted,
    Action,
    CallEngine,
    Doubted,
    EngineCalled,
    Event,
    PublishAsked,
    PublishEnded,
    PublishReport,
    Superseded,
    UpdatePhase,
)
from rollmesh.trainer.weights.verdict import Proof, judge
from rollmesh.trainer.weights.woken import Woken
from rollmesh.wire.fleet import (
    BeginUpdate,
    EnginePhase,
    EngineRow,
    FinishUpdate,
    FleetAnswered,
    FleetAsk,
    ReadFleet,
)
from rollmesh.wire.machine import ROUTER, Received, Send

NEXT_PHASE = {
    UpdatePhase.DRAINING: UpdatePhase.PAUSING,
    UpdatePhase.PAUSING: UpdatePhase.FLUSHING,
    UpdatePhase.FLUSHING: UpdatePhase.LOADING,
    UpdatePhase.LOADING: UpdatePhase.RESUMING,
    UpdatePhase.RESUMING: UpdatePhase.SCORING,
    UpdatePhase.SCORING: UpdatePhase.FINISHING,
}
"""After a call that succeeded."""


class PublisherSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Who the publisher is, and how patient."""

    name: str = ""
    """The same in each life of its run, so that it need not wait for the leases of the last."""
    lease_s: float = 30.0
    probe_tolerance: float = 0.1
    """Mean difference of log-probs that still counts as equal."""
    repeat_s: float = 0.5
    """An ask that the router has not answered is sent again."""
    read_s: float = 1.0
    """The fleet table is read this often."""
    retry_s: float = 2.0
    """Between the beginnings of two tries of an engine that failed: one that was killed, and whose
    calls waited for its next life, is tried again at once."""
    lease_share: float = 0.8
    """Calls that take more of the lease than this are given up; the rest is for undoing."""
    drain_leases: float = 2.0
    """Turns that cannot be resumed have so many leases to end, one renewed by the next."""
    renew_share: float = 0.3
    """After so much of one, while an engine drains: the rest is for what comes behind."""
    look_s: float = 0.05
    """Between two looks at an engine that drains, and before the first: what was sent to it before
    its senders heard of the lease has arrived by then."""


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
        """When its lease was asked for first."""
        self.renewed_s = 0.0
        """When the one that is to follow was."""
        self.drained_from_s = 0.0
        self.not_before_s = 0.0
        self.failure = ""
        """Why the last try failed; '' before the first has."""
        self.shortage = ""
        """Why the last call could not be sent, by no fault of the engine; '' if it was."""


class Publisher:
    """See the module."""

    def __init__(self, settings: PublisherSettings | None = None) -> None:
        self._settings = settings or PublisherSettings()
        self._target: PublishAsked | None = None
        self._proofs: dict[str, Proof] = {}
        """By engine: the last weights that it was proved to hold."""
        self._incarnations: dict[str, str] = {}
        """By engine: of the process that its proof is about."""
        self._doubted: set[str] = set()
        """Engines that seem to ignore updates, as was reported."""
        self._is_accepted = False
        """An engine serves the target, as was reported."""
        self._yielded_for: PublishAsked | None = None
        """The target of which it was said that another publisher is further."""
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
        self._woken = Woken()
        self._failures: dict[str, str] = {}
        self._num_asks = 0
        self._num_calls = 0
        self._read_s = float("-inf")

    def serving(self) -> tuple[str, ...]:
        """Engines that served when the table was read last; none before a first target."""
        table = self._table or ()
        return tuple(row.url for row in table if row.phase is EnginePhase.READY)

    def all_asleep(self) -> bool:
        """Whether there were engines when the table was read last, and all were asleep."""
        phases = {row.phase for row in self._table or ()} - {EnginePhase.GONE}
        return phases == {EnginePhase.ASLEEP}

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
        return [*actions, *self._tend(now_s), *self._accept(), *self._report(now_s)]

    # the target

    def _on_asked(self, target: PublishAsked, now_s: float) -> list[Action]:
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
        if row.phase in (EnginePhase.ASLEEP, EnginePhase.GONE):
            return True
        return self._is_current(row) or row.url in self._failures

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

    def _on_verdict(self, update: _Update, answer: FleetAnswered, now_s: float) -> list[Action]:
        """The router's word on the update's own ask."""
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
        """Another publisher is further, if this is a version: said once for each target."""
        assert self._target
        if policy_version < 0 or self._yielded_for is self._target:
            return []
        self._yielded_for = self._target
        return [Superseded(self._target.policy_version, policy_version)]

    def _reconcile(self, table: tuple[EngineRow, ...]) -> None:
        """Begin an update of every engine that needs one, forget those that need none."""
        assert self._target
        self._woken.look(table, self._verified)
        self._forget_restarted(table)
        for row in table:
            is_out = row.phase in (EnginePhase.ASLEEP, EnginePhase.GONE)
            is_new = row.policy_version == self._target.policy_version
            is_out = is_out or (is_new and self._woken.is_waking(row))
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

    def _forget_restarted(self, table: tuple[EngineRow, ...]) -> None:
        """Drop proofs about processes that are gone: a new one may compute otherwise."""
        before = self._incarnations
        self._incarnations = {row.url: row.incarnation or before.get(row.url, "") for row in table}
        for url in [*self._proofs]:
            now = self._incarnations.get(url)
            # Before the router has seen the process its name is empty.
            if now is None or (before.get(url) or now) != now:
                del self._proofs[url]
                self._doubted.discard(url)

    # the engines' answers

    def _on_called(self, called: EngineCalled, now_s: float) -> list[Action]:
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

    def _drains_on(self, update: _Update, called: EngineCalled, now_s: float) -> bool:
        until_s = update.drained_from_s + self._settings.lease_s * self._settings.drain_leases
        # What follows wants a lease that the router has confirmed.
        return update.ask is not None or (called.num_requests > 0 and now_s < until_s)

    def _judge(self, called: EngineCalled, target: PublishAsked) -> tuple[str, list[Action]]:
        """Return why the engine does not hold the target's weights, or '' and what to report."""
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
        """Whether another engine serves, or is on its way to the target and has not failed."""
        others = [row for row in self._table or () if row.url not in (url, *self._failures)]
        return any(row.phase is EnginePhase.READY or row.url in self._updates for row in others)

    # steps

    def _begin(self, update: _Update, now_s: float) -> list[Action]:
        update.failure = update.shortage = ""
        update.begun_s = now_s
        update.phase = UpdatePhase.BEGINNING
        return self._lease(update, now_s)

    def _renew(self, update: _Update, now_s: float) -> list[Action]:
        """Ask for another lease where the one it has gets short, unless that is asked for."""
        left_from_s = update.begun_s + self._settings.lease_s * self._settings.renew_share
        if update.ask or now_s < left_from_s:
            return []
        update.renewed_s = now_s
        return self._lease(update, now_s)

    def _lease(self, update: _Update, now_s: float) -> list[Action]:
        """To bring the engine to what is the target now."""
        assert self._target
        update.target = self._target
        policy_version = update.target.policy_version
        settings = self._settings
        ask = BeginUpdate(
            self._next_ask(), update.url, policy_version, settings.lease_s, settings.name
        )
        return self._ask(update, ask, now_s)

    def _call(self, update: _Update, phase: UpdatePhase, now_s: float) -> list[Action]:
        self._num_calls += 1
        update.phase, update.serial = phase, self._num_calls
        after_s = self._settings.look_s if phase is UpdatePhase.DRAINING else 0.0
        return [CallEngine(update.url, update.serial, phase, update.target, after_s)]

    def _undo(self, update: _Update, failure: str, now_s: float) -> list[Action]:
        update.failure = failure
        update.ask = None
        return self._call(update, UpdatePhase.UNDOING, now_s)

    def _finish(self, update: _Update, phase: UpdatePhase, now_s: float) -> list[Action]:
        """Give the engine back, updated (FINISHING) or not (FAILING)."""
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

    def _wait(self, update: _Update, now_s: float) -> None:
        """Try again later; at once where what failed was on its way to an older target."""
        is_target = update.target is self._target
        if update.failure and is_target:
            self._failures[update.url] = update.failure
        update.phase = UpdatePhase.WAITING
        update.serial = 0
        update.ask = None
        update.not_before_s = update.begun_s + self._settings.retry_s if is_target else now_s

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
            actions.append(Send(ROUTER, ReadFleet(self._next_ask(), self._target.policy_version)))
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
        if is_late and update.phase in NEXT_PHASE and update.shortage:
            # The engine is not given back as failed: the next lease follows this one.
            update.failure = f"{update.phase.value}: {update.shortage}"
            self._wait(update, now_s)
            return []
        if is_late and update.phase in NEXT_PHASE:
            return self._undo(update, f"{update.phase.value}: took too long", now_s)
        if update.ask and now_s >= update.sent_s + self._settings.repeat_s:
            return self._ask(update, update.ask, now_s)
        return []
