"""Bounded staleness: how many rollouts may be open, and which may still be trained.

The bound is on age when a batch is taken: age = the train step that takes a sample minus the train
step whose weights sampled its oldest token.

    pacing    capacity = min(max_concurrent - running,
                             (max_staleness + 1) * batch - (ready + training + running))
              It counts what was consumed, not what was ever accepted, so it neither drifts with
              partial batches nor bursts after a recovery (compare rollmesh/compat.py). Rollouts
              that a step takes beyond a batch do not reduce the room of the next one, and nothing
              is requested that is already too old for the next step
              (docs/explanation/staleness.md). `trainer.staleness_formula = "known"` selects
              AReaL's formula
    taking    oldest first, until the batch is full; then all that the next step could not take
    waiting   (policy `wait`) no step is taken while a group that will be too old for the next one
              still runs

A group that is too old leaves with its age: under `wait` only one older than when it was requested
(by an earlier process, say); under `drop` and `requeue` every straggler; under `mask` one with no
token within the bound, while older tokens of other groups do not train.

    ASKED -> READY -> TRAINING -> (consumed: its weights are published)
      |        +----> STALE      (gone: dropped)
      +-------------> (gone: failed, cancelled)

- Units are rollouts; a group of them is atomic. Evaluations are not counted.
- The public properties can be read from any thread.
"""

import collections
import enum
import threading
from collections.abc import Iterable, Mapping
from typing import Protocol

import msgspec

from rollmesh.core.config import StalenessFormula, StalePolicy
from rollmesh.core.ids import GroupId


class GroupAdmitted(msgspec.Struct, frozen=True):
    """Event: a group was requested."""

    group_id: GroupId
    num_rollouts: int
    asked_step: int = -1
    """Train steps of the weights that engines had at the request; -1: of their current weights."""


class GroupArrived(msgspec.Struct, frozen=True):
    """Event: a group has a result that may train."""

    group_id: GroupId
    num_rollouts: int
    """Rollouts that train; at least one."""
    oldest_step: int
    """Train step whose weights sampled the group's oldest token."""
    newest_steps: tuple[int, ...] = ()
    """Train step of each rollout's newest token; only `mask` needs it."""


class GroupEnded(msgspec.Struct, frozen=True):
    """Event: a group will not train: it failed, was cancelled, or nothing in it trains."""

    group_id: GroupId


class TakeBatch(msgspec.Struct, frozen=True):
    """Event: the trainer is ready for `step`."""

    step: int
    num_rollouts: int = 0
    """Minimum number of rollouts; 0: `settings.batch`."""


class StepPublished(msgspec.Struct, frozen=True):
    """Event: engines sample with the weights after `step` train steps."""

    step: int
    policy_version: int | None = None
    """Version of these weights; None: the number of the step."""


class StepRetaken(msgspec.Struct, frozen=True):
    """Event: a recovery redoes `step` with these groups, whose age was checked the first time."""

    step: int
    group_ids: tuple[GroupId, ...]
    oldest_step: int = 0
    """`oldest_step` of its BatchTaken, if older tokens were masked."""


Event = GroupAdmitted | GroupArrived | GroupEnded | TakeBatch | StepPublished | StepRetaken


class BatchTaken(msgspec.Struct, frozen=True):
    """Action: train these groups, oldest first."""

    step: int
    group_ids: tuple[GroupId, ...]
    oldest_step: int
    """Tokens of older weights are beyond the bound; only `mask` leaves any in a batch."""


class GroupStale(msgspec.Struct, frozen=True):
    """Action: drop this group, which is too old for any step."""

    group_id: GroupId
    age: int


Action = BatchTaken | GroupStale


KNOWN_STEPS = 1000
"""Published steps whose policy versions are kept."""


class StalenessSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds and policies; see the fields of the same meaning in TrainerConfig."""

    batch: int
    """Minimum number of rollouts of a step."""
    max_staleness: int
    """In train steps."""
    max_concurrent: int
    """Maximum number of open rollouts."""
    policy: StalePolicy = "wait"
    """Treatment of stragglers that would be too old."""
    formula: StalenessFormula = "under_way"
    """Formula of the capacity."""


class GroupPhase(enum.StrEnum):
    """The state of a group; transitions are in the module docstring."""

    ASKED = "asked"
    READY = "ready"
    TRAINING = "training"


class StalenessState(msgspec.Struct, frozen=True, kw_only=True):
    """A consistent copy of all public numbers; see Staleness."""

    capacity: int = 0
    running: int = 0
    ready: int = 0
    training: int = 0
    consumed: int = 0
    oldest_version: int | None = None
    histogram: dict[int, int] = {}


class Staleness(Protocol):
    """The read-only view of a StalenessManager; in rollouts."""

    @property
    def capacity(self) -> int:
        """Number that may be requested now; never negative."""

    @property
    def running(self) -> int:
        """Number that is open."""

    @property
    def ready(self) -> int:
        """Number that has ended and waits for a step."""

    @property
    def training(self) -> int:
        """Number taken by a step whose weights are not published yet."""

    @property
    def consumed(self) -> int:
        """Number trained into published weights."""

    @property
    def oldest_version(self) -> int | None:
        """Policy version of the oldest token that is open or ready; None if there is none."""

    @property
    def histogram(self) -> Mapping[int, int]:
        """Rollouts that steps took, by the age of the group's oldest token."""


class _Entry(msgspec.Struct):
    phase: GroupPhase
    num_rollouts: int
    floor_step: int
    """No trainable token of the group is older than the weights after this many steps."""
    newest_steps: tuple[int, ...] = ()
    taken_step: int = -1


class StalenessManager:
    """Counts rollouts from request to published step, and forms batches within the age bound."""

    def __init__(
        self,
        settings: StalenessSettings,
        published_step: int = 0,
        policy_version: int | None = None,
        restored: StalenessState | None = None,
    ) -> None:
        """After a recovery, `published_step` and `policy_version` are those of the weights that
        engines have, and `restored` has the counts of the checkpoint."""
        self.settings = settings
        before = restored or StalenessState()
        self._lock = threading.Lock()
        self._published_step = published_step
        self._version_of_step = {published_step: _named(published_step, policy_version)}
        self._batch = settings.batch
        self._next_step = published_step
        self._entries: dict[GroupId, _Entry] = {}
        self._num = collections.Counter[GroupPhase]()
        self._taken = collections.Counter[int]()
        """Rollouts of each step whose weights are not published."""
        self._consumed = before.consumed + before.training
        # As in AReaL's on_version_recovered, each step until now has consumed one batch.
        self._uncounted = published_step * settings.batch - self._consumed
        self._histogram = collections.Counter[int](before.histogram)

    @property
    def capacity(self) -> int:
        with self._lock:
            return self._capacity()

    @property
    def running(self) -> int:
        with self._lock:
            return self._num[GroupPhase.ASKED]

    @property
    def ready(self) -> int:
        with self._lock:
            return self._num[GroupPhase.READY]

    @property
    def training(self) -> int:
        with self._lock:
            return self._num[GroupPhase.TRAINING]

    @property
    def consumed(self) -> int:
        with self._lock:
            return self._consumed

    @property
    def oldest_version(self) -> int | None:
        with self._lock:
            return self._oldest_version()

    @property
    def histogram(self) -> Mapping[int, int]:
        with self._lock:
            return dict(self._histogram)

    @property
    def published_step(self) -> int:
        """Steps done by the weights that engines have."""
        with self._lock:
            return self._published_step

    @property
    def state(self) -> StalenessState:
        """All of them together."""
        with self._lock:
            return StalenessState(
                capacity=self._capacity(),
                running=self._num[GroupPhase.ASKED],
                ready=self._num[GroupPhase.READY],
                training=self._num[GroupPhase.TRAINING],
                consumed=self._consumed,
                oldest_version=self._oldest_version(),
                histogram=dict(self._histogram),
            )

    def step(self, event: Event) -> list[Action]:
        """Apply `event`; events of unknown groups change nothing."""
        with self._lock:
            match event:
                case GroupAdmitted():
                    self._admit(event)
                case GroupArrived():
                    self._arrive(event)
                case GroupEnded():
                    self._remove([event.group_id])
                case TakeBatch():
                    return self._take(event)
                case StepPublished():
                    self._publish(event)
                case StepRetaken():
                    self._retake(event)
        return []

    def _capacity(self) -> int:
        settings, running = self.settings, self._num[GroupPhase.ASKED]
        if self._next_step - self._published_step > settings.max_staleness:
            return 0  # no step could take a new rollout
        room = self._known_room() if settings.formula == "known" else self._room()
        return max(0, min(settings.max_concurrent - running, room))

    def _room(self) -> int:
        training = sum(min(num, self._batch) for num in self._taken.values())
        under_way = self._num[GroupPhase.READY] + training + self._num[GroupPhase.ASKED]
        return (self.settings.max_staleness + 1) * self._batch - under_way

    def _known_room(self) -> int:
        """AReaL's formula in rollouts (rollmesh/compat.py), and at least what the next batch needs:
        steps that took more than a batch would otherwise leave no room in the end."""
        num_next = self._num[GroupPhase.READY] + self._num[GroupPhase.ASKED]
        accepted = self._uncounted + self._consumed + self._num[GroupPhase.TRAINING]
        steps = self.settings.max_staleness + self._published_step + 1
        return max(steps * self._batch - accepted - num_next, self._batch - num_next)

    def _oldest_version(self) -> int | None:
        waiting = [
            e.floor_step for e in self._entries.values() if e.phase is not GroupPhase.TRAINING
        ]
        if not waiting:
            return None
        first = min(self._version_of_step)
        known = (step for step in self._version_of_step if step <= min(waiting))
        return self._version_of_step[max(known, default=first)]

    def _admit(self, event: GroupAdmitted) -> None:
        if event.group_id not in self._entries:
            floor_step = self._published_step if event.asked_step < 0 else event.asked_step
            entry = _Entry(GroupPhase.ASKED, event.num_rollouts, floor_step)
            self._entries[event.group_id] = entry
            self._num[GroupPhase.ASKED] += event.num_rollouts

    def _arrive(self, event: GroupArrived) -> None:
        entry = self._entries.get(event.group_id)
        if entry and entry.phase is GroupPhase.ASKED:
            entry.floor_step, entry.newest_steps = event.oldest_step, event.newest_steps
            self._move(entry, GroupPhase.READY, event.num_rollouts)

    def _take(self, event: TakeBatch) -> list[Action]:
        wanted = event.num_rollouts or self.settings.batch
        self._batch = max(self.settings.batch, wanted)
        oldest_allowed = event.step - self.settings.max_staleness
        actions = self._drop_stale(event.step, oldest_allowed)
        if self._num[GroupPhase.READY] < wanted or self._is_awaited(oldest_allowed):
            return actions
        group_ids = self._oldest_ready(wanted, oldest_allowed)
        self._train(event.step, group_ids)
        return [*actions, BatchTaken(event.step, group_ids, oldest_allowed)]

    def _drop_stale(self, step: int, oldest_allowed: int) -> list[Action]:
        """Drop groups that no step can take any more."""
        stale: list[Action] = []
        for group_id, entry in list(self._entries.items()):
            is_past = entry.phase is GroupPhase.READY and entry.floor_step < oldest_allowed
            is_masked = self.settings.policy == "mask"
            if is_past and not (is_masked and self._mask(entry, oldest_allowed)):
                self._remove([group_id])
                stale.append(GroupStale(group_id, step - entry.floor_step))
        return stale

    def _mask(self, entry: _Entry, oldest_step: int) -> bool:
        """Count a ready group without its older tokens; return whether anything is left."""
        num_left = sum(newest >= oldest_step for newest in entry.newest_steps)
        if num_left:
            entry.floor_step = oldest_step
            self._move(entry, GroupPhase.READY, num_left)
        return num_left > 0

    def _is_awaited(self, oldest_allowed: int) -> bool:
        # Exactly at the bound: it can join this step, and would be too old for the next. A group
        # beyond the bound is dropped when it arrives, so no step waits for it.
        return self.settings.policy == "wait" and any(
            entry.phase is GroupPhase.ASKED and entry.floor_step == oldest_allowed
            for entry in self._entries.values()
        )

    def _oldest_ready(self, wanted: int, oldest_allowed: int) -> tuple[GroupId, ...]:
        ready = sorted(
            (entry.floor_step, group_id)
            for group_id, entry in self._entries.items()
            if entry.phase is GroupPhase.READY
        )
        taken, num_taken = [], 0
        for floor_step, group_id in ready:
            if num_taken >= wanted and floor_step > oldest_allowed:
                break
            taken.append(group_id)
            num_taken += self._entries[group_id].num_rollouts
        return tuple(taken)

    def _retake(self, event: StepRetaken) -> None:
        for group_id in event.group_ids:
            entry = self._entries.get(group_id)
            if entry and entry.phase is GroupPhase.READY and entry.floor_step < event.oldest_step:
                self._mask(entry, event.oldest_step)
        self._train(event.step, event.group_ids)

    def _train(self, step: int, group_ids: Iterable[GroupId]) -> None:
        self._next_step = max(self._next_step, step + 1)
        for group_id in group_ids:
            entry = self._entries.get(group_id)
            if entry and entry.phase is not GroupPhase.TRAINING:
                entry.taken_step = step
                self._move(entry, GroupPhase.TRAINING, entry.num_rollouts)
                self._taken[step] += entry.num_rollouts
                self._histogram[step - entry.floor_step] += entry.num_rollouts

    def _publish(self, event: StepPublished) -> None:
        self._published_step = max(self._published_step, event.step)
        done = [
            group_id
            for group_id, entry in self._entries.items()
            if entry.phase is GroupPhase.TRAINING and entry.taken_step < self._published_step
        ]
        self._consumed += sum(self._entries[group_id].num_rollouts for group_id in done)
        self._remove(done)
        for step in [step for step in self._taken if step < self._published_step]:
            del self._taken[step]
        self._version_of_step[event.step] = _named(event.step, event.policy_version)
        if len(self._version_of_step) > KNOWN_STEPS:
            del self._version_of_step[min(self._version_of_step)]

    def _remove(self, group_ids: Iterable[GroupId]) -> None:
        for group_id in group_ids:
            entry = self._entries.pop(group_id, None)
            if entry:
                self._num[entry.phase] -= entry.num_rollouts
                if entry.phase is GroupPhase.TRAINING:
                    self._taken[entry.taken_step] -= entry.num_rollouts

    def _move(self, entry: _Entry, phase: GroupPhase, num_rollouts: int) -> None:
        self._num[entry.phase] -= entry.num_rollouts
        self._num[phase] += num_rollouts
        entry.phase, entry.num_rollouts = phase, num_rollouts


def _named(step: int, policy_version: int | None) -> int:
    return step if policy_version is None else policy_version
