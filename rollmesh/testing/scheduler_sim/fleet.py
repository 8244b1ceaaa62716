"""Builds a shared fleet, lets chaos loose on it, then calm, and sees whether all came to its end.

    CHAOS (faults, crashes, kills) -> HUSH (a perfect network; lost trainers stay dead, and have
    nothing that they did not take) -> CALM (everyone up) -> at rest, or failed

Driven by `simulate`, which tests, the kept seeds and the search call.
"""

import collections

import msgspec

from rollmesh.testing.mesh_sim.kernel import Kernel, Node
from rollmesh.testing.mesh_sim.machines import REAL
from rollmesh.testing.mesh_sim.network import Network
from rollmesh.testing.scheduler_sim.clerk import SimAgent
from rollmesh.testing.scheduler_sim.draws import GPUS_A_NODE, Shape, draw
from rollmesh.testing.scheduler_sim.faults import CHAOS, FleetFaults
from rollmesh.testing.scheduler_sim.scheduler import SETTINGS, Parts, SimScheduler
from rollmesh.testing.scheduler_sim.space import Space
from rollmesh.testing.scheduler_sim.tenancy import Stage, Tenancy
from rollmesh.wire.scheduling import (
    GENERATION_CLUSTER,
    DrainNode,
    NotifyReleaseGpus,
    UndrainNode,
)

FATE_S = 0.5
CHAOS_S = 40.0
CALM_S = 400.0
REST_S = 3.0
HANG_S = (2.0, 15.0)
SILENT_S = (1.0, 12.0)
JUMP_S = (1.0, 40.0)
CUT_S = 20.0
"""Longer than the scheduler's patience."""
SLOW_S = 8.0
"""What was on its way has come, and who was told of it has looked at the time."""


class FleetReport(msgspec.Struct):
    """What one simulation saw."""

    seed: int
    num_events: int
    num_steps: int
    """Of all pipelines."""
    num_incarnations: int
    """Of the scheduler."""
    ended_s: float
    waits_s: dict[str, float]
    """The longest of each kind of ask."""
    num_dispatched: int
    """Steps whose rollouts began."""
    num_granted_asleep: int
    """Demands that were granted while no engine served."""
    faults: collections.Counter[str]
    transitions: collections.Counter[str]


class SharedFleet:
    """A scheduler, nodes, and pipelines."""

    def __init__(self, seed: int, faults: FleetFaults, shape: Shape, parts: Parts) -> None:
        self.kernel = Kernel(seed)
        self.faults = faults
        self.network = Network(self.kernel, faults, REAL)
        self.space = Space()
        self.shape = shape
        self.scheduler = SimScheduler(self.kernel, self.network, parts, shape.policy)
        self.agents = [
            SimAgent(f"n{index}", GPUS_A_NODE, self.kernel, self.network)
            for index in range(shape.num_nodes)
        ]
        self.tenancies = [
            Tenancy(plan, self.kernel, self.network, self.space, parts) for plan in shape.plans
        ]
        self.num_granted_asleep = 0
        self._granted: set[str] = set()
        self.scheduler.on_granted = self._on_granted
        self.kernel.on_killed = self._crash

    def run(self, chaos_s: float) -> None:
        """All of it; AssertionError tells what does not hold."""
        self._start()
        self._fate()
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

    # fate

    def _fate(self) -> None:
        network, rng = self.network, self.kernel.rng
        for node in self._mortals():
            if not node.alive:
                continue
            if network.strikes("freeze", FATE_S):
                node.freeze(self.kernel.now_s() + rng.expovariate(0.5))
            elif network.strikes("crash", FATE_S):
                self._crash(node)
            elif network.strikes("jump", FATE_S):
                node.ahead_s += rng.uniform(*JUMP_S)
        for tenancy in self.tenancies:
            self._trouble(tenancy)
        for agent in self.agents:
            self._trouble_node(agent)
        self.kernel.after(FATE_S, self._fate)

    def _mortals(self) -> list[Node]:
        processes = [node for each in self.tenancies for node in each.processes()]
        return [self.scheduler, *processes]

    def _trouble_node(self, agent: SimAgent) -> None:
        if agent.has_joined and not agent.num_waiting and self.network.strikes("drained", FATE_S):
            self._drain(agent)
        if self.network.strikes("silent", FATE_S):
            agent.freeze(self.kernel.now_s() + self.kernel.rng.uniform(*SILENT_S))
        elif self.network.strikes("node_lost", FATE_S):
            self._lose(agent)

    def _drain(self, agent: SimAgent) -> None:
        """By whoever has the agent's name; a second one is no more than the first."""
        name = agent.node_name
        agent.ask(DrainNode(agent.key(), name))
        agent.ask(UndrainNode(agent.key(), name))

    def _trouble(self, tenancy: Tenancy) -> None:
        network, clerk = self.network, tenancy.clerk
        if clerk.alive and clerk.num_waiting and network.strikes("verb_killed", FATE_S):
            self._crash(clerk)
        if not tenancy.processes() or tenancy.stage is not Stage.AT_WORK:
            return
        if tenancy.coordinator.alive and network.strikes("killed", FATE_S):
            tenancy.kill()
            return
        if network.strikes("left", FATE_S):
            tenancy.leave()
            return
        self._lose_trainer(tenancy)
        for engine in tenancy.engines:
            if engine.alive and network.strikes("engine_hang", FATE_S):
                until_s = self.kernel.now_s() + self.kernel.rng.uniform(*HANG_S)
                engine.freeze(until_s)
            elif engine.alive and network.strikes("engine_crash", FATE_S):
                self._crash(engine)

    def _lose_trainer(self, tenancy: Tenancy) -> None:
        """It is not heard any more, for a while or for long; or it is dead."""
        trainer = tenancy.tenant
        if self.network.strikes("cut", FATE_S):
            trainer.cut_until_s = self.kernel.now_s() + CUT_S
        if trainer.alive and self.network.strikes("lost", FATE_S):
            tenancy.is_lost = True
            trainer.crash()

    def _lose(self, agent: SimAgent) -> None:
        """The machine is gone with whatever runs there, trainers too; it comes back."""
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
                return not tenancy.is_killed and tenancy.stage is not Stage.GONE
        return True

    # the end

    def _hush(self) -> None:
        """Whoever is lost holds nothing of what it was but offered."""
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
        """What is not at rest yet, in words."""
        found = []
        for tenancy in self.tenancies:
            name, tenant = tenancy.pipeline_id, tenancy.tenant
            is_home = tenancy.stage is Stage.OVER and not tenancy.plan.leaves
            if tenancy.stage is not Stage.GONE and not is_home:
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
    parts: Parts | None = None,
    shape: Shape | None = None,
) -> FleetReport:
    """One run: events with faults, then calm until all is at rest."""
    fleet = SharedFleet(seed, faults, shape or draw(seed), parts or Parts())
    fleet.run(CHAOS_S)
    tenants = [each.tenant for each in fleet.tenancies]
    for tenancy in fleet.tenancies:
        if not (tenancy.is_killed or tenancy.is_sent_away):
            assert tenancy.tenant.num_done == tenancy.plan.num_steps
    return FleetReport(
        seed=seed,
        num_events=fleet.kernel.num_events,
        num_steps=sum(each.num_done for each in tenants),
        num_incarnations=fleet.scheduler.life + 1,
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
