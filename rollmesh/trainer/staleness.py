"""Bounded staleness: how many rollouts may be under way, and which may still be trained.

The bound is on age where it counts, when a batch is taken: age = the train step that takes a group
minus the train step whose weights sampled its oldest token. Two rules keep it without waste:

    pacing    capacity = min(max_running - running,
                             (max_staleness + 1) * batch - (ready + training + running))
              counts what is consumed, not what was ever accepted, so it neither drifts with partial
              batches nor bursts after a recovery (compare AReaL, arXiv 2505.24298, eq. 3);
    waiting   a step is not taken while a group that would be too old for the next one still runs.

What is too old all the same (a straggler that outlived its deadline) is dropped with its age.

    ASKED -> READY -> TRAINING -> (gone: its weights are published)
      |        +----> STALE      (gone: dropped)
      +-------------> (gone: failed, cancelled)

Units: groups; a batch is `batch` groups. Evaluation is never counted here. Pure; driven by the
trainer's loop and by the simulator.
"""

import collections
import enum
from collections.abc import Iterable
from typing import Protocol

import msgspec

from rollmesh.core.ids import GroupId


class StalenessSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What paces and bounds."""

    batch: int
    """Groups that a step takes."""
    max_staleness: int
    """In train steps."""
    max_running: int
    """Groups asked for and not finished, at most."""


class Phase(enum.StrEnum):
    """Where a group stands; drawn in the module's docstring."""

    ASKED = "asked"
    READY = "ready"
    TRAINING = "training"


class GroupAsked(msgspec.Struct, frozen=True):
    group_id: GroupId


class GroupArrived(msgspec.Struct, frozen=True):
    group_id: GroupId
    oldest_step: int
    """Train step whose weights sampled the group's oldest token."""


class GroupEnded(msgspec.Struct, frozen=True):
    """It will not train: failed, cancelled, or nothing in it trains."""

    group_id: GroupId


class TakeBatch(msgspec.Struct, frozen=True):
    """The trainer is free; it is about to do `step`."""

    step: int


class StepPublished(msgspec.Struct, frozen=True):
    """Weights after `step` train steps are what engines sample with from now on."""

    step: int


Event = GroupAsked | GroupArrived | GroupEnded | TakeBatch | StepPublished


class BatchTaken(msgspec.Struct, frozen=True):
    """Train these, oldest first."""

    step: int
    group_ids: tuple[GroupId, ...]


class GroupStale(msgspec.Struct, frozen=True):
    """Too old for any step; it belongs in the drop ledger."""

    group_id: GroupId
    age: int


Action = BatchTaken | GroupStale


class _Entry(msgspec.Struct):
    phase: Phase
    floor_step: int
    """No token of the group is older than the weights after this many steps."""
    taken_step: int = -1


class Staleness(Protocol):
    """What anybody may see of a StalenessManager, who alone steps it."""

    @property
    def capacity(self) -> int: ...
    @property
    def num_running(self) -> int: ...
    @property
    def num_ready(self) -> int: ...
    @property
    def published_step(self) -> int: ...


class StalenessManager:
    """Counts groups from ask to published step and hands out batches within the age bound."""

    def __init__(self, settings: StalenessSettings, published_step: int = 0) -> None:
        """`published_step`: steps done by the weights that engines have now (after a recovery)."""
        self.settings = settings
        self._published_step = published_step
        self._entries: dict[GroupId, _Entry] = {}
        self._num = collections.Counter[Phase]()

    @property
    def capacity(self) -> int:
        """Groups that may be asked for now; never negative."""
        settings, under_way = self.settings, sum(self._num.values())
        room = (settings.max_staleness + 1) * settings.batch - under_way
        return max(0, min(settings.max_running - self.num_running, room))

    @property
    def num_running(self) -> int:
        return self._num[Phase.ASKED]

    @property
    def num_ready(self) -> int:
        return self._num[Phase.READY]

    @property
    def published_step(self) -> int:
        return self._published_step

    def step(self, event: Event) -> list[Action]:
        """Apply `event`; events about unknown groups change nothing."""
        match event:
            case GroupAsked():
                self._enter(event.group_id)
            case GroupArrived():
                self._arrive(event)
            case GroupEnded():
                self._leave([event.group_id])
            case TakeBatch():
                return self._take(event.step)
            case StepPublished():
                self._publish(event.step)
        return []

    def _enter(self, group_id: GroupId) -> None:
        if group_id not in self._entries:
            self._entries[group_id] = _Entry(Phase.ASKED, self._published_step)
            self._num[Phase.ASKED] += 1

    def _arrive(self, event: GroupArrived) -> None:
        entry = self._entries.get(event.group_id)
        if entry and entry.phase is Phase.ASKED:
            entry.floor_step = event.oldest_step
            self._move(entry, Phase.READY)

    def _take(self, step: int) -> list[Action]:
        oldest_allowed = step - self.settings.max_staleness
        stale = [
            (group_id, step - entry.floor_step)
            for group_id, entry in self._entries.items()
            if entry.phase is Phase.READY and entry.floor_step < oldest_allowed
        ]
        self._leave(group_id for group_id, _ in stale)
        actions: list[Action] = [GroupStale(group_id, age) for group_id, age in stale]
        if self.num_ready >= self.settings.batch and not self._would_outlive(oldest_allowed):
            actions.append(BatchTaken(step, self._oldest_ready(step)))
        return actions

    def _would_outlive(self, oldest_allowed: int) -> bool:
        # Exactly at the bound: it can join this step, and would be too old for the next. One that
        # is past it already will be dropped when it comes, so nobody waits for it.
        return any(
            entry.phase is Phase.ASKED and entry.floor_step == oldest_allowed
            for entry in self._entries.values()
        )

    def _oldest_ready(self, step: int) -> tuple[GroupId, ...]:
        ready = [
            (entry.floor_step, group_id)
            for group_id, entry in self._entries.items()
            if entry.phase is Phase.READY
        ]
        taken = tuple(group_id for _, group_id in sorted(ready)[: self.settings.batch])
        for group_id in taken:
            entry = self._entries[group_id]
            entry.taken_step = step
            self._move(entry, Phase.TRAINING)
        return taken

    def _publish(self, step: int) -> None:
        self._published_step = max(self._published_step, step)
        self._leave(
            [
                group_id
                for group_id, entry in self._entries.items()
                if entry.phase is Phase.TRAINING and entry.taken_step < self._published_step
            ]
        )

    def _leave(self, group_ids: Iterable[GroupId]) -> None:
        for group_id in group_ids:
            entry = self._entries.pop(group_id, None)
            if entry:
                self._num[entry.phase] -= 1

    def _move(self, entry: _Entry, phase: Phase) -> None:
        self._num[entry.phase] -= 1
        self._num[phase] += 1
        entry.phase = phase
