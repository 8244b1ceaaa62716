"""Carries plans out in random order: moves settle, holds end, pipelines request again.

- One cycle is a second; randomness comes from a seed.
- Everything that is granted is released eventually, and no pipeline waits for what only it could
  release.
"""

import random

from rollmesh.scheduler.planning import planner
from rollmesh.scheduler.planning.plan import PlanBuilder, ReleaseCluster, apply
from rollmesh.scheduler.planning.planner import SchedulingPolicy
from rollmesh.scheduler.planning.state import FleetState
from rollmesh.wire.scheduling import GpuPriority, WorkerPhase
from tests.unit.scheduler.planning.fleets import add, ask, carry_out, demand, fleet
from tests.unit.scheduler.planning.histories import MOVING, check_owners

MOVE_CYCLES = 3
"""Upper bound on the cycles of a wake or a sleep."""
HOLD_CYCLES = 5
"""Cycles for which a cluster is held once its pipeline has all that it needs."""


class Executor:
    def __init__(
        self, seed: int, policy: SchedulingPolicy, builder_type: type[PlanBuilder] = PlanBuilder
    ) -> None:
        self.rng = random.Random(seed)
        self.policy = policy
        self.builder_type = builder_type
        self.num_gpus = self.rng.randint(2, 6)
        self.state = fleet(self.num_gpus)
        for number in range(self.rng.randint(2, 5)):
            self._add(f"p{number}")

    @property
    def bound_s(self) -> float:
        """Upper bound on a request's wait: until it is reserved; then, one after another, for each
        other set of GPUs that was requested earlier or that it waits for, until that has settled
        and is released; and one wake of its own."""
        num_sets = sum(len(each.spec.clusters) for each in self.state.pipelines.values())
        turn_s = 2 * MOVE_CYCLES + HOLD_CYCLES + 2
        return self.policy.reserve_after_s + num_sets * turn_s + MOVE_CYCLES + 1

    def _add(self, pipeline_id: str) -> None:
        rng, gpus = self.rng, range(self.num_gpus)
        generation = tuple(rng.sample(gpus, rng.randint(0, self.num_gpus)))
        pipeline = add(self.state, pipeline_id, generation)
        cut = rng.randint(1, self.num_gpus - 1)
        # A pipeline that holds the first may request the second, never the reverse: else they could
        # deadlock whatever the planner does.
        for name, part in (("actor_train", gpus[:cut]), ("critic", gpus[cut:])):
            pipeline.spec.clusters[name] = tuple(rng.sample(part, rng.randint(1, len(part))))
        if generation and rng.random() < 0.8:
            demand(self.state, pipeline_id)

    def run(self, num_cycles: int) -> float:
        """Return the longest wait of any request."""
        longest_s = 0.0
        for _ in range(num_cycles):
            self.state.now_s += 1.0
            self._come_to_rest()
            self._give_up()
            self._ask()
            waits = [self.state.now_s - each.asked_s for each in self.state.requests.values()]
            longest_s = max([longest_s, *waits])
            if self.builder_type is PlanBuilder:
                carry_out(self.state, self.policy)
            else:
                carry_out_with(self.builder_type, self.state, self.policy)
            check_owners(self.state)
        return longest_s

    def _come_to_rest(self) -> None:
        rest = {WorkerPhase.WAKING: WorkerPhase.AWAKE, WorkerPhase.SLEEPING: WorkerPhase.ASLEEP}
        for pipeline_id, pipeline in self.state.pipelines.items():
            for worker in pipeline.workers:
                is_late = self.state.now_s - worker.since_s >= MOVE_CYCLES
                if worker.phase in MOVING and (is_late or self.rng.random() < 0.4):
                    self.state.move_worker(pipeline_id, worker.rank, rest[worker.phase])

    def _give_up(self) -> None:
        asking = {each.pipeline_id for each in self.state.requests.values()}
        for pipeline_id, pipeline in self.state.pipelines.items():
            newest_s = max((each.since_s for each in pipeline.holds.values()), default=0.0)
            is_over = self.state.now_s - newest_s >= HOLD_CYCLES + MOVE_CYCLES
            if pipeline_id not in asking and (is_over or self.rng.random() < 0.1):
                pipeline.releasing.update(dict.fromkeys(pipeline.holds, "release"))

    def _ask(self) -> None:
        asking = {each.pipeline_id for each in self.state.requests.values()}
        for pipeline_id, pipeline in self.state.pipelines.items():
            if pipeline_id in asking or pipeline.releasing or self.rng.random() < 0.5:
                continue
            holds = set(pipeline.holds)
            clusters = {"critic"} if holds == {"actor_train"} else {"actor_train", "critic"}
            if not holds or (holds == {"actor_train"} and self.rng.random() < 0.3):
                cluster = self.rng.choice(sorted(clusters))
                ask(self.state, pipeline_id, cluster, self.rng.choice(list(GpuPriority)[:-1]))


def carry_out_with(
    builder_type: type[PlanBuilder], state: FleetState, policy: SchedulingPolicy
) -> None:
    """Plan and apply with another builder, without proof."""
    for pipeline_id, pipeline in state.pipelines.items():
        for cluster in set(pipeline.releasing) & set(pipeline.holds):
            apply(state, ReleaseCluster(pipeline_id, cluster))
    builder = builder_type(state)
    planner.serve_requests(builder, policy.reserve_after_s)
    policy.generate(builder)
    for op in builder.ops:
        apply(state, op)
