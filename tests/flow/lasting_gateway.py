"""A gateway that is killed and restarted on one socket, as a supervisor does it."""

import asyncio
import contextlib
import os
import signal
import socket
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import orjson

from rollmesh.core.process import Ready, listen
from rollmesh.testing.engine import ScriptedEngine
from rollmesh.testing.model_folder import write_model_folder
from tests.flow.gateway_process import PATIENCE_S, Gateway, argv_of

LOOK_S = 0.001


class LastingGateway:
    """`start` and `kill` may be called repeatedly; meanwhile clients wait in the socket's
    backlog.
    """

    def __init__(self, folder: Path, args: list[str]) -> None:
        self.folder = folder
        self.listening: socket.socket = listen("127.0.0.1:0")
        self.gateways: list[Gateway] = []
        self._args = args

    @property
    def gateway(self) -> Gateway:
        """The running gateway."""
        return self.gateways[-1]

    @property
    def journal(self) -> Path:
        return self.folder / "token.journal"

    async def start(self) -> None:
        reading, writing = os.pipe()
        fds = [writing, self.listening.fileno()]
        argv = argv_of(*self._args, "--admin-token-file", str(self.folder / "token"))
        argv += ["--listen-fd", str(fds[1]), "--ready-fd", str(writing)]
        argv += ["--set", f"run.folder={self.folder}"]
        process = await asyncio.create_subprocess_exec(
            *argv, pass_fds=fds, stdout=asyncio.subprocess.DEVNULL
        )
        os.close(writing)
        with os.fdopen(reading, "rb") as pipe:
            try:
                line = await asyncio.to_thread(pipe.readline)
            except asyncio.CancelledError:  # so that a failing test leaves no process
                process.kill()
                await process.wait()
                raise
        address = msgspec.json.decode(line, type=Ready).address
        self.gateways.append(Gateway(process, address, (self.folder / "token").read_text().strip()))

    async def kill(self) -> None:
        process = self.gateway.process
        process.send_signal(signal.SIGKILL)
        await process.wait()

    async def restart(self) -> None:
        await self.kill()
        await self.start()

    def num_journal_bytes(self) -> int:
        total = 0
        for each in self.journal.glob("*.journal"):
            with contextlib.suppress(FileNotFoundError):  # the file was just removed
                total += each.stat().st_size
        return total

    def wait_for_growth(self, num_bytes: int, tasks: Sequence[asyncio.Task[None]] = ()) -> None:
        """Poll until the journal is larger than `num_bytes` or one of the tasks that write to
        it is done."""
        while self.num_journal_bytes() <= num_bytes and not any(task.done() for task in tasks):
            threading.Event().wait(LOOK_S)

    def recovered(self) -> dict[str, Any]:
        """The recovery report of the newest gateway."""
        lines = (self.folder / "mesh/logs/gateway.log").read_bytes().splitlines()
        events = [orjson.loads(line) for line in lines]
        return [dict(each) for each in events if each["event"] == "gateway.recovered"][-1]

    async def close(self) -> None:
        for each in self.gateways:
            await each.client.close()
        if self.gateway.process.returncode is None:
            self.gateway.process.terminate()
            async with asyncio.timeout(PATIENCE_S):
                assert await self.gateway.process.wait() == 0
        self.listening.close()


@asynccontextmanager
async def lasting(folder: Path, *args: str) -> AsyncIterator[LastingGateway]:
    await asyncio.to_thread(folder.mkdir, exist_ok=True)
    gateway = LastingGateway(folder, list(args))
    await gateway.start()
    try:
        yield gateway
    finally:
        await gateway.close()


def sampling_args(folder: Path, engine: ScriptedEngine) -> list[str]:
    """Arguments of a gateway that samples at `engine`."""
    model = write_model_folder(folder / "model")
    args = ["--model-dir", str(model), "--engine", engine.url, "--set", "sampling.max_tokens=8"]
    return [*args, "--set", "model.max_context_tokens=4096"]
