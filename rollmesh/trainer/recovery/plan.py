"""What a trainer goes on with after it died: its newest savepoint, and what the journal tells of
later.

    steps <  num_steps                 are in the savepoint's weights
    num_steps <= steps < next_step     are redone, each with its own groups
    next_step                          is the first that takes new groups

A step that is redone and ends the trainer again as it did before is poisoned: it is not redone any
more, and its groups are dropped.

Invariants: a group that has left (trained or dropped, as the savepoint knows) never comes back; any
other is exactly one of: in a step to redo, ready, parted with, dropped, open; what was decided of
it stays so, whatever the settings are now. A step's number and a policy
version are never used for anything else again, not even where a savepoint broke on the disk. Pure;
driven by the trainer and by the simulator.
"""

import collections
from collections.abc import Iterator, Mapping, Sequence

import msgspec

from rollmesh.core.ids import GroupId, IntervalSet
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
from rollmesh.trainer.savepoints.state import LoopState, Waiting
from rollmesh.trainer.staleness import GroupAdmitted

NUM_NAMED = 4
"""Groups that a line names."""
MAX_ERRORS = 2
"""Deaths by the same exception at the same place that make a step poisoned."""
MAX_KILLS = 3
"""Deaths without an exception (a signal, no memory) while the step was redone, in processes of one
launch. One more than MAX_ERRORS, because an operator may kill a trainer twice at one place."""
POISONED = "poisoned_step"


class Recovery(msgspec.Struct, frozen=True, kw_only=True):
    """See the module."""

    num_steps: int
    """Done by the savepoint's weights; 0 where there is no savepoint."""
    redo: tuple[StepTaken, ...]
    """Ascending; every group of them has its result."""
    next_step: int
    policy_version: int
    """Of the next publication; no version as high was ever named."""
    step_of_version: dict[int, int]
    num_tasks: int
    """Drawn so far."""
    num_asked: int
    """Groups, in all lives, those for evaluation among them."""
    evals: Groups
    """Of these, those that were asked for and do not train."""
    results: dict[GroupId, StoredResult]
    """Of `redo` and `parted`."""
    parted: tuple[GroupParted, ...]
    """Results that earlier processes have dropped, or that were in a poisoned step, which the
    savepoint does not know; the client does not hand them out. `times` is 0 where the ask that was
    to follow is there."""
    waiting: tuple[Waiting, ...]
    """Tasks to ask for again; those of `parted` come after them."""
    again: dict[GroupId, Again]
    """What groups that are to come ask for again."""
    ready: tuple[StoredResult, ...]
    """The client hands them out; oldest first."""
    open_asks: tuple[OpenAsk, ...]
    """They go on."""
    drops: tuple[GroupBooked, ...]
    """Ended without a result, which the savepoint does not know; nobody hands them out."""
    saved: StateSaved
    """For the client's `start`."""
    lines: tuple[str, ...]
    """What is lost, and why; mostly nothing."""

    def is_eval(self, group_id: GroupId) -> bool:
        """Whether it was asked for and does not train."""
        intervals = self.evals.get(group_id.run_id, ())
        return any(start <= group_id.seq < stop for start, stop in intervals)


def plan_recovery(saved: LoopState | None, history: History) -> Recovery:
    """How to go on from `saved`, or from the first weights where there is none."""
    state = saved or LoopState(num_steps=0, step_of_version={0: 0})
    gone = {run_id: IntervalSet(intervals) for run_id, intervals in state.ended.items()}

    def is_left(group_id: GroupId) -> bool:
        return group_id.seq not in gone.get(group_id.run_id, ())

    kept = {each.group_id: each for each in history.results if is_left(each.group_id)}
    taken = [each for each in history.steps if each.step >= state.num_steps]
    poisoned = {
        each.step: f"step {each.step} {why}"
        for each in taken
        if (why := poison_in(history.step_deaths.get(each.step, ())))
    }
    redo, losses = _whole([each for each in taken if each.step not in poisoned], kept)
    in_step = {group_id for each in redo for group_id in each.group_ids}
    versions = {each.policy_version: each.step for each in history.published}
    newest = max([state.policy_version, history.saved.policy_version, *versions])
    # Not all in `state`, where the savepoint that freed the journal of them has broken.
    made = state.step_of_version | history.saved.step_of_version | versions
    ends = [each.step + 1 for each in taken]
    next_step = max([state.num_steps, history.saved.num_steps, *ends])
    asked_again = {each.group_id for each in history.again.values()}
    parted = [each for each in history.parted if each.group_id in kept]
    parted = [each for each in parted if each.group_id not in in_step]
    known = {each.group_id for each in parted}
    dropped = [each for each in _dropped(taken, poisoned) if each.group_id in kept]
    parted += [each for each in dropped if each.group_id not in known]
    in_books = in_step | {each.group_id for each in parted}
    return Recovery(
        num_steps=state.num_steps,
        redo=tuple(redo),
        next_step=next_step,
        policy_version=newest + 1,
        step_of_version=dict(sorted(made.items())),
        num_tasks=history.num_drawn or state.num_tasks,
        num_asked=history.num_asked,
        evals=history.evals,
        results={group_id: kept[group_id] for group_id in in_books},
        parted=tuple(
            msgspec.structs.replace(each, times=0) if each.group_id in asked_again else each
            for each in parted
        ),
        waiting=tuple(each for each in state.waiting if each.again.group_id not in asked_again),
        again=history.again,
        ready=tuple(each for group_id, each in kept.items() if group_id not in in_books),
        open_asks=tuple(each for each in history.open_asks if is_left(each.group_id)),
        drops=tuple(each for each in history.drops if is_left(each.group_id)),
        saved=state.told() if saved else StateSaved(),
        lines=(
            *_gap(state.num_steps, next_step, taken),
            *losses,
            *(f"{why}; it is skipped and its groups are dropped" for why in poisoned.values()),
        ),
    )


def _dropped(taken: Sequence[StepTaken], poisoned: Mapping[int, str]) -> Iterator[GroupParted]:
    """The groups of poisoned steps, with the reason that the drop log has for them."""
    for each in taken:
        for group_id in each.group_ids if each.step in poisoned else ():
            yield GroupParted(group_id, f"{POISONED}: {poisoned[each.step]}", each.step)


def poison_in(deaths: Sequence[str]) -> str:
    """Return how a step has ended trainers too often in the same way; '' where it has not."""
    for why, num in collections.Counter(deaths).items():
        if num >= (MAX_KILLS if why.startswith(KILLED) else MAX_ERRORS):
            return f"ended the trainer {num} times: {why}"
    return ""


def under_way(recovery: Recovery, num_rollouts: int) -> list[GroupAdmitted]:
    """What a StalenessManager must hear before its capacity is asked for; groups of `num_rollouts`.

    That a result of these is there it hears when that is handed out, or when its step is redone.
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


def _whole(
    taken: Sequence[StepTaken], kept: dict[GroupId, StoredResult]
) -> tuple[list[StepTaken], list[str]]:
    """The steps with the groups whose results are there, and what is not."""
    redo, lines = [], []
    for each in taken:
        there = tuple(group_id for group_id in each.group_ids if group_id in kept)
        if lost := [str(group_id) for group_id in each.group_ids if group_id not in kept]:
            named = ", ".join(lost[:NUM_NAMED]) + ", ..." * (len(lost) > NUM_NAMED)
            without = f"without {named}" if there else f"not redone: {named}"
            lines.append(f"step {each.step} is {without}, which the journal has lost")
        if there:
            redo.append(msgspec.structs.replace(each, group_ids=there))
    return redo, lines


def _gap(num_steps: int, next_step: int, taken: Sequence[StepTaken]) -> list[str]:
    """Steps that are neither in the weights nor in the journal."""
    missing = sorted(set(range(num_steps, next_step)) - {each.step for each in taken})
    if not missing:
        return []
    steps = f"steps {missing[0]} to {missing[-1]} are not in the weights"
    return [f"{steps}: the savepoint that freed the journal of them is no longer whole"]
