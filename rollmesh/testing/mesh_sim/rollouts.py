"""Simulated rollouts: one to three turns each, sampled by the real generation machine.

The next turn's context is the last one's, its tokens, and a token from the environment. Readers
leave and come back, or stay away until the turn is void and begun anew, as SDKs do. Invariants are
checked where they arise: an end without WakeReaders is a waiter asleep for ever. Driven by
worker.py, which carries legs to engines.
"""

from typing import Protocol

from rollmesh.core.ids import GroupId
from rollmesh.core.types import SamplingParams
from rollmesh.runtime.generation import (
    Action,
    Event,
    GenerationMachine,
    GenerationState,
)
from rollmesh.runtime.generation_events import (
    GenerationRequest,
    ReaderJoined,
    ReaderLeft,
    WakeReaders,
)
from rollmesh.runtime.sampling import GenerationSettings
from rollmesh.testing.mesh_sim.engine import STOP_TOKEN
from rollmesh.testing.mesh_sim.kernel import Kernel
from rollmesh.testing.mesh_sim.turns import Turn
from rollmesh.wire.machine import Ticked

SETTINGS = GenerationSettings(
    retry_window_s=1.0,
    engine_wait_s=4.0,
    answer_timeout_s=1.0,
    abort_repeat_s=0.1,
    abort_timeout_s=0.5,
)
MAX_RESTARTS = 50
BOUND_SHARE = 0.2
"""Of turns that cannot be resumed: these have a penalty."""


class Runner(Protocol):
    """What a rollout needs of its worker."""

    name: str
    new_machine: type[GenerationMachine]

    def carry_out(self, rollout: "SimRollout", machine: GenerationMachine, action: Action) -> None:
        """Do what the machine asks for."""

    def rollout_over(self, rollout: "SimRollout") -> None:
        """All turns are there, or an error is."""

    def now_s(self) -> float:
        """By its clock."""

    def strikes(self, fault: str) -> bool:
        """Whether this fault happens now."""

    def note(self, machine: str, before: str, after: str) -> None:
        """One transition."""


class SimRollout:
    """One agent talking to one session."""

    def __init__(
        self, kernel: Kernel, group_id: GroupId, index: int, run: Runner, min_policy_version: int
    ) -> None:
        self.group_id = group_id
        self.index = index
        self.turns: list[Turn] = []
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
        """That a turn of it was sampled with."""

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
        """Time passes; now and then a reader leaves, or comes back."""
        if self.is_over:
            return
        rng = self._kernel.rng
        if self.machine.num_readers and self._run.strikes("reader_left"):
            self.step(ReaderLeft())
        elif not self.machine.num_readers and rng.random() < 0.3:
            self.step(ReaderJoined())
        self.step(Ticked())

    def step(self, event: Event) -> None:
        """Give the turn's machine one event, carry out what follows."""
        machine, before = self.machine, self.machine.state
        actions = machine.step(event, self._run.now_s())
        self._run.note("generation", before, machine.state)
        ended = machine.state in (GenerationState.COMMITTED, GenerationState.VOID)
        if ended and before is not machine.state:
            assert any(isinstance(a, WakeReaders) for a in actions), "a waiter sleeps for ever"
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
            turn = Turn(
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
