"""The life cycle of each group in a run, and the train step that made each policy version.

    OPEN --ResultMissing-----------------------------> gone (failed, unmeasured)
      |----ResultArrived: of an evaluation-----------> gone (measured)
      |----ResultArrived: nothing in it may train----> gone (untrainable, foreign)
      +----ResultArrived--> WAITING
    WAITING --TakeStep, RetakeStep--> IN A STEP --StepTrained--> gone (trained)
       +------TakeStep: too old--> gone (stale), or its task is OPEN again (requeued)

- A group leaves once. Decisions of earlier processes of the run are kept, whatever the settings are
  now, and no step is taken before all results that they left have been read.
- A step's groups are named before it trains, and gone once they are in the weights.
- Ages and admission are decided by the StalenessManager, which only this machine steps.
- Pure: it knows the policy versions of samples, not the samples. Only as many versions are kept as
  ages need; a version that is missing is not of this run, or very old.
"""

import collections
import enum
from collections.abc import Callable, Collection, Iterable, Mapping

import msgspec

from rollmesh.core.ids import GroupId, IntervalSet
from rollmesh.core.types import Task
from rollmesh.serve.client.journal_entries import NOT_NOTED, Again, GroupParted, Groups, StepTaken
from rollmesh.serve.client.samples import Sample
from rollmesh.trainer.checkpoints.recovery_plan import PendingTask, RecoveryPlan, admitted_groups
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

SPARE_VERSIONS = 1000
"""Versions kept beyond those that the age bound needs."""


class VersionSteps:
    """Train steps by policy version."""

    def __init__(self, max_staleness: int) -> None:
        self._max_known = max_staleness + SPARE_VERSIONS
        self._steps = {0: 0}

    @property
    def steps(self) -> Mapping[int, int]:
        """Train steps by version, oldest first."""
        return self._steps

    def add(self, steps: Mapping[int, int]) -> None:
        """Add versions."""
        self._steps |= steps
        while len(self._steps) > self._max_known:
            del self._steps[next(iter(self._steps))]

    def named(self, step: int) -> int | None:
        """The newest version made after `step` steps; None if there is none."""
        return next((each for each, made in reversed(self._steps.items()) if made == step), None)

    def made_before(self, step: int) -> frozenset[int]:
        """Versions made before `step`."""
        return frozenset(each for each, made in self._steps.items() if made < step)

    def foreign(self, policy_versions: Collection[int]) -> set[int]:
        """Versions among these that are not of this run."""
        return set(policy_versions) - self._steps.keys()

    def oldest_step(self, policy_versions: Collection[int]) -> int:
        """The train step of the oldest of these versions."""
        return min(self._steps[each] for each in policy_versions)

    def newest_step(self, policy_versions: Collection[int]) -> int:
        """The train step of the newest of these versions."""
        return max(self._steps[each] for each in policy_versions)

    def age(self, samples: Iterable[Sample], step: int) -> int:
        """Train steps from the weights of the oldest trained token to `step`."""
        return step - self.oldest_step(versions_of(samples))

    def age_of(self, policy_versions: Iterable[int], step: int) -> int | None:
        """Train steps from the oldest of these versions to `step`; None if none is known."""
        made = map(self._steps.get, policy_versions)
        known = [each for each in made if each is not None]
        return step - min(known) if known else None


def versions_of(samples: Iterable[Sample]) -> frozenset[int]:
    """The policy versions of the trained tokens."""
    trained = (set(s.policy_versions[s.loss_mask].tolist()) for s in samples)
    return frozenset[int]().union(*trained)


def spans_versions(sample: Sample) -> bool:
    """Whether more than one policy version sampled the trained tokens."""
    versions = sample.policy_versions[sample.loss_mask]
    return bool(versions.min() != versions.max())


UNKNOWN = Task(id="")
"""Task of a group that ended between two processes; its record, if any, has the task."""


class GroupRequest(msgspec.Struct, frozen=True):
    """The request of a group."""

    task: Task
    again: Again | None = None
    """The earlier request of the task, if that result was too late."""
    is_eval: bool = False

    @property
    def num_requeued(self) -> int:
        return self.again.times if self.again else 0


class GroupRequested(msgspec.Struct, frozen=True):
    """Event: a group was requested."""

    group_id: GroupId
    request: GroupRequest


class ResultMissing(msgspec.Struct, frozen=True):
    """Event: a group has ended without a result."""

    group_id: GroupId
    why: str


class ResultArrived(msgspec.Struct, frozen=True):
    """Event: a group has a result."""

    group_id: GroupId
    task: Task
    rollouts: tuple[frozenset[int], ...]
    """Policy versions of the trainable tokens of each rollout that has any."""
    is_eval: bool = False


class DropReplayed(msgspec.Struct, frozen=True):
    """Event: by its journal, an earlier process dropped this result."""

    entry: GroupParted
    task: Task
    num_rollouts: int
    """Rollouts that would have trained."""


class TakeStep(msgspec.Struct, frozen=True):
    """Event: the trainer is ready for `step`."""

    step: int


class RetakeStep(msgspec.Struct, frozen=True):
    """Event: redo a step that an earlier process took; its results were read again."""

    taken: StepTaken


class StepTrained(msgspec.Struct, frozen=True):
    """Event: the current step is in the weights."""


class VersionCreated(msgspec.Struct, frozen=True):
    """Event: this version has the weights after `step` steps; engines may use it soon."""

    policy_version: int
    step: int


class VersionPublished(msgspec.Struct, frozen=True):
    """Event: engines sample with the weights after `step` steps."""

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
    """How a group leaves; the values are in journals. The pacer records it."""

    TRAINED = "trained"
    STALE = "stale"
    REQUEUED = "requeued"
    FOREIGN = "foreign"
    UNTRAINABLE = "barren"
    FAILED = "failed"
    MEASURED = "measured"
    UNMEASURED = "unmeasured"
    NOT_REQUESTED = "strange"


class QueueGroup(msgspec.Struct, frozen=True):
    """Action: keep the group until its step."""

    group_id: GroupId


class GroupLeft(msgspec.Struct, frozen=True):
    """Action: record the group, which has left."""

    group_id: GroupId
    outcome: GroupOutcome
    request: GroupRequest = GroupRequest(UNKNOWN)
    why: str = ""
    """Reason for the drop records."""
    times: int = 0
    """How often its task was requeued, with the coming request; 0: it is not."""


class TrainGroups(msgspec.Struct, frozen=True):
    """Action: train these groups, oldest first."""

    taken: StepTaken
    stale: frozenset[int] = frozenset()
    """Tokens of these policy versions are masked."""


Action = QueueGroup | GroupLeft | TrainGroups


MAX_REQUEUES = 3
"""A task that was too late more often than this is dropped."""


class GroupLifecycle:
    """The state of all groups of a run; `step` returns what to do with them."""

    def __init__(self, staleness: StalenessManager, num_samples: int) -> None:
        """`num_samples` is the number of rollouts of a group."""
        self.versions = VersionSteps(staleness.settings.max_staleness)
        """Train steps after which each policy version was made."""
        self.num_untrainable = 0
        """Groups in a row with nothing to train."""
        self._staleness = staleness
        self._num_samples = num_samples
        self._open: dict[GroupId, GroupRequest] = {}
        self._waiting: dict[GroupId, GroupRequest] = {}
        self._in_step: dict[GroupId, GroupRequest] = {}
        self._again = collections.deque[GroupRequest]()
        self._is_eval: Callable[[GroupId], bool] = lambda _: False
        """Whether a group that an earlier process requested is of an evaluation."""
        self._gone: dict[str, IntervalSet] = {}
        self._unread: set[GroupId] = set()
        """Results left by earlier processes that the client has not returned yet."""

    @property
    def open_ids(self) -> Collection[GroupId]:
        """Groups that have not ended."""
        return self._open.keys()

    @property
    def gone(self) -> Groups:
        """Groups that have left, in all processes of the run."""
        return {run_id: each.intervals() for run_id, each in self._gone.items()}

    @property
    def num_gone(self) -> int:
        """Number of groups in `gone`."""
        return sum(map(len, self._gone.values()))

    @property
    def num_measuring(self) -> int:
        """Groups of an evaluation that have not ended."""
        return sum(request.is_eval for request in self._open.values())

    def request(self, group_id: GroupId) -> GroupRequest | None:
        """The request of an open group; None if this run has not requested it."""
        return self._open.get(group_id)

    def next_again(self) -> GroupRequest | None:
        """Remove and return a request that comes before new tasks; None if there is none."""
        return self._again.popleft() if self._again else None

    @property
    def to_ask_again(self) -> tuple[PendingTask, ...]:
        """Requeued tasks that are not requested again or still open. The next process finds out
        which of these are missing in the journal."""
        turns = [*self._again, *self._open.values()]
        known = [each for each in turns if each.task is not UNKNOWN]
        return tuple(PendingTask(each.task, each.again) for each in known if each.again)

    def may_ask(self, num_needed: int) -> bool:
        """Whether to request one more group to train, while `num_needed` are needed."""
        staleness, most = self._staleness, num_needed * self._num_samples
        return staleness.capacity > 0 and staleness.running + staleness.ready < most

    def resume(self, recovery: RecoveryPlan) -> list[GroupLeft]:
        """Start from the state of earlier processes, before any event; return the groups that left
        between processes, in the order of `drops`."""
        self.versions.add(recovery.step_of_version)
        self._gone = {run: IntervalSet(list(each)) for run, each in recovery.saved.gone.items()}
        ready = [each.group_id for each in recovery.ready]
        redone = [group_id for step in recovery.redo for group_id in step.group_ids]
        self._unread = set(ready)
        self._again.extend(GroupRequest(each.task, each.again) for each in recovery.waiting)
        again = recovery.again
        for group_id in (*redone, *ready):
            is_eval = recovery.is_eval(group_id)
            self._open[group_id] = GroupRequest(UNKNOWN, again.get(group_id), is_eval)
        for ask in recovery.open_asks:
            self._open[ask.group_id] = GroupRequest(ask.task, again.get(ask.group_id), ask.is_eval)
        for event in admitted_groups(recovery, self._num_samples):
            self._staleness.step(event)
        self._is_eval = recovery.is_eval
        # Not counted as untrainable in a row: groups that trained in between are not known here.
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
        """Return what to do about `event`."""
        match event:
            case GroupRequested():
                self._ask(event)
            case ResultMissing() | ResultArrived():
                return [self._end(event)]
            case DropReplayed():
                return [self._replay_drop(event)]
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
        self._open[asked.group_id] = asked.request
        if not asked.request.is_eval:
            self._staleness.step(GroupAdmitted(asked.group_id, self._num_samples))

    def _end(self, event: ResultMissing | ResultArrived) -> QueueGroup | GroupLeft:
        """Handle the end of a group, with or without a result."""
        group_id = event.group_id
        request = self._open.pop(group_id, None)
        if request is None:
            return GroupLeft(group_id, GroupOutcome.NOT_REQUESTED)
        action = (
            self._arrive(event, request)
            if isinstance(event, ResultArrived)
            else self._fail(event, request)
        )
        if isinstance(action, GroupLeft):
            self._staleness.step(GroupEnded(group_id))
        self._unread.discard(group_id)
        return action

    def _fail(self, failed: ResultMissing, request: GroupRequest) -> GroupLeft:
        if request.is_eval:
            return self._leave(failed.group_id, GroupOutcome.UNMEASURED, request, failed.why)
        self._count_untrainable(failed.group_id)
        return self._leave(failed.group_id, GroupOutcome.FAILED, request, failed.why)

    def _arrive(self, came: ResultArrived, request: GroupRequest) -> QueueGroup | GroupLeft:
        group_id, rollouts = came.group_id, came.rollouts
        if request.task is UNKNOWN:
            request = msgspec.structs.replace(request, task=came.task)
        if request.is_eval or came.is_eval:
            return self._leave(group_id, GroupOutcome.MEASURED, request)
        if not rollouts:
            self._count_untrainable(group_id)
            return self._leave(group_id, GroupOutcome.UNTRAINABLE, request)
        if foreign := self.versions.foreign(frozenset[int]().union(*rollouts)):
            # An engine of another run has returned.
            why = f"foreign: policy version {min(foreign)} is not of this run"
            return self._leave(group_id, GroupOutcome.FOREIGN, request, why)
        self.num_untrainable = 0
        self._waiting[group_id] = request
        oldest_step = min(map(self.versions.oldest_step, rollouts))
        newest_steps = tuple(map(self.versions.newest_step, rollouts))
        self._staleness.step(GroupArrived(group_id, len(rollouts), oldest_step, newest_steps))
        return QueueGroup(group_id)

    def _count_untrainable(self, group_id: GroupId) -> None:
        if group_id not in self._unread:  # steps took trainable results of the same time
            self.num_untrainable += 1

    def _take(self, take: TakeStep) -> list[Action]:
        if self._unread:
            return []  # the oldest may be among them, and would be too old for the next step
        actions: list[Action] = []
        for action in self._staleness.step(TakeBatch(take.step)):
            match action:
                case GroupStale(group_id, age):
                    actions.append(self._drop(group_id, age))
                case BatchTaken():
                    oldest_step = self._masks_before(action.oldest_step)
                    taken = StepTaken(action.step, action.group_ids, oldest_step)
                    actions.append(self._train(taken))
        return actions

    def _masks_before(self, oldest_allowed: int) -> int:
        """The step before whose weights tokens are masked, by the settings; 0: none are."""
        is_masked = self._staleness.settings.policy == "mask"
        return max(oldest_allowed, 0) if is_masked else 0

    def _replay_drop(self, parted: DropReplayed) -> GroupLeft:
        (group_id, why), request = (
            (parted.entry.group_id, parted.entry.reason),
            GroupRequest(parted.task),
        )
        if self._is_eval(group_id):
            return self._leave(group_id, GroupOutcome.MEASURED, request)
        if not parted.num_rollouts:
            return self._leave(group_id, GroupOutcome.UNTRAINABLE, request)
        if parted.entry.times:
            self._again.append(GroupRequest(parted.task, Again(group_id, parted.entry.times)))
        return self._leave(group_id, GroupOutcome.STALE, request, why)

    def _drop(self, group_id: GroupId, age: int) -> GroupLeft:
        """Drop or requeue a group that is too old for any step."""
        request, policy = self._waiting.pop(group_id), self._staleness.settings.policy
        if policy == "requeue" and request.num_requeued < MAX_REQUEUES:
            times = request.num_requeued + 1
            self._again.append(GroupRequest(request.task, Again(group_id, times)))
            return self._leave(
                group_id, GroupOutcome.REQUEUED, request, f"requeued: age {age}", times
            )
        return self._leave(group_id, GroupOutcome.STALE, request, f"stale: age {age}")

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
            self._leave(group_id, GroupOutcome.TRAINED, request)
            for group_id, request in done.items()
        ]

    def _leave(
        self,
        group_id: GroupId,
        outcome: GroupOutcome,
        request: GroupRequest,
        why: str = "",
        times: int = 0,
    ) -> GroupLeft:
        self._gone.setdefault(group_id.run_id, IntervalSet()).add(group_id.seq)
        return GroupLeft(group_id, outcome, request, why, times)
