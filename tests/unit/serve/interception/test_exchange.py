"""Exchanges over a real socket: plain, streamed, interrupted, retried and sealed.

Each kind of error is answered before the first byte, in a stream, or not at all after the last
byte.
"""

import asyncio
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest

from rollmesh.core.config import InterceptionConfig
from rollmesh.core.errors import Overloaded, SessionError
from rollmesh.runtime import blobs
from rollmesh.runtime.conversation.history import LONG_BYTES
from rollmesh.runtime.session_log import EventRecorder
from rollmesh.serve.interception import request
from rollmesh.serve.interception.exchange import ExchangeState, guard
from rollmesh.serve.interception.request import HttpRequest
from tests.disks import lose_files, no_room_in_memory
from tests.unit.runtime.list_event_writer import ListEventWriter
from tests.unit.serve.interception.conftest import AgentSession, StartAgent
from tests.unit.serve.interception.http_client import GET, LAST_GET, HeldHandler, serving

USER = {"role": "user", "content": "guess"}
ASK: dict[str, Any] = {"messages": [USER]}
STREAM: dict[str, Any] = {**ASK, "stream": True, "stream_options": {"include_usage": True}}


async def started(agent: AgentSession, num: int = 1) -> None:
    """Wait until the server has requested that many generations and reads the last."""
    made = agent.sampler.generations
    await agent.sampler.until(lambda: len(made) == num and made[-1].machine.num_readers > 0)


async def events(response: aiohttp.ClientResponse) -> list[Any]:
    """Return the decoded events of a stream; `[DONE]` is None."""
    found: list[Any] = []
    async for line in response.content:
        if line.startswith(b"data: "):
            data = line[6:].strip()
            found.append(None if data == b"[DONE]" else msgspec.json.decode(data))
    return found


async def test_a_stream_adds_up_to_the_plain_answer(start_agent: StartAgent) -> None:
    agent = await start_agent("I guess 4", "I guess 4")
    async with agent.post(STREAM) as response:
        assert response.headers["Content-Type"].startswith("text/event-stream")
        *chunks, last, usage, done = await events(response)
    _, plain = await agent.answer(ASK)
    choices = [chunk["choices"][0] for chunk in [*chunks, last]]
    text = "".join(choice["delta"].get("content", "") for choice in choices)
    assert choices[0]["delta"]["role"] == "assistant"
    assert text == plain["choices"][0]["message"]["content"] == "I guess 4"
    assert [c["finish_reason"] for c in choices] == [None] * len(chunks) + ["stop"]
    assert usage["choices"] == []
    assert usage["usage"] == plain["usage"]
    assert done is None
    assert len({chunk["id"] for chunk in [*chunks, last, usage]}) == 1


async def test_tokens_are_streamed_as_they_are_sampled(start_agent: StartAgent) -> None:
    agent = await start_agent()
    async with asyncio.TaskGroup() as group:
        opening = group.create_task(agent.post(STREAM).__aenter__())
        await started(agent)
        assert not opening.done()
        generation = agent.sampler.generations[0]
        generation.show(*agent.ids("I"))
        response = await opening
        first = await response.content.readuntil(b"\n\n")
        assert b'"content":"I"' in first
        generation.show(*agent.ids(" guess"))
        second = await response.content.readuntil(b"\n\n")
        assert b'"content":" guess"' in second
        agent.finish(" 4")
        rest = await events(response)
        assert rest[0]["choices"][0]["delta"]["content"] == " 4"
        response.release()


async def test_an_idle_stream_is_kept_alive_by_comments(start_agent: StartAgent) -> None:
    agent = await start_agent(config=InterceptionConfig(keepalive_s=0.01))
    async with agent.post(STREAM) as response:
        assert await response.content.readuntil(b"\n\n") == b": keep-alive\n\n"
        agent.finish("4")
        assert (await events(response))[-1] is None


async def _read(agent: AgentSession, ask: dict[str, Any], **headers: str) -> bytes:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    async with agent.post(ask, headers=named) as response:
        return bytes(await response.read())


@pytest.mark.parametrize("mark", ["x_stainless_retry_count", "Idempotency_Key"])
@pytest.mark.parametrize("ask", [ASK, STREAM])
async def test_a_marked_retry_gets_the_same_answer(
    start_agent: StartAgent, mark: str, ask: dict[str, Any]
) -> None:
    agent = await start_agent("<think>hm</think>4", "5")
    sent = {mark: "1"}
    first = await _read(agent, ask, **(sent if mark == "Idempotency_Key" else {}))
    again = await _read(agent, ask, **sent)
    if ask is ASK:
        assert again == first
    else:
        # A stream is split where tokens arrived, so only its content is the same.
        assert _text_in_stream(again) == _text_in_stream(first)
    assert agent.runtime.num_calls == 1


def _text_in_stream(stream: bytes) -> list[str]:
    chunks = [msgspec.json.decode(p[6:]) for p in stream.split(b"\n\n") if p.startswith(b"data: {")]
    texts = [c["choices"][0]["delta"].get("content", "") for c in chunks if c["choices"]]
    return [chunks[0]["id"], str(chunks[0]["created"]), "".join(texts)]


@pytest.mark.parametrize("ask", [ASK, STREAM])
async def test_a_sealed_session_wakes_its_waiters_with_410(
    start_agent: StartAgent, ask: dict[str, Any]
) -> None:
    agent = await start_agent()
    async with asyncio.TaskGroup() as group:
        waiting = group.create_task(agent.answer(ask))
        await started(agent)
        agent.opened.session.seal("the rollout ended")
    status, answer = waiting.result()
    assert (status, answer["error"]["code"]) == (410, "session_sealed")
    assert (await agent.answer(ask))[0] == 410


@pytest.mark.parametrize("ask", [ASK, STREAM])
async def test_a_sealed_session_ends_a_call_whose_client_does_not_read(
    start_agent: StartAgent, monkeypatch: pytest.MonkeyPatch, ask: dict[str, Any]
) -> None:
    monkeypatch.setattr(request, "DRAIN_CHECK_S", 0.01)
    agent = await start_agent(max_context_tokens=10**7)
    client = await narrow_client(agent, {**ask, "max_tokens": 10**6})
    await started(agent)
    # Each token takes six bytes of JSON, so the answer exceeds the kernel's buffers. The generation
    # ends: only the client delays the exchange.
    agent.sampler.generations[0].end(*agent.ids("\x01") * 10**6)
    await asyncio.get_running_loop().sock_recv(client, 1)
    assert agent.server.num_open
    agent.opened.session.seal("the rollout ended")
    while agent.server.num_open:  # noqa: ASYNC110 - the end of an exchange has no event
        await asyncio.sleep(0)
    client.close()
    assert {state for _, state in agent.server.num_exchanges} == {ExchangeState.SEALED}


async def narrow_client(agent: AgentSession, ask: dict[str, Any]) -> socket.socket:
    """Return a client that has sent a request and reads little at a time."""
    host, _, port = agent.base.removeprefix("http://").partition(":")
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(client, (host, int(port)))
    body = msgspec.json.encode(ask)
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nx-api-key: {agent.opened.api_key}\r\n"
    await loop.sock_sendall(client, f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    return client


async def test_a_failure_after_the_first_byte_is_an_event(start_agent: StartAgent) -> None:
    agent = await start_agent()
    async with asyncio.TaskGroup() as group:
        opening = group.create_task(agent.post(STREAM).__aenter__())
        await started(agent)
        agent.sampler.generations[0].show(*agent.ids("I"))
        response = await opening
        agent.opened.session.seal("the rollout ended")
        *_, last = await events(response)
        response.release()
    assert last["error"]["code"] == "session_sealed"


async def test_an_engine_that_fails_gives_503_with_retry_after(start_agent: StartAgent) -> None:
    agent = await start_agent()
    async with asyncio.TaskGroup() as group:
        opening = group.create_task(agent.post(ASK).__aenter__())
        await started(agent)
        agent.sampler.generations[0].seal("the engine is on fire")
        response = await opening
        assert response.status == 503
        assert response.headers["Retry-After"] == "1"
        response.release()


async def test_a_lost_history_is_a_503_and_no_fault_of_the_agent(
    start_agent: StartAgent, tmp_path: Path
) -> None:
    agent = await start_agent("4", "5", max_context_tokens=2 * LONG_BYTES)
    with no_room_in_memory(tmp_path):
        long = {"role": "user", "content": "x" * LONG_BYTES}
        assert (await agent.answer({"messages": [long]}))[0] == 200
        assert blobs.spill_over() > LONG_BYTES
        lose_files(tmp_path)
        edited = {"messages": [{**long, "content": "y"}, {"role": "user", "content": "hm"}]}
        status, answer = await agent.answer(edited)
    assert (status, answer["error"]["code"]) == (503, "content_lost")
    assert "cannot be read back" in agent.opened.session.engine_fault


async def test_a_context_overflow_is_a_400_that_agents_understand(start_agent: StartAgent) -> None:
    agent = await start_agent("4", max_context_tokens=8)
    status, answer = await agent.answer(ASK)
    assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
    assert answer["error"]["message"].startswith("This model's maximum context length is 8 tokens")


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"\xff\xfe",
        b'{"messages": "hi"}',
        b'{"messages": []}',
        b'{"messages": [7]}',
        b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
        b'{"messages": [{"role": "user", "content": "x"}], "max_tokens": 0}',
        b'{"messages": [{"role": "user", "content": "x"}], "tools": {"a": 1}}',
        b"[" * 100_000,
        b'{"messages":[' + b"[" * 10_000,
    ],
)
async def test_a_malformed_body_is_a_400(start_agent: StartAgent, body: bytes) -> None:
    agent = await start_agent("4")
    status, answer = await agent.answer(body)
    assert status == 400, answer
    assert answer["error"]["type"] == "invalid_request_error"
    assert (await agent.answer(ASK))[0] == 200


async def test_a_stop_string_ends_the_answer(start_agent: StartAgent) -> None:
    agent = await start_agent("go on Observation: x")
    _, answer = await agent.answer({**ASK, "stop": ["Observation:"]})
    assert answer["choices"][0]["message"]["content"] == "go on"
    assert answer["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize("ask", [ASK, STREAM], ids=["whole", "stream"])
async def test_an_answer_that_was_not_journaled_is_not_completed(
    start_agent: StartAgent, ask: dict[str, Any]
) -> None:
    agent, writer = await start_agent(), ListEventWriter()
    agent.opened.session.recorder = EventRecorder(writer)
    asking = asyncio.ensure_future(text_of(agent, ask))
    await started(agent)
    writer.is_full = True
    agent.finish("four")
    text = await asking
    assert "journal_full" in text
    assert "four" not in text
    assert "[DONE]" not in text


async def text_of(agent: AgentSession, ask: dict[str, Any]) -> str:
    async with agent.post(ask) as response:
        return str(await response.text())


def busy() -> SessionError:
    return SessionError(503, "engine_down", "no engine", 0.2)


def sealed() -> SessionError:
    return SessionError(410, "session_sealed", "the session has ended")


ENDS: list[tuple[Callable[[], Exception], ExchangeState, int]] = [
    (busy, ExchangeState.FAILED, 503),
    (sealed, ExchangeState.SEALED, 410),
    (lambda: Overloaded("full", 2.6), ExchangeState.FAILED, 429),
    (lambda: ValueError("rk-secret"), ExchangeState.FAILED, 500),
]


class ScriptedExchange:
    """An exchange whose work the test defines."""

    def __init__(
        self, request: HttpRequest, work: Callable[[HttpRequest], Awaitable[None]]
    ) -> None:
        self.state = ExchangeState.RECEIVED
        self.request = request
        self._work = work

    async def run(self) -> None:
        await guard(self, self._work(self.request))

    def refusal(self, error: SessionError) -> bytes:
        return b"[%s]" % error.code.encode()

    def last_event(self, error: SessionError) -> bytes:
        return b"event %s" % error.code.encode()


async def ended(work: Callable[[HttpRequest], Awaitable[None]]) -> tuple[bytes, ExchangeState]:
    """Return the client's answer and the last state of the exchange."""
    states: list[ExchangeState] = []

    async def handle(request: HttpRequest) -> None:
        exchange = ScriptedExchange(request, work)
        try:
            await exchange.run()
        finally:
            states.append(exchange.state)

    async with serving(handle) as running:
        answer = await running.ask(LAST_GET)
    return answer, states[0]


@pytest.mark.parametrize(("error", "state", "status"), ENDS, ids=["busy", "sealed", "full", "odd"])
async def test_an_error_before_the_first_byte_has_its_true_status(
    error: Callable[[], Exception], state: ExchangeState, status: int
) -> None:
    async def work(request: HttpRequest) -> None:
        request.open(200, b"")
        raise error()

    answer, last = await ended(work)
    head, _, body = answer.partition(b"\r\n\r\n")
    assert (int(head.split(b" ")[1]), last) == (status, state)
    assert body.startswith(b"[")
    waits = {503: b"\r\nRetry-After: 1\r\n", 429: b"\r\nRetry-After: 3\r\n"}
    assert waits.get(status, b"Content-Length") in head
    assert (b"Retry-After" in head) == (status in waits)
    assert b"rk-secret" not in answer


@pytest.mark.parametrize(("error", "state", "status"), ENDS, ids=["busy", "sealed", "full", "odd"])
async def test_an_error_in_a_stream_is_its_last_event(
    error: Callable[[], Exception], state: ExchangeState, status: int
) -> None:
    async def work(request: HttpRequest) -> None:
        request.open(200, b"")
        request.send(b"first")
        raise error()

    answer, last = await ended(work)
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert b"event " in answer.partition(b"first")[2]
    assert answer.endswith(b"\r\n0\r\n\r\n")
    assert last is state


async def test_an_error_after_the_last_byte_is_not_sent() -> None:
    async def work(request: HttpRequest) -> None:
        request.answer(200, b"", b"whole")
        raise sealed()

    answer, last = await ended(work)
    assert answer.endswith(b"\r\n\r\nwhole")
    assert last is ExchangeState.SEALED


async def test_a_disconnected_client_gets_nothing_and_its_exchange_is_abandoned() -> None:
    held, states = HeldHandler(), []

    async def handle(request: HttpRequest) -> None:
        exchange = ScriptedExchange(request, held)
        try:
            await exchange.run()
        finally:
            states.append(exchange.state)

    async with serving(handle) as running:
        client = await running.client()
        client.send(GET)
        await held.begun.wait()
        client.reset()
        await held.cancelled.wait()
        await running.server.stop()
    assert states == [ExchangeState.ABANDONED]


async def test_an_error_after_the_client_disconnected_is_an_abandoned_exchange() -> None:
    begun, states = asyncio.Event(), []

    async def work(request: HttpRequest) -> None:
        begun.set()
        # Cancelled because the client has disconnected, the work raises an error of its own.
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            raise busy() from None

    async def handle(request: HttpRequest) -> None:
        exchange = ScriptedExchange(request, work)
        try:
            await exchange.run()
        finally:
            states.append(exchange.state)

    async with serving(handle) as running:
        client = await running.client()
        client.send(GET)
        await begun.wait()
        client.reset()
        while not states:  # noqa: ASYNC110 - only the server notices the lost client
            await asyncio.sleep(0)
    assert states == [ExchangeState.ABANDONED]
