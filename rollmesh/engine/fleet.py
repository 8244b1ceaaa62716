"""The fleet table: which engines exist, which weights they serve, and which may be used.

    JOINING --good probe of a trusted, current version--> READY --BeginUpdate--> UPDATING
    JOINING, FENCED --BeginUpdate--> UPDATING --FinishUpdate ok--> READY, not ok--> FENCED
    UPDATING --lease lapsed, holder left--> JOINING (continued, probed) <--Wake-- ASLEEP
    any but UPDATING --Sleep--> ASLEEP;  READY --faults or failed probes--> FENCED
    ASLEEP --Sleep, from any process--> ASLEEP, with a new lease
    FENCED --cool-down--> JOINING
    READY --Fence, beside another READY one--> FENCED, until an update succeeds
    READY --restart or unknown weights--> JOINING;  any --Remove--> GONE --a while--> forgotten
    READY, JOINING --Drop, draining--> DRAINING --its requests have ended, it is dead--> GONE

- A pure state machine. Engines join by the configuration, by an operator's Add, or by a message
  from an allowed host. What an operator dropped stays out until it is added.
- Only leased requests change weights or sleep. A lapsed update lease ends in an engine that is
  continued and probed, or fenced, so that a publisher killed during an update blocks nothing.
- Only a Wake ends a sleep: after a lapsed lease the owner of the GPUs is unknown.
- A version counts only if its publisher verified it or a fresh process started with it. Of two
  running publishers the one with the newer version wins.
- A Fence never removes the last engine; a probe that failed for a local shortage changes no phase.
"""

import msgspec

from rollmesh.core.addresses import why_no_engine_url
from rollmesh.core.types import UNVERSIONED
from rollmesh.engine.members import ActivePublisher, FleetMember, Trust, expire_sleep, put_to_sleep
from rollmesh.engine.roster import FleetChanges, Roster
from rollmesh.engine.table_sync import TableFeed
from rollmesh.wire.fleet import (
    AddEngine,
    AskTable,
    BeginUpdate,
    DropEngine,
    EngineFaulted,
    EngineOrigin,
    EnginePhase,
    FenceEngine,
    FinishUpdate,
    FleetAnswered,
    FleetAsk,
    FleetChanged,
    JoinEngine,
    PublisherLeft,
    ReadFleet,
    RemoveEngine,
    SleepEngine,
    TableMessage,
    WakeEngine,
)
from rollmesh.wire.machine import Received, Send, Ticked

COUNTS = "gets no new requests; its running ones are counted by the next probe"
"""Detail of a draining engine whose load is still that of a probe before the drain."""
DRAINS = "gets no new requests, and is removed when its running ones have ended"


class FleetSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Intervals and limits of the fleet."""

    probe_s: float = 1.0
    """Interval of probes, which also read the load, of a READY engine."""
    join_probe_s: float = 0.25
    """Interval of probes of an engine that is not READY yet."""
    answer_s: float = 3.0
    """A probe without an answer after this time has failed."""
    max_failed_probes: int = 2
    """Consecutive failed probes that fence a READY engine. A hung one is abandoned after about five
    seconds, which is longer than the longest step of a busy one."""
    max_faults: int = 3
    """Faults reported by workers within `fault_window_s` that fence a READY engine."""
    fault_window_s: float = 5.0
    fence_s: float = 1.0
    """Time after which a fenced engine is tried again."""
    push_s: float = 1.0
    """Interval of sending loads, and changes that can wait, to the workers; changes of phase or
    version are sent at once."""
    settle_s: float = 0.02
    """Interval of messages during a burst of changes, such as a publication to all engines."""
    digest_s: float = 10.0
    """Interval of sending a checksum of the table, and all loads."""
    gone_s: float = 10.0
    """Time for which a removed engine is shown as GONE."""
    drain_settle_s: float = 1.0
    """Delay before the first probe of a draining engine, so that requests sent before their
    workers knew of the drain have arrived."""
    num_idle_probes: int = 2
    """Consecutive probes without requests after which a draining engine is removed."""
    publisher_grace_s: float = 10.0
    """A publisher without a request for this long is gone; each reads the table every second."""
    believes_engines: bool = False
    """Whether the weights that engines report count, for a mesh without a publisher such as a
    stand-alone gateway: weights without a version are served, and a paused engine stays paused. The
    table names a publisher only while one holds a lease or is active."""
    allow_hosts: tuple[str, ...] = ()
    """Hosts or networks from which engines may join by a message. Engines of the configuration join
    by a request without a route, which no peer can send."""
    least_version: int = UNVERSIONED
    """An engine with older weights waits for the publisher."""


class EngineProbed(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to a ProbeEngine or ContinueEngine; each is answered once."""

    url: str
    serial: int
    """Serial of the request."""
    ok: bool
    incarnation: str = ""
    policy_version: int = UNVERSIONED
    num_running: int = 0
    num_waiting: int = 0
    max_running: int = 0
    adapter: str = ""
    """The engine's adapter of that version, if any."""
    detail: str = ""
    """Why the probe failed, in one line."""
    is_local: bool = False
    """Whether the probe failed because no connection could be opened here."""


class ProbeEngine(msgspec.Struct, frozen=True):
    """Read identity, weights and load of `url` (never by /health, which generates)."""

    url: str
    serial: int


class ContinueEngine(msgspec.Struct, frozen=True):
    """Resume generation at `url`, which a lost lease holder may have left paused; then probe it."""

    url: str
    serial: int


class PublishTable(msgspec.Struct, frozen=True):
    """Send `message` to every worker."""

    message: TableMessage


CONFIGURATION = b""
"""Route of a request by the process itself, for an engine of its configuration."""
_EXPECTED = "it waits for a publisher (`rollmesh router --fixed-weights` expects none)"

Event = Received | EngineProbed | Ticked
Action = Send | ProbeEngine | ContinueEngine | PublishTable


class Fleet:
    """The state machine of all engines; `table()` is its read-only view."""

    def __init__(
        self, settings: FleetSettings | None = None, changes: FleetChanges | None = None
    ) -> None:
        """`changes` are those that the operator made at an earlier router of this mesh."""
        self._settings, changes = settings or FleetSettings(), changes or FleetChanges()
        self._engines: dict[str, FleetMember] = {}
        self._roster = Roster(self._settings.allow_hosts, changes)
        grace_s = self._settings.publisher_grace_s
        self._publisher = ActivePublisher(grace_s, self._settings.least_version)
        self._has_publisher = not self._settings.believes_engines
        self._serial = 0
        settings = self._settings
        self._feed = TableFeed(settings.push_s, settings.digest_s, settings.settle_s)
        for added in changes.added:
            self._join(added.url, is_verified=added.is_verified)

    @property
    def changes(self) -> FleetChanges:
        """The operator's changes so far; a change replaces them."""
        return self._roster.changes

    def table(self) -> FleetChanged:
        """Return all rows under the current epoch, in the order in which the engines joined."""
        rows = tuple(each.row for each in self._engines.values())
        return FleetChanged(
            self._feed.epoch, rows, self._publisher.verified_version, self._has_publisher
        )

    def origins(self) -> tuple[EngineOrigin, ...]:
        """Return how each engine became one of the fleet, in the order of the table."""
        return tuple(map(self._roster.origin, self._engines))

    def policy_version(self) -> int:
        """Return the newest version that any engine serves, UNVERSIONED if none is known."""
        live = (e.row.policy_version for e in self._engines.values() if self._is_live(e))
        return max(live, default=UNVERSIONED)

    def why_none_serves(self) -> str:
        """Return why no engine serves, in a line; '' if one serves, will after a lease, or none is
        known."""
        rows = [
            each.row for each in self._engines.values() if each.row.phase is not EnginePhase.GONE
        ]
        leased = EnginePhase.READY, EnginePhase.UPDATING, EnginePhase.ASLEEP
        if not rows or any(row.phase in leased for row in rows):
            return ""
        more = f", and {len(rows) - 1} more" if len(rows) > 1 else ""
        return f"{rows[0].url} is {rows[0].phase.value}: {rows[0].detail}{more}"

    def step(self, event: Event, now_s: float) -> list[Action]:
        """Handle one event; unknown engines, late probes and foreign messages change nothing."""
        answers: list[Action] = []
        match event:
            case EngineProbed():
                self._on_probed(event, now_s)
            case Received(message=EngineFaulted() as fault):
                self._on_faulted(fault, now_s)
            case Received(route=route, message=PublisherLeft()):
                self._publisher.leave(route)
                for engine in (e for e in self._engines.values() if e.is_updated_by(route)):
                    self._rejoin(engine, "its publisher left", now_s)
            case Received(route=route, message=message) if isinstance(message, FleetAsk):
                answers = [Send(route, self._on_request(route, message, now_s))]
            case Received(route=route, message=AskTable()):
                answers = [Send(route, self.table())]
            case Received(route=route, message=AddEngine() | DropEngine() as change):
                error = self._on_change(change, now_s)
                answers = [Send(route, FleetAnswered(change.ask_id, not error, error, 0, ()))]
        touched = self._touched_by(event)
        actions = self._tend(touched, now_s)
        self._has_publisher = self._knows_publisher(now_s)
        self._feed.look(
            [engine.row for engine in touched if engine.row.url in self._engines],
            self._feed.forgotten(self._engines.keys()),
            self._publisher.verified_version,
            self._has_publisher,
        )
        pushes = map(PublishTable, self._feed.take(now_s))
        return [*pushes, *map(self._complete, answers), *actions]

    def _touched_by(self, event: Event) -> list[FleetMember]:
        """Return the engines to look at: a probe's own, since they are many, else all."""
        if isinstance(event, EngineProbed):
            return [e for e in (self._engines.get(event.url),) if e is not None]
        return list(self._engines.values())

    @property
    def due_s(self) -> float:
        """Time at which workers must be sent changes that the last step kept back."""
        return self._feed.due_s

    def _complete(self, action: Action) -> Action:
        """Add the table, when its epoch is known, to an answer."""
        if isinstance(action, Send) and isinstance(action.message, FleetChanged):
            return Send(action.route, self.table())
        if isinstance(action, Send) and isinstance(action.message, FleetAnswered):
            table = self.table()
            message = msgspec.structs.replace(
                action.message, epoch=table.epoch, engines=table.engines
            )
            return Send(action.route, message)
        return action

    def _knows_publisher(self, now_s: float) -> bool:
        """Whether a publisher numbers the weights: one is expected, has announced a version, is
        updating an engine, or has finished an update and is still running."""
        publisher = self._publisher
        if not self._settings.believes_engines or publisher.is_running(now_s):
            return True
        if publisher.is_announced(now_s):
            return True
        return any(e.row.phase is EnginePhase.UPDATING for e in self._engines.values())

    # the operator's requests

    def _on_change(self, ask: AddEngine | DropEngine, now_s: float) -> str:
        """Add or remove an engine; return why that is refused, else ''. Repetition is harmless."""
        if isinstance(ask, DropEngine):
            return self._on_drop(ask, now_s)
        is_known = self._roster.origin(ask.url) is not EngineOrigin.JOINED
        if not is_known and (why := why_no_engine_url(ask.url)):
            return f"{ask.url[:200]!a}: {why}"
        self._roster.add(ask.url, is_launched=ask.is_launched)
        engine = self._engines.get(ask.url)
        if engine is None or engine.row.phase is EnginePhase.GONE:
            self._join(ask.url, is_verified=ask.is_launched)
        elif engine.is_leaving:
            engine.is_leaving = False
            if engine.row.phase is EnginePhase.DRAINING:
                self._rejoin(engine, "added again", now_s)
        return ""

    def _on_drop(self, ask: DropEngine, now_s: float) -> str:
        engine = self._engines.get(ask.url)
        if engine is None:
            return f"{ask.url} is not in the fleet; `rollmesh engine list` shows its engines"
        if engine.row.phase is EnginePhase.GONE or (engine.is_leaving and ask.drains):
            return ""
        others = (each for each in self._engines.values() if each is not engine)
        is_last = all(e.is_leaving or e.row.phase is EnginePhase.GONE for e in others)
        if is_last and not engine.is_leaving and not ask.force:
            return (
                f"{ask.url} is the last engine: without it all rollouts wait; `--force` removes it"
            )
        if ask.drains:
            engine.is_leaving = True
            self._roster.drain(ask.url)
        else:
            why = "it has ended" if ask.is_launched else "removed by the operator"
            self._remove(engine, why, now_s, is_launched=ask.is_launched)
        return ""

    def _join(self, url: str, *, is_verified: bool = True) -> None:
        """Add an engine, whose weights count only after an update unless they are verified."""
        engine = self._engines[url] = FleetMember(url)
        engine.trusted = Trust.FRESH if is_verified else Trust.BROKEN
        engine.is_leaving = url in self.changes.draining

    def _remove(
        self, engine: FleetMember, detail: str, now_s: float, *, is_launched: bool = False
    ) -> None:
        self._roster.remove(engine.row.url, is_launched=is_launched)
        engine.is_leaving = False
        engine.probe_serial = None
        engine.holder = b""
        engine.set(EnginePhase.GONE, detail)
        engine.until_s = now_s + self._settings.gone_s

    def _let_leave(self, engine: FleetMember, now_s: float) -> None:
        """Drain an engine that is to leave, or remove it if nothing runs there."""
        phase = engine.row.phase
        if phase in (EnginePhase.ASLEEP, EnginePhase.FENCED):
            self._remove(engine, f"removed while {phase.value}", now_s)
        elif phase in (EnginePhase.READY, EnginePhase.JOINING):
            engine.num_idle = engine.num_failed_probes = 0
            engine.probe_serial = None
            engine.next_probe_s = now_s + self._settings.drain_settle_s
            engine.set(EnginePhase.DRAINING, COUNTS)

    def _on_drain_probe(self, engine: FleetMember, now_s: float) -> None:
        engine.set(EnginePhase.DRAINING, DRAINS)
        row = engine.row
        engine.num_idle = 0 if row.num_running or row.num_waiting else engine.num_idle + 1
        engine.next_probe_s = now_s + self._settings.join_probe_s
        if engine.num_idle >= self._settings.num_idle_probes:
            self._remove(engine, "removed, drained", now_s)

    # requests

    def _on_request(self, route: bytes, ask: FleetAsk, now_s: float) -> FleetAnswered:
        """Carry out a request; `step` adds the table to the answer when its epoch is known."""
        publisher = self._publisher
        publisher.seen(route, now_s)
        if isinstance(ask, BeginUpdate) and publisher.is_ahead_of(route, ask.policy_version, now_s):
            by = publisher.published
            error = (
                f"{ask.url}: a publisher that still runs has published version {by}; "
                f"version {ask.policy_version} is too late"
            )
            runs = publisher.refuse(route, now_s)
            return FleetAnswered(ask.ask_id, False, error, 0, (), by if runs else UNVERSIONED)
        error = self._carry_out(route, ask, now_s)
        return FleetAnswered(ask.ask_id, not error, error, 0, ())

    def _carry_out(self, route: bytes, ask: FleetAsk, now_s: float) -> str:
        """Carry out `ask`; return why it is refused, else ''."""
        if isinstance(ask, ReadFleet):
            self._publisher.announce(route, ask.policy_version, now_s)
            return ""
        why = self._on_join(route, ask.url) if isinstance(ask, JoinEngine | SleepEngine) else ""
        engine = self._engines.get(ask.url)
        if why or engine is None or engine.row.phase is EnginePhase.GONE:
            return why or f"{ask.url} is not in the fleet; join it first"
        match ask:
            case BeginUpdate():
                return self._on_begin(engine, route, ask, now_s)
            case FinishUpdate():
                return self._on_finish(engine, route, ask, now_s)
            case SleepEngine():
                return put_to_sleep(engine, route, ask, now_s)
            case WakeEngine():
                return self._on_wake(engine, ask, now_s)
            case FenceEngine():
                return self._on_fence(engine, ask, now_s)
            case RemoveEngine():
                engine.set(EnginePhase.GONE, "removed")
                engine.until_s = now_s + self._settings.gone_s
        return ""

    def _on_join(self, route: bytes, url: str) -> str:
        """Add an engine that is unknown or was removed; return why it may not join, else ''."""
        if route == CONFIGURATION:
            self._roster.configure(url)
        engine = self._engines.get(url)
        if engine is not None and engine.row.phase is not EnginePhase.GONE:
            return ""
        if why := self._roster.why_not(url):
            return why
        self._join(url)
        return ""

    def _on_begin(self, engine: FleetMember, route: bytes, ask: BeginUpdate, now_s: float) -> str:
        if engine.row.phase is EnginePhase.ASLEEP:
            return f"{ask.url} is asleep; wake it first"
        if engine.is_leaving and engine.holder != route:
            return f"{ask.url} is being removed"
        if engine.is_held_by_other(route, ask):
            return f"{ask.url} is being updated by another publisher"
        engine.set(EnginePhase.UPDATING, f"takes policy version {ask.policy_version}")
        engine.holder, engine.taking = route, ask
        engine.until_s = now_s + ask.lease_s
        engine.probe_serial = None
        return ""

    def _on_finish(self, engine: FleetMember, route: bytes, ask: FinishUpdate, now_s: float) -> str:
        row = engine.row
        if row.phase is not EnginePhase.UPDATING or engine.holder != route:
            repeated = row.phase is EnginePhase.READY and row.policy_version == ask.policy_version
            return "" if repeated or not ask.ok else f"the lease on {ask.url} lapsed"
        engine.holder = b""
        engine.faults_s.clear()
        if ask.ok:
            engine.trusted = ask.policy_version
            self._roster.verify(ask.url)
            self._publisher.verified(route, ask.policy_version, now_s)
            engine.set(EnginePhase.READY, "", ask.policy_version, ask.adapter)
            engine.next_probe_s = now_s
            return ""
        engine.trusted = Trust.BROKEN
        engine.is_suspect = True
        self._fence(engine, f"update failed: {ask.detail}", now_s)
        return ""

    def _on_wake(self, engine: FleetMember, ask: WakeEngine, now_s: float) -> str:
        if engine.row.phase is EnginePhase.ASLEEP:
            engine.trusted = ask.policy_version
            self._rejoin(engine, "woken", now_s)
            engine.row = msgspec.structs.replace(
                engine.row, policy_version=ask.policy_version, adapter=ask.adapter
            )
        return ""

    def _on_fence(self, engine: FleetMember, ask: FenceEngine, now_s: float) -> str:
        row = engine.row
        if row.phase is not EnginePhase.READY or row.policy_version != ask.policy_version:
            is_excluded = row.phase in (EnginePhase.FENCED, EnginePhase.JOINING)
            is_repeated = is_excluded and engine.trusted is Trust.BROKEN
            has = f"{row.phase.value} with policy version {row.policy_version}"
            return "" if is_repeated else f"{ask.url} is {has}"
        others = (each for each in self._engines.values() if each is not engine)
        if not any(each.row.phase is EnginePhase.READY for each in others):
            return f"{ask.url} is the last engine that is ready"
        engine.trusted = Trust.BROKEN
        self._fence(engine, ask.detail, now_s)
        return ""

    # reports of engines and workers

    def _on_faulted(self, fault: EngineFaulted, now_s: float) -> None:
        engine = self._engines.get(fault.url)
        if engine is None or engine.row.phase is not EnginePhase.READY:
            return
        if fault.incarnation != engine.row.incarnation:
            return
        window_start_s = now_s - self._settings.fault_window_s
        engine.faults_s = [at for at in engine.faults_s if at > window_start_s] + [now_s]
        engine.next_probe_s = now_s
        if len(engine.faults_s) >= self._settings.max_faults:
            self._fence(engine, f"its requests fail: {fault.detail}", now_s)

    def _on_probed(self, probed: EngineProbed, now_s: float) -> None:
        engine = self._engines.get(probed.url)
        if engine is None or engine.probe_serial != probed.serial:
            return
        engine.probe_serial = None
        if probed.is_local:
            engine.next_probe_s = now_s + self._settings.join_probe_s
            if engine.row.phase is EnginePhase.JOINING:
                engine.set(EnginePhase.JOINING, probed.detail)
            return
        if not probed.ok:
            self._on_failed_probe(engine, probed.detail, now_s)
            return
        engine.num_failed_probes = 0
        engine.is_suspect = False
        is_draining = engine.row.phase is EnginePhase.DRAINING
        if is_draining and engine.row.incarnation not in ("", probed.incarnation):
            self._remove(engine, "removed: it was restarted while it drained", now_s)
            return
        if probed.incarnation != engine.row.incarnation:
            self._on_incarnation(engine)
        engine.row = msgspec.structs.replace(
            engine.row,
            incarnation=probed.incarnation,
            num_running=probed.num_running,
            num_waiting=probed.num_waiting,
            max_running=probed.max_running,
        )
        if is_draining:
            self._on_drain_probe(engine, now_s)
            return
        if engine.trusted is Trust.FRESH or self._settings.believes_engines:
            engine.trusted = probed.policy_version
            engine.row = msgspec.structs.replace(engine.row, adapter=probed.adapter)
        elif probed.adapter != engine.row.adapter:
            engine.trusted = Trust.BROKEN
        self._judge(engine, probed.policy_version, now_s)

    def _on_incarnation(self, engine: FleetMember) -> None:
        is_restart = engine.row.incarnation != ""
        if is_restart:
            engine.set(EnginePhase.JOINING, "was restarted", adapter="")
        if is_restart or engine.trusted is not Trust.BROKEN:
            engine.trusted = Trust.FRESH
        engine.faults_s.clear()

    def _judge(self, engine: FleetMember, served: int, now_s: float) -> None:
        """Set the phase by the weights that a responding engine reports."""
        is_ready = engine.row.phase is EnginePhase.READY
        # A READY engine with older weights keeps serving until its own update begins.
        waits_for_newest = not (is_ready or self._settings.believes_engines)
        if served == UNVERSIONED and not self._settings.believes_engines:
            engine.set(EnginePhase.JOINING, f"its weights have no version yet; {_EXPECTED}", served)
        elif served != engine.trusted:
            why = f"no publisher verified its weights {served}; {_EXPECTED}"
            engine.set(EnginePhase.JOINING, why, served)
        elif waits_for_newest and served < self._newest(now_s):
            detail = f"serves version {served}, the fleet is at {self._newest(now_s)}"
            engine.set(EnginePhase.JOINING, detail, served)
        else:
            engine.set(EnginePhase.READY, "", served)
        is_ready = engine.row.phase is EnginePhase.READY
        wait_s = self._settings.probe_s if is_ready else self._settings.join_probe_s
        engine.next_probe_s = now_s + wait_s

    def _newest(self, now_s: float) -> int:
        """Return the newest version that an engine serves or the publisher has announced."""
        return max(self.policy_version(), self._publisher.newest(now_s))

    def _on_failed_probe(self, engine: FleetMember, detail: str, now_s: float) -> None:
        engine.num_failed_probes += 1
        engine.next_probe_s = now_s + self._settings.join_probe_s
        phase = engine.row.phase
        if phase is EnginePhase.JOINING:
            engine.set(phase, detail)
        too_many = engine.num_failed_probes >= self._settings.max_failed_probes
        if phase is EnginePhase.READY and too_many:
            self._fence(engine, f"does not answer: {detail}", now_s)
        elif phase is EnginePhase.DRAINING and too_many:
            self._remove(engine, f"removed: it does not answer: {detail}", now_s)

    # time

    def _tend(self, engines: list[FleetMember], now_s: float) -> list[Action]:
        actions: list[Action] = []
        for engine in engines:
            if engine.is_leaving:
                self._let_leave(engine, now_s)
            phase = engine.row.phase
            if phase is EnginePhase.GONE:
                if now_s >= engine.until_s:
                    del self._engines[engine.row.url]
                continue
            if phase is EnginePhase.ASLEEP:
                expire_sleep(engine, now_s)
                continue
            if phase is EnginePhase.UPDATING:
                if now_s < engine.until_s:
                    continue
                self._rejoin(engine, f"the lease lapsed while {phase.value}", now_s)
            elif phase is EnginePhase.FENCED and now_s >= engine.next_probe_s:
                self._rejoin(engine, engine.row.detail, now_s)
            actions += self._probe(engine, now_s)
        return actions

    def _probe(self, engine: FleetMember, now_s: float) -> list[Action]:
        if engine.probe_serial is not None:
            if now_s < engine.probe_sent_s + self._settings.answer_s:
                return []
            engine.probe_serial = None
            self._on_failed_probe(engine, "a probe went unanswered", now_s)
        if now_s < engine.next_probe_s or engine.row.phase is EnginePhase.FENCED:
            return []
        self._serial += 1
        engine.probe_serial = self._serial
        engine.probe_sent_s = now_s
        ask = ContinueEngine if engine.is_suspect else ProbeEngine
        return [ask(engine.row.url, self._serial)]

    def _rejoin(self, engine: FleetMember, detail: str, now_s: float) -> None:
        engine.is_suspect = not self._settings.believes_engines
        engine.holder = b""
        engine.next_probe_s = now_s
        engine.probe_serial = None
        engine.set(EnginePhase.JOINING, detail)

    def _fence(self, engine: FleetMember, detail: str, now_s: float) -> None:
        engine.faults_s.clear()
        engine.num_failed_probes = 0
        engine.probe_serial = None
        engine.next_probe_s = now_s + self._settings.fence_s
        engine.set(EnginePhase.FENCED, detail)

    def _is_live(self, engine: FleetMember) -> bool:
        return engine.row.phase in (EnginePhase.READY, EnginePhase.UPDATING)
