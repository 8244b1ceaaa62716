"""Environments of the serving benchmark, and a worker whose rollouts make no calls.

    python -m benchmarks.lib.serving_worker --router ADDRESS --worker-id NAME --ready-fd N --set ...

The worker has the parts of `rollmesh worker`, and an environment that gives each session a prepared
token graph. It therefore measures serving: sessions, records, packing, delivery. The work that
fills a graph (HTTP, prompts, engines) is measured by benchmarks/interception.py. Answers have the
tokens of messages, not their texts.

- A rollout's own cost is known beforehand, so that the mesh's share can be separated.
"""

import argparse
import asyncio
import gc
import os
import random
import time
from array import array
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import msgspec
import uvloop

from benchmarks.lib.corpus import STREAM_TOKENS, read_canned
from rollmesh.cli.options import add_process_options, config_of
from rollmesh.core.clock import SystemClock
from rollmesh.core.process import Ready, announce, die_with_parent, stop_event
from rollmesh.core.types import Json, SamplingParams, Score, Task, VersionRun
from rollmesh.envs.calls import EnvCalls
from rollmesh.envs.env import Endpoint, Env, Transcript
from rollmesh.runtime.conversation.token_graph import (
    ROOT,
    RootKind,
    Sampled,
    TokenGraph,
)
from rollmesh.runtime.registry import GC_THRESHOLDS, Runtime, new_runtime
from rollmesh.serve.server.rollouts import WorkerContext
from rollmesh.serve.server.transport import HeartbeatSettings, HeartbeatThread
from rollmesh.serve.server.worker import Worker, WorkerSettings
from rollmesh.wire.machine import ROUTER


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
    """A rollout waits for `seconds`, as rollouts wait for engines and sandboxes."""

    def __init__(self, *, seconds: float) -> None:
        self._seconds = seconds

    async def run(self, task: Task, agent: Endpoint) -> Transcript:
        del task, agent
        await asyncio.sleep(self._seconds)
        return Transcript()


class BurnEnv(PlainEnv):
    """A rollout uses `seconds` of CPU on the worker's loop, whatever else runs on its core."""

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
    """`num_turns` streamed calls; each sends the whole conversation so far."""

    def __init__(self, *, num_turns: int) -> None:
        self._num_turns = num_turns
        self._session: aiohttp.ClientSession | None = None

    async def run(self, task: Task, agent: Endpoint) -> Transcript:
        messages: list[Json] = []
        for turn in range(self._num_turns):
            messages.append({"role": "user", "content": f"{task.id}: {turn} {random.random()}"})
            messages.append({"role": "assistant", "content": await self._stream(agent, messages)})
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


PROMPT_TOKENS = 16
"""Characters of each turn's new message."""


class PreparedEnv(PlainEnv):
    """Rollouts of as many turns as their task has, 200 sampled tokens each."""

    def __init__(self, runtime: Runtime, answers: list[Sampled]) -> None:
        self._runtime = runtime
        self._answers = answers
        self._graphs: dict[int, TokenGraph] = {}

    async def run(self, task: Task, agent: Endpoint) -> Transcript:
        session = self._runtime.sessions.find(agent.api_key)
        held = session._conversation  # noqa: SLF001 - the calls that would fill it are left out
        num_turns = task.data["num_turns"]
        if num_turns not in self._graphs:
            self._graphs[num_turns] = self._graph(num_turns)
        held.graph, held.root_kinds = self._graphs[num_turns], {0: RootKind(0, 0)}
        session.num_calls = num_turns
        return Transcript()

    def _graph(self, num_turns: int) -> TokenGraph:
        """Return the records that the calls would have left; they are read-only, so rollouts share
        them.
        """
        graph, node = TokenGraph(), ROOT
        for turn in range(num_turns):
            node = graph.add_context(node, range(PROMPT_TOKENS))
            node = graph.add_sampled(node, self._answers[turn % len(self._answers)])
        return graph


async def serve(settings: WorkerSettings, answers: list[Sampled], ready_fd: int) -> None:
    """Work until stopped; there is no HTTP server, since no agent calls it."""
    loop, config = asyncio.get_running_loop(), settings.config
    stop, worker = stop_event(loop), Worker(settings)
    runtime, sampler = new_runtime(config, worker.view, worker.report)
    beat_settings = HeartbeatSettings(settings.worker_id, settings.router, config.router.beat_s)
    beats = HeartbeatThread(
        beat_settings, None, worker.report_status, lambda packet: worker.receive(ROUTER, packet)
    )
    env = PreparedEnv(runtime, answers)
    url, clock = "http://nowhere/v1", SystemClock()
    stage = WorkerContext(env, runtime, url, "policy", config.worker, clock, EnvCalls())
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)
    worker.begin(stage)
    beats.start(loop)
    announce(ready_fd, Ready(settings.worker_id, os.getpid(), ""))
    await worker.serve(stop)
    beats.close()
    await sampler.close()


def answers_in(folder: Path) -> list[Sampled]:
    """Return the canned streams in the form of finished generations."""
    params, versions = SamplingParams(max_tokens=512), (VersionRun(1, STREAM_TOKENS),)
    return [
        Sampled(array("i", a.token_ids), array("f", a.logprobs), versions, params, "stop")
        for a in read_canned(folder).streams
    ]


def main() -> None:
    """Serve until SIGTERM."""
    arguments = argparse.ArgumentParser(prog="python -m benchmarks.lib.serving_worker")
    add_process_options(arguments)
    arguments.add_argument("--router", required=True)
    arguments.add_argument("--worker-id", required=True)
    options = arguments.parse_args()
    die_with_parent()
    config = config_of(options)
    settings = WorkerSettings(options.worker_id, options.router, config, None)
    uvloop.run(serve(settings, answers_in(Path(config.model.path)), options.ready_fd))


if __name__ == "__main__":
    main()
