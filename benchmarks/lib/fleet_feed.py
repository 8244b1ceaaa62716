"""Cost of the fleet table to a router: its state machine, and messages to 2,000 real sockets.

Each engine is probed once a second, and its load moves at random. `full` is the whole table for
each worker and second, `changes` what the fleet sends. Audiences are processes of
`python -m benchmarks.lib.fleet_feed ADDRESS FIRST COUNT`, which receive and discard.
"""

import random
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import zmq

from rollmesh.engine.fleet import Action, EngineProbed, Fleet, FleetSettings, PublishTable
from rollmesh.wire.fleet import BeginUpdate, FinishUpdate, JoinEngine, TableMessage
from rollmesh.wire.frames import Packet, encode
from rollmesh.wire.machine import Received, Ticked
from rollmesh.wire.messages import WorkerLeft
from rollmesh.wire.sockets import Dialer, Hub

SIZES = (64, 128, 256, 512)
NUM_WORKERS = 2000
NUM_AUDIENCES = 4
"""Processes; a zmq context holds about 1,000 sockets."""
TICK_S = 0.25
MAX_RUNNING = 256
UPDATE_S = 2.0
"""Time within which engines finish an update, one after the other."""
PATIENCE_S = 120.0


class RunningFleet:
    """A fleet of READY engines and its manual clock."""

    def __init__(self, num_engines: int) -> None:
        self.fleet = Fleet(FleetSettings())
        self.urls = [
            f"http://10.0.{number // 250}.{number % 250}:30000" for number in range(num_engines)
        ]
        self.now_s = 0.0
        self._dice = random.Random(0)
        self._loads = dict.fromkeys(self.urls, MAX_RUNNING // 2)
        self._policy_versions = dict.fromkeys(self.urls, 0)
        self._due: list[tuple[str, int]] = []
        for url in self.urls:
            self._step(Received(b"", JoinEngine(0, url)))
        for _ in range(8):
            self.run(TICK_S)

    def run(self, seconds: float) -> list[TableMessage]:
        """Let time pass; return what every worker was sent."""
        sent: list[TableMessage] = []
        end_s = self.now_s + seconds
        while self.now_s < end_s:
            self.now_s = min(end_s, self.now_s + TICK_S, self.fleet.due_s)
            sent += self._step(Ticked())
            due, self._due = self._due, []
            for url, serial in due:
                sent += self._step(self._answer(url, serial))
        return sent

    def publish(self, policy_version: int) -> list[TableMessage]:
        """Update all engines; return what every worker was sent."""
        sent: list[TableMessage] = []
        for url in self.urls:
            sent += self._step(Received(b"p", BeginUpdate(1, url, policy_version, 30.0)))
            sent += self.run(0.001)
        for url in self.urls:
            self._policy_versions[url] = policy_version
            sent += self._step(Received(b"p", FinishUpdate(2, url, policy_version, True)))
            sent += self.run(UPDATE_S / len(self.urls))
        return sent

    def _answer(self, url: str, serial: int) -> EngineProbed:
        moved = self._loads[url] + round(self._dice.gauss(0.0, MAX_RUNNING / 16))
        self._loads[url] = min(max(moved, 0), MAX_RUNNING)
        return EngineProbed(
            url=url,
            serial=serial,
            ok=True,
            incarnation="i7f3a9c1",
            policy_version=self._policy_versions[url],
            num_running=self._loads[url],
            max_running=MAX_RUNNING,
        )

    def _step(self, event: Received | EngineProbed | Ticked) -> list[TableMessage]:
        actions = self.fleet.step(event, self.now_s)
        self._due += [probe for each in actions if (probe := _probe_of(each))]
        return [each.message for each in actions if isinstance(each, PublishTable)]


def _probe_of(action: Action) -> tuple[str, int] | None:
    serial = getattr(action, "serial", None)
    return None if serial is None else (getattr(action, "url", ""), serial)


def num_bytes(messages: list[TableMessage]) -> int:
    """Bytes of these messages for one worker."""
    return sum(len(frame) for each in messages for frame in encode(Packet(each, "i1")))


@contextmanager
def audience(num_workers: int) -> Iterator[tuple[Hub, list[bytes]]]:
    """A hub with that many connected workers, in other processes."""
    hub = Hub("tcp://127.0.0.1:0")
    share = num_workers // NUM_AUDIENCES
    argv = [sys.executable, "-m", "benchmarks.lib.fleet_feed", hub.address]
    children = [
        subprocess.Popen([*argv, str(first), str(share)], stdin=subprocess.PIPE)
        for first in range(0, num_workers, share)
    ]
    try:
        routes: set[bytes] = set()
        end_s = time.monotonic() + PATIENCE_S
        while len(routes) < num_workers:
            assert time.monotonic() < end_s, f"{len(routes)} of {num_workers} workers came"
            hub.socket.poll(100)
            routes |= {route for route, _ in hub.receive()}
        yield hub, sorted(routes)
    finally:
        for child in children:
            assert child.stdin is not None
            child.stdin.close()
            child.wait()
        hub.close()


def core_share(hub: Hub, routes: list[bytes], seconds: list[list[TableMessage]]) -> float:
    """CPU of this process, all of its threads, while it sends one list of messages each second."""
    began_s, next_s = time.process_time(), time.monotonic()
    for messages in seconds:
        send(hub, routes, messages)
        next_s += 1.0
        time.sleep(max(0.0, next_s - time.monotonic()))
    return (time.process_time() - began_s) / len(seconds)


def send(hub: Hub, routes: list[bytes], messages: list[TableMessage]) -> None:
    """Send messages to all workers."""
    for message in messages:
        hub.send_all(routes, Packet(message, "i1"))


def measure_fleet(*, is_quick: bool) -> dict[str, float]:
    """Return the figures of all sizes."""
    figures: dict[str, float] = {}
    num_seconds = 2 if is_quick else 10
    with audience(NUM_WORKERS) as (hub, routes):
        for size in (SIZES[0], SIZES[-1]) if is_quick else SIZES:
            running = RunningFleet(size)
            began_s = time.process_time()
            sent = [running.run(1.0) for _ in range(20)]
            table = running.fleet.table()
            own = {
                "machine_core_share": (time.process_time() - began_s) / len(sent),
                "full_bytes_s": float(num_bytes([table])),
                "changes_bytes_s": sum(map(num_bytes, sent)) / len(sent),
                "full_core_share": core_share(hub, routes, [[table]] * num_seconds),
                "changes_core_share": core_share(hub, routes, sent[:num_seconds]),
            }
            burst = running.publish(1)
            began_s = time.process_time()
            send(hub, routes, burst)
            own["publication_cpu_s"] = time.process_time() - began_s
            own["publication_messages"] = float(len(burst))
            own["publication_bytes"] = float(num_bytes(burst))
            figures |= {f"fleet_of_{size}.{name}": value for name, value in own.items()}
        figures["fleet.num_unsent"] = float(hub.num_unsent)
    return figures


def main() -> None:
    """Receive for some workers, until stdin is closed."""
    address, first, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    dialers = [Dialer(address, f"worker-{first + number}") for number in range(count)]
    poller = zmq.Poller()
    poller.register(sys.stdin.fileno(), zmq.POLLIN)
    for each in dialers:
        each.send(Packet(WorkerLeft("worker", "", 1, 0.0)))
        poller.register(each.socket, zmq.POLLIN)
    by_socket = {each.socket: each for each in dialers}
    while True:
        for socket, _ in poller.poll():
            if isinstance(socket, int):
                return
            by_socket[socket].socket.recv_multipart()


if __name__ == "__main__":
    main()
