"""An environment whose agents use two dialects: short talks in one, long ones in the other.

All siblings of a group use the same dialect; their rewards differ.
"""

import itertools
from collections.abc import Iterator

import aiohttp

from rollmesh.core.types import Score, Task
from rollmesh.envs.env import Endpoint, Env, Transcript

LONG = "guess " * 40


class TwoDialects(Env):
    def tasks(self, split: str, seed: int) -> Iterator[Task]:
        del split, seed
        for number in itertools.count():
            yield Task(id=f"t{number}", data={"is_long": bool(number % 2)})

    async def run(self, task: Task, agent: Endpoint) -> Transcript:
        is_long = task.data["is_long"]
        body = {
            "model": agent.model,
            "max_tokens": 6,
            "messages": [{"role": "user", "content": LONG if is_long else "guess"}],
        }
        path = "/messages" if is_long else "/chat/completions"
        head = {"Authorization": f"Bearer {agent.api_key}"}
        async with (
            aiohttp.ClientSession(headers=head) as client,
            client.post(agent.base_url + path, json=body) as response,
        ):
            response.raise_for_status()
            return Transcript(data={"size": len(await response.read())})

    def score(self, task: Task, transcript: Transcript) -> Score:
        del task
        return Score(float(transcript.data["size"] % 2))
