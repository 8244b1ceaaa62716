"""A sampler without engines: generations return the script's tokens, when the test allows it.

- States and wake-ups are those of the real generation machine; only the engine requests are
  scripted.
- Nothing sleeps: a held generation streams tokens on `show` and ends on `end` or `fail`.
"""

import asyncio
from collections.abc import Callable, Iterable, Sequence

from rollmesh.core.clock import Clock
from rollmesh.engine.backend import Finish
from rollmesh.runtime.generation.events import (
    AbortAttempt,
    AttemptSampled,
    ChooseEngine,
    EngineAttemptFailed,
    EngineChosen,
    GenerationRequest,
    StartAttempt,
    StopMatcher,
)
from rollmesh.runtime.generation.generation import (
    Action,
    Event,
    Generation,
    GenerationMachine,
    GenerationState,
)
from rollmesh.runtime.generation.sampling import GenerationSettings
from rollmesh.testing.clock import FakeClock
from rollmesh.wire.machine import Ticked

LOGPROB = -0.5
"""Log-prob of every scripted token, minus its index in the generation over 64: exact in float32."""

Script = Callable[[GenerationRequest], Sequence[int]]


def logprob_at(index: int) -> float:
    """The log-prob of a generation's scripted token at `index`."""
    return LOGPROB - index / 64


class ScriptedGeneration(Generation):
    """A generation whose engine is the test."""

    def __init__(self, machine: GenerationMachine, sampler: "ScriptedSampler") -> None:
        super().__init__(machine, _drive, asyncio.get_running_loop())
        self.attempt: StartAttempt | None = None
        """The open engine request."""
        self.num_aborts = 0
        self._sampler = sampler

    def show(self, *token_ids: int, finish: Finish | None = None) -> None:
        """Stream these tokens from the engine; with `finish`, end the request's stream."""
        assert self.attempt is not None, "no attempt is open"
        start = len(self.token_ids)
        logprobs = [logprob_at(start + n) for n in range(len(token_ids))]
        policy_version = self._sampler.policy_version
        event = AttemptSampled(self.attempt.attempt, token_ids, logprobs, policy_version, finish)
        self.attempt = None if finish else self.attempt
        self.drive(event)

    def end(self, *token_ids: int, reason: str = "stop") -> None:
        """Stream these last tokens and finish."""
        kind = "length" if reason == "length" else "stop"
        self.show(*token_ids, finish=Finish(kind))  # type: ignore[arg-type]

    def fail(self, detail: str, is_refused: bool = False) -> None:
        """Break the stream of the engine request."""
        assert self.attempt is not None, "no attempt is open"
        number, self.attempt = self.attempt.attempt, None
        self.drive(EngineAttemptFailed(number, detail, "refused" if is_refused else "fault"))

    def drive(self, event: Event) -> None:
        """Feed one event to the machine and execute its effects."""
        for action in self.machine.step(event, self._sampler.clock.now_s()):
            self._carry_out(action)
        self._sampler.moved.set()

    def _carry_out(self, action: Action) -> None:
        match action:
            case ChooseEngine():
                sampler = self._sampler
                choice = sampler.policy_version, "", sampler.has_publisher
                self.drive(EngineChosen(sampler.engine, "i0", *choice))
            case StartAttempt():
                self.attempt = action
            case AbortAttempt():
                self.num_aborts += 1
                if self.attempt is not None and self.attempt.attempt == action.attempt:
                    self.show(finish=Finish("abort"))
            case _:
                self.wake()


def _drive(generation: Generation, event: Event) -> None:
    assert isinstance(generation, ScriptedGeneration)
    generation.drive(event)


class ScriptedSampler:
    """A scripted implementation of session.AnySampler.

    With a script, every generation ends at once with the script's tokens; without one it is held
    until the test moves it.
    """

    def __init__(
        self,
        script: Script | Iterable[Sequence[int]] | None = None,
        settings: GenerationSettings | None = None,
        clock: Clock | None = None,
        new_matcher: Callable[[tuple[str, ...]], StopMatcher] | None = None,
    ) -> None:
        self.requests: list[GenerationRequest] = []
        self.generations: list[ScriptedGeneration] = []
        self.policy_version = 1
        self.engine = "http://scripted"
        """Engine of the next request."""
        self.has_publisher = True
        """Whether weights older than a session has seen are refused."""
        self.clock = clock or FakeClock()
        self.moved = asyncio.Event()
        """Set after every event of every generation."""
        self.keeps = True
        """Whether to keep requests and generations for inspection by the test."""
        self._settings = settings or GenerationSettings()
        self._new_matcher = new_matcher
        if script is None or callable(script):
            self._script = script
        else:
            answers = iter(script)
            self._script = lambda _: next(answers)

    def start(self, request: GenerationRequest) -> ScriptedGeneration:
        """Start a generation."""
        make, stops = self._new_matcher, request.params.stop
        machine = GenerationMachine(
            request,
            self._settings,
            request.generation_id,
            self.clock.now_s(),
            (lambda: make(stops)) if make and stops else None,
        )
        generation = ScriptedGeneration(machine, self)
        if self.keeps:
            self.requests.append(request)
            self.generations.append(generation)
        generation.drive(Ticked())
        if self._script is not None:
            generation.end(*self._script(request))
        return generation

    def waiting(self) -> None:
        """Do nothing: no call of this sampler waits for an engine."""

    async def until(self, is_so: Callable[[], bool]) -> None:
        """Wait for generations to move until `is_so()`."""
        while not is_so():
            self.moved.clear()
            await self.moved.wait()

    def tick(self) -> None:
        """Make every kept generation check the clock."""
        for generation in self.generations:
            if generation.state in (GenerationState.RUNNING, GenerationState.PARKED):
                generation.drive(Ticked())
