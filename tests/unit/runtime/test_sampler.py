"""Generations with a scripted engine over real sockets."""

import asyncio
import gc
import random
import weakref
from collections.abc import AsyncIterator

import pytest
from structlog.testing import capture_logs

from rollmesh.core.errors import (
    EngineOverloaded,
    EngineRefused,
    EngineUnavailable,
    LocalShortage,
    RequestLost,
)
from rollmesh.core.types import OutputGrammar, VersionRun
from rollmesh.engine.connection import PART_BYTES
from rollmesh.runtime.generation.events import fall_back
from rollmesh.runtime.generation.generation import Generation, GenerationState
from rollmesh.runtime.generation.sampling import GenerationSettings
from rollmesh.testing.clock import FakeClock
from rollmesh.testing.engine import ScriptedEngine, endless_token
from rollmesh.testing.faults import Fault
from rollmesh.wire.fleet import EnginePhase, FleetChanged
from tests.shortage import no_descriptor_left
from tests.unit.engine.http_peer import Unread
from tests.unit.runtime.sampler_driver import (
    PAUSES,
    TO_THE_END,
    SamplerDriver,
    expected,
    until,
)
from tests.unit.runtime.sampler_driver import engine as engine  # a fixture


@pytest.fixture
async def driver(engine: ScriptedEngine) -> AsyncIterator[SamplerDriver]:
    driver = SamplerDriver(engine)
    yield driver
    await driver.sampler.close()


async def test_a_plain_generation_is_one_call(
    engine: ScriptedEngine, driver: SamplerDriver
) -> None:
    generation = driver.start()
    await generation.wait(TO_THE_END)
    assert generation.state is GenerationState.COMMITTED
    assert generation.finish_reason == "length"
    assert list(generation.token_ids) == expected(6)
    assert (generation.policy_versions, generation.engines) == ([VersionRun(0, 6, 0)], [engine.url])
    assert [request.body.get("stream") for request in engine.seen] == [None]


async def test_streamed_tokens_reach_the_reader_as_they_arrive(
    engine: ScriptedEngine, driver: SamplerDriver
) -> None:
    engine.hold()
    generation = driver.start(stream=True)
    for num_tokens in range(3):
        await engine.allow(1)
        assert await generation.wait(num_tokens)
        assert list(generation.token_ids) == expected(num_tokens + 1)
    await engine.release()
    await generation.wait(TO_THE_END)
    assert list(generation.token_ids) == expected(6)
    assert await generation.wait(5)
    assert not await generation.wait(6)


@pytest.mark.parametrize("stream", [True, False])
@PAUSES
async def test_an_update_during_a_turn_resumes_it_from_the_exact_tokens(
    engine: ScriptedEngine, driver: SamplerDriver, stream: bool, phase: EnginePhase
) -> None:
    engine.hold()
    generation = driver.start(stream=stream)
    await engine.allow(2)
    await engine.until(lambda: engine.num_sampled == 2)
    driver.push(phase)
    await engine.update(1)
    driver.push()
    await engine.release()
    await generation.wait(TO_THE_END)
    assert list(generation.token_ids) == expected(6, 0, 0, 1, 1, 1, 1)
    assert generation.policy_versions == [VersionRun(0, 2, 0), VersionRun(1, 4, 0)]
    keys = [r.body["extra_key"] for r in engine.seen if r.path == "/generate"]
    assert (generation.finish_reason, keys[-1]) == ("length", "1")


async def test_a_reader_that_leaves_parks_the_turn_and_its_retry_resumes_it(
    engine: ScriptedEngine, driver: SamplerDriver
) -> None:
    engine.hold()
    generation = driver.start()
    await engine.allow(2)
    await engine.until(lambda: engine.num_sampled == 2)
    generation.leave()
    assert generation.state is GenerationState.PARKED
    await engine.until(lambda: engine.num_live == 0)
    await engine.release()
    generation.join()
    await generation.wait(TO_THE_END)
    assert list(generation.token_ids) == expected(6)
    assert engine.num_seen("/generate") == 2


@pytest.mark.parametrize("fault", [Fault.ERROR, Fault.CUT])
async def test_a_failed_attempt_is_reported_and_continued_at_another_engine(fault: Fault) -> None:
    async with ScriptedEngine(endless_token) as first, ScriptedEngine(endless_token) as second:
        driver = SamplerDriver(first, second)
        first.faults.append(fault)
        second.faults.append(fault)
        generation = driver.start(stream=True)
        await generation.wait(TO_THE_END)
        assert list(generation.token_ids) == expected(6)
        assert {fault.url for fault in driver.faults} == {first.url, second.url}
        await driver.sampler.close()


async def test_a_turn_waits_for_a_dead_engine_and_continues_at_its_successor(
    engine: ScriptedEngine, driver: SamplerDriver
) -> None:
    engine.hold()
    generation = driver.start(stream=True)
    await engine.allow(2)
    await generation.wait(1)
    await engine.die()
    driver.push(EnginePhase.FENCED)
    await engine.restart()
    await engine.release()
    driver.push(incarnation="i2")
    await generation.wait(TO_THE_END)
    assert list(generation.token_ids) == expected(6)


async def test_a_hanging_attempt_is_dropped_when_its_engine_is_fenced(
    engine: ScriptedEngine, driver: SamplerDriver
) -> None:
    engine.faults.append(Fault.HANG)
    generation = driver.start()
    await engine.until(lambda: engine.num_seen("/generate") == 1)
    driver.push(EnginePhase.FENCED)
    driver.push()
    await generation.wait(TO_THE_END)
    assert list(generation.token_ids) == expected(6)


async def test_an_attempt_survives_the_first_probe_of_its_engine(
    engine: ScriptedEngine, driver: SamplerDriver
) -> None:
    engine.hold()
    driver.push(incarnation="")
    generation = driver.start()
    await engine.until(lambda: engine.num_live == 1)
    driver.push()
    await engine.release()
    await generation.wait(TO_THE_END)
    assert engine.num_seen("/generate") == 1


async def test_a_refusal_reaches_the_reader_as_an_error(
    engine: ScriptedEngine, driver: SamplerDriver
) -> None:
    engine.faults.append(Fault.BAD_REQUEST)
    generation = driver.start()
    await generation.wait(TO_THE_END)
    assert generation.state is GenerationState.VOID
    assert isinstance(generation.error, EngineRefused)


async def test_a_lost_image_fails_its_turn_once_and_is_no_fault_of_an_engine(
    driver: SamplerDriver,
) -> None:
    lost = Unread(b"data:image/png;base64," + b"A" * 2 * PART_BYTES, is_lost=True)
    generation = driver.start(images=(lost,))
    await generation.wait(TO_THE_END)
    assert isinstance(generation.error, RequestLost)
    assert (lost.num_read, driver.faults) == (PART_BYTES, [])
    assert driver.sampler.cache_entries()["engines_avoided"] == 0


async def test_a_seal_wakes_every_waiter_and_aborts_the_attempt(
    engine: ScriptedEngine, driver: SamplerDriver
) -> None:
    engine.hold()
    generation = driver.start()
    waiters = [asyncio.ensure_future(generation.wait(0)) for _ in range(3)]
    await engine.until(lambda: engine.num_live == 1)
    generation.seal("the rollout ended")
    assert await asyncio.gather(*waiters) == [False, False, False]
    assert str(generation.error) == "the rollout ended"
    await engine.until(lambda: engine.num_live == 0)


@PAUSES
async def test_waiting_for_an_engine_times_out_but_not_during_a_pause(phase: EnginePhase) -> None:
    async with ScriptedEngine() as engine:
        driver = SamplerDriver(engine, clock=(clock := FakeClock()))
        driver.push(phase)
        generation = driver.start()
        clock.advance(1000.0)
        driver.push(EnginePhase.FENCED)
        assert generation.state is GenerationState.RUNNING
        clock.advance(120.0)
        driver.push(EnginePhase.FENCED)
        assert isinstance(generation.error, EngineUnavailable)
        await driver.sampler.close()


async def test_a_stop_string_ends_the_turn_and_is_reported(
    engine: ScriptedEngine, driver: SamplerDriver
) -> None:
    third = expected(3)[2]
    generation = driver.start(num_tokens=50, params={"stop": (f"<{third}>",)})
    await generation.wait(TO_THE_END)
    assert generation.matched_stop == f"<{third}>"
    assert list(generation.token_ids) == expected(3)
    await engine.until(lambda: engine.num_live == 0)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("num_ignored_aborts", [0, 1])
async def test_an_attempt_ends_at_the_engine_when_its_last_reader_has_left(
    engine: ScriptedEngine, driver: SamplerDriver, stream: bool, num_ignored_aborts: int
) -> None:
    engine.hold()
    engine.num_ignored_aborts = num_ignored_aborts
    generation = driver.start(stream=stream)
    generation.join()
    await engine.until(lambda: engine.num_live == 1)
    generation.leave()
    await asyncio.sleep(0)
    assert engine.num_live == 1
    generation.leave()
    await until(lambda: engine.num_live == driver.num_running() == 0)
    assert generation.state is GenerationState.PARKED


async def test_an_abandoned_parked_turn_leaves_nothing(engine: ScriptedEngine) -> None:
    driver = SamplerDriver(engine, settings=GenerationSettings(retry_window_s=0.05))
    engine.hold()
    held = [driver.start()]
    await engine.until(lambda: engine.num_live == 1)
    held[0].leave()
    gc.disable()  # reference counts alone must free it
    try:
        await until(lambda: held[0].state is GenerationState.VOID)
        kept = weakref.ref(held.pop())
        await until(lambda: engine.num_live == driver.num_running() == 0 and kept() is None)
        assert driver.num_running() == 0
    finally:
        gc.enable()
    await driver.sampler.close()


@pytest.mark.parametrize("fault", [Fault.BUSY, Fault.FULL])
@pytest.mark.parametrize("stream", [True, False])
async def test_a_full_queue_is_waited_for_and_not_reported(
    engine: ScriptedEngine, driver: SamplerDriver, fault: Fault, stream: bool
) -> None:
    engine.faults.extend([fault, fault])
    generation = driver.start(stream=stream)
    await generation.wait(TO_THE_END)
    assert list(generation.token_ids) == expected(6)
    assert driver.faults == []


async def test_queues_that_stay_full_are_an_overload_error(engine: ScriptedEngine) -> None:
    driver = SamplerDriver(engine, settings=GenerationSettings(max_full_queues=1))
    engine.faults.extend([Fault.FULL] * 2)
    generation = driver.start()
    await generation.wait(TO_THE_END)
    assert isinstance(generation.error, EngineOverloaded)
    assert engine.url in str(generation.error)
    await driver.sampler.close()


async def test_a_streamed_turn_with_a_grammar_fails_when_it_is_cut(
    engine: ScriptedEngine, driver: SamplerDriver
) -> None:
    engine.faults.append(Fault.CUT)
    generation = driver.start(stream=True, params={"grammar": OutputGrammar("regex", "a+")})
    await generation.wait(TO_THE_END)
    assert isinstance(generation.error, EngineUnavailable)
    assert "cannot be resumed" in str(generation.error)


async def test_likeliest_tokens_are_kept_over_an_update(
    engine: ScriptedEngine, driver: SamplerDriver
) -> None:
    engine.hold()
    generation = driver.start(stream=True, num_top_logprobs=2)
    await engine.allow(2)
    await generation.wait(1)
    await engine.update(1)
    await engine.release()
    await generation.wait(TO_THE_END)
    assert list(generation.token_ids) == expected(6, 0, 0, 1, 1, 1, 1)
    assert [place[0][1] for place in generation.top_logprobs] == expected(6, 0, 0, 1, 1, 1, 1)


async def test_a_prompt_encoded_as_json_is_resumed_from_the_exact_tokens(
    engine: ScriptedEngine, driver: SamplerDriver
) -> None:
    engine.faults.append(Fault.CUT)
    generation = driver.start(stream=True, prompt_json=b"5,6,7")
    await generation.wait(TO_THE_END)
    assert list(generation.token_ids) == expected(6)


async def test_a_failing_engine_is_logged_once_and_reported_for_each_attempt(
    engine: ScriptedEngine, driver: SamplerDriver, caplog: pytest.LogCaptureFixture
) -> None:
    engine.faults.extend([Fault.ERROR] * 5)
    await asyncio.gather(*[driver.start().wait(TO_THE_END) for _ in range(5)])
    assert len(driver.faults) == 5
    assert caplog.text.count("engine.faulted") == 1


async def test_running_attempts_of_a_fenced_engine_continue_elsewhere() -> None:
    async with ScriptedEngine(endless_token) as sick, ScriptedEngine(endless_token) as well:
        driver = SamplerDriver(sick, well)
        sick.hold()
        well.hold()
        generations = [driver.start(session_key=f"s{n}", stream=bool(n % 2)) for n in range(8)]
        await until(lambda: (sick.num_live, well.num_live) == (4, 4))
        await sick.die()
        await well.release()
        await asyncio.gather(*[each.wait(TO_THE_END) for each in generations])
        assert [list(each.token_ids) for each in generations] == [expected(6)] * 8
        assert driver.num_running() == 0
        await driver.sampler.close()


async def test_an_engine_that_left_the_table_is_forgotten(
    engine: ScriptedEngine, driver: SamplerDriver
) -> None:
    await driver.start().wait(TO_THE_END)
    assert list(driver.sampler.clients) == [engine.url]
    driver.view.update(FleetChanged(driver.epoch + 1, ()), "router")
    assert not driver.sampler.clients


@pytest.mark.parametrize("seed", range(12))
async def test_the_attempt_counts_of_engines_are_right_after_any_events(seed: int) -> None:
    rng = random.Random(seed)
    async with ScriptedEngine(endless_token) as first, ScriptedEngine(endless_token) as second:
        engines = (first, second)
        settings = GenerationSettings(
            max_fruitless_attempts=1000, backoff_s=0.001, max_backoff_s=0.01
        )
        driver = SamplerDriver(*engines, settings=settings)
        for engine in engines:
            engine.hold()
        generations: list[Generation] = []
        for _ in range(25):
            await disturb(rng, driver, generations)
            await until(lambda: all(e.num_live == driver.view.num_requests(e.url) for e in engines))
        for generation in generations:
            while generation.machine.num_readers:
                generation.leave()
        await until(lambda: driver.num_running() == first.num_live == second.num_live == 0)
        for generation in generations:
            assert list(generation.token_ids) == expected(len(generation.token_ids))
        await driver.sampler.close()


async def disturb(rng: random.Random, driver: SamplerDriver, generations: list[Generation]) -> None:
    """Take one random action of a client or an engine."""
    engine = rng.choice(driver.engines)
    one = rng.choice(generations) if generations else None
    match rng.choice(
        ("start", "start", "leave", "join", "seal", "fault", "tokens", "die", "pause")
    ):
        case "start":
            key = f"s{rng.randrange(6)}"
            generations.append(driver.start(session_key=key, stream=rng.random() < 0.5))
        case "leave" if one:
            one.leave()
        case "join" if one:
            one.join()
        case "seal" if one:
            one.seal("enough")
        case "fault":
            kinds = (Fault.BUSY, Fault.FULL, Fault.ERROR, Fault.CUT, Fault.BAD_REQUEST)
            engine.faults.append(rng.choice(kinds))
        case "tokens":
            await engine.allow(rng.randrange(1, 9))
        case "die":
            await engine.restart()
        case _:
            await engine.update(0)


async def test_close_seals_running_turns_and_leaves_no_task(engine: ScriptedEngine) -> None:
    driver = SamplerDriver(engine)
    engine.hold()
    generation = driver.start()
    await engine.until(lambda: engine.num_live == 1)
    before = asyncio.all_tasks()
    await driver.sampler.close()
    assert generation.state is GenerationState.VOID
    assert not [task for task in before if task.get_name().startswith("leg") and not task.done()]


async def test_requests_of_two_samplers_never_share_an_id(engine: ScriptedEngine) -> None:
    drivers = [SamplerDriver(engine), SamplerDriver(engine)]
    await asyncio.gather(*[driver.start().wait(TO_THE_END) for driver in drivers])
    assert len({request.body["rid"] for request in engine.seen}) == 2
    for driver in drivers:
        await driver.sampler.close()


async def test_sessions_that_fall_back_are_counted_each_and_logged_once(
    engine: ScriptedEngine,
) -> None:
    driver = SamplerDriver(engine)
    await engine.update(3)
    driver.push(has_publisher=False)
    with capture_logs() as entries:
        for session in ("a", "b"):
            generation = driver.start(session_key=session, min_policy_version=7)
            await generation.wait(TO_THE_END)
            assert generation.state is GenerationState.COMMITTED
            assert fall_back(generation.policy_versions, 7) == (3, 1)
    fallen = [entry for entry in entries if entry["event"] == "engine.fell_back"]
    assert [(each["session_version"], each["policy_version"]) for each in fallen] == [(7, 3)]
    assert fallen[0]["log_level"] == "warning"
    await driver.sampler.close()


async def test_a_call_that_waits_for_a_publisher_is_shown_and_logged_with_its_reason(
    engine: ScriptedEngine,
) -> None:
    clock = FakeClock()
    driver = SamplerDriver(engine, clock=clock, settings=GenerationSettings(engine_wait_s=60.0))
    with capture_logs() as entries:
        generation = driver.start(min_policy_version=7)
        await until(driver.sampler.waiting)
        clock.advance(59.0)
        await until(lambda: entries)
        waiting = driver.sampler.waiting()
        assert waiting
        assert (waiting["num_calls"], waiting["waited_s"]) == (1, 59.0)
        clock.advance(1.0)
        await generation.wait(TO_THE_END)
    [entry] = [entry for entry in entries if entry["event"] == "engine.awaited"]
    why = f"{engine.url}: ready, with policy version 0; the session has seen 7"
    for text in (entry["why"], waiting["why"], str(generation.error)):
        assert why in text
    await until(lambda: driver.sampler.waiting() is None)
    assert engine.num_seen("/generate") == 0
    await driver.sampler.close()


async def test_an_attempt_that_waits_for_a_descriptor_is_not_silent_and_faults_no_engine(
    engine: ScriptedEngine,
) -> None:
    clock = FakeClock()
    driver = SamplerDriver(engine, clock=clock, settings=GenerationSettings(answer_timeout_s=1.0))
    with no_descriptor_left():
        generation = driver.start(stream=True)
        while (driver.sampler.waiting() or {}).get("waited_s", 0.0) < 5.0:
            clock.advance(0.1)
            await asyncio.sleep(0)
        assert "ulimit -n" in (driver.sampler.waiting() or {})["why"]
        assert generation.state is GenerationState.RUNNING
    await generation.wait(TO_THE_END)
    assert list(generation.token_ids) == expected(6)
    assert (driver.faults, engine.num_seen("/generate")) == ([], 1)
    await driver.sampler.close()


async def test_a_turn_that_waited_too_long_for_a_descriptor_names_the_remedy(
    engine: ScriptedEngine,
) -> None:
    driver = SamplerDriver(engine, settings=GenerationSettings(engine_wait_s=0.1))
    with no_descriptor_left():
        generation = driver.start()
        await generation.wait(TO_THE_END)
    assert generation.state is GenerationState.VOID
    assert isinstance(generation.error, LocalShortage)
    assert driver.faults == []
    await driver.sampler.close()
