"""How much one router process carries: whole groups, bare asks, and both beside a deaf peer.

    python -m benchmarks.serving [--groups 20000] [--quick] [--json] [--check]

Invariant: a real router process on loopback, driven by one client and one worker in this process;
bodies have the size of a real ask. Figures are per second of wall time (this process shares the
machine) and per second of the router's own CPU. Driven by `make bench`.
"""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Self

import msgspec
import psutil

from benchmarks._report import parser, report
from rollmesh.core.ids import GroupId
from rollmesh.core.process import Ready
from rollmesh.wire.frames import Packet
from rollmesh.wire.messages import (
    AskGroup,
    ClientHello,
    GroupDelivered,
    GroupMoved,
    GroupStarted,
    GroupState,
    RouterHello,
    RunGroup,
    WorkerHello,
)
from rollmesh.wire.sockets import Dialer, wait

BODY = b"x" * 600
WINDOW = 1000
"""Asks under way at a time; less than a queue holds."""


class Bench:
    """A router process, a client and a worker."""

    def __init__(self, folder: str) -> None:
        self.figures: dict[str, float] = {}
        reading, writing = os.pipe()
        argv = [sys.executable, "-m", "rollmesh.cli.main", "router"]
        argv += ["--set", f"run.folder={folder}", "--set", "router.missed_beats=1000"]
        argv += ["--ready-fd", str(writing)]
        self._process = subprocess.Popen(argv, pass_fds=[writing])
        os.close(writing)
        with os.fdopen(reading, "rb") as pipe:
            self.address = msgspec.json.decode(pipe.readline(), type=Ready).address
        self._usage = psutil.Process(self._process.pid)
        self.client = Dialer(self.address, "client")
        self.worker = Dialer(self.address, "worker")

    def __enter__(self) -> Self:
        hello = WorkerHello("worker", "bench", max_rollouts=10**6, pid=1, host="here")
        for dialer, message in ((self.client, ClientHello("client")), (self.worker, hello)):
            dialer.send(Packet(message))
            while not any(isinstance(p.message, RouterHello) for p in dialer.receive()):
                wait([dialer], None, 1.0)
        return self

    def __exit__(self, *_: object) -> None:
        self.client.close()
        self.worker.close()
        self._process.terminate()
        self._process.wait()

    def measure(self, what: str, work: Callable[[], int]) -> None:
        """Note how fast `work` went; it returns how many it did."""
        cpu_s, began_s = self._cpu_s(), time.perf_counter()
        number = work()
        wall_s, cpu_s = time.perf_counter() - began_s, self._cpu_s() - cpu_s
        self.figures[f"{what}_per_wall_s"] = number / wall_s
        self.figures[f"{what}_per_router_cpu_s"] = number / cpu_s
        self.figures["router_rss_mb"] = self._usage.memory_info().rss / 1e6

    def _cpu_s(self) -> float:
        times = self._usage.cpu_times()
        return times.user + times.system

    def run_groups(self, run_id: str, num_groups: int) -> int:
        """Ask, run, start, deliver, done: seven messages a group."""
        num_asked = num_done = 0
        while num_done < num_groups:
            while num_asked < min(num_groups, num_done + WINDOW):
                self.client.send(Packet(ask(run_id, num_asked), body=BODY))
                num_asked += 1
            wait([self.client, self.worker], None, 1.0)
            for packet in self.worker.receive():
                if isinstance(packet.message, RunGroup):
                    group_id, attempt = packet.message.group_id, packet.message.attempt
                    self.worker.send(Packet(GroupStarted(group_id, attempt)))
                    self.worker.send(Packet(GroupDelivered(group_id, attempt)))
            moves = [p.message for p in self.client.receive() if isinstance(p.message, GroupMoved)]
            num_done += sum(move.state is GroupState.DONE for move in moves)
        return num_done

    def repeat_asks(self, num_asks: int) -> int:
        """An ask that waits, said again and again: one message in, one out."""
        num_sent = num_heard = 0
        while num_heard < num_asks:
            while num_sent < min(num_asks, num_heard + WINDOW):
                self.client.send(Packet(ask("waiting", 0, env="nobody has it"), body=BODY))
                num_sent += 1
            wait([self.client], None, 1.0)
            num_heard += sum(1 for _ in self.client.receive())
        return num_heard

    def deafen_a_peer(self) -> Dialer:
        """A peer that asks far more than it ever reads."""
        deaf = Dialer(self.address, "deaf")
        for _ in range(50_000):
            while not deaf.send(Packet(ClientHello("deaf"))):
                self.repeat_asks(1)
        return deaf


def ask(run_id: str, seq: int, env: str = "bench") -> AskGroup:
    """A group of sixteen."""
    return AskGroup(GroupId(run_id, seq), "client", env, 16, "tcp://127.0.0.1:1")


def main() -> None:
    """Measure and report; the goals of serving belong to a later issue."""
    arguments = parser("serving")
    arguments.add_argument("--groups", type=int, default=20_000)
    options = arguments.parse_args()
    num_groups = options.groups // 10 if options.quick else options.groups
    with tempfile.TemporaryDirectory() as folder, Bench(folder) as bench:
        bench.measure("groups", lambda: bench.run_groups("r1", num_groups))
        bench.measure("repeated_asks", lambda: bench.repeat_asks(2 * num_groups))
        deaf = bench.deafen_a_peer()
        bench.measure("groups_beside_a_deaf_peer", lambda: bench.run_groups("r2", num_groups))
        deaf.close()
        figures = bench.figures
    report(options, figures, goals=[])


if __name__ == "__main__":
    main()
