"""A process that starts one SGLang server, watches it, and ends with it.

    STARTING --/ready--> SERVING --SIGTERM--> STOPPED
       |  ^                 |
       |  +-- a port was taken, at most PORT_ATTEMPTS times
       +---- it ended, or took too long ----> UserError in one line

- To launch it looks like an embedded engine: it reports ready once the server is, and its last line
  of output says why it ended. SGLang's own output is forwarded, with secrets replaced.
- The server and all that it started end with this process, however that ends: they carry a mark
  below ours (core/orphans.py).
- The key of the server's API is passed in a file that only our user can read, never in argv.
"""

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from http import HTTPStatus
from pathlib import Path
from typing import IO

import msgspec
from aiohttp import ClientError, ClientSession, ClientTimeout

from rollmesh.core.child_process import describe_exit, spawn_options
from rollmesh.core.config import Config
from rollmesh.core.errors import ConfigError, UserError
from rollmesh.core.gpus import DEVICES_VARIABLE, PLACES_VARIABLE, devices_at, visible_gpus
from rollmesh.core.logs import get_logger, setup
from rollmesh.core.orphans import MARK_VARIABLE, kill_marked, new_mark
from rollmesh.core.process import FAILED, OK, Ready, announce, http_address, reserve, stop_event
from rollmesh.core.redaction import redact
from rollmesh.core.secret_files import process_engine_key, without_secrets
from rollmesh.engine.backend import MemoryState, weights_name
from rollmesh.engine.sglang_output import LoadProgress, OutputTail

PORT_ATTEMPTS = 3
POLL_S = 0.2
POLL_TIMEOUT_S = 5.0
READ_BYTES = 2**16
MAX_LINE_BYTES = 2**16
"""Longer lines are forwarded in parts."""
_DEFAULTS = ("--incremental-streaming-output", "--log-level-http", "warning")
"""Options that a user may override: without the last, each probe of the router is a line of the
log.
"""

log = get_logger()


class ServerOrder(msgspec.Struct, frozen=True, kw_only=True):
    """How to start a server."""

    config: Config
    model: Path
    """The folder of its first weights."""
    weight_version: str = "0"
    bind: str = "127.0.0.1:0"
    listen_fd: int | None = None
    """A bound socket that reserves its port; None reserves `bind`."""
    ready_fd: int | None = None
    role: str = "engine"
    is_asleep: bool = False
    """Release the memory of its GPUs once it is loaded, until a coordinator wakes it."""
    logs_to_folder: bool = False
    """Write events to the run's folder; otherwise to stderr."""


def server_argv(order: ServerOrder, host: str, port: int, key_file: str = "") -> tuple[str, ...]:
    """Return the command that starts the server.

    The last of two equal options counts: a user's options come after the defaults, and those that
    only rollmesh may set after these.
    """
    config = order.config
    engine = config.engine
    argv = [
        engine.server_python,
        "-m",
        "sglang.launch_server",
        *_DEFAULTS,
    ]
    argv += ["--tp-size", str(max(1, engine.gpus_each)), "--random-seed", str(config.run.seed)]
    if rank := config.trainer.lora_rank:
        argv += ["--enable-lora", "--max-lora-rank", str(rank), "--lora-target-modules", "all"]
    argv += ["--enable-memory-saver"] if order.is_asleep else []
    argv += engine.args
    argv += ["--model-path", str(order.model), "--weight-version", order.weight_version]
    argv += ["--host", host, "--port", str(port)]
    argv += ["--config", key_file] if key_file else []
    return tuple(argv)


def server_environment(environment: Mapping[str, str], python: str, mark: str) -> dict[str, str]:
    """Return the environment of the server: ours without secrets, with the programs beside `python`
    in PATH (SGLang compiles kernels with its own ninja).

    SGLang's processes change their titles, which would overwrite the mark without SPT_NOENV.
    """
    path = [os.path.dirname(python), environment.get("PATH", os.defpath)]
    places = environment.get(PLACES_VARIABLE)
    gpus = (
        {} if places is None else {DEVICES_VARIABLE: devices_at(places, visible_gpus(environment))}
    )
    return {
        **without_secrets(environment),
        **gpus,
        MARK_VARIABLE: mark,
        "PATH": os.pathsep.join(filter(None, path)),
        "SPT_NOENV": "1",
        "PYTHONUNBUFFERED": "1",
    }


def run_server(order: ServerOrder) -> int:
    """Start the server and watch it; return the exit code, UserError if it cannot be started."""
    folder = order.config.run_folder() if order.logs_to_folder else None
    setup(order.role, folder)
    return asyncio.run(_run(order))


async def _run(order: ServerOrder) -> int:
    stop = stop_event(asyncio.get_running_loop())
    for attempt in range(1, PORT_ATTEMPTS + 1):
        with contextlib.ExitStack() as stack:
            reserved = stack.enter_context(_reserved(order))
            # What only the load needs is removed once the server is ready.
            loading = stack.enter_context(contextlib.ExitStack())
            model = loading.enter_context(_kept(order))
            server = SglangServer(
                msgspec.structs.replace(order, model=model),
                reserved,
                loading.enter_context(_key_file()),
                on_ready=loading.close,
            )
            try:
                code = await server.run(stop, is_last=attempt == PORT_ATTEMPTS)
            finally:
                await server.end()
        if code is not None:
            return code
    raise AssertionError("the last attempt returns or raises")


def _reserved(order: ServerOrder) -> socket.socket:
    if order.listen_fd is not None:
        return socket.socket(fileno=os.dup(order.listen_fd))
    return reserve(order.bind)


@contextlib.contextmanager
def _kept(order: ServerOrder) -> Iterator[Path]:
    """Yield the folder of the weights: of published ones, which the trainer may remove during a
    slow load, a folder of hard links.
    """
    run = order.config.run_folder()
    if order.model.absolute().parent != (run / "weights").absolute():
        yield order.model
        return
    links = run.absolute() / "loading" / order.role
    shutil.rmtree(links, ignore_errors=True)  # of a process that was killed
    try:
        shutil.copytree(order.model, links, copy_function=os.link)
    except (OSError, shutil.Error):  # gone already, or the file system has no hard links
        links = order.model
    try:
        yield links
    finally:
        if links != order.model:
            shutil.rmtree(links, ignore_errors=True)


@contextlib.contextmanager
def _key_file() -> Iterator[str]:
    """Yield the path of a file with the engine's key in SGLang's form; '' if there is no key."""
    key = process_engine_key()
    if not key:
        yield ""
        return
    descriptor, path = tempfile.mkstemp(prefix="rollmesh-", suffix=".yaml")
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(f"api-key: {msgspec.json.encode(key).decode()}\n")
        yield path
    finally:
        Path(path).unlink(missing_ok=True)


class SglangServer:
    """One server process, from its start to the end of all that it started."""

    def __init__(
        self,
        order: ServerOrder,
        reserved: socket.socket,
        key_file: str,
        on_ready: Callable[[], object],
    ) -> None:
        """`reserved` is bound to its address; `key_file` is that of the API key, '' for none."""
        self._on_ready = on_ready
        self._order = order
        self._reserved = reserved
        self._key_file = key_file
        self._mark = new_mark("sglang")
        self._is_ready = False
        self._progress = LoadProgress()
        self._tail = OutputTail()
        self._process: asyncio.subprocess.Process | None = None
        self._reading: asyncio.Task[None] | None = None

    async def run(self, stop: asyncio.Event, *, is_last: bool) -> int | None:
        """Return the exit code once the server has ended; None if it may be started again, because
        another program took its port.
        """
        process = self._process = await self._start()
        ended = asyncio.ensure_future(process.wait())
        stopping = asyncio.ensure_future(stop.wait())
        loading = asyncio.create_task(self._until_ready(), name="ready")
        engine, role = self._order.config.engine, self._order.role
        try:
            await asyncio.wait(
                (ended, stopping, loading),
                timeout=engine.load_timeout_s,
                return_when=asyncio.FIRST_COMPLETED,
            )
            if stopping.done():
                return OK
            if ended.done():
                await self._check_retry(ended.result(), is_last=is_last)
                return None
            if not loading.done():
                raise UserError(
                    f"{role}: SGLang was not ready within {engine.load_timeout_s:g} s "
                    f"(engine.load_timeout_s); it was {self._progress.state}{self._see_log()}"
                )
            loading.result()
            self._is_ready = True
            self._on_ready()
            self._report()
            await asyncio.wait((ended, stopping), return_when=asyncio.FIRST_COMPLETED)
            if stopping.done():
                return OK
            why = await self._why(ended.result())
            sys.stderr.write(f"rollmesh: {role}: SGLang ended: {why}\n")
            return FAILED
        finally:
            for task in (ended, stopping, loading):
                task.cancel()

    async def end(self) -> None:
        """End the server and all that it started."""
        if (process := self._process) is None:
            return
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGTERM)
            with contextlib.suppress(TimeoutError):
                timeout_s = self._order.config.engine.exit_timeout_s
                await asyncio.wait_for(process.wait(), timeout_s)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await asyncio.to_thread(kill_marked, self._mark)
        await process.wait()
        if self._reading:
            await self._reading

    async def _start(self) -> asyncio.subprocess.Process:
        host, port = self._reserved.getsockname()[:2]
        argv = server_argv(self._order, host, port, self._key_file)
        log.info("engine.starting", argv=list(argv))
        # Not asyncio's pipe: `wait` would then wait for the server's children, which hold it too.
        reading, writing = os.pipe()
        self._reading = asyncio.create_task(self._read(os.fdopen(reading, "rb", 0)), name="output")
        try:
            return await asyncio.create_subprocess_exec(
                *argv,
                **spawn_options(
                    environment=server_environment(os.environ, argv[0], self._mark),
                    stdout=writing,
                    stderr=writing,
                ),
            )
        except OSError as error:
            why = str(error.strerror).lower()
            raise ConfigError(f"engine.python = {argv[0]}: {why}; name a Python") from None
        finally:
            os.close(writing)

    def _report(self) -> None:
        """Report that the server is ready."""
        address = http_address(self._reserved)
        log.info("engine.serving", address=address, model=str(self._order.model))
        announce(
            self._order.ready_fd,
            Ready(role=self._order.role, pid=os.getpid(), address=address),
        )

    async def _until_ready(self) -> None:
        """Return once the server accepts requests, by an answer that generates nothing."""
        key = process_engine_key()
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        timeout = ClientTimeout(total=POLL_TIMEOUT_S)
        async with ClientSession(http_address(self._reserved), headers=headers) as session:
            while not await _is_ready(session, timeout):  # noqa: ASYNC110 - another process
                await asyncio.sleep(POLL_S)
            if self._order.is_asleep:
                await _release(session, self._order.weight_version)

    async def _read(self, pipe: IO[bytes]) -> None:
        """Forward the output, and fold its lines, until all writers have closed it."""
        reader, rest = asyncio.StreamReader(), b""
        await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), pipe
        )
        while chunk := await reader.read(READ_BYTES):
            # A progress bar returns to the start of its line by \r.
            *lines, rest = (rest + chunk).replace(b"\r", b"\n").split(b"\n")
            if len(rest) > MAX_LINE_BYTES:
                lines, rest = [*lines, rest], b""
            self._take(lines)
        self._take([rest] if rest else [])

    def _take(self, lines: list[bytes]) -> None:
        texts = [redact(raw.decode(errors="replace")) for raw in lines]
        with contextlib.suppress(OSError):  # a full disk loses output and stops nothing
            sys.stdout.write("".join(f"{text}\n" for text in texts))
            sys.stdout.flush()
        for line in texts:
            self._tail.add(line)
            # An update of the weights prints the same lines.
            if not self._is_ready and self._progress.add(line):
                state = self._progress.state
                log.info("engine.loading", phase=state.phase, amount=state.amount)

    async def _check_retry(self, code: int, *, is_last: bool) -> None:
        """Return if the server may be started again, else raise UserError with the reason."""
        why = await self._why(code)
        if self._tail.reason().is_port_taken and not is_last:
            log.warning("engine.port_taken", why=why)
            return
        raise UserError(
            f"{self._order.role}: SGLang ended while {self._progress.state}: {why}{self._see_log()}"
        )

    async def _why(self, code: int) -> str:
        """Return why the server ended; its children may still have to print the reason."""
        await self.end()
        reason = self._tail.reason(code).text
        return f"{describe_exit(code)}: {reason}" if reason else describe_exit(code)

    def _see_log(self) -> str:
        if not self._order.logs_to_folder:
            return ""
        return f"; see {self._order.config.run_folder() / 'logs' / self._order.role}.out"


async def _is_ready(session: ClientSession, timeout: ClientTimeout) -> bool:
    try:
        async with session.get("/ready", timeout=timeout) as reply:
            if reply.status != HTTPStatus.NOT_FOUND:
                return reply.status == HTTPStatus.OK
        async with session.get("/model_info", timeout=timeout) as reply:  # a release without /ready
            return reply.status == HTTPStatus.OK
    except (ClientError, TimeoutError):
        return False


async def _release(session: ClientSession, weight_version: str) -> None:
    """Release the server's memory, as a coordinator does; UserError if it refuses."""
    name = weights_name(MemoryState.RELEASED, weight_version)
    calls: list[tuple[str, dict[str, object]]] = [
        ("/pause_generation", {"mode": "abort"}),
        ("/flush_cache", {}),
        ("/release_memory_occupation", {}),
        ("/update_weight_version", {"new_version": name, "abort_all_requests": False}),
    ]
    for path, body in calls:
        async with session.post(path, json=body) as reply:
            if reply.status != HTTPStatus.OK:
                text = (await reply.text())[:200]
                raise UserError(f"SGLang cannot release its GPUs: {path}: {reply.status} {text}")
