"""The trainer of the simulated mesh: a client, steps that take time, checkpoints, and its recovery.

    RISING (checkpoint, journal -> plan) -> REDOING (steps of it) -> RENAMING (the weights are
    published under a new version) -> MEASURING (an evaluation, in some seeds) -> TRAINING (asks
    again) --killed at any moment--> RISING

- The group life cycle decides what happens to each group, as in the pacer and the train loop.
- Its weights are the steps that they are made of, so that training_history.py finds one that is
  missing, doubled or of other groups.
- Over a restart it keeps the journal, its records and whole checkpoints, nothing else.
"""

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

import msgspec

from rollmesh.core.ids import GroupId
from rollmesh.core.types import Task
from rollmesh.serve.client.asks import Cancelled
from rollmesh.serve.client.journal import History
from rollmesh.serve.client.journal_entries import GroupParted, Published, StepTaken, num_in
from rollmesh.testing.mesh_sim.client import NUM_SAMPLES, SimClient, TakenGroup
from rollmesh.testing.mesh_sim.engine import SimEngine
from rollmesh.testing.mesh_sim.kernel import Kernel
from rollmesh.testing.mesh_sim.network import Network
from rollmesh.testing.mesh_sim.publisher import SimPublisher
from rollmesh.testing.mesh_sim.requesting_client import TICK_S
from rollmesh.testing.mesh_sim.training_history import TrainingHistory
from rollmesh.trainer.checkpoints.recovery_plan import LoopState, RecoveryPlan, plan_recovery
from rollmesh.trainer.pacing.lifecycle import (
    Action,
    DropReplayed,
    GroupLeft,
    GroupLifecycle,
    GroupOutcome,
    GroupRequest,
    GroupRequested,
    QueueGroup,
    ResultArrived,
    ResultMissing,
    RetakeStep,
    StepTrained,
    TakeStep,
    TrainGroups,
    VersionCreated,
    VersionPublished,
)
from rollmesh.trainer.staleness import StalenessManager, StalenessSettings
from rollmesh.wire.machine import Ticked

WAIT = StalenessSettings(
    batch=2 * NUM_SAMPLES, max_staleness=2, max_concurrent=6 * NUM_SAMPLES, policy="wait"
)
POLICIES = [
    WAIT,
    *(
        # One step sooner, so that more is too old.
        msgspec.structs.replace(WAIT, policy=policy, max_staleness=1)
        for policy in ("drop", "mask", "requeue")
    ),
]
SAVE_STEPS = (1, 2, 50)
"""Steps between checkpoints; the last setting is only for those that a full journal forces."""
PUBLISH_STEPS = (1, 2)
"""Steps between publications; with two, some steps train what those before have left them."""
NUM_EVALS = (0, 3)
"""Groups of the evaluation before all steps."""
NUM_SAVES = 2
"""Number of checkpoints that are kept."""
STEP_S = (0.05, 0.4)
SAVE_S = (0.02, 0.8)
MOST_AT_ONCE = 3
"""Results that the client hands out in a turn."""


class SimCheckpoint(msgspec.Struct, frozen=True):
    """A checkpoint."""

    state: LoopState
    weights: tuple[StepTaken, ...]
    num_left: int
    """Length of the part of the drop record that it covers."""


class SimTrainer(SimClient):
    """The trainer's process."""

    staleness: StalenessManager
    course: GroupLifecycle
    waiting: set[GroupId]
    """Groups whose results are here and have not left."""

    def __init__(
        self, kernel: Kernel, network: Network, engines: dict[str, SimEngine], num_groups: int
    ) -> None:
        super().__init__(kernel, network)
        self._settings = POLICIES[kernel.seed // 2 % len(POLICIES)]
        self.witness = TrainingHistory(self._settings, NUM_SAMPLES)
        self.disk.on_write = self.witness.wrote
        self.endings = self.witness.endings
        self.publisher: SimPublisher | None = None
        self.zombies: list[SimPublisher] = []
        """Publishers whose trainer is dead."""
        self.left: list[GroupLeft] = []
        """How groups have left; a restart continues from what its checkpoint covers of it."""
        self._engines = engines
        self._num_to_ask = num_groups
        # One without a name takes nothing over: leases alone free what its dead one held. One with
        # a name knows by its journal's lock that the incarnation before is dead.
        self._run = self.name if kernel.seed % 2 else ""
        self._save_steps = SAVE_STEPS[kernel.seed // 3 % len(SAVE_STEPS)]
        self._publish_steps = PUBLISH_STEPS[kernel.seed // 8 % len(PUBLISH_STEPS)]
        self._num_to_measure = NUM_EVALS[kernel.seed // 4 % len(NUM_EVALS)]
        self._forget_all(plan_recovery(None, History()), [])
        self._shelf: list[SimCheckpoint] = []
        """Whole checkpoints, newest last."""

    # what remains to be done

    @property
    def wants_more(self) -> bool:
        return self._num_drawn < self._num_to_ask or bool(self.course.to_ask_again)

    @property
    def is_busy(self) -> bool:
        """Return whether it has work that it can begin by itself."""
        is_before = not self._is_admitting or self._is_measuring
        return bool(self._redo or self.arrivals or self._is_training or is_before)

    # start and crash

    def start(self) -> None:
        """Start, for the first time or again."""
        save = self._newest_save()
        history = self.open_book()
        plan = self._network.machines.plan(save.state if save else None, history)
        del self.left[save.num_left if save else 0 :]
        self._forget_all(plan, list(save.weights) if save else [])
        self.witness.recovered(history, plan)
        self._do(self.course.resume(plan))
        for entry in plan.parted:
            self._stay_parted(entry, plan)
        self.begin(plan.saved)
        assert {each.group_id for each in self.arrivals} >= {each.group_id for each in plan.ready}
        self.publisher = SimPublisher(
            f"publisher-{self.num_crashes}",
            self._kernel,
            self._network,
            self._engines,
            partial(self._published, self.num_crashes),
            run=self._run,
        )
        self.publisher.start()
        if not self._redo:
            self._publish(self._num_steps)
        self._tick()

    def restart(self) -> None:
        super().restart()
        self.start()

    def crash(self) -> None:
        super().crash()
        publisher, self.publisher = self.publisher, None
        if publisher is None:
            return
        if not self._run and self._network.strikes("zombie"):
            self.zombies.append(publisher)
            publisher.freeze(self._kernel.now_s() + self._kernel.rng.expovariate(1.0))
        else:
            publisher.crash()

    def freeze(self, until_s: float) -> None:
        super().freeze(until_s)
        if self.publisher:
            self.publisher.freeze(until_s)

    def lay_zombies(self) -> None:
        """Kill publishers that still run."""
        for each in self.zombies:
            if each.alive:
                each.crash()

    def check_left(self) -> None:
        """Check the record of groups, at rest."""
        self.witness.check_left(self.left, self.waiting)

    def _newest_save(self) -> SimCheckpoint | None:
        if self._shelf and self._network.strikes("save_broke"):
            self._shelf.pop()
        return self._shelf[-1] if self._shelf else None

    def _forget_all(self, plan: RecoveryPlan, weights: list[StepTaken]) -> None:
        machines = self._network.machines
        newest, step = max(plan.step_of_version.items())
        self.staleness = machines.staleness(self._settings, step, newest)
        self.course = machines.course(self.staleness, NUM_SAMPLES)
        self._weights = weights
        self._num_steps = plan.num_steps if plan.redo else plan.next_step
        self._redo = deque(plan.redo)
        self._filed = plan.results
        self._next_step = plan.next_step
        self._policy_version = plan.policy_version - 1
        self._num_drawn = plan.num_tasks
        self._num_evals = num_in(plan.evals)
        self.waiting = set()
        self._due = machines.due(self._save_steps, num_in(plan.saved.gone))
        self._is_training = self._is_saving = self._is_admitting = False

    # the loop

    def _tick(self) -> None:
        self._tell(Ticked())
        self.say_held_asks()
        if self.asks.open and self._network.strikes("cancel"):
            group_id = self._kernel.rng.choice(list(self.asks.open))
            self._tell(Cancelled(group_id, "cancelled: why not"))
        if not self._is_training:
            self._turn()
        self._kernel.after(TICK_S, self._tick, self)

    def _turn(self) -> None:
        if self._redo:
            self._save_if_due()
            self._take_again(self._redo.popleft())
            return
        if not self._is_admitting:
            self._save_if_due()
            return
        for ended in self.take(self._kernel.rng.randint(1, MOST_AT_ONCE)):
            self._book(ended)
        if self._is_measuring:
            self._measure()
            self._save_if_due()
            return
        while self.course.may_ask(self._num_to_ask) and (turn := self._next_turn()):
            self._ask(turn)
        self._save_if_due()
        self._do(self.course.step(TakeStep(self._num_steps)))

    @property
    def _is_measuring(self) -> bool:
        return self._num_evals < self._num_to_measure or self.course.num_measuring > 0

    def _measure(self) -> None:
        while self._num_evals < self._num_to_measure:
            self._num_evals += 1
            self._ask(GroupRequest(self._draw(), is_eval=True))

    def _ask(self, turn: GroupRequest) -> None:
        step = self.staleness.published_step
        policy_version = self.course.versions.named(step)
        assert policy_version is not None
        group_id = self.ask(turn, step, self._num_drawn, policy_version)
        self.course.step(GroupRequested(group_id, turn))

    def _next_turn(self) -> GroupRequest | None:
        again = self.course.next_again()
        if again or self._num_drawn >= self._num_to_ask:
            return again
        return GroupRequest(self._draw())

    def _draw(self) -> Task:
        self._num_drawn += 1
        return Task(id=str(self._num_drawn))

    def _stay_parted(self, entry: GroupParted, plan: RecoveryPlan) -> None:
        turns = self.open(plan.results[entry.group_id])
        task = Task(id=self.witness.asked[entry.group_id])
        self._do(self.course.step(DropReplayed(entry, task, len(turns.rollouts()))))

    def _take_again(self, again: StepTaken) -> None:
        for group_id in again.group_ids:
            self._book(TakenGroup(group_id, self.open(self._filed[group_id])))
        self._do(self.course.step(RetakeStep(again)))
        assert self._is_training, f"step {again.step} is not redone"

    def _book(self, ended: TakenGroup) -> None:
        group_id, turns = ended.group_id, ended.turns
        if turns is None:
            self._do(self.course.step(ResultMissing(group_id, ended.reason)))
            return
        task = Task(id=self.witness.asked[group_id])
        self.waiting.add(group_id)
        self._do(self.course.step(ResultArrived(group_id, task, turns.rollouts())))

    def _do(self, actions: Sequence[Action]) -> None:
        for action in actions:
            match action:
                case QueueGroup():
                    pass
                case GroupLeft():
                    self._leave(action)
                case TrainGroups(taken):
                    if taken.step >= self._next_step:
                        self.note(taken)
                    self._network.num["masked"] += self.witness.trains(action)
                    self._train(taken)

    def _leave(self, leave: GroupLeft) -> None:
        assert leave.outcome not in (GroupOutcome.NOT_REQUESTED, GroupOutcome.FOREIGN), (
            f"{leave.group_id}: {leave.why}"
        )
        self._network.num[f"left_{leave.outcome}"] += 1
        self.left.append(leave)
        if leave.group_id in self.waiting:
            self.waiting.discard(leave.group_id)
            if leave.outcome is not GroupOutcome.TRAINED:
                why = leave.why or leave.outcome
                self.part(GroupParted(leave.group_id, why, self._num_steps, leave.times))

    def _train(self, taken: StepTaken) -> None:
        self._is_training = True
        delay_s = self._kernel.rng.uniform(*STEP_S)
        self._kernel.after(delay_s, lambda: self._end_step(taken), self)

    def _end_step(self, taken: StepTaken) -> None:
        self._weights.append(taken)
        self.witness.trained(self._weights)
        num_steps = taken.step + 1
        if taken.step >= self._next_step and num_steps % self._publish_steps == 0:
            self._publish(num_steps, and_then=lambda: self._book_step(num_steps))
        else:
            self._book_step(num_steps)

    def _book_step(self, num_steps: int) -> None:
        self._is_training = False
        self._do(self.course.step(StepTrained()))
        self._due.stepped(num_steps)
        self._num_steps = num_steps
        if num_steps <= self._next_step and not self._redo:
            self._num_steps = self._next_step
            self._publish(self._num_steps)

    def _publish(self, num_steps: int, and_then: Callable[[], None] = lambda: None) -> None:
        """Publish as soon as the publication before is over; the loop continues when this one
        begins.
        """
        assert self.publisher
        if self.publisher.is_publishing:
            self._kernel.after(TICK_S, lambda: self._publish(num_steps, and_then), self)
            return
        self._policy_version += 1
        self.course.step(VersionCreated(self._policy_version, num_steps))
        self.note(Published(self._policy_version, num_steps))
        self.publisher.publish(self._policy_version)
        and_then()

    def _published(self, num_crashes: int, policy_version: int) -> None:
        if num_crashes != self.num_crashes or not self.alive:
            return  # its publisher has outlived it
        self.course.step(VersionPublished(self.course.versions.steps[policy_version]))
        if not self._is_admitting:
            self._is_admitting = True
            self.witness.admitted(self.course.gone, self.staleness)

    # checkpoints

    def _save_if_due(self) -> None:
        now_s, is_full = self._kernel.now_s(), self.book.is_full
        self._network.num["journal_full"] += is_full
        if self._is_saving or not self._due.is_now(self.course.num_gone, now_s, is_full=is_full):
            return
        self._is_saving = True
        self._due.begun(now_s)
        state = LoopState(
            num_steps=self._num_steps,
            policy_version=self._policy_version,
            step_of_version=dict(self.course.versions.steps),
            num_tasks=self._num_drawn,
            ended=self.course.gone,
            waiting=self.course.to_ask_again,
        )
        save = SimCheckpoint(state, tuple(self._weights), len(self.left))
        delay_s = self._kernel.rng.uniform(*SAVE_S)
        self._kernel.after(delay_s, lambda: self._end_save(save), self)

    def _end_save(self, save: SimCheckpoint) -> None:
        self._is_saving = False
        if self._network.strikes("save_failed"):
            return
        self._due.settled(num_in(save.state.ended))
        self._shelf = [*self._shelf, save][-NUM_SAVES:]
        # It is whole now; the trainer may crash before it reports that.
        delay_s = self._kernel.rng.uniform(0.0, 0.1)
        self._kernel.after(delay_s, lambda: self.note_saved(save.state.to_journal()), self)
