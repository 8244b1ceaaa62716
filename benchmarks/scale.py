"""How large one router may become: 10,000 workers' beats, a million queued rollouts, and as many
that come and go.

    python -m benchmarks.scale [--quick] [--json] [--check]

The router's own ledger in this process, fed with the frames that real peers send, on a clock that
is turned by hand: what is measured is its CPU and its memory, without sockets (what those cost is
`python -m benchmarks.serving --only router`). docs/explanation/scale.md says what follows.
Invariant: a quick
run has as many workers and as long a queue as a full one, but a fifth of the life. Driven by `make
bench`.
"""

import gc
import time
from collections.abc import Callable
from statistics import linear_regression

import psutil

from benchmarks._ledger_life import GROUP as GROUP_OF_FOUR
from benchmarks._ledger_life import Life
from benchmarks.lib.report import Goal, parser, report
from rollmesh.core.config import RouterConfig
from rollmesh.core.heap import Heap
from rollmesh.core.ids import GroupId
from rollmesh.serve.router.group_scheduler import GroupScheduler
from rollmesh.serve.router.status import entries, status_of
from rollmesh.wire.fleet import EnginePhase, EngineRow, FleetChanged
from rollmesh.wire.frames import Buffer, Packet, decode, encode
from rollmesh.wire.machine import Received, Send, Ticked
from rollmesh.wire.messages import (
    AskGroup,
    ClientHello,
    GroupDelivered,
    GroupStarted,
    RunGroup,
    WorkerBeat,
    WorkerHello,
)

NUM_WORKERS = 10_000
SLOTS = 64
GROUP = 16
NUM_CLIENTS = 4
NUM_QUEUED = 1_000_000 // GROUP
"""Groups that wait while all workers are full."""
ASK_BYTES = 1000
TICKS_PER_BEAT = 2
START_S = 10.0
"""In so many seconds all that runs has begun."""
LIFE_GROUPS = 250_000
"""A million rollouts in groups of four."""
LIFE_LOOKS = 25
MB = 1e6

GOALS = [
    Goal("beats.core_share", "<=", 0.5),
    Goal("queue.bytes_per_group_over_its_ask", "<=", 2000.0),
    Goal("groups.us_with_10k_workers_vs_one", "<=", 2.0),
    Goal("life.mb_per_100k_groups", "<=", 1.0),
    Goal("life.entries_at_rest", "<=", 0.0),
]


class Mesh:
    """A ledger and its peers' frames; `now_s` is the hand-turned clock."""

    def __init__(self, num_workers: int) -> None:
        self.now_s = 100.0
        config = RouterConfig(max_queued_groups=10 * NUM_QUEUED)
        self.beat_s = config.beat_s
        self.ledger = GroupScheduler(config, 0.0)
        self.num_asked = 0
        self._names = [f"worker-{number}" for number in range(num_workers)]
        for number in range(NUM_CLIENTS):
            self._hear(f"client-{number}".encode(), ClientHello(f"client-{number}"))
        for name in self._names:
            self._hear(name.encode(), WorkerHello(name, "bench", SLOTS, 1, "elsewhere"))

    def ask(self, num_groups: int) -> list[Send]:
        """So many asks, of all clients in turns; what was sent about them."""
        sends: list[Send] = []
        for _ in range(num_groups):
            client = f"client-{self.num_asked % NUM_CLIENTS}"
            ask = AskGroup(
                GroupId("r7f3a9c1", self.num_asked), client, "bench", GROUP, "tcp://127.0.0.1:40000"
            )
            sends += self._hear(client.encode(), ask, bytes(ASK_BYTES))
            self.num_asked += 1
        return sends

    def start(self, runs: list[Send]) -> None:
        """Workers begin these, one after the other: so each is confirmed at another time."""
        for send in runs:
            assert isinstance(send.message, RunGroup)
            self.now_s += START_S / len(runs)
            self._hear(send.route, GroupStarted(send.message.group_id, send.message.attempt))

    def finish(self, runs: list[Send], num_groups: int) -> None:
        """The next groups start and are delivered; each that ends makes room for another."""
        done = 0
        while done < num_groups:
            following: list[Send] = []
            for send in runs[: num_groups - done]:
                assert isinstance(send.message, RunGroup)
                group_id, attempt = send.message.group_id, send.message.attempt
                self._hear(send.route, GroupStarted(group_id, attempt))
                following += self._hear(send.route, GroupDelivered(group_id, attempt))
                done += 1
            runs = runs_in(following)

    def beat(self, num_beats: int) -> float:
        """All workers beat so often, and the clock goes on; CPU seconds of ticks and status."""
        frames = [encode(Packet(beat_of(name), "i1")) for name in self._names]
        ticks_s = 0.0
        for _ in range(num_beats):
            for name, each in zip(self._names, frames, strict=True):
                self._take(name.encode(), each)
            for _ in range(TICKS_PER_BEAT):
                self.now_s += self.beat_s / TICKS_PER_BEAT
                began_s = time.process_time()
                self.ledger.step(Ticked(), self.now_s)
                status_of("i1", self.ledger, FleetChanged(0, ()), {})
                ticks_s += time.process_time() - began_s
        return ticks_s

    def _hear(
        self, route: bytes, message: AskGroup | WorkerHello | object, body: bytes = b""
    ) -> list[Send]:
        return self._take(route, encode(Packet(message, "i1", body)))  # type: ignore[arg-type]

    def _take(self, route: bytes, frames: list[Buffer]) -> list[Send]:
        """As the router's shell does it, up to the socket."""
        packet = decode(frames)
        received = Received(route, packet.message, packet.body, packet.router)
        sends = self.ledger.step(received, self.now_s)
        for send in sends:
            encode(Packet(send.message, "i1", send.body))
        return sends


def beat_of(name: str) -> WorkerBeat:
    """A full worker's."""
    return WorkerBeat(
        worker_id=name,
        num_running=SLOTS,
        loop_lag_s=0.001,
        rss_bytes=10**8,
        accepting=True,
        unacked_bytes=0,
        num_finished=1,
        num_calls=1,
        num_tokens=1,
    )


def runs_in(sends: list[Send]) -> list[Send]:
    """What workers are told to run."""
    return [send for send in sends if isinstance(send.message, RunGroup)]


def cpu_us(work: Callable[[], object], number: int) -> float:
    """CPU of one of so many."""
    began_s = time.process_time()
    work()
    return 1e6 * (time.process_time() - began_s) / number


def live(num_groups: int) -> dict[str, float]:
    """A ledger through which so many groups went: what is left of them.

    The first fifth fills what is bounded: notes, agendas, workers that are not forgotten yet.
    """
    life, own = Life(), psutil.Process()
    points: list[tuple[int, int]] = []
    for _ in range(LIFE_LOOKS):
        life.run(num_groups // LIFE_LOOKS)
        gc.collect()
        Heap().trim()
        points.append((life.num_asked, own.memory_info().rss))
    assert life.num_ended == life.num_asked
    filled = points[LIFE_LOOKS // 5 :]
    slope = linear_regression(*zip(*filled, strict=True)).slope
    life.rest()
    return {
        "life.rollouts": float(GROUP_OF_FOUR * life.num_asked),
        "life.workers_lost": float(life.ledger.table.num["workers_lost"]),
        "life.rss_mb": points[-1][1] / MB,
        "life.mb_per_100k_groups": slope * 100_000 / MB,
        "life.entries_at_rest": float(sum(entries(life.ledger).values())),
    }


def measure(is_quick: bool) -> dict[str, float]:
    """All figures."""
    # First, while nothing else moves this process's memory.
    figures = live(LIFE_GROUPS // 5 if is_quick else LIFE_GROUPS)
    rss = psutil.Process().memory_info
    before = rss().rss
    mesh = Mesh(NUM_WORKERS)
    figures["workers.bytes_each"] = (rss().rss - before) / NUM_WORKERS
    num_running = NUM_WORKERS * SLOTS // GROUP
    runs: list[Send] = []
    figures["asks.us_if_run_at_once"] = cpu_us(
        lambda: runs.extend(mesh.ask(num_running)), num_running
    )
    runs = runs_in(runs)
    mesh.start(runs)
    before = rss().rss
    figures["asks.us_if_queued"] = cpu_us(lambda: mesh.ask(NUM_QUEUED), NUM_QUEUED)
    queued_bytes = rss().rss - before
    assert len(mesh.ledger.table.queue) == NUM_QUEUED
    figures["queue.rollouts"] = float(NUM_QUEUED * GROUP)
    figures["queue.mb"] = queued_bytes / MB
    figures["queue.bytes_per_group_over_its_ask"] = queued_bytes / NUM_QUEUED - ASK_BYTES
    num_beats = 5 if is_quick else 20
    began_s = time.process_time()
    ticks_s = mesh.beat(num_beats)
    spent_s = time.process_time() - began_s
    figures["beats.us_each"] = 1e6 * (spent_s - ticks_s) / (num_beats * NUM_WORKERS)
    figures["beats.tick_ms"] = 1e3 * ticks_s / (num_beats * TICKS_PER_BEAT)
    figures["beats.core_share"] = spent_s / (num_beats * mesh.beat_s)
    rows = tuple(
        EngineRow(f"http://10.0.0.{n}:30000", "i1", EnginePhase.READY, 7) for n in range(100)
    )
    table = Packet(FleetChanged(1, rows), "i1")
    figures["table_of_100_engines.bytes"] = float(sum(len(frame) for frame in encode(table)))
    figures["table_of_100_engines.encode_us"] = cpu_us(
        lambda: [encode(table) for _ in rows], len(rows)
    )
    number = 10_000 if is_quick else 30_000
    figures["groups.us"] = cpu_us(lambda: mesh.finish(runs, number), number)
    lone = Mesh(1)
    lone_runs = runs_in(lone.ask(number + SLOTS))
    figures["groups.us_with_one_worker"] = cpu_us(lambda: lone.finish(lone_runs, number), number)
    figures["groups.us_with_10k_workers_vs_one"] = (
        figures["groups.us"] / figures["groups.us_with_one_worker"]
    )
    figures["rss_mb"] = rss().rss / MB
    return figures


def main() -> None:
    """Measure and report."""
    options = parser("scale").parse_args()
    gc.freeze()
    report(options, measure(options.quick), GOALS)


if __name__ == "__main__":
    main()
