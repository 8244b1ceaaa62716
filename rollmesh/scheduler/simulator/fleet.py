"""The fleet in simulated time: asks for the real plan(), and carries it out.

Owns the planner's state, and which GPUs are clear. Invariants: as in the service, an op starts when
its GPUs are clear, and none waits for another to be planned; a pipeline has one resize at a time
(resizes.py), and is promised nothing more meanwhile; who wants to change something says so and is
planned for at the end of that moment. Driven by the tenants, by name.

    Shrink  the worker serves nobody > sleep_s > clear        Expand  clear > wake_s > it serves
    Grant   clear > the fixed cluster starts                  Release clear
"""

from collections.abc import Callable
from functools import partial
from typing import Protocol

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
from rollmesh.scheduler.simulator.agenda import Agenda
from rollmesh.scheduler.simulator.resizes import Resizes
from rollmesh.scheduler.simulator.spans import Spans, Use
from rollmesh.scheduler.simulator.trace import Trace
from rollmesh.wire.scheduling import PipelineSpec, WorkerPhase

PROGRESS_BUCKETS = 50
"""So many times in a step, progress is reason enough to plan, as in the service."""
MIN_AGAIN_S = 1.0
"""Time alone is no reason to plan more often."""
STREAM = "train"


class Tenant(Protocol):
    """What a pipeline is told."""

    def woke(self, rank: int) -> None:
        """The worker serves."""

    def sleeps(self, rank: int) -> int:
        """It does not from now on; how many rollouts lost their place."""

    def granted(self) -> None:
        """The fixed cluster has its GPUs."""

    def kv_tokens(self, rank: int) -> int:
        """What the worker's sleep would lose."""


class Fleet:
    """See the module."""

    def __init__(self, trace: Trace, policy: SchedulingPolicy, agenda: Agenda) -> None:
        self.spans = Spans()
        self.num_resizes = 0
        self.num_evictions = 0
        """Of workers on which rollouts ran."""
        self.num_plans = 0
        self._agenda = agenda
        self._policy = policy
        self._state = FleetState()
        self._tenants: dict[str, Tenant] = {}
        self._resizes = Resizes(
            trace.costs, agenda, self.spans, self._falls_asleep, self._resized, self._change
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

    # what tenants say

    def join(self, spec: PipelineSpec, tenant: Tenant) -> None:
        """Registered and admitted."""
        self._tenants[spec.pipeline_id] = tenant
        self._state.now_s = self._agenda.now_s
        self._state.add_pipeline(spec).phase = PipelinePhase.ADMITTED

    def leave(self, pipeline_id: str) -> None:
        """It is done."""
        self._state.pipelines[pipeline_id].phase = PipelinePhase.LEAVING
        self._change()

    def open_demand(self, pipeline_id: str, estimate: int) -> bool:
        """It wants to generate; whether a worker is awake already."""
        pipeline = self._state.pipelines[pipeline_id]
        self._state.now_s = self._agenda.now_s
        pipeline.demand_history.note_requested(estimate, self._agenda.now_s)
        pipeline.demand = Demand(key=self._key(), estimate=estimate, opened_s=self._agenda.now_s)
        self._state.update_waiting(pipeline)
        self._change()
        return any(each.phase is WorkerPhase.AWAKE for each in pipeline.workers)

    def report(self, pipeline_id: str, target: int, completed: int) -> None:
        """Of the rollouts of a step; all of them close the demand."""
        pipeline = self._state.pipelines[pipeline_id]
        pipeline.progress = {STREAM: StreamProgress(batch=0, target=target, completed=completed)}
        if completed == target:
            pipeline.demand, pipeline.progress = None, {}
            pipeline.demand_history.note_ended(self._agenda.now_s)
            self._state.update_waiting(pipeline)
            self._change()
        elif completed * PROGRESS_BUCKETS // target > (completed - 1) * PROGRESS_BUCKETS // target:
            self._change()

    def request(self, pipeline_id: str, cluster: str, priority: int) -> None:
        """A fixed cluster wants its GPUs."""
        key = self._key()
        self._state.requests[key] = ClusterRequest(
            key=key,
            pipeline_id=pipeline_id,
            cluster=cluster,
            priority=priority,
            seq=self._seq,
            asked_s=self._agenda.now_s,
        )
        self._change()

    def release(self, pipeline_id: str, cluster: str) -> None:
        """It gives them up."""
        self._state.pipelines[pipeline_id].releasing[cluster] = self._key()
        self._change()

    # planning

    def _key(self) -> str:
        self._seq += 1
        return f"k{self._seq}"

    def _change(self) -> None:
        if self._plan_s != self._agenda.now_s:
            self._plan_s = self._agenda.now_s
            self._agenda.at(self._plan_s, self._plan, last=True)

    def _again(self, again_s: float) -> None:
        if self._again_s == again_s:
            self._change()

    def _plan(self) -> None:
        state, now_s = self._state, self._agenda.now_s
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
            self._agenda.at(self._again_s, partial(self._again, self._again_s))
        self._forget()

    def _weigh(self, pipeline_id: str, pipeline: PipelineState) -> None:
        tenant = self._tenants[pipeline_id]
        for worker in pipeline.workers:
            if worker.phase is WorkerPhase.AWAKE:
                worker.kv_tokens = tenant.kv_tokens(worker.rank)

    def _forget(self) -> None:
        for pipeline_id, pipeline in list(self._state.pipelines.items()):
            is_asleep = all(each.phase is WorkerPhase.ASLEEP for each in pipeline.workers)
            if pipeline.phase is PipelinePhase.LEAVING and is_asleep and not pipeline.holds:
                self._state.remove_pipeline(pipeline_id)

    # carrying it out

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
        self.spans.leave(gpus, self._agenda.now_s)
        for gpu in gpus:
            wanted, begin = self._starts.get(gpu, ((), None))
            if begin is not None and self.spans.is_clear(wanted):
                for each in wanted:
                    del self._starts[each]
                begin()

    def _falls_asleep(self, pipeline_id: str, worker: GenerationWorker) -> None:
        self.num_evictions += self._tenants[pipeline_id].sleeps(worker.rank) > 0

    def _resized(self, pipeline_id: str, worker: GenerationWorker) -> None:
        if worker.phase is WorkerPhase.SLEEPING:
            self._move(pipeline_id, worker, WorkerPhase.ASLEEP)
            self._clear(worker.gpus)
            return
        self._move(pipeline_id, worker, WorkerPhase.AWAKE)
        self.spans.turn(worker.gpus, Use.SERVE, self._agenda.now_s)
        self._tenants[pipeline_id].woke(worker.rank)

    def _move(self, pipeline_id: str, worker: GenerationWorker, phase: WorkerPhase) -> None:
        self._state.now_s = self._agenda.now_s
        self._state.move_worker(pipeline_id, worker.rank, phase)
        self._change()

    def _grant(self, request: ClusterRequest, gpus: tuple[int, ...]) -> None:
        pipeline_id, now_s = request.pipeline_id, self._agenda.now_s
        self.spans.enter(gpus, pipeline_id, request.cluster, Use.FIXED, now_s)
        demand_history = self._state.pipelines[pipeline_id].demand_history
        demand_history.note_granted(request.cluster, request.priority, now_s)
        self._change()
        self._tenants[pipeline_id].granted()
