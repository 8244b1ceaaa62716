"""Builds a mesh, runs it with faults and then without, and checks that everything ends.

CHAOS (faults, crashes, freezes) -> CALM (a perfect network, all up) -> at rest, or failed
"""

import collections
from collections.abc import Sequence

import msgspec

from rollmesh.testing.mesh_sim.checks import look_at_ends, look_at_journal, unsettled
from rollmesh.testing.mesh_sim.engine import SimEngine
from rollmesh.testing.mesh_sim.hostile_peers import FuzzPeer, ResultForger
from rollmesh.testing.mesh_sim.kernel import Kernel, Node
from rollmesh.testing.mesh_sim.machines import REAL, StepMachines
from rollmesh.testing.mesh_sim.network import FaultChances, Network
from rollmesh.testing.mesh_sim.rollouts import POISON
from rollmesh.testing.mesh_sim.router import SimRouter
from rollmesh.testing.mesh_sim.trainer import SimTrainer
from rollmesh.testing.mesh_sim.transient_client import TransientClient
from rollmesh.testing.mesh_sim.worker import SimLaunch, SimWorker

CHAOS = FaultChances(
    drop=0.05,
    duplicate=0.05,
    slow=0.05,
    call_error=0.05,
    crash=0.15,
    freeze=0.1,
    cancel=0.01,
    not_kept=0.02,
    reader_left=0.03,
    poison=0.08,
    deadline=0.15,
    stall=0.05,
    recycle=0.03,
    full=0.05,
    drain=0.03,
    stop=0.03,
    jump=0.01,
    moved=0.2,
    env_failed=0.05,
    double_client=0.15,
    lie=0.05,
    nonsense=2.0,
    forged=4.0,
    malformed=0.1,
    straggler=0.15,
    agent_failed=0.15,
    killed_before_write=0.008,
    killed_after_write=0.012,
    disk_full=0.02,
    save_failed=0.15,
    save_broke=0.2,
    zombie=0.4,
)
SHORT, LONG = (600, 8), (3000, 30)
"""Least number of events with faults, and of groups of the trainer."""
LONG_DIGIT = 5
"""Events of seeds with a long phase of faults."""
FAULTS_S = 0.25
"""Interval at which faults of nodes are drawn."""
CALM_S = 120.0
"""Virtual time after the faults in which everything must come to rest."""
REST_S = 2.0
"""Virtual time for which it must stay at rest."""
JUMP_S = 60.0
NUM_WORKERS = 4
"""Engines; the last one joins later, every other one runs on another machine."""
MAX_VISITORS = 5
VISITOR_GROUPS = 8


class SimReport(msgspec.Struct):
    """Counts of one simulation."""

    seed: int
    num_events: int
    num_groups: int
    num_results: int
    num_visitor_groups: int
    num_visitor_results: int
    num_quarantined: int
    num_poisonous: int
    num_kills: int
    num_trained: int
    num_steps: int
    num_incarnations: int
    num_redone: int
    """Steps of all incarnations of the trainer."""
    faults: collections.Counter[str]
    transitions: collections.Counter[str]


class SimMesh:
    """A trainer and other clients, one router, workers and engines."""

    def __init__(
        self, seed: int, faults: FaultChances, num_groups: int, machines: StepMachines
    ) -> None:
        self.kernel = Kernel(seed)
        self.network = Network(self.kernel, faults, machines)
        names = ["engine-0", "engine-1"]
        self.engines = {name: SimEngine(name, self.kernel, self.network) for name in names}
        self.router = SimRouter(self.kernel, self.network, self.engines)
        self.client = SimTrainer(self.kernel, self.network, self.engines, num_groups)
        self.kernel.on_killed = self._crash
        self.launch = SimLaunch(self.kernel, self.network)
        self.workers = [self._new_worker(index) for index in range(NUM_WORKERS)]
        self.visitors: list[TransientClient] = []
        self._vandal = FuzzPeer(self.kernel, self.network)
        self._forger = ResultForger(self.kernel, self.network)

    def start(self) -> None:
        for node in (self.router, *self.workers[:-1]):
            node.start()
        self.kernel.after(0.0, self.client.start, self.client)
        self.workers[-1].alive = False
        self.launch.raise_in(self.kernel.rng.uniform(0.0, 3.0), self.workers[-1])
        self._welcome(keep=True)
        self._welcome(keep=False)
        if self.network.strikes("double_client"):
            self._welcome(keep=True, client_id=self.visitors[0].name)

    def chaos(self, num_events: int) -> None:
        """Run `num_events` events with faults."""
        self._inject_faults()
        self.kernel.run(num_events, float("inf"))

    def calm(self) -> None:
        """Stop all faults; a freeze ends by itself. AssertionError if all is not at rest in
        time.
        """
        self.network.faults = FaultChances()
        self.client.lay_zombies()
        for node in [*self._mortals(), *self.visitors]:
            if not node.alive and not (isinstance(node, TransientClient) and node.is_gone):
                node.restart()
        deadline_s = self.kernel.now_s() + CALM_S
        resting_since_s = self.kernel.now_s()
        while self.kernel.now_s() < resting_since_s + REST_S:
            # A slow message of the chaos may still stir things up for a moment.
            if found := self._unsettled():
                resting_since_s = self.kernel.now_s()
                assert resting_since_s < deadline_s, "; ".join(found)
            self._run_for(0.5)
        look_at_ends(self.visitors, self.workers, self.launch)
        look_at_journal(self.client)
        self.client.check_left()

    def _run_for(self, seconds: float) -> None:
        until_s = self.kernel.now_s() + seconds
        self.kernel.run(10**9, until_s)

    def _unsettled(self) -> list[str]:
        engines = list(self.engines.values())
        return unsettled(self.client, self.visitors, self.router, self.workers, engines)

    def _new_worker(self, index: int) -> SimWorker:
        return SimWorker(
            f"worker-{index}",
            self.kernel,
            self.network,
            self.engines,
            self.launch,
            is_local=index % 2 == 0,
        )

    def _welcome(self, *, keep: bool, client_id: str = "") -> None:
        name = f"visitor-{len(self.visitors)}"
        visitor = TransientClient(
            name, self.kernel, self.network, VISITOR_GROUPS, keep=keep, client_id=client_id
        )
        self.visitors.append(visitor)
        visitor.start()

    def _mortals(self) -> Sequence[Node]:
        return [self.router, self.client, *self.workers, *self.engines.values()]

    def _inject_faults(self) -> None:
        network, rng = self.network, self.kernel.rng
        for node in [*self._mortals(), *self.visitors]:
            if not node.alive:
                continue
            if network.strikes("freeze", FAULTS_S):
                node.freeze(self.kernel.now_s() + rng.expovariate(0.7))
            elif network.strikes("jump", FAULTS_S):
                node.ahead_s += JUMP_S
            elif network.strikes("crash", FAULTS_S):
                self._crash(node)
        for worker in self.workers:
            if worker.alive:
                self._trouble(worker)
        if network.strikes("nonsense", FAULTS_S):
            names = [self.router.name, self.client.name]
            self._vandal.act([*names, *(each.name for each in self.workers)])
        self._forger.act([self.client, *self.visitors], FAULTS_S)
        self.kernel.after(FAULTS_S, self._inject_faults)

    def _trouble(self, worker: SimWorker) -> None:
        if self.network.strikes("stall", FAULTS_S):
            worker.stall(self.kernel.now_s() + self.kernel.rng.expovariate(0.7))
        elif self.network.strikes("recycle", FAULTS_S):
            worker.wear_out()
        elif self.network.strikes("full", FAULTS_S):
            worker.full_until_s = self.kernel.now_s() + self.kernel.rng.expovariate(0.5)
        elif self.network.strikes("drain", FAULTS_S):
            self.launch.drain(worker)
        elif self.network.strikes("stop", FAULTS_S):
            worker.stop()

    def _crash(self, node: Node) -> None:
        if isinstance(node, TransientClient) and not node.keep:
            self._see_off(node)
            return
        node.crash()
        if isinstance(node, SimWorker):
            return  # its parent sees to it

        def rise() -> None:
            if not node.alive:
                node.restart()

        self.kernel.after(self.kernel.rng.uniform(0.1, 2.0), rise)

    def _see_off(self, visitor: TransientClient) -> None:
        """A client leaves for good, with or without a goodbye; another may come."""
        if self.kernel.rng.random() < 0.3:
            self.network.num["goodbye"] += 1
            visitor.say_goodbye()
        else:
            self.network.num["vanish"] += 1
            visitor.crash()
        if len(self.visitors) < MAX_VISITORS:
            self._welcome(keep=False)


def simulate(seed: int, faults: FaultChances = CHAOS, machines: StepMachines = REAL) -> SimReport:
    """Run one seed: events with faults, then none until all is at rest.

    An AssertionError says what does not hold. Every tenth seed has a long phase of faults.
    """
    num_events, num_groups = LONG if seed % 10 == LONG_DIGIT else SHORT
    mesh = SimMesh(seed, faults, num_groups, machines)
    mesh.start()
    mesh.chaos(num_events)
    mesh.calm()
    client = mesh.client
    return SimReport(
        seed=seed,
        num_events=mesh.kernel.num_events,
        num_groups=len(client.witness.asked),
        num_results=client.endings.num_results,
        num_visitor_groups=sum(len(visitor.asked) for visitor in mesh.visitors),
        num_visitor_results=sum(visitor.endings.num_results for visitor in mesh.visitors),
        num_quarantined=sum(
            reason.startswith("quarantined")
            for visitor in mesh.visitors
            for reason in visitor.endings.reasons.values()
        ),
        num_poisonous=sum(
            asked.body == POISON for visitor in mesh.visitors for asked in visitor.asked.values()
        ),
        num_kills=sum(sum(worker.kills.values()) for worker in mesh.workers),
        num_trained=client.witness.num_trained,
        num_steps=len(client.witness.steps),
        num_incarnations=client.num_crashes + 1,
        num_redone=client.witness.num_redone,
        faults=mesh.network.num,
        transitions=mesh.network.transitions.num,
    )
