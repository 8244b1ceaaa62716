"""Hostile clients: garbled bodies, headers and paths, early closes, slow senders.

A canary session makes the same calls before and after: its answers must stay byte-identical, and
nothing of the hostile session may appear in its record.
"""

import asyncio
import json
import socket
from collections.abc import Callable

import hypothesis
import pytest
from hypothesis import strategies as st

from rollmesh.core.config import InterceptionConfig
from rollmesh.core.ids import GroupId, RolloutId
from rollmesh.core.types import SamplingPolicy
from tests.unit.serve.interception.conftest import (  # noqa: F401 - fixtures among them
    AgentSession,
    StartAgent,
    prompts,
    start_agent,
    tokenizer,
)
from tests.unit.serve.interception.dialects.test_dialect import ASKS

SAID = "I guess 4"
PATHS = [*ASKS, "/v1/messages/count_tokens"]
TIMEOUT_S = 10.0

fuzzed = hypothesis.settings(
    max_examples=300,
    database=None,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(hypothesis.HealthCheck),
)

texts = st.text(max_size=12)
scalars = st.none() | st.booleans() | st.integers() | st.floats() | texts
keys = st.sampled_from(
    [
        "role",
        "content",
        "type",
        "text",
        "tools",
        "name",
        "input",
        "id",
        "function",
        "arguments",
        "messages",
        "system",
    ]
)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys | texts, inner, max_size=3),
    max_leaves=8,
)
known = st.sampled_from(
    [
        "messages",
        "prompt",
        "input",
        "model",
        "tools",
        "tool_choice",
        "functions",
        "stream",
        "n",
        "stop",
        "seed",
        "logprobs",
        "top_logprobs",
        "response_format",
        "temperature",
        "max_tokens",
        "logit_bias",
        "system",
        "instructions",
        "previous_response_id",
        "text",
        "include",
        "stop_sequences",
        "echo",
        "guided_json",
        "json_schema",
        "structured_outputs",
        "regex",
        "ebnf",
        "functions",
        "function_call",
        "parallel_tool_calls",
        "return_token_ids",
        "max_completion_tokens",
        "max_output_tokens",
        "top_k",
        "min_p",
        "metadata",
        "output_config",
        "suffix",
        "best_of",
        "stream_options",
    ]
)


@st.composite
def bodies(draw: st.DrawFn, path: str) -> bytes:
    """A good body with keys replaced, and perhaps with bytes changed."""
    body = dict(ASKS.get(path, ASKS["/v1/messages"]))
    body |= draw(st.dictionaries(known, values, max_size=3))
    raw = bytearray(json.dumps(body).encode("utf-8", "surrogatepass"))
    for _ in range(draw(st.integers(0, 2))):
        raw[draw(st.integers(0, len(raw) - 1))] = draw(st.integers(0, 255))
    return bytes(raw)


class Canary:
    """Another session of the same server, and its first answers."""

    def __init__(self, agent: AgentSession) -> None:
        self.agent = agent
        self.opened = agent.runtime.register_trajectory(
            RolloutId(GroupId("r", 0), 1), SamplingPolicy(), seed=7
        )
        self.first: list[bytes] = []

    async def ask(self) -> list[bytes]:
        """One answer in each dialect, plain and streamed."""
        key = {"Authorization": f"Bearer {self.opened.api_key}", "x-stainless-retry-count": "1"}
        answers = []
        for path, ask in ASKS.items():
            for stream in (False, True):
                async with self.agent.post({**ask, "stream": stream}, path, key) as response:
                    assert response.status == 200
                    answers.append(await response.read())
        return answers

    async def assert_unharmed(self) -> None:
        """Check that its answers are unchanged and its record has its own calls only."""
        num_calls = self.opened.session.num_calls
        assert await self.ask() == self.first
        assert self.opened.session.num_calls == num_calls == 2 * len(ASKS)
        assert self.agent.server.num_open == 0


@pytest.fixture
async def canary(start_agent: StartAgent) -> Canary:  # noqa: F811 - the fixture
    agent = await start_agent(always=SAID, config=InterceptionConfig(max_body_bytes=100_000))
    canary = Canary(agent)
    canary.first = await canary.ask()
    return canary


def send(agent: AgentSession, *pieces: bytes, closes: bool = False) -> bytes:
    """Send raw bytes and read until the server closes the connection or has answered; b"" if cut
    off.
    """
    host, _, port = agent.base.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port)), TIMEOUT_S) as connection:
        try:
            for piece in pieces:
                connection.sendall(piece)
            if closes:
                return b""
            connection.shutdown(socket.SHUT_WR)
            answer = b""
            while more := connection.recv(65536):
                answer += more
        except ConnectionError:
            return b""
    return answer


def status_of(answer: bytes) -> int:
    """Status of a raw answer; 0 if there is none."""
    return int(answer.split(None, 2)[1]) if answer.startswith(b"HTTP/1.") else 0


def request(agent: AgentSession, path: str, body: bytes, *headers: bytes) -> bytes:
    lines = [
        f"POST {path} HTTP/1.1".encode(),
        b"Host: x",
        f"x-api-key: {agent.opened.api_key}".encode(),
        b"Content-Length: %d" % len(body),
        b"Connection: close",
        *headers,
    ]
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


async def in_thread(work: Callable[[], None]) -> None:
    await asyncio.to_thread(work)


@pytest.mark.parametrize("path", PATHS)
async def test_garbled_bodies_are_answered(canary: Canary, path: str) -> None:
    agent, seen = canary.agent, set[int]()

    @fuzzed
    @hypothesis.given(body=bodies(path))
    def garble(body: bytes) -> None:
        # The server treats a half-close as a disconnect, so wait for the complete answer instead.
        status = asyncio.run_coroutine_threadsafe(agent.answer(body, path), loop).result()[0]
        assert status in (200, 400), body
        seen.add(status)

    loop = asyncio.get_running_loop()
    await in_thread(garble)
    assert seen == {200, 400}
    await canary.assert_unharmed()


ODD_TOOLS: list[object] = [
    {},
    {"type": "function"},
    {"type": "custom", "custom": {"name": "x"}},
    {"function": "x"},
    {"function": {"name": 10**30}},
    {"function": {"name": "f", "description": {"a": 1}}},
    {"function": {"name": "f", "parameters": [1]}},
    {"function": {"name": "f", "parameters": {"properties": {"a": {"type": [1]}}}}},
    {"name": None, "input_schema": {"a": 10**30}},
    {"name": "f", "input_schema": 7},
    {"type": "function", "name": "f", "parameters": {"properties": {"a": []}}},
]


@pytest.mark.parametrize("path", PATHS)
async def test_tools_of_any_shape_are_answered(start_agent: StartAgent, path: str) -> None:  # noqa: F811 - the fixture
    call = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
    agent = await start_agent(always=call)
    for tool in ODD_TOOLS:
        for choice in ("auto", "required", {"type": "any"}, {"type": "tool", "name": "f"}):
            ask = {**ASKS.get(path, ASKS["/v1/messages"]), "tools": [tool], "tool_choice": choice}
            assert (await agent.answer(json.dumps(ask).encode(), path))[0] in (200, 400), ask


async def test_garbled_heads_are_answered_or_cut(canary: Canary) -> None:
    agent = canary.agent
    body = json.dumps(ASKS["/v1/chat/completions"]).encode()

    @fuzzed
    @hypothesis.given(
        name=st.binary(min_size=1, max_size=20),
        value=st.binary(max_size=40),
        at=st.integers(0, 200),
        change=st.binary(max_size=4),
    )
    def garble(name: bytes, value: bytes, at: int, change: bytes) -> None:
        whole = request(agent, "/v1/chat/completions", body, name + b": " + value)
        garbled = whole[:at] + change + whole[at + len(change) :]
        for raw in (whole, garbled):
            assert status_of(send(agent, raw)) < 500

    await in_thread(garble)
    await canary.assert_unharmed()


async def test_early_closes_leave_nothing(canary: Canary) -> None:
    agent = canary.agent

    @fuzzed
    @hypothesis.given(
        path=st.sampled_from(PATHS), share=st.floats(0, 1), stream=st.booleans(), cut=st.booleans()
    )
    def close(path: str, share: float, stream: bool, cut: bool) -> None:
        body = json.dumps({**ASKS.get(path, {}), "stream": stream}).encode()
        whole = request(agent, path, body)
        send(agent, whole[: int(share * len(whole))] if cut else whole, closes=True)

    await in_thread(close)
    while agent.server.num_open:  # noqa: ASYNC110 - no event announces the last lost client
        await asyncio.sleep(0)
    await canary.assert_unharmed()


@pytest.mark.parametrize("path", PATHS)
async def test_a_sender_that_falls_silent_is_refused(
    start_agent: StartAgent,  # noqa: F811 - the fixture
    path: str,
) -> None:
    agent = await start_agent(always=SAID, config=InterceptionConfig(keepalive_s=0.05))
    body = b" " * 40
    head, _, _ = request(agent, path, body).partition(b"\r\n\r\n")
    host, _, port = agent.base.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    for piece in (head, b"\r\n\r\n", body[:10], body[10:20]):
        writer.write(piece)
        await writer.drain()
    assert b" 408 " in await reader.readline()
    writer.close()
    assert agent.runtime.num_calls == 0


async def test_a_sender_that_is_merely_slow_is_answered(canary: Canary) -> None:
    agent = canary.agent
    body = json.dumps(ASKS["/v1/responses"]).encode()
    host, _, port = agent.base.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    for byte in request(agent, "/v1/responses", body):
        writer.write(bytes([byte]))
        await writer.drain()
        await asyncio.sleep(0)
    assert b" 200 " in await reader.readline()
    writer.close()
    await canary.assert_unharmed()
