"""The baseline of the serving benchmark: requests and answers of its sizes through a bare ROUTER.

    python -m benchmarks.lib.serving_floor router --ready-fd N
    python -m benchmarks.lib.serving_floor worker --router ADDRESS --answer-bytes N --ready-fd N

A synchronous pyzmq ROUTER forwards requests to its workers in turns and answers to their clients;
workers answer at once. It has no queue, no table, no heartbeats and no failures.
"""

import argparse
import os
import sys
import time
from collections.abc import Iterator
from itertools import cycle
from statistics import median
from typing import NamedTuple

import zmq

from benchmarks.lib.servers import ServerProcess
from rollmesh.core.process import Ready, announce, die_with_parent

HELLO = b"worker"
_PROGRAM = [sys.executable, "-m", "benchmarks.lib.serving_floor"]


class RoundTripTimes(NamedTuple):
    """Times of round trips."""

    per_s: float
    p50_us: float
    router_cpu_us: float
    """Seconds of each round trip."""


class Floor:
    """A client of a bare router and its echo workers, which it starts."""

    def __init__(self, cores: set[int], num_workers: int, answer_bytes: int) -> None:
        argv = [*_PROGRAM, "router", "--workers", str(num_workers)]
        self.router = ServerProcess(argv, cores)
        address = self.router.ready.address
        argv = [*_PROGRAM, "worker", "--router", address, "--answer-bytes", str(answer_bytes)]
        self.workers = [ServerProcess(argv, cores) for _ in range(num_workers)]
        self._socket = _open(zmq.DEALER)
        self._socket.connect(address)

    def lap(self, num_trips: int, window: int, ask: bytes) -> RoundTripTimes:
        """Run `num_trips` round trips, `window` of them at a time."""
        cpu_s, began_s = self.router.cpu_s(), time.perf_counter()
        trips_s = list(self._trips(num_trips, window, ask))
        wall_s, cpu_s = time.perf_counter() - began_s, self.router.cpu_s() - cpu_s
        return RoundTripTimes(num_trips / wall_s, 1e6 * median(trips_s), 1e6 * cpu_s / num_trips)

    def _trips(self, num_trips: int, window: int, ask: bytes) -> Iterator[float]:
        """Return the seconds of each round trip."""
        sent_s: dict[bytes, float] = {}
        num_asked = num_done = 0
        while num_done < num_trips:
            while num_asked < min(num_trips, num_done + window):
                name = num_asked.to_bytes(8, "big")
                sent_s[name] = time.perf_counter()
                self._socket.send_multipart([name, ask])
                num_asked += 1
            name, _ = self._socket.recv_multipart()
            num_done += 1
            yield time.perf_counter() - sent_s.pop(name)

    def end(self) -> None:
        """Stop all processes."""
        for child in (*self.workers, self.router):
            child.end()
        self._socket.close(linger=0)


def route(num_workers: int, ready_fd: int) -> None:
    """Forward until killed."""
    socket = _open(zmq.ROUTER)
    port = socket.bind_to_random_port("tcp://127.0.0.1")
    announce(ready_fd, Ready("floor", os.getpid(), f"tcp://127.0.0.1:{port}"))
    workers: list[bytes] = []
    while len(workers) < num_workers:
        workers.append(socket.recv_multipart()[0])
    turns = cycle(workers)
    is_worker = set(workers)
    while True:
        sender, *rest = socket.recv_multipart()
        if sender in is_worker:
            socket.send_multipart(rest)
        else:
            socket.send_multipart([next(turns), sender, *rest])


def work(router: str, answer_bytes: int, ready_fd: int) -> None:
    """Answer until killed."""
    socket = _open(zmq.DEALER)
    socket.connect(router)
    socket.send(HELLO)
    announce(ready_fd, Ready("echo", os.getpid(), ""))
    answer = os.urandom(answer_bytes)
    while True:
        client, name, _ = socket.recv_multipart()
        socket.send_multipart([client, name, answer])


def _open(kind: int) -> "zmq.Socket[bytes]":
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(kind)
    socket.setsockopt(zmq.LINGER, 0)
    return socket


def main() -> None:
    """Parse and serve."""
    arguments = argparse.ArgumentParser(prog="python -m benchmarks.lib.serving_floor")
    arguments.add_argument("role", choices=["router", "worker"])
    arguments.add_argument("--workers", type=int, default=1)
    arguments.add_argument("--router", default="")
    arguments.add_argument("--answer-bytes", type=int, default=1024)
    arguments.add_argument("--ready-fd", type=int, required=True)
    options = arguments.parse_args()
    die_with_parent()
    if options.role == "router":
        route(options.workers, options.ready_fd)
    work(options.router, options.answer_bytes, options.ready_fd)


if __name__ == "__main__":
    main()
