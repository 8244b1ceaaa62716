"""One run of an agent's program: started in a slot, its output read, and all its processes ended.

    RUNNING --it ends, its time is over, or the rollout is cancelled--> SWEPT --> ProgramExit

- The slot (isolation.py) decides what the program can reach. Without isolation it runs as the
  worker's user and can read what that user can.
- All processes of the slot have ended when `run_program` returns. Without isolation these are its
  process group and processes with its mark (core/orphans.py); a process that leaves both, by
  emptying its environment, is missed.
- Output is read to its end; only an excerpt is kept.
"""

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import Callable
from urllib.parse import urlsplit

import msgspec

from rollmesh.core.errors import InfraError
from rollmesh.core.logs import get_logger
from rollmesh.core.orphans import MARK_VARIABLE, kill_marked, new_mark
from rollmesh.envs.isolation import Command as Command
from rollmesh.envs.isolation import ProgramSlot, Serve, current_isolation
from rollmesh.envs.spawning import Spawned

log = get_logger()

Process = asyncio.subprocess.Process | Spawned

READ_BYTES = 64 * 1024
MAX_SIGNAL = 64
KILL_S = 5.0
"""Time after SIGKILL at which a process is left to the kernel."""


class ProgramExit(msgspec.Struct, frozen=True):
    """Result of a program."""

    exit_code: int
    """Negative: the signal that killed it. Under bwrap, exit codes 129 to 192 count as signals."""
    output: str
    """stdout and stderr in order; the middle is omitted if it is too long."""
    is_overtime: bool
    """Whether it was killed because its time was over."""


class Excerpt:
    """The beginning and the end of a stream of bytes, at most `max_bytes`."""

    def __init__(self, max_bytes: int) -> None:
        self._half = max(1, max_bytes // 2)
        self._head = bytearray()
        self._tail = bytearray()
        self._num_bytes = 0

    def add(self, data: bytes) -> None:
        """Add bytes; the middle is dropped."""
        self._num_bytes += len(data)
        room = self._half - len(self._head)
        self._head += data[:room]
        self._tail += data[room:]
        if len(self._tail) > 2 * self._half:
            del self._tail[: -self._half]

    def text(self) -> str:
        """Return the kept text, with a line that counts omitted bytes."""
        tail = bytes(self._tail[-self._half :])
        num_left_out = self._num_bytes - len(self._head) - len(tail)
        gap = f"\n[... {num_left_out} bytes left out ...]\n".encode() if num_left_out else b""
        return (bytes(self._head) + gap + tail).decode("utf-8", "replace")


async def run_program(command: Command, timeout_s: float, max_output_bytes: int) -> ProgramExit:
    """Run a program to its end, or for `timeout_s` seconds; InfraError if it cannot start."""
    async with current_isolation().slot(command) as slot:
        return await _run(command, slot, timeout_s, max_output_bytes)


async def _run(
    command: Command, slot: ProgramSlot, timeout_s: float, max_output_bytes: int
) -> ProgramExit:
    mark = new_mark("rollout")
    excerpt = Excerpt(max_output_bytes)
    try:
        reading, writing = os.pipe()
    except OSError as error:
        raise InfraError(f"{command.argv[0]}: no pipe for its output: {error.strerror}") from None
    listening = asyncio.create_task(_listen(reading, excerpt), name="program-output")
    limit = asyncio.timeout(timeout_s)
    process = None
    try:
        try:
            process = await _start(command, slot, mark, writing)
        finally:
            os.close(writing)
        try:
            await slot.begin()
        except InfraError as error:
            await slot.end()
            async with asyncio.timeout(KILL_S):
                await listening
            lines = excerpt.text().strip().splitlines()
            raise InfraError(f"{error}: {lines[-1]}" if lines else str(error)) from None
        try:
            async with limit:
                await process.wait()
        except TimeoutError:
            if not limit.expired():
                raise
    finally:
        # A second cancellation must not abandon running processes.
        await asyncio.shield(asyncio.ensure_future(_sweep(mark, process, slot, listening)))
    assert process is not None
    if process.returncode is None:
        raise InfraError(f"{command.argv[0]} could not be ended within {KILL_S:g} s")
    return ProgramExit(_exit_code(process.returncode, slot), excerpt.text(), limit.expired())


def _exit_code(code: int, slot: ProgramSlot) -> int:
    """Convert bubblewrap's exit code 128 + N after signal N."""
    return 128 - code if slot.mode == "bwrap" and 128 < code <= 128 + MAX_SIGNAL else code


async def _start(command: Command, slot: ProgramSlot, mark: str, writing: int) -> Process:
    try:
        return await slot.start(command.folder, {**command.env, MARK_VARIABLE: mark}, writing)
    except OSError as error:
        raise InfraError(f"{command.argv[0]}: cannot be run: {error.strerror}") from None


async def _sweep(
    mark: str, process: Process | None, slot: ProgramSlot, listening: asyncio.Task[None]
) -> None:
    """End the program and all of its slot, so that its pipe ends."""
    if isinstance(process, asyncio.subprocess.Process):
        _kill_group(process.pid)
    await slot.end()
    if slot.mode != "bwrap":
        await asyncio.to_thread(kill_marked, mark)
    try:
        async with asyncio.timeout(KILL_S):
            if process is not None:
                await process.wait()
            await listening
    except TimeoutError:
        # Held by the kernel, or its pipe by a process that emptied its environment.
        log.warning("program.left", mark=mark)


def _kill_group(pid: int) -> None:
    """Kill the process group, including processes that emptied their environment; needs no
    /proc."""
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


async def _listen(reading: int, excerpt: Excerpt) -> None:
    """Read the pipe to its end, and close it.

    Without a transport, since uvloop's pipe transports close a descriptor twice: the second time it
    may belong to another thread.
    """
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[None] = loop.create_future()

    def take() -> None:
        data = os.read(reading, READ_BYTES)
        excerpt.add(data)
        if not data and not ended.done():
            ended.set_result(None)

    os.set_blocking(reading, False)
    loop.add_reader(reading, take)
    try:
        await ended
    finally:
        loop.remove_reader(reading)
        os.close(reading)


BLOCK_BYTES = 64 * 1024


def forward_to(url: str) -> Serve:
    """Serve the HTTP server at `url` on a slot's socket by forwarding connections, for processes
    without an interception server. A connection ends when either side ends it."""
    parts = urlsplit(url)

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.closing(writer), contextlib.suppress(OSError):
            from_server, to_server = await asyncio.open_connection(parts.hostname, parts.port)
            with contextlib.closing(to_server):
                copies = [
                    asyncio.create_task(_copy(reader, to_server)),
                    asyncio.create_task(_copy(from_server, writer)),
                ]
                await asyncio.wait(copies, return_when=asyncio.FIRST_COMPLETED)
                for each in copies:
                    each.cancel()

    async def serve(listening: socket.socket) -> Callable[[], None]:
        server = await asyncio.start_server(connected, sock=listening)
        return server.close

    return serve


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(BLOCK_BYTES):
            writer.write(data)
            await writer.drain()
