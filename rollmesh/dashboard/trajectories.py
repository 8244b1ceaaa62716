"""The trajectories of a run: an index of the recent ones, search for older ones, and their text.

- The file is never held in memory; the index of the last few hundred lines starts near its end.
- An id that is not in the index is searched from the end backwards, block by block.
- The tokenizer is the Rust library alone, without torch or transformers.
"""

from collections import OrderedDict
from pathlib import Path
from typing import NamedTuple

import msgspec
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from rollmesh.core.files import FileLine, FileTail
from rollmesh.core.logs import get_logger
from rollmesh.dashboard.rows import StoredTrajectory, TrajectorySummary

log = get_logger()


class TokenText:
    """Decodes one run's token ids into pieces of text.

    - The pieces joined are the decoded text, one piece per id. A character made of several tokens
      is in the piece of the last of them.
    - An unknown id is an empty piece. Without a tokenizer the ids are shown as numbers.
    """

    def __init__(self, folders: list[Path]) -> None:
        """Use tokenizer.json of the first of `folders` that has one."""
        files = [folder / "tokenizer.json" for folder in folders]
        self._tokenizer = next((load_tokenizer(file) for file in files if file.is_file()), None)

    def pieces(self, token_ids: list[int]) -> list[str]:
        """Return one piece of text per id."""
        if self._tokenizer is None:
            return [f"<{token_id}>" for token_id in token_ids]
        stream = DecodeStream(skip_special_tokens=False)
        return [
            (stream.step(self._tokenizer, token_id) or "") if 0 <= token_id < 2**32 else ""
            for token_id in token_ids
        ]


def load_tokenizer(file: Path) -> Tokenizer | None:
    """Load a tokenizer; log it and return None if the file is broken."""
    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:  # noqa: BLE001 - door: the library raises nothing narrower
        log.warning("tokenizer.not_loaded", path=str(file), why=str(error))
        return None


LAST_BYTES = 4 * 2**20
"""The part of the file's end that is indexed if a run is opened late."""
SEARCH_BLOCK_BYTES = 4 * 2**20

decode_summary = msgspec.json.Decoder(TrajectorySummary).decode
decode_trajectory = msgspec.json.Decoder(StoredTrajectory).decode


class IndexedLine(NamedTuple):
    """An indexed line."""

    summary: TrajectorySummary
    offset: int
    num_bytes: int


class TrajectoryIndex:
    """Recent trajectories by id."""

    def __init__(self, path: Path, max_entries: int = 500) -> None:
        self.num_bad_lines = 0
        self._path = path
        self._max_entries = max_entries
        self._entries: OrderedDict[str, IndexedLine] = OrderedDict()
        self._tail = FileTail(path, max_read_bytes=8 * 2**20, last_bytes=LAST_BYTES)

    def read(self) -> list[TrajectorySummary]:
        """Index new lines; return their summaries, oldest first."""
        restarts = self._tail.num_restarts
        lines = self._tail.read()
        if self._tail.num_restarts != restarts:
            self._entries.clear()
        return [summary for line in lines if (summary := self._index(line))]

    def recent(self, limit: int) -> list[TrajectorySummary]:
        """Return the last `limit` summaries, newest first."""
        newest_first = reversed(self._entries.values())
        return [entry.summary for entry, _ in zip(newest_first, range(limit), strict=False)]

    def load(self, rollout_id: str) -> StoredTrajectory | None:
        """Return the whole trajectory; None if the file has none of that id. Blocks on the disk."""
        entry = self._entries.get(rollout_id)
        if entry is None:
            return search_backwards(self._path, rollout_id)
        with self._path.open("rb") as file:
            file.seek(entry.offset)
            return parse_if(file.read(entry.num_bytes), rollout_id)

    def _index(self, line: FileLine) -> TrajectorySummary | None:
        try:
            summary = decode_summary(line.data)
        except msgspec.MsgspecError:
            self.num_bad_lines += 1
            return None
        self._entries.pop(summary.rollout_id, None)
        self._entries[summary.rollout_id] = IndexedLine(summary, line.offset, len(line.data))
        if len(self._entries) > self._max_entries:
            self._entries.popitem(last=False)
        return summary


def search_backwards(
    path: Path, rollout_id: str, block_bytes: int = SEARCH_BLOCK_BYTES
) -> StoredTrajectory | None:
    """Return the last line of `path` with that rollout id, reading blocks from the end."""
    mark = msgspec.json.encode(rollout_id)
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return None
    with file:
        end = file.seek(0, 2)
        rest = b""
        """The head of the following block: the end of the line that starts in this one."""
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


def parse_if(line: bytes, rollout_id: str) -> StoredTrajectory | None:
    """Return the trajectory of `line`, if it parses and has that id."""
    try:
        row = decode_trajectory(line)
    except msgspec.MsgspecError:
        return None
    return row if row.rollout_id == rollout_id else None
