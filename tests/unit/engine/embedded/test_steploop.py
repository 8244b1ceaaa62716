"""The bridge between the event loop and the thread that makes steps."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from rollmesh.engine.embedded.engine import Engine, PauseMode
from rollmesh.engine.embedded.model import Model
from rollmesh.engine.embedded.request import ABORTED
from rollmesh.engine.embedded.steploop import Reader, StepLoop
from tests.unit.engine.embedded.driving import ask, make_engine, random_prompt


@pytest.fixture
async def steps(model: Model) -> AsyncIterator[StepLoop]:
    loop = StepLoop(make_engine(model), asyncio.get_running_loop())
    loop.start()
    yield loop
    loop.stop()


async def test_a_plain_reader_is_told_once_at_the_end(steps: StepLoop) -> None:
    reader = steps.submit(ask(random_prompt(5), "1", new=6))
    assert steps.knows("1")
    progress = await reader.next()
    assert progress.finish is not None
    assert progress.num_output_tokens == 6
    assert not steps.knows("1")


async def test_a_streaming_reader_sees_ever_more_up_to_the_end(steps: StepLoop) -> None:
    reader = steps.submit(ask(random_prompt(5), "1", new=6, streams=True))
    counts = []
    while True:
        progress = await reader.next()
        counts.append(progress.num_output_tokens)
        if progress.finish is not None:
            break
    assert counts == sorted(set(counts))
    assert counts[-1] == 6


async def test_orders_are_obeyed_in_their_order_between_steps(steps: StepLoop) -> None:
    await steps.ask(lambda engine: engine.pause(PauseMode.ABORT))
    reader = steps.submit(ask(random_prompt(5), "1", new=6))
    assert await steps.ask(lambda engine: len(engine.scheduler.waiting)) == 1
    steps.abort("1")
    progress = await reader.next()
    assert progress.finish == ABORTED
    assert progress.num_output_tokens == 0


async def test_a_reader_that_left_aborts_its_own_request_and_no_later_one(
    steps: StepLoop,
) -> None:
    first = steps.submit(ask(random_prompt(5), "1", new=2))
    await first.next()
    second = steps.submit(ask(random_prompt(5), "1", new=2))
    steps.leave(first)
    progress = await second.next()
    assert progress.num_output_tokens == 2
    third = steps.submit(ask(random_prompt(5), "1", new=200))
    steps.leave(third)
    assert (await third.next()).finish == ABORTED


async def test_many_requests_end_together(steps: StepLoop) -> None:
    readers = [steps.submit(ask(random_prompt(9, s), str(s), new=3, seed=s)) for s in range(20)]
    ended = await asyncio.gather(*(reader.next() for reader in readers))
    assert [progress.request.rid for progress in ended] == [str(s) for s in range(20)]


async def test_a_fault_in_a_step_ends_the_thread_and_is_told(model: Model) -> None:
    engine = make_engine(model)
    steps = StepLoop(engine, asyncio.get_running_loop())
    steps.start()
    broken = ask(random_prompt(5), "1")
    broken.row = 0  # as if it had been admitted already: our own mistake, found by an assert
    steps.submit(broken)
    with pytest.raises(AssertionError, match="admitted twice"):
        await steps.failed
    steps.stop()


async def test_progress_that_nobody_fetched_is_replaced_by_newer(model: Model) -> None:
    engine: Engine = make_engine(model)
    request = ask(random_prompt(5), "1", new=4, streams=True)
    engine.submit(request)
    reader = Reader(request)
    while engine.has_work:
        for progress in engine.step():
            reader.put(progress)
    latest = await reader.next()
    assert latest.num_output_tokens == 4
    assert reader.latest is None
