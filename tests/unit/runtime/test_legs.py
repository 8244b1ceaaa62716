"""Generations carried to a scripted engine over real sockets."""

import asyncio
from collections.abc import AsyncIterator, Sequence

import pytest

from rollmesh.core.errors import EngineRefused, EngineUnavailable
from rollmesh.core.types import SamplingParams, VersionRun
from rollmesh.engine.view import FleetView
from rollmesh.runtime.generation import GenerationSettings, GenerationState
from rollmesh.runtime.generation_events import GenerationRequest
from rollmesh.runtime.legs import Generation, Sampler, SamplerParts
from rollmesh.runtime.stops import StopStrings
from rollmesh.testing.clock import FakeClock
from rollmesh.testing.engine import VOCAB_SIZE, Fault, ScriptedEngine, endless_token
from rollmesh.wire.messages import EngineFaulted, EnginePhase, EngineRow, FleetChanged

PROMPT = [5, 6, 7]
TO_THE_END = 2**31


class Bench:
    """A sampler over scripted engines, with the table in the test's hand."""

    def __init__(self, *engines: ScriptedEngine, clock: FakeClock | None = None) -> None:
        self.engines = engines
        self.view = FleetView()
        self.faults: list[EngineFaulted] = []
        self.epoch = 0
        parts = SamplerParts(
            view=self.view,
            vocab_size=VOCAB_SIZE,
            report=self.faults.append,
            new_matcher=lambda stops: StopStrings(stops, Words()),
        )
        self.sampler = Sampler(parts, GenerationSettings(), clock)
        self.push()

    def push(self, phase: EnginePhase = EnginePhase.READY, incarnation: str = "i1") -> None:
        """All engines in `phase`, at the versions that they serve."""
        self.epoch += 1
        rows = tuple(
            EngineRow(engine.url, incarnation, phase, int(engine.weight_version))
            for engine in self.engines
        )
        self.view.update(FleetChanged(self.epoch, rows), "router")

    def start(
        self, *, stream: bool = False, num_tokens: int = 6, stop: tuple[str, ...] = ()
    ) -> Generation:
        request = GenerationRequest(
            generation_id="g",
            session_key="s",
            prompt_ids=PROMPT,
            params=SamplingParams(max_tokens=num_tokens, stop=stop),
            stream=stream,
        )
        generation = self.sampler.start(request)
        generation.join()
        return generation


class Words:
    """Token 12 reads `<12>`."""

    def feed(self, token_ids: Sequence[int]) -> str:
        return "".join(f"<{token}>" for token in token_ids)


def expected(num_tokens: int, *versions: int) -> list[int]:
    context = list(PROMPT)
    for at in range(num_tokens):
        context.append(endless_token(versions[at] if versions else 0, context))
    return context[len(PROMPT) :]


@pytest.fixture
async def engine() -> AsyncIterator[ScriptedEngine]:
    async with ScriptedEngine(endless_token) as engine:
        yield engine


@pytest.fixture
async def bench(engine: ScriptedEngine) -> AsyncIterator[Bench]:
    bench = Bench(engine)
    yield bench
    await bench.sampler.close()


async def test_plain_generation_is_one_call(engine: ScriptedEngine, bench: Bench) -> None:
    generation = bench.start()
    await generation.wait(TO_THE_END)
    assert generation.state is GenerationState.COMMITTED
    assert generation.finish_reason == "length"
    assert list(generation.token_ids) == expected(6)
    assert generation.policy_versions == [VersionRun(0, 6)]
    assert [request.body.get("stream") for request in engine.seen] == [None]


async def test_streamed_tokens_reach_the_reader_as_they_come(
    engine: ScriptedEngine, bench: Bench
) -> None:
    engine.hold()
    generation = bench.start(stream=True)
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
async def test_update_in_mid_turn_resumes_from_the_exact_tokens(
    engine: ScriptedEngine, bench: Bench, stream: bool
) -> None:
    engine.hold()
    generation = bench.start(stream=stream)
    await engine.allow(2)
    await engine.until(lambda: engine.num_sampled == 2)
    bench.push(EnginePhase.UPDATING)
    await engine.update(1)
    bench.push()
    await engine.release()
    await generation.wait(TO_THE_END)
    assert list(generation.token_ids) == expected(6, 0, 0, 1, 1, 1, 1)
    assert generation.policy_versions == [VersionRun(0, 2), VersionRun(1, 4)]
    assert generation.finish_reason == "length"
    assert [r.body["extra_key"] for r in engine.seen if r.path == "/generate"][-1] == "1"


async def test_reader_who_leaves_parks_the_turn_and_its_retry_resumes_it(
    engine: ScriptedEngine, bench: Bench
) -> None:
    engine.hold()
    generation = bench.start()
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
async def test_failed_leg_is_reported_and_goes_on_at_another_engine(fault: Fault) -> None:
    async with ScriptedEngine(endless_token) as first, ScriptedEngine(endless_token) as second:
        bench = Bench(first, second)
        first.faults.append(fault)
        second.faults.append(fault)
        generation = bench.start(stream=True)
        await generation.wait(TO_THE_END)
        assert list(generation.token_ids) == expected(6)
        assert {fault.url for fault in bench.faults} == {first.url, second.url}
        await bench.sampler.close()


async def test_dead_engine_is_waited_for_and_its_successor_goes_on(
    engine: ScriptedEngine, bench: Bench
) -> None:
    engine.hold()
    generation = bench.start(stream=True)
    await engine.allow(2)
    await generation.wait(1)
    await engine.die()
    bench.push(EnginePhase.FENCED)
    await engine.restart()
    await engine.release()
    bench.push(incarnation="i2")
    await generation.wait(TO_THE_END)
    assert list(generation.token_ids) == expected(6)


async def test_hanging_leg_is_dropped_when_its_engine_is_fenced(
    engine: ScriptedEngine, bench: Bench
) -> None:
    engine.faults.append(Fault.HANG)
    generation = bench.start()
    await engine.until(lambda: engine.num_seen("/generate") == 1)
    bench.push(EnginePhase.FENCED)
    bench.push()
    await generation.wait(TO_THE_END)
    assert list(generation.token_ids) == expected(6)


async def test_leg_is_kept_when_its_engine_is_probed_for_the_first_time(
    engine: ScriptedEngine, bench: Bench
) -> None:
    engine.hold()
    bench.push(incarnation="")
    generation = bench.start()
    await engine.until(lambda: engine.num_live == 1)
    bench.push()
    await engine.release()
    await generation.wait(TO_THE_END)
    assert engine.num_seen("/generate") == 1


async def test_refusal_reaches_the_reader_as_an_error(engine: ScriptedEngine, bench: Bench) -> None:
    engine.faults.append(Fault.BAD_REQUEST)
    generation = bench.start()
    await generation.wait(TO_THE_END)
    assert generation.state is GenerationState.VOID
    assert isinstance(generation.error, EngineRefused)


async def test_seal_wakes_every_waiter_and_aborts_the_leg(
    engine: ScriptedEngine, bench: Bench
) -> None:
    engine.hold()
    generation = bench.start()
    waiters = [asyncio.ensure_future(generation.wait(0)) for _ in range(3)]
    await engine.until(lambda: engine.num_live == 1)
    generation.seal("the rollout ended")
    assert await asyncio.gather(*waiters) == [False, False, False]
    assert str(generation.error) == "the rollout ended"
    await engine.until(lambda: engine.num_live == 0)


async def test_no_engine_in_time_is_an_error_that_time_in_updates_does_not_bring() -> None:
    clock = FakeClock()
    async with ScriptedEngine() as engine:
        bench = Bench(engine, clock=clock)
        bench.push(EnginePhase.UPDATING)
        generation = bench.start()
        bench.push(EnginePhase.UPDATING)
        clock.advance(1000.0)
        bench.push(EnginePhase.FENCED)
        assert generation.state is GenerationState.RUNNING
        clock.advance(120.0)
        bench.push(EnginePhase.FENCED)
        assert isinstance(generation.error, EngineUnavailable)
        await bench.sampler.close()


async def test_stop_string_ends_the_turn_and_names_itself(
    engine: ScriptedEngine, bench: Bench
) -> None:
    third = expected(3)[2]
    generation = bench.start(num_tokens=50, stop=(f"<{third}>",))
    await generation.wait(TO_THE_END)
    assert generation.matched_stop == f"<{third}>"
    assert list(generation.token_ids) == expected(3)
    await engine.until(lambda: engine.num_live == 0)


async def test_close_seals_what_runs_and_leaves_no_task(engine: ScriptedEngine) -> None:
    bench = Bench(engine)
    engine.hold()
    generation = bench.start()
    await engine.until(lambda: engine.num_live == 1)
    before = asyncio.all_tasks()
    await bench.sampler.close()
    assert generation.state is GenerationState.VOID
    assert not [task for task in before if task.get_name().startswith("leg") and not task.done()]


async def test_requests_of_two_samplers_never_share_an_id(engine: ScriptedEngine) -> None:
    benches = [Bench(engine), Bench(engine)]
    await asyncio.gather(*[bench.start().wait(TO_THE_END) for bench in benches])
    assert len({request.body["rid"] for request in engine.seen}) == 2
    for bench in benches:
        await bench.sampler.close()
