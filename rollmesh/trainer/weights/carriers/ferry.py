"""A process beside the trainer for what may hang or end it: what that is told, and who tells it.

    trainer --a command, a line of JSON--> ferry_process.py --broadcast, torch's memory--> engines
            <--what came of it, likewise--

A collective that waits for a peer which is gone cannot be called back, and NCCL's watchdog may end
the process that is in it; torch ends one whose shared memory has lost its manager. So it is that
process and not the trainer. Invariant: one command at a time. Driven by the carriers.
"""

import asyncio
import contextlib
import sys

import msgspec

from rollmesh.core.errors import EngineUnavailable
from rollmesh.engine.in_memory import Part
from rollmesh.trainer.weights.carriers.cargo import Cargo

PROGRAM = "rollmesh.trainer.weights.carriers.ferry_process"
END_S = 2.0
"""After which a process that is still there is killed; and then it is the system's affair."""
MAX_LINE = 2**26
"""Bytes of an answer: some 300 for each tensor and rank of an SGLang."""


class Open(msgspec.Struct, frozen=True, tag=True):
    """Listen for `size` ranks, at `host`; the answer has the port. A group of before is over."""

    name: str
    backend: str
    host: str
    size: int
    timeout_s: float


class Meet(msgspec.Struct, frozen=True, tag=True):
    """Wait until all ranks are there."""


class Send(msgspec.Struct, frozen=True, tag=True):
    """Broadcast all pieces of these parts, in order."""

    parts: tuple[Part, ...]


class Share(msgspec.Struct, frozen=True, tag=True):
    """Lay the cargo where an SGLang of so many ranks opens it; the answer has what to tell it."""

    cargo: Cargo
    num_ranks: int


class Done(msgspec.Struct, frozen=True, tag=True):
    """It is."""

    port: int = 0
    told: tuple[str, ...] = ()


class Failed(msgspec.Struct, frozen=True, tag=True):
    """It cannot be done."""

    why: str


Command = Open | Meet | Send | Share


class Ferry:
    """A running one; used from one event loop."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._turn = asyncio.Lock()

    @classmethod
    async def started(cls) -> "Ferry":
        """Begin one, and wait until it has loaded torch."""
        words = [sys.executable, "-m", PROGRAM]
        pipe = asyncio.subprocess.PIPE
        process = asyncio.create_subprocess_exec(*words, stdin=pipe, stdout=pipe, limit=MAX_LINE)
        ferry = cls(await process)
        try:
            await ferry._told()
        except BaseException:
            await ferry.close()
            raise
        return ferry

    async def order(self, command: Command) -> Done:
        """EngineUnavailable where it fails, or the ferry has ended.

        Who asks may go: the answer is read all the same, so that the next gets its own.
        """
        return await asyncio.shield(self._done(command))

    async def _done(self, command: Command) -> Done:
        assert self._process.stdin
        async with self._turn:
            with contextlib.suppress(OSError):  # of one that has ended, which is seen below
                self._process.stdin.write(msgspec.json.encode(command) + b"\n")
                await self._process.stdin.drain()
            return await self._told()

    async def _told(self) -> Done:
        assert self._process.stdout
        try:
            line = await self._process.stdout.readline()
            told = msgspec.json.decode(line, type=Done | Failed) if line else None
        except (ValueError, msgspec.MsgspecError) as error:  # what comes next would be no better
            await self.close()
            raise EngineUnavailable(f"the ferry answers what is no answer: {error}") from None
        if told is None:
            raise EngineUnavailable("the ferry has ended")
        if isinstance(told, Failed):
            raise EngineUnavailable(told.why)
        return told

    async def end(self) -> None:
        """Let it put away what it holds, and end."""
        assert self._process.stdin
        self._process.stdin.close()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._process.wait(), END_S)
        await self.close()

    async def close(self) -> None:
        """End it, however deep it is in a collective; one that the system keeps is left to it."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._process.wait(), END_S)
