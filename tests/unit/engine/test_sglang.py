"""The client against a scripted engine on a real socket: requests, faults, control."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from rollmesh.core.errors import EngineBroke, EngineOverloaded, EngineRefused, EngineUnavailable
from rollmesh.engine.backend import EngineLoad, ModelInfo
from rollmesh.engine.http import HttpClient
from rollmesh.engine.sglang import SglangBackend
from rollmesh.testing.engine import (
    VOCAB_SIZE,
    ScriptedEngine,
    endless_token,
    logprob_of,
)
from rollmesh.testing.faults import Fault
from tests.unit.engine.token_receiver import PROMPT, TokenRecorder, engine_request, expected


@pytest.fixture
async def engine() -> AsyncIterator[ScriptedEngine]:
    async with ScriptedEngine(endless_token) as engine:
        yield engine


@pytest.fixture
async def http() -> AsyncIterator[HttpClient]:
    async with HttpClient() as http:
        yield http


@pytest.fixture
def client(engine: ScriptedEngine, http: HttpClient) -> SglangBackend:
    return SglangBackend(engine.url, http, VOCAB_SIZE)


async def test_a_plain_request_returns_all_tokens_at_once(client: SglangBackend) -> None:
    recorder = TokenRecorder()
    client.generate(engine_request(), recorder)
    await recorder.until_ended()
    [chunk] = recorder.chunks
    assert chunk.token_ids == expected(5)
    assert chunk.logprobs == [logprob_of(0, token) for token in expected(5)]
    assert chunk.finish
    assert chunk.finish.kind == "length"
    assert [(run.policy_version, run.num_tokens) for run in chunk.policy_versions] == [(0, 5)]


@pytest.mark.parametrize("is_incremental", [True, False])
async def test_a_stream_reports_each_token_once(
    engine: ScriptedEngine, client: SglangBackend, is_incremental: bool
) -> None:
    engine.is_incremental = is_incremental
    recorder = TokenRecorder()
    client.generate(engine_request(stream=True, num_tokens=40), recorder)
    await recorder.until_ended()
    assert recorder.token_ids == expected(40)
    assert [bool(chunk.finish) for chunk in recorder.chunks].count(True) == 1
    assert recorder.chunks[-1].finish


async def test_first_token_of_a_stream_comes_before_the_second_is_sampled(
    engine: ScriptedEngine, client: SglangBackend
) -> None:
    engine.hold()
    recorder = TokenRecorder()
    client.generate(engine_request(stream=True), recorder)
    await engine.allow(1)
    await recorder.until_tokens(1)
    assert recorder.token_ids == expected(1)
    await engine.release()
    await recorder.until_ended()
    assert recorder.token_ids == expected(5)


async def test_a_resumed_request_continues_after_the_sampled_tokens(client: SglangBackend) -> None:
    recorder = TokenRecorder()
    client.generate(engine_request(sampled_ids=expected(2), num_tokens=3), recorder)
    await recorder.until_ended()
    assert recorder.token_ids == expected(5)[2:]


async def test_a_prompt_of_ready_json_is_sent_unchanged(
    engine: ScriptedEngine, client: SglangBackend
) -> None:
    recorder = TokenRecorder()
    client.generate(
        engine_request(prompt_ids=(), prompt_json=b"5, 6,7", sampled_ids=expected(1)), recorder
    )
    await recorder.until_ended()
    assert engine.seen[0].body["input_ids"] == [*PROMPT, *expected(1)]
    assert recorder.token_ids == expected(6)[1:]


@pytest.mark.parametrize("num_top", [1, 3])
@pytest.mark.parametrize("stream", [True, False])
async def test_the_likeliest_tokens_are_reported_for_each_token(
    client: SglangBackend, stream: bool, num_top: int
) -> None:
    recorder = TokenRecorder()
    client.generate(engine_request(stream=stream, num_top_logprobs=num_top), recorder)
    await recorder.until_ended()
    places = [place for chunk in recorder.chunks for place in chunk.top_logprobs]
    assert [len(place) for place in places] == [num_top] * 5
    assert [place[0] for place in places] == [(logprob_of(0, t), t) for t in expected(5)]


@pytest.mark.parametrize(
    "ids",
    [{"prompt_ids": [VOCAB_SIZE]}, {"prompt_ids": [-1]}, {"prompt_ids": []}, {"sampled_ids": [-1]}],
)
async def test_an_invalid_token_id_never_reaches_the_engine(
    engine: ScriptedEngine, client: SglangBackend, ids: dict[str, Any]
) -> None:
    with pytest.raises(EngineRefused):
        client.generate(engine_request(**ids), TokenRecorder())
    assert engine.seen == []


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        (Fault.BAD_REQUEST, EngineRefused),
        (Fault.BAD_EVENT, EngineRefused),
        (Fault.BUSY, EngineOverloaded),
        (Fault.FULL, EngineOverloaded),
        (Fault.ERROR, EngineBroke),
        (Fault.CUT, EngineUnavailable),
    ],
)
@pytest.mark.parametrize("stream", [True, False])
async def test_each_fault_has_its_error_type(
    engine: ScriptedEngine, client: SglangBackend, fault: Fault, kind: type[Exception], stream: bool
) -> None:
    engine.faults.append(fault)
    recorder = TokenRecorder()
    client.generate(engine_request(stream=stream), recorder)
    await recorder.until_ended()
    [error] = recorder.ends
    assert type(error) is kind
    assert engine.url in str(error)


async def test_dead_engine_is_unavailable(engine: ScriptedEngine, client: SglangBackend) -> None:
    await engine.die()
    recorder = TokenRecorder()
    client.generate(engine_request(), recorder)
    await recorder.until_ended()
    assert type(recorder.ends[0]) is EngineUnavailable
    with pytest.raises(EngineUnavailable):
        await client.model_info()


async def test_an_aborted_request_keeps_its_tokens(
    engine: ScriptedEngine, client: SglangBackend
) -> None:
    engine.hold()
    recorder = TokenRecorder()
    client.generate(engine_request(stream=True), recorder)
    await engine.allow(2)
    await recorder.until_tokens(2)
    await client.abort("r")
    await recorder.until_ended()
    assert recorder.token_ids == expected(2)
    assert recorder.chunks[-1].finish
    assert recorder.chunks[-1].finish.kind == "abort"


async def test_abort_of_an_unknown_request_is_no_error(
    engine: ScriptedEngine, client: SglangBackend
) -> None:
    await client.abort("unknown")
    assert engine.num_seen("/abort_request") == 1


async def test_a_closed_request_receives_nothing_more(
    engine: ScriptedEngine, client: SglangBackend
) -> None:
    engine.hold()
    recorder = TokenRecorder()
    call = client.generate(engine_request(stream=True), recorder)
    await engine.until(lambda: engine.num_live == 1)
    call.close()
    await engine.until(lambda: engine.num_live == 0)
    assert (recorder.chunks, recorder.ends) == ([], [])


@pytest.mark.parametrize(("is_incremental", "num_lines"), [(False, 1), (True, 0)])
async def test_costly_streams_are_logged_once(
    engine: ScriptedEngine,
    client: SglangBackend,
    is_incremental: bool,
    num_lines: int,
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine.is_incremental = is_incremental
    for _ in range(2):
        engine.hold()
        recorder = TokenRecorder()
        client.generate(engine_request(stream=True), recorder)
        await engine.allow(1)
        await recorder.until_tokens(1)
        await engine.release()
        await recorder.until_ended()
    assert caplog.text.count("engine.streams_cumulatively") == num_lines
    assert caplog.text.count("start the engine with --incremental-streaming-output") == num_lines


async def test_update_changes_the_weights(engine: ScriptedEngine, client: SglangBackend) -> None:
    await client.pause()
    assert (await client.server_info())["is_paused"]
    await client.flush()
    await client.update_from_disk(Path("weights"), 7)
    await client.resume()
    assert not (await client.server_info())["is_paused"]
    assert await client.model_info() == ModelInfo("weights", 7, "7")
    recorder = TokenRecorder()
    client.generate(engine_request(), recorder)
    await recorder.until_ended()
    assert recorder.token_ids == expected(5, policy_version=7)
    assert recorder.chunks[0].policy_version == 7


async def test_an_engine_without_weights_queues_requests_until_it_is_updated(
    engine: ScriptedEngine, client: SglangBackend
) -> None:
    await client.pause()
    await client.flush()
    await client.memory.release()
    await client.resume()
    with pytest.raises(EngineRefused, match="HTTP 400"):
        await client.update_from_disk(Path("weights"), 7)
    recorder = TokenRecorder()
    client.generate(engine_request(), recorder)
    await engine.until(lambda: engine.num_live == 1)
    await client.memory.resume()
    assert engine.num_sampled == 0
    await client.update_from_disk(Path("weights"), 7)
    await recorder.until_ended()
    assert recorder.token_ids == expected(5, policy_version=7)


async def test_failed_update_gives_the_status_and_not_the_engines_text(
    engine: ScriptedEngine, client: SglangBackend
) -> None:
    engine.update_error = "no such folder"
    with pytest.raises(EngineRefused, match="HTTP 400: the engine's log has the reason"):
        await client.update_from_disk(Path("nowhere"), 1)


async def test_scores_are_of_all_tokens_but_the_first(client: SglangBackend) -> None:
    assert await client.score([3, 4, 5], "0") == [logprob_of(0, 4), logprob_of(0, 5)]


async def test_load_and_server_info_are_read(client: SglangBackend) -> None:
    assert await client.loads() == EngineLoad(0, 0)
    assert (await client.server_info())["incremental_streaming_output"] is True


async def test_connection_is_used_again_after_a_stream(
    client: SglangBackend, http: HttpClient
) -> None:
    for _ in range(3):
        recorder = TokenRecorder()
        client.generate(engine_request(stream=True), recorder)
        await recorder.until_ended()
    assert http.num_connections == 1
