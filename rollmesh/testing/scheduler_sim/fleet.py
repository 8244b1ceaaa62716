"""Builds a shared fleet, runs it with faults and then without, and checks that everything ends.

    CHAOS (faults, crashes, kills) -> HUSH (a perfect network; lost trainers stay dead, and have
    nothing that they did not take) -> CALM (all up) -> at rest, or failed

    a pipeline: (starts) > registered > admitted > at work > over > unregistered
                any > killed > unregistered

- A killed or departed pipeline has no process and occupies no GPU.
"""

import collections
import enum

import msgspec

from rollmesh.core.secret_files import hash_token
from rollmesh.testing.mesh_sim.kernel import Kernel, Node
from rollmesh.testing.mesh_sim.machines import REAL
from rollmesh.testing.mesh_sim.network import Network
from rollmesh.testing.scheduler_sim.coordinator import SimCoordinator
from rollmesh.testing.scheduler_sim.engine import GpuOccupancy, SharedEngine
from rollmesh.testing.scheduler_sim.faults import CHAOS, FleetFaults
from rollmesh.testing.scheduler_sim.plans import GPUS_A_NODE, FleetDraw, PipelinePlan, draw
from rollmesh.testing.scheduler_sim.router import PipelineRouter
from rollmesh.testing.scheduler_sim.rpc_client import RpcClient, SimAgent
from rollmesh.testing.scheduler_sim.scheduler import SETTINGS, SchedulerParts, SimScheduler
from rollmesh.testing.scheduler_sim.trainer import PipelineTrainer, token_of
from rollmesh.wire.scheduling import (
    GENERATION_CLUSTER,
    AdmitPipeline,
    DrainNode,
    KillPipeline,
    NotifyReleaseGpus,
    RegisterPipeline,
    UndrainNode,
    UnregisterPipeline,
)

LOOK_S = 0.5


class PipelineStage(enum.StrEnum):
    """Life cycle of a pipeline."""

    NOT_YET = "not yet"
    AT_WORK = "at work"
    LEAVING = "leaving"
    OVER = "over"
    """Registered, and wants nothing."""
    GONE = "gone"


class SimPipeline:
    """Life cycle of a pipeline."""

    def __init__(
        self,
        plan: PipelinePlan,
        kernel: Kernel,
        network: Network,
        space: GpuOccupancy,
        parts: SchedulerParts,
    ) -> None:
        spec = plan.spec
        self.plan = plan
        self.stage = PipelineStage.NOT_YET
        self.is_killed = False
        self.is_sent_away = False
        self.is_lost = False
        """Its trainer is dead, and does not return yet."""
        starts = range(0, len(spec.generation), spec.tp)
        bundles = [spec.generation[start : start + spec.tp] for start in starts]
        self.engines = [
            SharedEngine(f"engine-{spec.pipeline_id}-{rank}", gpus, kernel, network, space)
            for rank, gpus in enumerate(bundles)
        ]
        self.coordinator = SimCoordinator(
            spec.pipeline_id, self.engines, kernel, network, parts.coordinator
        )
        self.router = PipelineRouter(spec.pipeline_id, self.engines, kernel, network)
        num_serving = self.router.num_serving
        self.tenant = PipelineTrainer(plan, kernel, network, space, num_serving, parts.claims)
        self.clerk = RpcClient(
            f"admission-{spec.pipeline_id}", kernel, network, token_of(spec.pipeline_id)
        )
        self._kernel = kernel

    @property
    def pipeline_id(self) -> str:
        return self.plan.spec.pipeline_id

    def processes(self) -> list[Node]:
        """Nodes that may die and restart."""
        if self.is_killed or self.stage in (PipelineStage.NOT_YET, PipelineStage.GONE):
            return []
        return [self.coordinator, self.router, *[self.tenant] * (not self.is_lost)]

    def all_nodes(self) -> list[Node]:
        return [self.tenant, self.coordinator, self.router, *self.engines]

    def start(self) -> None:
        """Start it at its time."""
        self.stage = PipelineStage.AT_WORK
        clerk = self.clerk
        clerk.start()
        token_hash = hash_token(token_of(self.pipeline_id))
        clerk.ask(RegisterPipeline(clerk.key(), self.plan.spec, token_hash=token_hash))
        clerk.ask(AdmitPipeline(clerk.key(), self.pipeline_id))
        self.router.start()
        self.coordinator.start()
        self.tenant.start()
        self._look()

    def kill(self) -> None:
        """Kill all of its processes at once; the killer reports it."""
        self.is_killed = True
        self._end_processes()
        self.stage = PipelineStage.LEAVING
        clerk = self.clerk
        clerk.ask(KillPipeline(clerk.key(), self.pipeline_id))
        clerk.ask(UnregisterPipeline(clerk.key(), self.pipeline_id), self._gone)

    def leave(self) -> None:
        """Unregister it while it works; its run ends once it is refused."""
        self.is_sent_away = True
        self.stage = PipelineStage.LEAVING
        self.clerk.ask(UnregisterPipeline(self.clerk.key(), self.pipeline_id), self._gone)

    def _look(self) -> None:
        if self.stage is PipelineStage.AT_WORK and self.tenant.is_over:
            self.stage = PipelineStage.OVER
            if self.plan.leaves:
                self.stage = PipelineStage.LEAVING
                ask = UnregisterPipeline(self.clerk.key(), self.pipeline_id)
                self.clerk.ask(ask, self._gone)
        if self.stage is PipelineStage.AT_WORK:
            self._kernel.after(LOOK_S, self._look)

    def _gone(self) -> None:
        standing = [engine.name for engine in self.engines if engine.has_memory]
        assert not standing, f"{self.pipeline_id} is said to be gone, and {standing} are awake"
        assert not self.tenant.is_training, f"{self.pipeline_id} is said to be gone, and trains"
        self.stage = PipelineStage.GONE
        self._end_processes()

    def _end_processes(self) -> None:
        for node in self.all_nodes():
            if node.alive:
                node.crash()


FAULTS_S = 0.5
CHAOS_S = 40.0
CALM_S = 400.0
REST_S = 3.0
HANG_S = (2.0, 15.0)
SILENT_S = (1.0, 12.0)
JUMP_S = (1.0, 40.0)
CUT_S = 20.0
"""Longer than the scheduler's patience."""
SLOW_S = 8.0
"""Time for messages on their way, and for timeouts that follow from them."""


class FleetReport(msgspec.Struct):
    """Counts of one simulation."""

    seed: int
    num_events: int
    num_steps: int
    """Steps of all pipelines."""
    num_incarnations: int
    """Incarnations of the scheduler."""
    ended_s: float
    waits_s: dict[str, float]
    """The longest wait of each kind of request."""
    num_dispatched: int
    """Steps whose rollouts began."""
    num_granted_asleep: int
    """Demands that were granted while no engine served."""
    faults: collections.Counter[str]
    transitions: collections.Counter[str]


class SharedFleet:
    """A scheduler, nodes, and pipelines."""

    def __init__(
        self, seed: int, faults: FleetFaults, shape: FleetDraw, parts: SchedulerParts
    ) -> None:
        self.kernel = Kernel(seed)
        self.faults = faults
        self.network = Network(self.kernel, faults, REAL)
        self.space = GpuOccupancy()
        self.shape = shape
        self.scheduler = SimScheduler(self.kernel, self.network, parts, shape.policy)
        self.agents = [
            SimAgent(f"n{index}", GPUS_A_NODE, self.kernel, self.network)
            for index in range(shape.num_nodes)
        ]
        self.tenancies = [
            SimPipeline(plan, self.kernel, self.network, self.space, parts) for plan in shape.plans
        ]
        self.num_granted_asleep = 0
        self._granted: set[str] = set()
        self.scheduler.on_granted = self._on_granted
        self.kernel.on_killed = self._crash

    def run(self, chaos_s: float) -> None:
        """Run all of it; an AssertionError says what does not hold."""
        self._start()
        self._inject_faults()
        self.kernel.run(10**9, chaos_s)
        self._hush()
        self._calm()

    # the beginning

    def _start(self) -> None:
        self.kernel.after(0.0, self.scheduler.start, self.scheduler)
        # One after the other, so that the numbers of their GPUs are known.
        starts = [agent.start for agent in self.agents[1:]]
        self.agents[0].start()
        for agent, then in zip(self.agents, [*starts, self._welcome], strict=True):
            agent.joined = then

    def _welcome(self) -> None:
        for tenancy in self.tenancies:
            self.kernel.after(tenancy.plan.starts_s, tenancy.start)

    def _on_granted(self, key: str) -> None:
        for tenancy in self.tenancies:
            ask, _ = tenancy.tenant.asked.get(key, (None, 0.0))
            is_new = ask and ask.cluster == GENERATION_CLUSTER and key not in self._granted
            if is_new and not isinstance(ask, NotifyReleaseGpus):
                self._granted.add(key)
                self.num_granted_asleep += not tenancy.router.num_serving()

    # faults

    def _inject_faults(self) -> None:
        network, rng = self.network, self.kernel.rng
        for node in self._mortals():
            if not node.alive:
                continue
            if network.strikes("freeze", FAULTS_S):
                node.freeze(self.kernel.now_s() + rng.expovariate(0.5))
            elif network.strikes("crash", FAULTS_S):
                self._crash(node)
            elif network.strikes("jump", FAULTS_S):
                node.ahead_s += rng.uniform(*JUMP_S)
        for tenancy in self.tenancies:
            self._trouble(tenancy)
        for agent in self.agents:
            self._trouble_node(agent)
        self.kernel.after(FAULTS_S, self._inject_faults)

    def _mortals(self) -> list[Node]:
        processes = [node for each in self.tenancies for node in each.processes()]
        return [self.scheduler, *processes]

    def _trouble_node(self, agent: SimAgent) -> None:
        if agent.has_joined and not agent.num_waiting and self.network.strikes("drained", FAULTS_S):
            self._drain(agent)
        if self.network.strikes("silent", FAULTS_S):
            agent.freeze(self.kernel.now_s() + self.kernel.rng.uniform(*SILENT_S))
        elif self.network.strikes("node_lost", FAULTS_S):
            self._lose(agent)

    def _drain(self, agent: SimAgent) -> None:
        """Kill by the holder of the agent's name; a second one changes nothing."""
        name = agent.node_name
        agent.ask(DrainNode(agent.key(), name))
        agent.ask(UndrainNode(agent.key(), name))

    def _trouble(self, tenancy: SimPipeline) -> None:
        network, clerk = self.network, tenancy.clerk
        if clerk.alive and clerk.num_waiting and network.strikes("verb_killed", FAULTS_S):
            self._crash(clerk)
        if not tenancy.processes() or tenancy.stage is not PipelineStage.AT_WORK:
            return
        if tenancy.coordinator.alive and network.strikes("killed", FAULTS_S):
            tenancy.kill()
            return
        if network.strikes("left", FAULTS_S):
            tenancy.leave()
            return
        self._lose_trainer(tenancy)
        for engine in tenancy.engines:
            if engine.alive and network.strikes("engine_hang", FAULTS_S):
                until_s = self.kernel.now_s() + self.kernel.rng.uniform(*HANG_S)
                engine.freeze(until_s)
            elif engine.alive and network.strikes("engine_crash", FAULTS_S):
                self._crash(engine)

    def _lose_trainer(self, tenancy: SimPipeline) -> None:
        """Cut it off for a while, or kill it."""
        trainer = tenancy.tenant
        if self.network.strikes("cut", FAULTS_S):
            trainer.cut_until_s = self.kernel.now_s() + CUT_S
        if trainer.alive and self.network.strikes("lost", FAULTS_S):
            tenancy.is_lost = True
            trainer.crash()

    def _lose(self, agent: SimAgent) -> None:
        """Stop the machine with everything that runs there, trainers included; it returns."""
        index = self.agents.index(agent)
        gpus = set(range(index * GPUS_A_NODE, (index + 1) * GPUS_A_NODE))
        for tenancy in self.tenancies:
            here = [each for each in tenancy.engines if gpus & set(each.gpus)]
            for node in [*here, *tenancy.processes()]:
                if node.alive:
                    self._crash(node)
        self._crash(agent)

    def _crash(self, node: Node) -> None:
        node.crash()

        def rise() -> None:
            if not node.alive and self._may_rise(node):
                node.restart()

        self.kernel.after(self.kernel.rng.uniform(0.1, 4.0), rise)

    def _may_rise(self, node: Node) -> bool:
        for tenancy in self.tenancies:
            if node is tenancy.tenant and tenancy.is_lost:
                return False
            if node in tenancy.all_nodes():
                return not tenancy.is_killed and tenancy.stage is not PipelineStage.GONE
        return True

    # the end

    def _hush(self) -> None:
        """Assert that a lost pipeline holds nothing of what was only offered to it."""
        self.network.faults = FleetFaults()
        lost = [tenancy for tenancy in self.tenancies if tenancy.is_lost]
        if not lost:
            return
        if not self.scheduler.alive:
            self.scheduler.restart()
        begins_s = max(self.kernel.now_s(), self.scheduler.frozen_until_s)
        self.kernel.run(10**9, begins_s + SETTINGS.patience_s + SLOW_S)
        for tenancy in lost:
            waits, holds = self.scheduler.fixed_of(tenancy.pipeline_id)
            name, taken = tenancy.pipeline_id, tenancy.tenant.taken
            assert not waits, f"{name} is dead, and waits for {waits}"
            assert holds <= taken, f"{name} is dead, has taken {taken}, and holds {holds}"
            tenancy.is_lost = False

    def _calm(self) -> None:
        engines = [engine for each in self.tenancies for engine in each.engines]
        clerks = [each.clerk for each in self.tenancies]
        for node in [*self._mortals(), *engines, *clerks]:
            if not node.alive and self._may_rise(node):
                node.restart()
        deadline_s = self.kernel.now_s() + CALM_S
        resting_since_s = self.kernel.now_s()
        while self.kernel.now_s() < resting_since_s + REST_S:
            if found := self.unsettled():
                resting_since_s = self.kernel.now_s()
                assert resting_since_s < deadline_s, "; ".join(found)
            self.kernel.run(10**9, self.kernel.now_s() + 1.0)

    def unsettled(self) -> list[str]:
        """Return what is not at rest yet."""
        found = []
        for tenancy in self.tenancies:
            name, tenant = tenancy.pipeline_id, tenancy.tenant
            is_home = tenancy.stage is PipelineStage.OVER and not tenancy.plan.leaves
            if tenancy.stage is not PipelineStage.GONE and not is_home:
                waits = [str(ask) for ask, _ in tenant.asked.values()]
                done = f"{tenant.num_done} steps, {tenant.num_left} rollouts left, waits {waits}"
                found.append(f"{name} is {tenancy.stage}: {done}")
            if tenancy.clerk.num_waiting:
                found.append(f"{name}: admission waits")
            found += [f"{each.name} is awake" for each in tenancy.engines if each.has_memory]
        found += [f"GPU {gpu} is used by {user}" for gpu, user in self.space.users().items()]
        return found + self.scheduler.leftovers()


def simulate(
    seed: int,
    faults: FleetFaults = CHAOS,
    parts: SchedulerParts | None = None,
    shape: FleetDraw | None = None,
) -> FleetReport:
    """Run one seed: events with faults, then none until all is at rest."""
    fleet = SharedFleet(seed, faults, shape or draw(seed), parts or SchedulerParts())
    fleet.run(CHAOS_S)
    tenants = [each.tenant for each in fleet.tenancies]
    for tenancy in fleet.tenancies:
        if not (tenancy.is_killed or tenancy.is_sent_away):
            assert tenancy.tenant.num_done == tenancy.plan.num_steps
    return FleetReport(
        seed=seed,
        num_events=fleet.kernel.num_events,
        num_steps=sum(each.num_done for each in tenants),
        num_incarnations=fleet.scheduler.num_crashes + 1,
        ended_s=max(each.ended_s for each in tenants),
        waits_s={
            kind: max(each.waits_s.get(kind, 0.0) for each in tenants)
            for kind in sorted({kind for each in tenants for kind in each.waits_s})
        },
        num_dispatched=sum(each.num_dispatched for each in tenants),
        num_granted_asleep=fleet.num_granted_asleep,
        faults=fleet.network.num,
        transitions=fleet.network.transitions.num,
    )
