"""A router and a coordinator as real processes, over engines that start asleep.

The test is the scheduler. A wait ends when its condition holds, or after WAIT_S.
"""

import asyncio
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rollmesh.engine.http import HttpClient
from rollmesh.engine.sglang import SglangBackend
from rollmesh.wire.frames import Packet
from rollmesh.wire.machine import Received
from rollmesh.wire.scheduling import (
    CoordinatorHello,
    ResizeWorkers,
    WorkerChange,
    WorkerPhase,
    WorkersResized,
)
from rollmesh.wire.sockets import Hub, wait
from tests.flow.test_update import PATIENCE_S, VOCAB_SIZE, Process

LOOK_S = 0.02
PIPELINE = "p"
DEADLINE_S = 40.0
WAIT_S = 60.0
"""Generous, since test machines stall; only a broken coordinator makes a test wait so long."""


class Scheduler:
    """Receives the coordinator's messages, and sends it resizes."""

    def __init__(self) -> None:
        self.hub = Hub("tcp://127.0.0.1:0")
        self.received: list[Received] = []
        self._num_resizes = 0

    async def until(self, is_so: Callable[[], object]) -> None:
        """Receive until `is_so`."""
        async with asyncio.timeout(WAIT_S):
            while not is_so():
                for route, packet in self.hub.receive():
                    self.received.append(Received(route, packet.message))
                await asyncio.to_thread(wait, [self.hub], None, LOOK_S)

    def of(self, kind: type[Any]) -> list[Any]:
        return [each.message for each in self.received if isinstance(each.message, kind)]

    async def next_hello(self) -> CoordinatorHello:
        """Wait for the next state that the coordinator reports."""
        num = len(self.of(CoordinatorHello))
        await self.until(lambda: len(self.of(CoordinatorHello)) > num)
        return self.of_last()

    async def phases(self) -> list[WorkerPhase]:
        return [worker.phase for worker in (await self.next_hello()).workers]

    def of_last(self) -> CoordinatorHello:
        """The state that was reported last."""
        hello: CoordinatorHello = self.of(CoordinatorHello)[-1]
        return hello

    def send_resize(self, wakes: bool, *ranks: int, deadline_s: float = DEADLINE_S) -> int:
        """Send a resize to the coordinator of the last message; return its number."""
        self._num_resizes += 1
        number = self._num_resizes
        changes = tuple(WorkerChange(rank, wakes, number) for rank in ranks)
        resize = ResizeWorkers(PIPELINE, number, changes, deadline_s)
        assert self.hub.send(self.received[-1].route, Packet(resize))
        return number

    async def answer(self, number: int) -> WorkersResized:
        def found() -> list[WorkersResized]:
            return [each for each in self.of(WorkersResized) if each.resize_id == number]

        await self.until(found)
        return found()[0]

    async def resize(self, wakes: bool, *ranks: int) -> None:
        """Resize, and wait until it is done."""
        await self.next_hello()
        assert not (await self.answer(self.send_resize(wakes, *ranks))).error


class SleepingMesh:
    """`weights` is the folder in which a trainer would publish."""

    def __init__(self, engines: Sequence[str], folder: Path) -> None:
        self.engines = engines
        self.weights = folder / "weights"
        self.scheduler = Scheduler()
        self._folder = folder
        self._named = [arg for url in engines for arg in ("--engine", url)]
        settings = ("--set", f"run.folder={folder}", "--set", "router.beat_s=0.1")
        router = Process("rollmesh.cli.main", "router", *settings, *self._named, "--asleep")
        self._processes = [router]
        self.router = router.ready.address
        self.start_coordinator()

    def start_coordinator(self) -> None:
        """Start another incarnation of it, whose state has not been received yet."""
        self.scheduler.received.clear()
        reading, writing = os.pipe()
        argv = [
            *(sys.executable, "-m", "rollmesh.cli.main", "coordinator"),
            *("--set", f"run.folder={self._folder}", "--pipeline", PIPELINE),
            *("--scheduler", self.scheduler.hub.address, "--router", self.router),
            *(*self._named, "--weights", str(self.weights), "--ready-fd", str(writing)),
        ]
        self.coordinator = subprocess.Popen(argv, pass_fds=[writing])
        os.close(writing)
        self._ready = reading

    async def until_ready(self) -> None:
        """Wait until it knows the state of the engines."""
        with os.fdopen(self._ready, "rb") as pipe:
            assert await asyncio.to_thread(pipe.readline)

    def kill_coordinator(self) -> None:
        """Kill it (-9)."""
        self.coordinator.kill()
        self.coordinator.wait(PATIENCE_S)

    async def info(self, rank: int) -> dict[str, Any]:
        async with HttpClient() as http:
            return await SglangBackend(self.engines[rank], http, VOCAB_SIZE).server_info()

    def end(self) -> None:
        self.coordinator.terminate()
        assert self.coordinator.wait(PATIENCE_S) == 0
        for process in reversed(self._processes):
            process.end()
        self.scheduler.hub.close()
