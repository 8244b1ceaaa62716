"""Starts an embedded engine as launch would: an inherited socket in, one line out when it serves.

Invariant: the process is gone when the `with` ends. Driven by the fixtures and tests beside it.
"""

import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

START_TIMEOUT_S = 60.0
END_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class EngineProcess:
    """A running engine."""

    address: str
    pid: int
    child: "subprocess.Popen[bytes]"
    ready: dict[str, object]
    """What it reported."""


@contextmanager
def embedded_engine(folder: Path, *options: str) -> Iterator[EngineProcess]:
    """An engine that serves `folder`."""
    ready_read, ready_write = os.pipe()
    with socket.create_server(("127.0.0.1", 0)) as listening, os.fdopen(ready_read) as ready:
        argv = [sys.executable, "-m", "rollmesh.engine.embedded", "--model-dir", str(folder)]
        argv += ["--listen-fd", str(listening.fileno()), "--ready-fd", str(ready_write)]
        child = subprocess.Popen([*argv, *options], pass_fds=(listening.fileno(), ready_write))
        os.close(ready_write)
        port = listening.getsockname()[1]
        listening.close()
        try:
            readable, _, _ = select.select([ready], [], [], START_TIMEOUT_S)
            line = ready.readline() if readable else ""
            assert line, "the engine did not report that it serves"
            report = json.loads(line)
            assert report["address"] == f"http://127.0.0.1:{port}"
            yield EngineProcess(report["address"], child.pid, child, report)
        finally:
            child.send_signal(signal.SIGTERM)
            try:
                child.wait(END_TIMEOUT_S)
            finally:
                child.kill()
                child.wait()
