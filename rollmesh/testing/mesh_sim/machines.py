"""The step machines that a simulation joins; a test may put a broken one in a real one's place.

Invariant: the defaults are the machines that the processes run. Driven by mesh.py, which hands them
to the nodes.
"""

from collections.abc import Callable

import msgspec

from rollmesh.engine.fleet import Fleet
from rollmesh.runtime.generation import GenerationMachine
from rollmesh.serve.client.arrivals import ResultSink
from rollmesh.serve.client.journal import ClientJournal, History
from rollmesh.serve.router.group_scheduler import GroupScheduler
from rollmesh.trainer.checkpoints.recovery_plan import RecoveryPlan, plan_recovery
from rollmesh.trainer.checkpoints.state import CheckpointSchedule, LoopState
from rollmesh.trainer.pacing.lifecycle import GroupLifecycle
from rollmesh.trainer.staleness import StalenessManager


class Machines(msgspec.Struct, frozen=True, kw_only=True):
    """What nodes build themselves from."""

    group_scheduler: type[GroupScheduler] = GroupScheduler
    fleet: type[Fleet] = Fleet
    sink: type[ResultSink] = ResultSink
    generation: type[GenerationMachine] = GenerationMachine
    book: type[ClientJournal] = ClientJournal
    staleness: type[StalenessManager] = StalenessManager
    course: type[GroupLifecycle] = GroupLifecycle
    due: type[CheckpointSchedule] = CheckpointSchedule
    plan: Callable[[LoopState | None, History], RecoveryPlan] = plan_recovery


REAL = Machines()
