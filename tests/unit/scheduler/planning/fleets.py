"""Small fleets for the planner's tests: nodes of GPUs, pipelines that are admitted, and a policy.

Owns nothing. Invariant: what these build is a state that the planner may meet. Driven by the tests
of this folder.
"""

from collections.abc import Iterable

from rollmesh.scheduler.planning.draft import Draft
from rollmesh.scheduler.planning.ops import Grant, Plan, apply
from rollmesh.scheduler.planning.plan import Outlook, Policy, plan
from rollmesh.scheduler.planning.state import (
    Demand,
    Node,
    Pipeline,
    PipelinePhase,
    Request,
    State,
    Worker,
)
from rollmesh.wire.scheduling import GpuPriority, PipelineSpec, WorkerPhase

TRAIN = "actor_train"


class Greedy:
    """The plainest policy: whoever has demand wakes whatever is free, in the order of ids."""

    name = "greedy"
    reserve_after_s = 60.0

    def generate(self, draft: Draft) -> Outlook:
        for pipeline_id, pipeline in sorted(draft.state.pipelines.items()):
            for worker in pipeline.workers if pipeline.demand else []:
                is_free = all(draft.is_open(gpu) for gpu in worker.gpus)
                if is_free and draft.can_expand(pipeline_id, worker):
                    draft.expand(pipeline_id, worker)
        return Outlook()


class Idle:
    """Wakes nobody."""

    name = "idle"
    reserve_after_s = 60.0

    def generate(self, draft: Draft) -> Outlook:
        return Outlook()


def fleet(*num_gpus: int) -> State:
    """A node of each size: `a`, `b`, ..."""
    state = State()
    for number, count in enumerate(num_gpus):
        first = len(state.node_of)
        name = chr(ord("a") + number)
        state.add_node(Node(name=name, gpus=tuple(range(first, first + count))))
    return state


def add(
    state: State,
    pipeline_id: str,
    generation: Iterable[int] = (),
    tp: int = 1,
    train: Iterable[int] = (),
    **more: object,
) -> Pipeline:
    """An admitted pipeline without demand; `more` goes into its spec."""
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


def demand(state: State, pipeline_id: str, estimate: int = 8) -> None:
    pipeline = state.pipelines[pipeline_id]
    pipeline.demand = Demand(key=f"{pipeline_id}-demand", estimate=estimate, opened_s=state.now_s)
    state.note_waiting(pipeline)


def wake(state: State, pipeline_id: str, *ranks: int) -> list[Worker]:
    """These are awake, and stand still."""
    for rank in ranks:
        state.move_worker(pipeline_id, rank, WorkerPhase.AWAKE)
    return [state.pipelines[pipeline_id].workers[rank] for rank in ranks]


def ask(
    state: State,
    pipeline_id: str,
    cluster: str = TRAIN,
    priority: GpuPriority = GpuPriority.ACTOR_TRAINING,
) -> str:
    """A request of now, behind all others; its key."""
    seq = 1 + max((each.seq for each in state.requests.values()), default=0)
    key = f"{pipeline_id}-{cluster}-{seq}"
    state.requests[key] = Request(
        key=key,
        pipeline_id=pipeline_id,
        cluster=cluster,
        priority=priority,
        seq=seq,
        asked_s=state.now_s,
    )
    return key


def trains(state: State, pipeline_id: str, *gpus: int) -> None:
    """A pipeline that only trains, and holds its GPUs already."""
    add(state, pipeline_id, train=gpus)
    key = ask(state, pipeline_id)
    apply(state, Grant(key))


def carry_out(state: State, policy: Policy) -> Plan:
    """Plan, and do what the plan says; nothing of it has come to rest then."""
    made = plan(state, policy)
    for op in made.ops:
        apply(state, op)
    return made


def settle(state: State) -> None:
    """All that is on its way arrives."""
    rest = {WorkerPhase.WAKING: WorkerPhase.AWAKE, WorkerPhase.SLEEPING: WorkerPhase.ASLEEP}
    for pipeline_id, pipeline in state.pipelines.items():
        for worker in pipeline.workers:
            phase = rest.get(worker.phase, worker.phase)
            state.move_worker(pipeline_id, worker.rank, phase)
