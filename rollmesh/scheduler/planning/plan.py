"""The planner: what is to be done now with the GPUs of the fleet.

    what must go     clusters given up, pipelines that leave, nodes that drain, what is over quota
    fixed clusters   all of a device set or nothing (fixed.py)
    generation       by worker, as the policy has it
    proof            invariants.py, of the whole plan; nothing unproven is handed out

Invariants: the same state and policy give the same plan; the state is left as it was; what is under
way counts as done and stands still, so no plan waits for another to be carried out. Driven by the
service's machine at each change, and by the simulator.
"""

from typing import Protocol

import msgspec

from rollmesh.scheduler.planning import fixed
from rollmesh.scheduler.planning.draft import Draft
from rollmesh.scheduler.planning.invariants import validate
from rollmesh.scheduler.planning.ops import (
    Expand,
    Grant,
    Op,
    Plan,
    Release,
    Shrink,
    ShrinkReason,
)
from rollmesh.scheduler.planning.state import NodePhase, Pipeline, PipelinePhase, State
from rollmesh.scheduler.planning.water import Water
from rollmesh.wire.scheduling import GENERATION_CLUSTER

_ORDER: dict[type[Op], int] = {Release: 0, Shrink: 1, Grant: 2, Expand: 3}


class Outlook(msgspec.Struct, frozen=True):
    """What a policy leaves behind, besides the ops in the draft."""

    credits: dict[str, float] = {}
    """By pipeline, what its `credit_gpu_s` is at `now_s`."""
    again_s: float = float("inf")
    """When time alone may change its mind."""
    water: Water | None = None
    """What its shares were made of."""


class Policy(Protocol):
    """Shares what generation may have."""

    @property
    def name(self) -> str:
        """As settings and reports call it."""

    @property
    def reserve_after_s(self) -> float:
        """A fixed request that has waited so long is not bypassed any more."""

    def generate(self, draft: Draft) -> Outlook:
        """Add shrinks and expands of generation workers to the draft."""


class FixedOnly:
    """The policy of who has none that works: generation stays as it is, but where it gives way to
    fixed clusters."""

    name = "fixed-only"

    def __init__(self, reserve_after_s: float) -> None:
        self.reserve_after_s = reserve_after_s

    def generate(self, _: Draft) -> Outlook:
        return Outlook()


def plan(state: State, policy: Policy) -> Plan:
    """Raises PlanError where an invariant does not hold, which is a fault of ours."""
    draft = Draft(state)
    _clear(draft)
    reserve_s = fixed.serve(draft, policy.reserve_after_s)
    outlook = policy.generate(draft)
    ops = tuple(sorted(draft.ops, key=lambda op: _ORDER[type(op)]))
    validate(state, ops)
    again_s = min(reserve_s, outlook.again_s)
    return Plan(ops=ops, credits=outlook.credits, again_s=again_s, water=outlook.water)


def _clear(draft: Draft) -> None:
    """Free what nobody may keep, whoever gets it."""
    for pipeline in draft.state.pipelines.values():
        is_leaving = pipeline.phase is PipelinePhase.LEAVING
        for cluster in pipeline.holds:
            if cluster in pipeline.releasing:  # who leaves may still train, until it says so
                draft.release(pipeline.pipeline_id, cluster)
        if is_leaving:
            _shrink_all(draft, pipeline, ShrinkReason.LEAVE)
        elif GENERATION_CLUSTER in pipeline.releasing:
            _shrink_all(draft, pipeline, ShrinkReason.RELEASE)
    _drain(draft)
    for pipeline in draft.state.pipelines.values():
        if pipeline.spec.max_gpus:
            _keep_quota(draft, pipeline)


def _shrink_all(draft: Draft, pipeline: Pipeline, why: ShrinkReason) -> None:
    for worker in pipeline.workers:
        if draft.can_shrink(pipeline.pipeline_id, worker):
            draft.shrink(pipeline.pipeline_id, worker, why)


def _drain(draft: Draft) -> None:
    for node in draft.state.nodes.values():
        if node.phase is not NodePhase.DRAINING:
            continue
        for gpu in node.gpus:
            owner = draft.owner(gpu)
            worker = owner and draft.state.worker_of(owner)
            if owner and worker and draft.can_shrink(owner.pipeline_id, worker):
                draft.shrink(owner.pipeline_id, worker, ShrinkReason.DRAIN)


def _keep_quota(draft: Draft, pipeline: Pipeline) -> None:
    """What was lost and is found again may be more than is allowed: the cheapest go."""
    num_over = draft.num_awake(pipeline) - pipeline.spec.max_gpus // pipeline.spec.tp
    if num_over <= 0:
        return
    still = [each for each in pipeline.workers if draft.can_shrink(pipeline.pipeline_id, each)]
    still.sort(key=lambda worker: (worker.kv_tokens, -worker.rank))
    for worker in still[:num_over]:
        draft.shrink(pipeline.pipeline_id, worker, ShrinkReason.QUOTA)
