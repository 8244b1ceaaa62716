"""Every client of the roster, each in its own environment: `make test-clients`."""

import asyncio
import functools
from pathlib import Path

import pytest

from rollmesh.testing.engine import ScriptedEngine
from tests.clients.exactness import calls_of, faults
from tests.clients.harnesses import VENVS, Visit, codex
from tests.clients.matrix import Ran
from tests.clients.roster import RESPONSES, ROSTER, Row, relayed, rows
from tests.clients.script import ANSWER, task, write_files
from tests.clients.tasks import open_stage, perform, run

NUM_RESENDS = 3


def has_legs(engine: ScriptedEngine, num_legs: int) -> bool:
    return engine.num_seen("/generate") == num_legs


@pytest.mark.clients
@pytest.mark.parametrize("row", [*rows(), *relayed()], ids=lambda row: row.id)
async def test_a_client_does_the_task_and_its_samples_are_exact(
    row: Row, tmp_path: Path, matrix: dict[str, Ran]
) -> None:
    assert not row.client.home or (VENVS / row.client.home).is_dir(), "`make clients` installs it"
    matrix[row.id] = Ran(row, fault="it ran into the test's end")
    try:
        matrix[row.id] = await perform(row, tmp_path)
    except AssertionError as error:
        matrix[row.id] = Ran(row, fault=str(error).splitlines()[0][:120])
        raise


@pytest.mark.clients
async def test_codex_resends_a_turn_whose_stream_stalls_and_it_trains_once(tmp_path: Path) -> None:
    (client,) = (each for each in ROSTER if each.name == "codex")
    home, work = tmp_path / "home", tmp_path / "work"
    write_files(work)
    async with open_stage(tmp_path / "model", task(client.use)) as (agent, engine, gateway):
        opened = await gateway.open()
        visit = Visit(home, work, opened.base_url, opened.api_key, RESPONSES, is_stream=True)
        engine.hold()
        running = asyncio.create_task(run(codex(visit, idle_ms=500), work))
        for n in range(NUM_RESENDS):
            await engine.allow(20)
            await engine.until(functools.partial(has_legs, engine, n + 2))
        await engine.release()
        ended = await running
        account = await gateway.finish(opened)
    assert ANSWER in ended.output, ended.output[-2000:]
    calls = calls_of(engine, agent)
    assert faults(calls, account["samples"], agent) == []
    assert (len(calls), account["num_calls"], account["forks"]) == (3, 3, [])
