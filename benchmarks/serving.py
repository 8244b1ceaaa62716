"""The cost and capacity of serving: router, workers, client, sink, beside a baseline and a peer.

    python -m benchmarks.serving [--only CASE,...] [--quick] [--json] [--check]

    echo        1 KB requests, answers of 20 turns x 200 tokens; beside a bare ROUTER that carries
                the same bytes and, if installed, verifiers' env server
    sleep       rollouts of 2 s, 2,000 in flight over 4 workers
    burn        rollouts of 5 ms of CPU over 2 workers
    burst       400 rollouts of 2 s at once over 2 workers
    turns       answers of 100 turns against 20: prepared ones, and by agents that stream
    router      one router process: whole groups, bare requests, and groups beside a peer that
                never reads

`<case>.cpu_us.<role>` is a role's CPU per group, all its processes together; `vs_floor` and
`vs_verifiers` are ratios of groups/s.

- A ratio is between consecutive laps; a figure is the median over the rounds, CPU the minimum. The
  first round warms up and is not counted.
- No goal is easier or absent under --quick; `--only` judges the goals of its cases.
"""

import os
import sys
import tempfile
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Self

import msgspec

from benchmarks.lib.corpus import STREAM_TOKENS, model_folder
from benchmarks.lib.report import Goal, parser, report
from benchmarks.lib.servers import ServerProcess, start_engine
from benchmarks.lib.serving_floor import Floor
from benchmarks.lib.serving_floor import RoundTripTimes as FloorLap
from benchmarks.lib.serving_mesh import GroupTimes, LocalMesh, MeshShape, start_peers
from rollmesh.core.ids import GroupId
from rollmesh.core.types import Task
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

ASK_BYTES = 1000
NUM_TURNS = 20
WINDOW = 64
SLEEP_S, BURN_S = 2.0, 0.005
PREPARED = MeshShape(env="prepared", is_prepared=True)
ENVS = "benchmarks.lib.serving_worker"


class ServingBench:
    """Parameters that all cases share, and the figures so far."""

    def __init__(self, options: Namespace, stack: ExitStack) -> None:
        self.is_quick: bool = options.quick
        self.figures: dict[str, float] = {}
        self.model = model_folder()
        self.folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        self.rounds = 3 if options.quick else 7

    def sized(self, number: int) -> int:
        """Scale `number`, that of a full run."""
        return number // 4 if self.is_quick else number

    @contextmanager
    def mesh(self, shape: MeshShape) -> Iterator[LocalMesh]:
        """Start a fresh mesh."""
        with tempfile.TemporaryDirectory(dir=self.folder) as folder:
            mesh = LocalMesh(shape, self.model, Path(folder))
            try:
                yield mesh
            finally:
                mesh.end()

    def note(self, what: str, figures: dict[str, float]) -> None:
        """Record figures under a prefix."""
        self.figures |= {f"{what}.{name}": value for name, value in figures.items()}


class _Round(msgspec.Struct):
    """Consecutive laps."""

    ours: GroupTimes
    alone: GroupTimes
    """Laps with one group in flight."""
    floor: FloorLap
    floor_alone: FloorLap
    peers_per_s: list[float]


def prepared_task(num_turns: int) -> Task:
    """Return a task of 1 KB."""
    return Task(id="echo", data={"num_turns": num_turns, "padding": "x" * ASK_BYTES})


def echo(bench: ServingBench) -> None:
    """Whole groups through router, worker, sink and journal; the peers' laps are of similar
    length.
    """
    rounds: list[_Round] = []
    with ExitStack() as stack:
        mesh = stack.enter_context(bench.mesh(PREPARED))
        answer_bytes = mesh.lap(WINDOW, WINDOW, prepared_task(NUM_TURNS)).num_bytes
        floor = Floor(mesh.cores, PREPARED.num_workers, answer_bytes)
        stack.callback(floor.end)
        peers = start_peers()
        for peer in peers:
            stack.callback(peer.end)
        for _ in range(1 + bench.rounds):
            shape = {"turns": NUM_TURNS, "tokens": STREAM_TOKENS, "padding": ASK_BYTES}
            rounds.append(
                _Round(
                    ours=mesh.lap(bench.sized(6_000), WINDOW, prepared_task(NUM_TURNS)),
                    alone=mesh.lap(bench.sized(1_200), 1, prepared_task(NUM_TURNS)),
                    floor=floor.lap(bench.sized(30_000), WINDOW, b"x" * ASK_BYTES),
                    floor_alone=floor.lap(bench.sized(3_000), 1, b"x" * ASK_BYTES),
                    peers_per_s=[p.lap(bench.sized(2_400), WINDOW, shape) for p in peers],
                )
            )
    _note_echo(bench, rounds[1:], answer_bytes)


def _note_echo(bench: ServingBench, rounds: list[_Round], answer_bytes: int) -> None:
    bench.note("echo", {
        "answer_kb": answer_bytes / 1e3,
        "groups_per_s": median(each.ours.per_s for each in rounds),
        "floor.trips_per_s": median(each.floor.per_s for each in rounds),
        "vs_floor": median(each.ours.per_s / each.floor.per_s for each in rounds),
        "alone.p50_us": median(each.alone.p50_us for each in rounds),
        "floor.alone.p50_us": median(each.floor_alone.p50_us for each in rounds),
        "alone.p50_vs_floor": median(e.alone.p50_us / e.floor_alone.p50_us for e in rounds),
        "floor.cpu_us.router": min(each.floor.router_cpu_us for each in rounds),
    })  # fmt: skip
    for role in rounds[0].ours.cpu_s:
        # Other work on the machine can only add to CPU, so the minimum is nearest.
        bench.note("echo.cpu_us", {role: min(each.ours.cpu_us(role) for each in rounds)})
        bench.note("echo.alone.cpu_us", {role: min(e.alone.cpu_us(role) for e in rounds)})
    if rounds[0].peers_per_s:
        one, two = zip(*[each.peers_per_s for each in rounds], strict=True)
        bench.note("echo", {
            "verifiers.one_worker_per_s": median(one),
            "verifiers.two_workers_per_s": median(two),
            "vs_verifiers": median(e.ours.per_s / max(e.peers_per_s) for e in rounds),
        })  # fmt: skip


def sleep(bench: ServingBench) -> None:
    """2,000 in flight, each requested again as soon as it is taken; ideal are 1,000/s."""
    window = 2_000
    env = f"{ENVS}:SleepEnv"
    shape = MeshShape(env=env, settings={"seconds": SLEEP_S}, num_workers=4, slots=window // 4)
    with bench.mesh(shape) as mesh:
        lap = mesh.lap(window * (5 if bench.is_quick else 11), window, Task(id="sleep"))
    # The first wave is requested at once, and nothing follows the last. The ideal has both waves
    # too, so the rate is that of the whole lap.
    num = len(lap.groups_s)
    bench.note("sleep", {
        "groups_per_s": lap.per_s,
        "of_ideal": lap.per_s / (window / SLEEP_S),
        "cpu_us": 1e6 * sum(lap.cpu_s.values()) / num,
        "p99_s": sorted(lap.groups_s)[int(0.99 * num)],
    })  # fmt: skip


def burn(bench: ServingBench) -> None:
    """5 ms of CPU each: the share that two workers use of the time that router, client and sink
    leave.
    """
    shape = MeshShape(env=f"{ENVS}:BurnEnv", settings={"seconds": BURN_S})
    shares, rates = [], []
    with bench.mesh(shape) as mesh:
        for _ in range(1 + bench.rounds):
            lap = mesh.lap(bench.sized(2_000), WINDOW, Task(id="burn"))
            others_s = sum(lap.cpu_s[role] for role in ("router", "client", "sink"))
            left_s = min(len(mesh.cores), 2) * lap.wall_s - others_s
            shares.append(BURN_S * len(lap.groups_s) / left_s)
            rates.append(lap.per_s)
    bench.note("burn", {"groups_per_s": median(rates[1:]), "of_cores": median(shares[1:])})


def burst(bench: ServingBench) -> None:
    """400 at once; the first burst includes imports and is not counted."""
    shape = MeshShape(env=f"{ENVS}:SleepEnv", settings={"seconds": SLEEP_S})
    with bench.mesh(shape) as mesh:
        laps = [mesh.lap(400, 400, Task(id="burst")) for _ in range(1 + bench.rounds // 2)]
    bench.note("burst", {"wall_s": median(lap.wall_s for lap in laps[1:])})


def turns(bench: ServingBench) -> None:
    """Cost of 100 turns relative to 20, by the CPU of all roles together."""
    num_long = bench.sized(600)
    ratios = []
    with bench.mesh(PREPARED) as mesh:
        for _ in range(1 + bench.rounds):
            short = mesh.lap(2 * num_long, WINDOW, prepared_task(NUM_TURNS))
            long = mesh.lap(num_long, WINDOW, prepared_task(5 * NUM_TURNS))
            ratios.append((_cpu_us(long) / _cpu_us(short), short.per_s / long.per_s))
    by_cpu, by_rate = zip(*ratios[1:], strict=True)
    bench.note("turns", {"100_vs_20": median(by_cpu), "100_vs_20_by_rate": median(by_rate)})


def streamed(bench: ServingBench) -> None:
    """Cost with agents that stream their calls from a canned engine, each in a new session."""
    engine = start_engine(bench.model)
    num_long = max(4, bench.sized(16))
    with ExitStack() as stack:
        stack.callback(engine.end)
        cpu_us = []
        for num_turns in (NUM_TURNS, 5 * NUM_TURNS):
            settings = {"num_turns": num_turns}
            address = engine.ready.address
            shape = MeshShape(env=f"{ENVS}:StreamEnv", settings=settings, engine=address)
            mesh = stack.enter_context(bench.mesh(shape))
            mesh.lap(2, 2, Task(id="warm"))
            num = num_long * 5 * NUM_TURNS // num_turns
            cpu_us.append(_cpu_us(mesh.lap(num, num_long, Task(id="stream"))))
    bench.note("streamed", {"20_cpu_ms": cpu_us[0] / 1e3, "100_cpu_ms": cpu_us[1] / 1e3})
    bench.note("streamed", {"100_vs_20": cpu_us[1] / cpu_us[0]})


def _cpu_us(lap: GroupTimes) -> float:
    return sum(lap.cpu_us(role) for role in lap.cpu_s)


BODY = b"x" * 600
GROUP = 16
ROUTER_WINDOW = 1000
"""Asks in flight; fewer than a queue holds."""


def router(bench: ServingBench) -> None:
    """Measure the router alone."""
    num_groups = bench.sized(20_000)
    with Alone(str(bench.folder)) as alone:
        alone.run_groups("r0", num_groups // 8)
        alone.measure("groups", lambda: alone.run_groups("r1", num_groups))
        rss_mb = alone.child.rss_mb()
        alone.run_groups("r3", num_groups)
        growth_mb = alone.child.rss_mb() - rss_mb
        alone.figures["mb_per_100k_rollouts"] = growth_mb * 100_000 / (GROUP * num_groups)
        alone.measure("repeated_asks", lambda: alone.repeat_asks(2 * num_groups))
        unread = alone.flood_unread_peer()
        alone.measure("groups_beside_an_unread_peer", lambda: alone.run_groups("r2", num_groups))
        unread.close()
        bench.note("router", alone.figures | {"rss_mb": alone.child.rss_mb()})


class Alone:
    """A router process, a client and a worker."""

    def __init__(self, folder: str) -> None:
        self.figures: dict[str, float] = {}
        argv = [sys.executable, "-m", "rollmesh.cli.main", "router"]
        argv += ["--set", f"run.folder={folder}", "--set", "router.missed_beats=1000"]
        self.child = ServerProcess(argv, os.sched_getaffinity(0))
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
        """Record the rate of `work`, which returns the number of its operations."""
        cpu_s, began_s = self.child.cpu_s(), perf_counter()
        number = work()
        self.figures[f"{what}.per_s"] = number / (perf_counter() - began_s)
        self.figures[f"{what}.cpu_us"] = 1e6 * (self.child.cpu_s() - cpu_s) / number

    def run_groups(self, run_id: str, num_groups: int) -> int:
        """Ask, run, start, deliver, done: seven messages per group."""
        num_asked = num_done = 0
        while num_done < num_groups:
            while num_asked < min(num_groups, num_done + ROUTER_WINDOW):
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
        """Repeat asks that wait in the queue, each after its answer: one message in, one out."""
        num_sent = num_answers = 0
        while num_answers < num_asks:
            while num_sent < min(num_asks, num_answers + ROUTER_WINDOW):
                asked = ask("waiting", num_sent % ROUTER_WINDOW, env="not held")
                self.client.send(Packet(asked, body=BODY))
                num_sent += 1
            wait([self.client], None, 1.0)
            num_answers += sum(1 for _ in self.client.receive())
        return num_answers

    def flood_unread_peer(self) -> Dialer:
        """Return a peer that sends far more requests than it reads answers."""
        peer = Dialer(self.address, "unread")
        for _ in range(50_000):
            while not peer.send(Packet(ClientHello("unread"))):
                self.repeat_asks(1)
        return peer


def ask(run_id: str, seq: int, env: str = "bench") -> AskGroup:
    """A group of GROUP samples."""
    return AskGroup(GroupId(run_id, seq), "client", env, GROUP, "tcp://127.0.0.1:1")


CASES: dict[str, Callable[[ServingBench], None]] = {
    "router": router,
    "echo": echo,
    "sleep": sleep,
    "burn": burn,
    "burst": burst,
    "turns": turns,
    "streamed": streamed,
}

GOALS = [
    Goal("echo.vs_floor", ">=", 0.15),
    Goal("echo.cpu_us.router", "<=", 60.0),
    Goal("echo.alone.p50_vs_floor", "<=", 3.0),
    Goal("sleep.of_ideal", ">=", 0.95),
    Goal("burn.of_cores", ">=", 0.85),
    Goal("burst.wall_s", "<=", 2.5),
    Goal("turns.100_vs_20", "<=", 6.0),
    Goal("streamed.100_vs_20", "<=", 6.0),
]
PEER_GOAL = Goal("echo.vs_verifiers", ">=", 3.0)


def judged(cases: Sequence[str], figures: dict[str, float]) -> list[Goal]:
    """Return the goals of these cases; that against the peer only if it is installed."""
    goals = [*GOALS, PEER_GOAL] if PEER_GOAL.figure in figures else GOALS
    return [goal for goal in goals if goal.figure.partition(".")[0] in cases]


def main() -> None:
    """Measure and report."""
    options = parser("serving", CASES).parse_args()
    cases = options.only or [*CASES]
    with ExitStack() as stack:
        bench = ServingBench(options, stack)
        for name in cases:
            CASES[name](bench)
        report(options, bench.figures, judged(cases, bench.figures))


if __name__ == "__main__":
    main()
