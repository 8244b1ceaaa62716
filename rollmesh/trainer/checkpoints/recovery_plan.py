"""The loop's state in a checkpoint, when to make one, and how a restarted trainer continues. Pure.

    steps <  num_steps                 are in the checkpoint's weights
    num_steps <= steps < next_step     are redone, each with its own groups
    next_step                          is the first that takes new groups

- A checkpoint's state is plain values in loop.json, all of one moment between two steps. Later
  journal entries are not in it.
- A step that repeatedly ends the trainer in the same way is poisoned: it is not redone, and its
  groups are dropped.
- A group that has left (trained or dropped, by the checkpoint) never returns. Any other is exactly
  one of: in a step to redo, ready, parted, dropped, open. Earlier decisions do not change, whatever
  the settings are now.
- A step's number or a policy version is never reused, even if a checkpoint became damaged.
"""

import collections
from collections.abc import Iterator, Mapping, Sequence

import msgspec

from rollmesh.core.ids import GroupId, IntervalSet
from rollmesh.core.types import Json, Task
from rollmesh.serve.client.arrivals import StoredResult
from rollmesh.serve.client.journal import History, OpenAsk
from rollmesh.serve.client.journal_entries import (
    Again,
    GroupBooked,
    GroupParted,
    Groups,
    StateSaved,
    StepTaken,
)
from rollmesh.serve.client.journal_state import KILLED
from rollmesh.trainer.staleness import GroupAdmitted


class PendingTask(msgspec.Struct, frozen=True):
    """A task that is to be requested again."""

    task: Task
    again: Again


class LoopState(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The loop's state after `num_steps` train steps and before the next."""

    num_steps: int
    """Steps done; the next step has this number. The learning rate is a function of it."""
    policy_version: int = 0
    """The last one assigned."""
    step_of_version: dict[int, int] = {}
    """Train steps behind each policy version that samples may still have."""
    num_tasks: int = 0
    """Position in the data: tasks drawn from the environment."""
    ended: dict[str, list[tuple[int, int]]] = {}
    """Groups that have left (trained or dropped): half-open intervals of seq, by run_id."""
    waiting: tuple[PendingTask, ...] = ()
    """Tasks to request before new ones, and repeated requests that have not ended: the journal
    shows which of these it contains."""
    staleness: dict[str, Json] = {}
    """Counters of the StalenessManager, by name."""
    tally: dict[str, Json] = {}
    """Counts behind summary.json, in the form of `Tally`."""
    offsets: dict[str, int] = {}
    """Bytes written to each record file (metrics.jsonl, ...), by its name."""

    def to_journal(self) -> StateSaved:
        """Return the part that the journal records."""
        return StateSaved(
            self.num_steps, self.policy_version, self.ended, dict(self.step_of_version)
        )


FORCED_RETRY_S = 10.0
"""Delay before the retry of a forced checkpoint that the disk refused."""


class CheckpointSchedule:
    """Decides when to begin a checkpoint.

    - One is due every `period_steps` steps, or if the journal is over its byte budget and a
      checkpoint would free some of it.
    - One that came due during another is due after it. If the disk refuses one that a full journal
      forced, it is retried after FORCED_RETRY_S.
    """

    def __init__(self, period_steps: int, num_gone: int) -> None:
        """`num_gone` is the number of groups that have left according to the newest durable
        checkpoint."""
        self._period_steps = period_steps
        self._num_gone = num_gone
        self._is_due = False
        self._force_from_s = 0.0

    def stepped(self, num_steps: int) -> None:
        """Record that `num_steps` steps are done."""
        self._is_due = self._is_due or num_steps % self._period_steps == 0

    def is_now(self, num_gone: int, now_s: float, *, is_full: bool) -> bool:
        """Return whether to begin a checkpoint if none is being written: `num_gone` groups have
        left, and `is_full` is the state of the journal."""
        return self._is_due or (
            is_full and num_gone > self._num_gone and now_s >= self._force_from_s
        )

    def begun(self, now_s: float) -> None:
        """Record that a checkpoint is being written."""
        self._is_due = False
        self._force_from_s = now_s + FORCED_RETRY_S

    def settled(self, num_gone: int) -> None:
        """Record that a checkpoint with `num_gone` groups is durable."""
        self._num_gone = num_gone
        self._force_from_s = 0.0


NUM_NAMED = 4
"""Groups listed in a log line."""
MAX_ERRORS = 2
"""Deaths by the same exception at the same place that make a step poisoned."""
MAX_KILLS = 3
"""Deaths without an exception (a signal, out of memory) while the step was redone, in processes of
one launch. One more than MAX_ERRORS, because an operator may kill a trainer twice at one place."""
POISONED = "poisoned_step"


class RecoveryPlan(msgspec.Struct, frozen=True, kw_only=True):
    """How a restarted trainer continues."""

    num_steps: int
    """Steps in the checkpoint's weights; 0 without a checkpoint."""
    redo: tuple[StepTaken, ...]
    """Ascending; the results of all their groups exist."""
    next_step: int
    policy_version: int
    """For the next publication; higher than every earlier version."""
    step_of_version: dict[int, int]
    num_tasks: int
    """Tasks drawn so far."""
    num_asked: int
    """Groups requested by all incarnations, including those for evaluation."""
    evals: Groups
    """The groups among them that were for evaluation."""
    results: dict[GroupId, StoredResult]
    """Results of `redo` and `parted`."""
    parted: tuple[GroupParted, ...]
    """Results that earlier processes dropped, or of a poisoned step, and that the checkpoint does
    not cover; the client does not deliver them. `times` is 0 if the request that was to follow
    exists."""
    waiting: tuple[PendingTask, ...]
    """Tasks to request again; those of `parted` follow them."""
    again: dict[GroupId, Again]
    """For each new group, the one that it repeats."""
    ready: tuple[StoredResult, ...]
    """Delivered by the client; oldest first."""
    open_asks: tuple[OpenAsk, ...]
    """Requests that continue."""
    drops: tuple[GroupBooked, ...]
    """Groups that ended without a result and that the checkpoint does not cover; they are not
    delivered."""
    saved: StateSaved
    """For the client's `start`."""
    lines: tuple[str, ...]
    """Lost groups and samples, each with its reason; usually empty."""

    def is_eval(self, group_id: GroupId) -> bool:
        """Return whether the group was requested for evaluation."""
        intervals = self.evals.get(group_id.run_id, ())
        return any(start <= group_id.seq < stop for start, stop in intervals)


def plan_recovery(saved: LoopState | None, history: History) -> RecoveryPlan:
    """Plan how to continue from `saved`, or from the initial weights if it is None."""
    state = saved or LoopState(num_steps=0, step_of_version={0: 0})
    gone = {run_id: IntervalSet(intervals) for run_id, intervals in state.ended.items()}

    def is_left(group_id: GroupId) -> bool:
        return group_id.seq not in gone.get(group_id.run_id, ())

    kept = {each.group_id: each for each in history.results if is_left(each.group_id)}
    taken = [each for each in history.steps if each.step >= state.num_steps]
    poisoned = {
        each.step: f"step {each.step} {why}"
        for each in taken
        if (why := poison_reason(history.step_deaths.get(each.step, ())))
    }
    redo, losses = _with_results([each for each in taken if each.step not in poisoned], kept)
    in_step = {group_id for each in redo for group_id in each.group_ids}
    versions = {each.policy_version: each.step for each in history.published}
    newest = max([state.policy_version, history.saved.policy_version, *versions])
    # `state` is incomplete if the checkpoint that freed the journal has become damaged.
    made = state.step_of_version | history.saved.step_of_version | versions
    ends = [each.step + 1 for each in taken]
    next_step = max([state.num_steps, history.saved.num_steps, *ends])
    asked_again = {each.group_id for each in history.again.values()}
    parted = [each for each in history.parted if each.group_id in kept]
    parted = [each for each in parted if each.group_id not in in_step]
    known = {each.group_id for each in parted}
    dropped = [each for each in _dropped(taken, poisoned) if each.group_id in kept]
    parted += [each for each in dropped if each.group_id not in known]
    covered = in_step | {each.group_id for each in parted}
    return RecoveryPlan(
        num_steps=state.num_steps,
        redo=tuple(redo),
        next_step=next_step,
        policy_version=newest + 1,
        step_of_version=dict(sorted(made.items())),
        num_tasks=history.num_drawn or state.num_tasks,
        num_asked=history.num_asked,
        evals=history.evals,
        results={group_id: kept[group_id] for group_id in covered},
        parted=tuple(
            msgspec.structs.replace(each, times=0) if each.group_id in asked_again else each
            for each in parted
        ),
        waiting=tuple(each for each in state.waiting if each.again.group_id not in asked_again),
        again=history.again,
        ready=tuple(each for group_id, each in kept.items() if group_id not in covered),
        open_asks=tuple(each for each in history.open_asks if is_left(each.group_id)),
        drops=tuple(each for each in history.drops if is_left(each.group_id)),
        saved=state.to_journal() if saved else StateSaved(),
        lines=(
            *_missing_steps(state.num_steps, next_step, taken),
            *losses,
            *(f"{why}; it is skipped and its groups are dropped" for why in poisoned.values()),
        ),
    )


def _dropped(taken: Sequence[StepTaken], poisoned: Mapping[int, str]) -> Iterator[GroupParted]:
    """Yield the groups of poisoned steps, with the reason for the drop log."""
    for each in taken:
        for group_id in each.group_ids if each.step in poisoned else ():
            yield GroupParted(group_id, f"{POISONED}: {poisoned[each.step]}", each.step)


def poison_reason(deaths: Sequence[str]) -> str:
    """Return how a step has ended trainers too often in the same way, or ''."""
    for why, num in collections.Counter(deaths).items():
        if num >= (MAX_KILLS if why.startswith(KILLED) else MAX_ERRORS):
            return f"ended the trainer {num} times: {why}"
    return ""


def admitted_groups(recovery: RecoveryPlan, num_rollouts: int) -> list[GroupAdmitted]:
    """Return the groups, of `num_rollouts` each, that a StalenessManager must count before its
    capacity is read.

    It learns that one has a result when that is delivered, or when its step is redone.
    """
    here = [group_id for step in recovery.redo for group_id in step.group_ids]
    here += [each.group_id for each in recovery.ready if not recovery.is_eval(each.group_id)]
    return [
        *(GroupAdmitted(group_id, num_rollouts) for group_id in here),
        *(
            GroupAdmitted(each.group_id, each.num_samples, each.asked_step)
            for each in recovery.open_asks
            if not each.is_eval
        ),
    ]


def _with_results(
    taken: Sequence[StepTaken], kept: dict[GroupId, StoredResult]
) -> tuple[list[StepTaken], list[str]]:
    """Return the steps with the groups that have results, and lines about the missing ones."""
    redo, lines = [], []
    for each in taken:
        present = tuple(group_id for group_id in each.group_ids if group_id in kept)
        if lost := [str(group_id) for group_id in each.group_ids if group_id not in kept]:
            named = ", ".join(lost[:NUM_NAMED]) + ", ..." * (len(lost) > NUM_NAMED)
            without = f"without {named}" if present else f"not redone: {named}"
            lines.append(f"step {each.step} is {without}, which the journal has lost")
        if present:
            redo.append(msgspec.structs.replace(each, group_ids=present))
    return redo, lines


def _missing_steps(num_steps: int, next_step: int, taken: Sequence[StepTaken]) -> list[str]:
    """Report steps that are neither in the weights nor in the journal."""
    missing = sorted(set(range(num_steps, next_step)) - {each.step for each in taken})
    if not missing:
        return []
    steps = f"steps {missing[0]} to {missing[-1]} are not in the weights"
    return [f"{steps}: the checkpoint that freed the journal of them is no longer whole"]
