"""A worker's copy of the fleet table, and its choice of an engine for each leg.

Invariants: an older table of the same router never replaces a newer one; only READY engines with
the wanted weights or newer are chosen, and where no publisher numbers the weights the newest READY
one if there are none such; a session stays with its engine, where its prefix is cached,
until that one no longer serves or has been far busier than another for several tables in a row;
between two tables only a share of its sessions move, so that workers do not all run to the idle
engine at once; the memory of who stays where is bounded. Driven by the worker, which hands it each
FleetChanged, and by legs.py, which chooses and counts.
"""

from collections import OrderedDict
from collections.abc import Callable, Collection

from rollmesh.engine.member import UNVERSIONED
from rollmesh.wire.fleet import EnginePhase, EngineRow, FleetChanged

MAX_STICKY_SESSIONS = 16_384
"""Sessions whose engine is remembered; the longest unused is forgotten first."""
LOPSIDED_FACTOR = 2
LOPSIDED_MARGIN = 4
"""An engine is overfull with more than FACTOR times the requests of the least loaded, and MARGIN:
a session that moves pays a prefill of all its tokens, and must not want to move back."""
LOPSIDED_TABLES = 3
"""For so many tables in a row (they come each second) before sessions leave it."""
MOVING_SHARE = 8
"""One in so many of its requests may move before the next table."""


class _Load:
    """How busy one engine is, as far as this worker can know."""

    def __init__(self) -> None:
        self.num_own = 0
        """Legs of this process that run there."""
        self.num_queued = 0
        """Generations of this process that wait for a free place there."""
        self.num_others = 0
        """Pushed with the table, without our own at that time."""
        self.num_overfull = 0
        """Tables in a row that showed it overfull."""
        self.num_may_move = 0

    @property
    def total(self) -> int:
        return self.num_own + self.num_queued + self.num_others

    def judge(self, least: int) -> None:
        """A new table came, whose least loaded engine has `least` requests."""
        is_overfull = self.total > LOPSIDED_FACTOR * least + LOPSIDED_MARGIN
        self.num_overfull = self.num_overfull + 1 if is_overfull else 0
        lasts = self.num_overfull >= LOPSIDED_TABLES
        self.num_may_move = max(1, self.num_own // MOVING_SHARE) if lasts else 0


class FleetView:
    """See the module. `listeners` are called after each change of the table."""

    def __init__(self) -> None:
        self.listeners: list[Callable[[], None]] = []
        self._rows: dict[str, EngineRow] = {}
        self._published = UNVERSIONED
        self.has_publisher = True
        """Whether the wanted version binds; see FleetChanged."""
        self._router = ""
        self._epoch = -1
        self._loads: dict[str, _Load] = {}
        self._sticky: OrderedDict[str, str] = OrderedDict()

    def update(self, table: FleetChanged, router: str) -> None:
        """Take `table` from the router of incarnation `router`, unless a newer one is known."""
        if router == self._router and table.epoch <= self._epoch:
            if table.epoch == self._epoch:
                # Nothing there has changed, which is also news of how lopsided it is.
                self._judge()
            return
        self._router, self._epoch = router, table.epoch
        self._rows = {row.url: row for row in table.engines}
        self._published, self.has_publisher = table.published, table.has_publisher
        for row in table.engines:
            load = self._loads.setdefault(row.url, _Load())
            load.num_others = max(0, row.num_running + row.num_waiting - load.num_own)
        for url in self._loads.keys() - self._rows.keys():
            if not self._loads[url].num_own and not self._loads[url].num_queued:
                del self._loads[url]
        self._judge()
        for listener in self.listeners:
            listener()

    def choose(
        self, session_key: str, min_policy_version: int, avoid: Collection[str] = ()
    ) -> EngineRow | None:
        """The session's own engine, else the least loaded; None if none is fit.

        Without a publisher the version is a preference: where no READY engine has it, the newest
        is fit. Engines in `avoid` are taken only where there is no other.
        """
        home = self._rows.get(self._sticky.get(session_key, ""))
        if home is None or home.url in avoid or not self._is_fit(home, min_policy_version):
            home = None
        if home is None or self._loads[home.url].num_may_move:
            fit = self._fit(min_policy_version)
            if avoid:
                fit = [row for row in fit if row.url not in avoid] or fit
            if not fit:
                return None
            home = self._settle(home, fit)
            self._sticky[session_key] = home.url
            if len(self._sticky) > MAX_STICKY_SESSIONS:
                self._sticky.popitem(last=False)
        self._sticky.move_to_end(session_key)
        return home

    def find(self, url: str) -> EngineRow | None:
        """The row of one engine."""
        return self._rows.get(url)

    def any_serves(self) -> bool:
        """Whether an engine is ready, with whatever weights."""
        return any(row.phase is EnginePhase.READY for row in self._rows.values())

    def is_paused(self, min_policy_version: int) -> bool:
        """No engine is fit now, and one will be that is being updated, or sleeps while its GPUs are
        lent: whoever waits for it has all the time that this takes."""
        if self.serves(min_policy_version):
            return False
        return any(is_leased(row) for row in self._rows.values())

    def serves(self, min_policy_version: int) -> bool:
        """Whether an engine is fit now for a session that has seen this version."""
        rows = self._rows.values()
        is_preference = not self.has_publisher and self.any_serves()
        return is_preference or any(self._is_fit(row, min_policy_version) for row in rows)

    def why_never(self, min_policy_version: int) -> str:
        """Why weights so new will not come any more, in a line; '' where they may."""
        newest = max([self._published, *(row.policy_version for row in self._rows.values())])
        is_known = self.has_publisher and self._published != UNVERSIONED
        if not is_known or min_policy_version <= newest:
            return ""
        was = f"what it began with, policy version {min_policy_version}, was of another run"
        return f"{was}: engines are at version {newest} now"

    def is_behind(self, min_policy_version: int) -> bool:
        """Whether engines are READY, and none with weights that this session may use."""
        return self.any_serves() and not self.serves(min_policy_version)

    def why_waiting(self, min_policy_version: int) -> str:
        """Why no engine is fit for a session that has seen this version, in a line; '' where
        engines are fit, or none is known."""
        if self.serves(min_policy_version):
            return ""
        for row in self._rows.values():
            if row.phase is EnginePhase.READY:
                return (
                    f"{row.url}: ready, with policy version {row.policy_version}; the session has "
                    f"seen {min_policy_version}, and waits for it while the fleet has a publisher"
                )
        return self.trouble()

    def trouble(self) -> str:
        """What keeps an engine from serving, in a line; '' where each serves, or none is known."""
        for row in self._rows.values():
            if row.phase is not EnginePhase.READY:
                return f"{row.url}: {row.phase.value}, {row.detail}".removesuffix(", ")
        return ""

    def count(self, url: str, *, legs: int = 0, queued: int = 0) -> None:
        """Add to our own load of an engine: legs that run there, and generations that wait for a
        free place there."""
        load = self._loads.get(url)
        if load is None:
            load = self._loads[url] = _Load()
        load.num_own += legs
        load.num_queued += queued

    @property
    def num_sticky(self) -> int:
        """Sessions whose engine is remembered."""
        return len(self._sticky)

    def num_legs(self, url: str) -> int:
        """Legs of ours that run at `url`."""
        load = self._loads.get(url)
        return load.num_own if load else 0

    def _is_fit(self, row: EngineRow, min_policy_version: int) -> bool:
        """Whether it is READY and not known to be older; weights without a number are compared
        only with what a publisher has numbered."""
        if row.phase is not EnginePhase.READY:
            return False
        is_unnumbered = row.policy_version == UNVERSIONED and not self.has_publisher
        return is_unnumbered or row.policy_version >= min_policy_version

    def _fit(self, min_policy_version: int) -> list[EngineRow]:
        """All that are fit; without a publisher the newest, where none is."""
        rows = self._rows.values()
        fit = [row for row in rows if self._is_fit(row, min_policy_version)]
        if fit or self.has_publisher:
            return fit
        ready = [row for row in rows if row.phase is EnginePhase.READY]
        newest = max((row.policy_version for row in ready), default=UNVERSIONED)
        return [row for row in ready if row.policy_version == newest]

    def _judge(self) -> None:
        """Which engines are overfull, beside the least loaded that serves."""
        serving = [row.url for row in self._rows.values() if row.phase is EnginePhase.READY]
        least = min((self._loads[url].total for url in serving), default=0)
        for load in self._loads.values():
            load.judge(least)

    def _settle(self, home: EngineRow | None, fit: list[EngineRow]) -> EngineRow:
        """Where a session without a home goes, or one whose home is overfull."""
        if len(fit) == 1:
            return fit[0]
        least = min(fit, key=lambda row: (self._loads[row.url].total, -row.policy_version))
        if home is None:
            return least
        load = self._loads[home.url]
        if load.total <= LOPSIDED_FACTOR * self._loads[least.url].total + LOPSIDED_MARGIN:
            return home
        load.num_may_move -= 1
        return least


def is_leased(row: EngineRow) -> bool:
    """Whether it will serve again, and what can go on elsewhere leaves it until then."""
    return row.phase in (EnginePhase.UPDATING, EnginePhase.ASLEEP)


def is_lost(row: EngineRow, incarnation: str) -> bool:
    """Whether the life of the engine that a leg began with is over."""
    if row.phase in (EnginePhase.FENCED, EnginePhase.GONE):
        return True
    # An engine that was updated before its first probe has no incarnation yet.
    return bool(incarnation) and row.incarnation != incarnation
