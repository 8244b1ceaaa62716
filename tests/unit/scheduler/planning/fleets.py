"""Small fleets for the planner's tests: nodes, admitted pipelines, and two simple policies."""

from collections.abc import Iterable

from rollmesh.scheduler.planning.plan import GpuPlan, Grant, PlanBuilder, apply
from rollmesh.scheduler.planning.planner import PolicyResult, SchedulingPolicy, plan
from rollmesh.scheduler.planning.state import (
    ClusterRequest,
    Demand,
    FleetState,
    GenerationWorker,
    GpuNode,
    PipelinePhase,
    PipelineState,
)
from rollmesh.wire.scheduling import GpuPriority, PipelineSpec, WorkerPhase

TRAIN = "actor_train"


class Greedy:
    """Wakes every free worker of pipelines with demand, in the order of ids."""

    name = "greedy"
    reserve_after_s = 60.0

    def generate(self, builder: PlanBuilder) -> PolicyResult:
        for pipeline_id, pipeline in sorted(builder.state.pipelines.items()):
            for worker in pipeline.workers if pipeline.demand else []:
                is_free = all(builder.is_open(gpu) for gpu in worker.gpus)
                if is_free and builder.can_expand(pipeline_id, worker):
                    builder.expand(pipeline_id, worker)
        return PolicyResult()


class Idle:
    """Wakes no worker."""

    name = "idle"
    reserve_after_s = 60.0

    def generate(self, builder: PlanBuilder) -> PolicyResult:
        return PolicyResult()


def fleet(*num_gpus: int) -> FleetState:
    """Nodes `a`, `b`, ... of these sizes."""
    state = FleetState()
    for number, count in enumerate(num_gpus):
        first = len(state.node_of)
        name = chr(ord("a") + number)
        state.add_node(GpuNode(name=name, gpus=tuple(range(first, first + count))))
    return state


def add(
    state: FleetState,
    pipeline_id: str,
    generation: Iterable[int] = (),
    tp: int = 1,
    train: Iterable[int] = (),
    **more: object,
) -> PipelineState:
    """Add an admitted pipeline without demand; `more` goes into its spec."""
    clusters = {TRAIN: tuple(train)} if train else {}
    spec = PipelineSpec(
        pipeline_id=pipeline_id,
        clusters=clusters,
        generation=tuple(generation),
        tp=tp,
        **more,  # type: ignore[arg-type]
    )
    pipeline = state.add_pipeline(spec)
    pipeline.phase = PipelinePhase.ADMITTED
    return pipeline


def demand(state: FleetState, pipeline_id: str, estimate: int = 8) -> None:
    pipeline = state.pipelines[pipeline_id]
    pipeline.demand = Demand(key=f"{pipeline_id}-demand", estimate=estimate, opened_s=state.now_s)
    state.update_waiting(pipeline)


def wake(state: FleetState, pipeline_id: str, *ranks: int) -> list[GenerationWorker]:
    """Set these workers awake."""
    for rank in ranks:
        state.move_worker(pipeline_id, rank, WorkerPhase.AWAKE)
    return [state.pipelines[pipeline_id].workers[rank] for rank in ranks]


def ask(
    state: FleetState,
    pipeline_id: str,
    cluster: str = TRAIN,
    priority: GpuPriority = GpuPriority.ACTOR_TRAINING,
) -> str:
    """Add a request behind all others; return its key."""
    seq = 1 + max((each.seq for each in state.requests.values()), default=0)
    key = f"{pipeline_id}-{cluster}-{seq}"
    state.requests[key] = ClusterRequest(
        key=key,
        pipeline_id=pipeline_id,
        cluster=cluster,
        priority=priority,
        seq=seq,
        asked_s=state.now_s,
    )
    return key


def trains(state: FleetState, pipeline_id: str, *gpus: int) -> None:
    """Add a pipeline that only trains and holds its GPUs already."""
    add(state, pipeline_id, train=gpus)
    key = ask(state, pipeline_id)
    apply(state, Grant(key))


def carry_out(state: FleetState, policy: SchedulingPolicy) -> GpuPlan:
    """Plan, and apply the operations; moves have not settled yet."""
    made = plan(state, policy)
    for op in made.ops:
        apply(state, op)
    return made


def settle(state: FleetState) -> None:
    """Complete all moves in progress."""
    rest = {WorkerPhase.WAKING: WorkerPhase.AWAKE, WorkerPhase.SLEEPING: WorkerPhase.ASLEEP}
    for pipeline_id, pipeline in state.pipelines.items():
        for worker in pipeline.workers:
            phase = rest.get(worker.phase, worker.phase)
            state.move_worker(pipeline_id, worker.rank, phase)
