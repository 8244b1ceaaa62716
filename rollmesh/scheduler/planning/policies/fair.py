"""The policy `fair`: everybody's weighted max-min share of the GPUs that it can use.

    share     by weight, of feasible GPUs (shares.py), between min_gpus and what it can fill:
              its quota, and remaining / rollouts_per_worker; without an estimate one bundle
    rounding  whole bundles for certain, the rest as slices in turn (slices.py)
    order     who is owed a bundle and has nobody awake; who lacks another; then whose slice it is
    taking    open bundles; then from who has more than its share or whose slice is over, the
              fewest KV tokens first; then by trades; what is still open goes to who can use it

Nobody gives way in its first `hold_s`, nor loses its only worker before `quantum_s`, but who has no
use for it gives it at once. Who has a worker and lacks another evicts for it when it lacks what a
switch costs. In the long tail of a step a pipeline can fill fewer bundles, and its share of them
goes to those that can. Credit is counted while there is demand, at the share of now, and lasts as
long as the demand.

Before a signal that is foreseen (foresight.py) a pipeline counts as one that has asked, as long as
nobody has less than a bundle for that.

Bound: while the same pipelines want the same GPUs, in bundles of one size, nobody comes to lack
more than one quantum and one switch of one bundle: credit <= tp * (quantum_s + switch_s). Device
maps that overlap in part may delay a slice further: who is in the way gives way only at the end of
its own, and goes elsewhere by a trade where it is owed as much as the one that waits. With bundles
of several sizes not all shares can be had: who has nobody awake and lacks a whole slice then takes
what is certain to others for one, so that nobody goes without.

Invariant: the same state gives the same plan; of a large fleet the water of the last one is a part
of it (water.py), and that is all that is kept. Driven by plan.py.
"""

import heapq
import math
from collections.abc import Callable, Sequence
from functools import partial
from operator import itemgetter
from typing import Annotated

import msgspec

from rollmesh.scheduler.planning.draft import Draft
from rollmesh.scheduler.planning.plan import Outlook
from rollmesh.scheduler.planning.policies.claims import (
    Claim,
    read_basins,
    read_claims,
    read_pools,
)
from rollmesh.scheduler.planning.policies.foresight import foresee
from rollmesh.scheduler.planning.policies.moves import Moves, Victim
from rollmesh.scheduler.planning.policies.slices import Turn, turn_of
from rollmesh.scheduler.planning.shares import Share, max_min
from rollmesh.scheduler.planning.state import State
from rollmesh.scheduler.planning.water import Water, refill

GONE = turn_of(0.0, 0.0)
"""Of who has no demand any more."""
KEPT = 3
"""The cost of a slice to whom it belongs."""
OWN = 4
"""Of what is certain."""
FEW_CELLS = 64
"""With no more, shares are found anew by each plan; with more, from those of the last one."""


class FairSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What it trades wakes against waiting by."""

    quantum_s: Annotated[float, msgspec.Meta(ge=0.1, le=1e6)] = 120.0
    """A slice: an only worker is left alone so long."""
    hold_s: Annotated[float, msgspec.Meta(ge=0.0, le=1e6)] = 10.0
    """So long any worker is left alone, once it serves."""
    switch_s: Annotated[float, msgspec.Meta(ge=0.0, le=1e6)] = 40.0
    """What a sleep and a wake cost, with what they undo: twice their time, about."""
    reserve_after_s: Annotated[float, msgspec.Meta(ge=0.0, le=1e6)] = 60.0
    """A fixed request that waited so long is not bypassed."""


class Fair:
    """See the module."""

    name = "fair"

    def __init__(self, settings: FairSettings | None = None) -> None:
        self.settings = settings or FairSettings()

    @property
    def reserve_after_s(self) -> float:
        return self.settings.reserve_after_s

    def generate(self, draft: Draft) -> Outlook:
        claims, ideal, water, foreseen_s = self._read(draft)
        credits = {
            name: 0.0 for name, each in draft.state.pipelines.items() if each.credit_gpu_s != 0.0
        }
        turns: dict[str, Turn] = {}
        for claim, gpus in zip(claims, ideal, strict=True):
            credit = self._credit(draft, claim, gpus)
            credits[claim.pipeline_id] = credit
            turns[claim.pipeline_id] = turn_of(gpus / claim.tp, credit / claim.tp)
        again_s = _Round(draft, claims, turns, self.settings).share_out() if claims else math.inf
        return Outlook(credits, min(again_s, foreseen_s), water)

    def _read(self, draft: Draft) -> tuple[list[Claim], list[float], Water | None, float]:
        """Who wants, or soon will, and the share of each; when others will."""
        foreseen = foresee(draft.state, self.settings.switch_s)
        claims = read_claims(draft, foreseen.rollouts)
        ideal, water = ideal_gpus(draft.state, claims)
        if foreseen.rollouts and not _have_one(claims, ideal):
            claims = read_claims(draft)
            ideal, water = ideal_gpus(draft.state, claims)
        return claims, ideal, water, foreseen.again_s

    def _credit(self, draft: Draft, claim: Claim, gpus: float) -> float:
        """What it lacks now; a fault in it is forgotten in the end."""
        demand = claim.pipeline.demand
        if demand is None:
            return 0.0
        passed_s = draft.state.now_s - max(draft.state.credited_s, demand.opened_s)
        # What it has beyond its slice is what nobody else has asked for yet, and costs it nothing.
        had = min(claim.pipeline.num_awake, turn_of(gpus / claim.tp, 0.0).upper) * claim.tp
        credit = claim.pipeline.credit_gpu_s + (gpus - had) * max(0.0, passed_s)
        most = 2.0 * claim.tp * (self.settings.quantum_s + self.settings.switch_s)
        return min(most, max(-most, credit))


def ideal_gpus(state: State, claims: list[Claim]) -> tuple[list[float], Water | None]:
    """The weighted max-min share of each, in GPUs; in a large fleet with what they are made of."""
    shares = []
    for claim in claims:
        most = claim.num_wanted * claim.tp
        floor = min(most, claim.pipeline.spec.min_gpus)
        shares.append(Share(claim.pipeline.spec.weight, floor, most))
    if len(state.index.cells()) <= FEW_CELLS:
        return max_min(shares, read_pools(claims)), None
    named = {claim.pipeline_id: share for claim, share in zip(claims, shares, strict=True)}
    water = refill(state.water, named, read_basins(state, claims))
    return [min(share.cap_gpus, water.got[name]) for name, share in named.items()], water


def _have_one(claims: Sequence[Claim], ideal: Sequence[float]) -> bool:
    """Whether the share of each is a bundle, or all that it can have."""
    return all(
        turn_of(gpus / claim.tp, 0.0).lower >= min(1, claim.num_wanted)
        for claim, gpus in zip(claims, ideal, strict=True)
    )


class _Round:
    """One plan's sharing out."""

    def __init__(
        self,
        draft: Draft,
        claims: Sequence[Claim],
        turns: dict[str, Turn],
        settings: FairSettings,
    ) -> None:
        self._draft = draft
        self._claims = claims
        self._turns = turns
        self._settings = settings
        self._slice_s = settings.quantum_s + settings.switch_s
        self._moves = Moves(draft, claims, spares_others=True)
        self._keepers: set[str] = set()
        """Whose slice it is, of those that have one and those that wait for one."""
        self._again_s = math.inf

    def share_out(self) -> float:
        """Draft the moves; when to look again."""
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
        """Give open bundles to who has less than so many; those that still have."""
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
        """In the line for a bundle."""
        turn, num_awake = self._turn(claim), self._num_awake(claim)
        level = num_awake * claim.tp / claim.pipeline.spec.weight
        if num_awake < turn.lower:
            return 0 if num_awake == 0 else 1, level
        if num_awake < turn.upper:
            return 2, *turn.order(self._slice_s)
        return 3, level

    def _find_keepers(self) -> set[str]:
        """As many as have a slice: those that would first be a slice behind without one."""
        parted = [each for each in self._claims if self._turn(each).upper > self._turn(each).lower]
        num = sum(self._num_awake(each) > self._turn(each).lower for each in parted)
        parted.sort(key=lambda each: self._turn(each).order(self._slice_s))
        return {each.pipeline_id for each in parted[:num]}

    def _find_givers(self) -> set[str]:
        """Who has more than what is certain."""
        has_all = {
            each.pipeline_id
            for each in self._claims
            if self._num_awake(each) <= self._turn(each).lower
        }
        return self._draft.state.pipelines.keys() - has_all

    def _takes(self, claim: Claim) -> bool:
        """Whether it got one more of those that are not open."""
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
        """From who has no more than its own: one whose bundles are larger than those of the others
        would never get any, for of each it lacks a part."""
        self._moves.ask_only(self._draft.state.pipelines)
        is_done = self._moves.take_one(claim, self._cedes_certain)
        self._moves.ask_only(self._find_givers())
        return is_done

    def _cedes_certain(self, _: Claim, victims: Sequence[Victim]) -> tuple[float, ...] | None:
        """For a slice: who keeps another first, then who lacks least; nobody under its minimum."""
        credit_s, num_left, is_held = -math.inf, dict[str, int](), False
        for victim in victims:
            name, spec = victim.pipeline.pipeline_id, victim.pipeline.spec
            num_awake = num_left.get(name, self._draft.num_awake(victim.pipeline))
            num_left[name] = num_awake - 1
            if num_left[name] * spec.tp < spec.min_gpus:
                return None
            credit_s = max(credit_s, self._turns.get(name, GONE).credit_s)
            is_held |= self._is_younger(victim, self._settings.quantum_s)
        return None if is_held else (sum(not num for num in num_left.values()), credit_s)

    def _later(self, after_s: float) -> bool:
        self._again_s = min(self._again_s, self._draft.state.now_s + after_s)
        return False

    def _gives_way(
        self, taker: Claim, victims: Sequence[Victim], cedes: bool = False
    ) -> tuple[float, ...] | None:
        """Who has more than its share, or a slice that is over; `cedes`: or that is less its own
        than the taker's."""
        price, deadline_s, kv_tokens, num_left = 0, math.inf, 0, dict[str, int]()
        for victim in victims:
            name = victim.pipeline.pipeline_id
            num_awake = num_left.setdefault(name, self._draft.num_awake(victim.pipeline))
            num_left[name] -= 1
            turn = self._turns.get(name, GONE)
            cost = self._cost(turn, num_awake, name in self._keepers)
            if cost == KEPT and cedes and self._goes_before(taker, turn):
                deadline_s = min(deadline_s, turn.deadline_s(self._slice_s))
            elif cost >= KEPT:
                return None
            price, kv_tokens = max(price, cost), kv_tokens + victim.worker.kv_tokens
        is_over = [self._has_served(taker, each, num_left) for each in victims]
        return (price, -deadline_s, kv_tokens, len(victims)) if all(is_over) else None

    def _gives(self, taker: Claim, name: str, cedes: bool = False) -> bool:
        """Whether one worker of this pipeline may have a price."""
        turn = self._turns.get(name, GONE)
        num_awake = self._draft.num_awake(self._draft.state.pipelines[name])
        cost = self._cost(turn, num_awake, name in self._keepers)
        return cost < KEPT or (cedes and cost == KEPT and self._goes_before(taker, turn))

    def _cost(self, turn: Turn, num_awake: int, is_keeper: bool) -> int:
        """Of one worker, to the pipeline that has that many."""
        if num_awake <= turn.lower:
            return OWN
        if num_awake > turn.upper:
            return 0 if turn is GONE else 1
        return KEPT if is_keeper else 2

    def _goes_before(self, taker: Claim, turn: Turn) -> bool:
        own = self._turn(taker)
        is_owed = self._num_awake(taker) < own.lower
        return is_owed or own.order(self._slice_s) < turn.order(self._slice_s)

    def _may_trade(self, _: Claim, victims: Sequence[Victim]) -> tuple[float, ...] | None:
        is_held = any(self._is_younger(each, self._settings.hold_s) for each in victims)
        return None if is_held else ()

    def _has_served(self, taker: Claim, victim: Victim, num_left: dict[str, int]) -> bool:
        """Long enough: an only worker its quantum, and one that another has too to one that has."""
        name = victim.pipeline.pipeline_id
        turn = self._turns.get(name, GONE)
        if turn is GONE:
            return True
        is_slice = num_left[name] < turn.upper and (self._num_awake(taker) or not num_left[name])
        held_s = self._settings.quantum_s if is_slice else self._settings.hold_s
        return not self._is_younger(victim, held_s)

    def _is_younger(self, victim: Victim, held_s: float) -> bool:
        until_s = victim.worker.since_s + held_s
        if until_s <= self._draft.state.now_s:
            return False
        self._again_s = min(self._again_s, until_s)
        return True

    def _turn(self, claim: Claim) -> Turn:
        return self._turns[claim.pipeline_id]

    def _num_awake(self, claim: Claim) -> int:
        return self._draft.num_awake(claim.pipeline)
