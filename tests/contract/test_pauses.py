"""Clients of a gateway whose engine another trainer updates see a pause, and no error.

The trainer is no rollmesh publisher: it pauses the engine, loads and continues at any time, and the
gateway gets no message. Meanwhile streams receive comments, which clients ignore.
"""

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import pytest

from rollmesh.core.types import policy_version_of
from tests.contract.engines import WAIT_S, EngineUnderContract, Json, lines_of
from tests.contract.processes import gateway
from tests.contract.test_gateway import (
    CHAT,
    HELLO,
    MESSAGES,
    RESPONSES,
    Caller,
    RunningGateway,
    assert_engine_scores_alike,
)

NUM_TOKENS = 400
LONG: Json = {"temperature": 0}
"""The likeliest tokens of the contract's model repeat in a circle, and never end."""
PATHS: dict[str, Json] = {
    CHAT: {"messages": HELLO, "max_tokens": NUM_TOKENS, **LONG},
    MESSAGES: {"messages": HELLO, "max_tokens": NUM_TOKENS, **LONG},
    RESPONSES: {"input": "hello", "max_output_tokens": NUM_TOKENS, **LONG},
}
YES = "yes" * 30
SCHEMA = {"type": "json_schema", "json_schema": {"name": "answer", "schema": {"enum": [YES]}}}
"""A turn with this penalty cannot be resumed."""
PAUSE_S = 60.0
SDK_TIMEOUT_S = 600.0
"""The default timeout of SDKs for a plain call."""
Hold = Callable[["Sequence[Stream]"], Awaitable[None]]


class Stream:
    """The events of one streamed call."""

    def __init__(self, caller: Caller, path: str) -> None:
        self.num_events = 0
        self.num_comments = 0
        self._moved = asyncio.Event()
        self.reading = asyncio.create_task(self._read(caller, path))

    async def until_comments(self, num_more: int) -> None:
        """Wait until `num_more` more comments have arrived."""
        wanted = self.num_comments + num_more
        await self.until(lambda: self.num_comments >= wanted, 2 * PAUSE_S)

    async def until(self, is_so: Callable[[], bool], wait_s: float = WAIT_S) -> None:
        """Wait until the received events satisfy `is_so`."""
        async with asyncio.timeout(wait_s):
            while not is_so():
                assert not self.reading.done(), "it is over"
                self._moved.clear()
                await self._moved.wait()

    async def _read(self, caller: Caller, path: str) -> None:
        asked = {"model": "m", "stream": True, **PATHS[path]}
        async with caller.client.stream("POST", f"/v1{path}", json=asked) as response:
            assert response.status_code == 200, await response.aread()
            async for line in lines_of(response):
                assert '"error":{' not in line, line
                self.num_events += line.startswith("data: ")
                self.num_comments += line.startswith(":")
                self._moved.set()


async def assert_update_is_a_pause(
    engine: EngineUnderContract, door: RunningGateway, mode: str, hold: Hold
) -> None:
    """Run calls of every kind while the engine is paused, for as long as `hold` takes, and updated;
    another call arrives meanwhile.
    """
    callers = [await door.session(sampling="eval") for _ in range(8)]
    for caller in callers:
        caller.client.timeout = SDK_TIMEOUT_S
    streams = [Stream(caller, path) for caller, path in zip(callers[:3], PATHS, strict=True)]
    plain = [
        asyncio.create_task(caller.ask(path, **PATHS[path]))
        for caller, path in zip(callers[3:6], PATHS, strict=True)
    ]
    await engine.until_running(6)
    for stream in streams:
        await stream.until(lambda: stream.num_events > 20)  # noqa: B023 - used at once
    asked = {"messages": HELLO, "max_tokens": 200, "response_format": SCHEMA}
    bound = asyncio.create_task(callers[6].ask(CHAT, **asked))
    await engine.until_running(7)
    assert (await engine.post("/pause_generation", mode=mode)).status_code == 200
    streams.append(Stream(callers[7], CHAT))
    await hold(streams)
    before = policy_version_of((await engine.get("/model_info"))["weight_version"])
    update = {"model_path": engine.model_path, "weight_version": str(before + 1)}
    assert (await engine.post("/update_weights_from_disk", **update)).status_code == 200
    assert (await engine.post("/continue_generation")).status_code == 200
    for stream in streams:
        await stream.reading
        assert stream.num_comments
    for answer in await asyncio.gather(*plain):
        usage = answer["usage"]
        assert (usage.get("completion_tokens") or usage["output_tokens"]) == NUM_TOKENS
    (choice,) = (await bound)["choices"]
    assert json.loads(choice["message"]["content"]) == YES
    for caller in callers[:6]:
        await assert_both_versions(engine, caller, before)
    for caller in callers:
        await caller.client.aclose()


async def assert_both_versions(engine: EngineUnderContract, caller: Caller, before: int) -> None:
    """Check that the turn began under one version and ended under the next, and that the engine
    scores it as recorded.
    """
    (sample,) = await caller.samples()
    versions = [
        at for at, mask in zip(sample["policy_versions"], sample["loss_mask"], strict=True) if mask
    ]
    assert versions == sorted(versions)
    assert set(versions) == {before, before + 1}
    assert await assert_engine_scores_alike(engine, [sample]) == NUM_TOKENS


async def until_three_comments(streams: Sequence[Stream]) -> None:
    for stream in streams:
        await stream.until_comments(3)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["abort", "retract"])
async def test_an_update_by_another_trainer_is_a_pause_for_every_caller(
    engine: EngineUnderContract, address: str, model_folder: Path, tmp_path: Path, mode: str
) -> None:
    token_file = tmp_path / "token"
    often = ("--set", "interception.keepalive_s=0.1")
    with gateway([address], model_folder, token_file, *often) as process:
        door = RunningGateway(process, token_file)
        await assert_update_is_a_pause(engine, door, mode, until_three_comments)


@pytest.mark.chaos
@pytest.mark.timeout(300)
async def test_an_update_of_a_minute_is_a_pause_for_every_caller(
    engine: EngineUnderContract, address: str, model_folder: Path, tmp_path: Path
) -> None:
    async def a_minute(streams: Sequence[Stream]) -> None:
        """Hold for a minute; an idle stream gets a comment every 15 seconds."""
        began_s = time.monotonic()
        await streams[-1].until_comments(4)
        assert time.monotonic() - began_s >= 0.99 * PAUSE_S

    token_file = tmp_path / "token"
    with gateway([address], model_folder, token_file) as process:
        door = RunningGateway(process, token_file)
        await assert_update_is_a_pause(engine, door, "abort", a_minute)
