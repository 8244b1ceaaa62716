"""Real router and worker processes, a scripted engine, a client: groups arrive once and exact."""

import asyncio
import os
import signal
import subprocess
import sys
import zlib
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import msgspec
import numpy as np
import pytest

from rollmesh.core.config import JournalConfig
from rollmesh.core.ids import GroupId
from rollmesh.core.process import Ready
from rollmesh.core.types import Branch, Outcome, SamplingPolicy, Task
from rollmesh.serve.client.client import Arrival, Dropped, Finished, RolloutClient
from rollmesh.serve.client.samples import cut
from rollmesh.testing.engine import ScriptedEngine, logprob_of
from rollmesh.testing.model_folder import write_model_folder
from rollmesh.wire.bodies import encode_ask
from rollmesh.wire.frames import Packet
from rollmesh.wire.messages import (
    AskGroup,
    ClientBeat,
    ClientHello,
    GroupAcked,
    GroupAsk,
    GroupFinished,
    GroupMoved,
    GroupState,
)
from rollmesh.wire.sockets import Dialer, Hub, wait

PATIENCE_S = 20.0
TURNS = {"num_turns": 2, "prompt_chars": 20, "turn_chars": 10, "max_tokens": 3}


def byte_token(policy_version: int, context: Sequence[int]) -> int:
    """As chain_token, but only ids of the folder's vocabulary, and never a stop."""
    return 1 + zlib.crc32(repr((policy_version, list(context))).encode()) % 200


class Process:
    """One `rollmesh VERB` that has said Ready."""

    def __init__(self, popen: "subprocess.Popen[bytes]", ready: Ready) -> None:
        self.popen = popen
        self.ready = ready

    def kill(self) -> None:
        self.popen.kill()
        self.popen.wait()


@contextmanager
def running(folder: Path, *words: str) -> Iterator[Process]:
    reading, writing = os.pipe()
    argv = [sys.executable, "-m", "rollmesh.cli.main", *words, "--ready-fd", str(writing)]
    popen = subprocess.Popen(argv, pass_fds=[writing], cwd=folder)
    os.close(writing)
    try:
        with os.fdopen(reading, "rb") as pipe:
            yield Process(popen, msgspec.json.decode(pipe.readline(), type=Ready))
    finally:
        popen.terminate()
        assert popen.wait(PATIENCE_S) in (0, -signal.SIGKILL)


class Mesh:
    """A router and a folder; workers on demand."""

    def __init__(self, folder: Path, engine: ScriptedEngine, stack: ExitStack) -> None:
        self.folder = folder
        self._stack = stack
        write_model_folder(folder / "model")
        self.engine = engine
        self.router = self.start_router()

    def start_router(self, bind: str = "tcp://127.0.0.1:0") -> Process:
        words = ["router", *self.settings(), "--set", f"router.bind={bind}"]
        words += ["--engine", self.engine.url]
        return self._stack.enter_context(running(self.folder, *words))

    def settings(self, env: str = "echo", **env_settings: object) -> list[str]:
        values = {
            "env": env,
            "env_settings": env_settings or TURNS,
            "run": {"folder": "."},
            "model": {"path": str(self.folder / "model")},
            "router": {"beat_s": 0.1, "missed_beats": 5},
        }
        path = self.folder / f"{env.replace(':', '-')}.json"
        path.write_bytes(msgspec.json.encode(values))
        return ["--config", str(path)]

    def worker_words(self, worker_id: str, env: str = "echo") -> list[str]:
        router = self.router.ready.address
        return ["worker", *self.settings(env), "--router", router, "--worker-id", worker_id]

    def worker(self, worker_id: str, env: str = "echo") -> Process:
        return self._stack.enter_context(running(self.folder, *self.worker_words(worker_id, env)))

    def client(self) -> RolloutClient:
        folder = self.folder / "client"
        client = RolloutClient(self.router.ready.address, JournalConfig(), folder)
        client.start()
        self._stack.callback(client.close)
        return client


@pytest.fixture
async def mesh(tmp_path: Path) -> AsyncIterator[Mesh]:
    async with ScriptedEngine(byte_token) as engine:
        with ExitStack() as stack:
            yield await asyncio.to_thread(Mesh, tmp_path, engine, stack)
            await engine.release()


def ask(client: RolloutClient, num_samples: int = 2, env: str = "echo") -> GroupId:
    task = Task(id="echo-1", data={"text_seed": 1})
    return client.ask(task, env=env, num_samples=num_samples, sampling=SamplingPolicy(), seed=7)


async def take(client: RolloutClient, num_groups: int = 1) -> list[Arrival]:
    arrivals: list[Arrival] = []
    async with asyncio.timeout(PATIENCE_S):
        while len(arrivals) < num_groups:
            arrivals += await asyncio.to_thread(client.take, 1.0)
    return arrivals


def assert_exact(finished: Finished) -> None:
    """Every sampled token is what the engine's weights give after exactly these tokens."""
    branches: tuple[Branch, ...] = ("main",)
    parts = (finished.record, finished.token_ids, finished.logprobs)
    result = cut(finished.group_id, *parts, branches)
    assert len(result.samples) == len(finished.record.rollouts)
    for sample in result.samples:
        ids = sample.token_ids.tolist()
        assert sample.loss_mask.sum() == 2 * 3
        for at in np.flatnonzero(sample.loss_mask):
            assert ids[at] == byte_token(0, ids[:at])
            assert sample.logprobs[at] == np.float32(logprob_of(0, ids[at]))
            assert sample.policy_versions[at] == 0


async def test_group_arrives_once_with_exact_tokens(mesh: Mesh) -> None:
    await asyncio.to_thread(mesh.worker, "worker-0")
    client = mesh.client()
    group_ids = [ask(client, num_samples=3) for _ in range(4)]
    arrivals = await take(client, num_groups=4)
    assert sorted(arrival.group_id for arrival in arrivals) == group_ids
    for finished in arrivals:
        assert isinstance(finished, Finished)
        assert [r.index for r in finished.record.rollouts] == [0, 1, 2]
        assert {r.outcome for r in finished.record.rollouts} == {Outcome.COMPLETED}
        assert {r.reward for r in finished.record.rollouts} == {1.0}
        assert finished.record.rollouts[0].num_calls == 2
        assert finished.attempt == 1
        assert_exact(finished)
    seeds = [
        r.body["sampling_params"].get("sampling_seed")
        for r in mesh.engine.seen
        if r.path == "/generate"
    ]
    assert len(set(seeds)) == 3 * 2
    assert await asyncio.to_thread(client.take, 0.2) == []


async def test_group_runs_again_when_its_worker_dies(mesh: Mesh) -> None:
    doomed = await asyncio.to_thread(mesh.worker, "worker-0")
    client = mesh.client()
    mesh.engine.hold()
    group_id = ask(client)
    await mesh.engine.until(lambda: mesh.engine.num_seen("/generate") > 0)
    await asyncio.to_thread(doomed.kill)
    await asyncio.to_thread(mesh.worker, "worker-1")
    await mesh.engine.release()
    [finished] = await take(client)
    assert isinstance(finished, Finished)
    assert (finished.group_id, finished.worker_id, finished.attempt) == (group_id, "worker-1", 2)
    assert_exact(finished)


async def test_group_goes_elsewhere_at_once_when_its_worker_is_stopped(mesh: Mesh) -> None:
    leaving = await asyncio.to_thread(mesh.worker, "worker-0")
    client = mesh.client()
    mesh.engine.hold()
    ask(client)
    await mesh.engine.until(lambda: mesh.engine.num_seen("/generate") > 0)
    leaving.popen.terminate()
    assert await asyncio.to_thread(leaving.popen.wait, PATIENCE_S) == 0
    await asyncio.to_thread(mesh.worker, "worker-1")
    await mesh.engine.release()
    [finished] = await take(client)
    assert isinstance(finished, Finished)
    assert finished.worker_id == "worker-1"


async def test_group_outlives_its_router_and_runs_once(mesh: Mesh) -> None:
    await asyncio.to_thread(mesh.worker, "worker-0")
    client = mesh.client()
    mesh.engine.hold()
    running_id, waiting_id = ask(client, num_samples=2), ask(client, env="nobody-has-it")
    await mesh.engine.until(lambda: mesh.engine.num_seen("/generate") == 2)
    address = mesh.router.ready.address
    await asyncio.to_thread(mesh.router.kill)
    mesh.router = await asyncio.to_thread(mesh.start_router, address)
    await mesh.engine.release()
    [finished] = await take(client)
    assert isinstance(finished, Finished)
    assert (finished.group_id, finished.attempt) == (running_id, 1)
    assert_exact(finished)
    assert mesh.engine.num_seen("/generate") == 4
    client.cancel(waiting_id, "enough")
    assert await take(client) == [Dropped(waiting_id, "enough")]


async def test_cancelled_group_is_aborted_at_the_engine(mesh: Mesh) -> None:
    await asyncio.to_thread(mesh.worker, "worker-0")
    client = mesh.client()
    mesh.engine.hold()
    group_id = ask(client, num_samples=1)
    await mesh.engine.until(lambda: mesh.engine.num_seen("/generate") > 0)
    client.cancel(group_id, "no longer needed")
    assert await take(client) == [Dropped(group_id, "no longer needed")]
    async with asyncio.timeout(PATIENCE_S):
        await mesh.engine.until(lambda: mesh.engine.num_seen("/abort_request") > 0)


async def test_environment_that_does_not_load_is_known_at_once(mesh: Mesh) -> None:
    client = mesh.client()
    waiting = ask(client, env="no_such_module:Env")
    argv = [sys.executable, "-m", "rollmesh.cli.main"]
    argv += mesh.worker_words("worker-0", env="no_such_module:Env")
    failed = await asyncio.to_thread(subprocess.run, argv, capture_output=True, check=False)
    assert failed.returncode == 2
    [line] = failed.stderr.decode().splitlines()
    assert "no_such_module" in line
    [dropped] = await take(client)
    assert isinstance(dropped, Dropped)
    assert dropped.group_id == waiting
    assert dropped.reason.startswith("env_failed: ")
    assert "no_such_module" in dropped.reason


NUM_JUDGED = 40
JUDGES = f"""
import threading
from rollmesh.core.types import Score, Task
from rollmesh.envs.env import Env, Transcript

class Judges(Env):
    def __init__(self, **settings):
        self.all_here = threading.Barrier({NUM_JUDGED})

    def tasks(self, split, seed):
        yield Task(id="t")

    async def run(self, task, agent):
        return Transcript()

    def score(self, task, transcript):
        self.all_here.wait({PATIENCE_S / 2})
        return Score(reward=1.0)
"""


async def test_every_rollout_may_be_in_a_blocking_score_at_once(mesh: Mesh) -> None:
    (mesh.folder / "judges.py").write_text(JUDGES)
    await asyncio.to_thread(mesh.worker, "worker-0", "judges:Judges")
    client = mesh.client()
    ask(client, num_samples=NUM_JUDGED, env="judges:Judges")
    [finished] = await take(client)
    assert isinstance(finished, Finished)
    assert {r.reward for r in finished.record.rollouts} == {1.0}


class SlowSink:
    """A client by hand: a sink that acks when the test says so."""

    def __init__(self, router: str) -> None:
        self.hub = Hub("tcp://127.0.0.1:0")
        self.dialer = Dialer(router, "c1")
        self.finished: list[tuple[bytes, GroupFinished]] = []
        self.moved: list[GroupMoved] = []

    def ask(self, group_id: GroupId) -> None:
        self.dialer.send(Packet(ClientHello("c1")))
        task = Task(id="echo-1", data={"text_seed": 1})
        body = encode_ask(GroupAsk(task=task, sampling=SamplingPolicy(), seed=7))
        message = AskGroup(
            group_id=group_id, client_id="c1", env="echo", num_samples=1, sink=self.hub.address
        )
        self.dialer.send(Packet(message, body=body))

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
        raise AssertionError("it did not happen")

    def close(self) -> None:
        self.hub.close()
        self.dialer.close()


async def test_result_is_sent_again_until_its_sink_acks(mesh: Mesh) -> None:
    await asyncio.to_thread(mesh.worker, "worker-0")
    sink, group_id = SlowSink(mesh.router.ready.address), GroupId("r1", 0)
    sink.ask(group_id)
    await asyncio.to_thread(sink.until, lambda: len(sink.finished) == 2)
    assert sink.finished[0] == sink.finished[1]
    assert GroupState.DONE not in {moved.state for moved in sink.moved}
    route, message = sink.finished[0]
    sink.hub.send(route, Packet(GroupAcked(group_id, message.attempt, duplicate=False)))
    await asyncio.to_thread(sink.until, lambda: sink.moved[-1].state is GroupState.DONE)
    assert len(sink.finished) == 2
    sink.close()
