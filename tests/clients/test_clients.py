"""Every client of the roster, each in its own environment: `make test-clients`."""

import asyncio
import functools
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from rollmesh.testing.engine import ScriptedAgent, ScriptedEngine
from tests.clients.exactness import Call, calls_of, faults
from tests.clients.harnesses import VENVS, Visit, codex
from tests.clients.matrix import Ran
from tests.clients.roster import RESPONSES, ROSTER, Row, relayed, rows
from tests.clients.script import ANSWER, task, write_files
from tests.clients.tasks import open_deployment, perform, run

NUM_RESENDS = 3
IDLE_MS = 1_000


def has_legs(engine: ScriptedEngine, num_legs: int) -> bool:
    return engine.num_seen("/generate") >= num_legs


class Resent(NamedTuple):
    """The result of a task whose first turn stalled repeatedly."""

    calls: list[Call]
    account: dict[str, Any]
    agent: ScriptedAgent

    def faults(self) -> list[str]:
        return faults(self.calls, self.account["samples"], self.agent)


async def stall(folder: Path, num_tokens: int) -> Resent:
    """Run codex on the task; each stream of its first turn stalls after `num_tokens` more."""
    (client,) = (each for each in ROSTER if each.name == "codex")
    home, work = folder / "home", folder / "work"
    write_files(work)
    async with open_deployment(folder / "model", task(client.use)) as (agent, engine, gateway):
        opened = await gateway.open()
        visit = Visit(home, work, opened.base_url, opened.api_key, RESPONSES, is_stream=True)
        engine.hold()
        running = asyncio.create_task(run(codex(visit, IDLE_MS), work))
        for n in range(NUM_RESENDS):
            await engine.allow(num_tokens)
            await engine.until(functools.partial(has_legs, engine, n + 2))
        await engine.release()
        ended = await running
        assert ANSWER in ended.output, ended.output[-2000:]
        return Resent(calls_of(engine, agent), await gateway.finish(opened), agent)


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
async def test_a_turn_that_codex_resends_is_resumed_and_trains_once(tmp_path: Path) -> None:
    resent = await stall(tmp_path, num_tokens=5)
    assert resent.faults() == []
    assert (len(resent.calls), resent.account["num_calls"], resent.account["forks"]) == (3, 3, [])


@pytest.mark.clients
async def test_a_turn_that_codex_resends_in_part_is_resumed_and_trains_once(
    tmp_path: Path,
) -> None:
    # Its next request has each finished item, here the reasoning.
    resent = await stall(tmp_path, num_tokens=20)
    assert resent.faults() == []
    assert (len(resent.calls), resent.account["num_calls"], resent.account["forks"]) == (3, 3, [])
