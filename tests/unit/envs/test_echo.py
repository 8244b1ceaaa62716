"""The echo environment produces load of a given shape."""

import itertools

import pytest

from rollmesh.envs.echo import EchoEnv
from rollmesh.testing.upstreams import ChatEndpoint


async def test_a_conversation_has_the_configured_turns_and_sizes() -> None:
    env = EchoEnv(num_turns=3, prompt_chars=100, turn_chars=20, max_tokens=5)
    task = next(env.tasks("train", 0))
    async with ChatEndpoint(["one", "two", "three"]) as server:
        transcript = await env.run(task, server.endpoint)
        await env.close()
    assert len(server.requests) == 3
    last = server.requests[-1].body
    sizes = [len(m["content"]) for m in last["messages"] if m["role"] == "user"]
    assert (sizes, last["max_tokens"]) == ([100, 20, 20], 5)
    score = await env.score(task, transcript)
    assert (score.reward, score.metrics) == (1.0, {"num_chars": 11.0})


async def test_same_task_sends_the_same_text() -> None:
    env = EchoEnv(num_turns=1)
    task = next(env.tasks("train", 0))
    async with ChatEndpoint(["a", "b"]) as server:
        await env.run(task, server.endpoint)
        await env.run(task, server.endpoint)
        await env.close()
    assert server.requests[0].body == server.requests[1].body


def test_tasks_differ_by_split_and_seed() -> None:
    env = EchoEnv()
    streams = [env.tasks("train", 0), env.tasks("train", 1), env.tasks("eval", 0)]
    ids = {tuple(task.id for task in itertools.islice(stream, 3)) for stream in streams}
    assert len(ids) == 3


def test_settings_below_one_are_refused() -> None:
    with pytest.raises(ValueError, match="positive"):
        EchoEnv(num_turns=0)
