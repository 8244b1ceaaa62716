"""Who may generate, on which bundles: what every policy reads off a draft before it decides.

Owns what a claim is. Invariant: a bundle stands in a claim only if its worker could be awake there:
its node takes work, no fixed cluster has one of its GPUs or is about to, nobody is lost there, and
whoever generates there gives way. Idle GPUs that no claim can use are in no claim, so that they
count for nobody. What a pipeline is left, and the basins of a large fleet, are kept in the state's
index until the ground there is another. Driven by the policies, once for each plan.
"""

import math
from collections import defaultdict
from collections.abc import Mapping
from typing import NamedTuple

from rollmesh.scheduler.planning.draft import Draft
from rollmesh.scheduler.planning.index import Cell, Site, Used
from rollmesh.scheduler.planning.ops import Grant, Release
from rollmesh.scheduler.planning.shares import Pool
from rollmesh.scheduler.planning.state import (
    AWAKE_PHASES,
    RESTING_PHASES,
    NodePhase,
    Owner,
    Pipeline,
    PipelinePhase,
    State,
    Worker,
)
from rollmesh.scheduler.planning.water import Basin
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


def read_basins(state: State, claims: list[Claim]) -> dict[int, Basin]:
    """The same by name, where they are many: of what has changed since the last plan."""
    index, ground = state.index, state.index.ground
    cells, found = index.cells(), dict[str, Used]()
    changed = ground.used.keys() - {claim.pipeline_id for claim in claims}
    for claim in claims:
        name, used = claim.pipeline_id, ground.used.get(claim.pipeline_id)
        if used is None or used.bundles is not claim.bundles:
            used = Used(claim.bundles, frozenset(g for w in claim.bundles for g in w.gpus))
            changed.add(name)
        found[name] = used
    if not changed:
        return ground.basins
    basins = ground.basins.copy()
    for first in {each for name in changed for each in index.cells_of(name)}:
        for old in ground.firsts.get(first, ()):
            del basins[old]
        now = _basins(cells[first], found)
        basins.update(now)
        ground.firsts[first] = tuple(now)
    ground.used, ground.basins = found, basins
    return basins


def _basins(cell: Cell, used: dict[str, Used]) -> dict[int, Basin]:
    takers = tuple([name for name in cell.users if name in used])
    if all(used[name].gpus.issuperset(cell.gpus) for name in takers):
        return {cell.gpus[0]: Basin(len(cell.gpus), takers)} if takers else {}
    together: dict[tuple[str, ...], list[int]] = defaultdict(list)
    for gpu in cell.gpus:
        together[tuple([name for name in takers if gpu in used[name].gpus])].append(gpu)
    return {gpus[0]: Basin(len(gpus), takers) for takers, gpus in together.items() if takers}


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


class _Ground:
    """Where nobody can generate, and where only one can."""

    def __init__(self, draft: Draft) -> None:
        self._draft = draft
        self._closed: set[int] = set()
        self._kept: dict[int, str] = {}
        for node in draft.state.nodes.values():
            if node.phase is not NodePhase.UP:
                self._closed.update(node.gpus)
        released = {(op.pipeline_id, op.cluster) for op in draft.ops if isinstance(op, Release)}
        for pipeline in draft.state.pipelines.values():
            for cluster in pipeline.holds:
                if (pipeline.spec.pipeline_id, cluster) not in released:
                    self._closed.update(pipeline.spec.clusters[cluster])
            if _is_in_the_way(pipeline):
                self._note_workers(pipeline)
        for op in draft.ops:
            if isinstance(op, Grant):
                self._closed.update(draft.state.gpus_of(draft.state.requests[op.key]))
        self._closed.update(g for g in draft.reserved if not draft.may_start("", g, True))
        self._sites = draft.state.index.move_ground(self._closed, self._kept).sites

    def bundles(self, pipeline: Pipeline) -> list[Worker]:
        """Of its workers, those that could be awake; not to be changed."""
        pipeline_id = pipeline.spec.pipeline_id
        site = self._sites.get(pipeline_id)
        if site is None or site.pipeline is not pipeline:
            site = self._sites[pipeline_id] = Site(pipeline, self._find_bundles(pipeline))
        if pipeline.spec.is_preemptible or not self._draft.reserved:
            return site.bundles
        return [each for each in site.bundles if self._may_keep(pipeline_id, each)]

    def _find_bundles(self, pipeline: Pipeline) -> list[Worker]:
        closed = self._closed
        bundles = [each for each in pipeline.workers if closed.isdisjoint(each.gpus)]
        if self._kept:
            bundles = [each for each in bundles if self._is_its(pipeline.pipeline_id, each)]
        return bundles

    def _note_workers(self, pipeline: Pipeline) -> None:
        """GPUs that its workers own, and do not leave to others."""
        pipeline_id, owners = pipeline.spec.pipeline_id, self._draft.owners
        is_ill = pipeline.phase is PipelinePhase.QUARANTINED
        for worker in pipeline.workers:
            if worker.phase in RESTING_PHASES:
                continue
            owner = Owner(pipeline_id, GENERATION_CLUSTER, worker.rank)
            gpus = [gpu for gpu in worker.gpus if owners.get(gpu) == owner]
            if is_ill or worker.phase is WorkerPhase.LOST:
                self._closed.update(gpus)
            elif pipeline.keeps_workers:
                self._kept.update(dict.fromkeys(gpus, pipeline_id))

    def _is_its(self, pipeline_id: str, worker: Worker) -> bool:
        return all(self._kept.get(gpu, pipeline_id) == pipeline_id for gpu in worker.gpus)

    def _may_keep(self, pipeline_id: str, worker: Worker) -> bool:
        """Of one that does not give way: reservations keep it off, but not from what it has."""
        return worker.phase in AWAKE_PHASES or all(
            self._draft.may_start(pipeline_id, gpu, gives_way=False) for gpu in worker.gpus
        )


def _is_in_the_way(pipeline: Pipeline) -> bool:
    """Whether it may have a worker that does not give way."""
    is_ill = pipeline.phase is PipelinePhase.QUARANTINED
    return is_ill or pipeline.num_lost > 0 or pipeline.keeps_workers
