"""The worker process: loads the environment, serves the edge, works, and goes when told.

Invariants: an environment that does not load is reported to the router and ends the process with
one line (exit code 2) before anything else starts; the process says Ready only when its edge serves
and its hello is out; no torch, no numpy. Driven by `rollmesh worker`.
"""

import asyncio
import gc
import os
import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from pathlib import Path

import uvloop

from rollmesh.core.clock import SystemClock
from rollmesh.core.config import Config
from rollmesh.core.errors import EnvError
from rollmesh.core.logs import get_logger, setup
from rollmesh.core.process import Ready, announce, listen, stop_event
from rollmesh.envs.env import Env
from rollmesh.envs.loading import load_env
from rollmesh.runtime.assembly import GC_THRESHOLDS, new_runtime
from rollmesh.serve.interception.edge import Edge
from rollmesh.serve.server.beats import Beats, BeatSettings
from rollmesh.serve.server.calls import Calls
from rollmesh.serve.server.rollouts import Stage
from rollmesh.serve.server.worker import Worker, WorkerSettings
from rollmesh.wire.frames import Packet
from rollmesh.wire.keys import read_keys
from rollmesh.wire.machine import ROUTER
from rollmesh.wire.messages import EnvFailed
from rollmesh.wire.sockets import Dialer

log = get_logger()

OWN_THREADS = 4
"""For prompts, beside a thread for each rollout: asyncio's few would make a score that blocks
hold up the others, until their time is over, and every long prompt too."""


def run(
    config: Config, router: str, worker_id: str, listen_fd: int | None, ready_fd: int | None
) -> None:
    """Serve until SIGTERM or SIGINT, or until the router lets the worker go.

    EnvError, ModelError or AddressError, one line, where it cannot begin.
    """
    setup(worker_id, config.run_folder() if ready_fd is not None else None)
    settings = WorkerSettings(worker_id, router, config, read_keys())
    env = _load_env(settings)
    listening = listen(config.interception.bind, listen_fd)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(settings, env, listening, ready_fd))


def _load_env(settings: WorkerSettings) -> Env:
    """The environment; if it does not load the router hears of it at once."""
    config = settings.config
    try:
        return load_env(config.env, config.env_settings)
    except EnvError as error:
        dialer = Dialer(settings.router, settings.worker_id, settings.keys)
        dialer.send(Packet(EnvFailed(settings.worker_id, config.env, str(error))))
        dialer.close()
        raise


async def _serve(
    settings: WorkerSettings, env: Env, listening: socket.socket, ready_fd: int | None
) -> None:
    config, worker_id = settings.config, settings.worker_id
    loop = asyncio.get_running_loop()
    stop = stop_event(loop)
    num_threads = config.worker.max_rollouts + OWN_THREADS
    loop.set_default_executor(ThreadPoolExecutor(num_threads, "calls"))
    async with AsyncExitStack() as stack:
        stack.push_async_callback(env.close)
        worker = Worker(settings)
        runtime, sampler = new_runtime(config, worker.view, worker.report)
        stack.push_async_callback(sampler.close)
        model_name = Path(config.model.path).name or "policy"
        edge = Edge(runtime, config.interception, model_name)
        address = await edge.start(listening)
        stack.push_async_callback(edge.stop)
        beat_settings = BeatSettings(worker_id, settings.router, config.router.beat_s)
        beats = Beats(
            beat_settings, settings.keys, worker.vitals, lambda packet: worker.hear(ROUTER, packet)
        )
        calls = Calls()
        stage = Stage(
            env, runtime, f"{address}/v1", model_name, config.worker, SystemClock(), calls
        )
        gc.freeze()
        gc.set_threshold(*GC_THRESHOLDS)
        worker.begin(stage)
        beats.start(loop)
        stack.callback(beats.close)
        announce(ready_fd, Ready(worker_id, os.getpid(), address))
        log.info("worker.started", address=address, env=config.env)
        await worker.serve(stop)
    log.info("worker.stopped")
