"""OpenEnv servers: an episode over their protocol, and the cause of each failure."""

import asyncio
import itertools
from collections.abc import Mapping
from typing import Any

import pytest
from aiohttp import web

from rollmesh.core.errors import EnvError, InfraError
from rollmesh.core.types import Score, Task
from rollmesh.envs.env import Endpoint, Transcript
from rollmesh.envs.loading import load_env
from rollmesh.envs.openenv import RETRY_S, OpenEnvEnv
from rollmesh.testing.openenv_server import Observation, OpenEnvServer
from rollmesh.testing.upstreams import ChatAnswer, ChatEndpoint, ChatRequestSeen

TASK = Task("t", {"seed": 7})
TEXT = {"action_field": "word", "observation_field": "feedback", "timeout_s": 5.0}
UNREACHABLE = Endpoint("http://127.0.0.1:1/v1", "k", "m")


class Counts:
    """A game: words earn 1, 2, 3...; "stop" ends it, and "crash" raises in the server."""

    def __init__(self) -> None:
        self.num_steps = 0

    def reset(self, seed: int) -> Observation:
        return {"feedback": f"seed {seed}", "other": [1]}

    def step(self, action: Mapping[str, Any]) -> tuple[Observation, float, bool]:
        if set(action) != {"word"}:
            raise ValueError("Field required")
        if action["word"] == "crash":
            raise RuntimeError("division by zero")
        self.num_steps += 1
        return {"feedback": "next", "other": []}, self.num_steps, action["word"] == "stop"


async def play(
    server: OpenEnvServer, env: OpenEnvEnv, *answers: str
) -> tuple[Transcript, Score, list[str]]:
    """Play an episode that leaves no session; return transcript, score and model input."""
    async with ChatEndpoint(answers) as chat:
        try:
            transcript = await env.run(TASK, chat.endpoint)
        finally:
            assert not server.sockets
            await env.close()
    prompts = [each["content"] for each in transcript.data["messages"] if each["role"] == "user"]
    return transcript, await env.score(TASK, transcript), prompts


async def test_an_episode_is_played_to_its_end_and_its_session_closed() -> None:
    async with OpenEnvServer(Counts) as server:
        env = OpenEnvEnv(url=server.url, game=TEXT)
        transcript, score, prompts = await play(server, env, "a", " b\n", "stop")
    assert prompts == ["seed 7", "next", "next"]
    assert score == Score(6.0, {"num_steps": 3.0, "num_refused": 0.0, "num_turns": 3.0})
    assert not transcript.truncated


async def test_the_reward_may_be_the_last_one_only() -> None:
    async with OpenEnvServer(Counts) as server:
        env = OpenEnvEnv(url=server.url, game={**TEXT, "reward": "last"})
        _, score, _ = await play(server, env, "a", "stop")
    assert score.reward == 2.0


async def test_without_fields_observations_and_actions_are_json() -> None:
    async with OpenEnvServer(Counts) as server:
        env = OpenEnvEnv(url=server.url)
        _, score, prompts = await play(
            server, env, '{"word": "a"}', "word", '{"words": 1}', '{"word":"stop"}'
        )
    assert prompts[:2] == ['{"feedback":"seed 7","other":[1]}', '{"feedback":"next","other":[]}']
    assert prompts[2].startswith("error: ")
    assert prompts[3] == "error: Invalid message; word: Field required"
    assert score.metrics["num_refused"] == 2.0


async def test_turns_at_their_limit_truncate_and_close() -> None:
    async with OpenEnvServer(Counts) as server:
        env = OpenEnvEnv(url=server.url, game=TEXT, max_turns=2)
        transcript, score, _ = await play(server, env, "a", "b", "stop")
    assert transcript.truncated
    assert score.reward == 3.0


async def test_a_fault_of_the_server_yields_no_reward() -> None:
    async with OpenEnvServer(Counts) as server:
        env = OpenEnvEnv(url=server.url, game=TEXT)
        with pytest.raises(InfraError, match="EXECUTION_ERROR: division by zero"):
            await play(server, env, "crash")


async def test_a_server_that_disconnects_is_an_infra_error() -> None:
    async with OpenEnvServer(Counts) as server:
        env = OpenEnvEnv(url=server.url, game=TEXT)
        closing: list[asyncio.Task[bool]] = []

        def answer(_: ChatRequestSeen) -> ChatAnswer:
            closing.extend(asyncio.ensure_future(each.close()) for each in server.sockets)
            return ChatAnswer("a")

        async with ChatEndpoint(answer) as chat:
            with pytest.raises(InfraError, match="OpenEnv server"):
                await env.run(TASK, chat.endpoint)
            await env.close()
        await asyncio.gather(*closing)


async def test_a_rollout_waits_for_a_full_server() -> None:
    async with OpenEnvServer(Counts, max_sessions=1) as server:
        env = OpenEnvEnv(url=server.url, game=TEXT)
        async with ChatEndpoint(["stop"] * 6) as chat:
            async with asyncio.TaskGroup() as rollouts:
                for _ in range(6):
                    rollouts.create_task(env.run(TASK, chat.endpoint))
            await env.close()
        assert server.num_refused >= 1


async def test_a_server_that_stays_full_is_polled_by_one_rollout_at_a_time_until_the_limit() -> (
    None
):
    async with OpenEnvServer(Counts, max_sessions=0) as server:
        env = OpenEnvEnv(url=server.url, game={**TEXT, "capacity_wait_s": 2.5 * RETRY_S})
        rollouts = (env.run(TASK, UNREACHABLE) for _ in range(20))
        faults = await asyncio.gather(*rollouts, return_exceptions=True)
        await env.close()
    assert all(isinstance(fault, InfraError) for fault in faults)
    assert "full for 0.625 s" in str(faults[0])
    # Each rollout tries once; after that only the first in the queue retries.
    assert server.num_refused <= 20 + 3


async def test_an_unreachable_server_is_an_infra_error() -> None:
    env = OpenEnvEnv(url="http://127.0.0.1:1", game=TEXT)
    with pytest.raises(InfraError, match=r"127\.0\.0\.1:1"):
        await env.run(TASK, UNREACHABLE)
    await env.close()


FULL = '{"type": "error", "data": {"code": "CAPACITY_REACHED", "message": "full"}}'


@pytest.mark.parametrize(
    "answer", ["not json", "[]", '{"type": "observation", "data": {}}', None, FULL]
)
async def test_an_invalid_or_missing_answer_is_an_infra_error_and_its_socket_is_closed(
    answer: str | None,
) -> None:
    num_opened = 0
    left: asyncio.Queue[None] = asyncio.Queue()

    async def answer_each(request: web.BaseRequest) -> web.WebSocketResponse:
        nonlocal num_opened
        num_opened += 1
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        async for _ in socket:
            if answer is not None:
                await socket.send_str(answer)
        left.put_nowait(None)
        return socket

    runner = web.ServerRunner(web.Server(answer_each), shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    env = OpenEnvEnv(url=url, game={**TEXT, "timeout_s": 0.3, "capacity_wait_s": 0.3})
    try:
        with pytest.raises(InfraError):
            await env.run(TASK, UNREACHABLE)
        async with asyncio.timeout(60.0):
            for _ in range(num_opened):
                await left.get()
    finally:
        await env.close()
        await runner.cleanup()


def test_tasks_are_determined_by_split_and_seed() -> None:
    env = OpenEnvEnv(url="http://127.0.0.1:1")
    first = [*itertools.islice(env.tasks("train", 0), 9)]
    assert first == [*itertools.islice(env.tasks("train", 0), 9)]
    assert first != [*itertools.islice(env.tasks("train", 1), 9)]


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"url": "localhost:80"}, "is no address"),
        ({"url": "http://h", "game": {"action": "x"}}, "unknown field `action`"),
        ({"url": "http://h", "game": {"reward": "mean"}}, "reward"),
    ],
)
def test_wrong_settings_are_refused(settings: dict[str, Any], why: str) -> None:
    with pytest.raises(EnvError, match=why):
        load_env("openenv", settings)
