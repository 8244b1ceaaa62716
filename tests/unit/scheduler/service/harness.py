"""Scheduler machine with coordinators and clients around it, on a clock that the test moves.

- Tracks the actual user of each GPU: a coordinator that wakes an engine where another is awake or a
  cluster is held fails the test at once.
- A Program models a pipeline that generates and trains in turn. It proceeds only on messages that
  it received, as hooks do.
"""

from collections.abc import Sequence

import msgspec

from rollmesh.scheduler.planning.planner import SchedulingPolicy
from rollmesh.scheduler.planning.policies.fair import Fair, FairSettings
from rollmesh.scheduler.planning.state import PipelineState
from rollmesh.scheduler.service.scheduler import FleetScheduler
from rollmesh.scheduler.service.state import (
    Action,
    JournalTables,
    LogLine,
    Row,
    SchedulerSettings,
    WriteRows,
)
from rollmesh.wire.machine import Received, Send, Ticked
from rollmesh.wire.messages import AnyMessage
from rollmesh.wire.scheduling import (
    GENERATION_CLUSTER,
    AdmitPipeline,
    CoordinatorHello,
    GpuPriority,
    HooksWired,
    JoinNode,
    NotifyReleaseGpus,
    NotifyReleaseThenRequestGpus,
    PipelineSpec,
    RegisterPipeline,
    RequestGpus,
    ResizeWorkers,
    SchedulerAnswered,
    TakeGpus,
    TicketMoved,
    TicketState,
    WorkerPhase,
    WorkersResized,
    WorkerTruth,
)

TRAIN = "actor_train"
SETTINGS = SchedulerSettings(resize_deadline_s=20.0, slack_s=2.0, turn_s=5.0)
QUICK = FairSettings(quantum_s=4.0, hold_s=1.0, switch_s=1.0, reserve_after_s=8.0)
Asked = RequestGpus | NotifyReleaseGpus | NotifyReleaseThenRequestGpus


class Coordinator:
    """Carries out resizes at the next `act`, unless it hangs or fails."""

    def __init__(self, name: str, num_workers: int, started_s: float = 1.0) -> None:
        self.name = name
        self.started_s = started_s
        self.truths = [WorkerTruth(r, WorkerPhase.ASLEEP, 0) for r in range(num_workers)]
        self.pending_resizes: list[ResizeWorkers] = []
        self.num_received = 0
        self.is_hung = False
        self.hung: set[int] = set()
        """Ranks of engines that do not answer."""
        self.is_silent = False
        self.error = ""
        """The error of the next resizes, if any."""

    @property
    def route(self) -> bytes:
        return f"coordinator-{self.name}".encode()

    def receive(self, resize: ResizeWorkers) -> None:
        self.num_received += 1
        if resize.started_s != self.started_s:
            return
        for change in resize.changes:
            truth = self.truths[change.rank]
            if change.epoch < truth.epoch:
                return
        for change in resize.changes:
            truth = self.truths[change.rank]
            self.truths[change.rank] = msgspec.structs.replace(truth, epoch=change.epoch)
        if all(each.resize_id != resize.resize_id for each in self.pending_resizes):
            self.pending_resizes.append(resize)

    def take(self) -> list[ResizeWorkers]:
        """Remove and return the resizes that it carries out now."""
        result = [each for each in self.pending_resizes if not self._hangs(each)]
        self.pending_resizes = [each for each in self.pending_resizes if self._hangs(each)]
        return result

    def _hangs(self, resize: ResizeWorkers) -> bool:
        return self.is_hung or any(change.rank in self.hung for change in resize.changes)

    def move(self, rank: int, phase: WorkerPhase) -> None:
        self.truths[rank] = msgspec.structs.replace(self.truths[rank], phase=phase)

    def hello(self) -> CoordinatorHello:
        return CoordinatorHello(self.name, tuple(self.truths), self.started_s)


class SchedulerHarness:
    def __init__(
        self,
        num_gpus: int = 4,
        kind: type[FleetScheduler] = FleetScheduler,
        policy: SchedulingPolicy | None = None,
        settings: SchedulerSettings = SETTINGS,
    ) -> None:
        self.kind, self.settings = kind, settings
        self.policy = policy or Fair(QUICK)
        self.kept = JournalTables()
        self.rows: list[Row] = []
        self.now_s = 100.0
        self.num_incarnations = 0
        self.num_steps = 0
        self.coordinators: dict[str, Coordinator] = {}
        self.open: dict[str, Asked] = {}
        self.moved: dict[str, TicketMoved] = {}
        self.ended: dict[str, TicketState] = {}
        """The first final answer by key."""
        self.answers: dict[str, SchedulerAnswered] = {}
        self._held: dict[str, Asked] = {}
        self.notes: list[LogLine] = []
        self.lost_steps: frozenset[int] = frozenset()
        """Steps in which the scheduler is killed before their rows are kept."""
        self.cut_steps: frozenset[int] = frozenset()
        """Steps in which the scheduler is killed after their rows are kept, before it sends."""
        self.checks_rows_each = 0
        """Number of steps after which the kept rows are compared with the state; 0: never."""
        self.begin()
        if num_gpus:
            self.send(JoinNode("node", "n0", num_gpus, (), False))

    def begin(self) -> None:
        """Start the scheduler from the kept rows."""
        self.num_incarnations += 1
        revived = JournalTables({table: dict(rows) for table, rows in self.kept.tables.items()})
        is_first = not revived.tables
        self.scheduler = self.kind(
            self.settings, self.policy, None if is_first else revived, f"s{self.num_incarnations}"
        )

    # messages

    def send(self, message: AnyMessage, route: bytes = b"cli") -> None:
        self._step(Received(route, message))

    def ask(self, message: Asked) -> TicketState:
        """Send it each second until its final answer; return its state now."""
        if isinstance(message, NotifyReleaseGpus):
            self._give_up(message.pipeline_id, message.cluster)
        elif isinstance(message, NotifyReleaseThenRequestGpus):
            self._give_up(message.pipeline_id, message.release_cluster)
        self.open[message.key] = message
        self.send(message, f"hooks-{message.pipeline_id}".encode())
        return self.state(message.key)

    def generate(self, name: str, key: str, target: int = 16, step: int = 0) -> TicketState:
        return self.ask(
            RequestGpus(key, name, GENERATION_CLUSTER, GpuPriority.GENERATION, step, target)
        )

    def train(self, name: str, key: str, cluster: str = TRAIN) -> TicketState:
        return self.ask(RequestGpus(key, name, cluster, GpuPriority.ACTOR_TRAINING))

    def release(self, name: str, key: str, cluster: str = TRAIN) -> TicketState:
        return self.ask(NotifyReleaseGpus(key, name, cluster))

    def pipeline(
        self,
        name: str,
        train: Sequence[int] = (0,),
        generation: Sequence[int] = (0, 1, 2, 3),
        **fields: object,
    ) -> Coordinator:
        """Register and admit a pipeline, with its hooks connected and its coordinator known."""
        clusters = {TRAIN: tuple(train)} if train else {}
        spec = PipelineSpec(
            pipeline_id=name,
            clusters=clusters,
            generation=tuple(generation),
            **fields,  # type: ignore[arg-type]  # of the spec
        )
        self.send(RegisterPipeline(f"register-{name}", spec))
        assert self.answers[f"register-{name}"].ok, self.answers[f"register-{name}"].error
        self.send(AdmitPipeline(f"admit-{name}", name))
        self.send(HooksWired(name))
        coordinator = Coordinator(name, len(generation) // spec.tp)
        self.coordinators[name] = coordinator
        self.send(coordinator.hello(), coordinator.route)
        return coordinator

    # time

    def run(self, seconds: float) -> None:
        """Let time pass: resizes complete, requests are resent, hellos and ticks arrive."""
        end_s = self.now_s + seconds
        while self.now_s < end_s:
            self.now_s = min(end_s, self.now_s + 0.25)
            self.act()
            self._step(Ticked())
            if self.now_s % 1.0 < 0.25:
                self.beat()

    def act(self) -> None:
        """Coordinators carry out their resizes."""
        for coordinator in self.coordinators.values():
            for resize in coordinator.take():
                self._resize(coordinator, resize)

    def beat(self) -> None:
        """Send the messages that are repeated each second."""
        for coordinator in self.coordinators.values():
            if not coordinator.is_silent:
                self.send(coordinator.hello(), coordinator.route)
        for message in list(self.open.values()):
            self.send(message, f"hooks-{message.pipeline_id}".encode())

    def _resize(self, coordinator: Coordinator, resize: ResizeWorkers) -> None:
        ranks = {change.rank for change in resize.changes}
        for change in resize.changes:
            if coordinator.error:
                break
            wakes = change.wakes
            coordinator.move(change.rank, WorkerPhase.AWAKE if wakes else WorkerPhase.ASLEEP)
        self._check_gpus()
        truths = tuple(truth for truth in coordinator.truths if truth.rank in ranks)
        answer = WorkersResized(coordinator.name, resize.resize_id, truths, coordinator.error)
        self.send(answer, coordinator.route)

    # views

    def state(self, key: str) -> TicketState:
        return self.moved[key].state if key in self.moved else TicketState.QUEUED

    def of(self, name: str) -> PipelineState:
        return self.scheduler.state.fleet.pipelines[name]

    def awake(self, name: str) -> list[int]:
        """Ranks of the engines that are actually awake."""
        truths = self.coordinators[name].truths
        return [truth.rank for truth in truths if truth.phase is WorkerPhase.AWAKE]

    def wait_for(self, key: str, state: TicketState, seconds: float = 60.0) -> None:
        """Wait until the ticket has that state; fail the test if it is late."""
        end_s = self.now_s + seconds
        while self.state(key) is not state and self.now_s < end_s:
            self.run(0.25)
        assert self.state(key) is state, f"{key} is {self.moved.get(key)} at {self.now_s}"

    def _check_gpus(self) -> None:
        """Assert that no GPU has two users."""
        state, users = self.scheduler.state, dict[int, str]()
        for name, coordinator in self.coordinators.items():
            if name not in state.fleet.pipelines:
                continue
            for rank in self.awake(name):
                for gpu in state.fleet.pipelines[name].workers[rank].gpus:
                    assert gpu not in users, f"GPU {gpu}: {users[gpu]} and {coordinator.name}"
                    users[gpu] = coordinator.name
        for key, moved in self.moved.items():
            message = self._held.get(key)
            if message is None or moved.state is not TicketState.GRANTED:
                continue
            if message.cluster != GENERATION_CLUSTER:
                user = f"{message.pipeline_id}/{message.cluster}"
                for gpu in moved.gpus:
                    assert users.setdefault(gpu, user) == user, f"GPU {gpu}: {users[gpu]}, {user}"

    # one step

    def _step(self, event: Received | Ticked) -> None:
        self.num_steps += 1
        actions = self.scheduler.step(event, self.now_s)
        for action in actions:
            if isinstance(action, WriteRows):
                if self.num_steps in self.lost_steps:
                    self.begin()
                    return
                self.kept.keep(action.rows)
                self.rows += action.rows
                if self.num_steps in self.cut_steps:
                    self.begin()
                    return
            else:
                self._receive(action)
        if self.checks_rows_each and self.num_steps % self.checks_rows_each == 0:
            self._check_rows()

    def _receive(self, action: Action) -> None:
        if isinstance(action, LogLine):
            self.notes.append(action)
            return
        assert isinstance(action, Send)
        match action.message:
            case ResizeWorkers(pipeline_id) as resize:
                self.coordinators[pipeline_id].receive(resize)
            case TicketMoved(key, state) as moved:
                self._on_moved(key, state, moved)
            case SchedulerAnswered(key) as answer:
                self.answers[key] = answer

    def _on_moved(self, key: str, state: TicketState, moved: TicketMoved) -> None:
        self.moved[key] = moved
        if state is TicketState.OFFERED:
            if key in self.open:
                self.send(TakeGpus(key, moved.offer), f"hooks-{key}".encode())
            return
        if state is TicketState.QUEUED:
            return
        self.ended.setdefault(key, state)
        asked = self.open.pop(key, None)
        if asked and not isinstance(asked, NotifyReleaseGpus):
            self._held[key] = asked
        self._check_gpus()

    def _check_rows(self) -> None:
        """Assert that the kept rows contain the machine's whole state."""
        state = self.scheduler.state
        tables = {table: dict(rows) for table, rows in self.kept.tables.items()}
        again = self.kind(self.settings, self.policy, JournalTables(tables), "again").state
        again.fleet.now_s, again.numbers.num_incarnations = (
            state.fleet.now_s,
            state.numbers.num_incarnations,
        )
        for name, pipeline in again.fleet.pipelines.items():
            # Not kept: it is read before each plan.
            pipeline.is_resizing = state.fleet.pipelines[name].is_resizing
        assert again.fleet == state.fleet
        assert list(again.fleet.requests) == list(state.fleet.requests)
        assert again.occupants == state.occupants
        assert again.tickets == state.tickets
        assert {k: set(v) for k, v in again.queue.items()} == {
            k: set(v) for k, v in state.queue.items()
        }
        assert again.intents == state.intents
        assert again.ended == state.ended
        assert again.pipeline_records == state.pipeline_records
        assert again.demand_records == state.demand_records
        assert again.node_records == state.node_records
        assert again.answers == state.answers
        assert again.numbers == state.numbers
        assert again.credits == state.credits

    def _give_up(self, name: str, cluster: str) -> None:
        for key in [
            k for k, m in self._held.items() if (m.pipeline_id, m.cluster) == (name, cluster)
        ]:
            del self._held[key]


class Program:
    """Generates for `generates_s` and trains for `trains_s`, `num_rollouts` times."""

    def __init__(
        self, name: str, num_rollouts: int, generates_s: float = 2.0, trains_s: float = 1.0
    ) -> None:
        self.name = name
        self._asks = list(_asks(name, num_rollouts))
        self._works_s = {GENERATION_CLUSTER: generates_s, TRAIN: trains_s}
        self._now: Asked | None = None
        self._until_s: float | None = None

    @property
    def is_done(self) -> bool:
        return not self._asks and self._now is None

    def poll(self, harness: SchedulerHarness) -> None:
        """Request the next cluster once the last was held for long enough."""
        if self._now is not None:
            state = harness.state(self._now.key)
            if state in (TicketState.QUEUED, TicketState.OFFERED):
                return
            releases = isinstance(self._now, NotifyReleaseGpus)
            expected = TicketState.RELEASED if releases else TicketState.GRANTED
            assert state is expected, harness.moved[self._now.key]
            works_s = 0.0 if releases else self._works_s[self._now.cluster]
            if self._until_s is None:
                self._until_s = harness.now_s + works_s
            if harness.now_s < self._until_s:
                return
        self._now, self._until_s = (self._asks.pop(0) if self._asks else None), None
        if self._now:
            harness.ask(self._now)


def _asks(name: str, num_rollouts: int) -> list[Asked]:
    first = RequestGpus(f"{name}-0", name, TRAIN, GpuPriority.INITIALIZATION)
    asks: list[Asked] = [first]
    for step in range(num_rollouts):
        generates = NotifyReleaseThenRequestGpus(
            f"{name}-{step}-generate",
            name,
            TRAIN,
            GENERATION_CLUSTER,
            GpuPriority.GENERATION,
            step - 1,
            step,
            16,
        )
        trains = NotifyReleaseThenRequestGpus(
            f"{name}-{step}-train",
            name,
            GENERATION_CLUSTER,
            TRAIN,
            GpuPriority.ACTOR_TRAINING,
            step,
            step,
        )
        asks += [generates, trains]
    return [*asks, NotifyReleaseGpus(f"{name}-end", name, TRAIN, num_rollouts)]


def run_all(harness: SchedulerHarness, programs: list[Program], limit_s: float = 600.0) -> None:
    """Run until all are done; fail the test if they are late."""
    end_s = harness.now_s + limit_s
    while not all(each.is_done for each in programs):
        for each in programs:
            each.poll(harness)
        harness.run(0.25)
        left = [each.name for each in programs if not each.is_done]
        assert harness.now_s < end_s, f"{left} are not done: {harness.open}"
