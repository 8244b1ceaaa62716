"""All that the scheduler's machine knows, and which of it its journal does not know yet.

Owns the planner's state, tickets, intents, tenants, and who stands on which GPU in truth. What was
changed is marked, and read when the step is done: so a row is what the machine knows, never what a
part of it meant to write. Invariants: nobody is put to stand where another does; an open ticket is
in `queue` under its cluster. Driven by the parts of the machine in scheduler.py; explain.py and
status.py read it.
"""

from collections import Counter, deque
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from rollmesh.scheduler.planning.state import FleetState, Owner
from rollmesh.scheduler.service.actions import Action, Drop, Happened, Note, Put, Row, Write
from rollmesh.scheduler.service.records import (
    Answer,
    Credits,
    Engine,
    Held,
    Intent,
    Machine,
    Numbers,
    Stream,
    Tenant,
    Ticket,
    Wish,
)
from rollmesh.scheduler.service.settings import SchedulerSettings
from rollmesh.wire.machine import Send
from rollmesh.wire.messages import AnyMessage

FREE, HELD = "free", "held"
"""Phases of a GPU that are not those of a worker."""
MAX_TROUBLES = 20
MAX_WAITS = 10_000

_encode = msgspec.msgpack.Encoder().encode


class Link(msgspec.Struct, kw_only=True):
    """What is known of a pipeline in this life of the scheduler only."""

    heard_s: float
    """Its coordinator."""
    route: bytes = b""
    """Of its coordinator."""
    is_known: bool = False
    """Its coordinator has said its truth."""
    doubt_s: float | None = None
    """Since when its coordinator does not know of what it was told before."""
    retry_s: float = 0.0
    """It is let in again then at the earliest."""
    progressed_s: float = 0.0
    is_stalled: bool = False
    """That it has no progress was told."""
    bucket: int = -1
    """Of its progress, at the last plan that it asked for."""


class Asker(msgspec.Struct):
    """Who waits for an answer, as far as this life of the scheduler knows."""

    route: bytes
    heard_s: float


class Book:
    """See the module."""

    def __init__(self, settings: SchedulerSettings, incarnation: str) -> None:
        self.settings = settings
        self.incarnation = incarnation
        self.now_s = 0.0
        self.state = FleetState()
        self.numbers = Numbers()
        self.credits = Credits()
        self.tenants: dict[str, Tenant] = {}
        self.links: dict[str, Link] = {}
        self.tickets: dict[str, Ticket] = {}
        self.askers: dict[str, Asker] = {}
        self.queue: dict[tuple[str, str], dict[str, None]] = {}
        """By pipeline and cluster, the keys of open tickets in the order in which they came."""
        self.intents: dict[int, Intent] = {}
        """That are under way."""
        self.ended: dict[int, Intent] = {}
        """The newest that are not any more; see lately.py."""
        self.standing: dict[int, Owner] = {}
        """By GPU, who stands there in truth."""
        self.wishes: dict[str, Wish] = {}
        self.machines: dict[str, Machine] = {}
        self.beats_s: dict[str, float] = {}
        self.answers: dict[str, Answer] = {}
        self.wants_plan = False
        self.planned_s = float("-inf")
        """When the last plan was made."""
        self.again_s = float("inf")
        """When the next is due, whatever happens."""
        self.troubles: list[str] = []
        """Of the service itself, newest last."""
        self.num: Counter[str] = Counter()
        self.waits_s: deque[float] = deque(maxlen=MAX_WAITS)
        """From asking to granted, of the newest grants."""
        self._tables: dict[str, Mapping[Any, object]] = {
            "nodes": self.machines,
            "requests": self.state.requests,
            "demands": self.wishes,
            "tickets": self.tickets,
            "intents": self.intents,
            "ended": self.ended,
            "answers": self.answers,
            "numbers": {"1": self.numbers},
            "credits": {"1": self.credits},
        }
        self._dirty: dict[tuple[str, tuple[str | int, ...]], None] = {}
        self._happened: list[Happened] = []
        self._others: list[Send | Note] = []

    # what a step leaves

    def send(self, route: bytes, message: AnyMessage, body: bytes = b"") -> None:
        if route:
            self._others.append(Send(route, message, body))

    def note(self, event: str, pipeline_id: str, detail: str, is_warning: bool = True) -> None:
        self.num[event] += 1
        self._others.append(Note(event, pipeline_id, detail, is_warning))

    def problem(self, detail: str) -> None:
        """Something of ours went wrong; we go on. What goes wrong again and again is told once."""
        if self.troubles[-1:] == [detail]:
            self.num["scheduler.failed"] += 1
            return
        self.troubles = [*self.troubles, detail][-MAX_TROUBLES:]
        self.note("scheduler.failed", "", detail)

    def mark(self, table: str, *key: str | int) -> None:
        """The record has changed, is new, or is gone."""
        self._dirty[table, key] = None

    def has_moved(self, quiet: frozenset[str]) -> bool:
        """Whether this step has changed a record of another table than these."""
        return any(table not in quiet for table, _ in self._dirty)

    def take(self) -> list[Action]:
        """What the step asks for, the rows first."""
        rows: list[Row] = [self._row(table, key) for table, key in self._dirty]
        rows += self._happened
        if rows:
            self.numbers.now_s = self.now_s
            rows.append(self._row("numbers", ("1",)))
        actions: list[Action] = [Write(tuple(rows)), *self._others] if rows else [*self._others]
        self._dirty, self._happened, self._others = {}, [], []
        return actions

    # who stands where

    def is_clear(self, gpus: Iterable[int]) -> bool:
        return not any(gpu in self.standing for gpu in gpus)

    def stand(self, owner: Owner, gpus: Iterable[int], phase: str) -> None:
        """It stands there from now on, or does in another way."""
        for gpu in gpus:
            there = self.standing.setdefault(gpu, owner)
            assert there == owner, f"GPU {gpu} is {there}'s, not {owner}'s"
            row = Happened(self.now_s, gpu, owner.pipeline_id, owner.cluster, owner.rank, phase)
            self._happened.append(row)

    def clear(self, owner: Owner, gpus: Iterable[int]) -> None:
        """It does not stand there any more."""
        for gpu in gpus:
            if self.standing.get(gpu) == owner:
                del self.standing[gpu]
                self._happened.append(Happened(self.now_s, gpu, "", "", owner.rank, FREE))

    # rows

    def _row(self, table: str, key: tuple[str | int, ...]) -> Row:
        name = "/".join(map(str, key))
        record = self._record(table, *key)
        return Drop(table, name) if record is None else Put(table, name, _encode(record))

    def _record(self, table: str, first: str | int, second: str | int = "") -> object:
        """What the machine knows under that key, if anything."""
        if table in ("workers", "holds", "progress"):
            return self._of_pipeline(table, str(first), second)
        if table == "pipelines":
            return self._tenant(str(first))
        return self._tables[table].get(first)

    def _tenant(self, pipeline_id: str) -> Tenant | None:
        """What the planner changes as well is taken from its state."""
        pipeline = self.state.pipelines.get(pipeline_id)
        if pipeline is None:
            return None
        tenant = self.tenants[pipeline_id]
        tenant.phase, tenant.waiting_s = pipeline.phase, pipeline.waiting_s
        return tenant

    def _of_pipeline(self, table: str, pipeline_id: str, name: str | int) -> object:
        pipeline = self.state.pipelines.get(pipeline_id)
        if pipeline is None:
            return None
        if table == "holds":
            hold = pipeline.holds.get(str(name))
            return hold and Held(pipeline_id=pipeline_id, hold=hold)
        if table == "progress":
            progress = pipeline.progress.get(str(name))
            stream = str(name)
            return progress and Stream(pipeline_id=pipeline_id, stream=stream, progress=progress)
        worker = pipeline.workers[int(name)]
        return Engine(
            pipeline_id=pipeline_id,
            rank=worker.rank,
            phase=worker.phase,
            epoch=worker.epoch,
            since_s=worker.since_s,
        )
