"""Ends a run whose environment fails in every group from the first one on.

- Only failures with a place count: an engine that is unavailable leaves none, and InfraError is
  raised by an environment that says that something around it failed.
- One rollout with a reward ends the count for the rest of the run.

Books every group once, as it leaves: its rows and its counts.

    trained     in a step                       rollouts of it that gave nothing are drops
    dropped     too old, foreign, or nothing in it trains
    ended       without a result, for a reason of the mesh
    measured    by an evaluation; it never counts among those that were asked for to be trained

Invariant: what has not left is in no book, so that a trainer that dies and has it again from its
journal counts it once. Driven by the pacer.
"""

from collections.abc import Iterable

from rollmesh.core.errors import EnvError, InfraError
from rollmesh.core.ids import GroupId, RolloutId
from rollmesh.core.types import ErrorPlace, GroupRecord, Outcome, RolloutRecord
from rollmesh.serve.client.arrivals import seen_of
from rollmesh.serve.client.journal_entries import GroupBooked
from rollmesh.serve.client.scores import SuccessRule
from rollmesh.trainer.books.ledger import DropLedger
from rollmesh.trainer.books.records import RunRecords, Tally, mean
from rollmesh.trainer.pacing.ready_queue import ReadyGroup
from rollmesh.trainer.pacing.versions import VersionSteps, spans_versions

NUM_ALIKE = 16
"""So many groups that failed alike, before any has succeeded, end the run."""


class FirstFailures:
    """The count; `note` sees each group that arrives."""

    def __init__(self, env: str) -> None:
        self.has_succeeded = False
        """Whether any rollout of the run has had a reward; then nothing is counted any more."""
        self._env = env
        self._place: ErrorPlace | None = None
        self._num_alike = 0
        self._last = ""
        """The error and the task of the last one."""

    def note(self, record: GroupRecord) -> None:
        """Count a group that has arrived."""
        place, error = _failure_of(record)
        if place is None:
            self.has_succeeded |= any(each.reward is not None for each in record.rollouts)
        elif place.kind != InfraError.__name__:
            self._num_alike = self._num_alike + 1 if place == self._place else 1
            self._place, self._last = place, f"{error}; task {record.task.id}"

    def check(self) -> None:
        """Raise EnvError if NUM_ALIKE groups in a row failed alike and none has succeeded."""
        if self._num_alike >= NUM_ALIKE and not self.has_succeeded:
            raise EnvError(
                f'env = "{self._env}": the first {NUM_ALIKE} groups all failed alike: '
                f"{self._last}; fix that and --resume; the workers' logs in the run folder say more"
            )


def _failure_of(record: GroupRecord) -> tuple[ErrorPlace | None, str]:
    """The one place where all of the group failed, and the error; None if there is none."""
    ended = [each for each in record.rollouts if each.outcome is not Outcome.CANCELLED]
    if record.place and not any(each.place for each in ended):
        return record.place, record.reason  # the siblings' common score
    first: RolloutRecord | None = next(iter(ended), None)
    if first is None or any(each.place != first.place for each in ended):
        return None, ""
    return first.place, first.error


class GroupAccounting:
    """Of a run whose rollouts are of one environment."""

    def __init__(self, books: tuple[RunRecords, Tally], env: str, versions: VersionSteps) -> None:
        self._records, self._tally = books
        self._ledger = DropLedger(*books, env)
        self._env = env
        self._versions = versions

    def trained(self, group: ReadyGroup, step: int) -> None:
        """In `step`."""
        self._look_at(group, step)
        self._leave(group, step)
        for samples in group.samples:
            self._tally.num_trained += bool(samples)
            self._tally.num_samples += len(samples)
            for sample in samples:
                self._tally.ages[self._versions.age([sample], step)] += 1
                self._tally.num_two_versions += spans_versions(sample)

    def dropped(self, group: ReadyGroup, step: int, reason: str) -> None:
        """Before `step`, whole: what of it would have trained, for this reason."""
        self._look_at(group, step)
        for rollout, samples in group.pairs():
            if samples:
                self._lose(group, rollout, step, reason)
        self._leave(group, None)

    def barren(self, group: ReadyGroup, step: int) -> str:
        """Nothing in it trains; why."""
        why = self._look_at(group, step)
        self._leave(group, None)
        return why

    def masked(self, group: ReadyGroup, step: int) -> None:
        """`step` takes it without tokens that are too old: rollouts without others are drops."""
        for rollout, samples in group.pairs():
            if not samples and rollout.index in group.num_masked:
                reason = "masked: no token of it is within the age bound"
                self._lose(group, rollout, step, reason)

    def ended(self, booked: GroupBooked, num_samples: int) -> None:
        """A group of which no result came; perhaps some of its rollouts have."""
        group_id, task_id, reason = booked.group_id, booked.task_id, booked.reason
        seen = booked.rollouts[:num_samples]
        for rollout in seen:
            self._tally.outcomes[rollout.outcome] += 1
            age = self._versions.age_of(rollout.policy_versions, booked.step)
            self._ledger.rollout(group_id, task_id, rollout, reason, age)
        self._ledger.unseen(group_id, task_id, num_samples - len(seen), reason)

    def measured(self, group: ReadyGroup) -> None:
        """A result of an evaluation."""
        rewards, successes = rewards_and_successes(group.record.rollouts, self._tally.rule)
        self._tally.measured += rewards
        self._tally.measured_successes += successes
        self._leave(group, None)

    def unmeasured(self, group_id: GroupId, task_id: str, reason: str) -> None:
        """A rollout that an evaluation asked for and did not get."""
        self._ledger.uncounted(group_id, task_id, 1, f"evaluation: {reason}")

    def strange(self, group_id: GroupId) -> None:
        """One that nobody asked for here."""
        self._ledger.uncounted(group_id, "", 0, "of an earlier run")

    def _look_at(self, group: ReadyGroup, step: int) -> str:
        """Count its rollouts, and book those that gave nothing; why the last of them did not."""
        why = ""
        for rollout, samples in group.pairs():
            self._tally.outcomes[rollout.outcome] += 1
            self._tally.add_worker(group.worker_id)
            if not samples and rollout.index not in group.num_masked:
                why = f"{rollout.outcome}: {rollout.error or 'nothing in it trains'}"
                self._lose(group, rollout, step, why)
        return why

    def _lose(self, group: ReadyGroup, rollout: RolloutRecord, step: int, reason: str) -> None:
        seen = seen_of(rollout)
        age = self._versions.age_of(seen.policy_versions, step)
        self._ledger.rollout(group.group_id, group.record.task.id, seen, reason, age)

    def _leave(self, group: ReadyGroup, step: int | None) -> None:
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
"""Metrics of an environment in a row of metrics.jsonl; names that sort later are left out."""


def step_means(records: Iterable[GroupRecord], rule: SuccessRule) -> dict[str, float | None]:
    """Means over the rollouts with a reward: `reward`, `success` where it is known, and `env/NAME`
    for each metric of the environment, over the rollouts that have it."""
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
    """Rewards of the rollouts that have one, and their successes; [] where these are unknown."""
    scored = [(each.reward, each.metrics) for each in rollouts if each.reward is not None]
    for reward, metrics in scored:
        rule.see(reward, metrics)
    known = [rule.success_of(reward, metrics) for reward, metrics in scored]
    return [reward for reward, _ in scored], [each for each in known if each is not None]
