"""A rollout client without a mesh: the test decides which groups end, and how.

- Like a RolloutClient, it mints ids at once and returns each ended group exactly once.
"""

from collections.abc import Iterable

import numpy as np

from rollmesh.core.ids import GroupId
from rollmesh.core.types import (
    GroupRecord,
    NodeRow,
    Outcome,
    RolloutRecord,
    SamplingParams,
    SamplingPolicy,
    Task,
    VersionRun,
)
from rollmesh.serve.client.arrivals import Arrival, Dropped, Finished, StoredResult, Unopened
from rollmesh.serve.client.journal_entries import Again, GroupParted

PROMPT = (7, 8, 9)
ANSWER = (1, 2)


class ScriptedClient:
    """`asked` holds the requested groups that have not ended."""

    def __init__(self) -> None:
        self.run_id = "run"
        self.asked: dict[GroupId, tuple[Task, int]] = {}
        self.again: dict[GroupId, Again] = {}
        """Requests of `asked`, and of ended groups, that repeat a task."""
        self.min_policy_versions: list[int] = []
        """Minimum policy version of each request, in order."""
        self.parted: list[GroupParted] = []
        """Groups that the client's user has dropped."""
        self.filed: dict[int, Arrival] = {}
        """Results that an earlier client left, by position."""
        self._num_asked = 0
        self._arrivals: list[Arrival] = []

    def ask(
        self,
        task: Task,
        *,
        env: str,
        num_samples: int,
        sampling: SamplingPolicy,
        seed: int,
        is_eval: bool = False,
        asked_step: int = 0,
        num_drawn: int = 0,
        again: Again | None = None,
        min_policy_version: int = -1,
    ) -> GroupId:
        """Mint an id and record the request."""
        del env, sampling, seed, is_eval, asked_step, num_drawn
        group_id = GroupId(self.run_id, self._num_asked)
        self.min_policy_versions.append(min_policy_version)
        if again:
            self.again[group_id] = again
        self._num_asked += 1
        self.asked[group_id] = (task, num_samples)
        return group_id

    def take(self, timeout_s: float) -> list[Arrival]:
        """Return the groups that ended since the last call; never wait."""
        del timeout_s
        arrivals, self._arrivals = self._arrivals, []
        return arrivals

    def cancel(self, group_id: GroupId, reason: str) -> None:
        """End the group unless it has ended."""
        if group_id in self.asked:
            self.drop(group_id, f"cancelled: {reason}")

    def done_with(
        self, group_ids: Iterable[GroupId], reason: str = "", step: int = 0, times: int = 0
    ) -> None:
        """Record that the groups are no longer needed, as the journal does."""
        self.parted += [GroupParted(each, reason, step, times) for each in group_ids]

    def open(self, arrival: Unopened) -> Arrival:
        """Return an earlier client's result, from `filed` instead of the disk."""
        assert isinstance(arrival, StoredResult)
        return self.filed[arrival.position]

    def hand_out(self, position: int) -> None:
        """Deliver the result that an earlier client left at `position`."""
        self._arrivals.append(self.filed[position])

    def finish(
        self,
        group_id: GroupId,
        outcomes: dict[int, Outcome] | None = None,
        policy_versions: tuple[int, ...] = (0,),
        of_rollout: dict[int, tuple[int, ...]] | None = None,
    ) -> None:
        """End the group: siblings complete unless `outcomes` says otherwise.

        The tokens of each answer are sampled by `policy_versions`, one token each, the last version
        for the rest; `of_rollout` overrides the versions of single rollouts.
        """
        special = of_rollout or {}
        task, num_samples = self.asked.pop(group_id)
        named = outcomes or {}
        rollouts = [
            rollout(
                index,
                named.get(index, Outcome.COMPLETED),
                special.get(index, policy_versions),
            )
            for index in range(num_samples)
        ]
        self._arrivals.append(
            Finished(
                group_id=group_id,
                attempt=1,
                worker_id="worker-0",
                record=GroupRecord(task=task, rollouts=rollouts),
                token_ids=np.array((PROMPT + ANSWER) * num_samples, np.int32),
                logprobs=np.array((-0.5, -0.25) * num_samples, np.float32),
                position=group_id.seq,
            )
        )

    def drop(self, group_id: GroupId, reason: str) -> None:
        """End the group without a result."""
        self.asked.pop(group_id, None)
        self._arrivals.append(Dropped(group_id, reason))


def rollout(index: int, outcome: Outcome, policy_versions: tuple[int, ...]) -> RolloutRecord:
    """A rollout of one turn with two sampled tokens."""
    versions = (policy_versions * 2)[: len(ANSWER)]
    answer = NodeRow(
        parent=0,
        num_tokens=len(ANSWER),
        sampled=True,
        policy_versions=tuple(VersionRun(each, 1) for each in sorted(versions)),
        params=SamplingParams(max_tokens=8),
        finish_reason="stop",
    )
    is_rewarded = outcome in (Outcome.COMPLETED, Outcome.TRUNCATED)
    return RolloutRecord(
        index=index,
        outcome=outcome,
        reward=float(index % 2) if is_rewarded else None,
        nodes=[NodeRow(parent=-1, num_tokens=len(PROMPT), sampled=False), answer],
        num_tokens=len(PROMPT) + len(ANSWER),
        num_logprobs=len(ANSWER),
    )
