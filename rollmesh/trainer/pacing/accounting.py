"""Records and counts of each group as it leaves; ends a run whose environment always fails.

    trained     in a step                       its rollouts without samples are drops
    dropped     too old, foreign, or nothing in it trains
    ended       without a result, for a reason of the mesh
    measured    by an evaluation; not among those that were requested for training

- A group that has not left is in no record, so a restarted trainer that reads it again from its
  journal counts it once.
- FirstFailures counts failures with a place only: an unavailable engine has none, and InfraError is
  raised by an environment for a fault around it. One reward ends the count for good.
"""

from collections.abc import Iterable

from rollmesh.core.errors import EnvError, InfraError
from rollmesh.core.ids import GroupId, RolloutId
from rollmesh.core.types import ErrorPlace, GroupRecord, Outcome, RolloutRecord
from rollmesh.serve.client.arrivals import seen_of
from rollmesh.serve.client.journal_entries import GroupBooked
from rollmesh.serve.client.scores import SuccessRule
from rollmesh.trainer.pacing.ready_queue import ReadyGroup
from rollmesh.trainer.pacing.versions import VersionSteps, spans_versions
from rollmesh.trainer.reports.records import DropLedger, RunRecords
from rollmesh.trainer.reports.summary import Tally, mean

NUM_ALIKE = 16
"""Groups with the same failure, before any success, that end the run."""


class FirstFailures:
    """Counts groups that failed in the same way before any has succeeded."""

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
