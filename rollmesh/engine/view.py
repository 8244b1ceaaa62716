"""A worker's copy of the fleet table, and its choice of an engine for each leg.

Invariants: an older table of the same router never replaces a newer one; only READY engines with
the wanted weights or newer are chosen; a session stays with its engine while that one serves; the
memory of who stays where is bounded. Driven by the worker, which hands it each FleetChanged, and by
legs.py, which chooses and counts.
"""

from collections import OrderedDict
from collections.abc import Callable, Container

from rollmesh.wire.messages import EnginePhase, EngineRow, FleetChanged

MAX_STICKY_SESSIONS = 16_384
"""Sessions whose engine is remembered; the longest unused is forgotten first."""


class _Load:
    """How busy one engine is, as far as this worker can know."""

    def __init__(self) -> None:
        self.num_own = 0
        self.num_others = 0
        """Pushed with the table, without our own at that time."""

    @property
    def total(self) -> int:
        return self.num_own + self.num_others


class FleetView:
    """See the module. `listeners` are called after each change of the table."""

    def __init__(self) -> None:
        self.listeners: list[Callable[[], None]] = []
        self._rows: dict[str, EngineRow] = {}
        self._router = ""
        self._epoch = -1
        self._loads: dict[str, _Load] = {}
        self._sticky: OrderedDict[str, str] = OrderedDict()

    def update(self, table: FleetChanged, router: str) -> None:
        """Take `table` from the router of incarnation `router`, unless a newer one is known."""
        if router == self._router and table.epoch <= self._epoch:
            return
        self._router, self._epoch = router, table.epoch
        self._rows = {row.url: row for row in table.engines}
        for row in table.engines:
            load = self._loads.setdefault(row.url, _Load())
            load.num_others = max(0, row.num_running + row.num_waiting - load.num_own)
        for url in self._loads.keys() - self._rows.keys():
            if not self._loads[url].num_own:
                del self._loads[url]
        for listener in self.listeners:
            listener()

    def choose(
        self, session_key: str, min_policy_version: int, avoid: Container[str] = ()
    ) -> EngineRow | None:
        """The session's own engine, else the least loaded; None if none is fit.

        Engines in `avoid` are taken only where there is no other.
        """
        fit = [row for row in self._rows.values() if _is_fit(row, min_policy_version)]
        fit = [row for row in fit if row.url not in avoid] or fit
        if not fit:
            return None
        home = self._sticky.get(session_key)
        chosen = next((row for row in fit if row.url == home), None)
        if chosen is None:
            chosen = min(fit, key=lambda row: (self._loads[row.url].total, -row.policy_version))
            self._sticky[session_key] = chosen.url
            if len(self._sticky) > MAX_STICKY_SESSIONS:
                self._sticky.popitem(last=False)
        self._sticky.move_to_end(session_key)
        return chosen

    def find(self, url: str) -> EngineRow | None:
        """The row of one engine."""
        return self._rows.get(url)

    def is_paused(self, min_policy_version: int) -> bool:
        """No engine is fit now, and one that is being updated will be."""
        rows = self._rows.values()
        if any(_is_fit(row, min_policy_version) for row in rows):
            return False
        return any(row.phase is EnginePhase.UPDATING for row in rows)

    def begin(self, url: str) -> None:
        """A leg of ours runs at `url` from now on."""
        self._loads.setdefault(url, _Load()).num_own += 1

    def end(self, url: str) -> None:
        """It ended."""
        self._loads[url].num_own -= 1


def _is_fit(row: EngineRow, min_policy_version: int) -> bool:
    return row.phase is EnginePhase.READY and row.policy_version >= min_policy_version
