"""Random fleets: events from outside, as the service would apply them to the planner's state, and
an executor that carries plans out in random order.

- One cycle of the executor is a second; randomness comes from a seed.
- Everything that the executor grants is released eventually, and no pipeline waits for GPUs that
  only it could release.
"""

import random

from rollmesh.scheduler.planning import planner
from rollmesh.scheduler.planning.plan import PlanBuilder, ReleaseCluster, apply, worker_name
from rollmesh.scheduler.planning.planner import PolicyResult, SchedulingPolicy
from rollmesh.scheduler.planning.state import (
    FIXED,
    OWNING_PHASES,
    FleetState,
    GenerationWorker,
    GpuNode,
    NodePhase,
    Owner,
    PipelinePhase,
    PipelineState,
)
from rollmesh.wire.scheduling import (
    GENERATION_CLUSTER,
    GpuPriority,
    WorkerPhase,
)
from tests.unit.scheduler.planning.fleets import add, ask, carry_out, demand, fleet

MOVING = (WorkerPhase.WAKING, WorkerPhase.SLEEPING)


class Churn:
    """A policy that wakes and evicts at random, through the builder only."""

    name = "churn"
    reserve_after_s = 5.0

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def generate(self, builder: PlanBuilder) -> PolicyResult:
        rng = random.Random(f"{self._seed} {builder.state.now_s}")
        bundles = [(name, w) for name, p in builder.state.pipelines.items() for w in p.workers]
        rng.shuffle(bundles)
        for pipeline_id, worker in bundles:
            if builder.can_expand(pipeline_id, worker) and rng.random() < 0.7:
                self._wake(builder, pipeline_id, worker)
        return PolicyResult()

    def _wake(self, builder: PlanBuilder, pipeline_id: str, worker: GenerationWorker) -> None:
        mark = builder.mark()
        for gpu in worker.gpus:
            owner = builder.owner(gpu)
            if owner is None:
                continue
            victim = builder.state.worker_of(owner)
            if victim is None or not builder.can_evict(owner.pipeline_id, victim, pipeline_id):
                builder.rollback(mark)
                return
            builder.shrink(owner.pipeline_id, victim, worker_name(pipeline_id, worker.rank))
        if builder.can_expand(pipeline_id, worker):
            builder.expand(pipeline_id, worker)
        else:
            builder.rollback(mark)


class History:
    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.state = FleetState()
        self._num_added = 0
        first = 0
        for name in "abc"[: self.rng.randint(1, 3)]:
            num = self.rng.randint(1, 5)
            self.state.add_node(GpuNode(name=name, gpus=tuple(range(first, first + num))))
            first += num
        for _ in range(self.rng.randint(1, 4)):
            self.add_pipeline()

    # queries

    def add_pipeline(self) -> PipelineState:
        rng, tp = self.rng, self.rng.choice((1, 1, 2))
        nodes = list(self.state.nodes.values())
        bundles = [n.gpus[i : i + tp] for n in nodes for i in range(0, len(n.gpus) - tp + 1, tp)]
        bundles = rng.sample(bundles, rng.randint(0, len(bundles)))
        generation = tuple(gpu for bundle in bundles for gpu in bundle)
        self._num_added += 1
        pipeline = add(
            self.state,
            f"p{self._num_added}",
            generation,
            tp,
            max_gpus=rng.choice((0, 0, tp, 2 * tp)) if generation else 0,
            is_preemptible=rng.random() < 0.8,
        )
        for name in ("actor_train", "critic")[: rng.randint(0, 2)]:
            gpus = tuple(self.state.node_of)
            pipeline.spec.clusters[name] = tuple(rng.sample(gpus, rng.randint(1, len(gpus))))
        return pipeline

    def pipeline(self, phase: PipelinePhase = PipelinePhase.ADMITTED) -> PipelineState | None:
        chosen = [each for each in self.state.pipelines.values() if each.phase is phase]
        return self.rng.choice(chosen) if chosen else None

    def workers(self, *phases: WorkerPhase) -> list[tuple[str, GenerationWorker]]:
        """The workers in one of the phases."""
        return [
            (pipeline_id, worker)
            for pipeline_id, pipeline in self.state.pipelines.items()
            for worker in pipeline.workers
            if worker.phase in phases
        ]

    # events

    def apply_random_event(self) -> None:
        """Let time pass, then apply one event."""
        self.state.now_s += self.rng.choice((0.0, 0.5, 3.0))
        events = [
            self.ask,
            self.release,
            self.open_or_close_demand,
            self.settle_some,
            self.settle_some,
        ]
        events += [
            self.lose_worker,
            self.report_lost_workers,
            self.admit,
            self.add_or_remove_pipeline,
            self.change_node,
        ]
        self.rng.choice(events)()
        self._complete_releases()

    def ask(self) -> None:
        pipeline = self.pipeline()
        if pipeline is None:
            return
        name, requests = pipeline.pipeline_id, self.state.requests.values()
        asked = {each.cluster for each in requests if each.pipeline_id == name}
        free = [each for each in pipeline.spec.clusters if each not in {*asked, *pipeline.holds}]
        if free:
            priority = self.rng.choice(list(GpuPriority)[:-1])
            ask(self.state, pipeline.pipeline_id, self.rng.choice(free), priority)

    def release(self) -> None:
        pipeline = self.pipeline()
        if pipeline is None:
            return
        cluster = self.rng.choice([GENERATION_CLUSTER, *pipeline.holds])
        pipeline.releasing[cluster] = "release"
        if cluster == GENERATION_CLUSTER:
            pipeline.demand = None

    def open_or_close_demand(self) -> None:
        pipeline = self.pipeline()
        if pipeline and pipeline.demand:
            pipeline.demand = None
            self.state.update_waiting(pipeline)
        elif pipeline:
            demand(self.state, pipeline.pipeline_id, self.rng.randint(0, 9))

    def settle_some(self) -> None:
        for pipeline_id, worker in self.workers(*MOVING):
            if self.rng.random() < 0.6:
                self._settle(pipeline_id, worker)

    def lose_worker(self) -> None:
        """Mark a worker as lost."""
        moving = self.workers(*MOVING, WorkerPhase.AWAKE)
        if moving:
            pipeline_id, worker = self.rng.choice(moving)
            self.state.move_worker(pipeline_id, worker.rank, WorkerPhase.LOST)
            self.state.pipelines[pipeline_id].phase = PipelinePhase.QUARANTINED

    def report_lost_workers(self) -> None:
        """Report lost workers."""
        for pipeline_id, worker in self.workers(WorkerPhase.LOST):
            owner = Owner(pipeline_id, GENERATION_CLUSTER, worker.rank)
            is_owner = all(self.state.owners.get(gpu) == owner for gpu in worker.gpus)
            awake = is_owner and self.rng.random() < 0.5
            phase = WorkerPhase.AWAKE if awake else WorkerPhase.ASLEEP
            self.state.move_worker(pipeline_id, worker.rank, phase)

    def admit(self) -> None:
        for phase in (PipelinePhase.QUARANTINED, PipelinePhase.REGISTERED):
            if pipeline := self.pipeline(phase):
                pipeline.phase = PipelinePhase.ADMITTED

    def add_or_remove_pipeline(self) -> None:
        if len(self.state.pipelines) < 5:
            self.add_pipeline().phase = PipelinePhase.REGISTERED
        elif pipeline := self.pipeline():
            pipeline.phase, pipeline.demand = PipelinePhase.LEAVING, None

    def change_node(self) -> None:
        node = self.rng.choice(list(self.state.nodes.values()))
        if node.phase is not NodePhase.UP:
            self.state.add_node(GpuNode(name=node.name, gpus=node.gpus))
        elif self.rng.random() < 0.5:
            self.state.drain_node(node.name)
        else:
            self.state.lose_node(node.name)

    def repair(self) -> None:
        """Repair everything, settle all moves, and release all holds."""
        self.state.now_s += 1.0
        for node in list(self.state.nodes.values()):
            self.state.add_node(GpuNode(name=node.name, gpus=node.gpus))
        for pipeline_id, worker in self.workers(*MOVING):
            self._settle(pipeline_id, worker)
        for pipeline_id, worker in self.workers(WorkerPhase.LOST):
            self.state.move_worker(pipeline_id, worker.rank, WorkerPhase.ASLEEP)
        for pipeline in self.state.pipelines.values():
            if pipeline.phase is not PipelinePhase.LEAVING:
                pipeline.phase = PipelinePhase.ADMITTED
            pipeline.releasing.update(dict.fromkeys(pipeline.holds, "release"))
            if not pipeline.spec.is_preemptible:
                pipeline.demand = None
        self._complete_releases()

    def _settle(self, pipeline_id: str, worker: GenerationWorker) -> None:
        is_waking = worker.phase is WorkerPhase.WAKING
        phase = WorkerPhase.AWAKE if is_waking else WorkerPhase.ASLEEP
        self.state.move_worker(pipeline_id, worker.rank, phase)

    def _complete_releases(self) -> None:
        """Complete what the service completes: releases and departures."""
        for pipeline_id, pipeline in list(self.state.pipelines.items()):
            if all(worker.phase is WorkerPhase.ASLEEP for worker in pipeline.workers):
                pipeline.releasing.pop(GENERATION_CLUSTER, None)
                if pipeline.phase is PipelinePhase.LEAVING and not pipeline.holds:
                    self.state.remove_pipeline(pipeline_id)


def check_owners(state: FleetState) -> None:
    """Every GPU belongs to the owner that has it or is promised it, and to no other."""
    for gpu, owner in state.owners.items():
        pipeline = state.pipelines[owner.pipeline_id]
        if owner.rank == FIXED:
            assert owner.cluster in pipeline.holds
            assert gpu in pipeline.spec.clusters[owner.cluster]
        else:
            assert pipeline.workers[owner.rank].phase in OWNING_PHASES
            assert gpu in pipeline.workers[owner.rank].gpus
    for pipeline_id, pipeline in state.pipelines.items():
        for cluster in pipeline.holds:
            owner = Owner(pipeline_id, cluster, FIXED)
            assert all(state.owners[gpu] == owner for gpu in pipeline.spec.clusters[cluster])
        for worker in pipeline.workers:
            owner = Owner(pipeline_id, GENERATION_CLUSTER, worker.rank)
            if worker.phase in OWNING_PHASES - {WorkerPhase.LOST}:
                assert all(state.owners[gpu] == owner for gpu in worker.gpus)


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
