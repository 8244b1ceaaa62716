"""What the course of a run is told, and what it says, as small frozen structs.

Invariant: values only; of samples nothing is here but which policy versions their trained tokens
are of. Driven by course.py, and by whoever carries out what it says: the pacer, the simulator.

The course of each group through a run: asked for, waiting, in a step, gone.

    OPEN --Failed---------------------------> gone (failed, unmeasured)
      |----Came: of an evaluation-----------> gone (measured)
      |----Came: nothing in it may train----> gone (barren, foreign)
      +----Came--> WAITING --Take, Retake--> IN A STEP --StepTrained--> gone (trained)
                      +------Take: too old--> gone (stale), or its task is OPEN again (requeued)

Owns what each group was asked for, the tasks that are to be asked for again, and what has left in
all lives, which is what a savepoint knows. Invariants: a group leaves once; what earlier lives have
decided is not decided again, whatever the settings are now; no step is taken before all that they
left has been looked at; what a step takes is named before it is trained, and
gone once it is in the weights; which is too old, and how many may be asked for, is the word of the
StalenessManager, which nobody else steps. Pure; driven by the pacer, and by the simulator.
"""

import collections
import enum
from collections.abc import Callable, Collection

import msgspec

from rollmesh.core.ids import GroupId, IntervalSet
from rollmesh.core.types import Task
from rollmesh.serve.client.journal_entries import NOT_NOTED, Again, GroupParted, Groups, StepTaken
from rollmesh.trainer.pacing.versions import VersionSteps
from rollmesh.trainer.recovery.plan import Recovery, under_way
from rollmesh.trainer.savepoints.state import Waiting
from rollmesh.trainer.staleness import (
    BatchTaken,
    GroupAdmitted,
    GroupArrived,
    GroupEnded,
    GroupStale,
    StalenessManager,
    StepPublished,
    StepRetaken,
    TakeBatch,
)

UNKNOWN = Task(id="")
"""Of what ended while nobody was here its record knows the task, if there is one."""


class GroupRequest(msgspec.Struct, frozen=True):
    """What a group is asked for."""

    task: Task
    again: Again | None = None
    """Whose task it was before, where that came too late."""
    is_eval: bool = False

    @property
    def num_requeued(self) -> int:
        return self.again.times if self.again else 0


class GroupRequested(msgspec.Struct, frozen=True):
    """Event: a group was asked for."""

    group_id: GroupId
    turn: GroupRequest


class ResultMissing(msgspec.Struct, frozen=True):
    """Event: a group has ended without a result."""

    group_id: GroupId
    why: str


class ResultArrived(msgspec.Struct, frozen=True):
    """Event: a group's result is here."""

    group_id: GroupId
    task: Task
    rollouts: tuple[frozenset[int], ...]
    """The policy versions of the tokens that would train, of each rollout that has any."""
    is_eval: bool = False


class DropReplayed(msgspec.Struct, frozen=True):
    """Event: an earlier life has dropped this result, as its journal says."""

    entry: GroupParted
    task: Task
    num_rollouts: int
    """That would have trained."""


class TakeStep(msgspec.Struct, frozen=True):
    """Event: the trainer is free, and about to do `step`."""

    step: int


class RetakeStep(msgspec.Struct, frozen=True):
    """Event: a step that an earlier life took, whose results have come again."""

    taken: StepTaken


class StepTrained(msgspec.Struct, frozen=True):
    """Event: the step that was taken is in the weights."""


class VersionCreated(msgspec.Struct, frozen=True):
    """Event: this version holds the weights after `step` steps; some tokens may have it soon."""

    policy_version: int
    step: int


class VersionPublished(msgspec.Struct, frozen=True):
    """Event: the weights after `step` steps are what engines sample with."""

    step: int


Event = (
    GroupRequested
    | ResultMissing
    | ResultArrived
    | DropReplayed
    | TakeStep
    | RetakeStep
    | StepTrained
    | VersionCreated
    | VersionPublished
)


class GroupOutcome(enum.StrEnum):
    """How a group leaves; exits.py says what is booked of it."""

    TRAINED = "trained"
    STALE = "stale"
    REQUEUED = "requeued"
    FOREIGN = "foreign"
    BARREN = "barren"
    FAILED = "failed"
    MEASURED = "measured"
    UNMEASURED = "unmeasured"
    STRANGE = "strange"


class QueueGroup(msgspec.Struct, frozen=True):
    """Action: it waits for its step."""

    group_id: GroupId


class GroupLeft(msgspec.Struct, frozen=True):
    """Action: book it now, for nothing more is to be done with it."""

    group_id: GroupId
    fate: GroupOutcome
    turn: GroupRequest = GroupRequest(UNKNOWN)
    why: str = ""
    """As the ledger says it."""
    times: int = 0
    """That its task is asked for again, with the ask that is to follow; 0: none is."""


class TrainGroups(msgspec.Struct, frozen=True):
    """Action: these are the batch, oldest first."""

    taken: StepTaken
    stale: frozenset[int] = frozenset()
    """Tokens of these policy versions are masked."""


Action = QueueGroup | GroupLeft | TrainGroups


MAX_REQUEUES = 3
"""A task that came too late once more than that is dropped."""


class GroupLifecycle:
    """See the module."""

    def __init__(self, staleness: StalenessManager, num_samples: int) -> None:
        """Of a run whose groups have `num_samples` rollouts."""
        self.versions = VersionSteps(staleness.settings.max_staleness)
        """After how many steps each was made."""
        self.num_barren = 0
        """Groups in a row that gave nothing to train."""
        self._staleness = staleness
        self._num_samples = num_samples
        self._open: dict[GroupId, GroupRequest] = {}
        self._waiting: dict[GroupId, GroupRequest] = {}
        self._in_step: dict[GroupId, GroupRequest] = {}
        self._again = collections.deque[GroupRequest]()
        self._is_eval: Callable[[GroupId], bool] = lambda _: False
        """Of a group that an earlier life has asked for."""
        self._gone: dict[str, IntervalSet] = {}
        self._left_here: set[GroupId] = set()
        """Results of earlier lives that the client has yet to hand out, some at a time."""

    @property
    def open_ids(self) -> Collection[GroupId]:
        """Groups that have not ended."""
        return self._open.keys()

    @property
    def gone(self) -> Groups:
        """Groups that have left, in all lives."""
        return {run_id: each.intervals() for run_id, each in self._gone.items()}

    @property
    def num_gone(self) -> int:
        """How many these are."""
        return sum(map(len, self._gone.values()))

    @property
    def num_measuring(self) -> int:
        """Groups of an evaluation that have not ended."""
        return sum(turn.is_eval for turn in self._open.values())

    def turn(self, group_id: GroupId) -> GroupRequest | None:
        """What an open group was asked for; None where no life of this run has asked."""
        return self._open.get(group_id)

    def next_again(self) -> GroupRequest | None:
        """What is to be asked for before anything new, and is from now on the caller's to ask."""
        return self._again.popleft() if self._again else None

    @property
    def to_ask_again(self) -> tuple[Waiting, ...]:
        """All tasks that came too late, and were not asked for again or are open; of which of these
        the journal has not heard, the next life finds out."""
        turns = [*self._again, *self._open.values()]
        known = [each for each in turns if each.task is not UNKNOWN]
        return tuple(Waiting(each.task, each.again) for each in known if each.again)

    def may_ask(self, num_needed: int) -> bool:
        """Whether to ask for one more group to train, of `num_needed` that are to be under way."""
        staleness, most = self._staleness, num_needed * self._num_samples
        return staleness.capacity > 0 and staleness.running + staleness.ready < most

    def go_on(self, recovery: Recovery) -> list[GroupLeft]:
        """Before anything else: with what earlier lives left; who left while nobody was here, in
        the order of `drops`."""
        self.versions.add(recovery.step_of_version)
        self._gone = {run: IntervalSet(list(each)) for run, each in recovery.saved.gone.items()}
        ready = [each.group_id for each in recovery.ready]
        redone = [group_id for step in recovery.redo for group_id in step.group_ids]
        self._left_here = set(ready)
        self._again.extend(GroupRequest(each.task, each.again) for each in recovery.waiting)
        again = recovery.again
        for group_id in (*redone, *ready):
            is_eval = recovery.is_eval(group_id)
            self._open[group_id] = GroupRequest(UNKNOWN, again.get(group_id), is_eval)
        for ask in recovery.open_asks:
            self._open[ask.group_id] = GroupRequest(ask.task, again.get(ask.group_id), ask.is_eval)
        for event in under_way(recovery, self._num_samples):
            self._staleness.step(event)
        self._is_eval = recovery.is_eval
        # Not as they arrive: the groups that trained between them are not here to be seen.
        return [
            self._leave(
                each.group_id,
                GroupOutcome.UNMEASURED if recovery.is_eval(each.group_id) else GroupOutcome.FAILED,
                GroupRequest(Task(id=each.task_id)),
                each.reason,
            )
            for each in recovery.drops
        ]

    def step(self, event: Event) -> list[Action]:
        """What follows from `event`."""
        match event:
            case GroupRequested():
                self._ask(event)
            case ResultMissing() | ResultArrived():
                return [self._end(event)]
            case DropReplayed():
                return [self._stay_parted(event)]
            case TakeStep():
                return self._take(event)
            case RetakeStep():
                return self._retake(event.taken)
            case StepTrained():
                return self._finish()
            case VersionCreated(policy_version, step):
                self.versions.add({policy_version: step})
            case VersionPublished(step):
                self._staleness.step(StepPublished(step, self.versions.named(step)))
        return []

    def _ask(self, asked: GroupRequested) -> None:
        self._open[asked.group_id] = asked.turn
        if not asked.turn.is_eval:
            self._staleness.step(GroupAdmitted(asked.group_id, self._num_samples))

    def _end(self, event: ResultMissing | ResultArrived) -> QueueGroup | GroupLeft:
        """A group has ended, with a result or without."""
        group_id = event.group_id
        turn = self._open.pop(group_id, None)
        if turn is None:
            return GroupLeft(group_id, GroupOutcome.STRANGE)
        action = (
            self._come(event, turn) if isinstance(event, ResultArrived) else self._fail(event, turn)
        )
        if isinstance(action, GroupLeft):
            self._staleness.step(GroupEnded(group_id))
        self._left_here.discard(group_id)
        return action

    def _fail(self, failed: ResultMissing, turn: GroupRequest) -> GroupLeft:
        if turn.is_eval:
            return self._leave(failed.group_id, GroupOutcome.UNMEASURED, turn, failed.why)
        self._count_barren(failed.group_id)
        return self._leave(failed.group_id, GroupOutcome.FAILED, turn, failed.why)

    def _come(self, came: ResultArrived, turn: GroupRequest) -> QueueGroup | GroupLeft:
        group_id, rollouts = came.group_id, came.rollouts
        if turn.task is UNKNOWN:
            turn = msgspec.structs.replace(turn, task=came.task)
        if turn.is_eval or came.is_eval:
            return self._leave(group_id, GroupOutcome.MEASURED, turn)
        if not rollouts:
            self._count_barren(group_id)
            return self._leave(group_id, GroupOutcome.BARREN, turn)
        if foreign := self.versions.foreign(frozenset[int]().union(*rollouts)):
            # Of an engine of another run that came back.
            why = f"foreign: policy version {min(foreign)} is not of this run"
            return self._leave(group_id, GroupOutcome.FOREIGN, turn, why)
        self.num_barren = 0
        self._waiting[group_id] = turn
        oldest_step = min(map(self.versions.oldest_step, rollouts))
        newest_steps = tuple(map(self.versions.newest_step, rollouts))
        self._staleness.step(GroupArrived(group_id, len(rollouts), oldest_step, newest_steps))
        return QueueGroup(group_id)

    def _count_barren(self, group_id: GroupId) -> None:
        if group_id not in self._left_here:  # steps have taken those that trained beside it
            self.num_barren += 1

    def _take(self, take: TakeStep) -> list[Action]:
        if self._left_here:
            return []  # the oldest may be among them, and too old for the step after this one
        actions: list[Action] = []
        for action in self._staleness.step(TakeBatch(take.step)):
            match action:
                case GroupStale(group_id, age):
                    actions.append(self._part(group_id, age))
                case BatchTaken():
                    oldest_step = self._masks_before(action.oldest_step)
                    taken = StepTaken(action.step, action.group_ids, oldest_step)
                    actions.append(self._train(taken))
        return actions

    def _masks_before(self, oldest_allowed: int) -> int:
        """Tokens of weights that fewer steps had made do not train, by these settings."""
        is_masked = self._staleness.settings.policy == "mask"
        return max(oldest_allowed, 0) if is_masked else 0

    def _stay_parted(self, parted: DropReplayed) -> GroupLeft:
        (group_id, why), turn = (
            (parted.entry.group_id, parted.entry.reason),
            GroupRequest(parted.task),
        )
        if self._is_eval(group_id):
            return self._leave(group_id, GroupOutcome.MEASURED, turn)
        if not parted.num_rollouts:
            return self._leave(group_id, GroupOutcome.BARREN, turn)
        if parted.entry.times:
            self._again.append(GroupRequest(parted.task, Again(group_id, parted.entry.times)))
        return self._leave(group_id, GroupOutcome.STALE, turn, why)

    def _part(self, group_id: GroupId, age: int) -> GroupLeft:
        """With one that is too old for any step."""
        turn, policy = self._waiting.pop(group_id), self._staleness.settings.policy
        if policy == "requeue" and turn.num_requeued < MAX_REQUEUES:
            times = turn.num_requeued + 1
            self._again.append(GroupRequest(turn.task, Again(group_id, times)))
            return self._leave(group_id, GroupOutcome.REQUEUED, turn, f"requeued: age {age}", times)
        return self._leave(group_id, GroupOutcome.STALE, turn, f"stale: age {age}")

    def _retake(self, taken: StepTaken) -> list[Action]:
        there = tuple(each for each in taken.group_ids if each in self._waiting)
        oldest_step = taken.oldest_step
        if oldest_step == NOT_NOTED:
            bound = self._staleness.settings.max_staleness
            oldest_step = self._masks_before(taken.step - bound)
        self._staleness.step(StepRetaken(taken.step, there, oldest_step))
        again = StepTaken(taken.step, there, oldest_step)
        return [self._train(again)] if there else []

    def _train(self, taken: StepTaken) -> TrainGroups:
        for group_id in taken.group_ids:
            self._in_step[group_id] = self._waiting.pop(group_id)
        return TrainGroups(taken, self.versions.made_before(taken.oldest_step))

    def _finish(self) -> list[Action]:
        done, self._in_step = self._in_step, {}
        return [
            self._leave(group_id, GroupOutcome.TRAINED, turn) for group_id, turn in done.items()
        ]

    def _leave(
        self,
        group_id: GroupId,
        fate: GroupOutcome,
        turn: GroupRequest,
        why: str = "",
        times: int = 0,
    ) -> GroupLeft:
        self._gone.setdefault(group_id.run_id, IntervalSet()).add(group_id.seq)
        return GroupLeft(group_id, fate, turn, why, times)
