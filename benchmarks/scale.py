"""Limits of one router: 10,000 workers' heartbeats, a million queued rollouts, fleet tables.

    python -m benchmarks.scale [--quick] [--json] [--check] [--only groups,fleet,mesh]

The router's own scheduler in this process receives the messages that real peers send, on a clock
that is advanced by hand: CPU and memory are measured without sockets (with them, see
`benchmarks.serving --only router`). docs/internals/scale.md draws the conclusions.
`SyntheticTraffic` also serves tests: clients ask, workers run, some vanish, and messages arrive
late or twice.

- A quick run has as many workers and as long a queue as a full one, but a fifth of the duration.
- Every requested group ends; after `rest` no peer and no group is left.
"""

import gc
import random
import time
from collections import deque
from collections.abc import Callable
from statistics import linear_regression

import psutil

from benchmarks.lib.fleet_feed import measure_fleet
from benchmarks.lib.fleet_mesh import measure_router
from benchmarks.lib.report import Goal, parser, report
from rollmesh.core.config import RouterConfig
from rollmesh.core.heap import Heap
from rollmesh.core.ids import GroupId
from rollmesh.serve.router.group_scheduler import GroupScheduler
from rollmesh.serve.router.status import entries, status_of
from rollmesh.wire.fleet import FleetChanged
from rollmesh.wire.frames import Buffer, Packet, decode, encode
from rollmesh.wire.machine import Received, Send, Ticked
from rollmesh.wire.messages import (
    AnyMessage,
    AskGroup,
    CancelGroup,
    CancelRun,
    ClientBeat,
    ClientHello,
    ClientLeft,
    GroupDelivered,
    GroupFailed,
    GroupMoved,
    GroupReturned,
    GroupStarted,
    GroupState,
    HeldGroup,
    RunGroup,
    WorkerBeat,
    WorkerHello,
    WorkerLeft,
)

NUM_SIM_CLIENTS, NUM_SIM_WORKERS = 4, 16
SIM_SLOTS, SIM_GROUP = 64, 4
WINDOW = 400
"""Groups in progress; all slots are 256 groups."""
ASK_BYTES = 1000
TURNS_PER_BEAT = 2
TURNS_PER_LOSS, TURNS_PER_NEW_CLIENT = 8, 20
LONGEST_S = 3600.0
"""Deadline of a group."""
SILENCE_S = LONGEST_S + 100.0
"""Seconds after which a router has forgotten silent peers and its timers for ended groups."""
ENDED = (GroupState.DONE, GroupState.FAILED, GroupState.CANCELLED)


class WorkerPeer:
    """The state of one worker process."""

    def __init__(self, name: str, started_s: float) -> None:
        self.name = name
        self.started_s = started_s
        self.runs: dict[GroupId, int] = {}
        """Attempts by group."""


class SyntheticTraffic:
    """A router's scheduler with clients and workers; `num_ended` of `num_asked` groups have
    ended.
    """

    def __init__(self, seed: int = 0) -> None:
        self.group_scheduler = GroupScheduler(RouterConfig(), 0.0)
        self.num_asked = self.num_ended = 0
        self._now_s = 10.0
        self._beat_s = RouterConfig().beat_s
        self._random = random.Random(seed)
        self._num_turns = self._num_names = 0
        self._clients: list[str] = []
        self._workers: dict[str, WorkerPeer] = {}
        self._open: dict[GroupId, str] = {}
        """Client by group."""
        self._sends: deque[Send] = deque()

    def run(self, num_groups: int) -> None:
        """Ask for `num_groups` more, and take turns until all have ended."""
        while len(self._clients) < NUM_SIM_CLIENTS:
            self._clients.append(self._new_client())
        while len(self._workers) < NUM_SIM_WORKERS:
            self._new_worker()
        until = self.num_asked + num_groups
        while self.num_asked < until or self._open:
            self._turn(until)

    def rest(self) -> None:
        """Let all peers leave and the router forget them; `run` creates new ones."""
        for client_id in self._clients:
            self._send(client_id, ClientLeft(client_id))
        for worker in self._workers.values():
            self._send(worker.name, WorkerLeft(worker.name, "the end", 1, worker.started_s))
        self._clients.clear()
        self._workers.clear()
        end_s = self._now_s + SILENCE_S
        while self._now_s < end_s:
            self._now_s += self._beat_s
            self.group_scheduler.step(Ticked(), self._now_s)
        self._sends.clear()

    def _turn(self, until: int) -> None:
        self._num_turns += 1
        while self.num_asked < until and len(self._open) < WINDOW:
            self._ask()
        for worker in self._workers.values():
            self._work(worker)
        if self._num_turns % TURNS_PER_BEAT == 0:
            self._beat()
        if self._num_turns % TURNS_PER_LOSS == 0:
            self._lose_worker()
        if self._num_turns % TURNS_PER_NEW_CLIENT == 0:
            self._change_client()
        self._now_s += self._beat_s / TURNS_PER_BEAT
        self._sends += self.group_scheduler.step(Ticked(), self._now_s)
        self._deliver()

    def _ask(self) -> None:
        client_id = self._clients[self.num_asked % NUM_SIM_CLIENTS]
        group_id = GroupId("r7f3a9c1", self.num_asked)
        self.num_asked += 1
        self._open[group_id] = client_id
        self._send_ask(group_id)
        chance = self._random.random()
        if chance < 0.02:
            self._send_ask(group_id)
        elif chance < 0.03:
            self._send(client_id, CancelGroup(group_id, "no longer wanted"))
        self._deliver()

    def _send_ask(self, group_id: GroupId) -> None:
        client_id = self._open[group_id]
        deadline_s = LONGEST_S if group_id.seq % 3 == 0 else 0.0
        sink = "tcp://127.0.0.1:40000"
        ask = AskGroup(group_id, client_id, "bench", SIM_GROUP, sink, 0, 0, deadline_s)
        self._send(client_id, ask, bytes(ASK_BYTES))

    def _work(self, worker: WorkerPeer) -> None:
        """End some of the worker's groups; a few are reported twice, or returned."""
        for group_id, attempt in list(worker.runs.items()):
            chance = self._random.random()
            if chance < 0.5:
                continue
            del worker.runs[group_id]
            if chance < 0.51:
                self._send(worker.name, GroupReturned(group_id, attempt, "no room"))
                continue
            for _ in range(2 if chance < 0.53 else 1):
                self._send(worker.name, GroupDelivered(group_id, attempt))

    def _beat(self) -> None:
        for client_id in self._clients:
            self._send(client_id, ClientBeat(client_id, 1))
        for worker in self._workers.values():
            beat = WorkerBeat(
                worker_id=worker.name,
                num_running=SIM_GROUP * len(worker.runs),
                accepting=True,
                unacked_bytes=0,
                loop_lag_s=0.0,
                rss_bytes=10**8,
                num_finished=1,
                num_calls=1,
                num_tokens=1,
                started_s=worker.started_s,
            )
            self._send(worker.name, beat)

    def _lose_worker(self) -> None:
        """Remove a worker for good, or restart it under its name, or let it report all its groups
        again.
        """
        name = self._random.choice(list(self._workers))
        worker = self._workers.pop(name)
        outcome = self._random.randrange(3)
        if outcome == 0:
            self._new_worker()
        elif outcome == 1:
            self._new_worker(name)
        else:
            self._workers[name] = worker
            held = tuple(HeldGroup(each, attempt, False) for each, attempt in worker.runs.items())
            self._greet(worker, held)

    def _change_client(self) -> None:
        """Replace a client; its groups end."""
        at = self._random.randrange(NUM_SIM_CLIENTS)
        left, self._clients[at] = self._clients[at], self._new_client()
        self._send(left, ClientLeft(left))
        gone = [group_id for group_id, client_id in self._open.items() if client_id == left]
        for group_id in gone:
            self._end(group_id)

    def _new_client(self) -> str:
        self._num_names += 1
        client_id = f"client-{self._num_names}"
        self.group_scheduler.step(Received(client_id.encode(), ClientHello(client_id)), self._now_s)
        return client_id

    def _new_worker(self, name: str = "") -> None:
        self._num_names += 1
        worker = WorkerPeer(name or f"worker-{self._num_names}", self._now_s)
        self._workers[worker.name] = worker
        self._greet(worker, ())

    def _greet(self, worker: WorkerPeer, held: tuple[HeldGroup, ...]) -> None:
        hello = WorkerHello(
            worker.name, "bench", SIM_SLOTS, 1, "elsewhere", held, started_s=worker.started_s
        )
        self._send(worker.name, hello)

    def _send(self, name: str, message: AnyMessage, body: bytes = b"") -> None:
        self._sends += self.group_scheduler.step(
            Received(name.encode(), message, body), self._now_s
        )

    def _deliver(self) -> None:
        """Deliver the router's messages; those to peers that have left are lost."""
        while self._sends:
            send = self._sends.popleft()
            worker = self._workers.get(send.route.decode())
            match send.message:
                case RunGroup(group_id, attempt) if worker:
                    if group_id not in worker.runs:
                        worker.runs[group_id] = attempt
                        self._send(worker.name, GroupStarted(group_id, attempt))
                case CancelRun(group_id) if worker:
                    worker.runs.pop(group_id, None)
                case GroupFailed(group_id):
                    self._end(group_id)
                case GroupMoved(group_id, state) if state in ENDED:
                    self._end(group_id)
                case _:
                    pass

    def _end(self, group_id: GroupId) -> None:
        self.num_ended += self._open.pop(group_id, None) is not None


NUM_WORKERS = 10_000
SLOTS = 64
GROUP = 16
NUM_CLIENTS = 4
NUM_QUEUED = 1_000_000 // GROUP
"""Number of groups that wait while all workers are full."""
TICKS_PER_BEAT = 2
START_S = 10.0
"""Seconds within which all groups begin."""
LONG_RUN_GROUPS = 250_000
"""Number of groups, of four rollouts each: a million rollouts."""
LONG_RUN_LOOKS = 25
MB = 1e6
CASES = ("groups", "fleet", "mesh")

GOALS = [
    Goal("beats.core_share", "<=", 0.5),
    Goal("queue.bytes_per_group_over_its_ask", "<=", 2000.0),
    Goal("groups.us_with_10k_workers_vs_one", "<=", 2.0),
    Goal("long_run.mb_per_100k_groups", "<=", 1.0),
    Goal("long_run.entries_at_rest", "<=", 0.0),
    Goal("fleet_of_512.machine_core_share", "<=", 0.05),
    Goal("fleet_of_512.changes_bytes_s", "<=", 2000.0),
    Goal("fleet_of_512.publication_bytes", "<=", 200_000.0),
    Goal("fleet.num_unsent", "<=", 0.0),
]


class SimulatedMesh:
    """A scheduler and its peers' frames; `now_s` is the manual clock."""

    def __init__(self, num_workers: int) -> None:
        self.now_s = 100.0
        config = RouterConfig(max_queued_groups=10 * NUM_QUEUED)
        self.beat_s = config.beat_s
        self.group_scheduler = GroupScheduler(config, 0.0)
        self.num_asked = 0
        self._names = [f"worker-{number}" for number in range(num_workers)]
        for number in range(NUM_CLIENTS):
            self._receive(f"client-{number}".encode(), ClientHello(f"client-{number}"))
        for name in self._names:
            self._receive(name.encode(), WorkerHello(name, "bench", SLOTS, 1, "elsewhere"))

    def ask(self, num_groups: int) -> list[Send]:
        """Ask for groups of all clients in turns; return the messages that the router sends."""
        sends: list[Send] = []
        for _ in range(num_groups):
            client = f"client-{self.num_asked % NUM_CLIENTS}"
            ask = AskGroup(
                GroupId("r7f3a9c1", self.num_asked), client, "bench", GROUP, "tcp://127.0.0.1:40000"
            )
            sends += self._receive(client.encode(), ask, bytes(ASK_BYTES))
            self.num_asked += 1
        return sends

    def start(self, runs: list[Send]) -> None:
        """Start these groups on their workers, each at another time."""
        for send in runs:
            assert isinstance(send.message, RunGroup)
            self.now_s += START_S / len(runs)
            self._receive(send.route, GroupStarted(send.message.group_id, send.message.attempt))

    def finish(self, runs: list[Send], num_groups: int) -> None:
        """Start and deliver groups; each that ends makes room for another."""
        done = 0
        while done < num_groups:
            following: list[Send] = []
            for send in runs[: num_groups - done]:
                assert isinstance(send.message, RunGroup)
                group_id, attempt = send.message.group_id, send.message.attempt
                self._receive(send.route, GroupStarted(group_id, attempt))
                following += self._receive(send.route, GroupDelivered(group_id, attempt))
                done += 1
            runs = runs_in(following)

    def beat(self, num_beats: int) -> float:
        """Send `num_beats` heartbeats of all workers; return CPU seconds of ticks and status."""
        frames = [encode(Packet(beat_of(name), "i1")) for name in self._names]
        ticks_s = 0.0
        for _ in range(num_beats):
            for name, each in zip(self._names, frames, strict=True):
                self._take(name.encode(), each)
            for _ in range(TICKS_PER_BEAT):
                self.now_s += self.beat_s / TICKS_PER_BEAT
                began_s = time.process_time()
                self.group_scheduler.step(Ticked(), self.now_s)
                status_of("i1", self.group_scheduler, FleetChanged(0, ()), {})
                ticks_s += time.process_time() - began_s
        return ticks_s

    def _receive(
        self, route: bytes, message: AskGroup | WorkerHello | object, body: bytes = b""
    ) -> list[Send]:
        return self._take(route, encode(Packet(message, "i1", body)))  # type: ignore[arg-type]

    def _take(self, route: bytes, frames: list[Buffer]) -> list[Send]:
        """Step as the router's shell does, without the socket."""
        packet = decode(frames)
        received = Received(route, packet.message, packet.body, packet.router)
        sends = self.group_scheduler.step(received, self.now_s)
        for send in sends:
            encode(Packet(send.message, "i1", send.body))
        return sends


def beat_of(name: str) -> WorkerBeat:
    """Return the heartbeat of a full worker."""
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
    """Return the groups that workers are to run."""
    return [send for send in sends if isinstance(send.message, RunGroup)]


def cpu_us(work: Callable[[], object], number: int) -> float:
    """Return the CPU time of `work`, divided by `number`."""
    began_s = time.process_time()
    work()
    return 1e6 * (time.process_time() - began_s) / number


def long_run(num_groups: int) -> dict[str, float]:
    """Return the memory and the entries that are left after `num_groups` groups.

    The first fifth fills what is bounded: tombstones, timers, workers that are not yet forgotten.
    """
    traffic, own = SyntheticTraffic(), psutil.Process()
    points: list[tuple[int, int]] = []
    for _ in range(LONG_RUN_LOOKS):
        traffic.run(num_groups // LONG_RUN_LOOKS)
        gc.collect()
        Heap().trim()
        points.append((traffic.num_asked, own.memory_info().rss))
    assert traffic.num_ended == traffic.num_asked
    filled = points[LONG_RUN_LOOKS // 5 :]
    slope = linear_regression(*zip(*filled, strict=True)).slope
    traffic.rest()
    return {
        "long_run.rollouts": float(SIM_GROUP * traffic.num_asked),
        "long_run.workers_lost": float(traffic.group_scheduler.table.num["workers_lost"]),
        "long_run.rss_mb": points[-1][1] / MB,
        "long_run.mb_per_100k_groups": slope * 100_000 / MB,
        "long_run.entries_at_rest": float(sum(entries(traffic.group_scheduler).values())),
    }


def measure(is_quick: bool) -> dict[str, float]:
    """Return all figures."""
    # First, while nothing else changes this process's memory.
    figures = long_run(LONG_RUN_GROUPS // 5 if is_quick else LONG_RUN_GROUPS)
    rss = psutil.Process().memory_info
    before = rss().rss
    mesh = SimulatedMesh(NUM_WORKERS)
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
    assert len(mesh.group_scheduler.table.queue) == NUM_QUEUED
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
    number = 10_000 if is_quick else 30_000
    figures["groups.us"] = cpu_us(lambda: mesh.finish(runs, number), number)
    lone = SimulatedMesh(1)
    lone_runs = runs_in(lone.ask(number + SLOTS))
    figures["groups.us_with_one_worker"] = cpu_us(lambda: lone.finish(lone_runs, number), number)
    figures["groups.us_with_10k_workers_vs_one"] = (
        figures["groups.us"] / figures["groups.us_with_one_worker"]
    )
    figures["rss_mb"] = rss().rss / MB
    return figures


def main() -> None:
    """Measure and report."""
    options = parser("scale", CASES).parse_args()
    cases = options.only or CASES
    gc.freeze()
    figures = measure(options.quick) if "groups" in cases else {}
    if "fleet" in cases:
        figures |= measure_fleet(is_quick=options.quick)
    if "mesh" in cases:
        figures |= measure_router(is_quick=options.quick)
    report(options, figures, [goal for goal in GOALS if goal.figure in figures])


if __name__ == "__main__":
    main()
