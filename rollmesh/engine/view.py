"""A worker's copy of the fleet table, and its choice of an engine for each request.

- An older table of the same router never replaces a newer one.
- Only READY engines with the wanted weights or newer are chosen; if no publisher numbers the
  weights and there are none such, the newest READY one.
- A session stays with the engine that caches its prefix until that one no longer serves, or has
  been far busier than another for several tables in a row. Only a share of its sessions may move
  between two tables, so that not all workers rush to the idle engine.
- The number of remembered sessions is bounded.
"""

from collections import OrderedDict
from collections.abc import Callable, Collection

from rollmesh.core.types import UNVERSIONED
from rollmesh.engine.table_sync import Effect, TableCopy
from rollmesh.wire.fleet import EnginePhase, EngineRow, TableMessage

MAX_STICKY_SESSIONS = 16_384
"""Sessions whose engine is remembered; the least recently used is forgotten first."""
OVERLOAD_FACTOR = 2
OVERLOAD_MARGIN = 4
"""An engine is overloaded with more than FACTOR times the requests of the least loaded plus MARGIN:
a session that moves pays a prefill of all its tokens and must not want to move back."""
OVERLOAD_TABLES = 3
"""Reports of loads in a row (one each second) that show an engine overloaded before sessions leave
it."""
MOVING_SHARE = 8
"""Between two tables, one in this many of its requests may move."""


class _Load:
    """Load of one engine, as known to this worker."""

    def __init__(self) -> None:
        self.num_own = 0
        """Requests of this process that run there."""
        self.num_queued = 0
        """Generations of this process that wait for a free slot there."""
        self.num_others = 0
        """Requests of other processes, by the last table."""
        self.num_overloaded = 0
        """Consecutive tables that showed it overloaded."""
        self.num_may_move = 0

    @property
    def total(self) -> int:
        return self.num_own + self.num_queued + self.num_others

    def note_table(self, least: int) -> None:
        """Note a new table whose least loaded engine has `least` requests."""
        is_overloaded = self.total > OVERLOAD_FACTOR * least + OVERLOAD_MARGIN
        self.num_overloaded = self.num_overloaded + 1 if is_overloaded else 0
        lasts = self.num_overloaded >= OVERLOAD_TABLES
        self.num_may_move = max(1, self.num_own // MOVING_SHARE) if lasts else 0


class FleetView:
    """The table and the choice of engines; `listeners` are called after each change of the
    table."""

    def __init__(self) -> None:
        self.listeners: list[Callable[[], None]] = []
        self._copy = TableCopy()
        self._loads: dict[str, _Load] = {}
        self._sticky: OrderedDict[str, str] = OrderedDict()

    @property
    def has_publisher(self) -> bool:
        """Whether the wanted version is required; see FleetChanged."""
        return self._copy.has_publisher

    def place(self) -> tuple[str, int]:
        """Return the router's incarnation and the epoch of the table; '' and -1 for none."""
        return self._copy.place()

    @property
    def _rows(self) -> dict[str, EngineRow]:
        return self._copy.rows

    def update(self, message: TableMessage, router: str) -> bool:
        """Apply a message from the router of incarnation `router`, unless it is late; return
        whether the whole table has to be asked for.
        """
        effect = self._copy.take(message, router)
        if effect is not Effect.NONE:
            self._take_loads()
        if effect in (Effect.LOADS, Effect.TABLE):
            self._update_overloaded()
        if effect in (Effect.ROWS, Effect.TABLE):
            for listener in self.listeners:
                listener()
        return self._copy.take_ask()

    def _take_loads(self) -> None:
        """Update loads of other processes, and forget those of engines that are gone."""
        for url, total in self._copy.loads.items():
            load = self._loads.setdefault(url, _Load())
            load.num_others = max(0, total - load.num_own)
        for url in self._loads.keys() - self._copy.loads.keys():
            if not self._loads[url].num_own and not self._loads[url].num_queued:
                del self._loads[url]

    def choose(
        self, session_key: str, min_policy_version: int, avoid: Collection[str] = ()
    ) -> EngineRow | None:
        """Return the session's own engine, else the least loaded; None if none is suitable.

        Without a publisher the version is a preference: if no READY engine has it, the newest is
        suitable. Engines in `avoid` are used only if there is no other.
        """
        home = self._rows.get(self._sticky.get(session_key, ""))
        if home is None or home.url in avoid or not self._is_suitable(home, min_policy_version):
            home = None
        if home is None or self._loads[home.url].num_may_move:
            suitable = self._suitable(min_policy_version)
            if avoid:
                suitable = [row for row in suitable if row.url not in avoid] or suitable
            if not suitable:
                return None
            home = self._pick(home, suitable)
            self._sticky[session_key] = home.url
            if len(self._sticky) > MAX_STICKY_SESSIONS:
                self._sticky.popitem(last=False)
        self._sticky.move_to_end(session_key)
        return home

    def find(self, url: str) -> EngineRow | None:
        return self._rows.get(url)

    def any_serves(self) -> bool:
        """Whether any engine is READY."""
        return any(row.phase is EnginePhase.READY for row in self._rows.values())

    def is_paused(self, min_policy_version: int) -> bool:
        """Whether no engine is suitable now, but one that is updating or asleep will be: waiting
        for it has no time limit."""
        if self.serves(min_policy_version):
            return False
        return any(is_leased(row) for row in self._rows.values())

    def serves(self, min_policy_version: int) -> bool:
        """Whether an engine is suitable for a session that has seen this version."""
        rows = self._rows.values()
        is_preference = not self.has_publisher and self.any_serves()
        return is_preference or any(self._is_suitable(row, min_policy_version) for row in rows)

    def why_never(self, min_policy_version: int) -> str:
        """Return why weights this new will never come, in a line; '' if they may."""
        newest = max([self._copy.published, *(row.policy_version for row in self._rows.values())])
        is_known = self.has_publisher and self._copy.published != UNVERSIONED
        if not is_known or min_policy_version <= newest:
            return ""
        was = f"what it began with, policy version {min_policy_version}, was of another run"
        return f"{was}: engines are at version {newest} now"

    def is_behind(self, min_policy_version: int) -> bool:
        """Whether engines are READY, but none with weights that this session may use."""
        return self.any_serves() and not self.serves(min_policy_version)

    def why_waiting(self, min_policy_version: int) -> str:
        """Return why no engine is suitable for a session that has seen this version, in a line; ''
        if one is, or none is known."""
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
        """Return why an engine does not serve, in a line; '' if all do, or none is known."""
        for row in self._rows.values():
            if row.phase is not EnginePhase.READY:
                return f"{row.url}: {row.phase.value}, {row.detail}".removesuffix(", ")
        return ""

    def count(self, url: str, *, requests: int = 0, queued: int = 0) -> None:
        """Add to this process's load of an engine: running requests, and generations that wait
        there."""
        load = self._loads.get(url)
        if load is None:
            load = self._loads[url] = _Load()
        load.num_own += requests
        load.num_queued += queued

    @property
    def num_sticky(self) -> int:
        """Number of sessions whose engine is remembered."""
        return len(self._sticky)

    def num_requests(self, url: str) -> int:
        """Return this process's requests that run at `url`."""
        load = self._loads.get(url)
        return load.num_own if load else 0

    def _is_suitable(self, row: EngineRow, min_policy_version: int) -> bool:
        """Whether it is READY and not known to be older; weights without a number are compared only
        if a publisher numbers them."""
        if row.phase is not EnginePhase.READY:
            return False
        is_unnumbered = row.policy_version == UNVERSIONED and not self.has_publisher
        return is_unnumbered or row.policy_version >= min_policy_version

    def _suitable(self, min_policy_version: int) -> list[EngineRow]:
        """Return all suitable engines; without a publisher the newest, if none is suitable."""
        rows = self._rows.values()
        suitable = [row for row in rows if self._is_suitable(row, min_policy_version)]
        if suitable or self.has_publisher:
            return suitable
        ready = [row for row in rows if row.phase is EnginePhase.READY]
        newest = max((row.policy_version for row in ready), default=UNVERSIONED)
        return [row for row in ready if row.policy_version == newest]

    def _update_overloaded(self) -> None:
        """Find engines that are overloaded compared with the least loaded that serves."""
        serving = [row.url for row in self._rows.values() if row.phase is EnginePhase.READY]
        least = min((self._loads[url].total for url in serving), default=0)
        for load in self._loads.values():
            load.note_table(least)

    def _pick(self, home: EngineRow | None, suitable: list[EngineRow]) -> EngineRow:
        """Choose for a session without a home, or one whose home is overloaded."""
        if len(suitable) == 1:
            return suitable[0]
        least = min(suitable, key=lambda row: (self._loads[row.url].total, -row.policy_version))
        if home is None:
            return least
        load = self._loads[home.url]
        if load.total <= OVERLOAD_FACTOR * self._loads[least.url].total + OVERLOAD_MARGIN:
            return home
        load.num_may_move -= 1
        return least


def is_leased(row: EngineRow) -> bool:
    """Whether it will serve again after a lease, so that calls which may continue elsewhere ignore
    it."""
    return row.phase in (EnginePhase.UPDATING, EnginePhase.ASLEEP)


def is_lost(row: EngineRow, incarnation: str) -> bool:
    """Whether the engine process that a request was sent to is gone."""
    if row.phase in (EnginePhase.FENCED, EnginePhase.GONE):
        return True
    # An engine that was updated before its first probe has no incarnation yet.
    return bool(incarnation) and row.incarnation != incarnation
