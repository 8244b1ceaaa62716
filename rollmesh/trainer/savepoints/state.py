"""What a train loop must know to go on from a savepoint, besides what its policy holds.

Invariant: plain values, in the file loop.json of a savepoint; they are of one moment, between two
steps, and what the journal tells of later is not in it. Written by the loop, read by the plan of a
recovery; no torch here, so that the simulator has it too.
"""

import msgspec

from rollmesh.core.types import Json, Task
from rollmesh.serve.client.journal_entries import Again, StateSaved


class Waiting(msgspec.Struct, frozen=True):
    """A task that is to be asked for again."""

    task: Task
    again: Again


class LoopState(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """After `num_steps` train steps, and before the next."""

    num_steps: int
    """Done; the next step has this number. The learning rate's schedule is a function of it."""
    policy_version: int = 0
    """The last one minted."""
    step_of_version: dict[int, int] = {}
    """Of the policy versions that samples can still be of: how many steps their weights had."""
    num_tasks: int = 0
    """The position in the data: how many tasks were drawn from the environment."""
    ended: dict[str, list[tuple[int, int]]] = {}
    """The groups that were consumed, trained or dropped: by run_id, half-open intervals of seq."""
    waiting: tuple[Waiting, ...] = ()
    """What is asked for before new tasks, and what was asked for so and has not ended: the journal
    says which of these asks are in it."""
    staleness: dict[str, Json] = {}
    """The counters of the StalenessManager, by name."""
    tally: dict[str, Json] = {}
    """The counts behind summary.json, in the form that records.py gives them."""
    offsets: dict[str, int] = {}
    """How many bytes of each record file (metrics.jsonl, ...) were written, by its name."""

    def told(self) -> StateSaved:
        """What the journal hears of it."""
        return StateSaved(
            self.num_steps, self.policy_version, self.ended, dict(self.step_of_version)
        )
