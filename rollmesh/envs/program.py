"""One run of an agent's program: started in a slot, its output read, and ended with all it started.

    RUNNING --it ends, its time is over, or the rollout is cancelled--> SWEPT --> Ended

- The slot (isolation.py) decides what the program can reach. Without isolation it runs as the
  worker's user and can read what that user can.
- Every process of the slot has ended when `run_program` returns. Without isolation these are the
  program's process group and what carries its mark (core/orphans.py): a process that leaves both,
  by emptying its environment, is missed.
- Output is read to its end and only the excerpt that was asked for is kept.
"""

import asyncio
import os
import signal

import msgspec

from rollmesh.core.errors import InfraError
from rollmesh.core.logs import get_logger
from rollmesh.core.orphans import MARK_VARIABLE, kill_marked, new_mark
from rollmesh.envs.isolation import Command as Command
from rollmesh.envs.isolation import Slot, current
from rollmesh.envs.spawning import Spawned

log = get_logger()

Process = asyncio.subprocess.Process | Spawned

READ_BYTES = 64 * 1024
MAX_SIGNAL = 64
KILL_S = 5.0
"""What does not end within this time of its SIGKILL is in the kernel's hands."""


class Ended(msgspec.Struct, frozen=True):
    """How a program ended."""

    exit_code: int
    """Negative: the signal that killed it. Under bwrap an exit code of 129 to 192 counts as one."""
    output: str
    """stdout and stderr as they came; the middle is left out where there was too much."""
    is_overtime: bool
    """Its time was over, and we killed it."""


class Excerpt:
    """The beginning and the end of a stream of bytes, at most `max_bytes` of it."""

    def __init__(self, max_bytes: int) -> None:
        self._half = max(1, max_bytes // 2)
        self._head = bytearray()
        self._tail = bytearray()
        self._num_bytes = 0

    def add(self, data: bytes) -> None:
        """Take the next bytes; what lies between beginning and end is forgotten."""
        self._num_bytes += len(data)
        room = self._half - len(self._head)
        self._head += data[:room]
        self._tail += data[room:]
        if len(self._tail) > 2 * self._half:
            del self._tail[: -self._half]

    def text(self) -> str:
        """What is kept, with a line that says how much is not."""
        tail = bytes(self._tail[-self._half :])
        num_left_out = self._num_bytes - len(self._head) - len(tail)
        gap = f"\n[... {num_left_out} bytes left out ...]\n".encode() if num_left_out else b""
        return (bytes(self._head) + gap + tail).decode("utf-8", "replace")


async def run_program(command: Command, timeout_s: float, max_output_bytes: int) -> Ended:
    """Run it to its end, or for `timeout_s` seconds; InfraError where it cannot be started."""
    async with current().slot(command) as slot:
        return await _run(command, slot, timeout_s, max_output_bytes)


async def _run(command: Command, slot: Slot, timeout_s: float, max_output_bytes: int) -> Ended:
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
            told = excerpt.text().strip().splitlines()
            raise InfraError(f"{error}: {told[-1]}" if told else str(error)) from None
        try:
            async with limit:
                await process.wait()
        except TimeoutError:
            if not limit.expired():
                raise
    finally:
        # A second cancellation must not abandon what still runs.
        await asyncio.shield(asyncio.ensure_future(_sweep(mark, process, slot, listening)))
    assert process is not None
    if process.returncode is None:
        raise InfraError(f"{command.argv[0]} could not be ended within {KILL_S:g} s")
    return Ended(_exit_code(process.returncode, slot), excerpt.text(), limit.expired())


def _exit_code(code: int, slot: Slot) -> int:
    """bubblewrap ends with 128 + N where signal N killed the program."""
    return 128 - code if slot.mode == "bwrap" and 128 < code <= 128 + MAX_SIGNAL else code


async def _start(command: Command, slot: Slot, mark: str, writing: int) -> Process:
    try:
        return await slot.start(command.folder, {**command.env, MARK_VARIABLE: mark}, writing)
    except OSError as error:
        raise InfraError(f"{command.argv[0]}: cannot be run: {error.strerror}") from None


async def _sweep(
    mark: str, process: Process | None, slot: Slot, listening: asyncio.Task[None]
) -> None:
    """End the program and all of its slot; its pipe is then at its end."""
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
        # The kernel holds it, or a process that emptied its environment holds its pipe.
        log.warning("program.left", mark=mark)


def _kill_group(pid: int) -> None:
    """Ends also what emptied its environment, and works where there is no /proc."""
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


async def _listen(reading: int, excerpt: Excerpt) -> None:
    """Read the pipe to its end, and close it.

    By hand, since uvloop's pipe transports close a descriptor twice: the second time it may be
    another's, which a thread has just opened.
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
