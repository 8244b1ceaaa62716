"""What a journal tells the program that comes next, beyond its newest savepoint: plain values.

Invariant: of a group that a savepoint does not cover exactly one of three is told: it is open, it
has a result, or it was dropped for a reason; and if a step took it, or the program has parted with
it, that is told, once.
Made by book.py; read by trainer/recovery/plan.py.
"""

import msgspec

from rollmesh.core.ids import GroupId
from rollmesh.core.types import Task
from rollmesh.serve.client.arrivals import Filed
from rollmesh.serve.client.entries import (
    Again,
    GroupBooked,
    GroupParted,
    Groups,
    Published,
    StateSaved,
    StepTaken,
)


class OpenAsk(msgspec.Struct, frozen=True, kw_only=True):
    """A group that was asked for and has not ended."""

    group_id: GroupId
    task: Task
    num_samples: int
    is_eval: bool
    asked_step: int
    """As the ask said."""


class History(msgspec.Struct, frozen=True, kw_only=True):
    """See the module; each in the journal's order."""

    saved: StateSaved = StateSaved()
    """The newest savepoint that the journal was freed by."""
    steps: tuple[StepTaken, ...] = ()
    step_deaths: dict[int, tuple[str, ...]] = {}
    """By step: how it ended earlier processes since it was last done, oldest first."""
    published: tuple[Published, ...] = ()
    results: tuple[Filed, ...] = ()
    """Those of `steps` too."""
    drops: tuple[GroupBooked, ...] = ()
    parted: tuple[GroupParted, ...] = ()
    """Of `results`, those that the program had dropped."""
    again: dict[GroupId, Again] = {}
    """Of all that is told, what was asked for again."""
    evals: Groups = {}
    """Of all groups of all lives, those that were asked for and do not train."""
    open_asks: tuple[OpenAsk, ...] = ()
    num_asked: int = 0
    """Groups, in all lives, those for evaluation among them."""
    num_drawn: int = 0
    """Tasks, in all lives."""
