"""The recent trajectories of a run, and any older one by its id.

Owns an index of the last few hundred lines of trajectories.jsonl; the lines themselves stay in the
file. Invariants: the file is never held in memory, the index starts near its end; an id that is
not in the index is looked for from the end backwards, block by block. Driven by `reader`.
"""

from collections import OrderedDict
from pathlib import Path
from typing import NamedTuple

import msgspec

from rollmesh.core.tail import Line, Tail
from rollmesh.dashboard.rows import TrajectoryRow, TrajectorySummary

LAST_BYTES = 4 * 2**20
"""The index of a run that is opened late covers this much of the file's end."""
SEARCH_BLOCK_BYTES = 4 * 2**20

decode_summary = msgspec.json.Decoder(TrajectorySummary).decode
decode_trajectory = msgspec.json.Decoder(TrajectoryRow).decode


class Entry(NamedTuple):
    """An indexed line."""

    summary: TrajectorySummary
    offset: int
    num_bytes: int


class Shelf:
    """Recent trajectories by id."""

    def __init__(self, path: Path, max_entries: int = 500) -> None:
        self.num_bad_lines = 0
        self._path = path
        self._max_entries = max_entries
        self._entries: OrderedDict[str, Entry] = OrderedDict()
        self._tail = Tail(path, max_read_bytes=8 * 2**20, last_bytes=LAST_BYTES)

    def read(self) -> list[TrajectorySummary]:
        """Index what the file gained; the new summaries, oldest first."""
        restarts = self._tail.num_restarts
        lines = self._tail.read()
        if self._tail.num_restarts != restarts:
            self._entries.clear()
        return [summary for line in lines if (summary := self._index(line))]

    def recent(self, limit: int) -> list[TrajectorySummary]:
        """The last `limit` summaries, newest first."""
        newest_first = reversed(self._entries.values())
        return [entry.summary for entry, _ in zip(newest_first, range(limit), strict=False)]

    def load(self, rollout_id: str) -> TrajectoryRow | None:
        """The whole trajectory; None if the file has none of that id. Blocks on the disk."""
        entry = self._entries.get(rollout_id)
        if entry is None:
            return search_backwards(self._path, rollout_id)
        with self._path.open("rb") as file:
            file.seek(entry.offset)
            return parse_if(file.read(entry.num_bytes), rollout_id)

    def _index(self, line: Line) -> TrajectorySummary | None:
        try:
            summary = decode_summary(line.data)
        except msgspec.MsgspecError:
            self.num_bad_lines += 1
            return None
        self._entries.pop(summary.rollout_id, None)
        self._entries[summary.rollout_id] = Entry(summary, line.offset, len(line.data))
        if len(self._entries) > self._max_entries:
            self._entries.popitem(last=False)
        return summary


def search_backwards(
    path: Path, rollout_id: str, block_bytes: int = SEARCH_BLOCK_BYTES
) -> TrajectoryRow | None:
    """The last line of `path` with that rollout id, reading blocks from the end."""
    mark = msgspec.json.encode(rollout_id)
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return None
    with file:
        end = file.seek(0, 2)
        rest = b""
        """The head of the block after this one: the end of the line that starts in this one."""
        while end > 0:
            start = max(0, end - block_bytes)
            file.seek(start)
            block = file.read(end - start) + rest
            lines = block.split(b"\n")
            rest = lines.pop(0) if start else b""
            for line in reversed(lines):
                if mark in line and (row := parse_if(line, rollout_id)):
                    return row
            end = start
    return None


def parse_if(line: bytes, rollout_id: str) -> TrajectoryRow | None:
    """The trajectory of `line`, if it parses and has that id."""
    try:
        row = decode_trajectory(line)
    except msgspec.MsgspecError:
        return None
    return row if row.rollout_id == rollout_id else None
