"""Policy `gap-ratio`: GPUs in proportion to the remaining work, as a known system does it.

    weight    remaining x tp; without an estimate as if one rollout were left
    ratio     weight / sum of weights;  target = ratio x GPUs in whole bundles, at least one,
              which is taken from the largest
    gap       ratio - GPUs that it has / GPUs
    order     largest gap / ratio first: open bundles, then from pipelines with a negative gap and
              more than their target, the one with the most of its work left

- Counts only GPUs that some pipeline with demand can use. Progress corrects estimates and is never
  added to them.
- Ignores weights and time: with more pipelines than bundles, each keeps its bundle to the end of
  its step while the others wait. `fair` does not.
"""

import heapq
import math
from collections.abc import Sequence
from typing import NamedTuple

from rollmesh.scheduler.planning.claims import Claim, Victim, WorkerMoves, read_claims
from rollmesh.scheduler.planning.plan import PlanBuilder
from rollmesh.scheduler.planning.planner import PolicyResult
from rollmesh.scheduler.planning.policies import register_policy


class _Target(NamedTuple):
    """Share that a pipeline should have."""

    ratio: float
    num_target: int
    """Bundles."""
    left_share: float
    """Fraction of its step that is left."""


NO_TARGET = _Target(0.0, 0, 0.0)


@register_policy
class GapRatio:
    name = "gap-ratio"

    def __init__(self, reserve_after_s: float = 60.0) -> None:
        self.reserve_after_s = reserve_after_s

    def generate(self, builder: PlanBuilder) -> PolicyResult:
        claims = [claim for claim in read_claims(builder) if claim.bundles]
        num_gpus = self.count_gpus(builder, claims)
        if num_gpus:
            _Gaps(builder, claims, num_gpus).close()
        return PolicyResult()

    def count_gpus(self, builder: PlanBuilder, claims: Sequence[Claim]) -> int:
        """Number of GPUs that some claim can use."""
        return len({g for claim in claims for worker in claim.bundles for g in worker.gpus})


class _Gaps:
    """Gaps of one plan."""

    def __init__(self, builder: PlanBuilder, claims: Sequence[Claim], num_gpus: int) -> None:
        self._builder = builder
        self._claims = claims
        self._num_gpus = num_gpus
        self._moves = WorkerMoves(builder, claims, spares_others=False)
        weights = [(each.pipeline.remaining or 1) * each.tp for each in claims]
        total = sum(weights)
        ratios = [weight / total for weight in weights]
        self._standings = {
            claim.pipeline_id: _Target(ratio, num_target, _left_share(claim))
            for claim, ratio, num_target in zip(
                claims, ratios, _targets(claims, ratios, num_gpus), strict=True
            )
        }

    def close(self) -> None:
        """Move workers until no pipeline gains."""
        while self._pass():
            pass

    def _pass(self) -> bool:
        waiting = [
            (*self._place(claim), place, claim)
            for place, claim in enumerate(self._claims)
            if self._accepts(claim)
        ]
        heapq.heapify(waiting)
        has_moved = False
        while waiting:
            *_, place, claim = heapq.heappop(waiting)
            if not self._moves.open_one(claim) and not self._moves.take_one(claim, self._gives):
                continue
            has_moved = True
            if self._accepts(claim):
                heapq.heappush(waiting, (*self._place(claim), place, claim))
        return has_moved

    def _accepts(self, claim: Claim) -> bool:
        num_awake = self._builder.num_awake(claim.pipeline)
        is_short = num_awake < self._standings[claim.pipeline_id].num_target
        return is_short and self._gap(claim.pipeline_id) > 0

    def _place(self, claim: Claim) -> tuple[float, float, str]:
        gap = self._gap(claim.pipeline_id)
        ratio = self._standings[claim.pipeline_id].ratio
        return -gap / ratio, -gap, claim.pipeline_id

    def _gap(self, pipeline_id: str) -> float:
        pipeline = self._builder.state.pipelines[pipeline_id]
        has = self._builder.num_awake(pipeline) * pipeline.spec.tp / self._num_gpus
        return self._standings.get(pipeline_id, NO_TARGET).ratio - has

    def _gives(self, taker: Claim, victims: Sequence[Victim]) -> tuple[float, ...] | None:
        num_asked = dict[str, int]()
        left_share = 0.0
        for victim in victims:
            name = victim.pipeline.pipeline_id
            num_asked[name] = num_asked.get(name, 0) + 1
            standing = self._standings.get(name, NO_TARGET)
            num_spare = self._builder.num_awake(victim.pipeline) - standing.num_target
            if self._gap(name) >= 0 or num_asked[name] > num_spare or name == taker.pipeline_id:
                return None
            left_share += standing.left_share
        return (-left_share,)


def _targets(claims: Sequence[Claim], ratios: Sequence[float], num_gpus: int) -> list[int]:
    """Targets in bundles; what the minimum of one adds is taken from the largest."""
    targets = [
        max(1, math.floor(ratio * num_gpus / claim.tp + 0.5))
        for claim, ratio in zip(claims, ratios, strict=True)
    ]
    over = sum(num * claim.tp for num, claim in zip(targets, claims, strict=True)) - num_gpus
    for place in sorted(range(len(claims)), key=lambda each: -targets[each]):
        cut = min(targets[place] - 1, math.ceil(max(0, over) / claims[place].tp))
        targets[place] -= cut
        over -= cut * claims[place].tp
    return targets


def _left_share(claim: Claim) -> float:
    """Fraction of the step's rollouts that is left."""
    progress = claim.pipeline.progress.values()
    target = sum(each.target for each in progress if not each.is_retired)
    return (claim.pipeline.remaining or 0) / target if target else 1.0
