"""The scheduler's machine alone, with coordinators and programs that a test drives by hand.

    with a coordinator: a resize is ordered > carried out, when the test says so > answered

- Nothing happens but by a call of the test, which makes its calls in any order.
- GPUs are really occupied, and GpuOccupancy proves that none has two users.
"""

import msgspec

from rollmesh.scheduler.planning.planner import SchedulingPolicy
from rollmesh.scheduler.service.scheduler import FleetScheduler
from rollmesh.scheduler.service.state import LogLine, SchedulerSettings, WriteRows
from rollmesh.testing.scheduler_sim import checks
from rollmesh.testing.scheduler_sim.engine import GpuOccupancy
from rollmesh.testing.scheduler_sim.scheduler import SimDatabase
from rollmesh.wire.machine import Received, Send, Ticked
from rollmesh.wire.messages import AnyMessage
from rollmesh.wire.scheduling import (
    AdmitPipeline,
    CoordinatorHello,
    HooksWired,
    JoinNode,
    NotifyReleaseGpus,
    NotifyReleaseThenRequestGpus,
    PipelineSpec,
    RegisterPipeline,
    RequestGpus,
    ResizeWorkers,
    TakeGpus,
    TicketMoved,
    TicketState,
    WorkerPhase,
    WorkersResized,
    WorkerTruth,
)

ENDS = (TicketState.RELEASED, TicketState.REFUSED, TicketState.WITHDRAWN)

Ask = RequestGpus | NotifyReleaseGpus | NotifyReleaseThenRequestGpus


class PipelineActors(msgspec.Struct, kw_only=True):
    """One pipeline: its coordinator and its program."""

    spec: PipelineSpec
    workers: list[WorkerTruth]
    pending_resizes: dict[int, ResizeWorkers] = {}
    """Resizes that are not carried out."""
    open: dict[str, Ask] = {}
    """Requests without a final answer."""
    held: dict[str, str] = {}
    """Fixed clusters that were granted, and by which request."""
    is_generating: bool = False
    """Whether it has requested engines and not released them."""

    @property
    def pipeline_id(self) -> str:
        return self.spec.pipeline_id

    @property
    def has_something(self) -> bool:
        return self.is_generating or bool(self.held)


class ManualScheduler:
    """The scheduler with pipelines whose messages a test sends."""

    def __init__(
        self,
        specs: tuple[PipelineSpec, ...],
        num_gpus: int,
        policy: SchedulingPolicy,
        settings: SchedulerSettings,
        kind: type[FleetScheduler] = FleetScheduler,
    ) -> None:
        self.now_s = 0.0
        self.num_keys = 0
        self.disk = SimDatabase()
        self.space = GpuOccupancy()
        self.cast = {
            spec.pipeline_id: PipelineActors(
                spec=spec,
                workers=[
                    WorkerTruth(rank, WorkerPhase.ASLEEP, 0)
                    for rank in range(len(spec.generation) // spec.tp)
                ],
            )
            for spec in specs
        }
        self._policy = policy
        self._settings = settings
        self._kind = kind
        self.scheduler = kind(settings, policy, None, self.key())
        self._sleepers = checks.EvictionChecks(self.scheduler.state.fleet)
        self.tell("node", JoinNode(self.key(), "n0", num_gpus, beats=False))
        for spec in specs:
            self.tell("admission", RegisterPipeline(self.key(), spec))
            self.tell("admission", AdmitPipeline(self.key(), spec.pipeline_id))
        self.greet()

    def key(self) -> str:
        self.num_keys += 1
        return f"k{self.num_keys}"

    # time and death

    def advance(self, seconds: float) -> None:
        self.now_s += seconds
        self.step(Ticked())

    def cycle(self) -> None:
        """Let a second pass in which every peer repeats what it has to send."""
        self.greet()
        self.advance(1.0)

    def greet(self) -> None:
        """Send hellos and all open requests."""
        for name, each in self.cast.items():
            self.tell(name, HooksWired(name))
            self.hello(name)
            for ask in list(each.open.values()):
                self.tell(name, ask)

    def hello(self, name: str) -> None:
        workers = tuple(self.cast[name].workers)
        self.tell(f"c-{name}", CoordinatorHello(name, workers))

    def die(self, *, after: AnyMessage | None = None) -> None:
        """Kill it with no message of the last step sent; a new incarnation reads the disk."""
        if after is not None:
            self.now_s += 0.01
            for action in self.scheduler.step(Received(b"x", after), self.now_s):
                if isinstance(action, WriteRows):
                    self.disk.keep(action)
        self.scheduler = self._kind(self._settings, self._policy, self.disk.load(), self.key())
        self._sleepers = checks.EvictionChecks(self.scheduler.state.fleet)
        self.advance(0.01)

    # what is said

    def ask(self, name: str, ask: Ask) -> None:
        each = self.cast[name]
        each.open[ask.key] = ask
        if isinstance(ask, NotifyReleaseThenRequestGpus):
            self._let_go(each, ask.release_cluster)
        elif isinstance(ask, NotifyReleaseGpus):
            self._let_go(each, ask.cluster)
        self.tell(name, ask)

    def tell(self, route: str, message: AnyMessage) -> None:
        self.now_s += 0.01
        self.step(Received(route.encode(), message))

    def step(self, event: Received | Ticked) -> None:
        for action in self.scheduler.step(event, self.now_s):
            match action:
                case WriteRows():
                    self.disk.keep(action)
                case Send(message=ResizeWorkers() as resize):
                    self.cast[resize.pipeline_id].pending_resizes[resize.resize_id] = resize
                case Send(route, TicketMoved() as moved):
                    self._moved(route.decode(), moved)
                case Send() | LogLine():
                    pass
        checks.look_at_owners(self.scheduler.state.fleet)
        self._sleepers.look(self.scheduler.state.fleet)

    # what is done

    def carry_out(self, name: str, resize_id: int, *, fails: bool = False) -> None:
        """Let its coordinator carry out a resize, or fail, and answer."""
        each = self.cast[name]
        resize = each.pending_resizes.pop(resize_id)
        error = ""
        for change in resize.changes:
            before = each.workers[change.rank]
            if change.epoch < before.epoch:
                error = "an older epoch"
                continue
            each.workers[change.rank] = self._resized(
                each, before, change.wakes, change.epoch, fails
            )
        if fails:
            error = "it did not work"
        resized = tuple(each.workers[change.rank] for change in resize.changes)
        self.tell(f"c-{name}", WorkersResized(name, resize_id, resized, error))

    def repair(self, name: str) -> None:
        """Put the lost engines to sleep; the coordinator reports it."""
        each = self.cast[name]
        for rank, worker in enumerate(each.workers):
            if worker.phase is WorkerPhase.LOST:
                self.space.leave(f"{name}/{rank}")
                each.workers[rank] = WorkerTruth(rank, WorkerPhase.ASLEEP, worker.epoch)
        self.hello(name)

    def _resized(
        self, each: PipelineActors, before: WorkerTruth, wakes: bool, epoch: int, fails: bool
    ) -> WorkerTruth:
        rank, user = before.rank, f"{each.pipeline_id}/{before.rank}"
        tp = each.spec.tp
        if wakes:
            self.space.enter(user, each.spec.generation[rank * tp : (rank + 1) * tp])
        if fails:
            return WorkerTruth(rank, WorkerPhase.LOST, epoch, 0, "it did not work")
        if not wakes:
            self.space.leave(user)
        return WorkerTruth(rank, WorkerPhase.AWAKE if wakes else WorkerPhase.ASLEEP, epoch)

    def _moved(self, name: str, moved: TicketMoved) -> None:
        each = self.cast[name]
        ask = each.open.get(moved.key)
        if ask is None or moved.state is TicketState.QUEUED:
            return
        if moved.state is TicketState.OFFERED:
            self.tell(name, TakeGpus(moved.key, moved.offer))
            return
        del each.open[moved.key]
        if moved.state is not TicketState.GRANTED:
            return
        if ask.cluster in each.spec.clusters:
            self.space.enter(f"{name}/{ask.cluster}", each.spec.clusters[ask.cluster])
            each.held[ask.cluster] = ask.key
        else:
            each.is_generating = True
            phases = [worker.phase for worker in self._seen(name)]
            assert WorkerPhase.AWAKE in phases, f"{name} was asked to generate on {phases}"

    def _seen(self, name: str) -> list[WorkerTruth]:
        return self.cast[name].workers

    def _let_go(self, each: PipelineActors, cluster: str) -> None:
        if cluster in each.spec.clusters:
            self.space.leave(f"{each.pipeline_id}/{cluster}")
            each.held.pop(cluster, None)
        else:
            each.is_generating = False
