"""The engine's process: arguments, start, HTTP server and end.

- It reports ready only once requests are answered.
- A folder that is no model ends the process with one line and exit code 2.
"""

import argparse
import asyncio
import gc
import logging
import os
import secrets
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import msgspec
import torch
import uvloop
from aiohttp import web

from rollmesh.core.errors import ModelError, UserError
from rollmesh.core.logs import get_logger, setup
from rollmesh.core.model_folders import resolve_model, why_no_folder
from rollmesh.core.process import Ready, announce, die_with_parent, http_address, listen, stop_event
from rollmesh.core.secret_files import process_engine_key, read_secret
from rollmesh.engine.backend import MemoryState, weights_name
from rollmesh.engine.embedded.engine import Engine, EngineLimits, StepLoop
from rollmesh.engine.embedded.http import Guard, check_open, is_loopback
from rollmesh.engine.embedded.model import Model
from rollmesh.engine.embedded.request_parser import RequestParser, SamplingParser
from rollmesh.engine.embedded.routes import Routes, ServerInfo
from rollmesh.engine.embedded.text import load_tokenizer

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}
_MAX_BODY_BYTES = 64 * 2**20
_DRAIN_S = 0.2

log = get_logger()


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of the process."""

    model_dir: Path
    bind: str = "127.0.0.1:0"
    listen_fd: int | None = None
    ready_fd: int | None = None
    weight_version: str = "default"
    """Name of the weights at the start; the default is SGLang's."""
    is_asleep: bool = False
    """Start without memory, because the GPUs are in use elsewhere; a request allocates it."""
    dtype: str = "float32"
    is_incremental: bool = False
    skips_tokenizer: bool = False
    """Responses carry no text, as with SGLang's --skip-tokenizer-init; grammars and stop strings
    still work, which SGLang refuses without its tokenizer."""
    num_threads: int = 1
    seed: int | None = None
    """Seed of the seeds of requests that name none; None draws one."""
    run_folder: Path | None = None
    """Folder of the log; None logs to stderr."""
    role: str = "engine"
    limits: EngineLimits = EngineLimits()
    api_key: str = ""
    """Required as Authorization: Bearer by all requests but health checks; '' for none."""
    is_open: bool = False
    """Serve addresses that other machines reach without a key."""
    allow_hosts: tuple[str, ...] = ()
    """Hosts or networks, besides loopback, at which it may join a weight group."""
    advertise: str = ""
    """Host of this machine in the reported address; '' for the one at which it listens."""


async def serve(settings: Settings) -> None:
    """Serve until SIGTERM or SIGINT; UserError if the model or the address is invalid."""
    if why := why_no_folder(str(settings.model_dir)):
        raise ModelError(f"--model-dir {settings.model_dir}: {why}")
    with listen(settings.bind, settings.listen_fd) as listening:
        host = listening.getsockname()[0]
        check_open(host, settings.api_key, is_open=settings.is_open)
        torch.set_num_threads(settings.num_threads)
        model = Model(settings.model_dir, DTYPES[settings.dtype])
        engine = Engine(model, settings.limits, settings.weight_version)
        if settings.is_asleep:
            engine.release()
            engine.rename(weights_name(MemoryState.RELEASED, settings.weight_version))
        setup(settings.role, settings.run_folder)
        await run(settings, engine, listening)


async def run(settings: Settings, engine: Engine, listening: socket.socket) -> None:
    """Serve `engine` on `listening` until stopped."""
    loop = asyncio.get_running_loop()
    stop = stop_event(loop)
    steps = StepLoop(engine, loop)
    guard = Guard(
        api_key=settings.api_key,
        is_loopback=is_loopback(listening.getsockname()[0]),
        allow_hosts=settings.allow_hosts,
    )
    runner = web.ServerRunner(
        http_server(settings, engine, steps, guard), shutdown_timeout=_DRAIN_S
    )
    await runner.setup()
    steps.start()
    try:
        await web.SockSite(runner, listening).start()
        settle_garbage()
        report(settings, listening)
        await first_of(stop, steps.failed)
    finally:
        steps.stop()
        await runner.cleanup()


def http_server(
    settings: Settings, engine: Engine, steps: StepLoop, guard: Guard | None = None
) -> web.Server:
    """Return the HTTP server of `engine`."""
    tokenizer = load_tokenizer(settings.model_dir)
    seed = secrets.randbits(30) if settings.seed is None else settings.seed
    architecture = engine.runner.model.architecture
    params = SamplingParser(architecture, tokenizer, seed)
    visible = None if settings.skips_tokenizer else tokenizer
    routes = Routes(
        steps,
        engine,
        RequestParser(architecture, settings.limits.num_slots, params),
        ServerInfo(str(settings.model_dir), visible, settings.is_incremental, seed),
        guard,
    )
    return web.Server(
        routes.serve, handler_cancellation=True, request_factory=make_request, access_log=None
    )


def make_request(message: Any, payload: Any, protocol: Any, writer: Any, task: Any) -> Any:
    """Create aiohttp's own request, with room for long prompts."""
    loop = asyncio.get_running_loop()
    return web.BaseRequest(
        message, payload, protocol, writer, task, loop, client_max_size=_MAX_BODY_BYTES
    )


async def first_of(stop: asyncio.Event, failed: asyncio.Future[None]) -> None:
    """Wait for a stop signal, or raise the error that ended the step loop."""
    stopping = asyncio.ensure_future(stop.wait())
    await asyncio.wait((stopping, failed), return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if failed.done():
        failed.result()


def report(settings: Settings, listening: socket.socket) -> None:
    """Log that the engine serves, and report it to the parent process."""
    address = http_address(listening, settings.advertise)
    log.info("engine.serving", address=address, model=str(settings.model_dir))
    announce(settings.ready_fd, Ready(role=settings.role, pid=os.getpid(), address=address))


def settle_garbage() -> None:
    """Exempt live objects from garbage collection, and collect rarely."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 1000)


def add_access(parser: argparse.ArgumentParser) -> None:
    """Add the options about addresses, API keys and allowed hosts."""
    parser.add_argument(
        "--advertise", default="", metavar="HOST", help="this machine's host for other machines"
    )
    parser.add_argument(
        "--api-key", default="", help="required by each request; visible in ps, so prefer a file"
    )
    parser.add_argument("--api-key-file", type=Path, help="a file (0600) that holds the API key")
    parser.add_argument(
        "--no-api-key", action="store_true", help="serve others on the network without a key"
    )
    parser.add_argument(
        "--allow-host",
        dest="allow_hosts",
        action="append",
        default=[],
        metavar="HOST|CIDR",
        help="where it may join weight groups, besides loopback: the trainer's host",
    )


OTHER_VERBS = (
    "For engines of a living mesh: `rollmesh engine add URL`, `rollmesh engine remove URL` and "
    "`rollmesh engine list`. `rollmesh engine sglang` starts an SGLang server. Each has its own "
    "--help."
)


def parse(argv: Sequence[str] | None) -> Settings:
    """Parse the command line; options have SGLang's names if it has them."""
    parser = argparse.ArgumentParser(
        prog="rollmesh engine",
        description="Run a small torch engine behind SGLang's native HTTP routes.",
        epilog=OTHER_VERBS,
    )
    parser.add_argument(
        "--model-dir",
        type=lambda text: Path(resolve_model(text)),
        required=True,
        metavar="DIR",
        help="model folder in Hugging Face layout, or the id of a downloaded model of the hub",
    )
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0, help="0 picks a free port")
    parser.add_argument("--listen-fd", type=int, help="serve on this inherited socket")
    parser.add_argument("--ready-fd", type=int, help="write one JSON line here when serving")
    parser.add_argument("--run-folder", type=Path, help="log to a file in this folder")
    parser.add_argument("--role", default="engine", help="this process's name in logs and reports")
    parser.add_argument("--weight-version", default="default")
    parser.add_argument(
        "--asleep", action="store_true", help="start without memory, until a coordinator wakes it"
    )
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="float32")
    parser.add_argument("--incremental-streaming-output", action="store_true")
    parser.add_argument("--skip-tokenizer-init", action="store_true", help="answer without text")
    parser.add_argument("--num-threads", type=int, default=1, help="torch threads")
    parser.add_argument("--random-seed", type=int, help="seed for requests that name no seed")
    parser.add_argument("--max-total-tokens", type=int, default=EngineLimits().num_slots)
    parser.add_argument("--max-running-requests", type=int, default=EngineLimits().max_running)
    parser.add_argument("--max-queued-requests", type=int, help="refuse further requests with 503")
    parser.add_argument("--chunked-prefill-size", type=int, default=EngineLimits().max_step_tokens)
    add_access(parser)
    given = parser.parse_args(argv)
    return Settings(
        model_dir=given.model_dir,
        bind=f"{given.host}:{given.port}",
        listen_fd=given.listen_fd,
        ready_fd=given.ready_fd,
        run_folder=given.run_folder,
        role=given.role,
        weight_version=given.weight_version,
        is_asleep=given.asleep,
        dtype=given.dtype,
        is_incremental=given.incremental_streaming_output,
        skips_tokenizer=given.skip_tokenizer_init,
        num_threads=given.num_threads,
        advertise=given.advertise,
        seed=given.random_seed,
        api_key=given.api_key or key_of(given.api_key_file),
        is_open=given.no_api_key,
        allow_hosts=tuple(given.allow_hosts),
        limits=EngineLimits(
            num_slots=given.max_total_tokens,
            max_running=given.max_running_requests,
            max_step_tokens=given.chunked_prefill_size,
            max_queued=given.max_queued_requests,
        ),
    )


def key_of(file: Path | None) -> str:
    """Return the key in `file`, else that of the environment, else ''."""
    return read_secret(file) if file else process_engine_key()


def main(argv: Sequence[str] | None = None) -> int:
    """Run the process; return 2 after a user's mistake, else do not return."""
    try:
        settings = parse(argv)
        if settings.ready_fd is not None:
            die_with_parent()
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(serve(settings))
    except UserError as error:
        sys.stderr.write(f"rollmesh: {error}\n")
        return 2
    leave()


def leave() -> NoReturn:
    """End the process without torch's teardown, which takes over a second; everything is closed."""
    logging.shutdown()
    sys.stderr.flush()
    os._exit(0)
