"""The flow tests' mesh: a router and workers as real processes, a scripted engine, and clients."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.request
import zlib
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from rollmesh.core.config import JournalConfig
from rollmesh.core.ids import GroupId
from rollmesh.core.process import INTERRUPTED, OK, RECYCLED, Ready
from rollmesh.core.types import Branch, SamplingPolicy, Task
from rollmesh.serve.client.client import Arrival, Finished, RolloutClient
from rollmesh.serve.client.samples import cut
from rollmesh.testing.engine import NextToken, ScriptedEngine, logprob_of
from rollmesh.testing.model_folder import write_model_folder
from rollmesh.wire.frames import Packet, encode_ask
from rollmesh.wire.keys import Keys
from rollmesh.wire.messages import (
    AskGroup,
    ClientBeat,
    ClientHello,
    GroupAcked,
    GroupAsk,
    GroupFailed,
    GroupFinished,
    GroupMoved,
)
from rollmesh.wire.sockets import Dialer, Hub, wait

PATIENCE_S = 60.0
BEAT_S, MISSED_BEATS = 0.1, 30
"""A process that is silent for 3 s is considered lost: longer than a busy machine keeps a process
from its CPU.
"""
LOOK_S = 0.02
"""Poll interval for the state of other processes."""
TURNS = {"num_turns": 2, "prompt_chars": 20, "turn_chars": 10, "max_tokens": 3}


ENV_HEAD = """
import asyncio, os, signal, sys, threading, time
from pathlib import Path
from rollmesh.core.errors import InfraError
from rollmesh.core.types import Score, Task
from rollmesh.envs.chat import ChatClient
from rollmesh.envs.env import Env, Transcript

class Plain(Env):
    def tasks(self, split, seed):
        yield Task(id="t")

    async def run(self, task, agent):
        return Transcript()

    async def score(self, task, transcript):
        return Score(reward=1.0)

"""


def byte_token(policy_version: int, context: Sequence[int]) -> int:
    """Like chain_token, but only ids of the folder's vocabulary, and never a stop."""
    return 1 + zlib.crc32(repr((policy_version, list(context))).encode()) % 200


def check_exact(finished: Finished, num_sampled: int) -> set[str]:
    """Check that each of `num_sampled` tokens of a sample is what the engine's weights give after
    exactly its prefix; return the engines.
    """
    branches: tuple[Branch, ...] = ("main",)
    parts = (finished.record, finished.token_ids, finished.logprobs)
    result = cut(finished.group_id, *parts, branches)
    assert len(result.samples) == len(finished.record.rollouts)
    for sample in result.samples:
        ids = sample.token_ids.tolist()
        assert sample.loss_mask.sum() == num_sampled
        for at in np.flatnonzero(sample.loss_mask):
            assert ids[at] == byte_token(0, ids[:at])
            assert sample.logprobs[at] == np.float32(logprob_of(0, ids[at]))
            assert sample.policy_versions[at] == 0
    return {url for rollout in finished.record.rollouts for url in rollout.engines}


CONFINED = (
    *("setpriv", "--no-new-privs", "--inh-caps=-all"),
    "--bounding-set=-all,+setuid,+setgid",
)
"""Starts a process with the capabilities that docker/compose.yaml leaves a worker."""


class Process:
    """A `rollmesh VERB` process that has reported Ready."""

    def __init__(self, popen: "subprocess.Popen[bytes]", ready: Ready) -> None:
        self.popen = popen
        self.ready = ready

    def kill(self) -> None:
        self.popen.kill()
        self.popen.wait()


@contextmanager
def running(folder: Path, *args: str, before: tuple[str, ...] = ()) -> Iterator[Process]:
    reading, writing = os.pipe()
    argv = [*before, sys.executable, "-m", "rollmesh.cli.main", *args, "--ready-fd", str(writing)]
    popen = subprocess.Popen(argv, pass_fds=[writing], cwd=folder)
    os.close(writing)
    try:
        with os.fdopen(reading, "rb") as pipe:
            yield Process(popen, msgspec.json.decode(pipe.readline(), type=Ready))
    finally:
        popen.terminate()
        assert popen.wait(PATIENCE_S) in (OK, INTERRUPTED, RECYCLED, -signal.SIGKILL)


class Mesh:
    """A router and a run folder; tests start workers on it."""

    def __init__(
        self, folder: Path, engine: ScriptedEngine, stack: ExitStack, **router: object
    ) -> None:
        """`router` are settings of that section."""
        self.folder = folder
        self._stack = stack
        self._router = {"beat_s": BEAT_S, "missed_beats": MISSED_BEATS, **router}
        write_model_folder(folder / "model")
        self.engine = engine
        self.router = self.start_router()

    def start_router(self, bind: str = "tcp://127.0.0.1:0") -> Process:
        args = ["router", *self.settings(), "--set", f"router.bind={bind}"]
        args += ["--engine", self.engine.url]
        return self._stack.enter_context(running(self.folder, *args))

    def settings(self, env: str = "echo", **env_settings: object) -> list[str]:
        values = {
            "env": env,
            "env_settings": env_settings or (TURNS if env == "echo" else {}),
            "run": {"folder": "."},
            "model": {"path": str(self.folder / "model")},
            # The engine is on the test's event loop, which a busy machine delays by seconds.
            "engine": {"probe_timeout_s": PATIENCE_S},
            "router": self._router,
        }
        path = self.folder / f"{env.replace(':', '-')}.json"
        path.write_bytes(msgspec.json.encode(values))
        return ["--config", str(path)]

    def worker_args(self, worker_id: str, env: str = "echo", **worker: object) -> list[str]:
        """Arguments of a worker that serves `env`; `worker` are settings of that section."""
        args = ["worker", *self.settings(env), "--router", self.router.ready.address]
        args += ["--worker-id", worker_id]
        for key, value in worker.items():
            args += ["--set", f"worker.{key}={value}"]
        return args

    def worker(self, worker_id: str, env: str = "echo", **worker: object) -> Process:
        args = self.worker_args(worker_id, env, **worker)
        return self._stack.enter_context(running(self.folder, *args))

    def confined_worker(self, worker_id: str, env: str, **worker: object) -> Process:
        """Start a worker as user 65534 with CAP_SETUID and CAP_SETGID only."""
        args = (*self.worker_args(worker_id, env, **worker), "--user=65534")
        return self._stack.enter_context(running(self.folder, *args, before=CONFINED))

    def write_env(self, name: str, source: str) -> str:
        """Write the module of an environment with the class TheEnv; return its name in settings."""
        (self.folder / f"{name}.py").write_text(ENV_HEAD + source)
        return f"{name}:TheEnv"

    def status(self) -> dict[str, Any]:
        """The router's /status."""
        url = f"{self.router.ready.http_address}/status"
        with urllib.request.urlopen(url, timeout=PATIENCE_S) as reply:
            status: dict[str, Any] = msgspec.json.decode(reply.read())
        return status

    def logged(self, role: str, event: str) -> list[dict[str, Any]]:
        """Entries of this event in the log of `role`."""
        [path] = self.folder.rglob(f"logs/{role}.log")
        rows = map(msgspec.json.decode, path.read_bytes().splitlines())
        return [row for row in rows if row["event"] == event]

    def worker_status(self, worker_id: str) -> dict[str, Any]:
        """The worker's row in the status; empty if the router does not know it."""
        lines = self.status()["workers"]
        return next((line for line in lines if line["worker_id"] == worker_id), {})

    async def until(self, condition: Callable[[], object]) -> None:
        """Poll from a thread until `condition` holds."""
        await asyncio.to_thread(look_until, condition)

    def last_reason(self, worker_id: str) -> str:
        """The reason with which the worker left, from its log."""
        return last_reason(self.folder / "mesh" / "logs" / f"{worker_id}.log")

    def client(self, keys: Keys | None = None) -> RolloutClient:
        folder = self.folder / "client"
        client = RolloutClient(self.router.ready.address, JournalConfig(), folder, keys)
        client.start()
        self._stack.callback(client.close)
        return client


def last_reason(log: Path) -> str:
    """The reason with which a worker left, from its log."""
    events = [msgspec.json.decode(line) for line in log.read_bytes().splitlines()]
    return str([each for each in events if each["event"] == "worker.left"][-1]["reason"])


def look_until(condition: Callable[[], object]) -> None:
    give_up_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < give_up_s, "it did not happen"
        threading.Event().wait(LOOK_S)


@asynccontextmanager
async def open_mesh(
    folder: Path, next_token: NextToken = byte_token, **router: object
) -> AsyncIterator[Mesh]:
    """Run a router with its engine; all processes end with the block."""
    async with ScriptedEngine(next_token) as engine:
        with ExitStack() as stack:
            yield await asyncio.to_thread(lambda: Mesh(folder, engine, stack, **router))
            await engine.release()


def ask(client: RolloutClient, num_samples: int = 2, env: str = "echo", **data: object) -> GroupId:
    task = Task(id="echo-1", data={"text_seed": 1, **data})
    return client.ask(task, env=env, num_samples=num_samples, sampling=SamplingPolicy(), seed=7)


async def take(client: RolloutClient, num_groups: int = 1) -> list[Arrival]:
    arrivals: list[Arrival] = []
    async with asyncio.timeout(PATIENCE_S):
        while len(arrivals) < num_groups:
            arrivals += await asyncio.to_thread(client.take, 1.0)
    return arrivals


async def ended(argv: list[str], folder: Path) -> tuple[int, str]:
    """Run `rollmesh ARGV`; return its exit code and stderr."""
    command = [sys.executable, "-m", "rollmesh.cli.main", *argv]
    done = await asyncio.to_thread(
        subprocess.run, command, capture_output=True, cwd=folder, timeout=PATIENCE_S, check=False
    )
    return done.returncode, done.stderr.decode()


async def leaves(process: Process) -> int:
    return await asyncio.to_thread(process.popen.wait, PATIENCE_S)


class SlowSink:
    """A scripted client: a sink that acks when the test calls `ack`."""

    def __init__(self, router: str) -> None:
        self.hub = Hub("tcp://127.0.0.1:0")
        self.dialer = Dialer(router, "c1")
        self.finished: list[tuple[bytes, GroupFinished]] = []
        self.moved: list[GroupMoved] = []
        self.failed: list[GroupFailed] = []

    def ask(self, group_id: GroupId, deadline_s: float = 0.0, env: str = "echo") -> None:
        self.dialer.send(Packet(ClientHello("c1")))
        task = Task(id="echo-1", data={"text_seed": 1})
        body = encode_ask(GroupAsk(task=task, sampling=SamplingPolicy(), seed=7))
        message = AskGroup(
            group_id=group_id,
            client_id="c1",
            env=env,
            num_samples=1,
            sink=self.hub.address,
            deadline_s=deadline_s,
        )
        self.dialer.send(Packet(message, body=body))

    def has(self, group_id: GroupId) -> bool:
        """Whether the group has arrived at least once."""
        return any(message.group_id == group_id for _, message in self.finished)

    def ack(self, route: bytes, message: GroupFinished) -> None:
        self.hub.send(route, Packet(GroupAcked(message.group_id, message.attempt, duplicate=False)))

    def until(self, condition: Callable[[], bool]) -> None:
        for _ in range(int(PATIENCE_S / 0.05)):
            if condition():
                return
            wait([self.hub, self.dialer], None, 0.05)
            self.dialer.send(Packet(ClientBeat("c1", 1)))
            for route, packet in self.hub.receive():
                assert isinstance(packet.message, GroupFinished)
                self.finished.append((route, packet.message))
            for packet in self.dialer.receive():
                if isinstance(packet.message, GroupMoved):
                    self.moved.append(packet.message)
                if isinstance(packet.message, GroupFailed):
                    self.failed.append(packet.message)
        raise AssertionError("it did not happen")

    def close(self) -> None:
        self.hub.close()
        self.dialer.close()
