"""A real router process with 2,000 workers and many engines, and what it costs at rest.

    python -m benchmarks.lib.fleet_mesh engines FIRST_PORT COUNT    engines that answer probes
    python -m benchmarks.lib.fleet_mesh workers ADDRESS FIRST COUNT workers that send heartbeats

Each worker has two sockets, as a real one: one for its messages, one for its heartbeats.
"""

import asyncio
import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import cast

import uvloop

from benchmarks.lib.fleet_feed import NUM_WORKERS, SIZES
from benchmarks.lib.servers import ServerProcess
from rollmesh.core.config import RouterConfig
from rollmesh.wire.fleet import EnginePhase
from rollmesh.wire.frames import Packet, encode
from rollmesh.wire.messages import WorkerBeat, WorkerHello
from rollmesh.wire.sockets import Dialer

NUM_PROCESSES = 8
FIRST_PORT = 20_000
SETTLE_S, QUICK_S, FULL_S = 15.0, 10.0, 30.0
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b"
ANSWERS = {
    b"/model_info": b'{"model_path":"m","weight_version":"1"}',
    b"/server_info": b'{"incremental_streaming_output":true,"random_seed":1,"version":"0"}',
    b"/v1/loads": b'{"loads":[{"num_running_reqs":5,"num_waiting_reqs":0}]}',
    b"/v1/models": b'{"data":[]}',
}


def measure_router(*, is_quick: bool) -> dict[str, float]:
    """Return CPU, memory and descriptors of a router with many engines, at rest."""
    figures = {}
    for size in dict.fromkeys((SIZES[0], SIZES[-1])):
        with ExitStack() as undo:
            undo.enter_context(children("engines", [(FIRST_PORT, size)]))
            argv = [sys.executable, "-m", "rollmesh.cli.main", "router", "--fixed-weights"]
            for number in range(size):
                argv += ["--engine", f"http://127.0.0.1:{FIRST_PORT + number}"]
            router = ServerProcess(argv, os.sched_getaffinity(0))
            undo.callback(router.end)
            share = NUM_WORKERS // NUM_PROCESSES
            parts = [(router.ready.address, first, share) for first in range(0, NUM_WORKERS, share)]
            undo.enter_context(children("workers", parts))
            time.sleep(SETTLE_S)
            before_s, began_s = router.cpu_s(), time.monotonic()
            time.sleep(QUICK_S if is_quick else FULL_S)
            spent_s, lasted_s = router.cpu_s() - before_s, time.monotonic() - began_s
            with urllib.request.urlopen(f"{router.ready.http_address}/status", timeout=20) as reply:
                status = json.load(reply)
            name = f"router_with_{size}_engines"
            figures[f"{name}.core_share"] = spent_s / lasted_s
            figures[f"{name}.rss_mb"] = router.rss_mb()
            figures[f"{name}.workers"] = float(len(status["workers"]))
            figures[f"{name}.ready"] = float(
                sum(each["phase"] == EnginePhase.READY for each in status["engines"])
            )
    return figures


@contextmanager
def children(role: str, parts: Sequence[tuple[object, ...]]) -> Iterator[None]:
    """Run a process of this module for each part, until the block ends."""
    argv = [sys.executable, "-m", "benchmarks.lib.fleet_mesh", role]
    running = [subprocess.Popen([*argv, *map(str, part)], stdin=subprocess.PIPE) for part in parts]
    try:
        yield
    finally:
        for each in running:
            each.kill()
            each.wait()


class ProbedEngine(asyncio.Protocol):
    """Answers what a router's probe reads."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        for request in data.split(b"\r\n\r\n")[:-1]:
            body = ANSWERS.get(request.split(b" ", 2)[1], b"{}")
            self._transport.write(HEAD % (len(body), body))


async def serve_engines(first_port: int, count: int) -> None:
    """Serve that many engines."""
    loop = asyncio.get_running_loop()
    for port in range(first_port, first_port + count):
        await loop.create_server(ProbedEngine, "127.0.0.1", port)
    await asyncio.Event().wait()


def send_beats(address: str, first: int, count: int) -> None:
    """Join as that many workers and send their heartbeats."""
    pairs = []
    for name in (f"worker-{first + number}" for number in range(count)):
        worker, beater = Dialer(address, name), Dialer(address, f"{name}.beat")
        worker.send(Packet(WorkerHello(name, "bench", 64, 1, "elsewhere")))
        beat = WorkerBeat(name, 0, True, 0, 0.001, 10**8, 1, 1, 1)
        pairs.append((worker, beater, encode(Packet(beat))))
    while True:
        next_s = time.monotonic() + RouterConfig().beat_s
        for worker, beater, frames in pairs:
            beater.socket.send_multipart(frames)
            list(beater.receive())
            list(worker.receive())
        time.sleep(max(0.0, next_s - time.monotonic()))


if __name__ == "__main__":
    if sys.argv[1] == "engines":
        uvloop.run(serve_engines(int(sys.argv[2]), int(sys.argv[3])))
    send_beats(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
