"""The environment interface: its defaults, and the OpenAI clients of its endpoints."""

import time
from collections.abc import Iterator

from rollmesh.core.types import Score, Task
from rollmesh.envs.env import Endpoint, Env, Transcript, close_pool
from rollmesh.testing.upstreams import ChatEndpoint


class Smallest(Env):
    def tasks(self, split: str, seed: int) -> Iterator[Task]:
        yield Task(f"{split}-{seed}")

    async def run(self, task: Task, agent: Endpoint) -> Transcript:
        return Transcript(data={"model": agent.model})

    def score(self, task: Task, transcript: Transcript) -> Score:
        return Score(1)


async def test_the_defaults_of_an_environment_keep_its_scores() -> None:
    env = Smallest()
    task = next(env.tasks("train", 0))
    transcript = await env.run(task, Endpoint("http://127.0.0.1:1/v1", "sk", "policy"))
    scores = [env.score(task, transcript), Score(0)]
    assert env.score_group(task, scores) == [Score(1), Score(0)]
    assert not transcript.truncated
    await env.close()


async def test_openai_clients_of_many_rollouts_share_their_connections() -> None:
    async with ChatEndpoint(["one", "two"]) as served:
        agents = [Endpoint(served.endpoint.base_url, f"sk-{n}", "policy") for n in range(2)]
        replies = []
        for agent in agents:
            async with agent.openai(
                max_retries=0
            ) as client:  # closing one does not close the others
                reply = await client.chat.completions.create(
                    model=agent.model, messages=[{"role": "user", "content": "?"}]
                )
            replies.append(reply.choices[0].message.content)
        await close_pool()
    assert replies == ["one", "two"]
    sent = [request.headers["Authorization"] for request in served.requests]
    assert sent == ["Bearer sk-0", "Bearer sk-1"]


async def test_an_openai_client_per_rollout_takes_little_time() -> None:
    agent = Endpoint("http://127.0.0.1:1/v1", "sk", "policy")
    agent.openai()  # the first call imports the library
    began_s = time.process_time()
    clients = [agent.openai() for _ in range(50)]
    took_s = time.process_time() - began_s
    await close_pool()
    assert len({id(client) for client in clients}) == 50
    assert took_s / 50 < 0.02  # with its own pool, each takes 0.1 s
