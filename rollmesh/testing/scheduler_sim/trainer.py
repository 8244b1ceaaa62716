"""A simulated trainer: hooks, rollouts on whatever engine is awake, and training on its own GPUs.

    (release what the last incarnation held) > signal > rollouts > train, cluster by cluster >
    ... > done

- It repeats each request each second until the ticket has moved. It occupies a cluster's GPUs only
  between a grant and its release.
- What it has trained is on the disk; everything else is lost when it dies.
"""

from collections.abc import Callable, Generator, Iterator

import msgspec

from rollmesh.serve.coordinator.claims import (
    ClaimEvent,
    Claims,
    ClaimSettled,
    GpuClaim,
    SchedulerReachable,
    SchedulerSilent,
    StillWaiting,
)
from rollmesh.testing.mesh_sim.kernel import Kernel, Node
from rollmesh.testing.mesh_sim.network import Network
from rollmesh.testing.scheduler_sim.engine import GpuOccupancy
from rollmesh.testing.scheduler_sim.plans import Boundary, PipelinePlan
from rollmesh.wire.frames import Packet
from rollmesh.wire.machine import ROUTER, Received, Send, Ticked
from rollmesh.wire.messages import AnyMessage
from rollmesh.wire.scheduling import (
    GENERATION_CLUSTER,
    ClearProgress,
    GpuPriority,
    NotifyReleaseGpus,
    NotifyReleaseThenRequestGpus,
    ReportProgress,
    RequestGpus,
    TakeGpus,
    TicketState,
    WithdrawRequest,
    signed,
)

TICK_S = 0.25
AGAIN_S = 1.0
"""Time after which a refused request is repeated."""
LOOK_S = 0.2
"""Interval of progress of rollouts."""
STREAM = "train"
CRASH_BATCHES = 1000
"""Batches of a later incarnation come after those of an earlier one, by its clock."""
HOUR_BATCHES = 100 * CRASH_BATCHES
CLOCK_BATCHES = 100 * HOUR_BATCHES

Wait = Callable[[Callable[[], None]], None]
"""Begins something, and calls back when that is over."""


def token_of(pipeline_id: str) -> str:
    """Return the token that all processes of a simulated pipeline have."""
    return f"token-of-{pipeline_id}"


class PipelineTrainer(Node):
    """One trainer process, with its hooks."""

    def __init__(
        self,
        plan: PipelinePlan,
        kernel: Kernel,
        network: Network,
        space: GpuOccupancy,
        num_serving: Callable[[], int],
        claims: type[Claims] = Claims,
    ) -> None:
        super().__init__(f"trainer-{plan.spec.pipeline_id}")
        self.plan = plan
        self.num_done = 0
        """Steps of all incarnations."""
        self.is_over = False
        self.is_training = False
        self.num_dispatched = 0
        """Batches of rollouts that began."""
        self.waits_s: dict[str, float] = {}
        """The longest wait by cluster."""
        self.ended_s = 0.0
        self.asked: dict[str, tuple[GpuClaim, float]] = {}
        """Requests without an answer, and their times."""
        self.reasons: list[str] = []
        """Why requests were refused."""
        self.taken: set[str] = set()
        """Clusters that it takes or has and has no confirmed release of, over all incarnations."""
        self.cut_until_s = 0.0
        """Whether it is cut off."""
        self._kernel = kernel
        self._network = network
        self._space = space
        self._num_serving = num_serving
        self._then: dict[str, Callable[[], None]] = {}
        self._script: Iterator[Wait] = iter(())
        self._left: list[float] = []
        """Seconds of the rollouts that are not done."""
        self._batch = 0
        self._clock_batches = CLOCK_BATCHES
        self._num_keys = 0
        self._claims = claims
        self._hooks = claims(self.pipeline_id)
        network.attach(self, self._receive)

    @property
    def pipeline_id(self) -> str:
        return self.plan.spec.pipeline_id

    @property
    def num_left(self) -> int:
        return len(self._left)

    def start(self) -> None:
        if self._network.strikes("set_back"):
            self._clock_batches -= HOUR_BATCHES
        self._batch = self._clock_batches + self.num_crashes * CRASH_BATCHES
        self._script = self._work()
        self._hooks = self._claims(self.pipeline_id)
        self._tick()
        self._look()
        self._next()

    def crash(self) -> None:
        super().crash()
        self._space.leave(self.name)
        self.asked, self._then, self._left = {}, {}, []
        self.is_training = False

    def restart(self) -> None:
        super().restart()
        self.start()

    # what it does

    def _work(self) -> Iterator[Wait]:
        for cluster in (*self.plan.spec.clusters, GENERATION_CLUSTER):
            if self.num_crashes:
                yield self._ask(self._release(cluster))
        signalled = False
        while self.num_done < self.plan.num_steps:
            if not signalled:
                yield self._ask(self._request(GENERATION_CLUSTER, GpuPriority.GENERATION))
            yield self._sample
            signalled = yield from self._train()
        yield self._ask(self._release(GENERATION_CLUSTER))
        self.is_over = True
        self.ended_s = self._kernel.time_s

    def _train(self) -> Generator[Wait, None, bool]:
        """Train; `True` is passed on if the next step is signalled already."""
        chains = self.plan.boundary is Boundary.CHAINS
        held = GENERATION_CLUSTER if chains else ""
        for cluster, priority, seconds in self.plan.phases:
            if held:
                yield self._ask(self._swap(held, cluster, priority))
            else:
                yield self._ask(self._request(cluster, priority))
            self._space.enter(self.name, self.plan.spec.clusters[cluster])
            self.is_training = True
            yield self._pause(seconds)
            self.is_training = False
            self._space.leave(self.name)
            if chains:
                held = cluster
            else:
                yield self._ask(self._release(cluster))
        self.num_done += 1
        if not held:
            return False
        if self.num_done == self.plan.num_steps:
            yield self._ask(self._release(held))
            return False
        yield self._ask(self._swap(held, GENERATION_CLUSTER, GpuPriority.GENERATION))
        return True

    def _give_all_up(self) -> None:
        """End its run, as a refused one does."""
        clusters = (*self.plan.spec.clusters, GENERATION_CLUSTER)
        self._script = iter([self._ask(self._release(cluster)) for cluster in clusters])
        self._left = []
        self._next()

    def _pause(self, seconds: float) -> Wait:
        return lambda then: self._kernel.after(seconds, then, self)

    def _sample(self, then: Callable[[], None]) -> None:
        self._batch += 1
        self._left = self.plan.lengths(self._kernel.rng)
        self._then[STREAM] = then
        self.num_dispatched += 1
        self._report()

    def _next(self) -> None:
        begin = next(self._script, None)
        if begin is not None:
            begin(self._next)

    # rollouts

    def _look(self) -> None:
        if self._left:
            self._sample_some()
        self._change_mind()
        self._kernel.after(LOOK_S, self._look, self)

    def _change_mind(self) -> None:
        waits = [ask for ask, _ in self.asked.values() if not isinstance(ask, NotifyReleaseGpus)]
        if waits and self._network.strikes("withdrawn", LOOK_S):
            self._hear(WithdrawRequest(waits[0].key))

    def _sample_some(self) -> None:
        room, before = self._num_serving() * self.plan.per_engine, len(self._left)
        after = [each - LOOK_S if n < room else each for n, each in enumerate(self._left)]
        self._left = [each for each in after if each > 0]
        if len(self._left) < before:
            self._report()
        if not self._left:
            self._then.pop(STREAM)()

    def _report(self) -> None:
        """Return its progress."""
        if self._left or self.plan.boundary is Boundary.SIGNALS:
            num = self.plan.num_rollouts
            done = num - len(self._left)
            self._hear(ReportProgress(self.pipeline_id, STREAM, self._batch, num, done))
        else:
            self._hear(ClearProgress(self.pipeline_id, STREAM, self._batch))

    # asks

    def _request(self, cluster: str, priority: GpuPriority) -> RequestGpus:
        target = self.plan.num_rollouts if self.plan.says_estimate else 0
        is_fixed = priority is not GpuPriority.GENERATION
        estimate = 0 if is_fixed else target
        return RequestGpus(
            self._key(), self.pipeline_id, cluster, priority, self.num_done, estimate
        )

    def _release(self, cluster: str) -> NotifyReleaseGpus:
        return NotifyReleaseGpus(self._key(), self.pipeline_id, cluster, self.num_done)

    def _swap(self, held: str, cluster: str, priority: GpuPriority) -> NotifyReleaseThenRequestGpus:
        asked = self._request(cluster, priority)
        return NotifyReleaseThenRequestGpus(
            key=asked.key,
            pipeline_id=self.pipeline_id,
            release_cluster=held,
            cluster=cluster,
            priority=priority,
            release_global_step=self.num_done,
            global_step=self.num_done,
            step_target_estimate=asked.step_target_estimate,
        )

    def _key(self) -> str:
        self._num_keys += 1
        return f"{self.pipeline_id}.{self.num_crashes}.{self._num_keys}"

    def _ask(self, ask: GpuClaim) -> Wait:
        def begin(then: Callable[[], None]) -> None:
            self.asked[ask.key] = (ask, self._kernel.time_s)
            self._then[ask.key] = then
            self._hear(ask)

        return begin

    def _tick(self) -> None:
        self._hear(Ticked())
        self._kernel.after(TICK_S, self._tick, self)

    @property
    def _is_cut(self) -> bool:
        return self.cut_until_s > self._kernel.time_s

    def _receive(self, _source: str, packet: Packet) -> None:
        if not self._is_cut:
            self._hear(Received(ROUTER, packet.message))

    def _hear(self, event: ClaimEvent) -> None:
        for action in self._hooks.step(event, self._kernel.now_s(self)):
            match action:
                case Send(message=message):
                    self._say(message)
                case ClaimSettled():
                    self._settled(action)
                case SchedulerSilent():
                    self._network.num["scheduler_silent"] += 1
                case SchedulerReachable():
                    self._network.num["scheduler_heard"] += 1
                case StillWaiting():
                    self._network.num["waits_long"] += 1

    def _say(self, message: AnyMessage) -> None:
        if self._is_cut:
            return
        if isinstance(message, TakeGpus) and message.key in self.asked:
            self.taken.add(self.asked[message.key][0].cluster)
        words = signed(message, token_of(self.pipeline_id))
        self._network.send(self, "scheduler", Packet(words))

    def _settled(self, answer: ClaimSettled) -> None:
        ask, since_s = self.asked.pop(answer.key)
        then = self._then.pop(answer.key)
        waited_s = self._kernel.time_s - since_s
        self.waits_s[ask.cluster] = max(waited_s, self.waits_s.get(ask.cluster, 0.0))
        is_release = isinstance(ask, NotifyReleaseGpus)
        if answer.state is (TicketState.RELEASED if is_release else TicketState.GRANTED):
            match ask:
                case NotifyReleaseGpus(cluster=cluster):
                    self.taken.discard(cluster)
                case NotifyReleaseThenRequestGpus(release_cluster=cluster):
                    self.taken.discard(cluster)
            if answer.state is TicketState.GRANTED:
                self.taken.add(ask.cluster)
            # Not from within: what comes next may ask again, and the hooks still speak.
            self._kernel.after(0.0, then, self)
            return
        # It was refused, since the scheduler does not know us yet, or withdrawn.
        self._network.num[f"ask_{answer.state}"] += 1
        self.reasons.append(answer.reason)
        if "is leaving" in answer.reason:
            self._give_all_up()
            return
        renewed = msgspec.structs.replace(ask, key=self._key())
        self._kernel.after(AGAIN_S, lambda: self._ask(renewed)(then), self)
