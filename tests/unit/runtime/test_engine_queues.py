"""Queued generations take an engine's free capacity, and sessions take turns."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from rollmesh.runtime.generation.generation import Generation, GenerationState
from rollmesh.runtime.generation.sampling import GenerationSettings
from rollmesh.testing.clock import FakeClock
from rollmesh.testing.engine import ScriptedEngine, endless_token
from rollmesh.wire.fleet import EnginePhase
from tests.unit.runtime.sampler_driver import (
    PAUSES,
    TO_THE_END,
    SamplerDriver,
)
from tests.unit.runtime.sampler_driver import engine as engine  # a fixture

PLACES = 8
SENT = 9
"""Requests sent to an engine that runs 8 at a time: an eighth more."""


@pytest.fixture
async def narrow(engine: ScriptedEngine) -> AsyncIterator[SamplerDriver]:
    """An engine that runs 8 requests at a time and holds them."""
    engine.max_running = PLACES
    engine.hold()
    driver = SamplerDriver(engine)
    yield driver
    await driver.sampler.close()


def sessions_of(engine: ScriptedEngine) -> str:
    """Return the sessions of the requests, by first token, in the order in which the engine
    received them.
    """
    firsts = [each.body["input_ids"][0] for each in engine.seen if each.path == "/generate"]
    return "".join(map(chr, firsts))


def turns_of(
    driver: SamplerDriver, session: str, num_turns: int, **fields: Any
) -> list[Generation]:
    prompt = [ord(session), 6, 7]
    return [
        driver.start(session_key=session, num_tokens=1, prompt_ids=prompt, **fields)
        for _ in range(num_turns)
    ]


async def finished(*generations: Generation) -> None:
    async with asyncio.timeout(60):
        for each in generations:
            await each.wait(TO_THE_END)
            assert each.state is GenerationState.COMMITTED


async def one_more(engine: ScriptedEngine) -> None:
    """Sample one token, which frees capacity, until the next request has arrived."""
    num_seen = engine.num_seen("/generate")
    await engine.allow(1)
    await engine.until(lambda: engine.num_seen("/generate") > num_seen)


async def test_a_session_with_many_turns_does_not_delay_another_at_the_engine(
    engine: ScriptedEngine, narrow: SamplerDriver
) -> None:
    long = turns_of(narrow, "a", 64)
    await engine.until(lambda: engine.num_live == SENT)
    for _ in range(4):
        [single] = turns_of(narrow, "b", 1)
        before = engine.num_sampled
        while not single.token_ids:
            await one_more(engine)
        # It was sent after at most one turn of each request that was sent before it.
        assert engine.num_sampled - before <= SENT + 2
    assert narrow.sampler.entries()["generations_queued"] > 32
    await engine.release()
    await finished(*long)
    assert sessions_of(engine).count("b") == 4
    assert narrow.sampler.entries()["generations_queued"] == narrow.num_running() == 0


async def test_sessions_take_turns_for_an_engines_free_capacity(
    engine: ScriptedEngine, narrow: SamplerDriver
) -> None:
    turns = [each for name in "abc" for each in turns_of(narrow, name, 12)]
    await engine.release()
    await finished(*turns)
    # Each request replaces an ended one, so their order is that of the turns.
    assert sessions_of(engine) == "a" * SENT + "abc" * 3 + "bc" * 9


async def test_an_engine_that_reports_no_limit_gets_all_requests_at_once(
    engine: ScriptedEngine,
) -> None:
    driver = SamplerDriver(engine)
    engine.hold()
    turns = turns_of(driver, "a", 64)
    await engine.until(lambda: engine.num_live == 64)
    await engine.release()
    await finished(*turns)
    await driver.sampler.close()


async def test_abandoned_and_sealed_turns_leave_the_queue_of_an_engine(
    engine: ScriptedEngine, narrow: SamplerDriver
) -> None:
    turns = turns_of(narrow, "a", SENT + 3)
    left, sealed, last = turns[SENT:]
    left.leave()
    sealed.seal("over")
    assert narrow.sampler.entries()["generations_queued"] == 1
    assert left.state is GenerationState.PARKED
    await engine.release()
    await finished(*turns[:SENT], last)
    assert engine.num_seen("/generate") == SENT + 1
    left.join()
    await finished(left)
    assert narrow.faults == []


@PAUSES
@pytest.mark.parametrize("params", [{}, {"presence_penalty": 1.0}])
async def test_turns_in_the_queue_leave_an_engine_that_gets_new_weights(
    engine: ScriptedEngine, narrow: SamplerDriver, phase: EnginePhase, params: dict[str, Any]
) -> None:
    turns = turns_of(narrow, "a", SENT + 3, params=params)
    await engine.until(lambda: engine.num_live == SENT)
    narrow.push(phase)
    assert narrow.sampler.entries()["generations_queued"] == 0
    await engine.release()
    narrow.push()
    await finished(*turns)
    assert narrow.faults == []


async def test_turns_in_the_queue_continue_elsewhere_when_their_engine_is_fenced(
    engine: ScriptedEngine, narrow: SamplerDriver
) -> None:
    async with ScriptedEngine(endless_token) as other:
        turns = turns_of(narrow, "a", SENT + 3)
        await engine.until(lambda: engine.num_live == SENT)
        narrow.engines = (other,)
        narrow.push()
        await finished(*turns)
        assert narrow.num_running() == 0
        assert (engine.num_seen("/generate"), other.num_seen("/generate")) == (SENT, SENT + 3)


async def test_a_queued_turn_is_not_silent_and_meets_no_deadline(
    engine: ScriptedEngine,
) -> None:
    clock = FakeClock()
    engine.max_running = PLACES
    engine.hold()
    settings = GenerationSettings(engine_wait_s=1.0, answer_timeout_s=1.0)
    driver = SamplerDriver(engine, clock=clock, settings=settings)
    long = [driver.start(num_tokens=1_000) for _ in range(SENT)]  # longer than the silence limit
    [queued] = turns_of(driver, "b", 1, stream=True)
    without_engine = driver.start(min_policy_version=7)
    clock.advance(90.0)
    await without_engine.wait(TO_THE_END)
    assert without_engine.state is GenerationState.VOID
    assert queued.state is GenerationState.RUNNING
    for each in long:
        each.seal("over")
    await engine.release()
    await finished(queued)
    assert driver.faults == []
    await driver.sampler.close()
