"""Simulated rollouts: one to three turns each, sampled by the real generation machine.

- The next turn's context is that of the last one, its tokens, and a token from the environment. The
  next token is a function of weights and context, so a recorded turn proves itself.
- Readers leave and come back, or stay away until the turn is void and starts again, as SDKs do. An
  end without WakeReaders would leave a reader waiting forever.
- Groups without an engine take a while, and some kill the worker that runs them.
"""

from collections.abc import Callable
from typing import Protocol

import msgspec

from rollmesh.core.ids import GroupId
from rollmesh.core.types import SamplingParams, VersionRun
from rollmesh.runtime.generation.events import (
    GenerationRequest,
    ReaderJoined,
    ReaderLeft,
    WakeReaders,
)
from rollmesh.runtime.generation.generation import (
    Action,
    Event,
    GenerationMachine,
    GenerationState,
)
from rollmesh.runtime.generation.sampling import GenerationSettings
from rollmesh.testing.mesh_sim.engine import STOP_TOKEN, next_token
from rollmesh.testing.mesh_sim.kernel import Kernel, Node
from rollmesh.wire.machine import Ticked


class SimTurn(msgspec.Struct, frozen=True, array_like=True):
    """One committed generation."""

    context: tuple[int, ...]
    token_ids: tuple[int, ...]
    policy_versions: tuple[VersionRun, ...]
    finish: str
    engines: tuple[str, ...]

    @property
    def index(self) -> int:
        """Prefix of its rollout, which begins every context."""
        return self.context[1]

    def is_exact(self) -> bool:
        """Return whether every token is what its version's weights sample after its context."""
        if not all(0 <= run.engine < len(self.engines) for run in self.policy_versions):
            return False
        versions = [
            run.policy_version for run in self.policy_versions for _ in range(run.num_tokens)
        ]
        if len(versions) != len(self.token_ids) or versions != sorted(versions):
            return False
        context = list(self.context)
        for token, policy_version in zip(self.token_ids, versions, strict=True):
            if token != next_token(policy_version, context):
                return False
            context.append(token)
        return True


class SimGroupTurns(msgspec.Struct, frozen=True):
    """The body of a simulated GroupFinished."""

    turns: tuple[SimTurn, ...] = ()
    reason: str = ""
    """Why there are no turns."""
    failed: tuple[int, ...] = ()
    """Rollouts of which nothing trains, by their index."""

    def are_exact(self) -> bool:
        """Return whether all turns are exact and no session has seen older weights after newer
        ones.
        """
        if not all(turn.is_exact() for turn in self.turns):
            return False
        seen: dict[tuple[int, ...], int] = {}
        for turn in self.turns:
            session = turn.context[:2]
            versions = [run.policy_version for run in turn.policy_versions]
            if versions and versions[0] < seen.get(session, 0):
                return False
            seen[session] = max(versions, default=seen.get(session, 0))
        return True

    def rollouts(self) -> tuple[frozenset[int], ...]:
        """Return the policy versions of the tokens of each rollout that may train."""
        versions: dict[int, set[int]] = {}
        for turn in self.turns:
            known = versions.setdefault(turn.index, set())
            known |= {run.policy_version for run in turn.policy_versions}
        kept = (each for at, each in sorted(versions.items()) if at not in self.failed)
        return tuple(map(frozenset, kept))


PLAIN = b"plain"
POISON = b"poison"
"""Bodies of such requests; any other body is a task for rollouts."""
LONGEST_S = 0.6


class EnginelessGroups:
    """Groups without an engine of one worker."""

    def __init__(
        self,
        kernel: Kernel,
        worker: Node,
        on_end: Callable[[GroupId], None],
        on_kill: Callable[[GroupId], None],
    ) -> None:
        self._kernel = kernel
        self._worker = worker
        self._on_end = on_end
        self._on_kill = on_kill
        self._bodies: dict[GroupId, bytes] = {}

    def __len__(self) -> int:
        return len(self._bodies)

    def begin(self, group_id: GroupId, body: bytes) -> None:
        """Run it; `on_end` or `on_kill` follows unless it is aborted."""
        self._bodies[group_id] = body
        # The body is an object of its own in each run, and so tells this run from the next.
        delay_s = self._kernel.rng.uniform(0.01, LONGEST_S)
        self._kernel.after(delay_s, lambda: self._is_over(group_id, body), self._worker)

    def abort(self, group_id: GroupId) -> bool:
        """End it now without a callback; return False if it does not run here."""
        return self._bodies.pop(group_id, None) is not None

    def _is_over(self, group_id: GroupId, body: bytes) -> None:
        if self._bodies.get(group_id) is not body:
            return
        if body == POISON:
            self._on_kill(group_id)
        else:
            del self._bodies[group_id]
            self._on_end(group_id)


SETTINGS = GenerationSettings(
    retry_window_s=1.0,
    engine_wait_s=4.0,
    answer_timeout_s=1.0,
    abort_repeat_s=0.1,
    abort_timeout_s=0.5,
)
MAX_RESTARTS = 50
BOUND_SHARE = 0.2
"""Share of turns that cannot be resumed because of a penalty."""


class Runner(Protocol):
    """The worker's interface for a rollout."""

    name: str
    new_machine: type[GenerationMachine]

    def carry_out(self, rollout: "SimRollout", machine: GenerationMachine, action: Action) -> None:
        """Carry out the actions of the machine."""

    def rollout_over(self, rollout: "SimRollout") -> None:
        """All turns are complete, or there is an error."""

    def now_s(self) -> float:
        """Return the time by its clock."""

    def strikes(self, fault: str) -> bool:
        """Return whether this fault happens now."""

    def note(self, machine: str, before: str, after: str) -> None:
        """Count one transition."""


class SimRollout:
    """One agent talking to one session."""

    def __init__(
        self, kernel: Kernel, group_id: GroupId, index: int, run: Runner, min_policy_version: int
    ) -> None:
        self.group_id = group_id
        self.index = index
        self.turns: list[SimTurn] = []
        self.error = ""
        self.is_slow = run.strikes("straggler")
        self.has_failed = run.strikes("agent_failed")
        self.machine: GenerationMachine
        self._kernel = kernel
        self._run = run
        self._num_turns = kernel.rng.randint(1, 3)
        self._num_begun = 0
        self._min_policy_version = min_policy_version
        self._newest = -1
        """Newest policy version that a turn of it was sampled with."""

    @property
    def session_key(self) -> str:
        return f"{self.group_id}/{self.index}"

    @property
    def is_over(self) -> bool:
        return bool(self.error) or len(self.turns) == self._num_turns

    def begin(self) -> None:
        """Start the next turn."""
        self._num_begun += 1
        request = GenerationRequest(
            generation_id=f"{self.session_key}/{len(self.turns)}",
            session_key=self.session_key,
            prompt_ids=self._context(),
            params=SamplingParams(
                max_tokens=12,
                stop_token_ids=(STOP_TOKEN,),
                presence_penalty=0.5 if self._kernel.rng.random() < BOUND_SHARE else 0.0,
            ),
            min_policy_version=self._min_policy_version,
            stream=self._kernel.rng.random() < 0.5,
        )
        rid = f"{self._run.name}/{self.session_key}/{self._num_begun}"
        self.machine = self._run.new_machine(request, SETTINGS, rid, self._run.now_s())
        self.step(ReaderJoined())
        self.step(Ticked())

    def tick(self) -> None:
        """Let time pass; now and then a reader leaves or returns."""
        if self.is_over:
            return
        rng = self._kernel.rng
        if self.machine.num_readers and self._run.strikes("reader_left"):
            self.step(ReaderLeft())
        elif not self.machine.num_readers and rng.random() < 0.3:
            self.step(ReaderJoined())
        self.step(Ticked())

    def step(self, event: Event) -> None:
        """Step the turn's machine and carry out what follows."""
        machine, before = self.machine, self.machine.state
        actions = machine.step(event, self._run.now_s())
        self._run.note("generation", before, machine.state)
        ended = machine.state in (GenerationState.COMMITTED, GenerationState.VOID)
        if ended and before is not machine.state:
            assert any(isinstance(a, WakeReaders) for a in actions), "a waiter sleeps forever"
        for action in actions:
            self._run.carry_out(self, machine, action)
        if ended and machine is self.machine and before is not machine.state:
            self._end_turn(machine)

    def _end_turn(self, machine: GenerationMachine) -> None:
        self._min_policy_version = machine.min_policy_version
        if machine.state is GenerationState.COMMITTED:
            sampled = machine.sampled
            assert all(run.policy_version >= self._newest for run in sampled.policy_versions), (
                f"{self.session_key} went back to older weights"
            )
            turn = SimTurn(
                tuple(machine.request.prompt_ids),
                tuple(sampled.token_ids),
                tuple(sampled.policy_versions),
                machine.finish_reason,
                tuple(sampled.engines),
            )
            self.turns.append(turn)
            self._newest = max(self._newest, *(run.policy_version for run in turn.policy_versions))
        elif self._num_begun >= MAX_RESTARTS:
            self.error = f"infra_error: {machine.error}"
        if self.is_over:
            self._run.rollout_over(self)
        else:
            self.begin()

    def _context(self) -> tuple[int, ...]:
        if not self.turns:
            return (1000 + self.group_id.seq, self.index)
        last = self.turns[-1]
        return (*last.context, *last.token_ids, 2000 + len(self.turns))
