"""The client's journal: asks, results, drops, steps and published versions, on disk.

- An entry is written before its effect. A process that replays the entries knows what the last one
  knew. What a full disk refused is written before anything else.
- In memory there are only the positions of results. A segment is kept while an entry in it is
  needed; an open ask is written again instead of keeping a segment for long.
- Entries are needed that the last checkpoint but one does not cover, since the last may be damaged.
  Over the byte budget the last one decides.
- For each group that a checkpoint does not cover, `History` has one of three: open, a result, or
  dropped with a reason.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol

import msgspec

from rollmesh.core.config import JournalConfig
from rollmesh.core.errors import JournalError, WireError
from rollmesh.core.ids import GroupId, new_ticket
from rollmesh.core.journal import Journal
from rollmesh.core.types import GroupRecord, Task
from rollmesh.serve.client.arrivals import Dropped, RawResult, StoredResult, booked_of, open_result
from rollmesh.serve.client.asks import MOMENT_S, Asked
from rollmesh.serve.client.journal_entries import (
    Again,
    AnyEntry,
    GroupAsked,
    GroupBooked,
    GroupKept,
    GroupParted,
    Groups,
    GroupsTaken,
    GroupTried,
    Published,
    RunBegan,
    StateSaved,
    StepEntry,
    StepTaken,
    decode_entry,
    encode_entry,
)
from rollmesh.serve.client.journal_state import JournalPosition, JournalState, groups_in
from rollmesh.wire.frames import Buffer, Packet, decode_ask
from rollmesh.wire.messages import GroupFinished


class OpenAsk(msgspec.Struct, frozen=True, kw_only=True):
    """A group that was asked for and has not ended."""

    group_id: GroupId
    task: Task
    num_samples: int
    is_eval: bool
    asked_step: int
    """Copied from its request."""


class History(msgspec.Struct, frozen=True, kw_only=True):
    """Everything the next process must know beyond its newest checkpoint, in the order of the
    journal.
    """

    saved: StateSaved = StateSaved()
    """The newest checkpoint by which the journal was freed."""
    steps: tuple[StepTaken, ...] = ()
    step_deaths: dict[int, tuple[str, ...]] = {}
    """By step: how it ended earlier processes since it was last done, oldest first."""
    published: tuple[Published, ...] = ()
    results: tuple[StoredResult, ...] = ()
    """Results that are part of `steps`."""
    drops: tuple[GroupBooked, ...] = ()
    parted: tuple[GroupParted, ...] = ()
    """Results of `results` that the program had dropped."""
    again: dict[GroupId, Again] = {}
    """Groups of all the above whose task was asked for again."""
    evals: Groups = {}
    """Groups of all runs that were asked for and do not train."""
    open_asks: tuple[OpenAsk, ...] = ()
    num_asked: int = 0
    """Number of groups in all runs, those for evaluation included."""
    num_drawn: int = 0
    """Number of tasks in all runs."""


JOURNAL_FOLDER = "journal"
WORTH_MOVING = 2
"""Open requests are written again once that frees this many times their bytes."""


class Records(Protocol):
    """The part of core/journal.py's Journal that is used here."""

    @property
    def size_bytes(self) -> int: ...
    @property
    def end(self) -> int: ...
    def append(self, frames: Sequence[Buffer]) -> int: ...
    def read(self, position: int) -> list[bytes]: ...
    def replay(self) -> Iterator[tuple[int, list[bytes]]]: ...
    def can_drop_before(self, position: int) -> bool: ...
    def drop_before(self, position: int) -> None: ...
    def close(self) -> None: ...


class ClientJournal:
    """The journal of one client and the state of its entries; the constructor replays it."""

    def __init__(self, journal: Records, max_bytes: int) -> None:
        """Replay the journal; close it and raise JournalError if it is damaged or of another
        format.
        """
        self._journal = journal
        self._max_bytes = max_bytes
        self._state = JournalState()
        self._newest: StateSaved | None = None
        """The newest durable checkpoint, as long as it has freed nothing."""
        self._owed: list[GroupBooked | GroupParted | GroupsTaken | StateSaved] = []
        """Entries that the disk refused when they occurred."""
        self._owes_summary = False
        """Segments were dropped before everything that must be known of them was written."""
        self.ended = self._state.ended
        """Ended groups by run; the sink works on these sets."""
        try:
            for position, frames in journal.replay():
                place = JournalPosition(position, sum(map(len, frames[1:])))
                self._state.replay(_entry_in(position, frames), place)
        except JournalError:
            journal.close()
            raise
        self.earlier = self._state.began
        """The newest run of earlier processes."""

    @property
    def size_bytes(self) -> int:
        """Bytes on disk."""
        return self._journal.size_bytes

    @property
    def is_full(self) -> bool:
        """Whether it is over its byte budget, and a checkpoint (or taking results) would free some.

        Results that wait for their step leave by being trained, for which more requests may be
        needed.
        """
        is_over = self._journal.size_bytes > self._max_bytes
        return is_over and self._state.can_be_freed

    def history(self) -> History:
        """Return what the next process must know; JournalError if a request cannot be read."""
        state = self._state
        return History(
            saved=state.saved,
            steps=tuple(each.entry for each in state.steps.values()),
            step_deaths=state.deaths.by_step(),
            published=tuple(each.entry for each in state.published.values()),
            results=tuple(state.results()),
            drops=tuple(each.entry for each in state.drops.values()),
            parted=tuple(each.entry for each in state.parted.values()),
            again={
                each: state.entry.again for each, state in state.again.items() if state.entry.again
            },
            evals=groups_in(state.evals),
            open_asks=tuple(_open_ask(*each) for each in self._asks()),
            num_asked=sum(state.num_asked.values()),
            num_drawn=state.num_drawn,
        )

    def reopened(self) -> list[Asked]:
        """Return the open requests of earlier runs that were to outlive them."""
        tries = self._state.tries
        return [_asked_again(*each, tries.get(each[0].group_id)) for each in self._asks()]

    def begin(self, began: RunBegan, saved: StateSaved | None) -> list[StoredResult]:
        """Journal a new run; return the results of earlier ones that it receives, oldest first.

        With `saved`, the state of its newest checkpoint (or StateSaved() if there is none), the run
        redoes results that a step took, and whatever no checkpoint covers stays in the journal.
        Without, it redoes nothing, and only results that were not taken stay.
        """
        self._write(began)
        if saved is None:
            ready = self._state.ready()
            self._state.stop_redoing()
            return ready
        self._newest = saved if saved != StateSaved() else None
        left = set(self._state.learn(saved))
        self._make_room()
        return [each for each in self._state.ready() if each.group_id not in left]

    def load(self, filed: StoredResult) -> RawResult:
        """Return the result as it was kept, while it is needed; JournalError if it cannot be
        read.
        """
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

    def ask(self, asked: Asked) -> None:
        """Journal a request that is to outlive this process."""
        ends_s = time.time() + asked.deadline_s if asked.deadline_s > 0 else 0.0
        entry = GroupAsked(
            asked.group_id,
            asked.env,
            asked.num_samples,
            asked.priority,
            ends_s,
            asked.patience_s,
            asked.asked_step,
            asked.num_drawn,
            asked.is_eval,
            asked.again,
            asked.ticket,
        )
        self._write(entry, asked.body)

    def keep(
        self, message: GroupFinished, packet: Packet, record: GroupRecord | None = None
    ) -> RawResult:
        """Journal a result; for an incomplete one only a summary of each rollout.

        `record` is the decoded body, if the caller has decoded and checked it.
        """
        result = RawResult(
            group_id=message.group_id,
            attempt=message.attempt,
            worker_id=message.worker_id,
            complete=message.complete,
            body=packet.body,
            buffers=packet.buffers,
            position=-1,
            record=record,
        )
        if message.complete:
            event = GroupKept(message.group_id, message.attempt, message.worker_id)
            position = self._write(event, packet.body, *packet.buffers)
        else:
            dropped = open_result(result)
            assert isinstance(dropped, Dropped)
            position = self._write(self._booked(dropped))
        return msgspec.structs.replace(result, position=position)

    def note(self, entry: StepEntry | GroupTried) -> None:
        """Write one entry; JournalError if the disk does not take it."""
        self._write(entry)

    def drop(self, group_id: GroupId, reason: str) -> None:
        """Journal that a group in `ended` has no result; JournalError if that is delayed by the
        disk.
        """
        booked = self._booked(Dropped(group_id, reason))
        self._state.end(group_id)
        self._owed.append(booked)
        self._write_owed()

    def part(self, parted: GroupParted) -> None:
        """Journal that a result is dropped; JournalError if that is delayed by the disk.

        Without checkpoints the reason is not needed: the result counts as taken.
        """
        if not self._state.is_redone:
            self.take((parted.group_id,))
            return
        self._owed.append(parted)
        self._write_owed()

    def take(self, group_ids: tuple[GroupId, ...]) -> None:
        """Journal that these results are not needed again, and free segments with nothing else.

        If checkpoints are made, that happens once one covers it. JournalError if the disk delays
        it.
        """
        if self._state.is_redone:
            self._state.leave(group_ids)
            return
        self._state.forget(group_ids)
        self._owed.append(GroupsTaken(group_ids))
        self._release()

    def cover(self, saved: StateSaved) -> None:
        """Journal that a durable checkpoint covers this beside earlier ones; JournalError if the
        disk delays that.
        """
        before, self._newest = self._newest, saved
        try:
            if before:
                self._free(before)
        finally:
            self._make_room()

    def close(self) -> None:
        self._journal.close()

    # needed entries

    def _asks(self) -> Iterator[tuple[GroupAsked, bytes]]:
        """Return the open requests as they are in the journal."""
        for place in self._state.open.values():
            frames = self._journal.read(place.position)
            entry = _entry_in(place.position, frames)
            assert isinstance(entry, GroupAsked)
            yield entry, frames[1]

    def _booked(self, dropped: Dropped) -> GroupBooked:
        """Return an ended group with its task, if that was asked for here."""
        place, task_id = self._state.open.get(dropped.group_id), ""
        if place and not dropped.record:
            with suppress(JournalError, WireError):
                task_id = decode_ask(self._journal.read(place.position)[1]).task.id
        return booked_of(dropped, self._state.next_step, task_id)

    def _free(self, saved: StateSaved) -> None:
        """Release what this checkpoint covers."""
        self._state.cover(saved)
        self._owed.append(saved)
        self._release()

    def _make_room(self) -> None:
        """Over the budget, free by the newest checkpoint, though one more behind it would be
        safer.
        """
        if self._newest and self._journal.size_bytes > self._max_bytes:
            newest, self._newest = self._newest, None
            self._free(newest)

    def _release(self) -> None:
        """Write what the disk refused, and free segments that are not needed."""
        try:
            self._settle()
        except JournalError:
            position = self._state.floor(self._journal.end)
            # Which checkpoint freed a segment must be written before the segment is removed.
            if self._state.is_redone or not self._journal.can_drop_before(position):
                raise
            # The disk may be full of these: removing unneeded segments makes room for that entry.
            self._owes_summary = True
            self._journal.drop_before(position)
            self._settle()
        with suppress(JournalError):  # no room to write them again: they stay where they are
            self._move_asks()
        position = self._state.floor(self._journal.end)
        if self._journal.can_drop_before(position):
            self._write_summary()
            self._journal.drop_before(position)

    def _move_asks(self) -> None:
        """Write open requests again that alone keep old segments."""
        journal, state = self._journal, self._state
        rest = state.floor(journal.end, with_asks=False)
        if not journal.can_drop_before(rest):
            return
        num_freed = rest - (journal.end - journal.size_bytes)
        old = {group_id: at for group_id, at in state.open.items() if at.position < rest}
        if num_freed <= WORTH_MOVING * sum(at.num_bytes for at in old.values()):
            return
        for group_id, place in old.items():
            frames = journal.read(place.position)
            entry = _entry_in(place.position, frames)
            self._append(entry, *frames[1:])
            if group_id in state.tries:
                self._append(state.tries[group_id])

    # writing

    def _write(self, entry: AnyEntry, *frames: Buffer) -> int:
        self._write_owed()
        position = self._append(entry, *frames)
        with suppress(JournalError):  # entries of it that were not written are retried later
            self._make_room()
        return position

    def _write_owed(self) -> None:
        try:
            self._settle()
        finally:  # also after a part of it: requests are held while the journal is over its budget
            self._make_room()

    def _settle(self) -> None:
        """Write what the disk refused when it occurred."""
        while self._owed:
            self._append(self._owed[0])
            del self._owed[0]
        if self._owes_summary:  # which may say that a delayed entry has ended
            self._write_summary()

    def _write_summary(self) -> None:
        for entry in self._state.summary():
            self._append(entry)
        self._owes_summary = False

    def _append(self, entry: AnyEntry, *frames: Buffer) -> int:
        position = self._journal.append([encode_entry(entry), *frames])
        self._state.apply(entry, JournalPosition(position, sum(map(len, frames))))
        return position


def open_journal(folder: Path, config: JournalConfig) -> ClientJournal:
    """Open the journal in `folder`; JournalError if it is damaged, of another format, or in use by
    another process.
    """
    journal = Journal(folder / JOURNAL_FOLDER, config.segment_bytes, fsync=config.fsync)
    return ClientJournal(journal, config.max_bytes)


def _entry_in(position: int, frames: list[bytes]) -> AnyEntry:
    try:
        entry = decode_entry(frames)
    except JournalError as error:
        raise JournalError(f"the journal's record at {position}: {error}") from None
    if isinstance(entry, GroupAsked | GroupKept) and len(frames) < 2:
        raise JournalError(f"the journal's record at {position}: its body is missing")
    return entry


def _open_ask(entry: GroupAsked, body: bytes) -> OpenAsk:
    try:
        ask = decode_ask(body)
    except WireError as error:
        raise JournalError(f"the journal's ask of {entry.group_id}: {error}") from None
    return OpenAsk(
        group_id=entry.group_id,
        task=ask.task,
        num_samples=entry.num_samples,
        is_eval=ask.is_eval,
        asked_step=entry.asked_step,
    )


def _asked_again(entry: GroupAsked, body: bytes, tried: GroupTried | None) -> Asked:
    """Return the request of an earlier process; its first attempt may have begun, or be over."""
    left_s = max(entry.ends_s - time.time(), MOMENT_S) if entry.ends_s else 0.0
    return Asked(
        group_id=entry.group_id,
        env=entry.env,
        num_samples=entry.num_samples,
        priority=entry.priority,
        deadline_s=left_s,
        patience_s=entry.patience_s,
        attempts=tried.attempts if tried else 1,
        excused=tried.excused if tried else 0,
        asked_step=entry.asked_step,
        num_drawn=entry.num_drawn,
        is_eval=entry.is_eval,
        again=entry.again,
        body=body,
        ticket=entry.ticket or new_ticket(),
    )
