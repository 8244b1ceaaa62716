"""The state that the entries of a client's journal describe.

    OPEN --GroupKept----> KEPT ----StepTaken----> IN A STEP
      |                     +------GroupParted--> PARTED
      |                     +---GroupsTaken, StateSaved---+---> removed
      +----GroupBooked--> DROPPED --StateSaved--> removed

- Applying an entry when it is written gives the same state as replaying it.
- Positions only grow, so the oldest entry that is needed is the first of some dict here.
- Pure.
"""

from collections.abc import Iterable, Mapping
from itertools import chain
from typing import Any, Generic, Protocol, TypeVar

import msgspec

from rollmesh.core.ids import GroupId, IntervalSet
from rollmesh.serve.client.arrivals import StoredResult
from rollmesh.serve.client.journal_entries import (
    NOT_COUNTED,
    AnyEntry,
    EndedSoFar,
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
    StepBegun,
    StepEnded,
    StepTaken,
)

KILLED = "killed"
"""Cause of a process that ended without an entry: by a signal, or out of memory."""


class JournalPosition(msgspec.Struct, frozen=True):
    """Bytes of a record."""

    position: int
    num_bytes: int
    """Bytes of its frames after the entry."""


E = TypeVar("E")


class KeptResult(JournalPosition, frozen=True):
    """A complete result."""

    attempt: int
    worker_id: str

    def filed(self, group_id: GroupId) -> StoredResult:
        """The position in the form that programs have."""
        return StoredResult(group_id, self.attempt, self.worker_id, self.position, self.num_bytes)


class ReportedEntry(msgspec.Struct, Generic[E], frozen=True):
    """An entry that is needed as it is."""

    position: int
    entry: E


class Placed(Protocol):
    """A place in the journal."""

    @property
    def position(self) -> int: ...


class StepDeaths:
    """How steps that are to be redone have ended earlier processes, since each was last done."""

    def __init__(self) -> None:
        self._causes: dict[int, list[str]] = {}
        self._begun: StepBegun | None = None
        """The step that is being redone, or in which the last process was killed."""

    def apply(self, entry: StepBegun | StepEnded) -> None:
        """Apply one entry; a step that is done no longer has deaths."""
        before, self._begun = self._begun, entry if isinstance(entry, StepBegun) else None
        if self._begun:
            if before:  # its process ended without an entry
                self._causes.setdefault(before.step, []).append(_killed(before))
        elif isinstance(entry, StepEnded) and entry.why:
            if entry.why != NOT_COUNTED:
                self._causes.setdefault(entry.step, []).append(entry.why)
        else:
            self._causes.pop(entry.step, None)

    def forget_before(self, step: int) -> None:
        """Forget steps before this one, which are not redone any more."""
        self._causes = {at: causes for at, causes in self._causes.items() if at >= step}
        if self._begun and self._begun.step < step:
            self._begun = None

    def by_step(self) -> dict[int, tuple[str, ...]]:
        """Return the causes in order."""
        causes = {step: tuple(each) for step, each in self._causes.items()}
        if self._begun:
            before = causes.get(self._begun.step, ())
            causes[self._begun.step] = (*before, _killed(self._begun))
        return causes


class JournalState:
    """The state after all entries so far; its dicts are read-only for callers."""

    def __init__(self) -> None:
        self.is_redone = True
        """Entries that no checkpoint covers are reported to the next process, which redoes them."""
        self.began = RunBegan("")
        """The newest run."""
        self.ended: dict[str, IntervalSet] = {}
        """Ended groups by run; the sink works on these sets."""
        self.num_asked: dict[str, int] = {}
        """By run."""
        self.num_drawn = 0
        self.evals: dict[str, IntervalSet] = {}
        """Groups that were asked for and do not train."""
        self.open: dict[GroupId, JournalPosition] = {}
        self.tries: dict[GroupId, GroupTried] = {}
        self.kept: dict[GroupId, KeptResult] = {}
        """Groups that are in steps."""
        self._left: set[GroupId] = set()
        """Groups of `kept` that the program is done with."""
        self.parted: dict[GroupId, ReportedEntry[GroupParted]] = {}
        """Groups of `kept` that the program has dropped."""
        self.again: dict[GroupId, ReportedEntry[GroupAsked]] = {}
        """Requests for tasks of earlier groups, while anything of these is needed."""
        self.drops: dict[GroupId, ReportedEntry[GroupBooked]] = {}
        self.steps: dict[int, ReportedEntry[StepTaken]] = {}
        self.deaths = StepDeaths()
        self.published: dict[int, ReportedEntry[Published]] = {}
        self.saved = StateSaved()

    def replay(self, entry: AnyEntry, place: JournalPosition) -> None:
        """Apply one record of an earlier process."""
        self.apply(entry, place)
        if isinstance(entry, GroupKept | GroupBooked):
            self._ended_of(entry.group_id).add(entry.group_id.seq)

    def apply(self, entry: AnyEntry, place: JournalPosition) -> None:
        """Apply one record as it is written; that its group has ended is decided by the sink."""
        match entry:
            case RunBegan(run_id):
                self.began = entry
                self.ended.setdefault(run_id, IntervalSet())
                self.num_asked.setdefault(run_id, 0)
            case GroupAsked(group_id):
                self._count(group_id)
                self.num_drawn = max(self.num_drawn, entry.num_drawn)
                self._ended_of(group_id)
                self.open.pop(group_id, None)  # one that is written again is the newest
                self.open[group_id] = place
                self._tell_apart(entry, place.position)
            case GroupTried(group_id):
                if group_id in self.open:
                    self.tries[group_id] = entry
            case GroupKept(group_id, attempt, worker_id):
                self.end(group_id)
                self._count(group_id)
                kept = KeptResult(place.position, place.num_bytes, attempt, worker_id)
                self.kept[group_id] = kept
            case _:
                self._apply_alone(entry, place.position)

    def forget(self, group_ids: Iterable[GroupId]) -> None:
        """Remove groups of which nothing is needed."""
        for group_id in group_ids:
            self.open.pop(group_id, None)
            self.tries.pop(group_id, None)
            self.kept.pop(group_id, None)
            self._left.discard(group_id)
            self.parted.pop(group_id, None)
            self.again.pop(group_id, None)
            self.drops.pop(group_id, None)

    def end(self, group_id: GroupId) -> None:
        """Close a group; that its task was asked for again stays known."""
        again = self.again.get(group_id)
        self.forget([group_id])
        if again:
            self.again[group_id] = again

    def learn(self, saved: StateSaved) -> list[GroupId]:
        """Record groups that left by a checkpoint as ended, whatever happened to the entry of their
        end.
        """
        for run_id, intervals in saved.gone.items():
            self._include(run_id, intervals)
        gone = {run_id: IntervalSet(intervals) for run_id, intervals in saved.gone.items()}
        known = chain(self.open, self.kept, self.drops)
        left = [each for each in known if each.seq in gone.get(each.run_id, ())]
        self.forget([each for each in left if each in self.open])
        return left

    def cover(self, saved: StateSaved) -> None:
        """Forget the steps, versions and ends that this checkpoint covers.

        It may be older than the newest one, which a program could not read.
        """
        known = self.saved
        if (saved.num_steps, saved.policy_version) >= (known.num_steps, known.policy_version):
            self.saved = saved
        self.forget(self.learn(saved))
        self.steps = {at: stored for at, stored in self.steps.items() if at >= saved.num_steps}
        self.deaths.forget_before(saved.num_steps)
        self.published = {
            policy_version: stored
            for policy_version, stored in self.published.items()
            if policy_version > saved.policy_version
        }

    def stop_redoing(self) -> None:
        """Forget what steps took and what was dropped: no checkpoints are made."""
        self.is_redone = False
        self.steps.clear()
        self.deaths = StepDeaths()
        self.drops.clear()
        self.published.clear()
        self.parted.clear()
        self.again.clear()

    @property
    def can_be_freed(self) -> bool:
        """Return whether there is more than open requests and results that wait for a step."""
        done = self.steps or self.drops or self.parted or self._left
        return not self.is_redone or bool(done)

    @property
    def next_step(self) -> int:
        """Return the first step that no entry takes."""
        return max([self.saved.num_steps, *(step + 1 for step in self.steps)])

    def leave(self, group_ids: Iterable[GroupId]) -> None:
        """Return the groups that the next checkpoint will cover."""
        self._left |= self.kept.keys() & set(group_ids)

    def results(self) -> list[StoredResult]:
        """Return all results, oldest first."""
        return [kept.filed(group_id) for group_id, kept in self.kept.items()]

    def ready(self) -> list[StoredResult]:
        """Return results that no step took and the program did not drop, oldest first."""
        taken = set(chain.from_iterable(stored.entry.group_ids for stored in self.steps.values()))
        taken |= self.parted.keys()
        return [each for each in self.results() if each.group_id not in taken]

    def floor(self, end: int, *, with_asks: bool = True) -> int:
        """Return the place of the oldest entry that is needed; `end` if there is none."""
        # A step comes after the results that it took, and these are needed as long as it is.
        kinds: list[Mapping[Any, Placed]] = [self.kept, self.drops, self.published]
        kinds += [self.open] if with_asks else []
        firsts = [next(iter(kind.values())).position for kind in kinds if kind]
        ended = (stored.position for each, stored in self.again.items() if each not in self.open)
        return min([*firsts, *ended], default=end)

    def summary(self) -> list[AnyEntry]:
        """Return everything that must be known of the journal before this point."""
        so_far = EndedSoFar(
            groups_in(self.ended), dict(self.num_asked), self.num_drawn, groups_in(self.evals)
        )
        return [so_far, self.saved, self.began]

    def _apply_alone(self, entry: AnyEntry, position: int) -> None:
        match entry:
            case GroupBooked(group_id):
                self.end(group_id)
                self._count(group_id)
                if self.is_redone:
                    self.drops[group_id] = ReportedEntry(position, entry)
            case GroupParted(group_id) if self.is_redone and group_id in self.kept:
                self.parted[group_id] = ReportedEntry(position, entry)
            case GroupsTaken(group_ids):
                self.forget(group_ids)
            case StepTaken(step) if self.is_redone:
                self.steps[step] = ReportedEntry(position, entry)
            case StepBegun() | StepEnded() if self.is_redone:
                self.deaths.apply(entry)
            case Published(policy_version) if self.is_redone:
                self.published[policy_version] = ReportedEntry(position, entry)
            case StateSaved():
                self.cover(entry)
            case EndedSoFar():
                self._end_so_far(entry)

    def _end_so_far(self, entry: EndedSoFar) -> None:
        self.num_drawn = max(self.num_drawn, entry.num_drawn)
        self.evals |= {run: IntervalSet(intervals) for run, intervals in entry.evals.items()}
        for run_id, intervals in entry.runs.items():
            self._include(run_id, intervals)
            last = intervals[-1][1] if intervals else 0
            self.num_asked[run_id] = max(last, entry.num_asked.get(run_id, 0))
        # Some have no entry of their own because the disk was full.
        self.forget([each for each in self.open if each.seq in self._ended_of(each)])

    def _include(self, run_id: str, intervals: list[tuple[int, int]]) -> None:
        # Beside what is known: a result may be written and make room before its sink reports it.
        ended = self.ended.setdefault(run_id, IntervalSet())
        for start, stop in intervals:
            ended.include(start, stop)

    def _tell_apart(self, asked: GroupAsked, position: int) -> None:
        """Return groups that are not the first request of a task that trains."""
        if asked.is_eval:
            self.evals.setdefault(asked.group_id.run_id, IntervalSet()).add(asked.group_id.seq)
        if asked.again and self.is_redone:
            self.again.pop(asked.group_id, None)
            self.again[asked.group_id] = ReportedEntry(position, asked)

    def _count(self, group_id: GroupId) -> None:
        known = self.num_asked.get(group_id.run_id, 0)
        self.num_asked[group_id.run_id] = max(known, group_id.seq + 1)

    def _ended_of(self, group_id: GroupId) -> IntervalSet:
        return self.ended.setdefault(group_id.run_id, IntervalSet())


def _killed(begun: StepBegun) -> str:
    return f"{KILLED} under process {begun.launch}"


def groups_in(runs: Mapping[str, IntervalSet]) -> Groups:
    """Return the same as plain values."""
    return {run: each.intervals() for run, each in runs.items()}
