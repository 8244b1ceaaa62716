"""A client without a mesh: the test says what ends, and how.

Invariant: like a RolloutClient it mints ids at once and hands every ending out once. Driven by
tests of what stands on a client.
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
    """`asked` is what was asked for and has not ended."""

    def __init__(self) -> None:
        self.run_id = "run"
        self.asked: dict[GroupId, tuple[Task, int]] = {}
        self.again: dict[GroupId, Again] = {}
        """Of `asked`, and of what has ended, what asks for a task again."""
        self.min_policy_versions: list[int] = []
        """Of each ask, in order."""
        self.parted: list[GroupParted] = []
        """What its program has dropped."""
        self.filed: dict[int, Arrival] = {}
        """Results that an earlier client left, by their positions."""
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
        """Mint an id."""
        del env, sampling, seed, is_eval, asked_step, num_drawn
        group_id = GroupId(self.run_id, self._num_asked)
        self.min_policy_versions.append(min_policy_version)
        if again:
            self.again[group_id] = again
        self._num_asked += 1
        self.asked[group_id] = (task, num_samples)
        return group_id

    def take(self, timeout_s: float) -> list[Arrival]:
        """What was ended since the last call; never waits."""
        del timeout_s
        arrivals, self._arrivals = self._arrivals, []
        return arrivals

    def cancel(self, group_id: GroupId, reason: str) -> None:
        """End it, if it has not ended."""
        if group_id in self.asked:
            self.drop(group_id, f"cancelled: {reason}")

    def done_with(
        self, group_ids: Iterable[GroupId], reason: str = "", step: int = 0, times: int = 0
    ) -> None:
        """Remember it, as a journal does."""
        self.parted += [GroupParted(each, reason, step, times) for each in group_ids]

    def open(self, arrival: Unopened) -> Arrival:
        """Of an earlier life's: what stands at its place on the disk, which is `filed`."""
        assert isinstance(arrival, StoredResult)
        return self.filed[arrival.position]

    def hand_out(self, position: int) -> None:
        """What an earlier client left there arrives."""
        self._arrivals.append(self.filed[position])

    def finish(
        self,
        group_id: GroupId,
        outcomes: dict[int, Outcome] | None = None,
        policy_versions: tuple[int, ...] = (0,),
        of_rollout: dict[int, tuple[int, ...]] | None = None,
    ) -> None:
        """End the group: siblings complete unless `outcomes` says otherwise.

        A sibling's answer is sampled by `policy_versions`, one token each, the last for the rest;
        that of some by others, as `of_rollout` says.
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
    """One turn of two tokens."""
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
