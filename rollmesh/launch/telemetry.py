"""Telemetry at regular intervals: memory and CPU of a run's processes, and the router's status.

- A process that is gone or a router that does not answer leaves a gap, never an error.
- A sample takes bounded time.
"""

import asyncio
import os
import threading
from typing import Any, Self

import httpx
import msgspec
import psutil
from aiohttp import ClientError, ClientSession, ClientTimeout

from rollmesh.core.clock import Clock
from rollmesh.core.config import LaunchConfig
from rollmesh.core.secret_files import admin_token
from rollmesh.launch.child import reap_orphans
from rollmesh.launch.folder import RunFolder
from rollmesh.launch.supervisor import Supervisor

MIB = 2**20


class ProcessSample(msgspec.Struct, frozen=True):
    """A process's resources."""

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


class TelemetrySampler:
    """Samples the processes of a supervisor; holds the last sample and the peaks."""

    def __init__(
        self, supervisor: Supervisor, folder: RunFolder, clock: Clock, settings: LaunchConfig
    ) -> None:
        self.last = Telemetry(0.0, [], None)
        self.before = self.last
        """The sample before the last, for rates."""
        self.peak_rss_mb: dict[str, float] = {}
        self._supervisor = supervisor
        self._folder = folder
        self._clock = clock
        self._interval_s = settings.telemetry_interval_s
        self._timeout_s = settings.telemetry_timeout_s
        self._processes: dict[int, psutil.Process] = {}

    async def follow(self) -> None:
        """Sample until cancelled."""
        async with ClientSession(timeout=ClientTimeout(total=self._timeout_s)) as session:
            while True:
                await self._sample(session)
                await asyncio.sleep(self._interval_s)

    async def _sample(self, session: ClientSession) -> None:
        pids = self._supervisor.pids()
        reap_orphans(set(pids.values()))
        for gone in self._processes.keys() - set(pids.values()):
            del self._processes[gone]
        processes = [s for role, pid in pids.items() if (s := self._measure(role, pid))]
        for sample in processes:
            peak = max(self.peak_rss_mb.get(sample.role, 0.0), sample.rss_bytes / MIB)
            self.peak_rss_mb[sample.role] = round(peak, 1)
        router = await self._read_router(session)
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

    async def _read_router(self, session: ClientSession) -> dict[str, Any] | None:
        ready = self._supervisor.ready.get("router")
        if ready is None or not ready.http_address:
            return None
        try:
            async with session.get(f"{ready.http_address}/status") as reply:
                return msgspec.json.decode(await reply.read(), type=dict[str, Any])
        except (ClientError, TimeoutError, msgspec.MsgspecError):
            return None


class TelemetryThread:
    """A thread that writes telemetry of this process and a router, where launch did not start the
    processes (as with one container each).

    `with TelemetryThread(...):` samples while the block runs.
    """

    def __init__(
        self, url: str, role: str, folder: RunFolder, clock: Clock, settings: LaunchConfig
    ) -> None:
        """`url` is the router's HTTP address, '' for none; ConfigError for a bad token file."""
        self._url = url
        self._role = role
        self._folder = folder
        self._clock = clock
        self._interval_s = settings.telemetry_interval_s
        self._timeout_s = settings.telemetry_timeout_s
        self._process = psutil.Process(os.getpid())
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="watch", daemon=True)
        token = admin_token()
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _follow(self) -> None:
        with httpx.Client(
            headers=self._headers, timeout=self._timeout_s, trust_env=False
        ) as client:
            while not self._ended.wait(self._interval_s):
                line = Telemetry(
                    time_s=round(self._clock.unix_s(), 3),
                    processes=[self._measure()],
                    router=self._read_router(client),
                )
                self._folder.add_telemetry(msgspec.json.encode(line))

    def _measure(self) -> ProcessSample:
        with self._process.oneshot():
            times, rss_bytes = self._process.cpu_times(), self._process.memory_info().rss
        cpu_s = round(times.user + times.system, 2)
        return ProcessSample(self._role, self._process.pid, rss_bytes, cpu_s)

    def _read_router(self, client: httpx.Client) -> dict[str, Any] | None:
        if not self._url:
            return None
        try:
            answer = client.get(f"{self._url}/status")
            return msgspec.json.decode(answer.content, type=dict[str, Any])
        except (httpx.HTTPError, httpx.InvalidURL, msgspec.MsgspecError):
            return None
