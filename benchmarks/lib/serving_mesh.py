"""The mesh of the serving benchmark: a router, workers, and a client with its sink.

- Each role's CPU is measured separately. The client, its sink's thread and journal are in this
  process; the journal does not sync.
- Everything else is as a user has it: `rollmesh router`, a worker's own parts, RolloutClient.
- A lap keeps a number of groups in flight and takes each when it ends.
"""

import json
import os
import socket
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import msgspec

from benchmarks.lib.servers import VENVS, ServerProcess
from rollmesh.core.config import JournalConfig
from rollmesh.core.ids import GroupId
from rollmesh.core.types import Json, SamplingPolicy, Task
from rollmesh.serve.client.client import Finished, RolloutClient

TAKE_S = 60.0
"""A lap fails if nothing ends for this long."""


class MeshShape(msgspec.Struct, frozen=True, kw_only=True):
    """Size and environment of a mesh."""

    env: str
    settings: dict[str, Json] = {}
    num_workers: int = 2
    slots: int = 256
    is_prepared: bool = False
    """Whether its workers are those of serving_worker.py, with prepared answers."""
    engine: str = ""


class GroupTimes(msgspec.Struct, frozen=True):
    """Figures of one lap."""

    groups_s: list[float]
    """Seconds of each group from ask to take."""
    wall_s: float
    cpu_s: dict[str, float]
    """CPU seconds of all processes of each role."""
    num_bytes: int
    """Bytes of the last answer: record and buffers."""

    @property
    def per_s(self) -> float:
        return len(self.groups_s) / self.wall_s

    @property
    def p50_us(self) -> float:
        return 1e6 * median(self.groups_s)

    def cpu_us(self, role: str) -> float:
        """CPU per group."""
        return 1e6 * self.cpu_s[role] / len(self.groups_s)


class LocalMesh:
    """One router, its workers, and one client."""

    def __init__(self, shape: MeshShape, model: Path, folder: Path) -> None:
        self.shape = shape
        self.cores = cores = os.sched_getaffinity(0)
        rooms = [sys.executable, "-m", "rollmesh.cli.main"]
        settings = {
            "run.folder": folder,
            "model.path": model,
            "model.max_context_tokens": 65_536,
            "worker.max_rollouts": shape.slots,
            "env": shape.env,
        } | {f"env_settings.{key}": value for key, value in shape.settings.items()}
        sets = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
        engine = ["--engine", shape.engine] if shape.engine else []
        self.router = ServerProcess([*rooms, "router", *engine, *sets], cores)
        program = [sys.executable, "-m", "benchmarks.lib.serving_worker"]
        argv = [*(program if shape.is_prepared else [*rooms, "worker"]), *sets]
        argv += ["--router", self.router.ready.address]
        names = [f"worker-{number}" for number in range(shape.num_workers)]
        self.workers = [ServerProcess([*argv, "--worker-id", name], cores) for name in names]
        self.client = RolloutClient(self.router.ready.address, JournalConfig(), folder)
        self.client.start()
        self._sink = next(t for t in threading.enumerate() if t.name == "intake")
        self._num_freed = 0

    def end(self) -> None:
        """Stop all processes."""
        self.client.close()
        for child in (*self.workers, self.router):
            child.end()

    def ask(self, task: Task) -> GroupId:
        """Ask for a group of one sample."""
        return self.client.ask(
            task, env=self.shape.env, num_samples=1, sampling=SamplingPolicy(), seed=0
        )

    def lap(self, num_groups: int, window: int, task: Task) -> GroupTimes:
        """Run `num_groups` groups, `window` at a time; RuntimeError if one does not finish."""
        asked_s: dict[GroupId, float] = {}
        groups_s: list[float] = []
        ended: list[GroupId] = []
        last: Finished | None = None
        cpu_s, began_s = self._cpu_s(), time.perf_counter()
        num_asked = 0
        while len(groups_s) < num_groups:
            while num_asked < min(num_groups, len(groups_s) + window):
                now_s = time.perf_counter()
                asked_s[self.ask(task)] = now_s
                num_asked += 1
            arrivals = self.client.take(TAKE_S)
            for arrival in arrivals:
                if not isinstance(arrival, Finished):
                    raise RuntimeError(f"a group was dropped: {arrival.reason}")
                groups_s.append(time.perf_counter() - asked_s.pop(arrival.group_id))
                last = arrival
            ended += [arrival.group_id for arrival in arrivals]
            if not arrivals:
                raise RuntimeError(f"nothing ended for {TAKE_S:g} s")
        wall_s = time.perf_counter() - began_s
        spent_s = {role: now_s - cpu_s[role] for role, now_s in self._cpu_s().items()}
        assert last is not None
        self.client.done_with(ended)
        num_bytes = last.token_ids.nbytes + last.logprobs.nbytes
        num_bytes += len(msgspec.json.encode(last.record))
        return GroupTimes(groups_s, wall_s, spent_s, num_bytes)

    def _cpu_s(self) -> dict[str, float]:
        sink_s = _thread_s(self._sink.native_id)
        return {
            "router": self.router.cpu_s(),
            "workers": sum(worker.cpu_s() for worker in self.workers),
            "sink": sink_s,
            "client": time.process_time() - sink_s,
        }


class VerifiersServer:
    """verifiers' env server with its client."""

    def __init__(self, num_workers: int) -> None:
        script = Path(__file__).with_name("verifiers_env_server.py")
        argv = [str(_python()), str(script), "--workers", str(num_workers)]
        path = {"PYTHONPATH": str(script.parent)}
        self._child = ServerProcess(argv, os.sched_getaffinity(0), env=path)
        self._line = socket.create_connection(("127.0.0.1", self._child.port)).makefile("rw")

    def lap(self, num_rollouts: int, window: int, shape: dict[str, int]) -> float:
        """Return rollouts per second."""
        num = num_rollouts // window * window
        self._line.write(json.dumps({"num": num, "window": window, **shape}) + "\n")
        self._line.flush()
        return num / float(json.loads(self._line.readline()))

    def end(self) -> None:
        """Stop it; its server ends with it."""
        self._line.close()
        self._child.end()


def start_peers() -> Sequence[VerifiersServer]:
    """Start the installed ones: one worker as the server itself, and two workers behind a
    broker.
    """
    return [VerifiersServer(1), VerifiersServer(2)] if _python().is_file() else []


def _python() -> Path:
    return VENVS / "verifiers" / "bin" / "python"


def _thread_s(thread_id: int | None) -> float:
    """CPU seconds of a thread of this process."""
    return int(Path(f"/proc/self/task/{thread_id}/schedstat").read_text().split()[0]) / 1e9
