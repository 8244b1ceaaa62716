"""Reaction times of the mesh: a killed worker's group, a cancelled call, Ctrl-C, a cut network.

    python -m benchmarks.reactions [--quick] [--json] [--check] [--only CASE,...]

    worker_death   from SIGKILL of a local worker to the first call of its group from another worker
    cancel         from `RolloutClient.cancel` to the end of the group's last call at the engine
    interrupt      from SIGINT to the end of the last process of `rollmesh demo`
    cut_N_s        from the end of a cut of N seconds to full speed: four train steps, and rollouts
                   of each worker; each link between five hosts in turn
    one_way        the same, after 5 s in which nothing arrives at a host
    latency        from the beginning of 200 ms of latency with 5 % loss to full speed while it
                   lasts, and (after_latency) from its end to full speed
    replaced_host  a host disappears: from the start of its process on another host with the same
                   address to full speed; a process of each kind in turn

- Each of the first three cases is tried 30 times (5 with --quick); median and 99th percentile are
  reported. A cut of 5 s is tried three times on each link, longer ones once; --quick leaves the
  long ones out. Latency is tried six times (twice with --quick), each replaced host three times
  (once).
- Processes are real; the engine of the first two cases is scripted and waits in the middle of every
  turn. The hosts are network namespaces, which only root can make.
- After each case with hosts, nothing may be lost or counted twice; otherwise the benchmark fails.

docs/explanation/faults.md states the goals.
"""

import asyncio
import functools
import itertools
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec
import psutil

from benchmarks.lib.report import Goal, parser, report
from rollmesh.core.config import JournalConfig
from rollmesh.core.ids import GroupId
from rollmesh.core.process import Ready
from rollmesh.core.types import SamplingPolicy, Task
from rollmesh.envs.guess import GuessEnv
from rollmesh.launch.folder import read_pids
from rollmesh.serve.client.client import RolloutClient
from rollmesh.testing.engine import ScriptedEngine
from rollmesh.testing.forwarder import Forwarder
from rollmesh.testing.host_mesh import (
    FIVE_HOSTS,
    LINKS,
    REPLACED_ROLES,
    SLOW_LINKS,
    HostMesh,
)
from rollmesh.testing.model_folder import write_model_folder
from rollmesh.testing.network import HostNetwork
from rollmesh.testing.run_history import why_not_whole
from rollmesh.trainer.models.tiny import TinyShape, texts_of, write_tiny_model

NUM_TRIES, NUM_QUICK_TRIES = 30, 5
NUM_SAMPLES = 4
LOOK_S = 0.002
PATIENCE_S = 60.0
"""Seconds after which a missing reaction ends the benchmark."""
GOALS = [
    Goal("worker_death_p99_s", "<=", 2.0),
    Goal("cancel_p99_s", "<=", 1.0),
    Goal("interrupt_p99_s", "<=", 5.0),
    *(Goal(f"{name}_p99_s", "<=", 10.0) for name in ("cut_5_s", "cut_20_s", "cut_90_s", "one_way")),
    Goal("latency_p99_s", "<=", 20.0),
    Goal("after_latency_p99_s", "<=", 10.0),
    Goal("replaced_host_p99_s", "<=", 10.0),
]
FULL_SPEED_WITHIN_S = 120.0
NUM_MORE = 3
"""Steps in which the last trainer ends the run."""
ROLLMESH = (sys.executable, "-m", "rollmesh.cli.main")


class ProcessMesh:
    """A router and two workers as processes, and a client; their engine holds every turn."""

    def __init__(self, folder: Path, engine: ScriptedEngine, stack: ExitStack) -> None:
        self.engine = engine
        self._folder, self._stack = folder, stack
        self._names = (f"worker-{number}" for number in itertools.count())
        self._workers: dict[str, subprocess.Popen[bytes]] = {}
        settings = {
            "run.folder": folder,
            "model.path": folder / "model",
            "env": "echo",
            "env_settings.max_tokens": 64,
        }
        self._sets = [w for key, value in settings.items() for w in ("--set", f"{key}={value}")]
        write_model_folder(folder / "model")
        _, self._router = self._start("router", "--engine", engine.url)
        for _ in range(2):
            self.start_worker()
        self.client = RolloutClient(self._router.address, JournalConfig(), folder / "client")
        self.client.start()
        stack.callback(self.client.close)

    def _start(self, *words: str) -> tuple[subprocess.Popen[bytes], Ready]:
        """Start a process and wait until it is ready."""
        reading, writing = os.pipe()
        argv = [*ROLLMESH, *words, *self._sets, "--ready-fd", str(writing)]
        process = subprocess.Popen(argv, pass_fds=[writing], stdout=subprocess.DEVNULL)
        os.close(writing)
        self._stack.callback(process.wait)
        self._stack.callback(process.terminate)
        with os.fdopen(reading, "rb") as pipe:
            return process, msgspec.json.decode(pipe.readline(), type=Ready)

    def start_worker(self) -> None:
        """Start another worker."""
        name = next(self._names)
        self._workers[name], _ = self._start(
            "worker", "--router", self._router.address, "--worker-id", name
        )

    def kill_busy_worker(self) -> float:
        """Kill the worker that runs rollouts; return the time of the kill."""
        busy: list[str] = []

        def look() -> bool:
            workers = httpx.get(f"{self._router.http_address}/status").json()["workers"]
            busy[:] = [each["worker_id"] for each in workers if each["in_flight"]]
            return bool(busy)

        _until(look, "no worker reports a rollout")
        at_s = time.perf_counter()
        self._workers.pop(busy[0]).kill()
        return at_s

    def ask(self) -> GroupId:
        """Ask for a group."""
        task = Task(id="echo-1", data={"text_seed": 1})
        return self.client.ask(
            task, env="echo", num_samples=NUM_SAMPLES, sampling=SamplingPolicy(), seed=0
        )

    async def ask_and_wait(self) -> GroupId:
        """Ask for a group, and wait until the engine has exactly its calls."""
        group_id = self.ask()
        await self.until(lambda: self.engine.num_live == NUM_SAMPLES)
        return group_id

    async def cancel(self, group_id: GroupId) -> float:
        """Cancel the group; return the seconds until the engine has no call of it."""
        at_s = time.perf_counter()
        self.client.cancel(group_id, "enough")
        await self.until(lambda: self.engine.num_live == 0)
        took_s = time.perf_counter() - at_s
        while not await asyncio.to_thread(self.client.take, 1.0):
            pass
        return took_s

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until the condition holds at the engine."""
        async with asyncio.timeout(PATIENCE_S):
            await self.engine.until(condition)


Took = dict[str, list[float]]
"""The seconds of each try, by the name of the figure."""
Case = Callable[[int], Coroutine[Any, Any, Took]]
"""A case of the benchmark, which takes a number of tries."""


async def worker_death(num_tries: int) -> Took:
    """Return the seconds from each kill to the first call of the group's next attempt."""

    async def once(mesh: ProcessMesh) -> float:
        group_id = await mesh.ask_and_wait()
        num_seen = mesh.engine.num_seen("/generate")
        killed_s = await asyncio.to_thread(mesh.kill_busy_worker)
        await mesh.until(lambda: mesh.engine.num_seen("/generate") > num_seen)
        took_s = time.perf_counter() - killed_s
        await mesh.until(lambda: mesh.engine.num_live == NUM_SAMPLES)
        await mesh.cancel(group_id)
        await asyncio.to_thread(mesh.start_worker)
        return took_s

    return {"worker_death": await _tries(once, num_tries)}


async def cancel(num_tries: int) -> Took:
    """Return the seconds from each cancel to the end of the group's calls at the engine."""

    async def once(mesh: ProcessMesh) -> float:
        return await mesh.cancel(await mesh.ask_and_wait())

    return {"cancel": await _tries(once, num_tries)}


async def _tries(once: Callable[[ProcessMesh], Awaitable[float]], num_tries: int) -> list[float]:
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        async with ScriptedEngine() as engine:
            engine.hold()
            mesh = await asyncio.to_thread(ProcessMesh, Path(folder), engine, stack)
            took_s = [await once(mesh) for _ in range(num_tries)]
            await asyncio.to_thread(stack.close)
            return took_s


async def interrupt(num_tries: int) -> Took:
    """Return the seconds from each Ctrl-C in a training demo to the end of its last process."""
    return {"interrupt": [await asyncio.to_thread(_interrupted) for _ in range(num_tries)]}


def _interrupted() -> float:
    with tempfile.TemporaryDirectory() as folder:
        sets = [f"run.folder={folder}", "trainer.num_steps=10000", "trainer.eval_rollouts=0"]
        argv = [*ROLLMESH, "demo", "--no-live", *(w for each in sets for w in ("--set", each))]
        launch = subprocess.Popen(argv, stdout=subprocess.DEVNULL, start_new_session=True)
        try:
            metrics = Path(folder) / "demo" / "metrics.jsonl"
            _until(
                lambda: metrics.exists() and metrics.stat().st_size > 0, "the demo takes no step"
            )
            processes = [psutil.Process(each.pid) for each in _living(Path(folder) / "demo")]
            at_s = time.perf_counter()
            launch.send_signal(signal.SIGINT)
            launch.wait(PATIENCE_S)
            _, alive = psutil.wait_procs(processes, PATIENCE_S)
        finally:
            launch.kill()
        if alive:
            raise RuntimeError(f"still running: {alive}")
        return time.perf_counter() - at_s


def _living(run: Path) -> list[Any]:
    return [each for each in read_pids(run) if psutil.pid_exists(each.pid)]


def _until(condition: Callable[[], bool], otherwise: str) -> None:
    give_up_s = time.monotonic() + PATIENCE_S
    while not condition():
        if time.monotonic() > give_up_s:
            raise RuntimeError(f"{otherwise} within {PATIENCE_S:g} s")
        time.sleep(LOOK_S)


Faults = Sequence[Callable[[HostNetwork], None]]


@contextmanager
def five_hosts(forwarder: Forwarder | None = None) -> Iterator[HostMesh]:
    """Yield a mesh over five hosts at full speed; in the end, check that nothing of its run was
    lost or counted twice.
    """
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        model = Path(folder) / "model"
        write_tiny_model(model, texts_of(GuessEnv()), TinyShape(), seed=0)
        network = stack.enter_context(HostNetwork(dict.fromkeys(FIVE_HOSTS.values()), forwarder))
        mesh = HostMesh(Path(folder), network, FIVE_HOSTS, host_settings(model))
        stack.callback(mesh.close)
        mesh.start(*FIVE_HOSTS)
        mesh.until_full_speed(FULL_SPEED_WITHIN_S)
        yield mesh
        if faults := why_not_whole(mesh.run, mesh.finish(NUM_MORE, FULL_SPEED_WITHIN_S)):
            raise RuntimeError(f"the run is not whole: {'; '.join(faults)}")


def after_faults(name: str, faults: Faults, lasts_s: float) -> Took:
    """Return the seconds to full speed after each fault."""
    took_s = []
    with five_hosts() as mesh:
        for begin in faults:
            begin(mesh.network)
            threading.Event().wait(lasts_s)
            mesh.network.heal()
            took_s.append(mesh.until_full_speed(FULL_SPEED_WITHIN_S))
    return {name: took_s}


def host_settings(model: Path) -> dict[str, Any]:
    """Return the settings of a mesh that takes many small steps."""
    trainer = {"num_steps": 100_000, "groups_per_step": 2, "samples_per_group": 4}
    return {
        "env": "guess",
        "model": {"path": str(model), "max_context_tokens": 512},
        "sampling": {"max_tokens": 4},
        "worker": {"max_rollouts": 16},
        "journal": {"segment_bytes": 2**32},  # all of it is kept, for the check in the end
        "trainer": {**trainer, "max_running_groups": 4, "learning_rate": 1e-3},
    }


def cuts(name: str, lasts_s: float, num_rounds: int) -> Case:
    """Return the case of a cut of each link, `num_rounds` times."""
    faults = [
        functools.partial(HostNetwork.cut, one=one, other=other) for one, other in LINKS
    ] * num_rounds
    return lambda _: asyncio.to_thread(after_faults, name, faults, lasts_s)


async def one_way(num_tries: int) -> Took:
    """Return the seconds to full speed after nothing arrived at a host."""
    del num_tries
    hosts = dict.fromkeys(FIVE_HOSTS.values())
    faults = [functools.partial(nothing_arrives, host=host) for host in hosts]
    return await asyncio.to_thread(after_faults, "one_way", faults, SHORT_S)


def nothing_arrives(network: HostNetwork, host: str) -> None:
    """Drop all packets that arrive at a host."""
    network[host].drop_from()


def latency(num_rounds: int) -> Took:
    """Return the seconds to full speed on slow links, and after they are fast again."""
    slow_s, fast_s = [], []
    with Forwarder() as forwarder, five_hosts(forwarder) as mesh:
        for _ in range(num_rounds):
            forwarder.set_links(**SLOW_LINKS)
            slow_s.append(mesh.until_full_speed(FULL_SPEED_WITHIN_S))
            forwarder.set_links()
            fast_s.append(mesh.until_full_speed(FULL_SPEED_WITHIN_S))
    return {"latency": slow_s, "after_latency": fast_s}


def replaced_host(num_rounds: int) -> Took:
    """Return the seconds to full speed after each start of a process whose host was replaced."""
    took_s = []
    with five_hosts() as mesh:
        for role in REPLACED_ROLES * num_rounds:
            mesh.replace_host(role)
            took_s.append(mesh.until_full_speed(FULL_SPEED_WITHIN_S))
    return {"replaced_host": took_s}


def in_rounds(function: Callable[[int], Took], num_rounds: int) -> Case:
    """Return the case of a function that takes a number of rounds."""
    return lambda _: asyncio.to_thread(function, num_rounds)


SHORT_S = 5.0
QUICK_CASES: dict[str, Case] = {
    "worker_death": worker_death,
    "cancel": cancel,
    "interrupt": interrupt,
    "cut_5_s": cuts("cut_5_s", SHORT_S, 1),
    "one_way": one_way,
    "latency": in_rounds(latency, 2),
    "replaced_host": in_rounds(replaced_host, 1),
}
CASES: dict[str, Case] = {
    **QUICK_CASES,
    "cut_5_s": cuts("cut_5_s", SHORT_S, 3),
    "cut_20_s": cuts("cut_20_s", 20.0, 1),
    "cut_90_s": cuts("cut_90_s", 90.0, 1),
    "latency": in_rounds(latency, 6),
    "replaced_host": in_rounds(replaced_host, 3),
}


def main() -> None:
    """Run the cases and report."""
    options = parser("reactions", CASES).parse_args()
    num_tries = NUM_QUICK_TRIES if options.quick else NUM_TRIES
    figures: dict[str, float] = {}
    cases = QUICK_CASES if options.quick else CASES
    for name in options.only or cases:
        for figure, took_s in asyncio.run({**CASES, **cases}[name](num_tries)).items():
            figures[f"{figure}_p50_s"] = statistics.median(took_s)
            figures[f"{figure}_p99_s"] = statistics.quantiles(took_s, n=100, method="inclusive")[98]
    report(options, figures, [goal for goal in GOALS if goal.figure in figures])


if __name__ == "__main__":
    main()
