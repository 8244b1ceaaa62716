"""What must hold of every plan, proved before it is handed out.

The plan is played through upon an overlay of what it touches, op by op in its order; it shares no
code with the draft that made it. Invariants 1 to 11 are those known from the field, the others are
ours. Driven by plan.py; the service and the simulator rely on it.
"""

import enum
from collections.abc import Iterable, Sequence

from rollmesh.scheduler.planning.ops import (
    Expand,
    Grant,
    Op,
    Release,
    Shrink,
    ShrinkReason,
    worker_name,
)
from rollmesh.scheduler.planning.state import (
    AWAKE_PHASES,
    FIXED,
    NodePhase,
    Owner,
    Pipeline,
    PipelinePhase,
    State,
    Worker,
)
from rollmesh.wire.scheduling import GENERATION_CLUSTER, WorkerPhase


class Invariant(enum.StrEnum):
    """By name, as PlanError has it."""

    ONE_OP_EACH = "one op each"
    """1: No worker shrinks twice or expands twice, no cluster is granted or released twice."""
    ELASTIC_IS_GENERATION = "elastic is generation"
    """2: Workers are of the generation cluster, and it is never granted or released as a whole."""
    ONE_WAY = "one way"
    """3: No worker both shrinks and expands; what is granted is not released by the same plan."""
    TAKES_FREE = "takes free GPUs"
    """4: What is taken is free: it is nobody's in the state, or given up before by the plan."""
    STANDS_STILL = "stands still"
    """5: Only a worker that is awake shrinks, only one that is asleep expands."""
    WHOLE_BUNDLE = "whole bundle"
    """6: A worker is `tp` GPUs of its mapping, a device set is as it was registered; none twice."""
    WITHIN_MAPPING = "within mapping"
    """7: A pipeline has no more workers than its mapping has bundles."""
    KNOWN_GPUS = "known GPUs"
    """8: Each GPU is free or somebody's, and of a node."""
    FREES_ITS_OWN = "frees its own"
    """9: Nothing is freed twice, or that is another's."""
    ONE_OWNER = "one owner"
    """10: No two ops take the same GPU."""
    EXISTS = "exists"
    """11: What is released is held, what is granted was asked for, what is named is known."""
    EVICTION_HAS_GRANT = "eviction has its grant"
    """A shrink is for a grant or expand of the plan that takes a GPU of it, or its reason holds."""
    GIVES_WAY = "gives way"
    """What is not preemptible shrinks for its own pipeline alone."""
    WITHIN_QUOTA = "within quota"
    """Nobody's generation grows past `max_gpus`."""
    NODE_IS_UP = "node is up"
    """Nothing starts on a node that drains or is down."""
    IS_ADMITTED = "is admitted"
    """Nothing starts of a pipeline that is not; nothing of one in quarantine is put to sleep."""


class PlanError(AssertionError):
    """A plan that must not be carried out: a fault of the planner or its policy, not of a user."""

    def __init__(self, invariant: Invariant, why: str) -> None:
        super().__init__(f"{invariant}: {why}")
        self.invariant = invariant


def validate(state: State, ops: Sequence[Op]) -> None:
    """Raises PlanError for the first invariant that does not hold."""
    proof = _Proof(state)
    for op in ops:
        match op:
            case Release():
                proof.release(op)
            case Shrink():
                proof.shrink(op)
            case Grant():
                proof.grant(op)
            case Expand():
                proof.expand(op)
    proof.finish()


class _Proof:
    """The state with the ops so far, of what they touch."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._owners: dict[int, Owner | None] = {}
        self._takers: dict[int, str] = {}
        """By GPU, what takes it: the key of a request, or a worker's name."""
        self._shrunk: dict[tuple[str, int], Shrink] = {}
        self._expanded: set[tuple[str, int]] = set()
        self._granted: dict[str, tuple[str, str]] = {}
        """By key, the pipeline and cluster."""
        self._released: set[tuple[str, str]] = set()

    def release(self, op: Release) -> None:
        target = (op.pipeline_id, op.cluster)
        name = f"{op.pipeline_id} {op.cluster}"
        pipeline = self._pipeline(op.pipeline_id)
        self._hold(Invariant.ELASTIC_IS_GENERATION, op.cluster != GENERATION_CLUSTER, name)
        self._hold(Invariant.ONE_OP_EACH, target not in self._released, name)
        self._hold(Invariant.ONE_WAY, target not in self._granted.values(), name)
        self._hold(Invariant.EXISTS, op.cluster in pipeline.holds, f"{name} is not held")
        self._released.add(target)
        self._free(pipeline.spec.clusters[op.cluster], Owner(op.pipeline_id, op.cluster, FIXED))

    def grant(self, op: Grant) -> None:
        self._hold(Invariant.ONE_OP_EACH, op.key not in self._granted, op.key)
        request = self._state.requests.get(op.key)
        self._hold(Invariant.EXISTS, request is not None, f"nobody asked for {op.key}")
        assert request
        name = f"{request.pipeline_id} {request.cluster}"
        is_fixed = request.cluster != GENERATION_CLUSTER
        self._hold(Invariant.ELASTIC_IS_GENERATION, is_fixed, name)
        pipeline = self._pipeline(request.pipeline_id)
        self._hold(Invariant.EXISTS, request.cluster in pipeline.spec.clusters, name)
        target = (request.pipeline_id, request.cluster)
        self._hold(Invariant.ONE_OP_EACH, target not in self._granted.values(), name)
        is_held = request.cluster in pipeline.holds and target not in self._released
        self._hold(Invariant.ONE_OP_EACH, not is_held, f"{name} is held already")
        self._granted[op.key] = target
        gpus = pipeline.spec.clusters[request.cluster]
        self._hold(Invariant.WHOLE_BUNDLE, len(gpus) == len(set(gpus)) > 0, f"{name} {gpus}")
        self._take(pipeline, gpus, Owner(*target, FIXED), op.key)

    def shrink(self, op: Shrink) -> None:
        name = worker_name(op.pipeline_id, op.rank)
        pipeline, worker = self._worker(op.pipeline_id, op.rank)
        target = (op.pipeline_id, op.rank)
        self._hold(Invariant.ONE_OP_EACH, target not in self._shrunk, name)
        self._hold(Invariant.ONE_WAY, target not in self._expanded, name)
        is_awake = worker.phase is WorkerPhase.AWAKE
        self._hold(Invariant.STANDS_STILL, is_awake, f"{name} is {worker.phase}")
        is_well = pipeline.phase is not PipelinePhase.QUARANTINED
        self._hold(Invariant.IS_ADMITTED, is_well, f"{name} is in quarantine")
        self._shrunk[target] = op
        self._free(worker.gpus, Owner(op.pipeline_id, GENERATION_CLUSTER, op.rank))

    def expand(self, op: Expand) -> None:
        name = worker_name(op.pipeline_id, op.rank)
        pipeline, worker = self._worker(op.pipeline_id, op.rank)
        target = (op.pipeline_id, op.rank)
        self._hold(Invariant.ONE_OP_EACH, target not in self._expanded, name)
        self._hold(Invariant.ONE_WAY, target not in self._shrunk, name)
        is_asleep = worker.phase is WorkerPhase.ASLEEP
        self._hold(Invariant.STANDS_STILL, is_asleep, f"{name} is {worker.phase}")
        self._expanded.add(target)
        self._take(pipeline, worker.gpus, Owner(op.pipeline_id, GENERATION_CLUSTER, op.rank), name)

    def finish(self) -> None:
        """What only the whole plan shows."""
        for shrink in self._shrunk.values():
            self._prove_reason(shrink)
        for pipeline_id in {pipeline_id for pipeline_id, _ in self._expanded}:
            self._prove_quota(self._state.pipelines[pipeline_id])

    def _prove_reason(self, shrink: Shrink) -> None:
        name = worker_name(shrink.pipeline_id, shrink.rank)
        pipeline, worker = self._worker(shrink.pipeline_id, shrink.rank)
        if shrink.for_ in set(ShrinkReason):
            holds = self._is_so(ShrinkReason(shrink.for_), pipeline, worker)
            self._hold(Invariant.EVICTION_HAS_GRANT, holds, f"{name} for no {shrink.for_}")
            return
        taken = [gpu for gpu in worker.gpus if self._takers.get(gpu) == shrink.for_]
        why = f"{name} for {shrink.for_}, which takes none of {worker.gpus}"
        self._hold(Invariant.EVICTION_HAS_GRANT, bool(taken), why)
        taker = self._owners[taken[0]]
        is_own = taker is not None and taker.pipeline_id == shrink.pipeline_id
        self._hold(Invariant.GIVES_WAY, is_own or pipeline.spec.is_preemptible, name)

    def _is_so(self, reason: ShrinkReason, pipeline: Pipeline, worker: Worker) -> bool:
        match reason:
            case ShrinkReason.RELEASE:
                return GENERATION_CLUSTER in pipeline.releasing
            case ShrinkReason.LEAVE:
                return pipeline.phase is PipelinePhase.LEAVING
            case ShrinkReason.DRAIN:
                return not all(map(self._is_up, worker.gpus))
            case ShrinkReason.QUOTA:
                awake = sum(each.phase in AWAKE_PHASES for each in pipeline.workers)
                return 0 < pipeline.spec.max_gpus < awake * pipeline.spec.tp

    def _prove_quota(self, pipeline: Pipeline) -> None:
        """Counts a worker once, however it came to be awake."""
        spec, pipeline_id = pipeline.spec, pipeline.pipeline_id
        num_awake = sum(self._is_awake(pipeline_id, worker) for worker in pipeline.workers)
        num_gpus = num_awake * spec.tp
        over = f"{pipeline_id} has {num_gpus} GPUs"
        self._hold(Invariant.WITHIN_MAPPING, num_gpus <= len(spec.generation), over)
        self._hold(Invariant.WITHIN_QUOTA, not 0 < spec.max_gpus < num_gpus, over)

    def _is_awake(self, pipeline_id: str, worker: Worker) -> bool:
        target = (pipeline_id, worker.rank)
        is_awake = worker.phase in AWAKE_PHASES and target not in self._shrunk
        return is_awake or target in self._expanded

    def _worker(self, pipeline_id: str, rank: int) -> tuple[Pipeline, Worker]:
        pipeline = self._pipeline(pipeline_id)
        name, spec = worker_name(pipeline_id, rank), pipeline.spec
        is_one = 0 <= rank < len(pipeline.workers) and rank != FIXED
        self._hold(Invariant.ELASTIC_IS_GENERATION, is_one, f"{name} is no generation worker")
        worker = pipeline.workers[rank]
        bundle = spec.generation[rank * spec.tp : (rank + 1) * spec.tp]
        is_whole = worker.gpus == bundle and len(set(bundle)) == spec.tp
        self._hold(Invariant.WHOLE_BUNDLE, is_whole, f"{name} on {worker.gpus}")
        return pipeline, worker

    def _pipeline(self, pipeline_id: str) -> Pipeline:
        known = self._state.pipelines.get(pipeline_id)
        self._hold(Invariant.EXISTS, known is not None, f"no pipeline {pipeline_id}")
        assert known
        return known

    def _owner(self, gpu: int) -> Owner | None:
        return self._owners[gpu] if gpu in self._owners else self._state.owners.get(gpu)

    def _is_up(self, gpu: int) -> bool:
        node = self._state.node_of.get(gpu)
        return node is not None and node.phase is NodePhase.UP

    def _free(self, gpus: Iterable[int], owner: Owner) -> None:
        for gpu in gpus:
            is_own = self._owner(gpu) == owner
            self._hold(Invariant.FREES_ITS_OWN, is_own, f"GPU {gpu} is not of {owner}")
            self._owners[gpu] = None

    def _take(self, pipeline: Pipeline, gpus: Iterable[int], owner: Owner, name: str) -> None:
        is_admitted = pipeline.phase is PipelinePhase.ADMITTED
        self._hold(Invariant.IS_ADMITTED, is_admitted, f"{name} is {pipeline.phase}")
        for gpu in gpus:
            self._hold(Invariant.KNOWN_GPUS, gpu in self._state.node_of, f"GPU {gpu} of {name}")
            self._hold(Invariant.NODE_IS_UP, self._is_up(gpu), f"GPU {gpu} of {name}")
            self._hold(Invariant.ONE_OWNER, gpu not in self._takers, f"GPU {gpu} of {name}")
            now = self._owner(gpu)
            self._hold(Invariant.TAKES_FREE, now is None, f"GPU {gpu} of {name} is of {now}")
            self._owners[gpu] = owner
            self._takers[gpu] = name

    def _hold(self, invariant: Invariant, holds: bool, why: str) -> None:
        if not holds:
            raise PlanError(invariant, why)
