"""A sampler over scripted engines on real sockets, with a fleet table that the test controls.

Every token derives from its context and weights, so a turn can be verified by itself.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import pytest

from rollmesh.core.types import SamplingParams, policy_version_of
from rollmesh.engine.view import FleetView
from rollmesh.runtime.generation.events import GenerationRequest
from rollmesh.runtime.generation.generation import Generation
from rollmesh.runtime.generation.sampler import Sampler, SamplerDeps
from rollmesh.runtime.generation.sampling import GenerationSettings
from rollmesh.runtime.tokens.tool_calls import StopStrings
from rollmesh.testing.clock import FakeClock
from rollmesh.testing.engine import VOCAB_SIZE, ScriptedEngine, endless_token
from rollmesh.wire.fleet import EngineFaulted, EnginePhase, EngineRow, FleetChanged

PROMPT = [5, 6, 7]
TO_THE_END = 2**31
PATIENCE_S = 60.0
PAUSES = pytest.mark.parametrize("phase", [EnginePhase.UPDATING, EnginePhase.ASLEEP])
"""Phases in which resumable attempts leave an engine, and turns without an attempt wait."""


@pytest.fixture
async def engine() -> AsyncIterator[ScriptedEngine]:
    async with ScriptedEngine(endless_token) as engine:
        yield engine


class SamplerDriver:
    """A sampler over scripted engines, with a fleet table that the test controls."""

    def __init__(
        self,
        *engines: ScriptedEngine,
        clock: FakeClock | None = None,
        settings: GenerationSettings | None = None,
    ) -> None:
        self.engines = engines
        self.view = FleetView()
        self.faults: list[EngineFaulted] = []
        self.epoch = 0
        parts = SamplerDeps(
            view=self.view,
            vocab_size=VOCAB_SIZE,
            report=self.faults.append,
            new_matcher=lambda stops: StopStrings(stops, NumberVocabulary()),
        )
        self.sampler = Sampler(parts, settings, clock)
        self.push()

    def push(
        self,
        phase: EnginePhase = EnginePhase.READY,
        incarnation: str = "i1",
        *,
        has_publisher: bool = True,
    ) -> None:
        """Set all engines to `phase`, at the versions that they serve."""
        self.epoch += 1
        rows = tuple(
            EngineRow(
                engine.url,
                incarnation,
                phase,
                policy_version_of(engine.weight_version),
                max_running=engine.max_running,
            )
            for engine in self.engines
        )
        table = FleetChanged(self.epoch, rows, has_publisher=has_publisher)
        self.view.update(table, "router")

    def start(
        self,
        *,
        stream: bool = False,
        num_tokens: int = 6,
        session_key: str = "s",
        prompt_ids: Sequence[int] = PROMPT,
        params: dict[str, Any] | None = None,
        **fields: Any,
    ) -> Generation:
        request = GenerationRequest(
            generation_id="g",
            session_key=session_key,
            prompt_ids=prompt_ids,
            params=SamplingParams(max_tokens=num_tokens, **(params or {})),
            stream=stream,
            **fields,
        )
        generation = self.sampler.start(request)
        generation.join()
        return generation

    def num_running(self) -> int:
        """Number of attempts that the sampler counts at all engines."""
        return sum(self.view.num_requests(engine.url) for engine in self.engines)


class NumberVocabulary:
    """A vocabulary in which token 12 is the text `<12>`."""

    def feed(self, token_ids: Sequence[int]) -> str:
        return "".join(f"<{token}>" for token in token_ids)


def expected(num_tokens: int, *versions: int) -> list[int]:
    context = list(PROMPT)
    for at in range(num_tokens):
        context.append(endless_token(versions[at] if versions else 0, context))
    return context[len(PROMPT) :]


async def until(is_so: Callable[[], object]) -> None:
    """Run the event loop until `is_so` returns true."""
    async with asyncio.timeout(PATIENCE_S):
        while not is_so():  # noqa: ASYNC110 - both ends are real sockets
            await asyncio.sleep(0)
