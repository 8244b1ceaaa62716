"""One simulated pipeline with all that belongs to it, from its registration to its end.

    (starts) > registered > admitted > at work > over > unregistered;  any > killed > unregistered

Invariant: who is killed or has left has no process and stands on no GPU. Driven by fleet.py.
"""

import enum

from rollmesh.core.secret_files import hash_token
from rollmesh.testing.mesh_sim.kernel import Kernel, Node
from rollmesh.testing.mesh_sim.network import Network
from rollmesh.testing.scheduler_sim.clerk import Clerk
from rollmesh.testing.scheduler_sim.coordinator import SimCoordinator
from rollmesh.testing.scheduler_sim.engine import SimEngine
from rollmesh.testing.scheduler_sim.plans import TenantPlan
from rollmesh.testing.scheduler_sim.router import SimRouter
from rollmesh.testing.scheduler_sim.scheduler import Parts
from rollmesh.testing.scheduler_sim.space import Space
from rollmesh.testing.scheduler_sim.tenant import SimTenant, token_of
from rollmesh.wire.scheduling import (
    AdmitPipeline,
    KillPipeline,
    RegisterPipeline,
    UnregisterPipeline,
)

LOOK_S = 0.5


class Stage(enum.StrEnum):
    """See the module."""

    NOT_YET = "not yet"
    AT_WORK = "at work"
    LEAVING = "leaving"
    OVER = "over"
    """Registered for good, and wants nothing."""
    GONE = "gone"


class Tenancy:
    """See the module."""

    def __init__(
        self,
        plan: TenantPlan,
        kernel: Kernel,
        network: Network,
        space: Space,
        parts: Parts,
    ) -> None:
        spec = plan.spec
        self.plan = plan
        self.stage = Stage.NOT_YET
        self.is_killed = False
        self.is_sent_away = False
        self.is_lost = False
        """Its trainer is dead, and does not come back yet."""
        starts = range(0, len(spec.generation), spec.tp)
        bundles = [spec.generation[start : start + spec.tp] for start in starts]
        self.engines = [
            SimEngine(f"engine-{spec.pipeline_id}-{rank}", gpus, kernel, network, space)
            for rank, gpus in enumerate(bundles)
        ]
        self.coordinator = SimCoordinator(
            spec.pipeline_id, self.engines, kernel, network, parts.coordinator
        )
        self.router = SimRouter(spec.pipeline_id, self.engines, kernel, network)
        num_serving = self.router.num_serving
        self.tenant = SimTenant(plan, kernel, network, space, num_serving, parts.claims)
        self.clerk = Clerk(
            f"admission-{spec.pipeline_id}", kernel, network, token_of(spec.pipeline_id)
        )
        self._kernel = kernel

    @property
    def pipeline_id(self) -> str:
        return self.plan.spec.pipeline_id

    def processes(self) -> list[Node]:
        """What may die and rise again."""
        if self.is_killed or self.stage in (Stage.NOT_YET, Stage.GONE):
            return []
        return [self.coordinator, self.router, *[self.tenant] * (not self.is_lost)]

    def all_nodes(self) -> list[Node]:
        return [self.tenant, self.coordinator, self.router, *self.engines]

    def start(self) -> None:
        """When its time has come."""
        self.stage = Stage.AT_WORK
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
        """All of its processes die at once, and whoever did it says so."""
        self.is_killed = True
        self._end_processes()
        self.stage = Stage.LEAVING
        clerk = self.clerk
        clerk.ask(KillPipeline(clerk.key(), self.pipeline_id))
        clerk.ask(UnregisterPipeline(clerk.key(), self.pipeline_id), self._gone)

    def leave(self) -> None:
        """Somebody unregisters it though it works; its run ends once it is refused."""
        self.is_sent_away = True
        self.stage = Stage.LEAVING
        self.clerk.ask(UnregisterPipeline(self.clerk.key(), self.pipeline_id), self._gone)

    def _look(self) -> None:
        if self.stage is Stage.AT_WORK and self.tenant.is_over:
            self.stage = Stage.OVER
            if self.plan.leaves:
                self.stage = Stage.LEAVING
                ask = UnregisterPipeline(self.clerk.key(), self.pipeline_id)
                self.clerk.ask(ask, self._gone)
        if self.stage is Stage.AT_WORK:
            self._kernel.after(LOOK_S, self._look)

    def _gone(self) -> None:
        standing = [engine.name for engine in self.engines if engine.has_memory]
        assert not standing, f"{self.pipeline_id} is said to be gone, and {standing} are awake"
        assert not self.tenant.is_training, f"{self.pipeline_id} is said to be gone, and trains"
        self.stage = Stage.GONE
        self._end_processes()

    def _end_processes(self) -> None:
        for node in self.all_nodes():
            if node.alive:
                node.crash()
