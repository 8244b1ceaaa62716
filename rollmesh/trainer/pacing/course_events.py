"""What the course of a run is told, and what it says, as small frozen structs.

Invariant: values only; of samples nothing is here but which policy versions their trained tokens
are of. Driven by course.py, and by whoever carries out what it says: the pacer, the simulator.
"""

import enum

import msgspec

from rollmesh.core.ids import GroupId
from rollmesh.core.types import Task
from rollmesh.serve.client.journal_entries import Again, GroupParted, StepTaken

UNKNOWN = Task(id="")
"""Of what ended while nobody was here its record knows the task, if there is one."""


class Turn(msgspec.Struct, frozen=True):
    """What a group is asked for."""

    task: Task
    again: Again | None = None
    """Whose task it was before, where that came too late."""
    is_eval: bool = False

    @property
    def num_requeued(self) -> int:
        return self.again.times if self.again else 0


class Asked(msgspec.Struct, frozen=True):
    """Event: a group was asked for."""

    group_id: GroupId
    turn: Turn


class Failed(msgspec.Struct, frozen=True):
    """Event: a group has ended without a result."""

    group_id: GroupId
    why: str


class Came(msgspec.Struct, frozen=True):
    """Event: a group's result is here."""

    group_id: GroupId
    task: Task
    rollouts: tuple[frozenset[int], ...]
    """The policy versions of the tokens that would train, of each rollout that has any."""
    is_eval: bool = False


class Parted(msgspec.Struct, frozen=True):
    """Event: an earlier life has dropped this result, as its journal says."""

    entry: GroupParted
    task: Task
    num_rollouts: int
    """That would have trained."""


class Take(msgspec.Struct, frozen=True):
    """Event: the trainer is free, and about to do `step`."""

    step: int


class Retake(msgspec.Struct, frozen=True):
    """Event: a step that an earlier life took, whose results have come again."""

    taken: StepTaken


class StepDone(msgspec.Struct, frozen=True):
    """Event: the step that was taken is in the weights."""


class Minted(msgspec.Struct, frozen=True):
    """Event: this version holds the weights after `step` steps; some tokens may have it soon."""

    policy_version: int
    step: int


class Arrived(msgspec.Struct, frozen=True):
    """Event: the weights after `step` steps are what engines sample with."""

    step: int


Event = Asked | Failed | Came | Parted | Take | Retake | StepDone | Minted | Arrived


class Fate(enum.StrEnum):
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


class Keep(msgspec.Struct, frozen=True):
    """Action: it waits for its step."""

    group_id: GroupId


class Leave(msgspec.Struct, frozen=True):
    """Action: book it now, for nothing more is to be done with it."""

    group_id: GroupId
    fate: Fate
    turn: Turn = Turn(UNKNOWN)
    why: str = ""
    """As the ledger says it."""
    times: int = 0
    """That its task is asked for again, with the ask that is to follow; 0: none is."""


class Train(msgspec.Struct, frozen=True):
    """Action: these are the batch, oldest first."""

    taken: StepTaken
    stale: frozenset[int] = frozenset()
    """Tokens of these policy versions are masked."""


Action = Keep | Leave | Train
