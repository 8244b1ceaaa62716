"""The worker process: loads the environment, serves the edge, works, and goes when told.

Invariants: an environment that does not load ends the process before anything else starts; the
process says Ready only when its edge serves and its hello is out; what environment code leaves
running, or lets out of its tasks, neither ends the process nor keeps it from ending; no torch, no
numpy. Driven by `rollmesh worker`.
"""

import asyncio
import gc
import os
import socket
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from pathlib import Path

import uvloop

from rollmesh.core.clock import SystemClock
from rollmesh.core.config import Config, WorkerConfig
from rollmesh.core.errors import UserError
from rollmesh.core.heap import Heap
from rollmesh.core.logs import get_logger, setup
from rollmesh.core.metrics import Exposition
from rollmesh.core.process import (
    FAILED,
    INTERRUPTED,
    OK,
    RECYCLED,
    USAGE,
    Ready,
    announce,
    listen,
    stop_event,
)
from rollmesh.envs import isolation
from rollmesh.envs.calls import Calls, Limit, tamed
from rollmesh.envs.cgroups import Limits, sweep_groups
from rollmesh.envs.env import Env
from rollmesh.envs.openai_client import close_pool
from rollmesh.envs.scratch import sweep
from rollmesh.runtime import blobs
from rollmesh.runtime.assembly import GC_THRESHOLDS, new_runtime
from rollmesh.runtime.keeper import Keeper
from rollmesh.serve.interception.counts import add_blobs, add_edge
from rollmesh.serve.interception.edge import Edge
from rollmesh.serve.interception.gauges import LoopLag
from rollmesh.serve.server.beats import Beats, BeatSettings
from rollmesh.serve.server.duties import Cause, Leaving
from rollmesh.serve.server.face import Face, worker_figures
from rollmesh.serve.server.loading import load_in_time
from rollmesh.serve.server.pauses import FleetPauses
from rollmesh.serve.server.rollouts import Stage, one_line
from rollmesh.serve.server.worker import Worker, WorkerSettings
from rollmesh.wire.keys import Keys, check_dial
from rollmesh.wire.machine import ROUTER

log = get_logger()

OWN_THREADS = 4
"""For prompts, beside a thread for each rollout, since environments use asyncio.to_thread."""
CLOSE_S = 1.0
"""What an environment has for its `close`."""
EXIT_S = 1.0
"""What tasks and threads that environment code has left running have once all is served."""


def run(
    config: Config,
    router: str,
    worker_id: str,
    listen_fd: int | None,
    ready_fd: int | None,
    keys: Keys | None,
) -> int:
    """Serve until stopped by SIGTERM or SIGINT, drained, or worn out; return the exit code.

    OK after a drain; RECYCLED when it is worn out; after a signal INTERRUPTED below launch, which
    then starts another worker unless it sent the signal, and OK elsewhere, as servers do. Raise
    EnvError, ModelError or AddressError, one line, when it cannot begin.
    """
    setup(worker_id, config.run_folder() if ready_fd is not None else None)
    Heap().settle()
    folder = config.interception.spill_folder
    blobs.settle(config.interception.max_blob_bytes, Path(folder) if folder else None)
    settings = WorkerSettings(worker_id, router, config, keys)
    check_dial(router, settings.keys)
    env = load_in_time(settings)
    listening = listen(config.interception.bind, listen_fd)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        loop = runner.get_loop()
        code = FAILED
        try:
            serving = loop.create_task(_serve(settings, env, listening, ready_fd))
            code = _code_of(_run_to_end(loop, serving), is_launched=ready_fd is not None)
        except UserError:
            code = USAGE
            raise
        finally:
            _end_in_time(code)
    return code


def _code_of(leaving: Leaving, *, is_launched: bool) -> int:
    if leaving.cause is Cause.STOPPED:
        return INTERRUPTED if is_launched else OK
    if leaving.cause is Cause.DRAINED:
        return OK
    # The last line on stderr is what launch tells of an end.
    sys.stderr.write(f"{leaving.reason}\n")
    return RECYCLED


def _run_to_end(loop: asyncio.AbstractEventLoop, serving: asyncio.Task[Leaving]) -> Leaving:
    """Serve on, whatever the tasks that environment code starts let out."""
    while True:
        try:
            return loop.run_until_complete(serving)
        except (SystemExit, KeyboardInterrupt) as error:
            if serving.done():
                raise
            log.error("env.escaped", error=str(tamed(error)))
        except RuntimeError:
            if serving.done() or loop.is_closed():
                raise
            log.error("env.escaped", error="environment code stopped the event loop")


def _end_in_time(code: int) -> None:
    """From here on nothing that environment code left running keeps the process alive."""

    def leave() -> None:
        names = [each.name for each in threading.enumerate() if not each.daemon]
        log.warning("worker.ended_by_force", threads=names)
        sys.stdout.flush()
        os._exit(code)

    watch = threading.Timer(EXIT_S, leave)
    watch.daemon = True
    watch.start()


async def _serve(
    settings: WorkerSettings, env: Env, listening: socket.socket, ready_fd: int | None
) -> Leaving:
    config, worker_id = settings.config, settings.worker_id
    loop = asyncio.get_running_loop()
    stop = stop_event(loop)
    num_threads = config.worker.max_rollouts + OWN_THREADS
    loop.set_default_executor(ThreadPoolExecutor(num_threads, "pool"))
    calls = Calls()
    async with AsyncExitStack() as stack:
        stack.push_async_callback(_close, env)
        worker = Worker(settings)
        runtime, sampler = new_runtime(config, worker.view, worker.report)
        stack.push_async_callback(sampler.close)
        model_name = Path(config.model.path).name or "policy"
        keeper = Keeper(SystemClock())
        stack.callback(keeper.close)
        exposition = Exposition("worker")
        edge = Edge(runtime, config.interception, model_name, Face(exposition, listening).handle)
        add_blobs(worker.inventory)
        add_edge(worker.inventory, runtime, sampler, edge)
        lag = LoopLag(loop)
        stack.callback(lag.close)
        exposition.add(worker.inventory.figures)
        exposition.add(keeper.figures)
        exposition.add(lambda: worker_figures(runtime, lag))
        address = await edge.start(listening)
        stack.push_async_callback(edge.stop)
        isolation.settle(isolation.Isolation(isolation_settings(config.worker), edge.serve_also))
        _sweep_killed()
        stack.callback(_sweep_killed)
        beat_settings = BeatSettings(worker_id, settings.router, config.router.beat_s)
        beats = Beats(
            beat_settings, settings.keys, worker.vitals, lambda packet: worker.hear(ROUTER, packet)
        )
        clock = SystemClock()
        paused_s = FleetPauses(worker.view, clock).paused_s
        url = f"{address}/v1"
        stage = Stage(env, runtime, url, model_name, config.worker, clock, calls, paused_s)
        gc.freeze()
        gc.set_threshold(*GC_THRESHOLDS)
        keeper.start()
        worker.begin(stage)
        beats.start(loop)
        stack.callback(beats.close)
        announce(ready_fd, Ready(worker_id, os.getpid(), address))
        log.info("worker.started", address=address, env=config.env)
        leaving = await worker.serve(stop)
    log.info("worker.left", reason=str(leaving))
    return leaving


def isolation_settings(config: WorkerConfig) -> isolation.IsolationSettings:
    """The part of the worker's settings that is about agents' programs."""
    return isolation.IsolationSettings(
        mode=config.isolation,
        first_uid=config.isolation_first_uid,
        num_uids=config.isolation_num_uids,
        limits=Limits(
            memory_bytes=config.program_memory_bytes,
            num_processes=config.program_max_processes,
            num_cpus=config.program_cpus,
        ),
    )


def _sweep_killed() -> None:
    """Remove control groups and scratch folders of workers that were killed."""
    sweep_groups()
    sweep()


async def _close(env: Env) -> None:
    try:
        calls = Calls(grace_s=CLOSE_S / 2)
        await calls.call(Limit("the time to close", CLOSE_S), env.close)
    except Exception as error:  # noqa: BLE001 - door: env code may raise anything
        log.warning("env.not_closed", error=one_line(error))
    await close_pool()
