"""Policy `fair`: weighted max-min share of the GPUs that each pipeline can use.

    share     by weight (shares.py), between min_gpus and what the pipeline can fill: its quota, and
              remaining / rollouts_per_worker; one bundle without an estimate
    rounding  whole bundles permanently, the remainder as time slices in turn
    order     pipelines owed a bundle with none awake; those owed another; then by slice deadline
    taking    open bundles; then from pipelines above their share or whose slice is over, fewest KV
              tokens first; then by trades; open bundles that remain go to any pipeline

- A worker is left alone for `hold_s`, an only worker for `quantum_s`, while its pipeline can use
  it. A pipeline with a worker evicts for another only if it is owed more than a switch costs.
- Credit is counted at the current share while there is demand, and ends with the demand.
- Forecast demand counts like demand while no pipeline gets less than a bundle because of it.
- Bound: with the same demand and bundles of one size, credit <= tp * (quantum_s + switch_s). Partly
  overlapping device maps may delay a slice. With bundles of several sizes a pipeline without a
  worker that is owed a whole slice takes a permanent bundle of another for one slice.
"""

import heapq
import math
from collections.abc import Callable, Sequence
from functools import partial
from operator import itemgetter
from typing import Annotated, NamedTuple

import msgspec

from rollmesh.scheduler.planning.claims import (
    Claim,
    Victim,
    WorkerMoves,
    read_claims,
    read_gpu_pools,
    read_indexed_pools,
)
from rollmesh.scheduler.planning.plan import PlanBuilder
from rollmesh.scheduler.planning.planner import PolicyResult
from rollmesh.scheduler.planning.policies import register_policy
from rollmesh.scheduler.planning.shares import FairShares, ShareBounds, max_min, update_shares
from rollmesh.scheduler.planning.state import FleetState, PipelinePhase, PipelineState
from rollmesh.wire.scheduling import GENERATION_CLUSTER

ROUNDING = 1e-2
"""Fraction of a bundle: a share this close to a whole number is rounded to it."""


class SliceTurn(NamedTuple):
    """Position of a pipeline relative to its share; made by turn_of.

    A share of 2.4 bundles is two bundles, and a third for two fifths of the time. A slice is due
    when having it puts the pipeline no further ahead than it would fall behind without it. Among
    due slices the earliest deadline comes first (Tijdeman 1980, chairman assignment problem), so
    that no pipeline falls behind by more than one slice. Giving the slice to the one owed most
    instead would let the lag grow with the number of pipelines.
    """

    share: float
    """Bundles due now."""
    credit_s: float
    """Bundle seconds owed."""
    lower: int
    """Bundles due at all times."""
    upper: int
    """Bundles including the slice; at least one for every positive share."""

    def may_have(self, slice_s: float) -> bool:
        """Whether a slice is due."""
        part = self.share - self.lower
        return self.credit_s + part * slice_s > 0.0

    def deadline_s(self, slice_s: float) -> float:
        """Seconds until a whole slice is owed if it gets none."""
        part = self.share - self.lower
        return (slice_s - self.credit_s) / part if part > 0.0 else math.inf

    def order(self, slice_s: float) -> tuple[bool, float]:
        """Sort key: earlier slices first."""
        return not self.may_have(slice_s), self.deadline_s(slice_s)


def turn_of(share: float, credit_s: float) -> SliceTurn:
    upper = max(math.ceil(share - ROUNDING), 1 if share > 0.0 else 0)
    return SliceTurn(share, credit_s, math.floor(share + ROUNDING), upper)


KEEP_S = 600.0
"""Seconds to keep an engine awake for a pipeline whose next demand cannot be predicted."""
ONE = 1
"""Rollouts for which one engine is enough."""


class DemandForecast(NamedTuple):
    """Pipelines whose demand is expected soon."""

    rollouts: dict[str, int]
    """By pipeline."""
    again_s: float
    """When the forecast changes."""


def forecast_demand(state: FleetState, lead_s: float) -> DemandForecast:
    """Forecast demand, so that engines are awake when it comes.

    - Known history: from `lead_s` before the expected time to `lead_s` after it, the pipeline
      counts with the rollouts of its last demand.
    - No history yet: one engine is kept for at most KEEP_S.
    - A pipeline that waits for a fixed cluster, or has demand, is not forecast.
    """
    waiting = {request.pipeline_id for request in state.requests.values()}
    rollouts, again_s = dict[str, int](), math.inf
    for name, pipeline in state.pipelines.items():
        marked_s = pipeline.demand_history.newest_mark_s
        if marked_s is None or name in waiting or not _may_ask(pipeline):
            continue
        expected_s = pipeline.demand_history.expected_s
        is_known = expected_s < math.inf
        from_s, until_s = expected_s - lead_s, expected_s + lead_s
        if not is_known:
            from_s, until_s = marked_s, marked_s + KEEP_S
        if from_s <= state.now_s < until_s:
            rollouts[name] = (is_known and pipeline.demand_history.estimate) or ONE
        edges_s = [each for each in (from_s, until_s) if each > state.now_s]
        again_s = min([again_s, *edges_s])
    return DemandForecast(rollouts, again_s)


def _may_ask(pipeline: PipelineState) -> bool:
    is_admitted = pipeline.phase is PipelinePhase.ADMITTED
    return is_admitted and pipeline.demand is None and GENERATION_CLUSTER not in pipeline.releasing


NO_DEMAND = turn_of(0.0, 0.0)
"""Turn of a pipeline without demand."""
KEPT = 3
"""Cost of taking a slice from its rightful pipeline."""
OWN = 4
"""Cost of taking a permanent bundle."""
FEW_CELLS = 64
"""Above this, shares continue from the last plan instead of being recomputed."""


class FairSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Trade-off between wakes and waiting."""

    quantum_s: Annotated[float, msgspec.Meta(ge=0.1, le=1e6)] = 120.0
    """Length of a slice; an only worker is left alone for this long."""
    hold_s: Annotated[float, msgspec.Meta(ge=0.0, le=1e6)] = 10.0
    """Any worker is left alone for this long after it wakes."""
    switch_s: Annotated[float, msgspec.Meta(ge=0.0, le=1e6)] = 40.0
    """Cost of a sleep and a wake with the work they discard: about twice their duration."""
    reserve_after_s: Annotated[float, msgspec.Meta(ge=0.0, le=1e6)] = 60.0
    """A fixed request that has waited this long is not bypassed."""


@register_policy
class Fair:
    name = "fair"
    Settings = FairSettings

    def __init__(self, settings: FairSettings | None = None) -> None:
        self.settings = settings or FairSettings()

    @property
    def reserve_after_s(self) -> float:
        return self.settings.reserve_after_s

    def generate(self, builder: PlanBuilder) -> PolicyResult:
        claims, ideal, fair_shares, foreseen_s = self._read(builder)
        credits = {
            name: 0.0 for name, each in builder.state.pipelines.items() if each.credit_gpu_s != 0.0
        }
        turns: dict[str, SliceTurn] = {}
        for claim, gpus in zip(claims, ideal, strict=True):
            credit = self._credit(builder, claim, gpus)
            credits[claim.pipeline_id] = credit
            turns[claim.pipeline_id] = turn_of(gpus / claim.tp, credit / claim.tp)
        again_s = (
            _Allocation(builder, claims, turns, self.settings).share_out() if claims else math.inf
        )
        return PolicyResult(credits, min(again_s, foreseen_s), fair_shares)

    def _read(
        self, builder: PlanBuilder
    ) -> tuple[list[Claim], list[float], FairShares | None, float]:
        """Claims including forecast ones, their shares, and when the forecast changes."""
        foreseen = forecast_demand(builder.state, self.settings.switch_s)
        claims = read_claims(builder, foreseen.rollouts)
        ideal, fair_shares = ideal_gpus(builder.state, claims)
        if foreseen.rollouts and not _have_one(claims, ideal):
            claims = read_claims(builder)
            ideal, fair_shares = ideal_gpus(builder.state, claims)
        return claims, ideal, fair_shares, foreseen.again_s

    def _credit(self, builder: PlanBuilder, claim: Claim, gpus: float) -> float:
        """GPU seconds owed now, bounded so that an error does not persist."""
        demand = claim.pipeline.demand
        if demand is None:
            return 0.0
        passed_s = builder.state.now_s - max(builder.state.credited_s, demand.opened_s)
        # Workers beyond its slice are wanted by no other pipeline yet and cost no credit.
        had = min(claim.pipeline.num_awake, turn_of(gpus / claim.tp, 0.0).upper) * claim.tp
        credit = claim.pipeline.credit_gpu_s + (gpus - had) * max(0.0, passed_s)
        most = 2.0 * claim.tp * (self.settings.quantum_s + self.settings.switch_s)
        return min(most, max(-most, credit))


def ideal_gpus(state: FleetState, claims: list[Claim]) -> tuple[list[float], FairShares | None]:
    """Weighted max-min share of each claim in GPUs; in a large fleet also the FairShares to
    continue from."""
    shares = []
    for claim in claims:
        most = claim.num_wanted * claim.tp
        floor = min(most, claim.pipeline.spec.min_gpus)
        shares.append(ShareBounds(claim.pipeline.spec.weight, floor, most))
    if len(state.index.cells()) <= FEW_CELLS:
        return max_min(shares, read_indexed_pools(claims)), None
    named = {claim.pipeline_id: share for claim, share in zip(claims, shares, strict=True)}
    fair_shares = update_shares(state.fair_shares, named, read_gpu_pools(state, claims))
    return [
        min(share.cap_gpus, fair_shares.got[name]) for name, share in named.items()
    ], fair_shares


def _have_one(claims: Sequence[Claim], ideal: Sequence[float]) -> bool:
    """Whether each claim's share is a bundle, or all that it can have."""
    return all(
        turn_of(gpus / claim.tp, 0.0).lower >= min(1, claim.num_wanted)
        for claim, gpus in zip(claims, ideal, strict=True)
    )


class _Allocation:
    """Allocation of one plan."""

    def __init__(
        self,
        builder: PlanBuilder,
        claims: Sequence[Claim],
        turns: dict[str, SliceTurn],
        settings: FairSettings,
    ) -> None:
        self._builder = builder
        self._claims = claims
        self._turns = turns
        self._settings = settings
        self._slice_s = settings.quantum_s + settings.switch_s
        self._moves = WorkerMoves(builder, claims, spares_others=True)
        self._keepers: set[str] = set()
        """Pipelines that keep their slice."""
        self._again_s = math.inf

    def share_out(self) -> float:
        """Add the moves to the builder; return when to plan again."""
        lacking = self._open_up(lambda claim: self._turn(claim).upper)
        if lacking:
            self._keepers = self._find_keepers()
            self._moves.ask_only(self._find_givers())
        for claim in sorted(lacking, key=self._place):
            while self._takes(claim):
                pass
        self._open_up(lambda claim: claim.num_usable)
        if any(self._num_awake(each) < self._turn(each).upper for each in self._claims):
            self._later(self._settings.quantum_s)
        return self._again_s

    def _open_up(self, most: Callable[[Claim], int]) -> list[Claim]:
        """Give open bundles to claims below `most`; return those still below it."""
        waiting, lacking = list[tuple[tuple[float, ...], int, Claim]](), list[tuple[int, Claim]]()
        for place, claim in enumerate(self._claims):
            if self._num_awake(claim) >= most(claim):
                continue
            if self._moves.may_open(claim):
                waiting.append((self._place(claim), place, claim))
            else:
                lacking.append((place, claim))
        heapq.heapify(waiting)
        while waiting:
            _, place, claim = heapq.heappop(waiting)
            if not self._moves.open_one(claim):
                lacking.append((place, claim))
            elif self._num_awake(claim) < most(claim):
                heapq.heappush(waiting, (self._place(claim), place, claim))
        return [claim for _, claim in sorted(lacking, key=itemgetter(0))]

    def _place(self, claim: Claim) -> tuple[float, ...]:
        """Sort key in the queue for a bundle."""
        turn, num_awake = self._turn(claim), self._num_awake(claim)
        level = num_awake * claim.tp / claim.pipeline.spec.weight
        if num_awake < turn.lower:
            return 0 if num_awake == 0 else 1, level
        if num_awake < turn.upper:
            return 2, *turn.order(self._slice_s)
        return 3, level

    def _find_keepers(self) -> set[str]:
        """Return the first pipelines in the order of turns, as many as have a slice now."""
        parted = [each for each in self._claims if self._turn(each).upper > self._turn(each).lower]
        num = sum(self._num_awake(each) > self._turn(each).lower for each in parted)
        parted.sort(key=lambda each: self._turn(each).order(self._slice_s))
        return {each.pipeline_id for each in parted[:num]}

    def _find_givers(self) -> set[str]:
        """Pipelines with more than their permanent bundles."""
        has_all = {
            each.pipeline_id
            for each in self._claims
            if self._num_awake(each) <= self._turn(each).lower
        }
        return self._builder.state.pipelines.keys() - has_all

    def _takes(self, claim: Claim) -> bool:
        """Whether the claim got one more occupied bundle."""
        turn, num_awake = self._turn(claim), self._num_awake(claim)
        if num_awake >= turn.upper:
            return False
        if num_awake >= turn.lower and not turn.may_have(self._slice_s):
            return self._later(self._settings.hold_s)
        if 0 < num_awake < turn.lower and turn.credit_s < self._settings.switch_s:
            return self._later((self._settings.switch_s - turn.credit_s) / (turn.share - num_awake))
        before_s, self._again_s = self._again_s, math.inf
        is_done = self._moves.take_one(claim, self._gives_way, partial(self._gives, claim))
        will_be = self._again_s < math.inf
        self._again_s = min(before_s, self._again_s)
        if is_done or will_be:
            return is_done
        if self._moves.take_one(
            claim, partial(self._gives_way, cedes=True), partial(self._gives, claim, cedes=True)
        ):
            return True
        is_owed = num_awake < turn.lower or num_awake == 0
        if is_owed and self._moves.trade_one(claim, self._gives_way, self._may_trade):
            return True
        return num_awake == 0 and turn.credit_s >= self._slice_s and self._takes_certain(claim)

    def _takes_certain(self, claim: Claim) -> bool:
        """Take a permanent bundle: a pipeline with larger bundles than the others would otherwise
        never get one."""
        self._moves.ask_only(self._builder.state.pipelines)
        is_done = self._moves.take_one(claim, self._cedes_certain)
        self._moves.ask_only(self._find_givers())
        return is_done

    def _cedes_certain(self, _: Claim, victims: Sequence[Victim]) -> tuple[float, ...] | None:
        """Price: pipelines that keep another worker first, then the least owed; none drops below
        its minimum."""
        credit_s, num_left, is_held = -math.inf, dict[str, int](), False
        for victim in victims:
            name, spec = victim.pipeline.pipeline_id, victim.pipeline.spec
            num_awake = num_left.get(name, self._builder.num_awake(victim.pipeline))
            num_left[name] = num_awake - 1
            if num_left[name] * spec.tp < spec.min_gpus:
                return None
            credit_s = max(credit_s, self._turns.get(name, NO_DEMAND).credit_s)
            is_held |= self._is_younger(victim, self._settings.quantum_s)
        return None if is_held else (sum(not num for num in num_left.values()), credit_s)

    def _later(self, after_s: float) -> bool:
        self._again_s = min(self._again_s, self._builder.state.now_s + after_s)
        return False

    def _gives_way(
        self, taker: Claim, victims: Sequence[Victim], cedes: bool = False
    ) -> tuple[float, ...] | None:
        """Price of victims above their share or whose slice is over; with `cedes`, also slices less
        due than the taker's."""
        price, deadline_s, kv_tokens, num_left = 0, math.inf, 0, dict[str, int]()
        for victim in victims:
            name = victim.pipeline.pipeline_id
            num_awake = num_left.setdefault(name, self._builder.num_awake(victim.pipeline))
            num_left[name] -= 1
            turn = self._turns.get(name, NO_DEMAND)
            cost = self._cost(turn, num_awake, name in self._keepers)
            if cost == KEPT and cedes and self._goes_before(taker, turn):
                deadline_s = min(deadline_s, turn.deadline_s(self._slice_s))
            elif cost >= KEPT:
                return None
            price, kv_tokens = max(price, cost), kv_tokens + victim.worker.kv_tokens
        is_over = [self._has_served(taker, each, num_left) for each in victims]
        return (price, -deadline_s, kv_tokens, len(victims)) if all(is_over) else None

    def _gives(self, taker: Claim, name: str, cedes: bool = False) -> bool:
        """Whether a worker of this pipeline may have a price."""
        turn = self._turns.get(name, NO_DEMAND)
        num_awake = self._builder.num_awake(self._builder.state.pipelines[name])
        cost = self._cost(turn, num_awake, name in self._keepers)
        return cost < KEPT or (cedes and cost == KEPT and self._goes_before(taker, turn))

    def _cost(self, turn: SliceTurn, num_awake: int, is_keeper: bool) -> int:
        """Cost of one worker to a pipeline with `num_awake` of them."""
        if num_awake <= turn.lower:
            return OWN
        if num_awake > turn.upper:
            return 0 if turn is NO_DEMAND else 1
        return KEPT if is_keeper else 2

    def _goes_before(self, taker: Claim, turn: SliceTurn) -> bool:
        own = self._turn(taker)
        is_owed = self._num_awake(taker) < own.lower
        return is_owed or own.order(self._slice_s) < turn.order(self._slice_s)

    def _may_trade(self, _: Claim, victims: Sequence[Victim]) -> tuple[float, ...] | None:
        is_held = any(self._is_younger(each, self._settings.hold_s) for each in victims)
        return None if is_held else ()

    def _has_served(self, taker: Claim, victim: Victim, num_left: dict[str, int]) -> bool:
        """Whether the victim has served its time: the quantum for an only worker or a slice, else
        the hold."""
        name = victim.pipeline.pipeline_id
        turn = self._turns.get(name, NO_DEMAND)
        if turn is NO_DEMAND:
            return True
        is_slice = num_left[name] < turn.upper and (self._num_awake(taker) or not num_left[name])
        held_s = self._settings.quantum_s if is_slice else self._settings.hold_s
        return not self._is_younger(victim, held_s)

    def _is_younger(self, victim: Victim, held_s: float) -> bool:
        until_s = victim.worker.since_s + held_s
        if until_s <= self._builder.state.now_s:
            return False
        self._again_s = min(self._again_s, until_s)
        return True

    def _turn(self, claim: Claim) -> SliceTurn:
        return self._turns[claim.pipeline_id]

    def _num_awake(self, claim: Claim) -> int:
        return self._builder.num_awake(claim.pipeline)
