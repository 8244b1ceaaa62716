"""Planner: computes the next plan from the state and a scheduling policy.

    cleanup          released clusters, leaving pipelines, draining nodes, quotas
    fixed clusters   all GPUs of a cluster or none: serve_requests
    generation       by worker, as the policy decides
    proof            validate() of the whole plan; no unproven plan is handed out

- The same state and policy give the same plan, and the state is left unchanged. Operations in
  progress count as done and are left alone, so that no plan waits for another.
- A shrink for a request is only in a plan with its grant.
"""

import math
from typing import Protocol

import msgspec

from rollmesh.scheduler.planning.invariants import validate
from rollmesh.scheduler.planning.plan import (
    Expand,
    GpuPlan,
    GpuReservation,
    Grant,
    Op,
    PlanBuilder,
    ReleaseCluster,
    Shrink,
    ShrinkReason,
)
from rollmesh.scheduler.planning.shares import FairShares
from rollmesh.scheduler.planning.state import (
    FIXED,
    ClusterRequest,
    FleetState,
    NodePhase,
    Owner,
    PipelinePhase,
    PipelineState,
)
from rollmesh.wire.scheduling import GENERATION_CLUSTER, WorkerPhase

_ORDER: dict[type[Op], int] = {ReleaseCluster: 0, Shrink: 1, Grant: 2, Expand: 3}


class PolicyResult(msgspec.Struct, frozen=True):
    """Result of a policy, besides the operations in the builder."""

    credits: dict[str, float] = {}
    """New `credit_gpu_s` by pipeline."""
    again_s: float = float("inf")
    """When the policy may decide otherwise without an event."""
    fair_shares: FairShares | None = None
    """Next value of `FleetState.fair_shares`."""


class SchedulingPolicy(Protocol):
    """Decides which generation workers are awake."""

    @property
    def name(self) -> str:
        """Name in settings and reports."""

    @property
    def reserve_after_s(self) -> float:
        """Seconds after which a waiting fixed request is no longer bypassed."""

    def generate(self, builder: PlanBuilder) -> PolicyResult:
        """Add shrinks and expands of generation workers to the builder."""


class FixedOnly:
    """Fallback policy: generation stays as it is, except that it gives way to fixed clusters."""

    name = "fixed-only"

    def __init__(self, reserve_after_s: float) -> None:
        self.reserve_after_s = reserve_after_s

    def generate(self, _: PlanBuilder) -> PolicyResult:
        return PolicyResult()


def plan(state: FleetState, policy: SchedulingPolicy) -> GpuPlan:
    """Compute a plan; PlanError if it breaks an invariant, which is a fault of the policy or the
    planner."""
    builder = PlanBuilder(state)
    _clear(builder)
    reserve_s = serve_requests(builder, policy.reserve_after_s)
    result = policy.generate(builder)
    ops = tuple(sorted(builder.ops, key=lambda op: _ORDER[type(op)]))
    validate(state, ops)
    again_s = min(reserve_s, result.again_s)
    return GpuPlan(ops=ops, credits=result.credits, again_s=again_s, fair_shares=result.fair_shares)


def _clear(builder: PlanBuilder) -> None:
    """Free what must be freed, regardless of who gets it."""
    for pipeline in builder.state.pipelines.values():
        is_leaving = pipeline.phase is PipelinePhase.LEAVING
        for cluster in pipeline.holds:
            if cluster in pipeline.releasing:  # a leaving pipeline may train until it releases
                builder.release(pipeline.pipeline_id, cluster)
        if is_leaving:
            _shrink_all(builder, pipeline, ShrinkReason.LEAVE)
        elif GENERATION_CLUSTER in pipeline.releasing:
            _shrink_all(builder, pipeline, ShrinkReason.RELEASE)
    _drain(builder)
    for pipeline in builder.state.pipelines.values():
        if pipeline.spec.max_gpus:
            _keep_quota(builder, pipeline)


def _shrink_all(builder: PlanBuilder, pipeline: PipelineState, why: ShrinkReason) -> None:
    for worker in pipeline.workers:
        if builder.can_shrink(pipeline.pipeline_id, worker):
            builder.shrink(pipeline.pipeline_id, worker, why)


def _drain(builder: PlanBuilder) -> None:
    for node in builder.state.nodes.values():
        if node.phase is not NodePhase.DRAINING:
            continue
        for gpu in node.gpus:
            owner = builder.owner(gpu)
            worker = owner and builder.state.worker_of(owner)
            if owner and worker and builder.can_shrink(owner.pipeline_id, worker):
                builder.shrink(owner.pipeline_id, worker, ShrinkReason.DRAIN)


def _keep_quota(builder: PlanBuilder, pipeline: PipelineState) -> None:
    """Put the cheapest workers over the quota to sleep; a lost worker that is found again may
    exceed it."""
    num_over = builder.num_awake(pipeline) - pipeline.spec.max_gpus // pipeline.spec.tp
    if num_over <= 0:
        return
    still = [each for each in pipeline.workers if builder.can_shrink(pipeline.pipeline_id, each)]
    still.sort(key=lambda worker: (worker.kv_tokens, -worker.rank))
    for worker in still[:num_over]:
        builder.shrink(pipeline.pipeline_id, worker, ShrinkReason.QUOTA)


Asked = dict[str, list[ClusterRequest]]
"""Requests by pipeline."""


def serve_requests(builder: PlanBuilder, reserve_after_s: float) -> float:
    """Grant requests that can be granted and reserve for those that must be; return when age alone
    changes the order.

    Order: requests that have waited for `reserve_after_s`, by arrival; then the others by priority
    and arrival. What occupies a requested GPU:

        nothing, or a worker going to sleep      free
        an awake generation worker               gives way, if preemptible or of the same pipeline
        a waking worker                          settling: will be awake soon
        a hold, a worker that cannot be preempted, a lost or quarantined worker     blocking

    - Without blocking owners a request is granted now, or after settling; until then nothing else
      starts on its GPUs.
    - A blocked request may be bypassed until it has waited for `reserve_after_s`. Then its GPUs are
      reserved, unless an older request has reserved any of them: no other request and no worker
      that cannot be preempted gets one, except of pipelines that it waits for, which may need the
      GPUs to finish.
    - Among pipelines that wait for each other no worker is kept: the first request in order is
      granted and can finish.
    - A request blocks no other while it has no end in sight: it waits for a node that is not UP,
      for lost or quarantined workers, or, directly or through others, for its own pipeline.
    - Bound: a reserved request is granted in the first cycle after these have ended: the owners of
      its GPUs at that time, older overlapping requests, and what pipelines holding its GPUs request
      meanwhile; then one wake has settled.
    """
    again_s, asked = math.inf, _by_pipeline(builder.state)
    for request in _line(builder, reserve_after_s):
        is_free = _may_start(builder, request)
        if is_free and (_grant(builder, request) or _break_circle(builder, request, asked)):
            continue
        reserve_s = request.asked_s + reserve_after_s
        is_old = reserve_s <= builder.state.now_s
        if not is_old:
            again_s = min(again_s, reserve_s)
        if is_free:
            _reserve(builder, request, is_old, asked)
    return again_s


def _line(builder: PlanBuilder, reserve_after_s: float) -> list[ClusterRequest]:
    """Requests that can be granted at all, in order."""
    state = builder.state

    def place(request: ClusterRequest) -> tuple[bool, int, int]:
        is_young = state.now_s < request.asked_s + reserve_after_s
        return is_young, request.priority if is_young else 0, request.seq

    return sorted((each for each in state.requests.values() if _is_ready(builder, each)), key=place)


def _is_ready(builder: PlanBuilder, request: ClusterRequest) -> bool:
    """Whether the pipeline is admitted and its nodes are UP."""
    if builder.state.pipelines[request.pipeline_id].phase is not PipelinePhase.ADMITTED:
        return False
    return builder.up.issuperset(builder.state.gpus_of(request))


def _may_start(builder: PlanBuilder, request: ClusterRequest) -> bool:
    """Whether no reservation of an earlier request excludes it."""
    gpus = builder.reserved.keys() & builder.state.gpus_of(request)
    return all(builder.may_start(request.pipeline_id, gpu, gives_way=False) for gpu in gpus)


def _break_circle(builder: PlanBuilder, request: ClusterRequest, asked: Asked) -> bool:
    """Grant the request if all kept workers in its way belong to pipelines that wait for its
    own."""
    name = request.pipeline_id
    kept = _in_the_way(builder, request)
    waits = [each.rank != FIXED and name in _awaited(builder, {each}, asked) for each in kept]
    return any(waits) and all(waits) and _grant(builder, request, frozenset(kept))


def _grant(
    builder: PlanBuilder, request: ClusterRequest, kept: frozenset[Owner] = frozenset()
) -> bool:
    """Grant if every owner can be evicted; owners in `kept` give way as to their own pipeline."""
    mark = builder.mark()
    for gpu in builder.state.gpus_of(request):
        owner = builder.owner(gpu)
        if owner is None:
            continue
        to = owner.pipeline_id if owner in kept else request.pipeline_id
        worker = builder.state.worker_of(owner)
        if worker is None or not builder.can_evict(owner.pipeline_id, worker, to):
            builder.rollback(mark)
            return False
        builder.shrink(owner.pipeline_id, worker, request.key)
    builder.grant(request.key)
    return True


def _reserve(builder: PlanBuilder, request: ClusterRequest, is_old: bool, asked: Asked) -> None:
    gpus, in_the_way = builder.state.gpus_of(request), _in_the_way(builder, request)
    if not in_the_way:
        builder.reserve(gpus, GpuReservation(request.key, is_settling=True))
    elif is_old:
        awaited = _awaited(builder, in_the_way, asked)
        if awaited and request.pipeline_id not in awaited:
            reservation = GpuReservation(request.key, is_settling=False, awaited=awaited)
            builder.reserve(gpus, reservation)


def _in_the_way(builder: PlanBuilder, request: ClusterRequest) -> set[Owner]:
    """Owners of its GPUs that will not give way by themselves."""
    owners = {builder.owner(gpu) for gpu in builder.state.gpus_of(request)}
    return {each for each in owners if each and not _gives_way(builder, each, request.pipeline_id)}


def _gives_way(builder: PlanBuilder, owner: Owner, to: str) -> bool:
    """Whether the owner gives way now, or after it has settled."""
    is_worker = owner.rank != FIXED and not _is_endless(builder.state, owner)
    return is_worker and builder.state.gives_way(owner.pipeline_id, to)


def _is_endless(state: FleetState, owner: Owner) -> bool:
    """Whether it is unknown if the owner will ever release."""
    worker = state.worker_of(owner)
    is_lost = worker is not None and worker.phase is WorkerPhase.LOST
    return is_lost or state.pipelines[owner.pipeline_id].phase is PipelinePhase.QUARANTINED


def _awaited(builder: PlanBuilder, in_the_way: set[Owner], asked: Asked) -> frozenset[str]:
    """Pipelines of these owners and, transitively, of those whose GPUs they wait for; empty if one
    has no end in sight."""
    found: set[str] = set()
    unseen = list(in_the_way)
    while unseen:
        owner = unseen.pop()
        if _is_endless(builder.state, owner):
            return frozenset()
        if owner.pipeline_id in found:
            continue
        found.add(owner.pipeline_id)
        for request in asked.get(owner.pipeline_id, []):
            if not _is_ready(builder, request):
                return frozenset()
            unseen += _in_the_way(builder, request)
    return frozenset(found)


def _by_pipeline(state: FleetState) -> Asked:
    asked: Asked = {}
    for request in state.requests.values():
        asked.setdefault(request.pipeline_id, []).append(request)
    return asked
