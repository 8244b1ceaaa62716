"""Who has each GPU, since when, and what becomes of it, in words.

Owns the words for owners, for ops under way and for nodes. Invariants: pure, and it only reads; a
GPU that is to be had has no words. Driven by explain.py, for one answer.
"""

from collections.abc import Iterable, Iterator

from rollmesh.scheduler.planning.state import FIXED, FleetState, GenerationWorker, NodePhase, Owner
from rollmesh.scheduler.service.known import FOREVER, Known, UnderWay
from rollmesh.wire.scheduling import WorkerPhase


class Occupants:
    """See the module."""

    def __init__(self, state: FleetState, known: Known) -> None:
        self._state = state
        self._known = known
        self._moves = {(op.pipeline_id, op.cluster, op.rank): op for op in known.under_way}

    def move(self, pipeline_id: str, cluster: str, rank: int = FIXED) -> UnderWay | None:
        """What is under way of it."""
        return self._moves.get((pipeline_id, cluster, rank))

    def missing(self, gpus: Iterable[int]) -> dict[int, str]:
        """By GPU, who has it, or why nobody may."""
        told = {gpu: self._holder(gpu) for gpu in gpus}
        return {gpu: holder for gpu, holder in told.items() if holder}

    def leaving(self, gpus: Iterable[int], but: str = "") -> dict[int, str]:
        """By GPU, whose engine has still to go to sleep there; not of the pipeline `but`."""
        told: dict[int, str] = {}
        for op in self._known.under_way:
            if op.rank == FIXED or op.pipeline_id == but:
                continue
            who = f"{op.pipeline_id} generation worker {op.rank} goes to sleep ({self.stage(op)})"
            told.update((gpu, who) for gpu in self._worker(op).gpus if gpu in gpus)
        return told

    def stage(self, op: UnderWay) -> str:
        """How far it is, since when, and for how long at most."""
        now_s = self._state.now_s
        limit = f", at most {max(0.0, op.until_s - now_s):.1f} s more"
        return f"{op.stage} {now_s - op.since_s:.1f} s ago{limit if op.until_s < FOREVER else ''}"

    def returns(self, gpus: Iterable[int]) -> Iterator[str]:
        """What has to become of each of their nodes before anything starts there."""
        nodes = (self._state.node_of.get(gpu) for gpu in gpus)
        for name, phase in dict.fromkeys((node.name, node.phase) for node in nodes if node):
            if phase is NodePhase.DOWN:
                yield f"node {name} is up again"
            elif phase is NodePhase.DRAINING:
                yield f"node {name} is used again (rollmesh scheduler drain {name} --undo)"

    def _holder(self, gpu: int) -> str:
        """'' where it is to be had."""
        node = self._state.node_of.get(gpu)
        if node is None:
            return "of no node that has joined"
        lack = "" if node.phase is NodePhase.UP else f"its node {node.name} is {node.phase}"
        owner = self._state.owners.get(gpu)
        return "; ".join(filter(None, (self._named(owner) if owner else "", lack)))

    def _named(self, owner: Owner) -> str:
        pipeline = self._state.pipelines[owner.pipeline_id]
        if owner.rank == FIXED:
            since_s = pipeline.holds[owner.cluster].since_s
            return f"{owner.pipeline_id} {owner.cluster}, for {self._state.now_s - since_s:.1f} s"
        worker = pipeline.workers[owner.rank]
        fence = ", fenced until its coordinator tells" if worker.phase is WorkerPhase.LOST else ""
        move = self.move(*owner)
        stage = f", {self.stage(move)}" if move else ""
        return (
            f"{owner.pipeline_id} generation worker {worker.rank}, {worker.phase}"
            f"{self._for(worker)}{stage}{fence}"
        )

    def _for(self, worker: GenerationWorker) -> str:
        known = worker.since_s != -FOREVER
        return f" for {self._state.now_s - worker.since_s:.1f} s" if known else ""

    def _worker(self, op: UnderWay) -> GenerationWorker:
        return self._state.pipelines[op.pipeline_id].workers[op.rank]
