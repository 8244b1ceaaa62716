"""The client's book: what arrived, what was dropped, what was trained and published, on disk.

    RunBegan      first, once per client                         frames: [entry]
    GroupKept     a complete result, before its ack              frames: [entry, body, *buffers]
    GroupBooked   a group that ended without one
    StepTaken     the groups of a train step, before it is taken
    Published     a policy version, before it is published
    EndedSoFar    all ended groups as intervals, before older segments are dropped

Invariants: an act follows its entry; replaying the entries gives which groups have ended, and which
results no step has taken. Driven by the intake's thread.
"""

from pathlib import Path

import msgspec

from rollmesh.core.config import JournalConfig
from rollmesh.core.errors import JournalError
from rollmesh.core.ids import GroupId, IntervalSet
from rollmesh.core.journal import Journal
from rollmesh.serve.client.arrivals import RawResult
from rollmesh.wire.frames import Packet
from rollmesh.wire.messages import GroupFinished

JOURNAL_FOLDER = "journal"


class Entry(msgspec.Struct, frozen=True, array_like=True, tag_field="kind"):
    """The first frame of a record."""


class RunBegan(Entry, frozen=True, tag="run_began"):
    run_id: str


class GroupKept(Entry, frozen=True, tag="group_kept"):
    group_id: GroupId
    attempt: int
    worker_id: str


class GroupBooked(Entry, frozen=True, tag="group_booked"):
    group_id: GroupId
    reason: str


class StepTaken(Entry, frozen=True, tag="step_taken"):
    step: int
    group_ids: tuple[GroupId, ...]


class Published(Entry, frozen=True, tag="published"):
    policy_version: int
    step: int


class EndedSoFar(Entry, frozen=True, tag="ended_so_far"):
    runs: dict[str, list[tuple[int, int]]]


AnyEntry = RunBegan | GroupKept | GroupBooked | StepTaken | Published | EndedSoFar

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[AnyEntry] = msgspec.msgpack.Decoder(AnyEntry)


class Book:
    """The book in `folder`; the constructor replays what is there."""

    def __init__(self, folder: Path, config: JournalConfig) -> None:
        """JournalError if it is damaged, of another format, or another process writes it."""
        self._config = config
        self._journal = Journal(folder / JOURNAL_FOLDER, config.segment_bytes, fsync=config.fsync)
        self.ended: dict[str, IntervalSet] = {}
        """By run; the sink works on these sets."""
        self._untaken: dict[GroupId, RawResult] = {}
        try:
            for position, frames in self._journal.replay():
                self._replay(position, frames)
        except JournalError:
            self._journal.close()
            raise

    @property
    def size_bytes(self) -> int:
        """On disk."""
        return self._journal.size_bytes

    @property
    def is_full(self) -> bool:
        """Over the byte budget: a checkpoint must free segments."""
        return self._journal.size_bytes > self._config.max_bytes

    def restored(self) -> list[RawResult]:
        """Results of earlier runs that no step took, oldest first; they are given once."""
        results, self._untaken = list(self._untaken.values()), {}
        return results

    def keep(self, message: GroupFinished, packet: Packet) -> RawResult:
        """Write a result down; an incomplete one leaves a line and not its tokens."""
        if message.complete:
            entry: AnyEntry = GroupKept(message.group_id, message.attempt, message.worker_id)
            position = self._write(entry, packet)
        else:
            position = self._write(GroupBooked(message.group_id, "incomplete"))
        return RawResult(
            group_id=message.group_id,
            attempt=message.attempt,
            worker_id=message.worker_id,
            complete=message.complete,
            body=packet.body,
            buffers=packet.buffers,
            position=position,
        )

    def note(self, entry: AnyEntry) -> None:
        """Write one entry; JournalError if the disk does not take it."""
        self._write(entry)

    def free(self, position: int) -> None:
        """Drop what stands before `position`, but for which groups have ended."""
        ended = {run: interval_set.intervals() for run, interval_set in self.ended.items()}
        self._write(EndedSoFar(ended))
        self._journal.drop_before(position)

    def close(self) -> None:
        self._journal.close()

    def _write(self, entry: AnyEntry, packet: Packet | None = None) -> int:
        frames = [packet.body, *packet.buffers] if packet else []
        return self._journal.append([_encoder.encode(entry), *frames])

    def _replay(self, position: int, frames: list[bytes]) -> None:
        try:
            entry = _decoder.decode(frames[0])
        except (msgspec.MsgspecError, IndexError) as error:
            raise JournalError(f"the journal's record at {position} is unknown: {error}") from None
        match entry:
            case RunBegan(run_id):
                self.ended.setdefault(run_id, IntervalSet())
            case GroupKept(group_id, attempt, worker_id):
                self._end(group_id)
                body, *buffers = frames[1:]
                self._untaken[group_id] = RawResult(
                    group_id, attempt, worker_id, True, body, tuple(buffers), position
                )
            case GroupBooked(group_id):
                self._end(group_id)
                self._untaken.pop(group_id, None)
            case StepTaken(_, group_ids):
                for group_id in group_ids:
                    self._untaken.pop(group_id, None)
            case EndedSoFar(runs):
                for run_id, intervals in runs.items():
                    self.ended[run_id] = IntervalSet(intervals)
            case Published():
                pass

    def _end(self, group_id: GroupId) -> None:
        self.ended.setdefault(group_id.run_id, IntervalSet()).add(group_id.seq)
