"""A gateway whose engines have odd weight versions or none: no session is blocked."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from rollmesh.testing.engine import ScriptedEngine
from tests.flow.gateway_process import PATIENCE_S, Gateway, finish, next_token, sampling

NUM_TOKENS = 8
"""One entry for each turn; see `sampling`."""


class Talk:
    """A session whose agent sends one message after another."""

    def __init__(self, gateway: Gateway, opened: dict[str, str]) -> None:
        self._gateway = gateway
        self._opened = opened
        self._messages: list[dict[str, Any]] = []

    async def turn(self) -> None:
        self._messages.append({"role": "user", "content": "guess"})
        async with asyncio.timeout(PATIENCE_S):
            status, answer = await self._gateway.call(self._opened, {"messages": self._messages})
        assert status == 200, answer
        self._messages.append(answer["choices"][0]["message"])

    async def finish(self) -> tuple[list[int], int]:
        """The policy version of each sampled token, and the number of fallbacks of the session."""
        account = await finish(self._gateway, self._opened)
        [sample] = account["samples"]
        assert sum(sample["loss_mask"]) == len(self._messages) // 2 * NUM_TOKENS
        versions = sample["policy_versions"]
        return [
            each for each, mask in zip(versions, sample["loss_mask"], strict=True) if mask
        ], account["fell_back"]


@asynccontextmanager
async def talking(folder: Path, *engines: ScriptedEngine) -> AsyncIterator[tuple[Gateway, Talk]]:
    async with sampling(folder, *engines, engine_wait_s=10 * PATIENCE_S) as gateway:
        yield gateway, Talk(gateway, await gateway.open())


@pytest.mark.parametrize("info_version", ["default", ""])
async def test_session_continues_if_only_generate_names_a_version(
    tmp_path: Path, info_version: str
) -> None:
    async with ScriptedEngine(next_token) as engine:
        engine.info_version = info_version
        async with talking(tmp_path, engine) as (_, talk):
            for _ in range(3):
                await talk.turn()
            assert await talk.finish() == ([0] * 3 * NUM_TOKENS, 0)
    assert engine.num_seen("/generate") == 3


async def test_no_call_is_discarded_if_model_info_names_a_newer_version_than_generate(
    tmp_path: Path,
) -> None:
    async with ScriptedEngine(next_token, weight_version="4") as engine:
        engine.info_version = "5"
        async with talking(tmp_path, engine) as (_, talk):
            for _ in range(2):
                await talk.turn()
            assert await talk.finish() == ([4] * 2 * NUM_TOKENS, 0)
    assert engine.num_seen("/generate") == 2


@pytest.mark.parametrize(("after", "served", "num_falls"), [("3", 3, 1), ("default", -1, 0)])
async def test_session_outlives_an_engine_that_restarts_with_a_lower_number_or_none(
    tmp_path: Path, after: str, served: int, num_falls: int
) -> None:
    async with (
        ScriptedEngine(next_token, weight_version="5") as engine,
        talking(tmp_path, engine) as (gateway, talk),
    ):
        await talk.turn()
        await engine.restart(after)
        await talk.turn()
        await gateway.until_ready()
        await talk.turn()
        versions = [5] * NUM_TOKENS + [served] * 2 * NUM_TOKENS
        assert await talk.finish() == (versions, num_falls)


async def test_session_continues_when_a_version_number_becomes_a_name(tmp_path: Path) -> None:
    async with (
        ScriptedEngine(next_token, weight_version="7") as engine,
        talking(tmp_path, engine) as (_, talk),
    ):
        await talk.turn()
        await engine.update("step_8")
        await talk.turn()
        await talk.turn()
        assert await talk.finish() == ([7] * NUM_TOKENS + [-1] * 2 * NUM_TOKENS, 0)


async def test_session_moves_to_an_engine_with_a_lower_number_when_its_own_dies(
    tmp_path: Path,
) -> None:
    async with (
        ScriptedEngine(next_token, weight_version="7") as newer,
        ScriptedEngine(next_token, weight_version="3") as older,
    ):
        await older.die()
        async with talking(tmp_path, newer, older) as (_, talk):
            await talk.turn()
            await older.restart()
            await newer.die()
            await talk.turn()
            await talk.turn()
            assert await talk.finish() == ([7] * NUM_TOKENS + [3] * 2 * NUM_TOKENS, 1)
