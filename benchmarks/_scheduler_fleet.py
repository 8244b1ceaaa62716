"""Fleets to plan for: nodes of eight GPUs, pipelines on blocks or on random nodes, changing demand.

Owns the planner's state in the benchmark. Invariant: a fleet is a function of its sizes and seed.
Pipelines have eight times the fleet's GPUs in their maps together, a quarter of them each with
workers of 1, 1, 2 and 4 GPUs; half of them stand on neighbouring nodes, half on random ones; each
trains on the first GPUs of its map. Driven by scheduler.py.
"""

import random

from rollmesh.scheduler.planning.plan import Expand, GpuPlan, Shrink, apply
from rollmesh.scheduler.planning.state import (
    Demand,
    FleetState,
    GpuNode,
    PipelinePhase,
    PipelineState,
    StreamProgress,
)
from rollmesh.wire.scheduling import PipelineSpec, WorkerPhase

NODE_GPUS = 8
MAPPED = 8
"""So many maps name a GPU, in the mean."""
REST = {WorkerPhase.WAKING: WorkerPhase.AWAKE, WorkerPhase.SLEEPING: WorkerPhase.ASLEEP}


class PlannedFleet:
    """See the module."""

    def __init__(self, num_gpus: int, num_pipelines: int, seed: int = 0) -> None:
        self.state = FleetState()
        self._chance = random.Random(seed)
        num_nodes = num_gpus // NODE_GPUS
        for number in range(num_nodes):
            gpus = tuple(range(number * NODE_GPUS, number * NODE_GPUS + NODE_GPUS))
            self.state.add_node(GpuNode(name=f"n{number}", gpus=gpus))
        num_each = min(num_nodes, max(1, MAPPED * num_nodes // num_pipelines))
        for number in range(num_pipelines):
            self._add(number, self._nodes(number, num_nodes, num_each))
        for number, pipeline in enumerate(self.state.pipelines.values()):
            if number % 2:
                self._open(pipeline)

    def carry_out(self, plan: GpuPlan) -> None:
        """All of it, and at once."""
        state = self.state
        for op in plan.ops:
            apply(state, op)
        for pipeline_id, credit in plan.credits.items():
            state.pipelines[pipeline_id].credit_gpu_s = credit
        state.credited_s, state.fair_shares = state.now_s, plan.fair_shares
        moved = {op.pipeline_id for op in plan.ops if isinstance(op, Shrink | Expand)}
        for pipeline_id in moved:
            for worker in state.pipelines[pipeline_id].workers:
                phase = REST.get(worker.phase, worker.phase)
                state.move_worker(pipeline_id, worker.rank, phase)

    def change(self) -> None:
        """A second later one demand begins or ends, and another has made progress."""
        self.state.now_s += 1.0
        one, other = self._chance.sample(list(self.state.pipelines.values()), 2)
        if one.demand is None:
            self._open(one)
        else:
            one.demand, one.progress = None, {}
        self.state.update_waiting(one)
        if other.demand is not None:
            completed = self._chance.randrange(other.demand.estimate)
            target = other.demand.estimate
            other.progress = {"train": StreamProgress(batch=0, target=target, completed=completed)}

    def _nodes(self, number: int, num_nodes: int, num_each: int) -> list[int]:
        if number % 4 < 2:
            first = self._chance.randrange(num_nodes - num_each + 1)
            return list(range(first, first + num_each))
        return sorted(self._chance.sample(range(num_nodes), num_each))

    def _add(self, number: int, nodes: list[int]) -> None:
        gpus = tuple(node * NODE_GPUS + gpu for node in nodes for gpu in range(NODE_GPUS))
        spec = PipelineSpec(
            pipeline_id=f"p{number}",
            clusters={"actor_train": gpus[:4]},
            generation=gpus,
            tp=(1, 1, 2, 4)[number // 4 % 4],
            weight=self._chance.choice((1.0, 1.0, 2.0)),
            rollouts_per_worker=4,
        )
        self.state.add_pipeline(spec).phase = PipelinePhase.ADMITTED

    def _open(self, pipeline: PipelineState) -> None:
        pipeline.demand = Demand(
            key=f"{pipeline.pipeline_id}-demand",
            estimate=self._chance.choice((64, 128, 256)),
            opened_s=self.state.now_s,
        )
        self.state.update_waiting(pipeline)
