"""Environments of the serving benchmark: they sleep, burn a core, or talk to the model in streams.

Invariant: what a rollout costs is known before it runs, so that what the mesh adds can be told from
it. Run by real `rollmesh worker` processes; driven by _serving_cases.py.
"""

import asyncio
import random
import time
from collections.abc import Iterator

import aiohttp
import msgspec

from rollmesh.core.types import Json, Score, Task
from rollmesh.envs.env import Endpoint, Env, Transcript


class PlainEnv(Env):
    """Endless tasks without content; the reward is 1."""

    def tasks(self, split: str, seed: int) -> Iterator[Task]:
        del split, seed
        while True:
            yield Task(id="bench")

    async def score(self, task: Task, transcript: Transcript) -> Score:
        del task, transcript
        return Score(reward=1.0)


class SleepEnv(PlainEnv):
    """A rollout waits for `seconds`, as one does for engines and sandboxes."""

    def __init__(self, *, seconds: float) -> None:
        self._seconds = seconds

    async def run(self, task: Task, agent: Endpoint) -> Transcript:
        del task, agent
        await asyncio.sleep(self._seconds)
        return Transcript()


class BurnEnv(PlainEnv):
    """A rollout takes `seconds` of CPU on the worker's loop, whatever else its core does."""

    def __init__(self, *, seconds: float) -> None:
        self._seconds = seconds

    async def run(self, task: Task, agent: Endpoint) -> Transcript:
        del task, agent
        end_s = time.thread_time() + self._seconds
        while time.thread_time() < end_s:
            pass
        return Transcript()


class _Delta(msgspec.Struct):
    content: str = ""


class _Choice(msgspec.Struct):
    delta: _Delta


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []


_chunks = msgspec.json.Decoder(_Chunk)


class StreamEnv(PlainEnv):
    """`num_turns` streamed calls; what was said is sent back whole with the next."""

    def __init__(self, *, num_turns: int) -> None:
        self._num_turns = num_turns
        self._session: aiohttp.ClientSession | None = None

    async def run(self, task: Task, agent: Endpoint) -> Transcript:
        said: list[Json] = []
        for turn in range(self._num_turns):
            said.append({"role": "user", "content": f"{task.id}: {turn} {random.random()}"})
            said.append({"role": "assistant", "content": await self._stream(agent, said)})
        return Transcript()

    async def _stream(self, agent: Endpoint, messages: list[Json]) -> str:
        if self._session is None:
            self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        body = {"model": agent.model, "messages": messages, "stream": True, "max_tokens": 200}
        headers = {"Authorization": f"Bearer {agent.api_key}", "Content-Type": "application/json"}
        url = f"{agent.base_url}/chat/completions"
        data = msgspec.json.encode(body)
        async with self._session.post(url, data=data, headers=headers) as response:
            response.raise_for_status()
            lines = [line async for line in response.content if line.startswith(b"data: {")]
        chunks = [_chunks.decode(line[len(b"data: ") :]) for line in lines]
        return "".join(choice.delta.content for chunk in chunks for choice in chunk.choices)

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
