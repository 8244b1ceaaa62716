"""Claims: the pipelines that may generate, and the bundles each can use.

- A bundle is in a claim only if its worker could be awake: its node is UP, no fixed cluster has or
  is about to get one of its GPUs, no worker is lost there, and the workers there can be preempted.
- Idle GPUs that no claim can use are in no claim, so that they count for no pipeline.
- Usable bundles and the pools of a large fleet are kept in the state's index until availability
  changes.
"""

import math
from collections import defaultdict
from collections.abc import Mapping
from typing import NamedTuple

from rollmesh.scheduler.planning.index import ClaimedGpus, GpuCell, UsableBundles
from rollmesh.scheduler.planning.plan import Grant, PlanBuilder, ReleaseCluster
from rollmesh.scheduler.planning.shares import GpuPool, IndexedPool
from rollmesh.scheduler.planning.state import (
    AWAKE_PHASES,
    RESTING_PHASES,
    FleetState,
    GenerationWorker,
    NodePhase,
    Owner,
    PipelinePhase,
    PipelineState,
)
from rollmesh.wire.scheduling import GENERATION_CLUSTER, WorkerPhase

NO_FORECAST: Mapping[str, int] = {}


class Claim(NamedTuple):
    """A pipeline with demand, or one whose demand is forecast."""

    pipeline: PipelineState
    bundles: list[GenerationWorker]
    """Workers that could be awake."""
    num_wanted: int
    """Bundles that it can fill and may have; without an estimate, the minimum."""
    num_usable: int
    """Bundles that it may have if no other pipeline wants them."""

    @property
    def pipeline_id(self) -> str:
        return self.pipeline.spec.pipeline_id

    @property
    def tp(self) -> int:
        return self.pipeline.spec.tp


def has_demand(pipeline: PipelineState) -> bool:
    """Whether the pipeline wants to generate and has rollouts left."""
    return (
        pipeline.demand is not None
        and pipeline.phase is PipelinePhase.ADMITTED
        and pipeline.remaining != 0
        and GENERATION_CLUSTER not in pipeline.releasing
    )


def read_claims(builder: PlanBuilder, foreseen: Mapping[str, int] = NO_FORECAST) -> list[Claim]:
    """Claims of all pipelines with demand or forecast rollouts, in order of registration."""
    wanting = [
        each
        for name, each in builder.state.pipelines.items()
        if has_demand(each) or name in foreseen
    ]
    if not wanting:
        return []
    availability = _AvailabilityReader(builder)
    return [
        _claim(each, availability, foreseen.get(each.pipeline_id, each.remaining))
        for each in wanting
    ]


def read_indexed_pools(claims: list[Claim]) -> list[IndexedPool]:
    """Group the claims' GPUs by the claims that can use them."""
    takers: dict[int, list[int]] = defaultdict(list)
    for index, claim in enumerate(claims):
        for worker in claim.bundles:
            for gpu in worker.gpus:
                takers[gpu].append(index)
    sizes: dict[tuple[int, ...], int] = defaultdict(int)
    for indexes in takers.values():
        sizes[tuple(indexes)] += 1
    return [IndexedPool(num_gpus, indexes) for indexes, num_gpus in sizes.items()]


def read_gpu_pools(state: FleetState, claims: list[Claim]) -> dict[int, GpuPool]:
    """Pools by first GPU for a large fleet; only what changed since the last plan is recomputed."""
    index, availability = state.index, state.index.availability
    cells, found = index.cells(), dict[str, ClaimedGpus]()
    changed = availability.claimed.keys() - {claim.pipeline_id for claim in claims}
    for claim in claims:
        name, used = claim.pipeline_id, availability.claimed.get(claim.pipeline_id)
        if used is None or used.bundles is not claim.bundles:
            used = ClaimedGpus(claim.bundles, frozenset(g for w in claim.bundles for g in w.gpus))
            changed.add(name)
        found[name] = used
    if not changed:
        return availability.pools
    pools = availability.pools.copy()
    for first in {each for name in changed for each in index.cells_of(name)}:
        for old in availability.pools_of_cell.get(first, ()):
            del pools[old]
        now = _gpu_pools(cells[first], found)
        pools.update(now)
        availability.pools_of_cell[first] = tuple(now)
    availability.claimed, availability.pools = found, pools
    return pools


def _gpu_pools(cell: GpuCell, used: dict[str, ClaimedGpus]) -> dict[int, GpuPool]:
    takers = tuple([name for name in cell.users if name in used])
    if all(used[name].gpus.issuperset(cell.gpus) for name in takers):
        return {cell.gpus[0]: GpuPool(len(cell.gpus), takers)} if takers else {}
    together: dict[tuple[str, ...], list[int]] = defaultdict(list)
    for gpu in cell.gpus:
        together[tuple([name for name in takers if gpu in used[name].gpus])].append(gpu)
    return {gpus[0]: GpuPool(len(gpus), takers) for takers, gpus in together.items() if takers}


def _claim(
    pipeline: PipelineState, availability: "_AvailabilityReader", remaining: int | None
) -> Claim:
    spec, bundles = pipeline.spec, availability.bundles(pipeline)
    limit = len(bundles)
    if spec.max_gpus:
        limit = min(limit, spec.max_gpus // spec.tp)
    if remaining is None:
        floor = max(1, math.ceil(spec.min_gpus / spec.tp))
        return Claim(pipeline, bundles, min(limit, floor), limit)
    limit = min(limit, math.ceil(remaining / max(1, spec.rollouts_per_worker)))
    return Claim(pipeline, bundles, limit, limit)


class _AvailabilityReader:
    """Finds GPUs where no pipeline can generate, or only one can."""

    def __init__(self, builder: PlanBuilder) -> None:
        self._builder = builder
        self._closed: set[int] = set()
        self._exclusive: dict[int, str] = {}
        for node in builder.state.nodes.values():
            if node.phase is not NodePhase.UP:
                self._closed.update(node.gpus)
        released = {
            (op.pipeline_id, op.cluster) for op in builder.ops if isinstance(op, ReleaseCluster)
        }
        for pipeline in builder.state.pipelines.values():
            for cluster in pipeline.holds:
                if (pipeline.spec.pipeline_id, cluster) not in released:
                    self._closed.update(pipeline.spec.clusters[cluster])
            if _is_in_the_way(pipeline):
                self._note_workers(pipeline)
        for op in builder.ops:
            if isinstance(op, Grant):
                self._closed.update(builder.state.gpus_of(builder.state.requests[op.key]))
        self._closed.update(g for g in builder.reserved if not builder.may_start("", g, True))
        self._usable = builder.state.index.update_availability(self._closed, self._exclusive).usable

    def bundles(self, pipeline: PipelineState) -> list[GenerationWorker]:
        """Workers that could be awake; do not modify the list."""
        pipeline_id = pipeline.spec.pipeline_id
        site = self._usable.get(pipeline_id)
        if site is None or site.pipeline is not pipeline:
            site = self._usable[pipeline_id] = UsableBundles(pipeline, self._find_bundles(pipeline))
        if pipeline.spec.is_preemptible or not self._builder.reserved:
            return site.bundles
        return [each for each in site.bundles if self._may_keep(pipeline_id, each)]

    def _find_bundles(self, pipeline: PipelineState) -> list[GenerationWorker]:
        closed = self._closed
        bundles = [each for each in pipeline.workers if closed.isdisjoint(each.gpus)]
        if self._exclusive:
            bundles = [each for each in bundles if self._is_its(pipeline.pipeline_id, each)]
        return bundles

    def _note_workers(self, pipeline: PipelineState) -> None:
        """Record GPUs of workers that do not give way."""
        pipeline_id, owners = pipeline.spec.pipeline_id, self._builder.owners
        is_ill = pipeline.phase is PipelinePhase.QUARANTINED
        for worker in pipeline.workers:
            if worker.phase in RESTING_PHASES:
                continue
            owner = Owner(pipeline_id, GENERATION_CLUSTER, worker.rank)
            gpus = [gpu for gpu in worker.gpus if owners.get(gpu) == owner]
            if is_ill or worker.phase is WorkerPhase.LOST:
                self._closed.update(gpus)
            elif pipeline.keeps_workers:
                self._exclusive.update(dict.fromkeys(gpus, pipeline_id))

    def _is_its(self, pipeline_id: str, worker: GenerationWorker) -> bool:
        return all(self._exclusive.get(gpu, pipeline_id) == pipeline_id for gpu in worker.gpus)

    def _may_keep(self, pipeline_id: str, worker: GenerationWorker) -> bool:
        """Whether reservations leave the bundle to a pipeline that is not preemptible; awake
        workers stay."""
        return worker.phase in AWAKE_PHASES or all(
            self._builder.may_start(pipeline_id, gpu, gives_way=False) for gpu in worker.gpus
        )


def _is_in_the_way(pipeline: PipelineState) -> bool:
    """Whether the pipeline may have a worker that does not give way."""
    is_ill = pipeline.phase is PipelinePhase.QUARANTINED
    return is_ill or pipeline.num_lost > 0 or pipeline.keeps_workers
