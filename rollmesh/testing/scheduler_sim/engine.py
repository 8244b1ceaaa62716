"""A simulated engine of a pipeline, and the GPUs that engines and trainers really occupy.

    RELEASED > (resume) > HOLDS MEMORY > (load) > SERVES > (release) > RELEASED

- A GPU never has two users, whatever was granted to whom.
- An engine occupies its GPUs from the moment it begins to take memory until that is released. A
  killed process has none, and its successor starts without (--asleep).
- Calls are carried out in order, also those whose caller has stopped waiting.
"""

from collections.abc import Callable

from rollmesh.core.types import UNVERSIONED
from rollmesh.serve.coordinator.worker import EngineOp, EngineSnapshot
from rollmesh.testing.mesh_sim.kernel import Kernel, Node
from rollmesh.testing.mesh_sim.network import Network


class GpuOccupancy:
    """The users of each GPU, which no message reports."""

    def __init__(self) -> None:
        self._users: dict[int, str] = {}

    def enter(self, user: str, gpus: tuple[int, ...]) -> None:
        """Occupy GPUs; AssertionError if another user does."""
        for gpu in gpus:
            there = self._users.setdefault(gpu, user)
            assert there == user, f"GPU {gpu} is used by {there}, and {user} takes it"

    def leave(self, user: str) -> None:
        """Leave all GPUs."""
        self._users = {gpu: each for gpu, each in self._users.items() if each != user}

    def users(self) -> dict[int, str]:
        """By GPU."""
        return dict(self._users)


POLICY_VERSION = 1
"""No publisher runs here."""
TAKES_S = {EngineOp.RESUME: (0.1, 1.0), EngineOp.LOAD: (0.1, 1.0), EngineOp.RELEASE: (0.05, 0.4)}
OTHER_S = (0.001, 0.01)

Answer = Callable[[bool, EngineSnapshot], None]


class SharedEngine(Node):
    """One engine process."""

    def __init__(
        self, url: str, gpus: tuple[int, ...], kernel: Kernel, network: Network, space: GpuOccupancy
    ) -> None:
        super().__init__(url)
        self.gpus = gpus
        self.has_memory = False
        self.has_weights = False
        self._is_moving = False
        """By the name of its weights: taken or released, and not finished."""
        self._kernel = kernel
        self._network = network
        self._space = space
        self._free_at_s = 0.0
        """When the call before has been carried out."""

    @property
    def is_hung(self) -> bool:
        return self.frozen_until_s > self._kernel.time_s

    @property
    def can_serve(self) -> bool:
        return self.alive and self.has_weights and not self.is_hung

    @property
    def incarnation(self) -> str:
        return f"{self.name}.{self.num_crashes}"

    def call(self, caller: Node, op: EngineOp, answer: Answer) -> None:
        """Carry out a call; `answer` is called with whether it was done, or not at all."""
        num_crashes, rng = caller.num_crashes, self._kernel.rng
        if not self.alive or self._network.strikes("call_error"):
            self._network.answer(caller, num_crashes, lambda: answer(False, self._seen()))
            return
        takes_s = rng.uniform(*TAKES_S.get(op, OTHER_S))
        starts_s = max(self._kernel.time_s + rng.uniform(0.001, 0.005), self._free_at_s)
        self._free_at_s = starts_s + takes_s

        def begin() -> None:
            if op is EngineOp.RESUME:
                self._is_moving |= not self.has_memory
                self._space.enter(self.name, self.gpus)
                self.has_memory = True
            elif op in (EngineOp.PAUSE, EngineOp.RELEASE):
                self.has_weights = False
                self._is_moving |= op is EngineOp.RELEASE and self.has_memory
            self._kernel.after(takes_s, end, self)

        def end() -> None:
            if op is EngineOp.LOAD:
                self.has_weights, self._is_moving = self.has_memory, False
            elif op is EngineOp.RELEASE:
                self._let_go()
            seen = self._seen()
            self._network.answer(caller, num_crashes, lambda: answer(True, seen))

        self._kernel.after(starts_s - self._kernel.time_s, begin, self)

    def crash(self) -> None:
        super().crash()
        self._let_go()

    def restart(self) -> None:
        super().restart()
        self._free_at_s = self._kernel.time_s

    def _let_go(self) -> None:
        self.has_memory = self.has_weights = self._is_moving = False
        self._space.leave(self.name)

    def _seen(self) -> EngineSnapshot:
        is_named = self.has_memory and not self._is_moving
        return EngineSnapshot(
            is_released=not self.has_memory,
            is_moving=self._is_moving,
            policy_version=POLICY_VERSION if is_named else UNVERSIONED,
        )
