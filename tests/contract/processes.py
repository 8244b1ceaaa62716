"""Start engines for the contract, the embedded one as launch does and SGLang by its script, and
gateways in front of them.

A process and its descendants end with the `with` block.
"""

import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.house.source import ROOT

START_TIMEOUT_S = 100.0
SGLANG_START_TIMEOUT_S = 110.0  # twenty seconds on a quiet machine
END_TIMEOUT_S = 60.0
SGLANG_SERVES = b"The server is fired up"
SGLANG_INSTALLED = ROOT / ".venv-sglang" / ".installed"


@dataclass(frozen=True)
class EngineProcess:
    """A running engine or gateway."""

    address: str
    pid: int
    child: "subprocess.Popen[bytes]"
    ready: dict[str, object]
    """Its Ready report."""


@contextmanager
def embedded_engine(folder: Path, *options: str) -> Iterator[EngineProcess]:
    """Start an engine that serves `folder`."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        argv = ["-m", "rollmesh.engine.embedded", "--model-dir", str(folder), *options]
        argv += ["--listen-fd", str(listening.fileno())]
        with announced(argv, listening.fileno()) as process:
            listening.close()  # or a dead engine would still seem to listen
            assert process.address == f"http://127.0.0.1:{port}"
            yield process


@contextmanager
def gateway(
    engines: Sequence[str], folder: Path, token_file: Path, *args: str
) -> Iterator[EngineProcess]:
    """Start `rollmesh gateway` in front of `engines`, with `args` on its command line."""
    argv = ["-m", "rollmesh.cli.main", "gateway", "--port", "0", "--model-dir", str(folder)]
    argv += ["--admin-token-file", str(token_file), *args]
    for url in engines:
        argv += ["--engine", url]
    with announced(argv) as process:
        yield process


@contextmanager
def announced(argv: Sequence[str], *fds: int) -> Iterator[EngineProcess]:
    """Start one of our programs, and wait for its Ready report."""
    read, write = os.pipe()
    with os.fdopen(read) as ready:
        argv = [sys.executable, *argv, "--ready-fd", str(write)]
        child = subprocess.Popen(argv, pass_fds=(*fds, write), stdout=subprocess.DEVNULL)
        os.close(write)
        try:
            readable, _, _ = select.select([ready], [], [], START_TIMEOUT_S)
            line = ready.readline() if readable else ""
            assert line, "the process did not report that it serves"
            report = json.loads(line)
            yield EngineProcess(report["address"], child.pid, child, report)
        finally:
            child.send_signal(signal.SIGTERM)
            try:
                child.wait(END_TIMEOUT_S)
            finally:
                child.kill()
                child.wait()


@contextmanager
def sglang_engine(folder: Path, *options: str) -> Iterator[EngineProcess]:
    """Start the installed SGLang with `folder`."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    argv = [str(ROOT / "tests/contract/sglang/start"), str(folder), str(port), *options]
    # A session of its own: its scheduler and detokenizer are processes that end with it.
    child = subprocess.Popen(
        argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
    )
    printed = Printed(child)
    try:
        assert printed.is_ready(), f"SGLang did not start; the last that it printed:\n{printed}"
        yield EngineProcess(f"http://127.0.0.1:{port}", child.pid, child, {})
    finally:
        # Not SIGTERM, which makes it drain; it was seen to wait forever for a request that had
        # ended.
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()
        printed.thread.join()


class Printed:
    """Reads SGLang's output, so that its pipe never fills, and keeps the end of it."""

    def __init__(self, child: "subprocess.Popen[bytes]") -> None:
        self._child = child
        self._settled = threading.Event()
        self._lines: deque[str] = deque(maxlen=20)
        self.thread = threading.Thread(target=self._read, name="sglang-printed")
        self.thread.start()

    def is_ready(self) -> bool:
        """Wait until it reports that it serves; False if it ends or takes too long."""
        return self._settled.wait(SGLANG_START_TIMEOUT_S) and self._child.poll() is None

    def _read(self) -> None:
        assert self._child.stdout is not None
        with self._child.stdout as lines:
            for line in lines:
                self._lines.append(line.decode(errors="replace"))
                if SGLANG_SERVES in line:
                    self._settled.set()
        self._settled.set()

    def __str__(self) -> str:
        return "".join(self._lines)
