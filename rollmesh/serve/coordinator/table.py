"""The pipeline's fleet table, as its coordinator reads it, and the asks that keep it true.

Owns the table that was read last and the leases on engines that sleep. Invariants: a row counts
only in a table that was read after the last ask about its engine; an engine that is to be out is
asleep in the table, under a lease that is renewed; one that is to be in and is asleep there is
woken: whatever the router has forgotten, it is told again. Driven by machine.py.
"""

from collections.abc import Sequence

from rollmesh.serve.coordinator.events import Action, CoordinatorSettings
from rollmesh.serve.coordinator.worker import Worker
from rollmesh.wire.fleet import (
    EnginePhase,
    EngineRow,
    FleetAnswered,
    ReadFleet,
    SleepEngine,
    WakeEngine,
)
from rollmesh.wire.machine import ROUTER, Send


class _Asked:
    """What was asked for last about one engine."""

    def __init__(self) -> None:
        self.ask_id = 0
        self.is_out = False
        self.at_s = float("-inf")
        self.leased_s = float("-inf")


class Table:
    """See the module."""

    def __init__(self, settings: CoordinatorSettings) -> None:
        self._settings = settings
        self._rows: dict[str, EngineRow] = {}
        self._as_of = 0
        """The newest ask that it answers."""
        self._router = ""
        self._asked = {url: _Asked() for url in settings.urls}
        self._num_asks = 0
        self._read_s = float("-inf")

    @property
    def is_read(self) -> bool:
        """Whether the router has told it at all."""
        return self._as_of > 0

    def take(self, answer: FleetAnswered, router: str) -> None:
        """A table came with an answer."""
        if answer.ask_id < self._as_of and router == self._router:
            return
        self._as_of, self._router = answer.ask_id, router
        self._rows = {row.url: row for row in answer.engines}

    def row(self, url: str) -> EngineRow | None:
        """None where there is none, or the table has not heard of our last ask yet."""
        return self._rows.get(url) if self._as_of >= self._asked[url].ask_id else None

    def tend(self, workers: Sequence[Worker], is_hasty: bool, now_s: float) -> list[Action]:
        """Read it, and tell the router what it does not know."""
        actions: list[Action] = []
        for worker in workers if self.is_read else ():
            actions += self._tend_row(worker, now_s)
        every_s = self._settings.hasty_s if is_hasty else self._settings.read_s
        if not actions and now_s >= self._read_s + every_s:
            self._read_s = now_s
            actions.append(Send(ROUTER, ReadFleet(self._next_ask())))
        return actions

    def _tend_row(self, worker: Worker, now_s: float) -> list[Action]:
        asked, row = self._asked[worker.url], self._rows.get(worker.url)
        is_known = row is not None and row.phase is not EnginePhase.GONE
        if is_known and not worker.is_settled:
            return []  # it may serve
        is_out = worker.is_out or not is_known
        is_asleep = row is not None and row.phase is EnginePhase.ASLEEP
        is_due = is_out and now_s >= asked.leased_s + self._settings.lease_s / 3
        if is_out == is_asleep and self._as_of >= asked.ask_id and not is_due:
            return []
        if is_out == asked.is_out and now_s < asked.at_s + self._settings.repeat_s:
            return []
        asked.ask_id, asked.is_out, asked.at_s = self._next_ask(), is_out, now_s
        if not is_out:
            asked.leased_s = float("-inf")
            wake = WakeEngine(asked.ask_id, worker.url, worker.policy_version, worker.adapter)
            return [Send(ROUTER, wake)]
        asked.leased_s = now_s
        return [Send(ROUTER, SleepEngine(asked.ask_id, worker.url, self._settings.lease_s))]

    def _next_ask(self) -> int:
        self._num_asks += 1
        return self._num_asks
