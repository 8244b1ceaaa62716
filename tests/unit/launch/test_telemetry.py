"""Telemetry of a run: dead processes leave no trace, and a silent router leaves a gap."""

import asyncio
import gc
import os
import subprocess
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import ClassVar

import msgspec
import psutil
import pytest

from rollmesh.core.clock import SystemClock
from rollmesh.core.config import Config, LaunchConfig, RunConfig
from rollmesh.core.errors import ConfigError
from rollmesh.launch.folder import RunFolder
from rollmesh.launch.supervisor import MeshPlan, Supervisor
from rollmesh.launch.telemetry import Telemetry, TelemetrySampler, TelemetryThread
from rollmesh.testing.clock import FakeClock


class FakeSupervisor(Supervisor):
    """A supervisor whose processes the test sets."""

    running: dict[str, int]

    def pids(self) -> dict[str, int]:
        return self.running


@pytest.fixture
def children() -> Iterator[list[subprocess.Popen[bytes]]]:
    children = [subprocess.Popen(["sleep", "60"]) for _ in range(3)]
    yield children
    for child in children:
        child.kill()
        child.wait()


@pytest.mark.usefixtures("young_heap")
async def test_an_ended_process_is_no_longer_measured(
    tmp_path: Path, children: list[subprocess.Popen[bytes]]
) -> None:
    folder = RunFolder(Config(run=RunConfig(name="demo", folder=str(tmp_path))))
    supervisor = FakeSupervisor(MeshPlan([], {}, "launch.1"), LaunchConfig(), folder, FakeClock())
    pulse = TelemetrySampler(
        supervisor, folder, FakeClock(), LaunchConfig(telemetry_interval_s=0.01)
    )
    supervisor.running = {f"worker-{at}": child.pid for at, child in enumerate(children)}
    following = asyncio.create_task(pulse.follow())
    async with asyncio.timeout(60.0):
        while len(pulse.last.processes) < 3:  # noqa: ASYNC110 - no event to wait for
            await asyncio.sleep(0)
        supervisor.running = {"launch": os.getpid()}
        while len(pulse.last.processes) != 1:  # noqa: ASYNC110 - no event to wait for
            await asyncio.sleep(0)
    following.cancel()
    gone = {child.pid for child in children}
    watched = [each.pid for each in gc.get_objects() if isinstance(each, psutil.Process)]
    assert gone.isdisjoint(watched)


WORKERS = {"workers": [{"worker_id": "w0"}]}


class Router(BaseHTTPRequestHandler):
    """A router that refuses the first request and answers the second."""

    asked: ClassVar[list[tuple[str, str | None]]] = []
    answered = threading.Event()

    def do_GET(self) -> None:
        self.asked.append((self.path, self.headers["Authorization"]))
        is_first = len(self.asked) == 1
        self.send_response(503 if is_first else 200)
        self.end_headers()
        self.wfile.write(b"not now" if is_first else msgspec.json.encode(WORKERS))
        if not is_first:
            self.answered.set()

    def log_message(self, *_: object) -> None:
        """Log nothing."""


def test_a_line_each_second_holds_the_routers_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROLLMESH_ADMIN_TOKEN", "secret")
    folder = RunFolder(Config(run=RunConfig(name="mesh", folder=str(tmp_path))))
    with HTTPServer(("127.0.0.1", 0), Router) as router:
        serving = threading.Thread(target=router.serve_forever)
        serving.start()
        url = f"http://127.0.0.1:{router.server_address[1]}"
        with TelemetryThread(url, "trainer", folder, SystemClock(), LaunchConfig()):
            assert Router.answered.wait(30.0)
        router.shutdown()
        serving.join()
    text = (folder.path / "telemetry.jsonl").read_bytes()
    lines = [msgspec.json.decode(line, type=Telemetry) for line in text.splitlines()]
    assert [line.router for line in lines] == [None, WORKERS]
    assert Router.asked == [("/status", "Bearer secret")] * 2
    assert all(line.processes[0].pid == os.getpid() for line in lines)
    assert all(line.processes[0].rss_bytes > 0 for line in lines)
    assert folder.fault == ""


def test_an_unusable_token_is_reported_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROLLMESH_ADMIN_TOKEN_FILE", str(tmp_path / "absent"))
    folder = RunFolder(Config(run=RunConfig(name="mesh", folder=str(tmp_path))))
    with pytest.raises(ConfigError, match="absent"):
        TelemetryThread("http://127.0.0.1:1", "trainer", folder, SystemClock(), LaunchConfig())
