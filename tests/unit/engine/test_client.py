"""The client against a scripted engine on a real socket: tokens, streams, faults, control."""

from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from rollmesh.core.errors import EngineRefused, EngineUnavailable
from rollmesh.core.types import SamplingParams
from rollmesh.engine.answers import EngineLoad, ModelInfo
from rollmesh.engine.client import EngineClient, LegRequest, TokenIds, open_session
from rollmesh.testing.engine import (
    VOCAB_SIZE,
    Fault,
    ScriptedEngine,
    endless_token,
    logprob_of,
)

PROMPT = [5, 6, 7]


@pytest.fixture
async def engine() -> AsyncIterator[ScriptedEngine]:
    async with ScriptedEngine(endless_token) as engine:
        yield engine


@pytest.fixture
async def client(engine: ScriptedEngine) -> AsyncIterator[EngineClient]:
    async with open_session() as session:
        yield EngineClient(engine.url, session, VOCAB_SIZE)


def leg(
    *, stream: bool = False, num_tokens: int = 5, input_ids: TokenIds = PROMPT, rid: str = "r"
) -> LegRequest:
    return LegRequest(
        rid=rid,
        input_ids=input_ids,
        params=SamplingParams(max_tokens=num_tokens),
        max_new_tokens=num_tokens,
        extra_key="0",
        stream=stream,
    )


def expected(num_tokens: int, policy_version: int = 0) -> list[int]:
    context = list(PROMPT)
    for _ in range(num_tokens):
        context.append(endless_token(policy_version, context))
    return context[len(PROMPT) :]


async def test_plain_leg_brings_all_tokens_at_once(client: EngineClient) -> None:
    [chunk] = [chunk async for chunk in client.generate(leg())]
    assert chunk.token_ids == expected(5)
    assert chunk.logprobs == [logprob_of(0, token) for token in expected(5)]
    assert chunk.finish
    assert chunk.finish.kind == "length"
    assert [(run.policy_version, run.num_tokens) for run in chunk.policy_versions] == [(0, 5)]


@pytest.mark.parametrize("is_incremental", [True, False])
async def test_stream_tells_each_token_once(
    engine: ScriptedEngine, client: EngineClient, is_incremental: bool
) -> None:
    engine.is_incremental = is_incremental
    chunks = [chunk async for chunk in client.generate(leg(stream=True, num_tokens=40))]
    assert [token for chunk in chunks for token in chunk.token_ids] == expected(40)
    assert [bool(chunk.finish) for chunk in chunks].count(True) == 1
    assert chunks[-1].finish


async def test_first_token_of_a_stream_comes_before_the_second_is_sampled(
    engine: ScriptedEngine, client: EngineClient
) -> None:
    engine.hold()
    chunks = client.generate(leg(stream=True))
    await engine.allow(1)
    first = await anext(chunks)
    assert first.token_ids == expected(1)
    await engine.release()
    assert [token async for chunk in chunks for token in chunk.token_ids] == expected(5)[1:]


async def test_prompt_may_come_as_ready_json(client: EngineClient) -> None:
    [chunk] = [c async for c in client.generate(leg(input_ids=msgspec.Raw(b"[5,6,7]")))]
    assert chunk.token_ids == expected(5)


@pytest.mark.parametrize("input_ids", [[VOCAB_SIZE], [-1], []])
async def test_id_that_is_no_token_never_reaches_the_engine(
    engine: ScriptedEngine, client: EngineClient, input_ids: list[int]
) -> None:
    with pytest.raises(EngineRefused):
        await client.sample(leg(input_ids=input_ids))
    assert engine.seen == []


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        (Fault.BAD_REQUEST, EngineRefused),
        (Fault.BAD_EVENT, EngineRefused),
        (Fault.BUSY, EngineUnavailable),
        (Fault.ERROR, EngineUnavailable),
        (Fault.CUT, EngineUnavailable),
    ],
)
@pytest.mark.parametrize("stream", [True, False])
async def test_faults_are_told_apart(
    engine: ScriptedEngine, client: EngineClient, fault: Fault, kind: type[Exception], stream: bool
) -> None:
    engine.faults.append(fault)
    with pytest.raises(kind) as caught:
        [_ async for _ in client.generate(leg(stream=stream))]
    assert engine.url in str(caught.value)


async def test_dead_engine_is_unavailable(engine: ScriptedEngine, client: EngineClient) -> None:
    await engine.die()
    with pytest.raises(EngineUnavailable):
        await client.sample(leg())
    with pytest.raises(EngineUnavailable):
        await client.model_info()


async def test_aborted_leg_keeps_its_tokens(engine: ScriptedEngine, client: EngineClient) -> None:
    engine.hold()
    chunks = client.generate(leg(stream=True))
    await engine.allow(2)
    told = [*(await anext(chunks)).token_ids, *(await anext(chunks)).token_ids]
    await client.abort("r")
    last = await anext(chunks)
    assert told == expected(2)
    assert last.token_ids == []
    assert last.finish
    assert last.finish.kind == "abort"
    await chunks.aclose()  # type: ignore[attr-defined]


async def test_abort_of_an_unknown_request_is_no_error(
    engine: ScriptedEngine, client: EngineClient
) -> None:
    await client.abort("nobody")
    assert engine.num_seen("/abort_request") == 1


async def test_update_changes_the_weights(engine: ScriptedEngine, client: EngineClient) -> None:
    await client.pause()
    assert (await client.server_info())["is_paused"]
    await client.flush()
    await client.update_from_disk(Path("weights"), 7)
    await client.resume()
    assert not (await client.server_info())["is_paused"]
    assert await client.model_info() == ModelInfo("scripted", 7)
    chunk = await client.sample(leg())
    assert chunk.token_ids == expected(5, policy_version=7)
    assert chunk.policy_version == 7


async def test_failed_update_says_why(engine: ScriptedEngine, client: EngineClient) -> None:
    engine.update_error = "no such folder"
    with pytest.raises(EngineRefused, match="no such folder"):
        await client.update_from_disk(Path("nowhere"), 1)


async def test_scores_are_of_all_tokens_but_the_first(client: EngineClient) -> None:
    assert await client.score([3, 4, 5], "0") == [logprob_of(0, 4), logprob_of(0, 5)]


async def test_load_and_server_info_are_read(client: EngineClient) -> None:
    assert await client.loads() == EngineLoad(0, 0)
    assert (await client.server_info())["incremental_streaming_output"] is True


async def test_connection_is_used_again_after_a_stream(
    engine: ScriptedEngine, client: EngineClient
) -> None:
    async with open_session() as session:
        client = EngineClient(engine.url, session, VOCAB_SIZE)
        for _ in range(3):
            [_ async for _ in client.generate(leg(stream=True))]
        assert session.connector
        pooled = session.connector._conns  # noqa: SLF001 - aiohttp has no public count
        assert sum(len(each) for each in pooled.values()) == 1
