"""The environment of the soak: hands its endpoint to the agents' process and waits.

Invariant: nothing of an agent is in the worker, so that the worker's memory is its own. Run by the
workers of the soak; driven by _soak_mesh.py.
"""

import asyncio
import time

import msgspec

from benchmarks._serving_envs import PlainEnv
from benchmarks._soak_agents import Ended, Seat
from rollmesh.core.errors import AgentFailed
from rollmesh.core.types import Task
from rollmesh.envs.env import Endpoint, Transcript

MANY = 64
"""More than a pool has threads."""


class SoakEnv(PlainEnv):
    """`socket` is where the agents' process listens."""

    def __init__(self, *, socket: str) -> None:
        self._socket = socket
        self._is_warm = False

    async def run(self, task: Task, agent: Endpoint) -> Transcript:
        if not self._is_warm:
            # The worker's pool has all its threads from here on, and they can be counted.
            self._is_warm = True
            await asyncio.gather(*(asyncio.to_thread(time.sleep, 0.1) for _ in range(MANY)))
        seat = Seat(agent.base_url, agent.api_key, task.data["number"], task.data["num_turns"])
        reader, writer = await asyncio.open_unix_connection(self._socket)
        try:
            writer.write(msgspec.json.encode(seat) + b"\n")
            ended = msgspec.json.decode(await reader.readline(), type=Ended)
        finally:
            writer.close()
        if ended.how != "done":
            raise AgentFailed(f"{ended.how}: {ended.why}")
        return Transcript()
