"""A real router process, and scripted peers on real sockets."""

import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import msgspec

from rollmesh.core.ids import GroupId
from rollmesh.core.process import Ready
from rollmesh.wire.frames import Packet
from rollmesh.wire.messages import (
    AnyMessage,
    AskGroup,
    ClientBeat,
    ClientHello,
    WorkerBeat,
    WorkerHello,
)
from rollmesh.wire.sockets import Dialer, wait

BEAT_S = 0.5
MISSED_BEATS = 5
PATIENCE_S = 60.0
"""Timeout of a wait; only a broken router makes a test wait so long."""

FAKE_WORKER = """
import os, socket, sys
from rollmesh.wire.frames import Packet
from rollmesh.core.process import pid_space
from rollmesh.wire.messages import GroupStarted, RunGroup, WorkerBeat, WorkerHello
from rollmesh.wire.sockets import Dialer, wait
address, name, host = sys.argv[1:]
space = "" if host else pid_space()
dialer = Dialer(address, name)
hello = WorkerHello(name, "guess", 8, os.getpid(), host or socket.gethostname(), pid_space=space)
dialer.send(Packet(hello))
while True:
    wait([dialer], None, 0.05)
    for packet in dialer.receive():
        if isinstance(packet.message, RunGroup):
            dialer.send(Packet(GroupStarted(packet.message.group_id, packet.message.attempt)))
            print("started", flush=True)
    dialer.send(Packet(WorkerBeat(name, 0, True, 0, 0.0, 0, 0, 0, 0)))
"""


class RouterProcess:
    """`with RouterProcess() as router:` runs a router until the block ends."""

    def __init__(
        self,
        folder: Path,
        bind: str = "tcp://127.0.0.1:0",
        beat_s: float = BEAT_S,
        *,
        engine: str = "",
        settings: tuple[str, ...] = (),
        **more: object,
    ) -> None:
        values = {"bind": bind, "beat_s": beat_s, "missed_beats": MISSED_BEATS, **more}
        settings_args = [
            f"run.folder={folder}",
            *(f"router.{k}={v}" for k, v in values.items()),
            *settings,
        ]
        self._settings = [each for setting in settings_args for each in ("--set", setting)]
        self._settings += ["--engine", engine] if engine else []
        self.ready: Ready

    def __enter__(self) -> Self:
        reading, writing = os.pipe()
        argv = [sys.executable, "-m", "rollmesh.cli.main", "router", *self._settings]
        argv += ["--ready-fd", str(writing)]
        self.process = subprocess.Popen(argv, pass_fds=[writing])
        os.close(writing)
        with os.fdopen(reading, "rb") as pipe:
            self.ready = msgspec.json.decode(pipe.readline(), type=Ready)
        return self

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        assert self.process.wait(PATIENCE_S) in (0, -signal.SIGKILL)

    def get(self, path: str) -> bytes:
        with urllib.request.urlopen(self.ready.http_address + path, timeout=PATIENCE_S) as reply:
            body: bytes = reply.read()
            return body

    def status(self) -> dict[str, Any]:
        status: dict[str, Any] = msgspec.json.decode(self.get("/status"))
        return status

    def causes(self) -> list[str]:
        """Why groups are blocked."""
        return list(self.status()["causes"])

    def worker(self, name: str) -> dict[str, Any]:
        """The worker's row in the status; empty if the router does not know it."""
        rows = self.status()["workers"]
        return next((row for row in rows if row["worker_id"] == name), {})


class Peer:
    """A dialer that keeps every message that it receives, and sends its heartbeat while it
    waits."""

    def __init__(self, address: str, name: str, beat: AnyMessage | None = None) -> None:
        self.dialer = Dialer(address, name)
        self.received: list[Packet] = []
        self.beat = beat

    def send(self, message: AnyMessage, body: bytes = b"") -> None:
        assert self.dialer.send(Packet(message, body=body))

    def poll(self) -> None:
        wait([self.dialer], None, 0.05)
        self.received += self.dialer.receive()
        if self.beat:
            self.send(self.beat)

    def of(self, kind: type[Any]) -> list[Any]:
        return [packet.message for packet in self.received if isinstance(packet.message, kind)]


def until(condition: Callable[[], object], *peers: Peer) -> None:
    """Poll `peers` until `condition` holds."""
    end_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end_s, "it did not come"
        for peer in peers:
            peer.poll()


class ScriptedPeers:
    """All peers and worker processes of a test; closed at its end."""

    def __init__(self) -> None:
        self.peers: list[Peer] = []
        self._processes: list[subprocess.Popen[bytes]] = []

    def peer(self, address: str, name: str, beat: AnyMessage | None = None) -> Peer:
        self.peers.append(Peer(address, name, beat))
        return self.peers[-1]

    def worker(self, address: str, name: str) -> Peer:
        peer = self.peer(address, name, WorkerBeat(name, 0, True, 0, 0.0, 0, 0, 0, 0))
        peer.send(WorkerHello(name, "guess", 8, 1, "here"))
        return peer

    def client(self, address: str) -> Peer:
        peer = self.peer(address, "c", ClientBeat("c", 0))
        peer.send(ClientHello("c"))
        return peer

    def process(self, address: str, name: str, host: str = "") -> "subprocess.Popen[bytes]":
        """Start a worker that starts its groups and never ends them; of this machine, unless
        `host`.
        """
        argv = [sys.executable, "-c", FAKE_WORKER, address, name, host]
        self._processes.append(subprocess.Popen(argv, stdout=subprocess.PIPE))
        return self._processes[-1]

    def close(self) -> None:
        for peer in self.peers:
            peer.dialer.close()
        for process in self._processes:
            process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()


def has_started(process: "subprocess.Popen[bytes]") -> None:
    """Return when the worker's process has started one more group."""
    assert process.stdout is not None
    assert process.stdout.readline() == b"started\n"


def ask(seq: int, attempts: int = 0) -> AskGroup:
    return AskGroup(GroupId("r1", seq), "c", "guess", 4, "tcp://sink", attempts)
