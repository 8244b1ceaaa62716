"""The client's book: what was asked, what arrived and was dropped, trained or published, on disk.

    RunBegan      first, once per client                         frames: [entry]
    GroupAsked    an ask that is to outlive its process          frames: [entry, body]
    GroupKept     a complete result, before its ack              frames: [entry, body, *buffers]
    GroupBooked   a group that ended without one
    GroupsTaken   results that nobody needs again
    StepTaken     the groups of a train step, before it is taken
    Published     a policy version, before it is published
    EndedSoFar    all ended groups as intervals, before older segments are dropped, and after a
                  full disk

Invariants: an act follows its entry; replaying the entries gives which groups are asked for and
open, which have ended, and which results nobody has taken; what a full disk did not take is owed,
and written before anything else; of the results on disk only their places are in memory. Driven by
the intake's thread; `load` by any.
"""

import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from rollmesh.core.config import JournalConfig
from rollmesh.core.errors import JournalError
from rollmesh.core.ids import GroupId, IntervalSet
from rollmesh.core.journal import Journal
from rollmesh.serve.client.arrivals import Filed, RawResult
from rollmesh.serve.client.asks import MOMENT_S, Asked
from rollmesh.wire.frames import Buffer, Packet
from rollmesh.wire.messages import GroupFinished

JOURNAL_FOLDER = "journal"


class Entry(msgspec.Struct, frozen=True, array_like=True, tag_field="kind"):
    """The first frame of a record."""


class RunBegan(Entry, frozen=True, tag="run_began"):
    run_id: str
    client_id: str = ""
    sink: str = ""
    """Address; a client that goes on for this one listens there again."""


class GroupAsked(Entry, frozen=True, tag="group_asked"):
    group_id: GroupId
    env: str
    num_samples: int
    priority: int
    ends_s: float
    """Unix time; 0 for never."""
    patience_s: float


class GroupKept(Entry, frozen=True, tag="group_kept"):
    group_id: GroupId
    attempt: int
    worker_id: str


class GroupBooked(Entry, frozen=True, tag="group_booked"):
    group_id: GroupId
    reason: str


class GroupsTaken(Entry, frozen=True, tag="groups_taken"):
    group_ids: tuple[GroupId, ...]


class StepTaken(Entry, frozen=True, tag="step_taken"):
    step: int
    group_ids: tuple[GroupId, ...]


class Published(Entry, frozen=True, tag="published"):
    policy_version: int
    step: int


class EndedSoFar(Entry, frozen=True, tag="ended_so_far"):
    runs: dict[str, list[tuple[int, int]]]


AnyEntry = (
    RunBegan
    | GroupAsked
    | GroupKept
    | GroupBooked
    | GroupsTaken
    | StepTaken
    | Published
    | EndedSoFar
)

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
        self.began = RunBegan("")
        """The newest run."""
        self._open: dict[GroupId, Asked] = {}
        self._untaken: dict[GroupId, Filed] = {}
        self._needed: dict[GroupId, int] = {}
        """Where the asks and results stand that are still needed."""
        self._owes_ends = False
        """The disk did not take some end: all of them are written before anything else."""
        self._owed_taken: list[GroupId] = []
        """Taken, and not written yet."""
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

    def restored(self) -> list[Filed]:
        """Results of earlier runs that nobody took, oldest first; they are given once."""
        results, self._untaken = list(self._untaken.values()), {}
        return results

    def load(self, filed: Filed) -> RawResult:
        """The result as it was kept, while it is needed; JournalError where it cannot be read."""
        _, body, *buffers = self._journal.read(filed.position)
        return RawResult(
            group_id=filed.group_id,
            attempt=filed.attempt,
            worker_id=filed.worker_id,
            complete=True,
            body=body,
            buffers=tuple(buffers),
            position=filed.position,
        )

    def reopened(self) -> list[Asked]:
        """What earlier runs asked for to outlive them and is open; given once."""
        asks, self._open = list(self._open.values()), {}
        return asks

    def begin(self, began: RunBegan) -> None:
        """Write down a new run."""
        self._write(began)
        self.began = began
        self.ended[began.run_id] = IntervalSet()

    def ask(self, asked: Asked) -> None:
        """Write down an ask that is to outlive this process."""
        ends_s = time.time() + asked.deadline_s if asked.deadline_s > 0 else 0.0
        entry = GroupAsked(
            asked.group_id, asked.env, asked.num_samples, asked.priority, ends_s, asked.patience_s
        )
        self._needed[asked.group_id] = self._write(entry, asked.body)

    def keep(self, message: GroupFinished, packet: Packet) -> RawResult:
        """Write a result down; an incomplete one leaves a line and not its tokens."""
        if message.complete:
            entry: AnyEntry = GroupKept(message.group_id, message.attempt, message.worker_id)
            position = self._write(entry, packet.body, *packet.buffers)
            self._needed[message.group_id] = position
        else:
            position = self._write(GroupBooked(message.group_id, "incomplete"))
            self._needed.pop(message.group_id, None)
        return RawResult(
            group_id=message.group_id,
            attempt=message.attempt,
            worker_id=message.worker_id,
            complete=message.complete,
            body=packet.body,
            buffers=packet.buffers,
            position=position,
        )

    def note(self, entry: StepTaken | Published) -> None:
        """Write one entry; JournalError if the disk does not take it."""
        self._write(entry)

    def drop(self, group_id: GroupId, reason: str) -> None:
        """A group in `ended` has no result; JournalError if the disk takes that only later."""
        self._needed.pop(group_id, None)
        try:
            self._write(GroupBooked(group_id, reason))
        except JournalError:
            self._owes_ends = True
            raise

    def take(self, group_ids: tuple[GroupId, ...]) -> None:
        """Nobody needs these results again, nor the segments that hold nothing else.

        JournalError if the disk takes that only later.
        """
        for group_id in group_ids:
            self._needed.pop(group_id, None)
        self._owed_taken += group_ids
        position = min(self._needed.values(), default=self._journal.end)
        try:
            self._settle()
        except JournalError:
            if not self._journal.can_drop_before(position):
                raise
            # The disk may be full of these: what nobody needs makes room for saying so.
            self._owes_ends = True
            self._journal.drop_before(position)
            self._settle()
        self._drop_before(position)

    def free(self, position: int) -> None:
        """Drop the results before `position`, but for which groups have ended."""
        open_asks = (at for group, at in self._needed.items() if not self._has_ended(group))
        self._needed = {
            group: at
            for group, at in self._needed.items()
            if at >= position or not self._has_ended(group)
        }
        self._drop_before(min([position, *open_asks]))

    def close(self) -> None:
        self._journal.close()

    def _drop_before(self, position: int) -> None:
        if self._journal.can_drop_before(position):
            self._write_ends()
            self._journal.drop_before(position)

    def _write(self, entry: AnyEntry, *frames: Buffer) -> int:
        self._settle()
        return self._append(entry, *frames)

    def _settle(self) -> None:
        """Write what the disk did not take when it happened."""
        if self._owes_ends:
            self._write_ends()
        if self._owed_taken:
            self._append(GroupsTaken(tuple(self._owed_taken)))
            self._owed_taken.clear()

    def _write_ends(self) -> None:
        """All that must be known of what stands before this."""
        self._append(EndedSoFar({run: each.intervals() for run, each in self.ended.items()}))
        self._append(self.began)
        self._owes_ends = False

    def _append(self, entry: AnyEntry, *frames: Buffer) -> int:
        return self._journal.append([_encoder.encode(entry), *frames])

    def _replay(self, position: int, frames: list[bytes]) -> None:
        try:
            entry = _decoder.decode(frames[0])
        except (msgspec.MsgspecError, IndexError) as error:
            raise JournalError(f"the journal's record at {position} is unknown: {error}") from None
        match entry:
            case GroupAsked(group_id):
                self._open[group_id] = _asked_again(entry, frames[1])
                self._needed[group_id] = position
            case GroupKept(group_id, attempt, worker_id):
                self._end(group_id)
                num_bytes = sum(map(len, frames[1:]))
                self._untaken[group_id] = Filed(group_id, attempt, worker_id, position, num_bytes)
                self._needed[group_id] = position
            case _:
                self._replay_alone(entry)

    def _replay_alone(self, entry: AnyEntry) -> None:
        """An entry without further frames."""
        match entry:
            case RunBegan(run_id):
                self.began = entry
                self.ended.setdefault(run_id, IntervalSet())
            case GroupBooked(group_id):
                self._end(group_id)
                self._forget([group_id])
            case StepTaken(_, group_ids):
                for group_id in group_ids:
                    self._untaken.pop(group_id, None)
            case GroupsTaken(group_ids):
                self._forget(group_ids)
            case EndedSoFar(runs):
                for run_id, intervals in runs.items():
                    self.ended[run_id] = IntervalSet(intervals)
                self._forget([each for each in self._open if self._has_ended(each)])
            case _:
                pass

    def _end(self, group_id: GroupId) -> None:
        self.ended.setdefault(group_id.run_id, IntervalSet()).add(group_id.seq)
        self._open.pop(group_id, None)

    def _forget(self, group_ids: Sequence[GroupId]) -> None:
        for group_id in group_ids:
            self._open.pop(group_id, None)
            self._untaken.pop(group_id, None)
            self._needed.pop(group_id, None)

    def _has_ended(self, group_id: GroupId) -> bool:
        return group_id.seq in self.ended.get(group_id.run_id, ())


def _asked_again(entry: GroupAsked, body: bytes) -> Asked:
    """The ask of an earlier process; its first attempt may have begun, or be over."""
    left_s = max(entry.ends_s - time.time(), MOMENT_S) if entry.ends_s else 0.0
    return Asked(
        group_id=entry.group_id,
        env=entry.env,
        num_samples=entry.num_samples,
        priority=entry.priority,
        deadline_s=left_s,
        patience_s=entry.patience_s,
        attempts=1,
        body=body,
    )
