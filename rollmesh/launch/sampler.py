"""Takes the run's pulse once a second: memory and CPU of its processes, and the router's word.

Owns telemetry.jsonl and the peaks. Invariants: a process that is gone or a router that does not
answer leaves a gap, never an error; a sample takes bounded time. Driven by one task of `run`.
"""

import asyncio
from typing import Any

import msgspec
import psutil
from aiohttp import ClientError, ClientSession, ClientTimeout

from rollmesh.core.clock import Clock
from rollmesh.launch.folder import RunFolder
from rollmesh.launch.reaper import bury_orphans
from rollmesh.launch.supervisor import Supervisor

SAMPLE_S = 1.0
ANSWER_S = 0.8
MIB = 2**20


class ProcessSample(msgspec.Struct, frozen=True):
    """One process now."""

    role: str
    pid: int
    rss_bytes: int
    cpu_s: float
    """User and system time since its start."""


class Telemetry(msgspec.Struct, frozen=True):
    """A line of telemetry.jsonl."""

    time_s: float
    processes: list[ProcessSample]
    router: dict[str, Any] | None
    """The router's /status; None while it does not answer."""


class Sampler:
    """What was measured last, and the peaks."""

    def __init__(self, supervisor: Supervisor, folder: RunFolder, clock: Clock) -> None:
        self.last = Telemetry(0.0, [], None)
        self.before = self.last
        """The sample before the last, for rates."""
        self.peak_rss_mb: dict[str, float] = {}
        self._supervisor = supervisor
        self._folder = folder
        self._clock = clock
        self._processes: dict[int, psutil.Process] = {}

    async def follow(self) -> None:
        """Sample until cancelled."""
        async with ClientSession(timeout=ClientTimeout(total=ANSWER_S)) as session:
            while True:
                await self._sample(session)
                await asyncio.sleep(SAMPLE_S)

    async def _sample(self, session: ClientSession) -> None:
        pids = self._supervisor.pids()
        bury_orphans(set(pids.values()))
        for gone in self._processes.keys() - set(pids.values()):
            del self._processes[gone]
        processes = [s for role, pid in pids.items() if (s := self._measure(role, pid))]
        for sample in processes:
            peak = max(self.peak_rss_mb.get(sample.role, 0.0), sample.rss_bytes / MIB)
            self.peak_rss_mb[sample.role] = round(peak, 1)
        router = await self._ask_router(session)
        self.before = self.last
        self.last = Telemetry(round(self._clock.unix_s(), 3), processes, router)
        self._folder.add_telemetry(msgspec.json.encode(self.last))

    def _measure(self, role: str, pid: int) -> ProcessSample | None:
        try:
            process = self._processes.setdefault(pid, psutil.Process(pid))
            with process.oneshot():
                times = process.cpu_times()
                rss_bytes = process.memory_info().rss
        except psutil.Error:
            self._processes.pop(pid, None)
            return None
        return ProcessSample(role, pid, rss_bytes, round(times.user + times.system, 2))

    async def _ask_router(self, session: ClientSession) -> dict[str, Any] | None:
        ready = self._supervisor.ready.get("router")
        if ready is None or not ready.http_address:
            return None
        try:
            async with session.get(f"{ready.http_address}/status") as reply:
                return msgspec.json.decode(await reply.read(), type=dict[str, Any])
        except (ClientError, TimeoutError, msgspec.MsgspecError):
            return None
