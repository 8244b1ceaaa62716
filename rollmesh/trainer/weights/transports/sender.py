"""A subprocess of the trainer for transfers that may hang or crash: its commands, and its handle.

    trainer --a command, a line of JSON--> sender_process.py --broadcast, torch's memory--> engines
            <--the result, likewise--

- A collective that waits for a lost peer cannot be cancelled, and NCCL's watchdog may abort the
  process; torch ends a process whose shared memory has lost its manager. The subprocess takes that
  risk instead of the trainer.
- One command at a time.
"""

import asyncio
import contextlib
import sys

import msgspec

from rollmesh.core.child_process import kill_and_wait, spawn_options
from rollmesh.core.errors import EngineUnavailable
from rollmesh.engine.shared_memory import SharedSegment

PROGRAM = "rollmesh.trainer.weights.transports.sender_process"
END_S = 2.0
"""How long to wait for the process to exit, before and after the kill."""
MAX_LINE = 2**26
"""Bytes of a reply: about 300 for each tensor and rank of an SGLang."""


class OpenGroup(msgspec.Struct, frozen=True, tag=True):
    """Listen for `size` ranks at `host`; the reply has the port. Replaces an earlier group."""

    name: str
    backend: str
    host: str
    size: int
    timeout_s: float


class JoinGroup(msgspec.Struct, frozen=True, tag=True):
    """Wait until all ranks have joined."""


class BroadcastParts(msgspec.Struct, frozen=True, tag=True):
    """Broadcast all pieces of these parts, in order."""

    parts: tuple[SharedSegment, ...]


class ShareParts(msgspec.Struct, frozen=True, tag=True):
    """Copy the parts to where an SGLang of `num_ranks` ranks can open them; the reply has one
    serialization per rank."""

    policy_version: int
    parts: tuple[SharedSegment, ...]
    num_ranks: int


class CommandDone(msgspec.Struct, frozen=True, tag=True):
    """The command succeeded."""

    port: int = 0
    serialized: tuple[str, ...] = ()


class CommandFailed(msgspec.Struct, frozen=True, tag=True):
    """The command failed."""

    why: str


SenderCommand = OpenGroup | JoinGroup | BroadcastParts | ShareParts


class WeightSender:
    """Handle of a running sender process; used from one event loop."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._lock = asyncio.Lock()

    @classmethod
    async def started(cls) -> "WeightSender":
        """Start a process and wait until it has loaded torch."""
        argv = [sys.executable, "-m", PROGRAM]
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            *argv, limit=MAX_LINE, **spawn_options(stdin=pipe, stdout=pipe)
        )
        sender = cls(process)
        try:
            await sender._read_answer()
        except BaseException:
            await sender.close()
            raise
        return sender

    async def order(self, command: SenderCommand) -> CommandDone:
        """Run a command; EngineUnavailable if it fails or the process has exited.

        If the caller is cancelled, the reply is still read, so that the next caller gets its own.
        """
        return await asyncio.shield(self._run(command))

    async def _run(self, command: SenderCommand) -> CommandDone:
        assert self._process.stdin
        async with self._lock:
            with contextlib.suppress(
                OSError
            ):  # the process has exited, which the read below reports
                self._process.stdin.write(msgspec.json.encode(command) + b"\n")
                await self._process.stdin.drain()
            return await self._read_answer()

    async def _read_answer(self) -> CommandDone:
        assert self._process.stdout
        try:
            line = await self._process.stdout.readline()
            answer = msgspec.json.decode(line, type=CommandDone | CommandFailed) if line else None
        except (ValueError, msgspec.MsgspecError) as error:  # the stream is out of step
            await self.close()
            raise EngineUnavailable(
                f"weight-sender process sent a malformed reply: {error}"
            ) from None
        if answer is None:
            raise EngineUnavailable("weight-sender process exited")
        if isinstance(answer, CommandFailed):
            raise EngineUnavailable(answer.why)
        return answer

    async def end(self) -> None:
        """Let the process release its resources and exit."""
        assert self._process.stdin
        self._process.stdin.close()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._process.wait(), END_S)
        await self.close()

    async def close(self) -> None:
        """Kill the process, even inside a collective; one that the kernel does not release is
        left."""
        await kill_and_wait(self._process, END_S)
