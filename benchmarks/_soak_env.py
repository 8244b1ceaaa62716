"""The environment of the soak: hands its endpoint to the agents' process and waits.

Invariant: nothing of an agent is in the worker, so that the worker's memory is its own. Run by the
workers of the soak; driven by _soak_mesh.py.
"""

import asyncio

import msgspec

from benchmarks._serving_envs import PlainEnv
from benchmarks._soak_agents import Ended, Seat
from rollmesh.core.errors import AgentFailed
from rollmesh.core.types import Task
from rollmesh.envs.env import Endpoint, Transcript


class SoakEnv(PlainEnv):
    """`socket` is where the agents' process listens."""

    def __init__(self, *, socket: str) -> None:
        self._socket = socket

    async def run(self, task: Task, agent: Endpoint) -> Transcript:
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
