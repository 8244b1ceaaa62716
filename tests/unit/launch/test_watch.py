"""A run without launch has telemetry too: the router's word where it answers, a gap where not."""

import os
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import ClassVar

import msgspec
import pytest

from rollmesh.core.clock import SystemClock
from rollmesh.core.config import Config, RunConfig
from rollmesh.core.errors import ConfigError
from rollmesh.launch.folder import RunFolder
from rollmesh.launch.sampler import Telemetry
from rollmesh.launch.watch import Watch

WORKERS = {"workers": [{"worker_id": "w0"}]}


class Router(BaseHTTPRequestHandler):
    """Refuses the first question, answers the second."""

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
        """Say nothing."""


def test_a_line_each_second_holds_what_the_router_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROLLMESH_ADMIN_TOKEN", "secret")
    folder = RunFolder(Config(run=RunConfig(name="mesh", folder=str(tmp_path))))
    with HTTPServer(("127.0.0.1", 0), Router) as router:
        serving = threading.Thread(target=router.serve_forever)
        serving.start()
        url = f"http://127.0.0.1:{router.server_address[1]}"
        with Watch(url, "trainer", folder, SystemClock()):
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


def test_a_token_that_is_no_good_is_told_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROLLMESH_ADMIN_TOKEN_FILE", str(tmp_path / "absent"))
    folder = RunFolder(Config(run=RunConfig(name="mesh", folder=str(tmp_path))))
    with pytest.raises(ConfigError, match="absent"):
        Watch("http://127.0.0.1:1", "trainer", folder, SystemClock())
