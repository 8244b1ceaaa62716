"""The step machines that a simulation joins, and counts of their state changes.

- The defaults are the machines that the processes run; a test may put a broken one in place of one.
- Counting only watches; a crash is no transition.
"""

import collections
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from rollmesh.engine.fleet import Fleet
from rollmesh.runtime.generation.generation import GenerationMachine
from rollmesh.serve.client.arrivals import ResultSink
from rollmesh.serve.client.journal import ClientJournal, History
from rollmesh.serve.router.group_scheduler import GroupScheduler
from rollmesh.trainer.checkpoints.recovery_plan import (
    CheckpointSchedule,
    LoopState,
    RecoveryPlan,
    plan_recovery,
)
from rollmesh.trainer.pacing.lifecycle import GroupLifecycle
from rollmesh.trainer.staleness import StalenessManager

NONE = "-"
"""State before something is known, and after it is forgotten."""


class TransitionCounts:
    """Counts state changes by watching the states of many objects of one kind."""

    def __init__(self) -> None:
        self.num = collections.Counter[str]()
        self._last: dict[str, dict[Any, str]] = {}

    def note(self, machine: str, before: str, after: str) -> None:
        """Count one change, unless nothing changed."""
        if before != after:
            self.num[f"{machine}: {before} > {after}"] += 1

    def watch(self, machine: str, states: Mapping[Any, str]) -> None:
        """Compare with the last look at the same machine; what is new or gone counts too."""
        last = self._last.get(machine, {})
        if last == states:
            return
        kind = machine.partition("@")[0]
        for key, state in states.items():
            if (before := last.get(key, NONE)) != state:
                self.num[f"{kind}: {before} > {state}"] += 1
        for key, before in last.items():
            if key not in states:
                self.num[f"{kind}: {before} > {NONE}"] += 1
        self._last[machine] = dict(states)

    def forget(self, machine: str) -> None:
        """Forget the last look: a crash is no transition."""
        self._last.pop(machine, None)


class StepMachines(msgspec.Struct, frozen=True, kw_only=True):
    """The machines that nodes are built from."""

    group_scheduler: type[GroupScheduler] = GroupScheduler
    fleet: type[Fleet] = Fleet
    sink: type[ResultSink] = ResultSink
    generation: type[GenerationMachine] = GenerationMachine
    book: type[ClientJournal] = ClientJournal
    staleness: type[StalenessManager] = StalenessManager
    course: type[GroupLifecycle] = GroupLifecycle
    due: type[CheckpointSchedule] = CheckpointSchedule
    plan: Callable[[LoopState | None, History], RecoveryPlan] = plan_recovery


REAL = StepMachines()
