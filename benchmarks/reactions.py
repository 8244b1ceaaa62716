"""Reaction times of the mesh: a killed worker's group, a cancelled call, Ctrl-C.

    python -m benchmarks.reactions [--quick] [--json] [--check] [--only CASE,...]

    worker_death   from SIGKILL of a local worker to the first call of its group from another worker
    cancel         from `RolloutClient.cancel` to the end of the group's last call at the engine
    interrupt      from SIGINT to the end of the last process of `rollmesh demo`

Each case is tried 30 times (5 with --quick); median and 99th percentile are reported. Processes are
real; the engine of the first two is scripted and waits in the middle of every turn.
docs/explanation/faults.md states the goals.
"""

import asyncio
import itertools
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
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
from rollmesh.launch.folder import read_pids
from rollmesh.serve.client.client import RolloutClient
from rollmesh.testing.engine import ScriptedEngine
from rollmesh.testing.model_folder import write_model_folder

NUM_TRIES, NUM_QUICK_TRIES = 30, 5
NUM_SAMPLES = 4
LOOK_S = 0.002
PATIENCE_S = 60.0
"""Seconds after which a missing reaction ends the benchmark."""
GOALS = [
    Goal("worker_death_p99_s", "<=", 2.0),
    Goal("cancel_p99_s", "<=", 1.0),
    Goal("interrupt_p99_s", "<=", 5.0),
]
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


async def worker_death(num_tries: int) -> list[float]:
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

    return await _tries(once, num_tries)


async def cancel(num_tries: int) -> list[float]:
    """Return the seconds from each cancel to the end of the group's calls at the engine."""

    async def once(mesh: ProcessMesh) -> float:
        return await mesh.cancel(await mesh.ask_and_wait())

    return await _tries(once, num_tries)


async def _tries(once: Callable[[ProcessMesh], Awaitable[float]], num_tries: int) -> list[float]:
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        async with ScriptedEngine() as engine:
            engine.hold()
            mesh = await asyncio.to_thread(ProcessMesh, Path(folder), engine, stack)
            took_s = [await once(mesh) for _ in range(num_tries)]
            await asyncio.to_thread(stack.close)
            return took_s


async def interrupt(num_tries: int) -> list[float]:
    """Return the seconds from each Ctrl-C in a training demo to the end of its last process."""
    return [await asyncio.to_thread(_interrupted) for _ in range(num_tries)]


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


CASES = {"worker_death": worker_death, "cancel": cancel, "interrupt": interrupt}


def main() -> None:
    """Run the cases and report."""
    options = parser("reactions", CASES).parse_args()
    num_tries = NUM_QUICK_TRIES if options.quick else NUM_TRIES
    figures: dict[str, float] = {}
    for name in options.only or CASES:
        took_s = sorted(asyncio.run(CASES[name](num_tries)))
        figures[f"{name}_p50_s"] = statistics.median(took_s)
        figures[f"{name}_p99_s"] = statistics.quantiles(took_s, n=100, method="inclusive")[98]
    report(options, figures, [goal for goal in GOALS if goal.figure in figures])


if __name__ == "__main__":
    main()
