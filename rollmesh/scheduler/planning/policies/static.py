"""The policy `static`: each GPU is one pipeline's, whatever the load; to be compared with.

The partition is equal as far as device maps allow: in turn, in the order of registration, each
pipeline takes a bundle of its map that nobody has taken, on GPUs of its own fixed clusters first,
then on those of nobody's, then the lowest rank. Its workers are awake there while it has demand,
and nobody is moved for load: only who registers or leaves changes the partition, and then who is on
a GPU that has become another's gives way when that one wants it.

Invariant: no GPU is two pipelines'. Deterministic. Driven by plan.py.
"""

from collections.abc import Sequence

from rollmesh.scheduler.planning.draft import Draft
from rollmesh.scheduler.planning.plan import Outlook
from rollmesh.scheduler.planning.policies.claims import Claim, read_claims
from rollmesh.scheduler.planning.policies.moves import Moves, Victim
from rollmesh.scheduler.planning.state import Pipeline, State, Worker


class Static:
    """See the module."""

    name = "static"

    def __init__(self, reserve_after_s: float = 60.0) -> None:
        self._reserve_after_s = reserve_after_s

    @property
    def reserve_after_s(self) -> float:
        return self._reserve_after_s

    def generate(self, draft: Draft) -> Outlook:
        parts = partition(draft.state)
        claims = [
            claim._replace(bundles=[w for w in claim.bundles if w.rank in parts[claim.pipeline_id]])
            for claim in read_claims(draft)
        ]

        def gives_way(taker: Claim, victims: Sequence[Victim]) -> tuple[float, ...] | None:
            at_home = [v.worker.rank in parts[v.pipeline.pipeline_id] for v in victims]
            return None if any(at_home) or not taker.bundles else ()

        moves = Moves(draft, claims, spares_others=False)
        for claim in claims:
            while draft.num_awake(claim.pipeline) < claim.num_usable:
                if not moves.open_one(claim) and not moves.take_one(claim, gives_way):
                    break
        return Outlook()


def partition(state: State) -> dict[str, set[int]]:
    """By pipeline, the ranks of its own bundles."""
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


def _wish(pipeline: Pipeline, worker: Worker, trained: dict[int, str]) -> tuple[int, int]:
    owners = {trained.get(gpu, "") for gpu in worker.gpus}
    if owners == {pipeline.pipeline_id}:
        return 0, worker.rank
    return (1 if owners == {""} else 2), worker.rank
