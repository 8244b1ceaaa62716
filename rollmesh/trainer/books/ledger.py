"""The drop ledger: a row for each rollout that does not train, so that what a run selects against
can be seen.

    group_id, index   whose            task_id, env   of what
    length            sampled tokens   age            of its oldest token, in train steps
    reason            why, its code first
    outcome           how it ended     error, place   where it failed: what was raised, and where

Rollouts that nobody has seen are one row together, without index, length or age. Invariant: what is
counted as dropped stands in a row, and the other way round; evaluations are written and not
counted. Driven by the pacer; read by `rollmesh trace bias`.
"""

from rollmesh.core.ids import GroupId
from rollmesh.serve.client.journal_entries import SeenRollout
from rollmesh.trainer.books.records import RunRecords, Tally


class DropLedger:
    """Of a run whose rollouts are of one environment."""

    def __init__(self, records: RunRecords, tally: Tally, env: str) -> None:
        self._records = records
        self._tally = tally
        self._env = env

    def rollout(
        self, group_id: GroupId, task_id: str, seen: SeenRollout, reason: str, age: int | None
    ) -> None:
        """Write one that came."""
        cause = {"error": seen.error, "place": seen.place} if seen.error or seen.place else {}
        self._records.drop(
            group_id,
            1,
            reason,
            index=seen.index,
            task_id=task_id,
            env=self._env,
            length=seen.length,
            age=age,
            outcome=seen.outcome,
            **cause,
        )
        self._tally.num_dropped += 1

    def unseen(self, group_id: GroupId, task_id: str, num_rollouts: int, reason: str) -> None:
        """So many of a group of which nothing came."""
        if num_rollouts > 0:
            self.uncounted(group_id, task_id, num_rollouts, reason)
            self._tally.num_dropped += num_rollouts

    def uncounted(self, group_id: GroupId, task_id: str, num_rollouts: int, reason: str) -> None:
        """The same of what this run has not asked for in order to train it."""
        self._records.drop(group_id, num_rollouts, reason, task_id=task_id, env=self._env)
