"""Policy `static`: a fixed partition of the GPUs whatever the load; the baseline of comparisons.

- Each pipeline in turn, in order of registration, takes a bundle of its map: on GPUs of its own
  fixed clusters first, then on GPUs without a cluster, then the lowest rank. No GPU is in two
  partitions.
- Workers are awake in their partition while there is demand. Only registration and departure change
  the partition; a worker then gives way when the new owner wants its GPU.
"""

from collections.abc import Sequence

from rollmesh.scheduler.planning.claims import Claim, Victim, WorkerMoves, read_claims
from rollmesh.scheduler.planning.plan import PlanBuilder
from rollmesh.scheduler.planning.planner import PolicyResult
from rollmesh.scheduler.planning.policies import register_policy
from rollmesh.scheduler.planning.state import FleetState, GenerationWorker, PipelineState


@register_policy
class Static:
    name = "static"

    def __init__(self, reserve_after_s: float = 60.0) -> None:
        self.reserve_after_s = reserve_after_s

    def generate(self, builder: PlanBuilder) -> PolicyResult:
        parts = partition(builder.state)
        claims = [
            claim._replace(bundles=[w for w in claim.bundles if w.rank in parts[claim.pipeline_id]])
            for claim in read_claims(builder)
        ]

        def gives_way(taker: Claim, victims: Sequence[Victim]) -> tuple[float, ...] | None:
            at_home = [v.worker.rank in parts[v.pipeline.pipeline_id] for v in victims]
            return None if any(at_home) or not taker.bundles else ()

        moves = WorkerMoves(builder, claims, spares_others=False)
        for claim in claims:
            while builder.num_awake(claim.pipeline) < claim.num_usable:
                if not moves.open_one(claim) and not moves.take_one(claim, gives_way):
                    break
        return PolicyResult()


def partition(state: FleetState) -> dict[str, set[int]]:
    """Ranks of each pipeline's own bundles."""
    trained: dict[int, str] = {}
    for name, pipeline in state.pipelines.items():
        for gpus in pipeline.spec.clusters.values():
            trained.update(dict.fromkeys(gpus, name))
    wishes = {
        name: sorted(pipeline.workers, key=lambda worker: _wish(pipeline, worker, trained))
        for name, pipeline in state.pipelines.items()
    }
    taken: set[int] = set()
    parts: dict[str, set[int]] = {name: set() for name in state.pipelines}
    waiting = list(wishes)
    while waiting:
        for name in list(waiting):
            worker = next((w for w in wishes[name] if taken.isdisjoint(w.gpus)), None)
            if worker is None:
                waiting.remove(name)
            else:
                taken.update(worker.gpus)
                parts[name].add(worker.rank)
    return parts


def _wish(
    pipeline: PipelineState, worker: GenerationWorker, trained: dict[int, str]
) -> tuple[int, int]:
    owners = {trained.get(gpu, "") for gpu in worker.gpus}
    if owners == {pipeline.pipeline_id}:
        return 0, worker.rank
    return (1 if owners == {""} else 2), worker.rank
