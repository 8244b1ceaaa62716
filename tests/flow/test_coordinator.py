"""Engines that sleep and wake during turns: a real router and a real coordinator.

Each recorded turn is compared with the engine's own scores, so that no token is lost, doubled or
sampled from missing weights.
"""

import asyncio
import shutil
import signal
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from rollmesh.core.model_folders import WeightsProbe, leave_probe
from rollmesh.engine.http import HttpClient
from rollmesh.engine.members import adapter_name
from rollmesh.engine.sglang import SglangBackend
from rollmesh.runtime.generation.generation import Generation
from rollmesh.testing.engine import FakeMemoryState, ScriptedEngine, endless_token
from rollmesh.wire.fleet import EnginePhase
from rollmesh.wire.scheduling import WorkerPhase
from tests.flow.sleeping_mesh import SleepingMesh
from tests.flow.test_update import (
    PROMPT,
    TO_THE_END,
    VOCAB_SIZE,
    Process,
    Worker,
    check_part,
    models,
    scores,
)
from tests.unit.engine.embedded.tiny_adapters import write_adapter

__all__ = ["models"]
ASLEEP, AWAKE = WorkerPhase.ASLEEP, WorkerPhase.AWAKE


@pytest.fixture
async def scripted() -> AsyncIterator[list[ScriptedEngine]]:
    """Two engines of which each token waits until it is allowed."""
    async with AsyncExitStack() as stack:
        engines = [
            await stack.enter_async_context(
                ScriptedEngine(small_token, weight_version="released-0")
            )
            for _ in range(2)
        ]
        for engine in engines:
            engine.memory_state = FakeMemoryState.RELEASED
            engine.hold()
        yield engines


@pytest.fixture
async def script_mesh(
    scripted: list[ScriptedEngine], tmp_path: Path
) -> AsyncIterator[SleepingMesh]:
    """The processes are awaited in a thread, since the engines serve from this loop."""
    mesh = SleepingMesh([engine.url for engine in scripted], tmp_path)
    await mesh.until_ready()
    yield mesh
    await asyncio.to_thread(mesh.end)


@pytest.fixture
def torch_engines(models: list[Path]) -> Iterator[list[Process]]:
    """Two embedded engines, which start with the first weights released."""
    begin = ("--model-dir", str(models[0]), "--weight-version", "0", "--asleep")
    processes = [Process("rollmesh.engine.embedded", *begin) for _ in range(2)]
    yield processes
    for process in processes:
        process.end()


@pytest.fixture
async def torch_mesh(torch_engines: list[Process], tmp_path: Path) -> AsyncIterator[SleepingMesh]:
    mesh = SleepingMesh([process.ready.address for process in torch_engines], tmp_path)
    await mesh.until_ready()
    yield mesh
    mesh.end()


async def ended(turn: Generation, num_tokens: int) -> None:
    await turn.wait(TO_THE_END)
    assert (turn.finish_reason, len(turn.token_ids), turn.error) == ("length", num_tokens, None)


def small_token(policy_version: int, context: Sequence[int]) -> int:
    """A token of the worker's model."""
    return 1 + endless_token(policy_version, context) % (VOCAB_SIZE - 1)


def expected(num_tokens: int) -> list[int]:
    """Tokens that the scripted engines sample after the prompt."""
    context = list(PROMPT)
    for _ in range(num_tokens):
        context.append(small_token(0, context))
    return context[len(PROMPT) :]


@pytest.mark.slow
async def test_turns_begun_while_all_engines_sleep_survive_every_sleep_with_exact_tokens(
    script_mesh: SleepingMesh, scripted: list[ScriptedEngine]
) -> None:
    scheduler, (first, second) = script_mesh.scheduler, scripted
    worker = Worker(script_mesh.router)
    assert await scheduler.phases() == [ASLEEP, ASLEEP]
    turns = [worker.start(f"t{n}", stream=n == 0, num_tokens=12) for n in range(2)]
    await scheduler.resize(True, 0)
    assert second.memory_state is FakeMemoryState.RELEASED
    await first.allow(6)
    await first.until(lambda: first.num_sampled == 6)
    await scheduler.resize(True, 1)
    await scheduler.resize(False, 0)
    assert first.memory_state is FakeMemoryState.RELEASED
    await second.allow(6)
    await second.until(lambda: second.num_sampled == 6)
    await scheduler.resize(False, 1)
    assert await scheduler.phases() == [ASLEEP, ASLEEP]
    assert [(turn.error, turn.finish_reason) for turn in turns] == [(None, "")] * 2
    assert first.num_live == second.num_live == 0
    await scheduler.resize(True, 0)
    await first.release()
    for turn in turns:
        await ended(turn, 12)
        assert list(turn.token_ids) == expected(12)
        assert turn.machine.num_legs >= 2
    await worker.close()


async def test_a_restarted_coordinator_reports_the_true_state_and_turns_are_unaffected(
    script_mesh: SleepingMesh, scripted: list[ScriptedEngine]
) -> None:
    scheduler, (first, second) = script_mesh.scheduler, scripted
    worker = Worker(script_mesh.router)
    await scheduler.resize(True, 0)
    turn = worker.start("t", stream=True, num_tokens=8)
    await first.allow(4)
    assert await turn.wait(3)
    script_mesh.kill_coordinator()
    script_mesh.start_coordinator()
    await script_mesh.until_ready()
    assert await scheduler.phases() == [AWAKE, ASLEEP]
    assert turn.machine.num_legs == first.num_live == 1
    # Kill it again during a resize: its successor finds out the state and completes or reverts it.
    scheduler.send_resize(False, 0)
    script_mesh.kill_coordinator()
    script_mesh.start_coordinator()
    await script_mesh.until_ready()
    await scheduler.resize(True, 1)
    await scheduler.resize(False, 0)
    assert await scheduler.phases() == [ASLEEP, AWAKE]
    await second.release()
    await ended(turn, 8)
    assert list(turn.token_ids) == expected(8)
    await worker.close()


@pytest.mark.slow
async def test_only_a_woken_engine_loads_the_newest_weights_and_is_probed(
    torch_mesh: SleepingMesh, models: list[Path]
) -> None:
    scheduler, weights = torch_mesh.scheduler, torch_mesh.weights
    worker = Worker(torch_mesh.router)
    assert (await torch_mesh.info(0))["memory_occupation"] == "released"
    await scheduler.resize(True, 0)
    turn = worker.start("t", stream=False, num_tokens=100)
    await ended(turn, 100)
    await check_part(torch_mesh.engines[0], turn, 0, 0, 100)
    folder = shutil.copytree(models[1], weights / "v000007")
    await scheduler.resize(True, 1)
    versions = [(await torch_mesh.info(rank))["weight_version"] for rank in (0, 1)]
    assert versions == ["0", "7"]
    await scheduler.resize(False, 0)
    assert (await torch_mesh.info(0))["memory_occupation"] == "released"
    newer = worker.start("t", stream=False, num_tokens=100)
    await ended(newer, 100)
    assert [run.policy_version for run in newer.policy_versions] == [7]
    await check_part(torch_mesh.engines[1], newer, 7, 0, 100)
    logprobs = await scores(torch_mesh.engines[1], PROMPT, "7")
    wrong = tuple(each - 1.0 for each in logprobs)
    leave_probe(folder, WeightsProbe(token_ids=PROMPT, logprobs=wrong, tolerance=0.1))
    number = scheduler.send_resize(True, 0)
    await scheduler.until(lambda: "log-probs differ" in scheduler.of_last().workers[0].detail)
    await worker.watch.row(torch_mesh.engines[0], lambda row: row.phase is EnginePhase.ASLEEP)
    leave_probe(folder, WeightsProbe(token_ids=PROMPT, logprobs=tuple(logprobs), tolerance=0.1))
    assert not (await scheduler.answer(number)).error
    assert (await torch_mesh.info(0))["weight_version"] == "7"
    await worker.close()


@pytest.mark.slow
async def test_an_engine_wakes_with_its_adapter_before_it_serves(
    torch_mesh: SleepingMesh, models: list[Path]
) -> None:
    """There is no publisher: the engine serves what its coordinator has loaded."""
    scheduler, weights = torch_mesh.scheduler, torch_mesh.weights
    worker, base = Worker(torch_mesh.router), await scores_of_base(torch_mesh)
    for policy_version in (1, 2):
        write_adapter(weights / f"v{policy_version:06d}", models[0], seed=policy_version, size=0.5)
        await scheduler.resize(True, 0)
        turn = worker.start(f"t{policy_version}", stream=False, num_tokens=40)
        await ended(turn, 40)
        assert [run.policy_version for run in turn.policy_versions] == [policy_version]
        async with HttpClient() as http:
            client = SglangBackend(torch_mesh.engines[0], http, VOCAB_SIZE)
            name = adapter_name(policy_version)
            assert await client.adapters() == [name], "that of before is gone"
            whole = [*PROMPT, *turn.token_ids]
            scored = await client.score(whole, str(policy_version), name)
        assert list(turn.logprobs) == pytest.approx(scored[len(PROMPT) - 1 :], abs=1e-3)
        assert scored[: len(PROMPT) - 1] != pytest.approx(base, abs=1e-3), (
            "the adapter changes the scores"
        )
        await scheduler.resize(False, 0)
    await worker.close()


async def scores_of_base(mesh: SleepingMesh) -> list[float]:
    """Scores of the prompt by the base weights alone."""
    await mesh.scheduler.resize(True, 1)
    base = await scores(mesh.engines[1], PROMPT, "0")
    await mesh.scheduler.resize(False, 1)
    return base


@pytest.mark.slow
async def test_only_a_hung_engine_is_lost_and_it_sleeps_when_it_is_back(
    torch_mesh: SleepingMesh, torch_engines: list[Process]
) -> None:
    scheduler = torch_mesh.scheduler
    worker = Worker(torch_mesh.router)
    await scheduler.resize(True, 0, 1)
    torch_engines[0].popen.send_signal(signal.SIGSTOP)
    answer = await scheduler.answer(scheduler.send_resize(False, 0, deadline_s=3.0))
    assert answer.error
    assert answer.workers[0].phase is WorkerPhase.LOST
    await ended(worker.start("t", stream=True, num_tokens=100), 100)
    torch_engines[0].popen.send_signal(signal.SIGCONT)
    await scheduler.until(lambda: scheduler.of_last().workers[0].phase is ASLEEP)
    assert scheduler.of_last().workers[1].phase is AWAKE
    await worker.close()
