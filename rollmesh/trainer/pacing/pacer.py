"""The pacer between client and train step: requests groups, records results, hands out batches.

    trained     in a step                       its rollouts without samples are drops
    dropped     too old, foreign, or nothing in it trains
    ended       without a result, for a reason of the mesh
    measured    by an evaluation; not among those that were requested for training

- It is the shell of lifecycle.py, which decides about each group, and holds the samples.
- A group is recorded and counted once, when it leaves, so a restarted trainer that reads it again
  from its journal counts it once. Samples that do not train are freed in the policy's allocator,
  and the journal records that no step needs them.
- A run ends if its environment always fails. Only failures with a place count: an unavailable
  engine has none, and an environment raises InfraError for a fault around it.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence

import msgspec

from rollmesh.core.errors import EnvError, InfraError
from rollmesh.core.ids import GroupId, RolloutId
from rollmesh.core.types import ErrorPlace, GroupRecord, Outcome, RolloutRecord, Task
from rollmesh.serve.client.arrivals import (
    Arrival,
    Dropped,
    Finished,
    StoredResult,
    booked_of,
    seen_of,
)
from rollmesh.serve.client.journal_entries import GroupBooked, GroupParted, StepTaken
from rollmesh.serve.client.samples import Sample, lay_plainly
from rollmesh.serve.client.scores import SuccessRule
from rollmesh.trainer.checkpoints.recovery_plan import RecoveryPlan
from rollmesh.trainer.pacing.lifecycle import (
    UNKNOWN,
    Action,
    DropReplayed,
    GroupLeft,
    GroupLifecycle,
    GroupOutcome,
    ResultArrived,
    ResultMissing,
    RetakeStep,
    StepTrained,
    TakeStep,
    TrainGroups,
    VersionCreated,
    VersionPublished,
    VersionSteps,
    spans_versions,
    versions_of,
)
from rollmesh.trainer.pacing.ready_queue import (
    LocalAllocator,
    ReadyGroup,
    ReadyQueue,
    SampleAllocator,
    cut_group,
)
from rollmesh.trainer.pacing.requester import GroupRequester, GroupSource, RequestSettings
from rollmesh.trainer.reports.records import DropLedger, RunRecords, Tally, mean
from rollmesh.trainer.staleness import StalenessManager, StalenessState

NUM_ALIKE = 16
"""Groups with the same failure, before any success, that end the run."""


class FirstFailures:
    """Counts groups that failed in the same way before any has succeeded; one reward ends the count
    for good."""

    def __init__(self, env: str) -> None:
        self.has_succeeded = False
        """Whether any rollout of the run had a reward; then nothing is counted."""
        self._env = env
        self._place: ErrorPlace | None = None
        self._num_alike = 0
        self._last = ""
        """Error and task of the last one."""

    def note(self, record: GroupRecord) -> None:
        """Count a group that has arrived."""
        place, error = _failure_of(record)
        if place is None:
            self.has_succeeded |= any(each.reward is not None for each in record.rollouts)
        elif place.kind != InfraError.__name__:
            self._num_alike = self._num_alike + 1 if place == self._place else 1
            self._place, self._last = place, f"{error}; task {record.task.id}"

    def check(self) -> None:
        """Raise EnvError if NUM_ALIKE groups in a row had the same failure and none succeeded."""
        if self._num_alike >= NUM_ALIKE and not self.has_succeeded:
            raise EnvError(
                f'env = "{self._env}": the first {NUM_ALIKE} groups had the same failure: '
                f"{self._last}; fix it, then --resume; the workers' logs have details"
            )


def _failure_of(record: GroupRecord) -> tuple[ErrorPlace | None, str]:
    """The place where all rollouts of the group failed, and the error; None if it differs."""
    ended = [each for each in record.rollouts if each.outcome is not Outcome.CANCELLED]
    if record.place and not any(each.place for each in ended):
        return record.place, record.reason  # the score over the whole group
    first: RolloutRecord | None = next(iter(ended), None)
    if first is None or any(each.place != first.place for each in ended):
        return None, ""
    return first.place, first.error


class GroupAccounting:
    """Records groups of a run with one environment."""

    def __init__(self, reports: tuple[RunRecords, Tally], env: str, versions: VersionSteps) -> None:
        self._records, self._tally = reports
        self._ledger = DropLedger(*reports, env)
        self._env = env
        self._versions = versions

    def trained(self, group: ReadyGroup, step: int) -> None:
        """Record a group that `step` trained."""
        self._count(group, step)
        self._record_rollouts(group, step)
        for samples in group.samples:
            self._tally.num_trained += bool(samples)
            self._tally.num_samples += len(samples)
            for sample in samples:
                self._tally.ages[self._versions.age([sample], step)] += 1
                self._tally.num_two_versions += spans_versions(sample)

    def dropped(self, group: ReadyGroup, step: int, reason: str) -> None:
        """Record a group that was dropped before `step`, for `reason`."""
        self._count(group, step)
        for rollout, samples in group.pairs():
            if samples:
                self._record_drop(group, rollout, step, reason)
        self._record_rollouts(group, None)

    def untrainable(self, group: ReadyGroup, step: int) -> str:
        """Record a group without samples; return the reason."""
        why = self._count(group, step)
        self._record_rollouts(group, None)
        return why

    def masked(self, group: ReadyGroup, step: int) -> None:
        """Record rollouts of a group in `step` whose tokens are all too old."""
        for rollout, samples in group.pairs():
            if not samples and rollout.index in group.num_masked:
                reason = "masked: no token of it is within the age bound"
                self._record_drop(group, rollout, step, reason)

    def ended(self, booked: GroupBooked, num_samples: int) -> None:
        """Record a group without a result; some of its rollouts may have ended."""
        group_id, task_id, reason = booked.group_id, booked.task_id, booked.reason
        seen = booked.rollouts[:num_samples]
        for rollout in seen:
            self._tally.outcomes[rollout.outcome] += 1
            age = self._versions.age_of(rollout.policy_versions, booked.step)
            self._ledger.rollout(group_id, task_id, rollout, reason, age)
        self._ledger.unseen(group_id, task_id, num_samples - len(seen), reason)

    def measured(self, group: ReadyGroup) -> None:
        """Record a result of an evaluation."""
        rewards, successes = rewards_and_successes(group.record.rollouts, self._tally.rule)
        self._tally.measured += rewards
        self._tally.measured_successes += successes
        self._record_rollouts(group, None)

    def unmeasured(self, group_id: GroupId, task_id: str, reason: str) -> None:
        """Record a rollout of an evaluation without a result."""
        self._ledger.uncounted(group_id, task_id, 1, f"evaluation: {reason}")

    def not_requested(self, group_id: GroupId) -> None:
        """Record a group that this run did not request."""
        self._ledger.uncounted(group_id, "", 0, "of an earlier run")

    def _count(self, group: ReadyGroup, step: int) -> str:
        """Count the group's rollouts and record those without samples; return the last reason."""
        why = ""
        for rollout, samples in group.pairs():
            self._tally.outcomes[rollout.outcome] += 1
            self._tally.add_worker(group.worker_id)
            if not samples and rollout.index not in group.num_masked:
                why = f"{rollout.outcome}: {rollout.error or 'nothing in it trains'}"
                self._record_drop(group, rollout, step, why)
        return why

    def _record_drop(
        self, group: ReadyGroup, rollout: RolloutRecord, step: int, reason: str
    ) -> None:
        seen = seen_of(rollout)
        age = self._versions.age_of(seen.policy_versions, step)
        self._ledger.rollout(group.group_id, group.record.task.id, seen, reason, age)

    def _record_rollouts(self, group: ReadyGroup, step: int | None) -> None:
        for rollout, samples in group.pairs():
            self._records.rollout(
                RolloutId(group.group_id, rollout.index),
                group.record,
                rollout,
                samples,
                step=step,
                worker_id=group.worker_id,
                env=self._env,
                length=rollout.num_logprobs,
                num_masked=group.num_masked.get(rollout.index, 0),
                success=self._success_of(rollout),
            )

    def _success_of(self, rollout: RolloutRecord) -> float | None:
        if rollout.reward is None:
            return None
        self._tally.rule.see(rollout.reward, rollout.metrics)
        return self._tally.rule.success_of(rollout.reward, rollout.metrics)


MAX_METRICS = 64
"""Limit of an environment's metrics in a row of metrics.jsonl, by sorted name."""


def step_means(records: Iterable[GroupRecord], rule: SuccessRule) -> dict[str, float | None]:
    """Means over the rollouts with a reward: `reward`, `success` if it is known, and `env/NAME` for
    each metric of the environment, over the rollouts that have it."""
    scored = [each for record in records for each in record.rollouts if each.reward is not None]
    rewards, successes = rewards_and_successes(scored, rule)
    metrics: dict[str, list[float]] = {}
    for rollout in scored:
        for name, value in rollout.metrics.items():
            metrics.setdefault(name, []).append(value)
    figures = {"reward": mean(rewards)} | ({"success": mean(successes)} if successes else {})
    names = sorted(metrics)[:MAX_METRICS]
    return figures | {f"env/{name}": mean(metrics[name]) for name in names}


def rewards_and_successes(
    rollouts: Iterable[RolloutRecord], rule: SuccessRule
) -> tuple[list[float], list[float]]:
    """Rewards of the rollouts that have one, and their successes; [] if these are unknown."""
    scored = [(each.reward, each.metrics) for each in rollouts if each.reward is not None]
    for reward, metrics in scored:
        rule.see(reward, metrics)
    known = [rule.success_of(reward, metrics) for reward, metrics in scored]
    return [reward for reward, _ in scored], [each for each in known if each is not None]


UNTRAINABLE_ROUNDS = 4
"""A run ends after this many times max_running groups in a row without samples: the environment may
always fail; an engine may be away only for a while."""
EVAL_WINDOW = 4096
"""Open rollouts of an evaluation, since a client's open requests are bounded."""


class Batch(msgspec.Struct):
    """The batch of one step."""

    step: int
    groups: list[ReadyGroup]
    oldest_step: int = 0
    """Tokens of weights before this step are masked."""

    def group_ids(self) -> list[GroupId]:
        return [group.group_id for group in self.groups]

    def samples(self) -> list[Sample]:
        return [sample for group in self.groups for sample in group.all_samples()]


class Pacer:
    """Call `collect` and `take` in turn until a batch is complete."""

    def __init__(
        self,
        client: GroupSource,
        staleness: StalenessManager,
        tasks: Iterator[Task],
        settings: RequestSettings,
        reports: tuple[RunRecords, Tally],
        allocator: SampleAllocator | None = None,
    ) -> None:
        """`allocator` allocates samples where the policy wants them (default: in this process)."""
        self._client = client
        self._staleness = staleness
        self._settings = settings
        self.lifecycle = GroupLifecycle(staleness, settings.num_samples)
        """State of all groups."""
        self._tally = reports[1]
        self._accounting = GroupAccounting(reports, settings.env, self.lifecycle.versions)
        self.requester = GroupRequester(client, tasks, settings, reports[1], self.lifecycle)
        """Makes the requests."""
        self._queue = ReadyQueue(allocator or LocalAllocator())
        self._first_failures = FirstFailures(settings.env)
        self._in_step: Batch | None = None
        self._step = 0
        """The next step, whose batch is being collected."""

    def resume(self, recovery: RecoveryPlan) -> None:
        """Start from the state of earlier processes of the run, before any other call."""
        self.requester.resume(recovery)
        self._first_failures.has_succeeded = self._tally.num_trained > 0
        for leave, booked in zip(self.lifecycle.resume(recovery), recovery.drops, strict=True):
            self._record_missing(leave, booked)
        for entry in recovery.parted:
            self._record_replayed_drop(entry, self._client.open(recovery.results[entry.group_id]))

    def ask(self, num_needed: int) -> None:
        """Request groups as the bound allows, until `num_needed` are open or ready."""
        while self.lifecycle.may_ask(num_needed):
            self.requester.ask(self._staleness.published_step)

    def collect(self, timeout_s: float) -> None:
        """Handle arrivals, waiting up to `timeout_s` for the first.

        Raises EnvError if no arrival trains any more.
        """
        for arrival in self._client.take(timeout_s):
            self._handle(arrival)

    def take(self, step: int) -> Batch | None:
        """Return the batch of `step`, or None until it is complete; raise ConfigError if it is more
        than the policy's allocator can hold."""
        self._step = step
        return self._carry_out(self.lifecycle.step(TakeStep(step)))

    def retake(self, again: StepTaken, results: Mapping[GroupId, StoredResult]) -> Batch | None:
        """Return the batch of a step that an earlier process took, with the same groups; None if
        none of them can be read."""
        self._step = again.step
        for group_id in again.group_ids:
            self._handle(self._client.open(results[group_id]))
        return self._carry_out(self.lifecycle.step(RetakeStep(again)))

    def trained(self, batch: Batch) -> None:
        """Record a batch that its step trained."""
        self._in_step = None
        self.lifecycle.step(StepTrained())
        for group in batch.groups:
            self._accounting.trained(group, batch.step)

    def publishing(self, policy_version: int, step: int) -> None:
        """`policy_version` has the weights after `step` steps, and engines may use it soon."""
        self.lifecycle.step(VersionCreated(policy_version, step))

    def published(self, step: int) -> None:
        """Engines sample with the weights after `step` steps."""
        self.lifecycle.step(VersionPublished(step))

    @property
    def pacing(self) -> StalenessState:
        """Counts and ages of rollouts now."""
        return self._staleness.state

    def measure(self, num_rollouts: int) -> bool:
        """Request single rollouts that do not train until there are `num_rollouts`, including those
        of earlier processes; return whether all have ended."""
        # Not requested less measured: a broken checkpoint may have lost some.
        num_out = self.lifecycle.num_measuring
        num_left = num_rollouts - self._tally.num_evals
        for _ in range(min(num_left, EVAL_WINDOW - num_out)):
            self.requester.evaluate(self._staleness.published_step)
        return num_out <= 0 and num_left <= 0

    def num_to_come(self, num_needed: int) -> int:
        """Rollouts that are open or may be requested now, while the run needs `num_needed` groups
        more; at least those that the next batch needs, even if there is no room for them yet."""
        staleness, ready, running = self._staleness, self._staleness.ready, self._staleness.running
        most = num_needed * self._settings.num_samples - ready
        num_lacking = staleness.settings.batch - ready
        return max(running, min(most, max(num_lacking, running + staleness.capacity)))

    def cancel_open(self, reason: str) -> None:
        """Cancel all open groups."""
        for group_id in [*self.lifecycle.open_ids]:
            self._client.cancel(group_id, reason)

    def num_open(self) -> int:
        """Rollouts requested and neither trained nor dropped."""
        return self._staleness.running + sum(map(num_undecided, self._held()))

    def close(self) -> None:
        """Free all samples; nothing trains any more."""
        self._queue.clear(self._held())

    def _held(self) -> list[ReadyGroup]:
        return [*self._queue.waiting(), *(self._in_step.groups if self._in_step else ())]

    def _carry_out(self, actions: Sequence[Action]) -> Batch | None:
        batch = None
        for action in actions:
            match action:
                case GroupLeft():
                    self._drop(self._queue.pop(action.group_id), action)
                case TrainGroups():
                    batch = self._batch(action)
        return batch

    def _batch(self, train: TrainGroups) -> Batch:
        step, group_ids = train.taken.step, train.taken.group_ids
        if train.stale:
            for group_id in group_ids:
                self._accounting.masked(self._queue.mask(group_id, train.stale), step)
        self._in_step = Batch(step, self._queue.take(group_ids), train.taken.oldest_step)
        return self._in_step

    def _handle(self, arrival: Arrival) -> None:
        if arrival.record is not None and self.lifecycle.request(arrival.group_id) is not None:
            self._first_failures.note(arrival.record)
        self._handle_arrival(arrival)
        self._first_failures.check()

    def _handle_arrival(self, arrival: Arrival) -> None:
        if isinstance(arrival, Dropped):
            [action] = self.lifecycle.step(ResultMissing(arrival.group_id, arrival.reason))
            assert isinstance(action, GroupLeft)
            self._record_missing(action, booked_of(arrival, self._step, action.request.task.id))
            self._check_trainable(arrival.reason)
        else:
            self._handle_result(arrival)

    def _record_missing(self, leave: GroupLeft, booked: GroupBooked) -> None:
        match leave.outcome:
            case GroupOutcome.NOT_REQUESTED:
                self._accounting.not_requested(booked.group_id)
            case GroupOutcome.UNMEASURED | GroupOutcome.MEASURED:
                self._accounting.unmeasured(booked.group_id, booked.task_id, booked.reason)
            case _:
                self._accounting.ended(booked, self._settings.num_samples)

    def _record_replayed_drop(self, entry: GroupParted, arrival: Arrival) -> None:
        """Record a drop of an earlier process as that process did; keep no result."""
        if isinstance(arrival, Dropped):  # it cannot be read
            task, group, num_rollouts = UNKNOWN, None, 0
        else:
            task, group = (
                arrival.record.task,
                cut_group(arrival, self._settings.branches, lay_plainly),
            )
            num_rollouts = sum(map(bool, group.samples))
        [leave] = self.lifecycle.step(DropReplayed(entry, task, num_rollouts))
        assert isinstance(leave, GroupLeft)
        if group:
            self._record_untrained(group, leave, entry.step)
        else:
            self._record_missing(leave, GroupBooked(entry.group_id, entry.reason, entry.step))

    def _handle_result(self, finished: Finished) -> None:
        request, record = self.lifecycle.request(finished.group_id), finished.record
        if request is None:
            self._accounting.not_requested(finished.group_id)
            return
        is_eval = request.is_eval or record.is_eval
        group = (
            cut_group(finished, self._settings.branches, lay_plainly)
            if is_eval
            else self._queue.cut(finished, self._settings.branches)
        )
        versions = tuple(versions_of(samples) for samples in group.samples if samples)
        came = ResultArrived(finished.group_id, record.task, versions, is_eval)
        [action] = self.lifecycle.step(came)
        if isinstance(action, GroupLeft):
            self._drop(group, action)
        else:
            self._queue.keep(group)

    def _drop(self, group: ReadyGroup, leave: GroupLeft) -> None:
        """Record and free a result that does not train."""
        why = leave.why or leave.outcome
        self._client.done_with([group.group_id], why, self._step, leave.times)
        why = self._record_untrained(group, leave, self._step)
        self._queue.clear([group])
        if leave.outcome is GroupOutcome.UNTRAINABLE:
            self._check_trainable(why)

    def _record_untrained(self, group: ReadyGroup, leave: GroupLeft, step: int) -> str:
        """Record a result that leaves before `step`; return the reason."""
        match leave.outcome:
            case GroupOutcome.MEASURED:
                self._accounting.measured(group)
            case GroupOutcome.UNTRAINABLE:
                return self._accounting.untrainable(group, step)
            case _:
                self._accounting.dropped(group, step, leave.why)
        return leave.why

    def _check_trainable(self, why: str) -> None:
        """Raise EnvError if too many groups in a row had nothing to train."""
        self._first_failures.check()
        num_untrainable = self.lifecycle.num_untrainable
        num_groups = self._staleness.settings.max_concurrent // self._settings.num_samples
        if num_untrainable >= UNTRAINABLE_ROUNDS * num_groups:
            raise EnvError(
                f'env = "{self._settings.env}": the last {num_untrainable} groups had nothing to '
                f"train ({why}); details are in drops.jsonl and the workers' logs"
            )


def num_undecided(group: ReadyGroup) -> int:
    """Rollouts of the group that are not recorded yet; fully masked ones already are."""
    rows = group.pairs()
    return sum(1 for each, samples in rows if samples or each.index not in group.num_masked)
