"""Simulated fleet: runs the real planner and carries its plans out in simulated time.

- An operation starts when its GPUs are clear and does not delay planning. Changes of one moment are
  planned for once, at its end.
- A pipeline has one resize at a time, sleeps before wakes; the next waits at most TURN_S. It is
  promised nothing more meanwhile. A worker that is to sleep serves until its resize begins.
- Time never runs back. Events of one moment run in the order of their registration, `last` ones at
  the end.

    Shrink  the worker stops serving > sleep_s > clear        Expand  clear > wake_s > it serves
    Grant   clear > the fixed cluster starts                  ReleaseCluster  clear
"""

import heapq
from collections.abc import Callable
from functools import partial
from typing import Protocol

import msgspec

from rollmesh.scheduler.planning.plan import Expand, Grant, Op, ReleaseCluster, Shrink, apply
from rollmesh.scheduler.planning.planner import SchedulingPolicy, plan
from rollmesh.scheduler.planning.state import (
    ClusterRequest,
    Demand,
    FleetState,
    GenerationWorker,
    GpuNode,
    PipelinePhase,
    PipelineState,
    StreamProgress,
)
from rollmesh.scheduler.simulator.charts import GpuUse, SpanRecorder
from rollmesh.scheduler.simulator.trace import SwitchCosts, Trace
from rollmesh.wire.scheduling import PipelineSpec, WorkerPhase


class EventQueue:
    """Events in simulated time."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._entries: list[tuple[float, bool, int, Callable[[], None]]] = []
        self._num = 0

    def at(self, when_s: float, call: Callable[[], None], last: bool = False) -> None:
        """Call the function at that time."""
        assert when_s >= self.now_s
        self._num += 1
        heapq.heappush(self._entries, (when_s, last, self._num, call))

    def after(self, delay_s: float, call: Callable[[], None]) -> None:
        self.at(self.now_s + delay_s, call)

    def run(self, until_s: float) -> None:
        """Run until no events are left or the time is over."""
        while self._entries and self._entries[0][0] <= until_s:
            self.now_s, _, _, call = heapq.heappop(self._entries)
            call()


TURN_S = 10.0
"""The service's `turn_s`: a resize waits no longer than this for the previous one."""
WorkerCallback = Callable[[str, GenerationWorker], None]
"""Called with a pipeline's id and worker."""


class _Promised(msgspec.Struct):
    """Planned resizes of one pipeline that have not begun."""

    sleeps: list[GenerationWorker] = []
    wakes: list[GenerationWorker] = []


class ResizeQueue:
    """Wakes and sleeps of all pipelines.

    promised > begun (SLEEP for sleep_s, WAKE for wake_s) > done
    """

    def __init__(
        self,
        costs: SwitchCosts,
        events: EventQueue,
        spans: SpanRecorder,
        sleeps: WorkerCallback,
        done: WorkerCallback,
        turned: Callable[[], None],
    ) -> None:
        """`sleeps`: the worker stops serving; `done`: it has its new phase; `turned`: a pipeline is
        no longer busy."""
        self.busy: set[str] = set()
        """Pipelines with a resize that has its turn."""
        self._costs = costs
        self._events = events
        self._spans = spans
        self._sleeps = sleeps
        self._done = done
        self._turned = turned
        self._promised: dict[str, _Promised] = {}

    def promise(self, pipeline_id: str, worker: GenerationWorker) -> None:
        """Add a worker that the plan set WAKING or SLEEPING."""
        promised = self._promised.setdefault(pipeline_id, _Promised())
        wakes = worker.phase is WorkerPhase.WAKING
        (promised.wakes if wakes else promised.sleeps).append(worker)

    def drive(self) -> None:
        """Begin all resizes that can begin."""
        for pipeline_id, promised in list(self._promised.items()):
            if pipeline_id in self.busy:
                continue
            if promised.sleeps:
                workers, promised.sleeps = promised.sleeps, []
                self._begin(pipeline_id, workers, GpuUse.SLEEP)
            elif clear := [each for each in promised.wakes if self._spans.is_clear(each.gpus)]:
                promised.wakes = [each for each in promised.wakes if each not in clear]
                self._begin(pipeline_id, clear, GpuUse.WAKE)

    def _begin(self, pipeline_id: str, workers: list[GenerationWorker], use: GpuUse) -> None:
        self.busy.add(pipeline_id)
        now_s, costs = self._events.now_s, self._costs
        for worker in workers:
            if use is GpuUse.SLEEP:
                self._sleeps(pipeline_id, worker)
                self._spans.turn(worker.gpus, use, now_s)
            else:
                label = f"engine {worker.rank}"
                self._spans.enter(worker.gpus, pipeline_id, label, use, now_s)
        takes_s = costs.sleep_s if use is GpuUse.SLEEP else costs.wake_s
        self._events.after(min(takes_s, TURN_S), partial(self._turn_over, pipeline_id))
        self._events.after(takes_s, partial(self._end, pipeline_id, workers))

    def _turn_over(self, pipeline_id: str) -> None:
        self.busy.discard(pipeline_id)
        self._turned()

    def _end(self, pipeline_id: str, workers: list[GenerationWorker]) -> None:
        for worker in workers:
            self._done(pipeline_id, worker)


PROGRESS_BUCKETS = 50
"""Progress triggers this many plans per step at most, as in the service."""
MIN_AGAIN_S = 1.0
"""Minimum interval of plans without an event."""
STREAM = "train"


class FleetClient(Protocol):
    """Callbacks of a simulated pipeline."""

    def woke(self, rank: int) -> None:
        """The worker serves."""

    def sleeps(self, rank: int) -> int:
        """The worker stops serving; return how many rollouts were evicted."""

    def granted(self) -> None:
        """The fixed cluster has its GPUs."""

    def kv_tokens(self, rank: int) -> int:
        """KV-cache tokens that the worker's sleep would lose."""


class SimulatedFleet:
    def __init__(self, trace: Trace, policy: SchedulingPolicy, events: EventQueue) -> None:
        self.spans = SpanRecorder()
        self.num_resizes = 0
        self.num_evictions = 0
        """Sleeps of workers with running rollouts."""
        self.num_plans = 0
        self._events = events
        self._policy = policy
        self._state = FleetState()
        self._clients: dict[str, FleetClient] = {}
        self._resizes = ResizeQueue(
            trace.costs, events, self.spans, self._falls_asleep, self._resized, self._change
        )
        self._starts: dict[int, tuple[tuple[int, ...], Callable[[], None]]] = {}
        """By GPU, what starts when all of its GPUs are clear."""
        self._plan_s: float | None = None
        self._again_s = float("inf")
        self._seq = 0
        first = 0
        for number, num_gpus in enumerate(trace.nodes):
            gpus = tuple(range(first, first + num_gpus))
            self._state.add_node(GpuNode(name=f"n{number}", gpus=gpus))
            first += num_gpus

    # requests of the pipelines

    def join(self, spec: PipelineSpec, client: FleetClient) -> None:
        """Register and admit a pipeline."""
        self._clients[spec.pipeline_id] = client
        self._state.now_s = self._events.now_s
        self._state.add_pipeline(spec).phase = PipelinePhase.ADMITTED

    def leave(self, pipeline_id: str) -> None:
        """Let a finished pipeline leave."""
        self._state.pipelines[pipeline_id].phase = PipelinePhase.LEAVING
        self._change()

    def open_demand(self, pipeline_id: str, estimate: int) -> bool:
        """Open a demand; return whether a worker is awake already."""
        pipeline = self._state.pipelines[pipeline_id]
        self._state.now_s = self._events.now_s
        pipeline.demand_history.note_requested(estimate, self._events.now_s)
        pipeline.demand = Demand(key=self._key(), estimate=estimate, opened_s=self._events.now_s)
        self._state.update_waiting(pipeline)
        self._change()
        return any(each.phase is WorkerPhase.AWAKE for each in pipeline.workers)

    def report(self, pipeline_id: str, target: int, completed: int) -> None:
        """Report the progress of a step; completion closes the demand."""
        pipeline = self._state.pipelines[pipeline_id]
        pipeline.progress = {STREAM: StreamProgress(batch=0, target=target, completed=completed)}
        if completed == target:
            pipeline.demand, pipeline.progress = None, {}
            pipeline.demand_history.note_ended(self._events.now_s)
            self._state.update_waiting(pipeline)
            self._change()
        elif completed * PROGRESS_BUCKETS // target > (completed - 1) * PROGRESS_BUCKETS // target:
            self._change()

    def request(self, pipeline_id: str, cluster: str, priority: int) -> None:
        """Request the GPUs of a fixed cluster."""
        key = self._key()
        self._state.requests[key] = ClusterRequest(
            key=key,
            pipeline_id=pipeline_id,
            cluster=cluster,
            priority=priority,
            seq=self._seq,
            asked_s=self._events.now_s,
        )
        self._change()

    def release(self, pipeline_id: str, cluster: str) -> None:
        """Release the GPUs of a fixed cluster."""
        self._state.pipelines[pipeline_id].releasing[cluster] = self._key()
        self._change()

    # planning

    def _key(self) -> str:
        self._seq += 1
        return f"k{self._seq}"

    def _change(self) -> None:
        if self._plan_s != self._events.now_s:
            self._plan_s = self._events.now_s
            self._events.at(self._plan_s, self._plan, last=True)

    def _again(self, again_s: float) -> None:
        if self._again_s == again_s:
            self._change()

    def _plan(self) -> None:
        state, now_s = self._state, self._events.now_s
        state.now_s, self._plan_s = now_s, None
        for pipeline_id, pipeline in state.pipelines.items():
            self._weigh(pipeline_id, pipeline)
            pipeline.is_resizing = pipeline_id in self._resizes.busy
        planned = plan(state, self._policy)
        self.num_plans += 1
        for pipeline_id, credit in planned.credits.items():
            state.pipelines[pipeline_id].credit_gpu_s = credit
        state.credited_s, state.fair_shares = now_s, planned.fair_shares
        for op in planned.ops:
            self._carry_out(op)
        self._resizes.drive()
        self._again_s = max(planned.again_s, now_s + MIN_AGAIN_S)
        if planned.again_s < float("inf"):
            self._events.at(self._again_s, partial(self._again, self._again_s))
        self._forget()

    def _weigh(self, pipeline_id: str, pipeline: PipelineState) -> None:
        client = self._clients[pipeline_id]
        for worker in pipeline.workers:
            if worker.phase is WorkerPhase.AWAKE:
                worker.kv_tokens = client.kv_tokens(worker.rank)

    def _forget(self) -> None:
        for pipeline_id, pipeline in list(self._state.pipelines.items()):
            is_asleep = all(each.phase is WorkerPhase.ASLEEP for each in pipeline.workers)
            if pipeline.phase is PipelinePhase.LEAVING and is_asleep and not pipeline.holds:
                self._state.remove_pipeline(pipeline_id)

    # execution

    def _carry_out(self, op: Op) -> None:
        state = self._state
        match op:
            case Shrink(pipeline_id, rank) | Expand(pipeline_id, rank):
                apply(state, op)
                worker = state.pipelines[pipeline_id].workers[rank]
                worker.kv_tokens = 0
                self.num_resizes += 1
                self._resizes.promise(pipeline_id, worker)
            case Grant(key):
                request = state.requests[key]
                gpus = state.gpus_of(request)
                apply(state, op)
                self._start(gpus, partial(self._grant, request, gpus))
            case ReleaseCluster(pipeline_id, cluster):
                gpus = state.pipelines[pipeline_id].spec.clusters[cluster]
                apply(state, op)
                self._clear(gpus)

    def _start(self, gpus: tuple[int, ...], begin: Callable[[], None]) -> None:
        if self.spans.is_clear(gpus):
            begin()
            return
        for gpu in gpus:
            assert gpu not in self._starts, f"GPU {gpu} is promised twice"
            self._starts[gpu] = (gpus, begin)

    def _clear(self, gpus: tuple[int, ...]) -> None:
        self.spans.leave(gpus, self._events.now_s)
        for gpu in gpus:
            wanted, begin = self._starts.get(gpu, ((), None))
            if begin is not None and self.spans.is_clear(wanted):
                for each in wanted:
                    del self._starts[each]
                begin()

    def _falls_asleep(self, pipeline_id: str, worker: GenerationWorker) -> None:
        self.num_evictions += self._clients[pipeline_id].sleeps(worker.rank) > 0

    def _resized(self, pipeline_id: str, worker: GenerationWorker) -> None:
        if worker.phase is WorkerPhase.SLEEPING:
            self._move(pipeline_id, worker, WorkerPhase.ASLEEP)
            self._clear(worker.gpus)
            return
        self._move(pipeline_id, worker, WorkerPhase.AWAKE)
        self.spans.turn(worker.gpus, GpuUse.SERVE, self._events.now_s)
        self._clients[pipeline_id].woke(worker.rank)

    def _move(self, pipeline_id: str, worker: GenerationWorker, phase: WorkerPhase) -> None:
        self._state.now_s = self._events.now_s
        self._state.move_worker(pipeline_id, worker.rank, phase)
        self._change()

    def _grant(self, request: ClusterRequest, gpus: tuple[int, ...]) -> None:
        pipeline_id, now_s = request.pipeline_id, self._events.now_s
        self.spans.enter(gpus, pipeline_id, request.cluster, GpuUse.FIXED, now_s)
        demand_history = self._state.pipelines[pipeline_id].demand_history
        demand_history.note_granted(request.cluster, request.priority, now_s)
        self._change()
        self._clients[pipeline_id].granted()
