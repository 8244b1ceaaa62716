"""The fleet table: which engines there are, what weights they serve, and who may use them.

    JOINING --good probe of a trusted, current version--> READY --BeginUpdate--> UPDATING
    JOINING, FENCED --BeginUpdate--> UPDATING --FinishUpdate ok--> READY, not ok--> FENCED
    UPDATING --lease lapsed, holder left--> JOINING (continued, probed) <--Wake-- ASLEEP
    any but UPDATING --Sleep--> ASLEEP (sleeping.py);  READY --faults or failed probes--> FENCED
    FENCED --cool-down--> JOINING
    READY --Fence, beside another READY one--> FENCED, until an update succeeds
    READY --restart or unknown weights--> JOINING;  any --Remove--> GONE --a while--> forgotten

- An engine joins from the configuration, or by a message if its host is in the allow-list.
- Only a leased ask changes weights or sleep. An update's lapsed lease ends in an engine that is
  continued and probed, or fenced, so that a publisher that is killed during an update blocks
  nothing. The next process of its run takes over at once.
- A version counts only if its publisher verified it or a fresh process came up with it.
- Of two running publishers the one with the newer version wins.
- A request to fence never removes the last engine.
- A probe that fails for a shortage of this process changes no phase.

Pure; driven by the router's fleet shell and by the simulator.
"""

import msgspec

from rollmesh.core.engine_url import is_allowed_url, why_no_engine_url
from rollmesh.engine.incumbent import Incumbent
from rollmesh.engine.member import UNVERSIONED, Member, Trust
from rollmesh.engine.sleeping import put_to_sleep, sleep_on
from rollmesh.wire.fleet import (
    BeginUpdate,
    EngineFaulted,
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
    WakeEngine,
)
from rollmesh.wire.machine import Received, Send, Ticked


class FleetSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How patient the fleet is."""

    probe_s: float = 1.0
    """A READY engine is probed this often; its load comes with it."""
    join_probe_s: float = 0.25
    """An engine that is not READY yet is probed this often."""
    answer_s: float = 3.0
    """A probe that the shell has not answered by then has failed."""
    max_failed_probes: int = 2
    """So many in a row fence a READY engine: a hung one is left after five seconds or so, which is
    longer than the longest step of a busy one takes."""
    max_faults: int = 3
    """So many reports by workers within `fault_window_s` fence a READY engine."""
    fault_window_s: float = 5.0
    fence_s: float = 1.0
    """A fenced engine is tried again after this time."""
    push_s: float = 1.0
    """The table goes to the workers this often, and at once when a phase or version changes."""
    gone_s: float = 10.0
    """A removed engine is shown as GONE so long, then forgotten."""
    publisher_grace_s: float = 10.0
    """A publisher that has not asked for so long is gone; each reads the table every second."""
    believes_engines: bool = False
    """No publisher is expected here, as in a stand-alone gateway: what an engine reports that it
    serves counts, weights without a version are served, and an engine that is paused is left so.
    The table names a publisher only while one holds a lease or is heard."""
    allow_hosts: tuple[str, ...] = ()
    """Hosts or networks from which engines join by a message; those of the configuration
    join by an ask without a route, which no peer can send."""
    least_version: int = UNVERSIONED
    """An engine with older weights waits for the publisher, as it does for what that verified."""


class EngineProbed(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to ProbeEngine or ContinueEngine; each is answered once."""

    url: str
    serial: int
    """Of the ask."""
    ok: bool
    incarnation: str = ""
    policy_version: int = UNVERSIONED
    num_running: int = 0
    num_waiting: int = 0
    max_running: int = 0
    adapter: str = ""
    """Of that version, where the engine has one."""
    detail: str = ""
    """Why it is not ok, in one line."""
    is_local: bool = False
    """It is not ok since no connection could be opened here, by no fault of the engine."""


class ProbeEngine(msgspec.Struct, frozen=True):
    """Ask `url` who it is and how loaded (never by /health, which generates)."""

    url: str
    serial: int


class ContinueEngine(msgspec.Struct, frozen=True):
    """Resume generation at `url`, which a vanished holder may have left paused; then probe it."""

    url: str
    serial: int


class PublishTable(msgspec.Struct, frozen=True):
    """Push `fleet.table()` to every worker."""


CONFIGURATION = b""
"""The route of an ask by the process itself, for an engine of its configuration."""
_NOT_OURS = "not an engine of this mesh; name it in engine.urls, or its host in engine.allow_hosts"
_EXPECTED = "it waits for a publisher (`rollmesh router --fixed-weights` expects none)"

Event = Received | EngineProbed | Ticked
Action = Send | ProbeEngine | ContinueEngine | PublishTable


class Fleet:
    """See the module. `table()` is the read-only view of it."""

    def __init__(self, settings: FleetSettings | None = None) -> None:
        self._settings = settings or FleetSettings()
        self._engines: dict[str, Member] = {}
        self._configured: set[str] = set()
        grace_s = self._settings.publisher_grace_s
        self._incumbent = Incumbent(grace_s, self._settings.least_version)
        self._has_publisher = not self._settings.believes_engines
        self._epoch = 0
        self._serial = 0
        self._pushed_s = float("-inf")

    def table(self) -> FleetChanged:
        """All rows, in the order in which the engines joined, under the current epoch."""
        rows = tuple(each.row for each in self._engines.values())
        return FleetChanged(self._epoch, rows, self._incumbent.told, self._has_publisher)

    def policy_version(self) -> int:
        """The newest version that any engine serves, UNVERSIONED if none is known."""
        live = (e.row.policy_version for e in self._engines.values() if self._is_live(e))
        return max(live, default=UNVERSIONED)

    def why_none_serves(self) -> str:
        """Why no engine serves, in a line; '' where one serves, will after a lease,
        or none is known."""
        rows = [
            each.row for each in self._engines.values() if each.row.phase is not EnginePhase.GONE
        ]
        leased = EnginePhase.READY, EnginePhase.UPDATING, EnginePhase.ASLEEP
        if not rows or any(row.phase in leased for row in rows):
            return ""
        more = f", and {len(rows) - 1} more" if len(rows) > 1 else ""
        return f"{rows[0].url} is {rows[0].phase.value}: {rows[0].detail}{more}"

    def step(self, event: Event, now_s: float) -> list[Action]:
        """Take one event; unknown engines, late probes and foreign messages change nothing."""
        before = self.table()
        answers: list[Action] = []
        match event:
            case EngineProbed():
                self._on_probed(event, now_s)
            case Received(message=EngineFaulted() as fault):
                self._on_faulted(fault, now_s)
            case Received(route=route, message=PublisherLeft()):
                self._incumbent.leave(route)
                for engine in (e for e in self._engines.values() if e.is_updated_by(route)):
                    self._rejoin(engine, "its publisher left", now_s)
            case Received(route=route, message=message) if isinstance(message, FleetAsk):
                answers = [Send(route, self._on_asked(route, message, now_s))]
        actions = self._tend(now_s)
        self._has_publisher = self._knows_publisher(now_s)
        return [*self._push(before, now_s), *map(self._complete, answers), *actions]

    def _complete(self, action: Action) -> Action:
        if isinstance(action, Send) and isinstance(action.message, FleetAnswered):
            table = self.table()
            message = msgspec.structs.replace(
                action.message, epoch=table.epoch, engines=table.engines
            )
            return Send(action.route, message)
        return action

    def _knows_publisher(self, now_s: float) -> bool:
        """Whether weights are numbered by a publisher: one is expected, has announced a version, is
        updating an engine, or has finished an update and still runs."""
        incumbent = self._incumbent
        if not self._settings.believes_engines or incumbent.is_running(now_s):
            return True
        if incumbent.is_announced(now_s):
            return True
        return any(e.row.phase is EnginePhase.UPDATING for e in self._engines.values())

    def _push(self, before: FleetChanged, now_s: float) -> list[Action]:
        after = self.table()
        if after != before:
            self._epoch += 1
        urgent = _news_of(before) != _news_of(after)
        if not urgent and now_s < self._pushed_s + self._settings.push_s:
            return []
        self._pushed_s = now_s
        return [PublishTable()]

    # what clients of the table ask

    def _on_asked(self, route: bytes, ask: FleetAsk, now_s: float) -> FleetAnswered:
        """The answer, but for the table: its epoch is known when all of the step is done."""
        incumbent = self._incumbent
        incumbent.hear(route, now_s)
        if isinstance(ask, BeginUpdate) and incumbent.is_ahead_of(route, ask.policy_version, now_s):
            by = incumbent.published
            error = (
                f"{ask.url}: a publisher that still runs has published version {by}; "
                f"version {ask.policy_version} comes too late"
            )
            runs = incumbent.keep_out(route, now_s)
            return FleetAnswered(ask.ask_id, False, error, 0, (), by if runs else UNVERSIONED)
        error = self._on_ask(route, ask, now_s)
        return FleetAnswered(ask.ask_id, not error, error, 0, ())

    def _on_ask(self, route: bytes, ask: FleetAsk, now_s: float) -> str:
        """Carry out `ask`; the reason where it is refused, else ''."""
        if isinstance(ask, ReadFleet):
            self._incumbent.announce(route, ask.policy_version, now_s)
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
        """Add an engine that is unknown or was removed; the reason where it may not join."""
        if route == CONFIGURATION:
            self._configured.add(url)
        engine = self._engines.get(url)
        if engine is not None and engine.row.phase is not EnginePhase.GONE:
            return ""
        if url not in self._configured:
            if why := why_no_engine_url(url):
                return f"{url[:200]!a}: {why}"
            if not is_allowed_url(url, self._settings.allow_hosts):
                return f"{url}: {_NOT_OURS}"
        self._engines[url] = Member(url)
        return ""

    def _on_begin(self, engine: Member, route: bytes, ask: BeginUpdate, now_s: float) -> str:
        if engine.row.phase is EnginePhase.ASLEEP:
            return f"{ask.url} is asleep; wake it first"
        if engine.is_held_from(route, ask):
            return f"{ask.url} is being updated by another publisher"
        engine.set(EnginePhase.UPDATING, f"takes policy version {ask.policy_version}")
        engine.holder, engine.taking = route, ask
        engine.until_s = now_s + ask.lease_s
        engine.probe_serial = None
        return ""

    def _on_finish(self, engine: Member, route: bytes, ask: FinishUpdate, now_s: float) -> str:
        row = engine.row
        if row.phase is not EnginePhase.UPDATING or engine.holder != route:
            repeated = row.phase is EnginePhase.READY and row.policy_version == ask.policy_version
            return "" if repeated or not ask.ok else f"the lease on {ask.url} lapsed"
        engine.holder = b""
        engine.faults_s.clear()
        if ask.ok:
            engine.trusted = ask.policy_version
            self._incumbent.verified(route, ask.policy_version, now_s)
            engine.set(EnginePhase.READY, "", ask.policy_version, ask.adapter)
            engine.next_probe_s = now_s
            return ""
        engine.trusted = Trust.BROKEN
        engine.is_suspect = True
        self._fence(engine, f"update failed: {ask.detail}", now_s)
        return ""

    def _on_wake(self, engine: Member, ask: WakeEngine, now_s: float) -> str:
        if engine.row.phase is EnginePhase.ASLEEP:
            engine.trusted = ask.policy_version
            self._rejoin(engine, "woken", now_s)
            engine.row = msgspec.structs.replace(
                engine.row, policy_version=ask.policy_version, adapter=ask.adapter
            )
        return ""

    def _on_fence(self, engine: Member, ask: FenceEngine, now_s: float) -> str:
        row = engine.row
        if row.phase is not EnginePhase.READY or row.policy_version != ask.policy_version:
            is_kept_out = row.phase in (EnginePhase.FENCED, EnginePhase.JOINING)
            is_repeated = is_kept_out and engine.trusted is Trust.BROKEN
            has = f"{row.phase.value} with policy version {row.policy_version}"
            return "" if is_repeated else f"{ask.url} is {has}"
        others = (each for each in self._engines.values() if each is not engine)
        if not any(each.row.phase is EnginePhase.READY for each in others):
            return f"{ask.url} is the last engine that is ready"
        engine.trusted = Trust.BROKEN
        self._fence(engine, ask.detail, now_s)
        return ""

    # what engines and workers report

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
        if probed.incarnation != engine.row.incarnation:
            self._on_incarnation(engine)
        engine.row = msgspec.structs.replace(
            engine.row,
            incarnation=probed.incarnation,
            num_running=probed.num_running,
            num_waiting=probed.num_waiting,
            max_running=probed.max_running,
        )
        if engine.trusted is Trust.FRESH or self._settings.believes_engines:
            engine.trusted = probed.policy_version
            engine.row = msgspec.structs.replace(engine.row, adapter=probed.adapter)
        elif probed.adapter != engine.row.adapter:
            engine.trusted = Trust.BROKEN
        self._judge(engine, probed.policy_version, now_s)

    def _on_incarnation(self, engine: Member) -> None:
        is_restart = engine.row.incarnation != ""
        if is_restart:
            engine.set(EnginePhase.JOINING, "was restarted", adapter="")
        if is_restart or engine.trusted is not Trust.BROKEN:
            engine.trusted = Trust.FRESH
        engine.faults_s.clear()

    def _judge(self, engine: Member, served: int, now_s: float) -> None:
        """Decide by the weights that an answering engine says it serves."""
        newest = max(self.policy_version(), self._incumbent.newest(now_s))
        is_ready = engine.row.phase is EnginePhase.READY
        if served == UNVERSIONED and not self._settings.believes_engines:
            engine.set(EnginePhase.JOINING, f"its weights have no version yet; {_EXPECTED}", served)
        elif served != engine.trusted:
            why = f"no publisher verified its weights {served}; {_EXPECTED}"
            engine.set(EnginePhase.JOINING, why, served)
        elif served < newest and not is_ready and not self._settings.believes_engines:
            detail = f"serves version {served}, the fleet is at {newest}"
            engine.set(EnginePhase.JOINING, detail, served)
        else:
            # A READY engine that is behind serves on until its own update begins.
            engine.set(EnginePhase.READY, "", served)
        is_ready = engine.row.phase is EnginePhase.READY
        wait_s = self._settings.probe_s if is_ready else self._settings.join_probe_s
        engine.next_probe_s = now_s + wait_s

    def _on_failed_probe(self, engine: Member, detail: str, now_s: float) -> None:
        engine.num_failed_probes += 1
        engine.next_probe_s = now_s + self._settings.join_probe_s
        phase = engine.row.phase
        if phase is EnginePhase.JOINING:
            engine.set(phase, detail)
        too_many = engine.num_failed_probes >= self._settings.max_failed_probes
        if phase is EnginePhase.READY and too_many:
            self._fence(engine, f"does not answer: {detail}", now_s)

    # what time brings

    def _tend(self, now_s: float) -> list[Action]:
        actions: list[Action] = []
        for url, engine in list(self._engines.items()):
            phase = engine.row.phase
            if phase is EnginePhase.GONE:
                if now_s >= engine.until_s:
                    del self._engines[url]
                continue
            if phase is EnginePhase.ASLEEP:
                sleep_on(engine, now_s)
                continue
            if phase is EnginePhase.UPDATING:
                if now_s < engine.until_s:
                    continue
                self._rejoin(engine, f"the lease lapsed while {phase.value}", now_s)
            elif phase is EnginePhase.FENCED and now_s >= engine.next_probe_s:
                self._rejoin(engine, engine.row.detail, now_s)
            actions += self._probe(engine, now_s)
        return actions

    def _probe(self, engine: Member, now_s: float) -> list[Action]:
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

    def _rejoin(self, engine: Member, detail: str, now_s: float) -> None:
        engine.is_suspect = not self._settings.believes_engines
        engine.holder = b""
        engine.next_probe_s = now_s
        engine.probe_serial = None
        engine.set(EnginePhase.JOINING, detail)

    def _fence(self, engine: Member, detail: str, now_s: float) -> None:
        engine.faults_s.clear()
        engine.num_failed_probes = 0
        engine.probe_serial = None
        engine.next_probe_s = now_s + self._settings.fence_s
        engine.set(EnginePhase.FENCED, detail)

    def _is_live(self, engine: Member) -> bool:
        return engine.row.phase in (EnginePhase.READY, EnginePhase.UPDATING)


def _news_of(table: FleetChanged) -> tuple[object, ...]:
    """The parts of a table whose changes workers get at once."""
    rows = [(row.url, row.phase, row.policy_version) for row in table.engines]
    return (table.has_publisher, rows)
