"""Moves: ways in which a pipeline gets one more worker.

    open      its GPUs are free
    take      the policy lets the workers there give way now: the cheapest such bundle
    trade     the worker there first wakes another elsewhere, on open or taken GPUs

- Of open bundles the first is used, or (`spares_others`) the one that the fewest others could use.
- A worker moves once in a plan. A shrink is only added with its expand; a failed trade leaves no
  trace.
"""

from collections import Counter
from collections.abc import Callable, Container, Iterator, Sequence
from functools import cached_property
from typing import NamedTuple, Protocol

from rollmesh.scheduler.planning.claims import Claim
from rollmesh.scheduler.planning.plan import PlanBuilder, worker_name
from rollmesh.scheduler.planning.state import FIXED, GenerationWorker, Owner, PipelineState

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
