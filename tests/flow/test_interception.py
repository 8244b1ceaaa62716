"""The agent server over scripted engines, on real sockets at both sides: cuts, deaths, crowds,
garbage.
"""

import asyncio
import random
from array import array
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest

from rollmesh.core.config import InterceptionConfig
from rollmesh.core.ids import GroupId, RolloutId
from rollmesh.core.process import listen
from rollmesh.core.types import SamplingPolicy
from rollmesh.engine.view import FleetView
from rollmesh.runtime.generation.sampler import Sampler, SamplerDeps
from rollmesh.runtime.registry import Runtime
from rollmesh.runtime.scopes import OpenSession
from rollmesh.runtime.session import SessionRecord
from rollmesh.runtime.tokens.families import choose_family
from rollmesh.runtime.tokens.prompts import Prompts
from rollmesh.runtime.tokens.tokenizer import load_tokenizer
from rollmesh.serve.interception.agent_server import AgentServer
from rollmesh.serve.interception.exchange import ExchangeState
from rollmesh.testing.engine import ScriptedEngine, endless_token, logprob_of
from rollmesh.testing.model_folder import write_model_folder
from rollmesh.wire.fleet import EngineFaulted, EnginePhase, EngineRow, FleetChanged

GROUP = GroupId("r", 0)
PATH = "/v1/chat/completions"
USER: dict[str, object] = {"role": "user", "content": "guess"}
NUM_GARBLED = 300


def next_token(policy_version: int, context: Sequence[int]) -> int:
    """Sample a byte of the test's vocabulary; never end the turn."""
    return endless_token(policy_version, context) % 250


class WorkerSide:
    """The worker's half of the mesh; the test acts as its router."""

    def __init__(self, folder: Path, engines: list[ScriptedEngine]) -> None:
        tokenizer = load_tokenizer(folder)
        self.engines = engines
        self.faults: list[EngineFaulted] = []
        self.view = FleetView()
        rows = tuple(EngineRow(e.url, "i0", EnginePhase.READY, 0) for e in engines)
        self.view.update(FleetChanged(0, rows), "router")
        parts = SamplerDeps(
            view=self.view, vocab_size=tokenizer.vocab_size, report=self.faults.append
        )
        self.sampler = Sampler(parts)
        prompts = Prompts(choose_family(folder, "auto", tokenizer), tokenizer)
        self.runtime = Runtime(self.sampler, prompts, 256)
        self.server = AgentServer(self.runtime, InterceptionConfig(), "policy")
        self.client = aiohttp.ClientSession()
        self.base = ""

    def open(self, index: int = 0) -> OpenSession:
        return self.runtime.register_trajectory(RolloutId(GROUP, index), SamplingPolicy(), seed=1)

    def post(self, opened: OpenSession, **body: object) -> Any:
        key = {"x-api-key": opened.api_key}
        return self.client.post(self.base + PATH, data=msgspec.json.encode(body), headers=key)

    async def close(self) -> None:
        self.runtime.cleanup_group(GROUP)
        await self.client.close()
        await self.server.stop()
        await self.sampler.close()


@pytest.fixture
async def worker_side(tmp_path: Path) -> AsyncIterator[WorkerSide]:
    folder = write_model_folder(tmp_path)
    async with ScriptedEngine(next_token) as one, ScriptedEngine(next_token) as two:
        worker_side = WorkerSide(folder, [one, two])
        worker_side.base = await worker_side.server.start(listen("127.0.0.1:0"))
        yield worker_side
        await worker_side.close()


def assert_proves_itself(record: SessionRecord) -> None:
    """Check that every sampled token is the one that the weights give after exactly its prefix."""
    ids, logprobs = array("i", bytes(record.token_ids)), array("f", bytes(record.logprobs))
    paths: list[list[int]] = []
    at = at_logprob = 0
    for node in record.nodes:
        path = list(paths[node.parent]) if node.parent >= 0 else []
        for token_id in ids[at : at + node.num_tokens]:
            if node.sampled:
                assert token_id == next_token(0, path)
                assert logprobs[at_logprob] == logprob_of(0, token_id)
                at_logprob += 1
            path.append(token_id)
        at += node.num_tokens
        paths.append(path)


async def test_a_disconnect_aborts_the_engine_request_and_a_retry_resumes_the_exact_tokens(
    worker_side: WorkerSide,
) -> None:
    engine, other = worker_side.engines
    await other.die()
    await engine.allow(5)
    opened = worker_side.open()
    async with worker_side.post(opened, messages=[USER], stream=True, max_tokens=12) as response:
        await response.content.readuntil(b"\n\n")
        response.close()
    await engine.until(lambda: engine.num_live == 0)
    await engine.release()
    async with worker_side.post(opened, messages=[USER], stream=True, max_tokens=12) as response:
        assert (await response.read()).endswith(b"data: [DONE]\n\n")
    opened.session.seal("done")
    record = opened.session.record()
    assert [(n.sampled, n.finish_reason) for n in record.nodes] == [(False, ""), (True, "length")]
    assert record.num_calls == 1
    assert_proves_itself(record)
    states = {state: number for (_, state), number in worker_side.server.num_exchanges.items()}
    assert states == {ExchangeState.ABANDONED: 1, ExchangeState.DELIVERED: 1}


async def test_a_turn_resumes_on_another_engine_when_its_engine_dies(
    worker_side: WorkerSide,
) -> None:
    for engine in worker_side.engines:
        await engine.allow(8)
    opened = worker_side.open()
    async with worker_side.post(opened, messages=[USER], stream=True, max_tokens=30) as response:
        first = next(engine for engine in worker_side.engines if engine.num_live)
        other = next(engine for engine in worker_side.engines if engine is not first)
        await response.content.readuntil(b"\n\n")
        await first.die()
        await other.release()
        assert (await response.read()).endswith(b"data: [DONE]\n\n")
    assert [fault.url for fault in worker_side.faults] == [first.url]
    opened.session.seal("done")
    assert_proves_itself(opened.session.record())
    assert other.num_sampled + first.num_sampled == 30


async def _play(worker_side: WorkerSide, opened: OpenSession, stream: bool) -> None:
    messages = [USER]
    for _ in range(3):
        content = ""
        async with worker_side.post(
            opened, messages=messages, stream=stream, max_tokens=9
        ) as response:
            assert response.status == 200
            raw = await response.read()
        if stream:
            chunks = [msgspec.json.decode(e[6:]) for e in raw.split(b"\n\n") if b"choices" in e]
            content = "".join(c["choices"][0]["delta"].get("content", "") for c in chunks)
        else:
            content = msgspec.json.decode(raw)["choices"][0]["message"]["content"]
        messages = [*messages, {"role": "assistant", "content": content}, USER]


async def test_many_concurrent_sessions_stay_separate(worker_side: WorkerSide) -> None:
    crowd = [worker_side.open(index) for index in range(32)]
    async with asyncio.TaskGroup() as group:
        for n, opened in enumerate(crowd):
            group.create_task(_play(worker_side, opened, stream=n % 2 == 0))
    for opened in crowd:
        opened.session.seal("done")
        record = opened.session.record()
        assert (record.num_calls, record.num_forks, len(record.nodes)) == (3, 0, 6)
        assert_proves_itself(record)
    assert worker_side.server.num_exchanges == {("/chat/completions", ExchangeState.DELIVERED): 96}
    worker_side.runtime.cleanup_group(GROUP)
    assert sum(worker_side.runtime.held().values()) == 0
    assert [engine.num_live for engine in worker_side.engines] == [0, 0]


def _garble(whole: bytes, dice: random.Random) -> bytes:
    """Return the bytes with some changed, lost, doubled or cut off."""
    raw = bytearray(whole)
    for _ in range(dice.randint(1, 6)):
        at = dice.randrange(len(raw))
        match dice.randrange(4):
            case 0:
                raw[at] = dice.randrange(256)
            case 1:
                del raw[at : at + dice.randint(1, 3)]
            case 2:
                raw[at:at] = raw[at : at + dice.randint(1, 9)]
            case _:
                raw[at:at] = bytes(dice.randrange(256) for _ in range(3))
    return bytes(raw[: dice.randrange(len(raw))] if dice.random() < 0.2 else raw)


async def _status(worker_side: WorkerSide, raw: bytes, is_whole: bool) -> int:
    """Send and return the status; 0 if the server closes the connection, as it may after a
    half-close.
    """
    host, _, port = worker_side.base.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        writer.write(raw)
        if not is_whole:
            writer.write_eof()
        line = await reader.readline()
        return int(line.split()[1]) if line.startswith(b"HTTP/") else 0
    except ConnectionError:
        return 0
    finally:
        writer.close()


async def test_garbage_never_breaks_the_server_or_reaches_another_session(
    worker_side: WorkerSide,
) -> None:
    dice = random.Random(7)
    opened, other = worker_side.open(0), worker_side.open(1)
    body = msgspec.json.encode({"messages": [USER], "max_tokens": 2, "stop": "x", "tools": []})
    head = f"POST {PATH} HTTP/1.1\r\nHost: x\r\nx-api-key: {opened.api_key}\r\n".encode()
    seen: set[int] = set()
    for _ in range(NUM_GARBLED):
        garbled = _garble(body, dice)
        length = b"Content-Length: %d\r\n\r\n" % len(garbled)
        seen.add(await _status(worker_side, head + length + garbled, is_whole=True))
        whole = head + b"Content-Length: %d\r\n\r\n" % len(body) + body
        assert await _status(worker_side, _garble(whole, dice), is_whole=False) < 500
    assert seen == {200, 400}
    assert other.session.num_calls == 0
    async with worker_side.post(other, messages=[USER], max_tokens=2) as response:
        assert response.status == 200
