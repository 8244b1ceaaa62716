"""The soak's processes: a mesh in tokens mode, or a gateway or bare proxy in relay mode.

- Everything is as a user has it except for the loops' probes.
- A wave is over when its last group was acked and freed. The journal is on disk and emptied.
- In relay mode both servers get the same rollouts from the same agents' process, with the same
  engine. A gateway's sessions are opened, finished and deleted by its admin routes.
"""

import asyncio
import os
import secrets
import sys
import threading
import urllib.request
from collections import Counter
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

import aiohttp
import msgspec

from benchmarks.lib.process_watch import Metrics, OpenResources, held_by, is_alive
from benchmarks.lib.servers import ServerProcess
from benchmarks.lib.soak_agents import AgentEnd, AgentRequest, RolloutShape
from benchmarks.lib.soak_engine import write_folder
from rollmesh.core.config import JournalConfig, RouterConfig
from rollmesh.core.ids import GroupId
from rollmesh.core.types import SamplingPolicy, Task
from rollmesh.serve.client.client import Arrival, Finished, RolloutClient

LOOK_S = 1.0
PATIENCE_S = 120.0
"""A wave fails if nothing ends for this long."""
ENV = "benchmarks.lib.soak_worker:SoakEnv"
MAX_CONTEXT_TOKENS = 131_072
READY_S = 30.0
ROOMS = "rollmesh.cli.main"


class SoakArm(msgspec.Struct, frozen=True, kw_only=True):
    """The measured processes, and the memory measures that are disabled in them."""

    name: str
    shape: RolloutShape
    num_workers: int = 1
    ablated: tuple[str, ...] = ()
    environ: dict[str, str] = {}
    """Additional environment variables of the measured processes."""
    settings: dict[str, int] = {}
    """Additional settings of the measured processes."""


class Wave(msgspec.Struct):
    """Outcomes of the groups of a wave."""

    num_finished: int = 0
    num_dropped: int = 0
    reasons: dict[str, int] = {}


class ArmProcesses(Protocol):
    """The processes of an arm."""

    pids: dict[str, int]
    """Pids by name; those whose memory is judged are in `judged`."""
    judged: list[str]
    lags: dict[str, Path]
    """Lag files of the judged processes that measure their loops."""
    load_log: Path
    ports: dict[str, str]
    """Ports of the judged processes."""

    metrics: dict[str, Metrics]
    beat_s: float

    def wave(self, num_groups: int, num_turns: int, stop: threading.Event) -> Wave:
        """Run `num_groups` groups to the end of the last; fewer if `stop` is set."""

    def held(self) -> dict[str, OpenResources]:
        """Resources of the judged processes now."""

    def num_lost(self) -> int:
        """Number of lost workers."""


class Places(msgspec.Struct, frozen=True):
    """Files of an arm."""

    folder: Path

    @property
    def socket(self) -> Path:
        """Socket of the agents; short, since the kernel limits its length."""
        return Path(f"/tmp/rollmesh-soak-{os.getpid()}.sock")

    @property
    def load_log(self) -> Path:
        return self.folder / "load.jsonl"

    def lag(self, name: str) -> Path:
        return self.folder / f"{name}.lag"


def sets(settings: Mapping[str, Any]) -> list[str]:
    """Return the settings as words of a command line."""
    return [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]


def start_agents(places: Places, shape: RolloutShape, stack: ExitStack) -> ServerProcess:
    """Start the agents' process, which ends with the stack."""
    places.socket.unlink(missing_ok=True)
    argv = [sys.executable, "-m", "benchmarks.lib.soak_agents", "--socket", str(places.socket)]
    argv += ["--shape", msgspec.json.encode(shape).decode(), "--log", str(places.load_log)]
    child = ServerProcess(argv, os.sched_getaffinity(0))
    stack.callback(places.socket.unlink, missing_ok=True)
    stack.callback(child.end)
    return child


def start_engine(folder: Path, stack: ExitStack) -> ServerProcess:
    """Start the canned engine."""
    argv = [sys.executable, "-m", "benchmarks.lib.soak_engine", "--folder", str(folder)]
    child = ServerProcess(argv, os.sched_getaffinity(0))
    stack.callback(child.end)
    return child


class SoakMesh:
    """A mesh in tokens mode; `with` ends all of its processes."""

    def __init__(self, arm: SoakArm, folder: Path) -> None:
        self.arm = arm
        self.load_log = Places(folder).load_log
        self.beat_s = RouterConfig().beat_s
        self._places = places = Places(folder)
        self._task = 0
        with ExitStack() as stack:
            model = write_folder(folder / "model")
            engine = start_engine(model, stack)
            agents = start_agents(places, arm.shape, stack)
            words = self._settings(model, folder)
            cores = os.sched_getaffinity(0)
            argv = [sys.executable, "-m", ROOMS, "router", "--engine", engine.ready.address]
            self._router = ServerProcess([*argv, *words], cores)
            stack.callback(self._router.end)
            workers = {f"worker-{n}": None for n in range(arm.num_workers)}
            children = {name: self._worker(name, words, stack) for name in workers}
            self.judged = list(children)
            self.pids = {name: child.ready.pid for name, child in children.items()}
            self.ports = {n: c.ready.address.rpartition(":")[2] for n, c in children.items()}
            urls = {name: child.ready.address for name, child in children.items()}
            urls["router"] = self._router.ready.http_address
            self.metrics = {name: Metrics(f"{url}/metrics") for name, url in urls.items()}
            self.lags = {name: places.lag(name) for name in children}
            self.pids |= {"router": self._router.ready.pid, "client": os.getpid()}
            self.pids |= {"engine": engine.ready.pid, "agents": agents.ready.pid}
            self._client = RolloutClient(self._router.ready.address, JournalConfig(), folder)
            self._client.start()
            stack.callback(self._client.close)
            self._stack = stack.pop_all()

    def __enter__(self) -> "SoakMesh":
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _settings(self, model: Path, folder: Path) -> list[str]:
        shape = self.arm.shape
        settings: dict[str, Any] = {
            "run.folder": folder,
            "model.path": model,
            "model.max_context_tokens": MAX_CONTEXT_TOKENS,
            "worker.max_rollouts": shape.slots,
            "env": ENV,
            "env_settings.socket": self._places.socket,
        }
        return sets(settings | self.arm.settings)

    def _worker(self, name: str, words: list[str], stack: ExitStack) -> ServerProcess:
        arm = self.arm
        argv = [sys.executable, "-m", "benchmarks.lib.soak_worker", "--lag"]
        argv += [str(self._places.lag(name)), "--ablate", ",".join(arm.ablated), "worker"]
        argv += ["--router", self._router.ready.address, "--worker-id", name, *words]
        child = ServerProcess(argv, os.sched_getaffinity(0), env=arm.environ)
        stack.callback(child.end)
        return child

    def wave(self, num_groups: int, num_turns: int, stop: threading.Event) -> Wave:
        """Run `num_groups` groups: as many at a time as there are slots, and one more per
        worker.
        """
        arm, shape, wave = self.arm, self.arm.shape, Wave()
        window = max(1, arm.num_workers * shape.slots // shape.group_size) + arm.num_workers
        num_asked, waited_s = 0, 0.0
        asked: set[GroupId] = set()
        while num_asked < num_groups or asked:
            if stop.is_set():
                num_asked = num_groups
                for group_id in asked:
                    self._client.cancel(group_id, "the soak stops")
            while num_asked < num_groups and len(asked) < window:
                asked.add(self._ask(num_turns))
                num_asked += 1
            arrivals = self._client.take(LOOK_S)
            waited_s = 0.0 if arrivals else waited_s + LOOK_S
            gone = [name for name, pid in self.pids.items() if not is_alive(pid)]
            if gone or waited_s > PATIENCE_S:
                why = f"{gone[0]} has ended" if gone else f"nothing ended for {PATIENCE_S:g} s"
                raise RuntimeError(why)
            for arrival in arrivals:
                asked.discard(arrival.group_id)
                self._count(arrival, wave)
        return wave

    def _ask(self, num_turns: int) -> GroupId:
        number, self._task = self._task, self._task + 1
        return self._client.ask(
            Task(id=f"soak-{number}", data={"number": number, "num_turns": num_turns}),
            env=ENV,
            num_samples=self.arm.shape.group_size,
            sampling=SamplingPolicy(),
            seed=number,
        )

    def _count(self, arrival: Arrival, wave: Wave) -> None:
        if isinstance(arrival, Finished):
            wave.num_finished += 1
            self._client.done_with([arrival.group_id])
        else:
            wave.num_dropped += 1
            reason = str(arrival.reason)[:60]
            wave.reasons[reason] = wave.reasons.get(reason, 0) + 1

    def held(self) -> dict[str, OpenResources]:
        """Resources of the workers and the router."""
        return {name: held_by(self.pids[name], each) for name, each in self.metrics.items()}

    def num_lost(self) -> int:
        """Number of workers that the router lost."""
        url = f"{self._router.ready.http_address}/status"
        with urllib.request.urlopen(url, timeout=READY_S) as answer:
            counts = msgspec.json.decode(answer.read())["counts"]
        return int(counts.get("workers_lost", 0))


BARE = "bare"
READ_BYTES = 2**18


class SoakRelay:
    """A gateway or a bare proxy in relay mode; `with` ends all of its processes."""

    def __init__(self, arm: SoakArm, folder: Path) -> None:
        self.arm = arm
        self._places = places = Places(folder)
        self.load_log = places.load_log
        self.beat_s = 0.0
        self._token = secrets.token_urlsafe(32)
        self._task = 0
        with ExitStack() as stack:
            engine = start_engine(write_folder(folder / "model"), stack)
            agents = start_agents(places, arm.shape, stack)
            self._url = engine.ready.address
            child = self._bare() if arm.name == BARE else self._gateway(folder)
            stack.callback(child.end)
            self._address = child.ready.address
            self.judged = [arm.name]
            self.pids = {arm.name: child.ready.pid, "engine": engine.ready.pid}
            self.pids["agents"] = agents.ready.pid
            self.ports = {arm.name: child.ready.address.rpartition(":")[2]}
            self.lags = {} if arm.name == BARE else {arm.name: places.lag(arm.name)}
            url = f"{self._address}/metrics"
            self.metrics = {name: Metrics(url, self._token) for name in self.lags}
            self._stack = stack.pop_all()

    def __enter__(self) -> "SoakRelay":
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _bare(self) -> ServerProcess:
        argv = [sys.executable, "-m", "benchmarks.lib.proxy", "--engine", self._url]
        return ServerProcess(argv, os.sched_getaffinity(0), env=self.arm.environ)

    def _gateway(self, folder: Path) -> ServerProcess:
        token_file = folder / "admin.token"
        token_file.touch(0o600)
        token_file.write_text(self._token)
        argv = [sys.executable, "-m", "benchmarks.lib.soak_worker", "--lag"]
        argv += [str(self._places.lag(self.arm.name)), "--ablate", ",".join(self.arm.ablated)]
        argv += ["gateway", "--engine", self._url, "--capture", "relay", "--port", "0"]
        argv += ["--host", "127.0.0.1", "--admin-token-file", str(token_file)]
        argv += sets(self.arm.settings)
        return ServerProcess(argv, os.sched_getaffinity(0), env=self.arm.environ)

    def wave(self, num_groups: int, num_turns: int, stop: threading.Event) -> Wave:
        """Run `num_groups` groups, as many at a time as there are slots."""
        return asyncio.run(self._wave(num_groups, num_turns, stop))

    async def _wave(self, num_groups: int, num_turns: int, stop: threading.Event) -> Wave:
        shape, wave = self.arm.shape, Wave()
        lanes = asyncio.Semaphore(max(1, self.arm.num_workers * shape.slots // shape.group_size))
        reasons: Counter[str] = Counter()
        headers = {"Authorization": f"Bearer {self._token}"}

        async def lane(number: int) -> None:
            async with lanes:
                if stop.is_set():
                    return
                outcomes = await self._group(admin, number, num_turns)
            reasons.update(each for each in outcomes if each != "done")
            wave.num_dropped += any(each != "done" for each in outcomes)
            wave.num_finished += all(each == "done" for each in outcomes)

        session = aiohttp.ClientSession(self._address, headers=headers)
        async with session as admin, asyncio.TaskGroup() as group:
            for number in range(self._task, self._task + num_groups):
                group.create_task(lane(number))
        self._task += num_groups
        wave.reasons = dict(reasons)
        return wave

    async def _group(self, admin: aiohttp.ClientSession, number: int, num_turns: int) -> list[str]:
        """Run a group; return how each of its agents ended. Its sessions are closed when all have
        ended.
        """
        num_siblings = self.arm.shape.group_size
        opened = [await self._open(admin) for _ in range(num_siblings)]
        requests = [AgentRequest(o["base_url"], o["api_key"], number, num_turns) for o in opened]
        outcomes = await asyncio.gather(*map(self._play, requests))
        for each in opened:
            await self._close(admin, each)
        return list(outcomes)

    async def _play(self, request: AgentRequest) -> str:
        reader, writer = await asyncio.open_unix_connection(str(self._places.socket))
        writer.write(msgspec.json.encode(request) + b"\n")
        result = msgspec.json.decode(await reader.readline(), type=AgentEnd)
        writer.close()
        return result.outcome if result.outcome != "broken" else f"broken: {result.error[:80]}"

    async def _open(self, admin: aiohttp.ClientSession) -> dict[str, Any]:
        if self.arm.name == BARE:
            return {"base_url": f"{self._address}/v1", "api_key": "none"}
        async with admin.post("/admin/sessions", json={"metadata": {}}) as answer:
            answer.raise_for_status()
            opened: dict[str, Any] = await answer.json()
            return opened

    async def _close(self, admin: aiohttp.ClientSession, opened: dict[str, Any]) -> None:
        if self.arm.name == BARE:
            return
        path = f"/admin/sessions/{opened['session_id']}"
        async with admin.post(f"{path}/finish", json={}) as answer:
            answer.raise_for_status()
            async for _ in answer.content.iter_chunked(READ_BYTES):
                pass
        async with admin.delete(path) as answer:
            answer.raise_for_status()

    def held(self) -> dict[str, OpenResources]:
        """Resources of the server."""
        return {name: held_by(self.pids[name], self.metrics.get(name)) for name in self.judged}

    def num_lost(self) -> int:
        """Return 0: there are no workers."""
        return 0
