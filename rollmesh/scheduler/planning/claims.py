"""Claims: the pipelines that may generate, the bundles each can use, and the moves that give one of
them a worker more.

- A bundle is in a claim only if its worker could be awake: its node is UP, no fixed cluster has or
  is about to get one of its GPUs, no worker is lost there, and the workers there can be preempted.
- Idle GPUs that no claim can use are in no claim, so that they count for no pipeline.
- Usable bundles and the pools of a large fleet are kept in the state's index until availability
  changes.

    open      its GPUs are free
    take      the policy lets the workers there give way now: the cheapest such bundle
    trade     the worker there first wakes another elsewhere, on open or taken GPUs

- Of open bundles the first is used, or (`spares_others`) the one that the fewest others could use.
- A worker moves once in a plan. A shrink is only added with its expand; a failed trade leaves no
  trace.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from functools import cached_property
from typing import NamedTuple, Protocol

from rollmesh.scheduler.planning.plan import Grant, PlanBuilder, ReleaseCluster, worker_name
from rollmesh.scheduler.planning.shares import GpuPool, IndexedPool
from rollmesh.scheduler.planning.state import (
    AWAKE_PHASES,
    FIXED,
    RESTING_PHASES,
    ClaimedGpus,
    FleetState,
    GenerationWorker,
    GpuCell,
    NodePhase,
    Owner,
    PipelinePhase,
    PipelineState,
    UsableBundles,
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


MAX_TRADES = 3
"""Upper bound on pipelines in a chain of trades."""
MAX_TRADED_BUNDLES = 32
"""Bundles tried for trades in one plan."""


class Victim(NamedTuple):
    """A worker on the wanted GPUs."""

    pipeline: PipelineState
    worker: GenerationWorker


Gives = Callable[[str], bool]


class GivesWay(Protocol):
    """Policy callback that prices a bundle."""

    def __call__(self, taker: Claim, victims: Sequence[Victim], /) -> tuple[float, ...] | None:
        """Return the price, lower is better; None: not now."""


class WorkerMoves:
    def __init__(
        self, builder: PlanBuilder, claims: Sequence[Claim], *, spares_others: bool
    ) -> None:
        self._builder = builder
        self._spares_others = spares_others
        self._claims = {claim.pipeline_id: claim for claim in claims}
        self._takers: dict[int, int] = {}
        self._gpus: dict[str, frozenset[int]] = {}
        self._open: dict[str, Iterator[GenerationWorker]] = {}
        self._full: set[str] = set()
        """Pipelines without an open bundle."""
        self._givers: Container[str] | None = None
        self._num_trials = 0

    def open_one(self, claim: Claim) -> bool:
        """Wake a worker on free GPUs."""
        pipeline_id = claim.pipeline_id
        if pipeline_id not in self._open and not self.may_open(claim):
            return False
        for worker in self._open[pipeline_id]:
            if self._is_open(worker) and self._builder.can_expand(pipeline_id, worker):
                self._builder.expand(pipeline_id, worker)
                return True
        return False

    def may_open(self, claim: Claim) -> bool:
        """Whether any of its bundles is open."""
        if claim.pipeline_id in self._full:
            return False
        here = self._by_use(claim)
        self._open[claim.pipeline_id] = iter(here)
        if not here:
            self._full.add(claim.pipeline_id)
        return bool(here)

    def ask_only(self, givers: Container[str]) -> None:
        """Restrict `take_one` to victims of these pipelines."""
        self._givers = givers

    def take_one(self, claim: Claim, gives_way: GivesWay, gives: Gives | None = None) -> bool:
        """Wake a worker where others are put to sleep for it. `gives` filters pipelines for which
        `gives_way` has no price."""
        best: tuple[tuple[float, ...], GenerationWorker, list[Victim]] | None = None
        for worker, victims in self._candidates(claim, self._bundles_of(claim, gives)):
            price = gives_way(claim, victims)
            if price is None:
                continue
            price = (*price, worker.rank)
            if best is None or price < best[0]:
                best = (price, worker, victims)
        if best is not None:
            self._swap(claim, *best[1:])
        return best is not None

    def trade_one(
        self, claim: Claim, gives_way: GivesWay, may_trade: GivesWay, num_trades: int = MAX_TRADES
    ) -> bool:
        """Wake a worker where another pipeline moves elsewhere and keeps as many workers as
        before."""
        for worker, victims in self._candidates(claim, claim.bundles):
            other = self._partner(claim, victims)
            if other is None or may_trade(claim, victims) is None:
                continue
            if self._num_trials == MAX_TRADED_BUNDLES:
                return False
            self._num_trials += 1
            mark = self._builder.mark()
            self._swap(claim, worker, victims)
            if all(self._go_on(other, gives_way, may_trade, num_trades) for _ in victims):
                return True
            self._builder.rollback(mark)
        return False

    def _go_on(
        self, claim: Claim, gives_way: GivesWay, may_trade: GivesWay, num_trades: int
    ) -> bool:
        pipeline_id = claim.pipeline_id
        for worker in claim.bundles:
            if self._is_open(worker) and self._builder.can_expand(pipeline_id, worker):
                self._builder.expand(pipeline_id, worker)
                return True
        if self.take_one(claim, gives_way):
            return True
        return num_trades > 1 and self.trade_one(claim, gives_way, may_trade, num_trades - 1)

    def _partner(self, claim: Claim, victims: Sequence[Victim]) -> Claim | None:
        """The claim of the only other pipeline among the victims."""
        names = {each.pipeline.pipeline_id for each in victims}
        name = names.pop()
        return None if names or name == claim.pipeline_id else self._claims.get(name)

    def _bundles_of(self, claim: Claim, gives: Gives | None) -> list[GenerationWorker]:
        """Bundles, without those whose first GPU belongs to a pipeline that gives nothing."""
        if self._givers is None:
            return claim.bundles
        owners, givers = self._builder.owners, self._givers
        found, known = [], dict[str, bool]()
        for worker in claim.bundles:
            owner = owners.get(worker.gpus[0])
            if owner is not None:
                name = owner.pipeline_id
                if name not in known:
                    known[name] = name in givers and (gives is None or gives(name))
                if not known[name]:
                    continue
            found.append(worker)
        return found

    def _candidates(
        self, claim: Claim, bundles: list[GenerationWorker]
    ) -> Iterator[tuple[GenerationWorker, list[Victim]]]:
        """Sleeping workers with the victims on their GPUs, all of which can sleep."""
        pipeline_id, builder = claim.pipeline_id, self._builder
        for worker in bundles:
            if not builder.can_expand(pipeline_id, worker):
                continue
            victims = self._victims(worker)
            if victims and self._can_evict(victims, pipeline_id):
                yield worker, victims

    def _can_evict(self, victims: list[Victim], to: str) -> bool:
        for pipeline, worker in victims:
            if not self._builder.can_evict(pipeline.spec.pipeline_id, worker, to):
                return False
        return True

    def _victims(self, worker: GenerationWorker) -> list[Victim]:
        owners, pipelines = self._owners_on(worker), self._builder.state.pipelines
        return [
            Victim(pipelines[owner.pipeline_id], pipelines[owner.pipeline_id].workers[owner.rank])
            for owner in owners
            if owner is not None and owner.rank != FIXED
        ]

    def _owners_on(self, worker: GenerationWorker) -> list[Owner | None]:
        """Distinct owners."""
        found, owners = list[Owner | None](), self._builder.owners
        for gpu in worker.gpus:
            owner = owners.get(gpu)
            if owner not in found:
                found.append(owner)
        return found

    def _swap(self, claim: Claim, worker: GenerationWorker, victims: Sequence[Victim]) -> None:
        for victim in victims:
            name = worker_name(claim.pipeline_id, worker.rank)
            self._builder.shrink(victim.pipeline.pipeline_id, victim.worker, name)
        self._builder.expand(claim.pipeline_id, worker)
        if any(gpu not in worker.gpus for victim in victims for gpu in victim.worker.gpus):
            self._open.clear()  # more bundles are open than before
            self._full.clear()

    def _is_open(self, worker: GenerationWorker) -> bool:
        return all(self._builder.owner(gpu) is None for gpu in worker.gpus)

    def _by_use(self, claim: Claim) -> list[GenerationWorker]:
        """Open bundles, those first that the fewest others could use."""
        free = self._builder.free
        used = self._builder.state.index.availability.claimed.get(claim.pipeline_id)
        if used and used.bundles is claim.bundles and free.isdisjoint(used.gpus):
            return []
        here = [worker for worker in claim.bundles if free.issuperset(worker.gpus)]
        if not self._spares_others or len(here) < 2:
            return here
        if claim.tp == 1:
            return sorted(here, key=lambda each: self._num_takers(each.gpus[0]))
        return sorted(here, key=lambda each: max([self._num_takers(gpu) for gpu in each.gpus]))

    def _num_takers(self, gpu: int) -> int:
        """Claims and fixed clusters that could use the GPU."""
        if gpu not in self._takers:
            users = self._builder.state.index.users.get(gpu, ())
            claims = [self._claims[name] for name in users if name in self._claims]
            num = sum(gpu in self._gpus_of(claim) for claim in claims)
            self._takers[gpu] = num + self._num_clusters[gpu]
        return self._takers[gpu]

    def _gpus_of(self, claim: Claim) -> frozenset[int]:
        name = claim.pipeline_id
        if name not in self._gpus:
            used = self._builder.state.index.availability.claimed.get(name)
            if used and used.bundles is claim.bundles:
                self._gpus[name] = used.gpus
            else:
                self._gpus[name] = frozenset(g for each in claim.bundles for g in each.gpus)
        return self._gpus[name]

    @cached_property
    def _num_clusters(self) -> Counter[int]:
        """By GPU."""
        pipelines = self._builder.state.pipelines.values()
        clusters = [gpus for each in pipelines for gpus in each.spec.clusters.values()]
        return Counter(gpu for gpus in clusters for gpu in gpus)
