"""Promises of every dialect: statuses, wake-ups, retries, choices, keep-alives."""

import asyncio
import itertools
from typing import Any

import msgspec
import pytest

from rollmesh.core.config import InterceptionConfig
from rollmesh.runtime.generation.events import EngineAttemptFailed
from rollmesh.runtime.generation.generation import GenerationState
from rollmesh.serve.interception.exchange import ExchangeState
from rollmesh.wire.machine import Ticked
from tests.unit.serve.interception.conftest import AgentSession, StartAgent, read_events

USER = {"role": "user", "content": "guess"}
ASKS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [USER]},
    "/v1/completions": {"prompt": "guess", "max_tokens": 99},
    "/v1/responses": {"input": "guess"},
    "/v1/messages": {"messages": [USER], "max_tokens": 99},
}
every_dialect = pytest.mark.parametrize("path", ASKS)
plain_and_streamed = pytest.mark.parametrize("stream", [False, True])


async def started(agent: AgentSession, num: int = 1) -> None:
    """Wait until the gateway has requested `num` generations and reads the last one."""
    made = agent.sampler.generations
    await agent.sampler.until(lambda: len(made) == num and made[-1].machine.num_readers > 0)


def code_of(answer: Any) -> str:
    """The machine-readable code of an error in any dialect."""
    assert answer.get("type", "error") == "error"
    assert {"message", "type", "code"} <= set(answer["error"])
    return str(answer["error"]["code"])


@every_dialect
async def test_errors_have_their_true_status(start_agent: StartAgent, path: str) -> None:
    agent = await start_agent("4", config=InterceptionConfig(max_body_bytes=2000))
    ask = ASKS[path]
    status, answer = await agent.answer(b"{", path)
    assert (status, code_of(answer)) == (400, "invalid_request")
    status, answer = await agent.answer(ask, path, x_api_key="sk-no", Authorization="")
    assert (status, code_of(answer)) == (401, "invalid_api_key")
    status, answer = await agent.answer(b" " * 2001, path)
    assert (status, code_of(answer)) == (413, "body_too_large")
    agent.opened.session.seal("the rollout ended")
    status, answer = await agent.answer(ask, path)
    assert (status, code_of(answer)) == (410, "session_sealed")
    assert agent.runtime.num_calls == 0


@every_dialect
@pytest.mark.parametrize("at", ["content", "extra", "tool", "unknown"])
async def test_invalid_utf8_is_refused_anywhere_in_a_body(
    start_agent: StartAgent, path: str, at: str
) -> None:
    """Most of a body is stored without decoding: invalid text would reach the session's record."""
    agent = await start_agent("4", "4")
    user = {"role": "user", "content": "gu?ss" if at == "content" else "guess"}
    if at == "extra":
        user["x"] = "gu?ss"
    body: dict[str, Any] = {
        name: user["content"] if name == "prompt" else [user] for name in ASKS[path]
    }
    body |= {"max_tokens": 99, "unknown": "gu?ss" if at == "unknown" else ""}
    if at == "tool":
        tool = {"name": "f", "function": {"name": "f"}, "input_schema": {}, "description": "gu?ss"}
        body["tools"] = [{"type": "function", **tool}]
    raw = msgspec.json.encode(body)
    status, answer = await agent.answer(raw.replace(b"?", b"\xff"), path)
    if b"?" in raw:
        assert (status, code_of(answer)) == (400, "invalid_request")
    assert (await agent.answer(raw.replace(b"?", "\xe9".encode()), path))[0] == 200


@every_dialect
async def test_a_node_records_the_dialect_of_its_request(
    start_agent: StartAgent, path: str
) -> None:
    agent = await start_agent("4")
    assert (await agent.answer(ASKS[path], path))[0] == 200
    agent.opened.session.seal("the rollout ended")
    [node] = [node for node in agent.opened.session.record().nodes if node.sampled]
    assert node.dialect == path.removeprefix("/v1/").partition("/")[0]


@every_dialect
async def test_a_context_overflow_has_the_text_that_agents_search_for(
    start_agent: StartAgent, path: str
) -> None:
    agent = await start_agent("4", max_context_tokens=2)
    status, answer = await agent.answer(ASKS[path], path)
    assert (status, code_of(answer)) == (400, "context_length_exceeded")
    assert answer["error"]["message"].startswith("This model's maximum context length is 2 tokens")


@every_dialect
@plain_and_streamed
async def test_a_seal_wakes_every_waiter(start_agent: StartAgent, path: str, stream: bool) -> None:
    agent = await start_agent()
    async with asyncio.TaskGroup() as group:
        waiting = group.create_task(agent.answer({**ASKS[path], "stream": stream}, path))
        await started(agent)
        assert agent.server.num_open == 1
        agent.opened.session.seal("the rollout ended")
    status, answer = waiting.result()
    assert (status, code_of(answer)) == (410, "session_sealed")
    assert agent.server.num_open == 0


@every_dialect
async def test_a_seal_during_a_stream_is_an_error_event(start_agent: StartAgent, path: str) -> None:
    agent = await start_agent()
    async with asyncio.TaskGroup() as group:
        opening = group.create_task(agent.post({**ASKS[path], "stream": True}, path).__aenter__())
        await started(agent)
        agent.sampler.generations[0].show(*agent.ids("I"))
        response = await opening
        raw = await response.content.readuntil(b'"I"')
        agent.opened.session.seal("the rollout ended")
        events = read_events(raw + await response.read())
        response.release()
    codes = [
        (data.get("error") or data)["code"]
        for _, data in events
        if data
        and b"session_sealed" in msgspec.json.encode(data)
        and data.get("type") != "response.failed"
    ]
    assert codes == ["session_sealed"]
    assert [state for _, state in agent.server.num_exchanges] == [ExchangeState.SEALED]


@every_dialect
@plain_and_streamed
async def test_a_client_that_hangs_up_parks_the_generation_and_its_retry_resumes(
    start_agent: StartAgent, path: str, stream: bool
) -> None:
    agent = await start_agent()
    ask = {**ASKS[path], "stream": stream}
    async with asyncio.TaskGroup() as group:
        lost = group.create_task(agent.answer(ask, path))
        await started(agent)
        generation = agent.sampler.generations[0]
        generation.show(*agent.ids("I guess"))
        lost.cancel()
        await agent.sampler.until(lambda: generation.state is GenerationState.PARKED)
        assert generation.num_aborts == 1
        again = group.create_task(_read(agent, ask, path))
        await started(agent)
        agent.finish(" 4")
    assert b"I guess" in again.result()
    assert len(agent.sampler.generations) == 1
    assert generation.state is GenerationState.COMMITTED


@every_dialect
@plain_and_streamed
async def test_a_marked_retry_returns_the_same_answer(
    start_agent: StartAgent, path: str, stream: bool
) -> None:
    agent = await start_agent("I guess 4", "5")
    ask = {**ASKS[path], "stream": stream}
    first = await _read(agent, ask, path)
    again = await _read(agent, ask, path, {"x-stainless-retry-count": "1"})
    assert again == first
    assert agent.runtime.num_calls == 1


async def _read(
    agent: AgentSession, ask: dict[str, Any], path: str, headers: dict[str, str] | None = None
) -> bytes:
    async with agent.post(ask, path, headers) as response:
        assert response.status == 200
        return bytes(await response.read())


@every_dialect
async def test_no_byte_is_sent_before_the_first_token_or_the_keep_alive(
    start_agent: StartAgent, path: str
) -> None:
    agent = await start_agent(config=InterceptionConfig(keepalive_s=0.02))
    async with agent.post({**ASKS[path], "stream": True}, path) as response:
        assert await response.content.readuntil(b"\n\n") == b": keep-alive\n\n"
        agent.finish("4")
        assert b"4" in await response.read()


@every_dialect
@plain_and_streamed
async def test_an_early_failure_keeps_its_status(
    start_agent: StartAgent, path: str, stream: bool
) -> None:
    agent = await start_agent()
    async with asyncio.TaskGroup() as group:
        opening = group.create_task(agent.post({**ASKS[path], "stream": stream}, path).__aenter__())
        await started(agent)
        assert not opening.done()
        agent.sampler.generations[0].seal("the engine is on fire")
        response = await opening
        assert response.status == 503
        assert response.headers["Retry-After"] == "1"
        assert code_of(msgspec.json.decode(await response.read())) == "engine_unavailable"


@every_dialect
@plain_and_streamed
async def test_lasting_overload_is_a_429(start_agent: StartAgent, path: str, stream: bool) -> None:
    agent = await start_agent()
    async with asyncio.TaskGroup() as group:
        opening = group.create_task(agent.post({**ASKS[path], "stream": stream}, path).__aenter__())
        await started(agent)
        generation = agent.sampler.generations[0]
        while generation.attempt is not None:
            number, generation.attempt = generation.attempt.attempt, None
            generation.drive(EngineAttemptFailed(number, "the queue is full", "overloaded"))
            agent.clock.advance(1.0)
            generation.drive(Ticked())
        response = await opening
        assert response.status == 429
        assert int(response.headers["Retry-After"]) >= 1
        assert code_of(msgspec.json.decode(await response.read())) == "overloaded"


@every_dialect
async def test_unknown_keys_nulls_and_queries_are_accepted(
    start_agent: StartAgent, path: str
) -> None:
    agent = await start_agent("4")
    odd = {"user": None, "metadata": {"a": 1}, "cache": [1], "service_tier": "auto", "tools": None}
    status, _ = await agent.answer({**ASKS[path], **odd}, "/any/prefix" + path + "?beta=true")
    assert status == 200


@every_dialect
async def test_the_sampling_settings_are_returned_on_request(
    start_agent: StartAgent, path: str
) -> None:
    agent = await start_agent("4", "5")
    ask = {**ASKS[path], "temperature": 0.3}
    async with agent.post(ask, path, {"x-rollmesh-sampling": "1"}) as response:
        sampling = msgspec.json.decode(response.headers["x-rollmesh-sampling"])
    assert (sampling["temperature"], sampling["forced"]) == (1.0, ["temperature"])
    async with agent.post(ask, path) as response:
        assert "x-rollmesh-sampling" not in response.headers


async def test_choices_are_streamed_together(start_agent: StartAgent) -> None:
    agent = await start_agent()
    ask = {"messages": [USER], "n": 2, "stream": True, "stream_options": {"include_usage": True}}
    async with asyncio.TaskGroup() as group:
        opening = group.create_task(agent.post(ask).__aenter__())
        await started(agent, 2)
        first, second = agent.sampler.generations
        second.show(*agent.ids("I"))
        response = await opening
        assert b'"index":1' in await response.content.readuntil(b"\n\n")
        first.end(*agent.ids("4<|im_end|>"))
        assert b'"index":0' in await response.content.readuntil(b"\n\n")
        second.end(*agent.ids(" guess<|im_end|>"))
        events = [data for _, data in read_events(await response.read())]
        response.release()
    *_, usage, done = events
    assert done is None
    num_sampled = len(agent.ids("4<|im_end|>")) + len(agent.ids("I guess<|im_end|>"))
    assert usage["usage"]["completion_tokens"] == num_sampled


async def test_plain_choices_are_numbered(start_agent: StartAgent) -> None:
    agent = await start_agent("4", "5", "6")
    _, answer = await agent.answer({"messages": [USER], "n": 3})
    choices = [(each["index"], each["message"]["content"]) for each in answer["choices"]]
    assert choices == [(0, "4"), (1, "5"), (2, "6")]


SCHEMA = {"type": "object"}
FUNCTION = {"name": "f", "description": "d", "parameters": SCHEMA}
TOOLS_IN_CHAT = [{"type": "function", "function": FUNCTION}]
TOOLS_IN_RESPONSES = [{"type": "function", **FUNCTION}]
TOOLS_IN_MESSAGES = [{"name": "f", "description": "d", "input_schema": SCHEMA}]
CALLED = '<think>hm</think>\n\ngo <tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
SYSTEM = "be brief"


def as_messages(call_id: str) -> list[dict[str, Any]]:
    """Return a turn with a tool call in Anthropic's shape."""
    use = {"type": "tool_use", "id": call_id, "name": "f", "input": {"a": 1}}
    result = {"type": "tool_result", "tool_use_id": call_id, "content": "42"}
    return [
        {"role": "user", "content": [{"type": "text", "text": "guess"}]},
        {"role": "assistant", "content": [{"type": "text", "text": "go"}, use]},
        {"role": "user", "content": [result]},
    ]


def as_items(call_id: str) -> list[dict[str, Any]]:
    """Return the chat of `as_messages` with one more turn as the items of a response."""
    go, four = ([{"type": "output_text", "text": text}] for text in ("go", "four"))
    return [
        {"type": "message", "role": "developer", "content": SYSTEM},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "guess"}]},
        {"type": "message", "role": "assistant", "content": go},
        {"type": "function_call", "call_id": call_id, "name": "f", "arguments": '{"a":1}'},
        {"type": "function_call_output", "call_id": call_id, "output": "42"},
        {"type": "message", "role": "assistant", "content": four},
        {"type": "message", "role": "user", "content": "higher"},
    ]


async def test_a_conversation_may_change_its_dialect_at_every_turn(start_agent: StartAgent) -> None:
    """Tool calls, results and reasoning mean the same messages in Chat, Messages and Responses."""
    agent = await start_agent(CALLED, "four", "five", "six")
    chat = [{"role": "system", "content": SYSTEM}, USER]
    _, first = await agent.answer({"messages": chat, "tools": TOOLS_IN_CHAT})
    call_id = first["choices"][0]["message"]["tool_calls"][0]["id"]
    asked = {"max_tokens": 64, "system": SYSTEM, "tools": TOOLS_IN_MESSAGES}
    await agent.answer({**asked, "messages": as_messages(call_id)}, "/v1/messages")
    further = {"tools": TOOLS_IN_RESPONSES}
    _, third = await agent.answer({**further, "input": as_items(call_id)}, "/v1/responses")
    named = {**further, "input": "lower", "previous_response_id": third["id"]}
    status, _ = await agent.answer(named, "/v1/responses")
    assert status == 200
    assert not agent.opened.session.fork_report().forks
    asked_ids = [list(request.prompt_ids) for request in agent.sampler.requests]
    assert len(asked_ids) == 4
    for before, after in itertools.pairwise(asked_ids):
        assert after[: len(before)] == before
