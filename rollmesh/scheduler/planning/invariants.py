"""Invariants of a plan, proved before it is handed out.

- The plan is replayed operation by operation on an overlay of the state. No code is shared with the
  builder that made it.
- Invariants 1 to 11 are known from the field, the others are ours.
"""

import enum
from collections.abc import Iterable, Sequence

from rollmesh.scheduler.planning.plan import (
    Expand,
    Grant,
    Op,
    ReleaseCluster,
    Shrink,
    ShrinkReason,
    worker_name,
)
from rollmesh.scheduler.planning.state import (
    AWAKE_PHASES,
    FIXED,
    FleetState,
    GenerationWorker,
    NodePhase,
    Owner,
    PipelinePhase,
    PipelineState,
)
from rollmesh.wire.scheduling import GENERATION_CLUSTER, WorkerPhase

Target = tuple[str, int]
"""Pipeline and rank of a worker."""
_REASONS = frozenset(str(reason) for reason in ShrinkReason)
# Looked up once: an enum lookup costs as much as the rest of a check.
_ADMITTED, _QUARANTINED = PipelinePhase.ADMITTED, PipelinePhase.QUARANTINED
_AWAKE, _ASLEEP, _UP = WorkerPhase.AWAKE, WorkerPhase.ASLEEP, NodePhase.UP


class Invariant(enum.StrEnum):
    """Names of the invariants, as PlanError shows them."""

    ONE_OP_EACH = "one op each"
    """1: No worker shrinks twice or expands twice; no cluster is granted or released twice."""
    ELASTIC_IS_GENERATION = "elastic is generation"
    """2: Workers belong to the generation cluster, which is never granted or released as a
    whole."""
    ONE_WAY = "one way"
    """3: No worker both shrinks and expands; no cluster is both granted and released."""
    TAKES_FREE = "takes free GPUs"
    """4: GPUs that are taken are unowned in the state, or were freed earlier in the plan."""
    IS_SETTLED = "is settled"
    """5: Only an awake worker shrinks, only a sleeping one expands."""
    WHOLE_BUNDLE = "whole bundle"
    """6: A worker has `tp` GPUs of its mapping, a cluster its registered GPUs; none twice."""
    WITHIN_MAPPING = "within mapping"
    """7: A pipeline has no more workers than its mapping has bundles."""
    KNOWN_GPUS = "known GPUs"
    """8: Each GPU belongs to a node."""
    FREES_ITS_OWN = "frees its own"
    """9: Only the owner's GPUs are freed, and only once."""
    ONE_OWNER = "one owner"
    """10: No two operations take the same GPU."""
    EXISTS = "exists"
    """11: A released cluster is held, a granted one was requested, and every named object is
    known."""
    EVICTION_HAS_GRANT = "eviction has its grant"
    """A shrink has a grant or expand in the plan that takes one of its GPUs, or its reason
    applies."""
    GIVES_WAY = "gives way"
    """A worker that is not preemptible shrinks only for its own pipeline, or for a fixed cluster of
    a pipeline that its own pipeline waits for."""
    WITHIN_QUOTA = "within quota"
    """Generation of a pipeline does not grow past `max_gpus`."""
    NODE_IS_UP = "node is up"
    """Nothing starts on a node that drains or is down."""
    IS_ADMITTED = "is admitted"
    """Nothing of a pipeline starts before it is admitted; no worker of a quarantined pipeline is
    put to sleep."""


class PlanError(AssertionError):
    """A plan that must not be carried out: a fault of the planner or its policy, not of a user."""

    def __init__(self, invariant: Invariant, why: str) -> None:
        super().__init__(f"{invariant}: {why}")
        self.invariant = invariant


def validate(state: FleetState, ops: Sequence[Op]) -> None:
    """Raise PlanError for the first invariant that does not hold."""
    proof = _PlanValidator(state)
    for op in ops:
        match op:
            case ReleaseCluster():
                proof.release(op)
            case Shrink():
                proof.shrink(op)
            case Grant():
                proof.grant(op)
            case Expand():
                proof.expand(op)
    proof.finish()


class _PlanValidator:
    """Overlay of the state with the operations so far."""

    def __init__(self, state: FleetState) -> None:
        self._state = state
        self._owners: dict[int, Owner | None] = {}
        self._takers: dict[int, str] = {}
        """By GPU, its new owner: the key of a request, or the name of a worker."""
        self._shrunk: dict[Target, Shrink] = {}
        self._expanded: set[Target] = set()
        self._granted: set[tuple[str, str]] = set()
        self._released: set[tuple[str, str]] = set()

    def release(self, op: ReleaseCluster) -> None:
        target, pipeline = (op.pipeline_id, op.cluster), self._pipeline(op.pipeline_id)
        _hold(Invariant.ELASTIC_IS_GENERATION, op.cluster != GENERATION_CLUSTER, target)
        _hold(Invariant.ONE_OP_EACH, target not in self._released, target)
        _hold(Invariant.ONE_WAY, target not in self._granted, target)
        _hold(Invariant.EXISTS, op.cluster in pipeline.holds, target)
        self._released.add(target)
        self._free(pipeline.spec.clusters[op.cluster], Owner(op.pipeline_id, op.cluster, FIXED))

    def grant(self, op: Grant) -> None:
        request = self._state.requests.get(op.key)
        if request is None:
            raise PlanError(Invariant.EXISTS, f"no request {op.key}")
        target = (request.pipeline_id, request.cluster)
        pipeline = self._pipeline(request.pipeline_id)
        _hold(Invariant.ELASTIC_IS_GENERATION, request.cluster != GENERATION_CLUSTER, target)
        _hold(Invariant.EXISTS, request.cluster in pipeline.spec.clusters, target)
        is_held = request.cluster in pipeline.holds and target not in self._released
        _hold(Invariant.ONE_OP_EACH, target not in self._granted and not is_held, target)
        self._granted.add(target)
        gpus = pipeline.spec.clusters[request.cluster]
        _hold(Invariant.WHOLE_BUNDLE, len(gpus) == len(set(gpus)) > 0, target)
        self._take(pipeline, gpus, Owner(*target, FIXED), op.key)

    def shrink(self, op: Shrink) -> None:
        target = (op.pipeline_id, op.rank)
        pipeline, worker = self._worker(target)
        if target in self._shrunk or target in self._expanded:
            raise self._twice(target, target in self._shrunk)
        if worker.phase is not _AWAKE:
            raise PlanError(Invariant.IS_SETTLED, f"{target} is {worker.phase}")
        if pipeline.phase is _QUARANTINED:
            raise PlanError(Invariant.IS_ADMITTED, f"{target} is quarantined")
        self._shrunk[target] = op
        self._free(worker.gpus, Owner(op.pipeline_id, GENERATION_CLUSTER, op.rank))

    def expand(self, op: Expand) -> None:
        target = (op.pipeline_id, op.rank)
        pipeline, worker = self._worker(target)
        if target in self._expanded or target in self._shrunk:
            raise self._twice(target, target in self._expanded)
        if worker.phase is not _ASLEEP:
            raise PlanError(Invariant.IS_SETTLED, f"{target} is {worker.phase}")
        self._expanded.add(target)
        owner = Owner(op.pipeline_id, GENERATION_CLUSTER, op.rank)
        self._take(pipeline, worker.gpus, owner, worker_name(op.pipeline_id, op.rank))

    def _twice(self, target: Target, is_same_way: bool) -> PlanError:
        invariant = Invariant.ONE_OP_EACH if is_same_way else Invariant.ONE_WAY
        return PlanError(invariant, f"{target} moves twice")

    def finish(self) -> None:
        """Prove what only the whole plan shows."""
        for shrink in self._shrunk.values():
            self._prove_reason(shrink)
        for pipeline_id in {pipeline_id for pipeline_id, _ in self._expanded}:
            self._prove_quota(self._state.pipelines[pipeline_id])

    def _prove_reason(self, shrink: Shrink) -> None:
        target = (shrink.pipeline_id, shrink.rank)
        pipeline = self._state.pipelines[shrink.pipeline_id]
        worker = pipeline.workers[shrink.rank]
        if shrink.for_ in _REASONS:
            is_so = self._is_so(ShrinkReason(shrink.for_), pipeline, worker)
            _hold(Invariant.EVICTION_HAS_GRANT, is_so, (*target, shrink.for_))
            return
        taken = [gpu for gpu in worker.gpus if self._takers.get(gpu) == shrink.for_]
        _hold(Invariant.EVICTION_HAS_GRANT, bool(taken), (*target, shrink.for_))
        taker = self._owners[taken[0]]
        assert taker
        is_own = taker.pipeline_id == shrink.pipeline_id
        gives_way = is_own or not pipeline.keeps_workers or self._waits_for(shrink, taker)
        _hold(Invariant.GIVES_WAY, gives_way, target)

    def _waits_for(self, shrink: Shrink, taker: Owner) -> bool:
        """Whether the pipeline waits, directly or through others, for GPUs of the taker's
        pipeline."""
        state, seen = self._state, set[str]()
        unseen = [shrink.pipeline_id] if taker.rank == FIXED else []
        while unseen and taker.pipeline_id not in seen:
            seen.add(name := unseen.pop())
            mine = [each for each in state.requests.values() if each.pipeline_id == name]
            owners = {state.owners.get(gpu) for each in mine for gpu in state.gpus_of(each)}
            unseen += {owner.pipeline_id for owner in owners if owner} - seen
        return taker.pipeline_id in seen

    def _is_so(
        self, reason: ShrinkReason, pipeline: PipelineState, worker: GenerationWorker
    ) -> bool:
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

    def _prove_quota(self, pipeline: PipelineState) -> None:
        spec, pipeline_id = pipeline.spec, pipeline.pipeline_id
        num_mapped = len(pipeline.workers) * spec.tp
        _hold(Invariant.WITHIN_MAPPING, num_mapped <= len(spec.generation), pipeline_id)
        if spec.max_gpus:
            num_awake = sum(self._is_awake(pipeline_id, worker) for worker in pipeline.workers)
            _hold(Invariant.WITHIN_QUOTA, num_awake * spec.tp <= spec.max_gpus, pipeline_id)

    def _is_awake(self, pipeline_id: str, worker: GenerationWorker) -> bool:
        target = (pipeline_id, worker.rank)
        is_awake = worker.phase in AWAKE_PHASES and target not in self._shrunk
        return is_awake or target in self._expanded

    def _worker(self, target: Target) -> tuple[PipelineState, GenerationWorker]:
        pipeline, rank = self._pipeline(target[0]), target[1]
        if not 0 <= rank < len(pipeline.workers):
            raise PlanError(Invariant.ELASTIC_IS_GENERATION, f"{target} is not a generation worker")
        worker, tp = pipeline.workers[rank], pipeline.spec.tp
        bundle = pipeline.spec.generation[rank * tp : (rank + 1) * tp]
        if worker.gpus != bundle or len(set(bundle)) != tp:
            raise PlanError(Invariant.WHOLE_BUNDLE, f"{target} is on {worker.gpus}")
        return pipeline, worker

    def _pipeline(self, pipeline_id: str) -> PipelineState:
        known = self._state.pipelines.get(pipeline_id)
        if known is None:
            raise PlanError(Invariant.EXISTS, f"no pipeline {pipeline_id}")
        return known

    def _owner(self, gpu: int) -> Owner | None:
        return self._owners[gpu] if gpu in self._owners else self._state.owners.get(gpu)

    def _is_up(self, gpu: int) -> bool:
        node = self._state.node_of.get(gpu)
        return node is not None and node.phase is _UP

    def _free(self, gpus: Iterable[int], owner: Owner) -> None:
        for gpu in gpus:
            if self._owner(gpu) != owner:
                raise PlanError(Invariant.FREES_ITS_OWN, f"GPU {gpu} is not owned by {owner}")
            self._owners[gpu] = None

    def _take(self, pipeline: PipelineState, gpus: Iterable[int], owner: Owner, name: str) -> None:
        if pipeline.phase is not _ADMITTED:
            raise PlanError(Invariant.IS_ADMITTED, f"{name} is {pipeline.phase}")
        for gpu in gpus:
            if gpu in self._takers or self._owner(gpu) is not None or not self._is_up(gpu):
                raise self._refusal(gpu, name)
            self._owners[gpu] = owner
            self._takers[gpu] = name

    def _refusal(self, gpu: int, name: str) -> PlanError:
        """Explain why `name` may not take the GPU."""
        why = f"{name} takes GPU {gpu}"
        if gpu not in self._state.node_of:
            return PlanError(Invariant.KNOWN_GPUS, why)
        if not self._is_up(gpu):
            return PlanError(Invariant.NODE_IS_UP, why)
        if gpu in self._takers:
            return PlanError(Invariant.ONE_OWNER, f"{why}, as does {self._takers[gpu]}")
        return PlanError(Invariant.TAKES_FREE, f"{why} of {self._owner(gpu)}")


def _hold(invariant: Invariant, holds: bool, what: object) -> None:
    if not holds:
        raise PlanError(invariant, f"broken by {what}")
