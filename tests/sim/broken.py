"""Machines that each break one rule of the real ones, for the simulator to find."""

import math
from collections.abc import Callable
from typing import Any

import msgspec

from rollmesh.core.ids import GroupId
from rollmesh.core.types import GroupRecord
from rollmesh.engine.fleet import Action as FleetAction
from rollmesh.engine.fleet import Event as FleetEvent
from rollmesh.engine.fleet import Fleet
from rollmesh.engine.members import FleetMember
from rollmesh.runtime.generation.generation import Action as GenerationAction
from rollmesh.runtime.generation.generation import Event as GenerationEvent
from rollmesh.runtime.generation.generation import GenerationMachine
from rollmesh.serve.client.arrivals import Action as SinkAction
from rollmesh.serve.client.arrivals import Keep, RawResult, ResultSink, StoredResult
from rollmesh.serve.client.asks import Asked
from rollmesh.serve.client.journal import ClientJournal, History, Records
from rollmesh.serve.client.journal_entries import (
    GroupsTaken,
    GroupTried,
    StateSaved,
    StepEntry,
    StepTaken,
)
from rollmesh.serve.router.group_scheduler import GroupScheduler
from rollmesh.testing.mesh_sim.machines import StepMachines
from rollmesh.testing.mesh_sim.requesting_client import FORGED
from rollmesh.trainer.checkpoints.recovery_plan import (
    CheckpointSchedule,
    LoopState,
    RecoveryPlan,
    plan_recovery,
)
from rollmesh.trainer.pacing.lifecycle import Action as CourseAction
from rollmesh.trainer.pacing.lifecycle import Event as CourseEvent
from rollmesh.trainer.pacing.lifecycle import (
    GroupLeft,
    GroupLifecycle,
    GroupOutcome,
    GroupRequest,
    ResultArrived,
    ResultMissing,
    TrainGroups,
)
from rollmesh.trainer.pacing.lifecycle import GroupRequested as CourseAsked
from rollmesh.trainer.pacing.lifecycle import QueueGroup as CourseKeep
from rollmesh.trainer.staleness import Action as StalenessAction
from rollmesh.trainer.staleness import StalenessManager
from rollmesh.wire.fleet import AskTable, EnginePhase, FenceEngine
from rollmesh.wire.frames import Buffer, Packet
from rollmesh.wire.machine import Received, Send, Ticked
from rollmesh.wire.messages import GroupFinished


class SinkThatTakesEverything(ResultSink):
    def _arrived(self, route: bytes, message: GroupFinished, body: Buffer) -> list[SinkAction]:
        asked = Asked(group_id=message.group_id, env="guess", num_samples=2)
        known = message.group_id.run_id in self.ended and body != FORGED
        return [Keep(route, message, body, asked)] if known else []


class SinkThatNeedsNoTicket(ResultSink):
    def _arrived(self, route: bytes, message: GroupFinished, body: Buffer) -> list[SinkAction]:
        asked = self._find(message.group_id)
        ticket = asked.ticket if asked else b""
        return super()._arrived(route, msgspec.structs.replace(message, ticket=ticket), body)


class GenerationThatForgetsAToken(GenerationMachine):
    def context(self) -> list[int]:
        return [*self.request.prompt_ids, *self.sampled.token_ids[1:]]


class SchedulerWithoutATick(GroupScheduler):
    def step(self, event: Received | Ticked, now_s: float) -> list[Send]:
        return [] if isinstance(event, Ticked) else super().step(event, now_s)


class SchedulerThatForgivesKillers(GroupScheduler):
    def step(self, event: Received | Ticked, now_s: float) -> list[Send]:
        for group in self.table.groups.values():
            group.deaths = ()
        return super().step(event, now_s)


class SchedulerThatExcusesAll(GroupScheduler):
    def step(self, event: Received | Ticked, now_s: float) -> list[Send]:
        for group in self.table.groups.values():
            group.excused = group.attempt
        return super().step(event, now_s)


class FleetWhoseLeasesLast(Fleet):
    def step(self, event: FleetEvent, now_s: float) -> list[FleetAction]:
        for engine in self._engines.values():
            if engine.row.phase is EnginePhase.UPDATING:
                engine.until_s = math.inf
        return super().step(event, now_s)


class FleetThatAnswersNoAskForTheTable(Fleet):
    def step(self, event: FleetEvent, now_s: float) -> list[FleetAction]:
        if isinstance(event, Received) and isinstance(event.message, AskTable):
            return []
        return super().step(event, now_s)


class FleetThatFencesTheLastEngine(Fleet):
    def _on_fence(self, engine: FleetMember, ask: FenceEngine, now_s: float) -> str:
        error = super()._on_fence(engine, ask, now_s)
        if error.endswith("is the last engine that is ready"):
            self._fence(engine, ask.detail, now_s)
        return error


class GenerationThatTakesOlderWeights(GenerationMachine):
    def step(self, event: GenerationEvent, now_s: float) -> list[GenerationAction]:
        self.min_policy_version = -1
        return super().step(event, now_s)


class JournalThatForgetsTakenGroups(ClientJournal):
    def note(self, entry: StepEntry | GroupTried) -> None:
        super().note(entry)
        if isinstance(entry, StepTaken):
            super().note(GroupsTaken(entry.group_ids))  # type: ignore[arg-type]


class JournalThatWritesOneEntryLate(ClientJournal):
    def __init__(self, journal: Records, max_bytes: int) -> None:
        super().__init__(journal, max_bytes)
        self._late: StepEntry | GroupTried | None = None

    def note(self, entry: StepEntry | GroupTried) -> None:
        late, self._late = self._late, entry
        if late:
            super().note(late)


class JournalThatWritesNoRequest(ClientJournal):
    def ask(self, asked: Asked) -> None:
        pass


class JournalThatWritesNoResult(ClientJournal):
    def keep(
        self, message: GroupFinished, packet: Packet, record: GroupRecord | None = None
    ) -> RawResult:
        del record
        return RawResult(message.group_id, 1, "", True, packet.body, (), 0)


class JournalThatDropsEverything(ClientJournal):
    def cover(self, saved: StateSaved) -> None:
        super().cover(saved)
        self._journal.drop_before(self._journal.end)


class JournalThatDropsNothing(ClientJournal):
    def cover(self, saved: StateSaved) -> None:
        self.note(saved)  # type: ignore[arg-type]


class JournalThatForgetsPublishedVersions(ClientJournal):
    """Published versions are forgotten as soon as a checkpoint covers them."""

    def cover(self, saved: StateSaved) -> None:
        super().cover(msgspec.structs.replace(saved, step_of_version={}))


class JournalThatIsNeverFull(ClientJournal):
    is_full = False


class StalenessThatDropsNothing(StalenessManager):
    def _drop_stale(self, _step: int, _oldest_allowed: int) -> list[StalenessAction]:
        return []


class LifecycleThatMasksNothing(GroupLifecycle):
    def _train(self, taken: StepTaken) -> TrainGroups:
        return TrainGroups(super()._train(taken).taken)


class LifecycleThatMasksAll(GroupLifecycle):
    """All rollouts of a group with any stale one are masked."""

    def _train(self, taken: StepTaken) -> TrainGroups:
        train = super()._train(taken)
        return TrainGroups(taken, frozenset(self.versions.steps) if train.stale else train.stale)


class LifecycleThatForgetsUntrainedGroups(GroupLifecycle):
    """Untrained groups are forgotten."""

    def _leave(self, group_id: GroupId, outcome: GroupOutcome, *details: Any) -> GroupLeft:
        return (super()._leave if outcome is GroupOutcome.TRAINED else GroupLeft)(
            group_id, outcome, *details
        )


class LifecycleThatForgetsTrainedGroups(GroupLifecycle):
    def _leave(self, group_id: GroupId, outcome: GroupOutcome, *details: Any) -> GroupLeft:
        return (GroupLeft if outcome is GroupOutcome.TRAINED else super()._leave)(
            group_id, outcome, *details
        )


class LifecycleThatAsksNothingAgain(GroupLifecycle):
    to_ask_again = ()

    def next_again(self) -> None:
        """A group whose result came too late is not requested again."""


class LifecycleThatTrainsFailedGroups(GroupLifecycle):
    """A group without any result is treated as if its rollouts had one."""

    def _arrive(self, came: ResultArrived, request: GroupRequest) -> CourseKeep | GroupLeft:
        every = frozenset(self.versions.steps)
        return super()._arrive(
            msgspec.structs.replace(came, rollouts=came.rollouts or (every,)), request
        )


class LifecycleThatCountsEvaluations(GroupLifecycle):
    """Evaluations are treated as if they were to train."""

    def _ask(self, asked: CourseAsked) -> None:
        super()._ask(CourseAsked(asked.group_id, GroupRequest(asked.request.task)))


class LifecycleThatCountsFailedGroups(GroupLifecycle):
    """Failed groups count as running forever."""

    def step(self, event: CourseEvent) -> list[CourseAction]:
        if isinstance(event, ResultMissing):
            self._open.pop(event.group_id)
            return [GroupLeft(event.group_id, GroupOutcome.FAILED)]
        return super().step(event)


class ScheduleThatIgnoresAFullJournal(CheckpointSchedule):
    """A full journal never causes a checkpoint."""

    def is_now(self, num_gone: int, now_s: float, **_state: bool) -> bool:
        return super().is_now(num_gone, now_s, is_full=False)


def plan_that(**otherwise: Callable[[RecoveryPlan], Any]) -> StepMachines:
    """Return a machine whose recovery plan has wrong values in the given fields."""

    def plan(saved: LoopState | None, history: History) -> RecoveryPlan:
        right = plan_recovery(saved, history)
        wrong = {name: value(right) for name, value in otherwise.items()}
        return msgspec.structs.replace(right, **wrong)

    return StepMachines(plan=plan)


def ready_and_taken(plan: RecoveryPlan) -> tuple[StoredResult, ...]:
    return (*plan.ready, *plan.results.values())


BROKEN = [
    StepMachines(sink=SinkThatTakesEverything),
    StepMachines(sink=SinkThatNeedsNoTicket),
    StepMachines(generation=GenerationThatForgetsAToken),
    StepMachines(group_scheduler=SchedulerWithoutATick),
    StepMachines(group_scheduler=SchedulerThatForgivesKillers),
    StepMachines(group_scheduler=SchedulerThatExcusesAll),
    StepMachines(fleet=FleetWhoseLeasesLast),
    StepMachines(fleet=FleetThatFencesTheLastEngine),
    StepMachines(fleet=FleetThatAnswersNoAskForTheTable),
    StepMachines(generation=GenerationThatTakesOlderWeights),
    StepMachines(book=JournalThatForgetsTakenGroups),
    StepMachines(book=JournalThatWritesOneEntryLate),
    StepMachines(book=JournalThatWritesNoRequest),
    StepMachines(book=JournalThatWritesNoResult),
    StepMachines(book=JournalThatDropsEverything),
    StepMachines(book=JournalThatDropsNothing),
    StepMachines(book=JournalThatForgetsPublishedVersions),
    StepMachines(book=JournalThatIsNeverFull),
    StepMachines(staleness=StalenessThatDropsNothing),
    StepMachines(course=LifecycleThatMasksNothing),
    StepMachines(course=LifecycleThatMasksAll),
    StepMachines(course=LifecycleThatForgetsUntrainedGroups),
    StepMachines(course=LifecycleThatForgetsTrainedGroups),
    StepMachines(course=LifecycleThatAsksNothingAgain),
    StepMachines(course=LifecycleThatTrainsFailedGroups),
    StepMachines(course=LifecycleThatCountsEvaluations),
    StepMachines(course=LifecycleThatCountsFailedGroups),
    StepMachines(due=ScheduleThatIgnoresAFullJournal),
    plan_that(redo=lambda _: ()),
    plan_that(redo=lambda plan: plan.redo[::-1]),
    plan_that(ready=ready_and_taken),
    plan_that(ready=lambda plan: plan.ready[1:]),
    plan_that(open_asks=lambda plan: plan.open_asks[1:]),
    plan_that(next_step=lambda plan: plan.num_steps),
    plan_that(policy_version=lambda plan: plan.policy_version - 1),
    plan_that(num_tasks=lambda plan: plan.num_tasks - 1),
    plan_that(step_of_version=lambda plan: dict.fromkeys(plan.step_of_version, plan.num_steps)),
]
