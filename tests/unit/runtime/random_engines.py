"""Engines, readers and a fleet that behave randomly around one generation machine.

Every token that an engine samples is derived from its context and weights, so a turn can be
verified without a record.
"""

import random

from rollmesh.core.types import SamplingParams
from rollmesh.engine.backend import Finish
from rollmesh.runtime.generation.events import (
    AbortAttempt,
    AttemptSampled,
    ChooseEngine,
    DropAttempt,
    EngineAttemptFailed,
    EngineChosen,
    EngineFull,
    FleetMoved,
    GenerationRequest,
    ReaderJoined,
    ReaderLeft,
    StartAttempt,
    WakeReaders,
)
from rollmesh.runtime.generation.generation import (
    Action,
    Event,
    GenerationMachine,
    GenerationState,
)
from rollmesh.runtime.generation.sampling import GenerationSettings
from rollmesh.testing.engine import STOP_TOKEN, chain_token
from rollmesh.wire.machine import Ticked

PROMPT = [11, 12, 13]
ABORT = Finish("abort")


class GenerationWorld:
    """A generation machine among engines that pause, die, lose aborts and answer late."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        params = SamplingParams(max_tokens=30, stop_token_ids=(STOP_TOKEN,))
        self.request = GenerationRequest(
            generation_id="g",
            session_key="s",
            prompt_ids=[seed, *PROMPT],
            params=params,
            stream=self.rng.random() < 0.5,
        )
        settings = GenerationSettings(max_fruitless_attempts=10_000, engine_wait_s=1e4, sick_s=1e4)
        self.machine = GenerationMachine(self.request, settings, "r", 0.0)
        self.now_s = 0.0
        self.policy_version = 0
        self.num_readers = 0
        self.attempts: dict[int, list[int]] = {}
        """Running attempts at engines: the context of each."""
        self.aborted: set[int] = set()
        self.is_queued = False
        """Whether the machine waits for capacity of the engine."""
        self.num_woken = 0

    def step(self, event: Event) -> None:
        before = (len(self.machine.sampled), self.machine.state)
        woken = 0
        for action in self.machine.step(event, self.now_s):
            woken += isinstance(action, WakeReaders)
            self.carry_out(action)
        ended = self.machine.state in (GenerationState.COMMITTED, GenerationState.VOID)
        if before[0] < len(self.machine.sampled) or (ended and before[1] is not self.machine.state):
            self.num_woken += 1
            assert woken, "tokens or an end without waking the readers"

    def carry_out(self, action: Action) -> None:
        match action:
            case ChooseEngine():
                chance = self.rng.random()
                if chance < 0.6:
                    self.step(EngineChosen("http://a", "i1", self.policy_version))
                elif chance < 0.7:
                    self.is_queued = True
                    self.step(EngineFull())
            case StartAttempt(attempt, max_new_tokens=num_left):
                context = self.machine.context()
                assert num_left == 30 - (len(context) - 4)
                self.attempts[attempt] = context
            case AbortAttempt(attempt) if self.rng.random() < 0.5:
                self.aborted.add(attempt)
            case DropAttempt(attempt):
                self.attempts.pop(attempt, None)

    def disturb(self) -> None:
        self.now_s += self.rng.choice([0.0, 0.05, 0.3])
        act = self.rng.randrange(12)
        if act == 0 and self.num_readers:
            self.num_readers -= 1
            self.step(ReaderLeft())
        elif act <= 2:
            self.num_readers += 1
            self.step(ReaderJoined())
        elif act == 3:
            self.policy_version += 1
            self.aborted |= set(self.attempts)
        elif act == 4 and self.attempts:
            attempt = self.rng.choice(list(self.attempts))
            del self.attempts[attempt]
            self.step(EngineAttemptFailed(attempt, "cut"))
        elif act == 5:
            self.step(FleetMoved(self.rng.random() < 0.3))
        else:
            self.progress()

    def progress(self) -> None:
        for attempt in list(self.attempts):
            self.sample(attempt)
        if self.is_queued:
            self.is_queued = False
            self.step(EngineChosen("http://a", "i1", self.policy_version))
        self.step(Ticked())

    def sample(self, attempt: int) -> None:
        if attempt in self.aborted:
            del self.attempts[attempt]
            self.step(AttemptSampled(attempt, (), (), self.policy_version, ABORT))
            return
        context = self.attempts[attempt]
        tokens: list[int] = []
        finish = None
        for _ in range(self.rng.randint(1, 3)):
            tokens.append(chain_token(self.policy_version, context))
            context.append(tokens[-1])
            if tokens[-1] == STOP_TOKEN:
                finish = Finish("stop", STOP_TOKEN)
            elif len(context) - 4 == 30:
                finish = Finish("length")
            if finish:
                del self.attempts[attempt]
                break
        self.step(
            AttemptSampled(
                attempt, tokens, [-float(t) for t in tokens], self.policy_version, finish
            )
        )

    def check_chain(self) -> None:
        """Assert that each token derives from those before it, under the version that it is
        labelled with.
        """
        sampled = self.machine.sampled
        assert len(sampled.token_ids) == len(sampled.logprobs)
        context = list(self.request.prompt_ids)
        versions = [r.policy_version for r in sampled.policy_versions for _ in range(r.num_tokens)]
        assert len(versions) == len(sampled.token_ids)
        assert versions == sorted(versions)
        for token, logprob, policy_version in zip(
            sampled.token_ids, sampled.logprobs, versions, strict=True
        ):
            assert token == chain_token(policy_version, context)
            assert logprob == -float(token)
            context.append(token)
