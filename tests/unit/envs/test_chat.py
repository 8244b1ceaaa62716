"""The simple agent client: its requests, its retries, and how a failure ends."""

import pytest

from rollmesh.core.errors import AgentFailed, ContextFull, InfraError
from rollmesh.envs.chat import FULL, ChatClient, ChatReply, ChatSettings, ToolCall
from rollmesh.envs.env import Endpoint
from rollmesh.testing.upstreams import ChatAnswer, ChatEndpoint

AT_ONCE = ChatSettings(num_attempts=3, backoff_s=0.0, max_wait_s=0.0)
HELLO = [{"role": "user", "content": "hello"}]


async def call(server: ChatEndpoint, settings: ChatSettings = AT_ONCE) -> ChatReply:
    client = ChatClient(settings)
    try:
        return await client.complete(server.endpoint, HELLO, max_tokens=8)
    finally:
        await client.close()


async def test_call_carries_model_messages_fields_and_key() -> None:
    async with ChatEndpoint([ChatAnswer("hi", finish_reason="length")]) as server:
        reply = await call(server)
    assert (reply.text, reply.finish_reason, reply.calls) == ("hi", "length", ())
    (seen,) = server.requests
    assert seen.path == "/v1/chat/completions"
    assert seen.headers["Authorization"] == "Bearer sk-test"
    assert seen.body == {"model": "policy", "messages": HELLO, "max_tokens": 8}
    assert "x-stainless-retry-count" not in seen.headers


@pytest.mark.parametrize(
    "fault", [ChatAnswer("busy", 429), ChatAnswer("no engine", 503), ChatAnswer(hang_up=True)]
)
async def test_a_transient_fault_is_retried_with_a_retry_header(fault: ChatAnswer) -> None:
    async with ChatEndpoint([fault, fault, "at last"]) as server:
        assert (await call(server)).text == "at last"
    retry_counts = [seen.headers.get("x-stainless-retry-count") for seen in server.requests]
    assert retry_counts == [None, "1", "2"]


async def test_a_lasting_fault_is_an_infra_error_with_the_answer() -> None:
    async with ChatEndpoint([ChatAnswer("no engine", 503)] * 3) as server:
        with pytest.raises(InfraError, match=r"after 3 attempts: HTTP 503: no engine"):
            await call(server)
    assert len(server.requests) == 3


async def test_a_refused_connection_is_an_infra_error() -> None:
    async with ChatEndpoint([]) as server:
        endpoint = server.endpoint
    client = ChatClient(AT_ONCE)
    with pytest.raises(InfraError, match="after 3 attempts"):
        await client.complete(endpoint, HELLO)
    await client.close()


async def test_a_refusal_is_the_agents_fault_and_is_not_retried() -> None:
    async with ChatEndpoint([ChatAnswer("context too long", 400)]) as server:
        with pytest.raises(AgentFailed, match="HTTP 400: context too long"):
            await call(server)
    assert len(server.requests) == 1


@pytest.mark.parametrize("body", [b"not json", b'{"choices": []}', b'{"choices": "none"}'])
async def test_an_answer_that_is_no_completion_is_an_infra_error(body: bytes) -> None:
    async with ChatEndpoint([ChatAnswer(body=body)]) as server:
        with pytest.raises(InfraError, match="no chat completion"):
            await call(server)


async def test_error_without_json_is_quoted() -> None:
    async with ChatEndpoint([ChatAnswer(status=404, body=b"<html>nowhere")]) as server:
        with pytest.raises(AgentFailed, match="HTTP 404: <html>nowhere"):
            await call(server)


async def test_retry_after_is_honoured_up_to_the_bound() -> None:
    async with ChatEndpoint([ChatAnswer("busy", 429, {"Retry-After": "3600"}), "done"]) as server:
        bounded = ChatSettings(num_attempts=2, backoff_s=0.0, max_wait_s=0.001)
        assert (await call(server, bounded)).text == "done"
    async with ChatEndpoint([ChatAnswer("busy", 429, {"Retry-After": "soon"}), "done"]) as server:
        assert (await call(server)).text == "done"


async def test_one_session_serves_many_endpoints_and_reopens_after_close() -> None:
    client = ChatClient(AT_ONCE)
    async with ChatEndpoint(["a", "b"]) as server:
        assert (await client.complete(server.endpoint, HELLO)).text == "a"
        await client.close()
        other = Endpoint(server.endpoint.base_url, "sk-other", "policy")
        assert (await client.complete(other, HELLO)).text == "b"
        await client.close()
    assert server.requests[1].headers["Authorization"] == "Bearer sk-other"


async def test_an_answer_without_text_reads_as_empty() -> None:
    body = b'{"choices": [{"message": {"role": "assistant", "content": null}}]}'
    async with ChatEndpoint([ChatAnswer(body=body)]) as server:
        reply = await call(server)
    assert (reply.text, reply.finish_reason) == ("", "stop")


async def test_calls_and_reasoning_are_read_and_the_message_can_be_sent_back_unchanged() -> None:
    calls = (ToolCall("c1", "bash", '{"command":  "ls"}'), ToolCall("c2", "bash", "{"))
    async with ChatEndpoint([ChatAnswer("look", calls=calls, reasoning="hm")]) as server:
        reply = await call(server)
    assert reply.calls == calls
    assert reply.message["reasoning_content"] == "hm"
    assert [each["id"] for each in reply.message["tool_calls"]] == ["c1", "c2"]


@pytest.mark.parametrize("code", FULL)
async def test_a_conversation_past_a_limit_has_its_own_error(code: str) -> None:
    body = b'{"error": {"message": "too long", "code": "%b"}}' % code.encode()
    async with ChatEndpoint([ChatAnswer(status=400, body=body)]) as server:
        with pytest.raises(ContextFull, match="too long"):
            await call(server)


@pytest.mark.parametrize("content", [b"[]", b"7"])
async def test_content_that_is_not_text_is_an_infra_error(content: bytes) -> None:
    body = b'{"choices": [{"message": {"content": %s}}]}' % content
    async with ChatEndpoint([ChatAnswer(body=body)]) as server:
        with pytest.raises(InfraError, match="no chat completion"):
            await call(server)
