"""How workers follow the router's fleet table: changed rows, loads, and a digest.

    FleetChanged     all rows, to a worker that joins or asks for them
    EnginesChanged   rows that changed, at once; of a long burst, many are one message
    LoadsChanged     loads that moved by a noticeable part, each push_s
    TableDigest      all loads and a checksum of the rows, each digest_s
    AskTable         from a worker whose copy does not match

- The epoch counts changes of rows without their loads.
- Rows are absolute, so a copy may be newer than the base of the changes that it applies. A copy
  that is older than the base, or of another router, misses something and asks, once per push_s.
- Lost, repeated, late and reordered messages leave a copy right or older, never wrong for longer
  than until the next digest. Loads are hints and may be late.
"""

import enum
import zlib
from collections import deque
from collections.abc import Collection, Iterable

import msgspec

from rollmesh.core.types import UNVERSIONED
from rollmesh.wire.fleet import (
    EngineRow,
    EnginesChanged,
    FleetChanged,
    LoadsChanged,
    TableDigest,
    TableMessage,
)

BURST = 8
"""Messages of changes that are sent at once; a longer burst is gathered for `settle_s`. So a small
fleet's engines are ready for workers at the same time after an update."""
NOTICEABLE = 8
"""A load is sent again when it differs by more than a part of this size, an eighth, from what
workers have."""


def load_of(row: EngineRow) -> int:
    """Return the requests that run or wait at an engine."""
    return row.num_running + row.num_waiting


def without_load(row: EngineRow) -> tuple[object, ...]:
    """Return the parts of a row that count for epoch and checksum."""
    return (
        row.url,
        row.incarnation,
        row.phase,
        row.policy_version,
        row.detail,
        row.adapter,
        row.max_running,
    )


def checksum(rows: Iterable[EngineRow], published: int, has_publisher: bool) -> int:
    """Return the CRC-32 of a table without its loads, whatever the order of its rows."""
    parts = sorted(map(without_load, rows), key=lambda part: str(part[0]))
    return zlib.crc32(msgspec.msgpack.encode((parts, published, has_publisher)))


class TableFeed:
    """The router's side: what workers have to be sent."""

    def __init__(self, push_s: float, digest_s: float, settle_s: float) -> None:
        self.epoch = 0
        self._push_s, self._digest_s, self._settle_s = push_s, digest_s, settle_s
        self._rows: dict[str, EngineRow] = {}
        self._published, self._has_publisher = UNVERSIONED, True
        self._changed: set[str] = set()
        """Engines whose rows changed, or that were removed, since `_sent_epoch`."""
        self._is_urgent = False
        self._sent_epoch = 0
        self._sent_loads: dict[str, int] = {}
        self._sent_s = deque([float("-inf")] * BURST, maxlen=BURST)
        """Times of the last messages of changes."""
        self._beat_s = self._digested_s = float("-inf")
        self._order: list[str] = []

    def look(
        self,
        rows: Iterable[EngineRow],
        removed: Collection[str],
        published: int,
        has_publisher: bool,
    ) -> None:
        """Note how these rows, and the rest of the table, differ from the last look."""
        changed = set(removed)
        is_urgent = bool(changed) or has_publisher != self._has_publisher
        for url in changed:
            del self._rows[url]
        for row in rows:
            was = self._rows.get(row.url)
            if row is was:
                continue
            self._rows[row.url] = row
            if was is None or without_load(row) != without_load(was):
                changed.add(row.url)
                is_urgent = is_urgent or was is None or _is_urgent(was, row)
        if changed or (published, has_publisher) != (self._published, self._has_publisher):
            self.epoch += 1
            self._order = sorted(self._rows)
        self._published, self._has_publisher = published, has_publisher
        self._changed |= changed
        self._is_urgent = self._is_urgent or is_urgent

    def forgotten(self, urls: Collection[str]) -> set[str]:
        """Return the engines of the last look that are not among `urls`."""
        return self._rows.keys() - urls

    @property
    def due_s(self) -> float:
        """Time of the next message that cannot wait for the next tick."""
        return self._sent_s[0] + self._settle_s if self._is_urgent else float("inf")

    def take(self, now_s: float) -> list[TableMessage]:
        """Return the messages that every worker is to get now."""
        messages: list[TableMessage] = []
        has_beat = now_s >= self._beat_s + self._push_s
        if self.epoch != self._sent_epoch and (has_beat or now_s >= self.due_s):
            messages.append(self._take_changes(now_s))
        if has_beat:
            self._beat_s = now_s
            messages.append(self._take_loads(now_s))
        return messages

    def _take_changes(self, now_s: float) -> EnginesChanged:
        message = EnginesChanged(
            self.epoch,
            self._sent_epoch,
            tuple(self._rows[url] for url in sorted(self._changed & self._rows.keys())),
            tuple(sorted(self._changed - self._rows.keys())),
            self._published,
            self._has_publisher,
        )
        for row in message.engines:
            self._sent_loads[row.url] = load_of(row)
        for url in message.removed:
            self._sent_loads.pop(url, None)
        self._changed.clear()
        self._is_urgent = False
        self._sent_epoch = self.epoch
        self._sent_s.append(now_s)
        return message

    def _take_loads(self, now_s: float) -> LoadsChanged | TableDigest:
        loads = [load_of(self._rows[url]) for url in self._order]
        if now_s >= self._digested_s + self._digest_s:
            self._digested_s = now_s
            self._sent_loads = dict(zip(self._order, loads, strict=True))
            total = checksum(self._rows.values(), self._published, self._has_publisher)
            return TableDigest(self.epoch, total, tuple(loads))
        places = [
            place
            for place, (url, load) in enumerate(zip(self._order, loads, strict=True))
            if _is_noticeable(load, self._sent_loads.get(url, 0))
        ]
        if 2 * len(places) > len(loads):
            places, moved = [], loads
        else:
            moved = [loads[place] for place in places]
        for place, load in zip(places or range(len(moved)), moved, strict=True):
            self._sent_loads[self._order[place]] = load
        return LoadsChanged(self.epoch, tuple(places), tuple(moved))


def _is_urgent(was: EngineRow, row: EngineRow) -> bool:
    return (was.phase, was.policy_version) != (row.phase, row.policy_version)


def _is_noticeable(load: int, sent: int) -> bool:
    return abs(load - sent) > sent // NOTICEABLE


class Effect(enum.Enum):
    """Part of a copy that a message changed."""

    NONE = "none"
    LOADS = "loads"
    ROWS = "rows"
    TABLE = "table"
    """All rows, with their loads."""


class TableCopy:
    """The worker's side: a copy of the table, and whether it has to be asked for."""

    def __init__(self) -> None:
        self.rows: dict[str, EngineRow] = {}
        """Their loads are those of the last message that had the row."""
        self.loads: dict[str, int] = {}
        self.published, self.has_publisher = UNVERSIONED, True
        self._router = ""
        self._epoch = -1
        self._checksum = (-1, 0)
        """Epoch and checksum of the rows, when last computed."""
        self._order: list[str] = []
        self._misses = False
        self._has_asked = False

    def place(self) -> tuple[str, int]:
        """Return the router's incarnation and the epoch of the copy; '' and -1 for none."""
        return self._router, self._epoch

    def take(self, message: TableMessage, router: str) -> Effect:
        """Apply a message from the router of that incarnation, unless it is late."""
        if isinstance(message, FleetChanged):
            return self._take_table(message, router)
        is_known = router == self._router
        if isinstance(message, EnginesChanged):
            if is_known and message.epoch <= self._epoch:
                return Effect.NONE
            if is_known and message.since <= self._epoch:
                self._take_changes(message)
                return Effect.ROWS
            self._misses = True
            return Effect.NONE
        # A beat: what was asked for may be lost.
        self._has_asked = False
        if is_known and message.epoch < self._epoch:
            return Effect.NONE
        self._misses = not is_known or not self._fits(message)
        return Effect.NONE if self._misses else self._take_loads(message)

    def take_ask(self) -> bool:
        """Return whether to ask for the whole table now."""
        asks = self._misses and not self._has_asked
        self._has_asked = self._has_asked or asks
        return asks

    def _take_table(self, table: FleetChanged, router: str) -> Effect:
        if router == self._router and table.epoch < self._epoch:
            return Effect.NONE
        is_same = router == self._router and table.epoch == self._epoch
        self._router, self._epoch = router, table.epoch
        self.published, self.has_publisher = table.published, table.has_publisher
        self.rows = {row.url: row for row in table.engines}
        self.loads = {row.url: load_of(row) for row in table.engines}
        self._checksum = (-1, 0)
        self._settle()
        return Effect.LOADS if is_same else Effect.TABLE

    def _take_changes(self, message: EnginesChanged) -> None:
        self._epoch = message.epoch
        self.published, self.has_publisher = message.published, message.has_publisher
        for row in message.engines:
            self.rows[row.url] = row
            self.loads[row.url] = load_of(row)
        for url in message.removed:
            self.rows.pop(url, None)
            self.loads.pop(url, None)
        self._settle()

    def _settle(self) -> None:
        self._order = sorted(self.rows)
        self._misses = self._has_asked = False

    def _fits(self, beat: LoadsChanged | TableDigest) -> bool:
        """Whether the copy is at the beat's epoch and, as far as the beat shows, right."""
        if beat.epoch != self._epoch:
            return False
        if isinstance(beat, LoadsChanged):
            size = len(self._order)
            return all(place < size for place in beat.places) and len(beat.loads) <= size
        if self._checksum[0] != self._epoch:
            total = checksum(self.rows.values(), self.published, self.has_publisher)
            self._checksum = (self._epoch, total)
        return beat.checksum == self._checksum[1] and len(beat.loads) == len(self._order)

    def _take_loads(self, beat: LoadsChanged | TableDigest) -> Effect:
        places: Iterable[int] = range(len(beat.loads))
        if isinstance(beat, LoadsChanged) and beat.places:
            places = beat.places
        # A malformed beat has fewer places than loads, or more.
        for place, load in zip(places, beat.loads, strict=False):
            self.loads[self._order[place]] = load
        return Effect.LOADS
