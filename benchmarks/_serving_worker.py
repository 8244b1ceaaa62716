"""A worker whose rollouts make no calls: their answers of many turns are there at once.

    python -m benchmarks._serving_worker --router ADDRESS --worker-id NAME --ready-fd N --set ...

The same parts as in `rollmesh worker` (duties, groups, sessions, outbox, sockets, beats) around an
environment that gives each session a token graph made in advance. So what is measured is serving:
sessions, records, packing, delivery and all bookkeeping; the calls that fill a graph, with HTTP,
prompts and engines, are benchmarks/interception.py's matter. Messages' texts are not in the answer,
their tokens are. Driven by _serving_mesh.py.
"""

import argparse
import asyncio
import gc
import os
from array import array
from pathlib import Path

import uvloop

from benchmarks._corpus import STREAM_TOKENS, read_canned
from benchmarks._serving_envs import PlainEnv
from rollmesh.cli.options import add_room, config_of
from rollmesh.core.clock import SystemClock
from rollmesh.core.process import Ready, announce, die_with_parent, stop_event
from rollmesh.core.types import SamplingParams, Task, VersionRun
from rollmesh.envs.calls import Calls
from rollmesh.envs.env import Endpoint, Transcript
from rollmesh.runtime.registry import GC_THRESHOLDS, Runtime, new_runtime
from rollmesh.runtime.token_graph import ROOT, RootKind, Sampled, TokenGraph
from rollmesh.serve.server.rollouts import WorkerContext
from rollmesh.serve.server.transport import HeartbeatSettings, HeartbeatThread
from rollmesh.serve.server.worker import Worker, WorkerSettings
from rollmesh.wire.machine import ROUTER

PROMPT_TOKENS = 16
"""Of each turn's new message."""


class ToldEnv(PlainEnv):
    """Rollouts of as many turns as their task says, 200 sampled tokens each."""

    def __init__(self, runtime: Runtime, answers: list[Sampled]) -> None:
        self._runtime = runtime
        self._answers = answers
        self._graphs: dict[int, TokenGraph] = {}

    async def run(self, task: Task, agent: Endpoint) -> Transcript:
        session = self._runtime.find(agent.api_key)
        held = session._conversation  # noqa: SLF001 - the calls that would fill it are left out
        num_turns = task.data["num_turns"]
        if num_turns not in self._graphs:
            self._graphs[num_turns] = self._graph(num_turns)
        held.graph, held.root_kinds = self._graphs[num_turns], {0: RootKind(0, 0)}
        session.num_calls = num_turns
        return Transcript()

    def _graph(self, num_turns: int) -> TokenGraph:
        """What the calls would have left; nothing changes it any more, so rollouts share it."""
        graph, node = TokenGraph(), ROOT
        for turn in range(num_turns):
            node = graph.add_context(node, range(PROMPT_TOKENS))
            node = graph.add_sampled(node, self._answers[turn % len(self._answers)])
        return graph


async def serve(settings: WorkerSettings, answers: list[Sampled], ready_fd: int) -> None:
    """Work until told to stop; the edge is not there, since nobody would call."""
    loop, config = asyncio.get_running_loop(), settings.config
    stop, worker = stop_event(loop), Worker(settings)
    runtime, sampler = new_runtime(config, worker.view, worker.report)
    beat_settings = HeartbeatSettings(settings.worker_id, settings.router, config.router.beat_s)
    beats = HeartbeatThread(
        beat_settings, None, worker.vitals, lambda packet: worker.hear(ROUTER, packet)
    )
    env = ToldEnv(runtime, answers)
    url, clock = "http://nowhere/v1", SystemClock()
    stage = WorkerContext(env, runtime, url, "policy", config.worker, clock, Calls())
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)
    worker.begin(stage)
    beats.start(loop)
    announce(ready_fd, Ready(settings.worker_id, os.getpid(), ""))
    await worker.serve(stop)
    beats.close()
    await sampler.close()


def answers_in(folder: Path) -> list[Sampled]:
    """The canned streams, as a generation hands them over."""
    params, versions = SamplingParams(max_tokens=512), (VersionRun(1, STREAM_TOKENS),)
    return [
        Sampled(array("i", a.token_ids), array("f", a.logprobs), versions, params, "stop")
        for a in read_canned(folder).streams
    ]


def main() -> None:
    """Serve until SIGTERM."""
    arguments = argparse.ArgumentParser(prog="python -m benchmarks._serving_worker")
    add_room(arguments)
    arguments.add_argument("--router", required=True)
    arguments.add_argument("--worker-id", required=True)
    options = arguments.parse_args()
    die_with_parent()
    config = config_of(options)
    settings = WorkerSettings(options.worker_id, options.router, config, None)
    uvloop.run(serve(settings, answers_in(Path(config.model.path)), options.ready_fd))


if __name__ == "__main__":
    main()
