"""How much one router process carries: whole groups, bare asks, and groups beside a deaf peer.

Invariant: a real router process on loopback, driven by one client and one worker in this process,
which run nothing; bodies have the size of a real ask. Figures are per second of wall time, of which
this process takes its part, and per second of the router's own CPU. Driven by serving.py.
"""

import os
import sys
from collections.abc import Callable
from time import perf_counter
from typing import Self

from benchmarks._arms import Child
from benchmarks._serving_cases import Bench
from rollmesh.core.ids import GroupId
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
GROUP = 16
WINDOW = 1000
"""Asks under way at a time; less than a queue holds."""


def router(bench: Bench) -> None:
    """The router alone."""
    num_groups = bench.sized(20_000)
    with Alone(str(bench.folder)) as alone:
        alone.run_groups("r0", num_groups // 8)
        alone.measure("groups", lambda: alone.run_groups("r1", num_groups))
        rss_mb = alone.child.rss_mb()
        alone.run_groups("r3", num_groups)
        growth_mb = alone.child.rss_mb() - rss_mb
        alone.figures["mb_per_100k_rollouts"] = growth_mb * 100_000 / (GROUP * num_groups)
        alone.measure("repeated_asks", lambda: alone.repeat_asks(2 * num_groups))
        deaf = alone.deafen_a_peer()
        alone.measure("groups_beside_a_deaf_peer", lambda: alone.run_groups("r2", num_groups))
        deaf.close()
        bench.note("router", alone.figures | {"rss_mb": alone.child.rss_mb()})


class Alone:
    """A router process, a client and a worker."""

    def __init__(self, folder: str) -> None:
        self.figures: dict[str, float] = {}
        argv = [sys.executable, "-m", "rollmesh.cli.main", "router"]
        argv += ["--set", f"run.folder={folder}", "--set", "router.missed_beats=1000"]
        self.child = Child(argv, os.sched_getaffinity(0))
        self.address = self.child.ready.address
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
        self.child.end()

    def measure(self, what: str, work: Callable[[], int]) -> None:
        """Note how fast `work` went; it returns how many it did."""
        cpu_s, began_s = self.child.cpu_s(), perf_counter()
        number = work()
        self.figures[f"{what}.per_s"] = number / (perf_counter() - began_s)
        self.figures[f"{what}.cpu_us"] = 1e6 * (self.child.cpu_s() - cpu_s) / number

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
        """Asks that wait, said again and again, each when it was answered: one in, one out."""
        num_sent = num_heard = 0
        while num_heard < num_asks:
            while num_sent < min(num_asks, num_heard + WINDOW):
                asked = ask("waiting", num_sent % WINDOW, env="nobody has it")
                self.client.send(Packet(asked, body=BODY))
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
    """A group of GROUP."""
    return AskGroup(GroupId(run_id, seq), "client", env, GROUP, "tcp://127.0.0.1:1")
