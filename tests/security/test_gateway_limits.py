"""Attacks on the gateway's limits: one agent, or a stranger, must not stall the others."""

import asyncio
import zlib
from urllib.parse import urlsplit

import msgspec
import pytest

from rollmesh.core.config import InterceptionConfig
from rollmesh.core.ids import GroupId, RolloutId
from rollmesh.core.types import SamplingPolicy
from rollmesh.runtime.scopes import OpenSession
from rollmesh.serve.interception.connection import ConnectionLimits
from rollmesh.serve.interception.relay.upstream_answer import forwarded_headers
from rollmesh.serve.interception.request import JSON, HttpRequest
from tests.unit.serve.interception.conftest import (  # noqa: F401 - fixtures among them
    AgentSession,
    StartAgent,
    prompts,
    start_agent,
    tokenizer,
)
from tests.unit.serve.interception.http_client import serving

MIB = 2**20
NUM_SILENT = 20
CHAT = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer %b\r\n"


class Attacker:
    """A second session of the same server, and raw connections that carry its key."""

    def __init__(self, agent: AgentSession) -> None:
        self.opened: OpenSession = agent.runtime.register_trajectory(
            RolloutId(GroupId("r", 0), 1), SamplingPolicy(), seed=8
        )
        self._port = urlsplit(agent.base).port
        self.connections: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def send(self, *lines: bytes, body: bytes = b"") -> asyncio.StreamReader:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        self.connections.append((reader, writer))
        head = CHAT % self.opened.api_key.encode() + b"".join(b"%b\r\n" % line for line in lines)
        writer.write(head + b"\r\n" + body)
        return reader

    async def close(self) -> None:
        for _, writer in self.connections:
            writer.transport.abort()
            await asyncio.sleep(0)


async def until_held(agent: AgentSession, num_held: int) -> None:
    while agent.server.bodies.num_held != num_held:  # noqa: ASYNC110 - counts have no event
        await asyncio.sleep(0)


async def until_begun(agent: AgentSession, num_generations: int) -> None:
    while len(agent.sampler.generations) < num_generations:  # noqa: ASYNC110 - a list has no event
        await asyncio.sleep(0)


def chat_of(num_bytes: int) -> dict[str, object]:
    """A chat whose body has `num_bytes` bytes and few tokens: the rest is an unused tool."""
    tool = {"type": "function", "function": {"name": "f", "description": "x" * num_bytes}}
    return {"messages": [{"role": "user", "content": "go"}], "metadata": tool}


async def test_silent_announcers_of_one_session_do_not_delay_another(
    start_agent: StartAgent,  # noqa: F811 - the fixture
) -> None:
    agent = await start_agent(always="I guess 4")
    attacker = Attacker(agent)
    for _ in range(NUM_SILENT):
        await attacker.send(b"Content-Length: %d" % (60 * MIB), body=b"{")
    await until_held(agent, NUM_SILENT)
    num_waits = agent.server.bodies.num_waits
    async with asyncio.timeout(60):
        status, _ = await agent.answer(chat_of(600_000))
    assert status == 200
    assert agent.server.bodies.num_waits == num_waits, "the call waited for room of another session"
    await attacker.close()
    await until_held(agent, 0)


async def test_one_session_cannot_use_all_memory_for_bodies(
    start_agent: StartAgent,  # noqa: F811 - the fixture
) -> None:
    agent = await start_agent(always="I guess 4")
    attacker = Attacker(agent)
    half = b"{" + b" " * (40 * MIB)
    for _ in range(8):
        await attacker.send(b"Content-Length: %d" % (60 * MIB), body=half)
    while not agent.server.bodies.num_waiting:  # noqa: ASYNC110 - counts have no event
        await asyncio.sleep(0)
    async with asyncio.timeout(60):
        status, _ = await agent.answer(chat_of(600_000))
    assert status == 200
    assert agent.server.bodies.held_bytes <= agent.server.bodies.max_bytes // 4
    await attacker.close()
    await until_held(agent, 0)


async def test_a_compression_bomb_is_refused_before_it_has_grown(
    start_agent: StartAgent,  # noqa: F811 - the fixture
) -> None:
    agent = await start_agent(always="I guess 4")
    attacker = Attacker(agent)
    packer = zlib.compressobj(9, zlib.DEFLATED, zlib.MAX_WBITS | 16)
    bomb = packer.compress(b" " * (60 * MIB)) + packer.flush()
    lines = b"Content-Encoding: gzip", b"Content-Length: %d" % len(bomb)
    reader = await attacker.send(*lines, body=bomb)
    answer = await reader.readuntil(b"}}")
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert b"more than 100 times its size" in answer
    await attacker.close()


async def test_one_call_cannot_start_thousands_of_generations(
    start_agent: StartAgent,  # noqa: F811 - the fixture
) -> None:
    agent = await start_agent()
    batch = {"prompt": ["go"] * 128, "n": 128}
    status, answer = await agent.answer(batch, "/v1/completions")
    assert (status, answer["error"]["code"]) == (400, "too_many_choices")
    assert "interception.max_turns_at_once" in answer["error"]["message"]
    assert not agent.sampler.generations


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "go"}]}),
        ("/v1/completions", {"prompt": "go"}),
        ("/v1/responses", {"input": "go"}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "go"}], "max_tokens": 9}),
    ],
)
async def test_a_session_past_its_turns_gets_429_in_its_dialect(
    start_agent: StartAgent,  # noqa: F811 - the fixture
    path: str,
    body: dict[str, object],
) -> None:
    agent = await start_agent(config=InterceptionConfig(max_turns_at_once=4))
    batch = {"prompt": ["one", "two"], "n": 2}
    running = asyncio.create_task(agent.answer(batch, "/v1/completions"))
    await until_begun(agent, 4)
    async with agent.post(body, path) as response:
        answer = msgspec.json.decode(await response.read())
        assert response.status == 429
        assert int(response.headers["Retry-After"]) >= 1
    assert answer["error"]["type"] == "rate_limit_error"
    assert "interception.max_turns_at_once" in answer["error"]["message"]
    # Turns of another session are not counted with these.
    other = Attacker(agent)
    raw = b'{"messages":[{"role":"user","content":"go"}]}'
    await other.send(b"Content-Length: %d" % len(raw), body=raw)
    await until_begun(agent, 5)
    for at in range(5):
        agent.finish("I guess 4", at)
    assert (await running)[0] == 200
    await other.close()


@pytest.mark.parametrize(
    "url", ["http://169.254.169.254/latest/meta-data", "http://127.0.0.1:8265/status"]
)
async def test_an_agents_image_address_is_not_passed_to_the_engine(
    start_agent: StartAgent,  # noqa: F811 - the fixture
    url: str,
) -> None:
    agent = await start_agent(always="I guess 4")
    image = {"type": "image_url", "image_url": {"url": url}}
    status, answer = await agent.answer({"messages": [{"role": "user", "content": [image]}]})
    assert status == 400
    assert "interception.image_hosts" in answer["error"]["message"]
    assert not agent.sampler.generations


def test_a_relay_forwards_neither_nominated_headers_nor_the_agents_choice_of_organisation() -> None:
    sent = [
        (b"Connection", b"keep-alive, X-Hop"),
        (b"X-Hop", b"one"),
        (b"OpenAI-Organization", b"org-other"),
        (b"OpenAI-Project", b"proj-other"),
        (b"X-Stays", b"two"),
    ]
    lines = forwarded_headers(sent, "secret", b"key", prefers_x_api_key=False)
    assert lines == b"X-Stays: two\r\nAuthorization: Bearer key\r\n"


async def keyed(request: HttpRequest) -> None:
    """A handler that knows the key `known`."""
    if request.headers.get(b"x-api-key") == b"known":
        request.owner = "session"
    request.answer(200, request.header_lines(JSON), b"{}")


WITH_KEY = b"GET / HTTP/1.1\r\nHost: x\r\nX-API-Key: known\r\n\r\n"


async def test_when_connections_are_full_the_oldest_without_a_key_is_closed() -> None:
    async with serving(keyed, limits=ConnectionLimits(num_connections=3)) as place:
        known = await place.client()
        known.send(WITH_KEY)
        assert (await known.answer())[0] == 200
        strangers = [await place.client() for _ in range(6)]
        for stranger in strangers[:4]:
            assert await stranger.rest() == b""
        known.send(WITH_KEY)
        assert (await known.answer())[0] == 200
        assert place.server.num_connections == 3


async def test_a_connection_that_never_showed_a_known_key_ends_early() -> None:
    async with serving(keyed, limits=ConnectionLimits(unauthenticated_s=0.0)) as place:
        stranger = await place.client()
        assert await stranger.rest() == b""
