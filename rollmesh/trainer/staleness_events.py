"""What StalenessManager is told, and what it says, as small frozen structs.

Invariant: values only, in rollouts and train steps. Driven by staleness.py, and by whoever carries
out what it says: the pacer, the simulators, and loops of one's own.
"""

import msgspec

from rollmesh.core.ids import GroupId


class GroupAsked(msgspec.Struct, frozen=True):
    group_id: GroupId
    num_rollouts: int
    asked_step: int = -1
    """Steps done by the weights that engines had at the ask; -1: those that they have now."""


class GroupArrived(msgspec.Struct, frozen=True):
    group_id: GroupId
    num_rollouts: int
    """That train; at least one."""
    oldest_step: int
    """Train step whose weights sampled the group's oldest token."""
    newest_steps: tuple[int, ...] = ()
    """The same of each rollout's newest token; only `mask` asks for it."""


class GroupEnded(msgspec.Struct, frozen=True):
    """It will not train: failed, cancelled, or nothing in it trains."""

    group_id: GroupId


class TakeBatch(msgspec.Struct, frozen=True):
    """The trainer is free; it is about to do `step`."""

    step: int
    num_rollouts: int = 0
    """That it wants, at least; 0: a batch of the settings."""


class StepPublished(msgspec.Struct, frozen=True):
    """Weights after `step` train steps are what engines sample with from now on."""

    step: int
    policy_version: int | None = None
    """Their name; None: the step's number is."""


class StepRetaken(msgspec.Struct, frozen=True):
    """A recovery does `step` again: these groups, asked or ready, are its. Their age was judged
    when it took them first."""

    step: int
    group_ids: tuple[GroupId, ...]
    oldest_step: int = 0
    """As its BatchTaken said, where older tokens were masked."""


Event = GroupAsked | GroupArrived | GroupEnded | TakeBatch | StepPublished | StepRetaken


class BatchTaken(msgspec.Struct, frozen=True):
    """Train these, oldest first."""

    step: int
    group_ids: tuple[GroupId, ...]
    oldest_step: int
    """Tokens of older weights are past the bound; only `mask` leaves any in a batch."""


class GroupStale(msgspec.Struct, frozen=True):
    """Too old for any step; it belongs in the drop ledger."""

    group_id: GroupId
    age: int


Action = BatchTaken | GroupStale
