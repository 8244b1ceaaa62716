"""State of the train loop in a checkpoint, and the schedule of checkpoints. Pure; without torch.

- The state is plain values in the file loop.json, all of one moment between two steps. Later
  journal entries are not in it.
- A checkpoint is due every `period_steps` steps, or if the journal is over its byte budget and a
  checkpoint would free some of it.
- One that came due during another is due after it. If the disk refuses one that a full journal
  forced, it is retried after FORCED_RETRY_S.
"""

import msgspec

from rollmesh.core.types import Json, Task
from rollmesh.serve.client.journal_entries import Again, StateSaved


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
    """Decides when to begin a checkpoint."""

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
