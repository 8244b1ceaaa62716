"""An agent server on a free port over scripted generations, and a client for it."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from itertools import repeat
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
import uvloop

from rollmesh.core.config import InterceptionConfig
from rollmesh.core.ids import GroupId, RolloutId
from rollmesh.core.process import listen
from rollmesh.core.types import SamplingPolicy
from rollmesh.runtime.registry import Runtime
from rollmesh.runtime.scopes import OpenSession
from rollmesh.runtime.tokens.families import choose_family
from rollmesh.runtime.tokens.prompts import Prompts
from rollmesh.runtime.tokens.tokenizer import Tokenizer, load_tokenizer
from rollmesh.runtime.tokens.tool_calls import StopStrings
from rollmesh.serve.interception.agent_server import AgentServer
from rollmesh.testing.clock import FakeClock
from rollmesh.testing.model_folder import write_model_folder
from rollmesh.testing.sampler import ScriptedSampler

Event = tuple[str, Any]


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_tokenizer(write_model_folder(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="session")
def prompts(tokenizer: Tokenizer) -> Prompts:
    folder = Path(tokenizer.name_or_path)
    return Prompts(choose_family(folder, "auto", tokenizer), tokenizer)


class AgentSession:
    """A running server with one session, and a client of it."""

    def __init__(
        self, runtime: Runtime, sampler: ScriptedSampler, tokenizer: Tokenizer, server: AgentServer
    ) -> None:
        assert isinstance(sampler.clock, FakeClock)
        self.clock = sampler.clock
        self.runtime = runtime
        self.server = server
        self.sampler = sampler
        self.tokenizer = tokenizer
        self.base = ""
        self.opened: OpenSession = runtime.register_trajectory(
            RolloutId(GroupId("r", 0), 0), SamplingPolicy(), seed=7
        )
        self.client = aiohttp.ClientSession()

    def ids(self, text: str) -> list[int]:
        """Return the tokens of `text`."""
        return self.tokenizer.encode(text)

    def finish(self, text: str, at: int = -1) -> None:
        """End a held generation with `text`."""
        self.sampler.generations[at].end(*self.ids(text + "<|im_end|>"))

    def post(
        self,
        body: object,
        path: str = "/v1/chat/completions",
        headers: dict[str, str] | None = None,
    ) -> Any:
        """Return a request context; `body` is bytes or is encoded as JSON."""
        raw = body if isinstance(body, bytes) else msgspec.json.encode(body)
        auth = {"Authorization": f"Bearer {self.opened.api_key}"}
        return self.client.post(self.base + path, data=raw, headers={**auth, **(headers or {})})

    async def answer(
        self, body: object, path: str = "/v1/chat/completions", **headers: str
    ) -> tuple[int, Any]:
        """Return the status and decoded JSON of one request."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        async with self.post(body, path, named) as response:
            return response.status, msgspec.json.decode(await response.read())

    async def events(self, body: object, path: str = "/v1/chat/completions") -> list[Event]:
        """Return the names and data of a stream's events; the name of a named event equals its
        type."""
        async with self.post(body, path) as response:
            assert response.status == 200, await response.read()
            raw = await response.read()
        return read_events(raw)


def read_events(raw: bytes) -> list[Event]:
    """Yield the name and data of each event, without comments; `[DONE]` is None."""
    found: list[Event] = []
    for frame in raw.decode().split("\n\n"):
        lines = [line for line in frame.splitlines() if line and not line.startswith(":")]
        fields = dict(line.split(": ", 1) for line in lines)
        if fields:
            data = fields["data"]
            decoded = None if data == "[DONE]" else msgspec.json.decode(data)
            found.append((fields.get("event", ""), decoded))
    return found


StartAgent = Callable[..., Any]


@pytest.fixture
async def start_agent(tokenizer: Tokenizer, prompts: Prompts) -> AsyncIterator[StartAgent]:
    """Start agent servers: `await start_agent("text", ...)` scripts the replies, `always`
    repeats one; without either, generations are held.
    """
    agents: list[AgentSession] = []

    async def make(
        *replies: str,
        always: str = "",
        config: InterceptionConfig = InterceptionConfig(),  # noqa: B008 - frozen
        max_context_tokens: int = 4096,
    ) -> AgentSession:
        script: Any = (
            [tokenizer.encode(text + "<|im_end|>") for text in replies] if replies else None
        )
        if always:
            script = repeat(tokenizer.encode(always + "<|im_end|>"))
        clock = FakeClock()
        sampler = ScriptedSampler(
            script, clock=clock, new_matcher=lambda stops: StopStrings(stops, tokenizer.stream())
        )
        most = config.max_turns_at_once
        runtime = Runtime(sampler, prompts, max_context_tokens, clock, max_turns_at_once=most)
        server = AgentServer(runtime, config, "policy")
        agent = AgentSession(runtime, sampler, tokenizer, server)
        agents.append(agent)
        agent.base = await server.start(listen("127.0.0.1:0"))
        return agent

    yield make
    for agent in agents:
        agent.runtime.cleanup_group(GroupId("r", 0))
        await agent.client.close()
        await agent.server.stop()


@pytest.fixture(params=[asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def runner(request: pytest.FixtureRequest) -> Iterator[asyncio.Runner]:
    """Run on both loops, because uvloop's transports do not derive from asyncio's."""
    with asyncio.Runner(loop_factory=request.param) as runner:
        yield runner
        assert not asyncio.all_tasks(runner.get_loop())
