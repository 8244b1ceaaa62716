"""Who may generate, on which bundles: what every policy reads off a draft before it decides.

Owns what a claim is. Invariant: a bundle stands in a claim only if its worker could be awake there:
its node takes work, no fixed cluster has one of its GPUs or is about to, nobody is lost there, and
whoever generates there gives way. Idle GPUs that no claim can use are in no claim, so that they
count for nobody. Driven by the policies, once for each plan.
"""

import math
from collections import defaultdict
from collections.abc import Mapping
from typing import NamedTuple

from rollmesh.scheduler.planning.draft import Draft
from rollmesh.scheduler.planning.ops import Expand, Grant, Op, Release, Shrink
from rollmesh.scheduler.planning.shares import Pool
from rollmesh.scheduler.planning.state import (
    AWAKE_PHASES,
    FIXED,
    NodePhase,
    Owner,
    Pipeline,
    PipelinePhase,
    Worker,
)
from rollmesh.wire.scheduling import GENERATION_CLUSTER, WorkerPhase

NOBODY: Mapping[str, int] = {}


class Claim(NamedTuple):
    """One pipeline with demand, or of whom one is foreseen."""

    pipeline: Pipeline
    bundles: list[Worker]
    """Of its workers, those that could be awake."""
    num_wanted: int
    """Bundles that it can fill and may have; of one that gave no estimate, the floor."""
    num_usable: int
    """Bundles that it may have if nobody else wants them."""

    @property
    def pipeline_id(self) -> str:
        return self.pipeline.spec.pipeline_id

    @property
    def tp(self) -> int:
        return self.pipeline.spec.tp


def has_demand(pipeline: Pipeline) -> bool:
    """Whether it wants to generate, and has something left to."""
    return (
        pipeline.demand is not None
        and pipeline.phase is PipelinePhase.ADMITTED
        and pipeline.remaining != 0
        and GENERATION_CLUSTER not in pipeline.releasing
    )


def read_claims(draft: Draft, foreseen: Mapping[str, int] = NOBODY) -> list[Claim]:
    """Of all pipelines with demand, in the order of their registration, and of those that will have
    it soon, with so many rollouts."""
    wanting = [
        each for name, each in draft.state.pipelines.items() if has_demand(each) or name in foreseen
    ]
    if not wanting:
        return []
    ground = _Ground(draft)
    return [
        _claim(each, ground, foreseen.get(each.pipeline_id, each.remaining)) for each in wanting
    ]


def read_pools(claims: list[Claim]) -> list[Pool]:
    """The GPUs of these claims, those with the same takers together."""
    takers: dict[int, list[int]] = defaultdict(list)
    for index, claim in enumerate(claims):
        for worker in claim.bundles:
            for gpu in worker.gpus:
                takers[gpu].append(index)
    sizes: dict[tuple[int, ...], int] = defaultdict(int)
    for indexes in takers.values():
        sizes[tuple(indexes)] += 1
    return [Pool(num_gpus, indexes) for indexes, num_gpus in sizes.items()]


def _claim(pipeline: Pipeline, ground: "_Ground", remaining: int | None) -> Claim:
    spec, bundles = pipeline.spec, ground.bundles(pipeline)
    limit = len(bundles)
    if spec.max_gpus:
        limit = min(limit, spec.max_gpus // spec.tp)
    if remaining is None:
        floor = max(1, math.ceil(spec.min_gpus / spec.tp))
        return Claim(pipeline, bundles, min(limit, floor), limit)
    limit = min(limit, math.ceil(remaining / max(1, spec.rollouts_per_worker)))
    return Claim(pipeline, bundles, limit, limit)


def _gpus(draft: Draft, op: Op) -> tuple[int, ...]:
    """Whose owner may be another than in the state."""
    pipelines = draft.state.pipelines
    match op:
        case Shrink(pipeline_id, rank) | Expand(pipeline_id, rank):
            return pipelines[pipeline_id].workers[rank].gpus
        case Grant(key):
            return draft.state.gpus_of(draft.state.requests[key])
        case Release(pipeline_id, cluster):
            return pipelines[pipeline_id].spec.clusters[cluster]


class _Ground:
    """Where nobody can generate, and where only one can."""

    def __init__(self, draft: Draft) -> None:
        self._draft = draft
        self._closed: set[int] = set()
        self._kept: dict[int, str] = {}
        state = draft.state
        for node in state.nodes.values():
            if node.phase is not NodePhase.UP:
                self._closed.update(node.gpus)
        touched = {gpu for op in draft.ops for gpu in _gpus(draft, op)}
        for gpu, owner in state.owners.items():
            if gpu not in touched:
                self._note(gpu, owner)
        for gpu in touched:
            if now := draft.owner(gpu):
                self._note(gpu, now)
        asked = {gpu for request in state.requests.values() for gpu in state.gpus_of(request)}
        self._closed.update(g for g in asked if not draft.may_start("", g, gives_way=True))

    def bundles(self, pipeline: Pipeline) -> list[Worker]:
        """Of its workers, those that could be awake."""
        closed = self._closed
        bundles = [each for each in pipeline.workers if closed.isdisjoint(each.gpus)]
        if self._kept:
            bundles = [each for each in bundles if self._is_its(pipeline.pipeline_id, each)]
        if not pipeline.spec.is_preemptible:
            bundles = [each for each in bundles if self._may_keep(pipeline.pipeline_id, each)]
        return bundles

    def _note(self, gpu: int, owner: Owner) -> None:
        if owner.rank == FIXED:
            self._closed.add(gpu)
            return
        pipeline = self._draft.state.pipelines[owner.pipeline_id]
        phase = pipeline.workers[owner.rank].phase
        if phase is WorkerPhase.LOST or pipeline.phase is PipelinePhase.QUARANTINED:
            self._closed.add(gpu)
        elif pipeline.keeps_workers:
            self._kept[gpu] = owner.pipeline_id

    def _is_its(self, pipeline_id: str, worker: Worker) -> bool:
        return all(self._kept.get(gpu, pipeline_id) == pipeline_id for gpu in worker.gpus)

    def _may_keep(self, pipeline_id: str, worker: Worker) -> bool:
        """Of one that does not give way: reservations keep it off, but not from what it has."""
        return worker.phase in AWAKE_PHASES or all(
            self._draft.may_start(pipeline_id, gpu, gives_way=False) for gpu in worker.gpus
        )
