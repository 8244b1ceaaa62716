"""A simulated engine: SGLang's life cycle with tokens that can be checked.

- The token after a context is a function of weights and context alone (`next_token`): a lost,
  doubled or mislabelled token breaks the chain.
- An abort of a rid that has not arrived does nothing; a pause ends running requests and holds new
  ones.
"""

from collections.abc import Callable, Sequence

import msgspec

from rollmesh.testing.mesh_sim.kernel import Kernel, Node
from rollmesh.testing.mesh_sim.network import Network

STOP_TOKEN = 0
STEP_S = 0.004
"""Time between two tokens of one request."""
BOUND_STEP_S = 0.015
"""Tokens of a turn that cannot be resumed, so that it outlasts the publisher's first look."""
SLOW_STEP_S = 0.3
"""Time between tokens of a straggler, so that its group grows old."""


class EngineChunk(msgspec.Struct, frozen=True):
    """An event of one request's stream."""

    token_ids: tuple[int, ...]
    policy_version: int
    finish: str = ""
    """`stop`, `length`, `abort`, or '' while it continues."""


def next_token(policy_version: int, context: Sequence[int]) -> int:
    """Return the token that these weights sample after `context`; 0 ends a turn."""
    digest = hash((policy_version, *context))  # of whole numbers: the same in every process
    return STOP_TOKEN if digest % 11 == 0 else 1 + digest % 499


class _Request(msgspec.Struct):
    context: list[int]
    num_left: int
    answer: Callable[[EngineChunk], None]
    caller: Node
    is_bound: bool
    """Whether its turn cannot be resumed elsewhere."""
    is_slow: bool
    num_crashes: int
    """Incarnation of the caller: an answer to an earlier one is dropped."""

    @property
    def step_s(self) -> float:
        if self.is_slow:
            return SLOW_STEP_S
        return BOUND_STEP_S if self.is_bound else STEP_S


class SimEngine(Node):
    """One engine process."""

    def __init__(self, name: str, kernel: Kernel, network: Network) -> None:
        super().__init__(name)
        self._kernel = kernel
        self._network = network
        self.policy_version = 0
        self.paused = False
        self.running: dict[str, _Request] = {}
        self._held: list[tuple[str, _Request]] = []
        self._hangups: list[tuple[Node, int, Callable[[], None]]] = []

    @property
    def num_requests(self) -> int:
        """Requests that run here or wait."""
        return len(self.running) + len(self._held)

    @property
    def incarnation(self) -> str:
        return f"{self.name}.{self.num_crashes}"

    def crash(self) -> None:
        """Break every open connection; callers are informed."""
        for caller, num_crashes, hang_up in self._hangups:
            self._network.answer(caller, num_crashes, hang_up)
        self.running.clear()
        self._held.clear()
        self._hangups.clear()
        self.paused = False
        super().crash()

    def restart(self) -> None:
        """Start again with the weights that were on disk first."""
        super().restart()
        self.policy_version = 0

    def generate(
        self,
        caller: Node,
        rid: str,
        request: tuple[Sequence[int], int, bool, bool],
        answer: Callable[[EngineChunk], None],
        hang_up: Callable[[], None],
    ) -> None:
        """Sample `request` = (context, token limit, whether its turn cannot be resumed, whether it
        is slow); call `hang_up` if the connection breaks.
        """
        context, num_left, is_bound, is_slow = request
        num_crashes = caller.num_crashes

        def arrive() -> None:
            if not self.alive or self._network.strikes("call_error"):
                self._network.answer(caller, num_crashes, hang_up)
                return
            if caller.num_crashes != num_crashes:
                return
            entry = _Request(
                list(context), num_left, answer, caller, is_bound, is_slow, num_crashes
            )
            self._hangups.append((caller, num_crashes, hang_up))
            if self.paused:
                self._held.append((rid, entry))
            else:
                self._begin(rid, entry)

        self._kernel.after(self._kernel.rng.uniform(0.001, 0.02), arrive)

    def abort(self, rid: str) -> None:
        """End `rid` with the tokens so far; an unknown rid has no effect."""
        self._kernel.after(self._kernel.rng.uniform(0.001, 0.02), lambda: self._abort(rid))

    def pause(self) -> None:
        """SGLang's mode `abort`: running requests end as aborted, new ones wait."""
        self.paused = True
        self._network.num["turn_cut"] += sum(each.is_bound for each in self.running.values())
        for rid in list(self.running):
            self._abort(rid)

    def resume(self) -> None:
        self.paused = False
        held, self._held = self._held, []
        for rid, entry in held:
            self._begin(rid, entry)

    def _begin(self, rid: str, entry: _Request) -> None:
        self.running[rid] = entry
        self._kernel.after(entry.step_s, lambda: self._advance(rid, entry), self)

    def _advance(self, rid: str, entry: _Request) -> None:
        if self.running.get(rid) is not entry:
            return
        token_ids: list[int] = []
        finish = ""
        for _ in range(min(self._kernel.rng.randint(1, 4), entry.num_left)):
            token = next_token(self.policy_version, entry.context)
            entry.context.append(token)
            entry.num_left -= 1
            token_ids.append(token)
            if token == STOP_TOKEN:
                finish = "stop"
                break
        if not finish and entry.num_left == 0:
            finish = "length"
        self._answer(entry, EngineChunk(tuple(token_ids), self.policy_version, finish))
        if finish:
            del self.running[rid]
        else:
            self._kernel.after(entry.step_s, lambda: self._advance(rid, entry), self)

    def _abort(self, rid: str) -> None:
        entry = self.running.pop(rid, None)
        if entry:
            self._answer(entry, EngineChunk((), self.policy_version, "abort"))
        for held in [each for each in self._held if each[0] == rid]:
            self._held.remove(held)
            self._answer(held[1], EngineChunk((), self.policy_version, "abort"))

    def _answer(self, entry: _Request, chunk: EngineChunk) -> None:
        # A stream keeps its order: every chunk takes the same time.
        self._kernel.after(0.001, lambda: entry.answer(chunk), entry.caller, entry.num_crashes)
