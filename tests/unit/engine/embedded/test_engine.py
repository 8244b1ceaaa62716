"""Commands between steps: aborts, pauses, updates; draws by seed; and the thread that steps."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import torch

from rollmesh.engine.embedded.engine import (
    Engine,
    EngineRunState,
    MemoryOccupation,
    PauseMode,
    ProgressReader,
    StepLoop,
    WeightUpdate,
)
from rollmesh.engine.embedded.model import Model
from rollmesh.engine.embedded.request import ABORTED, QUEUE_FULL, RequestPhase
from tests.unit.engine.embedded.driving import ask, finish_all, make_engine, output, random_prompt


def update(
    engine: Engine, model: Model, policy_version: str | None, *, flushes: bool = True
) -> list[str]:
    """Start an update; the returned list receives its answer."""
    answers: list[str] = []
    engine.update(WeightUpdate(model, policy_version, flushes, answers.append))
    return answers


def test_a_seed_gives_the_same_tokens_whatever_the_batch(model: Model) -> None:
    prompt = random_prompt(30)
    alone = ask(prompt, "alone", new=12, seed=77)
    finish_all(make_engine(model), alone)
    crowd = [ask(random_prompt(5 + s, s), str(s), new=20, seed=s) for s in range(12)]
    engine = make_engine(model, max_step_tokens=16)
    for request in crowd:
        engine.submit(request)
        engine.step()
    among = ask(prompt, "among", new=12, seed=77)
    finish_all(engine, among)
    assert output(among) == output(alone)
    other = ask(prompt, "other", new=12, seed=78)
    finish_all(engine, other)
    assert output(other) != output(alone)


def test_a_resumed_generation_samples_the_same_tokens(model: Model) -> None:
    prompt = random_prompt(20)
    whole = ask(prompt, "whole", new=12, seed=5)
    finish_all(make_engine(model), whole)
    engine = make_engine(model)
    first = ask(prompt, "attempt-1", new=5, seed=5)
    finish_all(engine, first)
    second = ask(prompt + output(first), "attempt-2", new=7, seed=5)
    finish_all(engine, second)
    assert output(first) + output(second) == output(whole)


def test_abort_during_a_generation_keeps_its_tokens(model: Model) -> None:
    engine = make_engine(model)
    request = ask(random_prompt(10), "1", new=50)
    engine.submit(request)
    for _ in range(4):
        engine.step()
    engine.abort("1")
    (progress,) = engine.step()
    assert progress.finish == ABORTED
    assert progress.num_output_tokens == len(request.logprobs) == 4
    assert not engine.has_work
    assert engine.memory.num_held == 0


def test_abort_before_the_request_is_known_does_nothing(model: Model) -> None:
    engine = make_engine(model)
    engine.abort("later")
    request = ask(random_prompt(5), "later", new=3)
    (progress,) = finish_all(engine, request)
    assert progress.num_output_tokens == 3


def test_abort_reaches_waiting_requests_and_spares_others(model: Model) -> None:
    engine = make_engine(model, max_running=1)
    runs, waits = ask(random_prompt(5), "1", new=3), ask(random_prompt(5), "2", new=3)
    engine.submit(runs)
    engine.submit(waits)
    engine.step()
    engine.abort("2")
    ended = {p.request.rid: p.num_output_tokens for p in finish_all(engine) if p.finish}
    assert ended == {"2": 0, "1": 3}


def test_pause_abort_ends_all_and_holds_new_ones(model: Model) -> None:
    engine = make_engine(model)
    engine.submit(ask(random_prompt(5), "1", new=30))
    engine.step()
    engine.pause(PauseMode.ABORT)
    assert [p.finish for p in engine.step()] == [ABORTED]
    late = ask(random_prompt(5), "2", new=2)
    engine.submit(late)
    assert engine.step() == []
    assert late.phase is RequestPhase.WAITING
    engine.resume()
    assert [p.request.rid for p in finish_all(engine)] == ["2"]


@pytest.mark.parametrize(
    ("mode", "num_retractions"), [(PauseMode.RETRACT, 1), (PauseMode.IN_PLACE, 0)]
)
def test_a_paused_request_ends_with_the_same_tokens(
    model: Model, mode: PauseMode, num_retractions: int
) -> None:
    undisturbed = ask(random_prompt(15), "1", new=10, seed=3)
    finish_all(make_engine(model), undisturbed)
    engine = make_engine(model)
    request = ask(random_prompt(15), "2", new=10, seed=3)
    engine.submit(request)
    for _ in range(4):
        engine.step()
    engine.pause(mode)
    assert engine.run_state is EngineRunState.PAUSED
    assert engine.step() == []
    assert request.num_output_tokens == 4
    assert engine.flush() is (mode is PauseMode.RETRACT), "memory in use is not flushed"
    engine.resume()
    finish_all(engine)
    assert request.num_retractions == num_retractions
    assert output(request) == output(undisturbed)


def test_flush_forgets_prefixes_and_refuses_while_requests_run(model: Model) -> None:
    engine = make_engine(model)
    prompt = random_prompt(20)
    request = ask(prompt, "1", new=3)
    engine.submit(request)
    assert not engine.flush()
    engine.step()
    assert not engine.flush()
    finish_all(engine)
    assert engine.flush()
    again = ask(prompt, "2", new=1)
    finish_all(engine, again)
    assert again.num_cached == 0


def test_an_update_while_paused_splits_a_request_into_version_spans(
    model: Model, other_model: Model
) -> None:
    engine = make_engine(model)
    request = ask(random_prompt(10), "1", new=9)
    engine.submit(request)
    for _ in range(4):
        engine.step()
    engine.pause(PauseMode.RETRACT)
    assert update(engine, other_model, "1") == [""]
    assert engine.policy_version == "1"
    engine.resume()
    (progress,) = finish_all(engine)
    spans = [(span.policy_version, span.start) for span in request.versions]
    assert spans == [("0", 0), ("1", 4)]
    assert progress.policy_version == "1"
    assert request.num_output_tokens == 9


def test_an_update_waits_for_running_requests_and_new_ones_wait_for_it(
    model: Model, other_model: Model
) -> None:
    engine = make_engine(model)
    early, late = ask(random_prompt(10), "1", new=6), ask(random_prompt(10, 1), "2", new=2)
    engine.submit(early)
    engine.step()
    answers = update(engine, other_model, "1")
    engine.submit(late)
    assert answers == []
    while early.phase is not RequestPhase.FINISHED:
        assert late.phase is RequestPhase.WAITING
        engine.step()
    assert answers == [""]
    finish_all(engine)
    assert [span.policy_version for span in early.versions] == ["0"]
    assert [span.policy_version for span in late.versions] == ["1"]


def test_abort_reaches_requests_that_wait_for_an_update(model: Model, other_model: Model) -> None:
    engine = make_engine(model)
    engine.submit(ask(random_prompt(10), "1", new=6))
    engine.step()
    answers = update(engine, other_model, "1")
    engine.submit(ask(random_prompt(5), "2"))
    engine.abort(None)
    assert sorted(p.request.rid for p in engine.step() if p.finish == ABORTED) == ["1", "2"]
    assert answers == [""]


def test_old_prefixes_do_not_serve_new_weights(model: Model, other_model: Model) -> None:
    engine = make_engine(model)
    prompt = random_prompt(20)
    finish_all(engine, ask(prompt, "1", new=1))
    assert update(engine, other_model, "1") == [""]
    mixed = ask(prompt, "2", new=4, seed=1)
    finish_all(engine, mixed)
    fresh = ask(prompt, "3", new=4, seed=1)
    finish_all(make_engine(other_model), fresh)
    assert mixed.num_cached == 0
    assert output(mixed) == output(fresh)
    assert mixed.logprobs == pytest.approx(fresh.logprobs, abs=1e-5)


def test_a_refused_update_returns_its_reason_and_changes_nothing(
    model: Model, other_model: Model
) -> None:
    engine = make_engine(model)
    engine.submit(ask(random_prompt(10), "1", new=9))
    engine.step()
    engine.pause(PauseMode.IN_PLACE)
    (why,) = update(engine, other_model, "1")
    assert "flush_cache false" in why
    assert engine.policy_version == "0"
    assert update(engine, other_model, "1", flushes=False) == [""]
    assert engine.policy_version == "1"


def test_a_second_update_is_refused_while_one_waits(model: Model, other_model: Model) -> None:
    engine = make_engine(model)
    engine.submit(ask(random_prompt(10), "1", new=9))
    engine.step()
    first, second = update(engine, other_model, "1"), update(engine, other_model, "2")
    assert second == ["another weight update is waiting"]
    finish_all(engine)
    assert first == [""]
    assert engine.policy_version == "1"


def test_only_streaming_requests_report_progress_at_each_token(model: Model) -> None:
    engine = make_engine(model)
    streams, plain = (
        ask(random_prompt(5), "1", new=3, streams=True),
        ask(random_prompt(5), "2", new=3),
    )
    reported = [(p.request.rid, p.num_output_tokens) for p in finish_all(engine, streams, plain)]
    assert reported == [("1", 1), ("1", 2), ("1", 3), ("2", 3)]


def test_a_request_that_finds_the_queue_full_ends_at_once(model: Model) -> None:
    engine = make_engine(model, max_running=1, max_queued=1)
    first, second, third = (ask(random_prompt(5), rid, new=3) for rid in "123")
    engine.submit(first)
    engine.step()
    engine.submit(second)
    engine.submit(third)
    (progress,) = [each for each in engine.step() if each.finish is not None]
    assert (progress.request.rid, progress.finish) == ("3", QUEUE_FULL)
    ended = {each.request.rid: each.finish for each in finish_all(engine) if each.finish}
    assert [finish.type for finish in ended.values()] == ["length", "length"]


def test_released_memory_is_gone_until_an_update(folder: Path) -> None:
    prompt = random_prompt(20)
    expected = ask(prompt, "before", new=8, seed=5)
    model = Model(folder, torch.float32)
    engine = make_engine(model)
    finish_all(engine, expected)
    assert engine.release() == ""
    assert engine.release() == ""
    assert engine.memory.kv.numel() == 0
    with pytest.raises(IndexError):
        model.projections(0)
    after = ask(prompt, "after", new=8, seed=5)
    engine.submit(after)
    assert update(engine, model, "2") == [
        "its memory is released; resume_memory_occupation comes first"
    ]
    assert engine.resume_memory() == ""
    assert engine.occupation is MemoryOccupation.BARE
    assert not engine.has_work
    assert update(engine, Model(folder, torch.float32), "2") == [""]
    finish_all(engine)
    assert output(after) == output(expected)


def test_memory_is_not_released_while_requests_run(folder: Path) -> None:
    engine = make_engine(Model(folder, torch.float32))
    engine.submit(ask(random_prompt(10), "1", new=50))
    engine.step()
    assert "no ongoing request" in engine.release()
    assert engine.occupation is MemoryOccupation.HELD
    engine.pause(PauseMode.ABORT)
    assert engine.memory.num_held == 0
    assert engine.release() == ""


@pytest.fixture
async def steps(model: Model) -> AsyncIterator[StepLoop]:
    loop = StepLoop(make_engine(model), asyncio.get_running_loop())
    loop.start()
    yield loop
    loop.stop()


async def test_a_plain_reader_gets_one_result_at_the_end(steps: StepLoop) -> None:
    reader = steps.submit(ask(random_prompt(5), "1", new=6))
    assert steps.knows("1")
    progress = await reader.next()
    assert progress.finish is not None
    assert progress.num_output_tokens == 6
    assert not steps.knows("1")


async def test_a_streaming_reader_gets_growing_results_to_the_end(steps: StepLoop) -> None:
    reader = steps.submit(ask(random_prompt(5), "1", new=6, streams=True))
    counts = []
    while True:
        progress = await reader.next()
        counts.append(progress.num_output_tokens)
        if progress.finish is not None:
            break
    assert counts == sorted(set(counts))
    assert counts[-1] == 6


async def test_commands_run_in_order_between_steps(steps: StepLoop) -> None:
    await steps.call(lambda engine: engine.pause(PauseMode.ABORT))
    reader = steps.submit(ask(random_prompt(5), "1", new=6))
    assert await steps.call(lambda engine: len(engine.scheduler.waiting)) == 1
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


async def test_an_error_in_a_step_ends_the_thread_and_is_reported(model: Model) -> None:
    engine = make_engine(model)
    steps = StepLoop(engine, asyncio.get_running_loop())
    steps.start()
    broken = ask(random_prompt(5), "1")
    broken.row = 0  # as if it were already admitted: a bug, which an assert finds
    steps.submit(broken)
    with pytest.raises(AssertionError, match="admitted twice"):
        await steps.failed
    steps.stop()


async def test_unfetched_progress_is_replaced_by_newer(model: Model) -> None:
    engine: Engine = make_engine(model)
    request = ask(random_prompt(5), "1", new=4, streams=True)
    engine.submit(request)
    reader = ProgressReader(request)
    while engine.has_work:
        for progress in engine.step():
            reader.put(progress)
    latest = await reader.next()
    assert latest.num_output_tokens == 4
    assert reader.latest is None
