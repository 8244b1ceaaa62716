"""A toy executor: wakes and sleeps come to rest in any order, holds end, pipelines ask again.

Owns a state and a seeded source of chance; a cycle is a second. Invariant: whatever is granted is
given up in the end, and nobody waits for what only it could give up. Driven by test_fixed.py.
"""

import random

from rollmesh.scheduler.planning import fixed
from rollmesh.scheduler.planning.draft import Draft
from rollmesh.scheduler.planning.ops import Release, apply
from rollmesh.scheduler.planning.plan import Policy
from rollmesh.scheduler.planning.state import State
from rollmesh.wire.scheduling import GpuPriority, WorkerPhase
from tests.unit.scheduler.planning.fleets import add, ask, carry_out, demand, fleet
from tests.unit.scheduler.planning.histories import MOVING, check_owners

MOVE_CYCLES = 3
"""A wake or a sleep takes so many at most."""
HOLD_CYCLES = 5
"""So long a cluster is held that has all that it needs."""


class Executor:
    """Carries plans out, and has pipelines ask."""

    def __init__(self, seed: int, policy: Policy, draft_type: type[Draft] = Draft) -> None:
        self.rng = random.Random(seed)
        self.policy = policy
        self.draft_type = draft_type
        self.num_gpus = self.rng.randint(2, 6)
        self.state = fleet(self.num_gpus)
        for number in range(self.rng.randint(2, 5)):
            self._add(f"p{number}")

    @property
    def bound_s(self) -> float:
        """What a request waits at most: until it is reserved; then, in turn, for each other device
        set that was asked for before or that it waits for, until that has settled and is given up;
        and for one wake of its own."""
        num_sets = sum(len(each.spec.clusters) for each in self.state.pipelines.values())
        turn_s = 2 * MOVE_CYCLES + HOLD_CYCLES + 2
        return self.policy.reserve_after_s + num_sets * turn_s + MOVE_CYCLES + 1

    def _add(self, pipeline_id: str) -> None:
        rng, gpus = self.rng, range(self.num_gpus)
        generation = tuple(rng.sample(gpus, rng.randint(0, self.num_gpus)))
        pipeline = add(self.state, pipeline_id, generation)
        cut = rng.randint(1, self.num_gpus - 1)
        # Who holds the first may ask for the second: all in one order, for else pipelines would
        # wait for one another whatever a planner does.
        for name, part in (("actor_train", gpus[:cut]), ("critic", gpus[cut:])):
            pipeline.spec.clusters[name] = tuple(rng.sample(part, rng.randint(1, len(part))))
        if generation and rng.random() < 0.8:
            demand(self.state, pipeline_id)

    def run(self, num_cycles: int) -> float:
        """The longest that any request has waited."""
        longest_s = 0.0
        for _ in range(num_cycles):
            self.state.now_s += 1.0
            self._come_to_rest()
            self._give_up()
            self._ask()
            waits = [self.state.now_s - each.asked_s for each in self.state.requests.values()]
            longest_s = max([longest_s, *waits])
            if self.draft_type is Draft:
                carry_out(self.state, self.policy)
            else:
                carry_out_with(self.draft_type, self.state, self.policy)
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


def carry_out_with(draft_type: type[Draft], state: State, policy: Policy) -> None:
    """What a planner with another draft would do, unproven."""
    for pipeline_id, pipeline in state.pipelines.items():
        for cluster in set(pipeline.releasing) & set(pipeline.holds):
            apply(state, Release(pipeline_id, cluster))
    draft = draft_type(state)
    fixed.serve(draft, policy.reserve_after_s)
    policy.generate(draft)
    for op in draft.ops:
        apply(state, op)
