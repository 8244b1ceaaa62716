"""The worker process: loads the environment, serves agents, runs groups, and leaves.

    LOADING --built-----------------> the environment
       +----it raises, or exits-----> reported --> EnvError: one line, exit code 2
       +----load_timeout_s is over--> reported --> the same line, and the process ends at once
       +----the process crashes-----> the router, which knows that it was loading, sees its end

- An environment that does not load ends the process before anything else starts. The failure is
  sent until the router answers, since groups wait for that environment.
- Ready is written when agents can connect and the hello is sent.
- Tasks, threads and exceptions that environment code leaves behind neither end the process nor keep
  it from ending. Neither torch nor numpy is imported.
- GET /metrics requires the admin token, or without one a loopback Host on a loopback address.
- Time limits of rollouts do not count while no engine is READY and one is asleep or being updated.
"""

import asyncio
import gc
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from pathlib import Path

import uvloop

from rollmesh.core.addresses import is_loopback, names_loopback, public_url
from rollmesh.core.clock import Clock, SystemClock
from rollmesh.core.config import Config
from rollmesh.core.errors import EnvError, SessionError, UserError
from rollmesh.core.heap import Heap
from rollmesh.core.logs import get_logger, setup
from rollmesh.core.metrics import CONTENT_TYPE, Exposition, Figure
from rollmesh.core.process import (
    FAILED,
    INTERRUPTED,
    OK,
    RECYCLED,
    USAGE,
    Ready,
    announce,
    http_address,
    listen,
    pid_space,
    stop_event,
)
from rollmesh.core.secret_files import ADMIN_TOKEN_VARIABLE, admin_token, handed
from rollmesh.core.text import printable
from rollmesh.core.types import UNVERSIONED
from rollmesh.engine.view import FleetView
from rollmesh.envs.calls import EnvCalls, TimeLimit, as_exception
from rollmesh.envs.env import Env, close_pool
from rollmesh.envs.isolation import isolate_programs, remove_left_behind
from rollmesh.envs.loading import load_env
from rollmesh.runtime import blobs
from rollmesh.runtime.heap_trimmer import HeapTrimmer
from rollmesh.runtime.registry import GC_THRESHOLDS, Runtime, new_runtime
from rollmesh.serve.interception.agent_server import AgentServer, count_agent_server, count_blobs
from rollmesh.serve.interception.exchange import refuse
from rollmesh.serve.interception.gateway import LoopLag
from rollmesh.serve.interception.request import HttpRequest, has_bearer
from rollmesh.serve.server.rollouts import WorkerContext, one_line
from rollmesh.serve.server.stack import whereabouts
from rollmesh.serve.server.transport import STARTED_S, HeartbeatSettings, HeartbeatThread, identity
from rollmesh.serve.server.worker import Worker, WorkerSettings
from rollmesh.serve.server.worker_machine import Cause, Leaving
from rollmesh.wire.frames import Packet
from rollmesh.wire.keys import Keys, check_dial
from rollmesh.wire.machine import ROUTER
from rollmesh.wire.messages import EnvFailed, RouterHello, WorkerHello
from rollmesh.wire.sockets import Dialer, wait


class FleetPauses:
    """Seconds in which the fleet could serve no request, through no fault of its callers."""

    def __init__(self, view: FleetView, clock: Clock) -> None:
        self._view = view
        self._clock = clock
        self._sum_s = 0.0
        self._since_s: float | None = None
        """Start of the current pause."""
        view.listeners.append(self._on_table)

    def paused_s(self) -> float:
        """Return the seconds so far, with those of the current pause."""
        now_s = self._clock.now_s()
        return self._sum_s + (0.0 if self._since_s is None else now_s - self._since_s)

    def _on_table(self) -> None:
        self._sum_s = self.paused_s()
        is_paused = self._view.is_paused(UNVERSIONED)
        self._since_s = self._clock.now_s() if is_paused else None


REPEAT_S = 0.2
ANNOUNCE_S = 0.3
"""Time for which a load waits until its router knows of it."""


def load_in_time(settings: WorkerSettings) -> Env:
    """Load the environment of the settings; a one-line EnvError if that fails."""
    announce_loading(settings)
    config = settings.config
    report_lock = threading.Lock()  # the first to take it reports the end
    watch = threading.Timer(
        config.worker.load_timeout_s, _give_up, (settings, threading.get_ident(), report_lock)
    )
    watch.daemon = True
    watch.start()
    try:
        env = load_env(config.env, config.env_settings)
    except EnvError as error:
        report_lock.acquire()
        report(settings, str(error))
        raise
    finally:
        watch.cancel()
    report_lock.acquire()
    return env


def announce_loading(settings: WorkerSettings) -> None:
    """Report to the router that this process loads, and for how long at most, in case it
    crashes.
    """
    config = settings.config
    hello = WorkerHello(
        worker_id=settings.worker_id,
        env=config.env,
        max_rollouts=config.worker.max_rollouts,
        pid=os.getpid(),
        host=socket.gethostname(),
        started_s=STARTED_S,
        loads_for_s=config.worker.load_timeout_s,
        pid_space=pid_space(),
    )
    _report(settings, hello, ANNOUNCE_S)


def report(settings: WorkerSettings, error: str) -> None:
    """Report to the router that this worker has no environment."""
    failed = EnvFailed(
        settings.worker_id, settings.config.env, printable(error), os.getpid(), STARTED_S
    )
    _report(settings, failed, settings.config.worker.report_timeout_s)


def _report(settings: WorkerSettings, message: WorkerHello | EnvFailed, for_s: float) -> None:
    """Repeat it until the router answers or the time is over."""
    dialer = Dialer(settings.router, f"{identity(settings.worker_id)}.load", settings.keys)
    until_s = time.monotonic() + for_s
    is_answered = False
    while not is_answered and time.monotonic() < until_s:
        dialer.send(Packet(message))
        wait([dialer], None, REPEAT_S)
        is_answered = any(isinstance(each.message, RouterHello) for each in dialer.receive())
    dialer.close()


def _give_up(settings: WorkerSettings, main_thread: int, report_lock: threading.Lock) -> None:
    if not report_lock.acquire(blocking=False):
        return
    config = settings.config
    error = (
        f'env = "{config.env}" was not loaded within worker.load_timeout_s = '
        f"{config.worker.load_timeout_s:g}; it is in {whereabouts(main_thread)}"
    )
    report(settings, error)
    sys.stderr.write(f"rollmesh: {error}\n")
    sys.stderr.flush()
    os._exit(USAGE)


ROUTE = "/metrics"


class MetricsEndpoint:
    """Answers GET /metrics; `handle` is a handler of the interception server."""

    def __init__(self, exposition: Exposition, listening: socket.socket) -> None:
        host = listening.getsockname()[0]
        self._exposition = exposition
        self._token = (handed(ADMIN_TOKEN_VARIABLE) or admin_token()).encode()
        self._is_open = not self._token and is_loopback(host)

    async def handle(self, request: HttpRequest, path: str) -> bool:
        """Answer a request for /metrics; return False for any other."""
        if path != ROUTE or request.method != "GET":
            return False
        host = request.headers.get(b"host", b"").decode("latin-1")
        is_open = self._is_open and names_loopback([host])
        if is_open or has_bearer(self._token, request.headers):
            lines = request.header_lines(CONTENT_TYPE.encode())
            request.answer(200, lines, self._exposition.render())
        else:
            why = f"send the token of {ADMIN_TOKEN_VARIABLE} as `Authorization: Bearer TOKEN`"
            error = SessionError(401, "invalid_admin_token", why)
            refuse(request, why.encode() + b"\n", error)
        return True


def worker_figures(runtime: Runtime, lag: LoopLag) -> Iterator[Figure]:
    """Return a source for the exposition."""
    yield Figure("calls_total", runtime.num_calls, "Calls that asked for sampling.")
    yield Figure("sampled_tokens_total", runtime.num_tokens, "Sampled tokens.")
    yield Figure("loop_lag_seconds", lag.take(), "Worst lag of the event loop since last asked.")


log = get_logger()

OWN_THREADS = 4
"""Threads for prompts, beside one for each rollout, since environments use asyncio.to_thread."""


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
    then starts another worker unless it sent the signal, and OK elsewhere, as servers do. Raises
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
            _end_in_time(code, config.worker.exit_timeout_s)
    return code


def _code_of(leaving: Leaving, *, is_launched: bool) -> int:
    if leaving.cause is Cause.STOPPED:
        return INTERRUPTED if is_launched else OK
    if leaving.cause is Cause.DRAINED:
        return OK
    # Launch shows the last line on stderr as the cause of an end.
    sys.stderr.write(f"{leaving.reason}\n")
    return RECYCLED


def _run_to_end(loop: asyncio.AbstractEventLoop, serving: asyncio.Task[Leaving]) -> Leaving:
    """Keep serving whatever tasks of environment code raise."""
    while True:
        try:
            return loop.run_until_complete(serving)
        except (SystemExit, KeyboardInterrupt) as error:
            if serving.done():
                raise
            log.error("env.escaped", error=str(as_exception(error)))
        except RuntimeError:
            if serving.done() or loop.is_closed():
                raise
            log.error("env.escaped", error="environment code stopped the event loop")


def _end_in_time(code: int, timeout_s: float) -> None:
    """Keep threads that environment code left running from delaying the exit."""

    def leave() -> None:
        names = [each.name for each in threading.enumerate() if not each.daemon]
        log.warning("worker.ended_by_force", threads=names)
        sys.stdout.flush()
        os._exit(code)

    watch = threading.Timer(timeout_s, leave)
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
    calls = EnvCalls()
    async with AsyncExitStack() as stack:
        stack.push_async_callback(_close, env, config.worker.close_timeout_s)
        worker = Worker(settings)
        runtime, sampler = new_runtime(config, worker.view, worker.report)
        stack.push_async_callback(sampler.close)
        model_name = Path(config.model.path).name or "policy"
        trimmer = HeapTrimmer(SystemClock())
        stack.callback(trimmer.close)
        exposition = Exposition("worker")
        server = AgentServer(
            runtime, config.interception, model_name, MetricsEndpoint(exposition, listening).handle
        )
        count_blobs(worker.inventory)
        count_agent_server(worker.inventory, runtime, sampler, server)
        lag = LoopLag(loop)
        stack.callback(lag.close)
        exposition.add(worker.inventory.figures)
        exposition.add(trimmer.figures)
        exposition.add(lambda: worker_figures(runtime, lag))
        address = await server.start(listening)
        stack.push_async_callback(server.stop)
        isolate_programs(config.worker, server.serve_also)
        stack.callback(remove_left_behind)
        beat_settings = HeartbeatSettings(worker_id, settings.router, config.router.beat_s)
        beats = HeartbeatThread(
            beat_settings,
            settings.keys,
            worker.report_status,
            lambda packet: worker.receive(ROUTER, packet),
        )
        clock = SystemClock()
        paused_s = FleetPauses(worker.view, clock).paused_s
        shown = http_address(listening, config.network.advertise, settings.router)
        url, local = f"{public_url(config.interception.public_url, shown)}/v1", f"{address}/v1"
        context = WorkerContext(
            env, runtime, url, model_name, config.worker, clock, calls, paused_s, local
        )
        gc.freeze()
        gc.set_threshold(*GC_THRESHOLDS)
        trimmer.start()
        worker.begin(context)
        beats.start(loop)
        stack.callback(beats.close)
        announce(ready_fd, Ready(worker_id, os.getpid(), shown))
        log.info("worker.started", address=address, agents_url=url, env=config.env)
        leaving = await worker.serve(stop)
    log.info("worker.left", reason=str(leaving))
    return leaving


async def _close(env: Env, timeout_s: float) -> None:
    try:
        calls = EnvCalls(grace_s=timeout_s / 2)
        await calls.call(TimeLimit("the time to close", timeout_s), env.close)
    except Exception as error:  # noqa: BLE001 - door: env code may raise anything
        log.warning("env.not_closed", error=one_line(error))
    await close_pool()
