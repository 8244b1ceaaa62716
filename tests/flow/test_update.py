"""Weights are updated during generation: a real router, a real engine, a real publisher.

Each recorded turn is compared with the engine's own scores: tokens before the update under the old
weights, tokens after it under the new ones.
"""

import os
import signal
import subprocess
import sys
import zlib
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path

import msgspec
import orjson
import pytest

from rollmesh.core.config import PublishConfig
from rollmesh.core.errors import EngineUnavailable
from rollmesh.core.process import Ready
from rollmesh.core.types import SamplingParams
from rollmesh.engine.http import HttpClient
from rollmesh.engine.sglang import SglangBackend
from rollmesh.runtime.generation.events import GenerationRequest
from rollmesh.runtime.generation.generation import Generation
from rollmesh.trainer.models.tiny import TinyShape, write_tiny_model
from rollmesh.trainer.publish import PublishShell
from rollmesh.trainer.weights.publisher import Publisher, PublisherSettings
from rollmesh.trainer.weights.verdicts import Probe
from rollmesh.wire.fleet import BeginUpdate, EnginePhase
from rollmesh.wire.frames import Packet
from rollmesh.wire.sockets import Dialer
from tests.fleet_worker import FleetWorker
from tests.unit.engine.embedded.tiny_adapters import write_adapter

PROMPT = tuple(range(5, 30))
NUM_TOKENS = 900
"""Long enough that an update falls within the turn; the model has 1,024 positions."""
SHAPE = TinyShape()
VOCAB_SIZE = SHAPE.max_vocab
PATIENCE_S = 60.0
TO_THE_END = 2**31


class Process:
    """A process of the mesh that has reported ready."""

    def __init__(self, *argv: str) -> None:
        reading, writing = os.pipe()
        command = [sys.executable, "-m", *argv, "--ready-fd", str(writing)]
        self.popen = subprocess.Popen(command, pass_fds=[writing])
        os.close(writing)
        with os.fdopen(reading, "rb") as pipe:
            self.ready = msgspec.json.decode(pipe.readline(), type=Ready)

    def end(self) -> None:
        self.popen.send_signal(signal.SIGTERM)
        assert self.popen.wait(PATIENCE_S) in (0, -signal.SIGTERM)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two sets of weights of one shape."""
    folders = [tmp_path_factory.mktemp("model") / f"v{seed}" for seed in range(2)]
    for seed, folder in enumerate(folders):
        write_tiny_model(folder, ["higher lower correct"] * 50, SHAPE, seed)
        for name in ("config.json", "generation_config.json"):
            forget_stops(folder / name)
    return folders


def forget_stops(path: Path) -> None:
    """Make turns end by their length only."""
    tree = orjson.loads(path.read_bytes())
    path.write_bytes(orjson.dumps({**tree, "eos_token_id": None}))


@pytest.fixture
def engine(models: list[Path]) -> Iterator[str]:
    """The address of an engine that serves the first weights as version 0."""
    process = Process(
        "rollmesh.engine.embedded",
        *("--model-dir", str(models[0]), "--weight-version", "0"),
        "--incremental-streaming-output",
    )
    yield process.ready.address
    process.end()


@pytest.fixture
def router_address(engine: str, tmp_path: Path) -> Iterator[str]:
    """The address of a router that knows the engine."""
    settings = ["--set", f"run.folder={tmp_path}", "--set", "router.beat_s=0.1"]
    process = Process("rollmesh.cli.main", "router", *settings, "--engine", engine)
    yield process.ready.address
    process.end()


class Worker(FleetWorker):
    """Requests turns of the tests' model."""

    def __init__(self, router: str) -> None:
        super().__init__(router, VOCAB_SIZE)

    def start(self, key: str, *, stream: bool, num_tokens: int, penalty: float = 0.0) -> Generation:
        """Start a turn; with a penalty it cannot be resumed."""
        request = GenerationRequest(
            generation_id=key,
            session_key=key,
            prompt_ids=PROMPT,
            params=SamplingParams(
                max_tokens=num_tokens, seed=zlib.crc32(key.encode()), frequency_penalty=penalty
            ),
            min_policy_version=0,
            stream=stream,
        )
        generation = self.sampler.start(request)
        generation.join()
        return generation


@pytest.fixture
async def worker(router_address: str) -> AsyncIterator[Worker]:
    worker = Worker(router_address)
    yield worker
    await worker.close()


@pytest.fixture
async def shell(router_address: str) -> AsyncIterator[PublishShell]:
    shell = PublishShell(router_address, PublishConfig(probe_tolerance=0.01))
    yield shell
    await shell.close()


async def scores(engine: str, token_ids: Sequence[int], key: str) -> list[float]:
    async with HttpClient() as http:
        return await SglangBackend(engine, http, VOCAB_SIZE).score(token_ids, key)


async def check_part(
    engine: str, generation: Generation, policy_version: int, begin: int, end: int
) -> None:
    """Check that the engine, now at `policy_version`, scores tokens begin..end as they were
    recorded.
    """
    scored = await scores(engine, [*PROMPT, *generation.token_ids], str(policy_version))
    recorded = generation.logprobs[begin:end]
    offset = len(PROMPT) - 1
    for mine, theirs in zip(recorded, scored[offset + begin : offset + end], strict=True):
        assert mine == pytest.approx(theirs, abs=1e-3)


async def test_running_turns_continue_with_new_weights_from_their_exact_tokens(
    worker: Worker, shell: PublishShell, engine: str, models: list[Path]
) -> None:
    turns = [worker.start(f"turn {n}", stream=n % 2 == 0, num_tokens=NUM_TOKENS) for n in range(6)]
    for turn in turns[::2]:
        assert await turn.wait(20)
    report = await shell.publish(1, models[1])
    assert report.updated == (engine,)
    for turn in turns:
        await turn.wait(TO_THE_END)
        assert (turn.finish_reason, len(turn.token_ids), turn.error) == ("length", NUM_TOKENS, None)
        assert [run.policy_version for run in turn.policy_versions] == [0, 1]
    for turn in turns:
        await check_part(engine, turn, 1, turn.policy_versions[0].num_tokens, NUM_TOKENS)
    # The first weights again, under another version: their scores are unchanged.
    await shell.publish(2, models[0])
    for turn in turns:
        await check_part(engine, turn, 2, 0, turn.policy_versions[0].num_tokens)


async def test_turn_that_cannot_resume_ends_before_its_engine_gets_new_weights(
    worker: Worker, shell: PublishShell, engine: str, models: list[Path]
) -> None:
    bound = [
        worker.start(f"b{n}", stream=n % 2 == 0, num_tokens=NUM_TOKENS, penalty=0.1)
        for n in range(4)
    ]
    free = [worker.start(f"f{n}", stream=n % 2 == 0, num_tokens=NUM_TOKENS) for n in range(4)]
    for turn in (bound[0], free[0]):
        assert await turn.wait(20)
    report = await shell.publish(1, models[1])
    assert report.updated == (engine,)
    for turn in (*bound, *free):
        await turn.wait(TO_THE_END)
        assert (turn.finish_reason, len(turn.token_ids), turn.error) == ("length", NUM_TOKENS, None)
    assert {run.policy_version for turn in bound for run in turn.policy_versions} == {0}
    assert [[run.policy_version for run in turn.policy_versions] for turn in free] == [[0, 1]] * 4


def draining_shell(router: str, seconds: float) -> PublishShell:
    """A publisher's shell whose engines may drain for `seconds`, under leases of two seconds."""
    shell = PublishShell(router, PublishConfig(lease_s=2.0))
    settings = PublisherSettings(lease_s=2.0, drain_leases=seconds / 2.0)
    shell._publisher = Publisher(settings)  # noqa: SLF001 - only tests set it
    return shell


async def test_streamed_turn_completes_even_if_it_takes_longer_than_one_lease(
    worker: Worker, router_address: str, engine: str, models: list[Path]
) -> None:
    shell = draining_shell(router_address, PATIENCE_S)
    turns = [
        worker.start(f"t{n}", stream=True, num_tokens=NUM_TOKENS, penalty=0.1) for n in range(6)
    ]
    assert await turns[0].wait(20)
    report = await shell.publish(1, models[1])
    assert report.updated == (engine,)
    for turn in turns:
        await turn.wait(TO_THE_END)
        assert (turn.finish_reason, len(turn.token_ids), turn.error) == ("length", NUM_TOKENS, None)
    assert {run.policy_version for turn in turns for run in turn.policy_versions} == {0}
    await shell.close()


async def test_turn_that_exceeds_the_drain_time_is_never_truncated(
    worker: Worker, router_address: str, engine: str, models: list[Path]
) -> None:
    shell = draining_shell(router_address, 0.6)
    crowd = [
        worker.start(f"c{n}", stream=False, num_tokens=NUM_TOKENS, penalty=0.1) for n in range(12)
    ]
    streamed = worker.start("streamed", stream=True, num_tokens=NUM_TOKENS, penalty=0.1)
    assert await streamed.wait(20)
    report = await shell.publish(1, models[1])
    assert report.updated == (engine,)
    await streamed.wait(TO_THE_END)
    assert isinstance(streamed.error, EngineUnavailable)
    assert "cannot be resumed" in str(streamed.error)
    assert streamed.finish_reason == ""
    for plain in crowd:
        await plain.wait(TO_THE_END)
        assert (plain.finish_reason, len(plain.token_ids)) == ("length", NUM_TOKENS)
        assert [run.policy_version for run in plain.policy_versions] == [1]
    await shell.close()


async def test_adapter_is_published_and_every_turn_continues_under_it(
    worker: Worker, shell: PublishShell, engine: str, models: list[Path], tmp_path: Path
) -> None:
    adapters = [write_adapter(tmp_path / f"a{seed}", models[0], seed) for seed in range(2)]
    turns = [worker.start(f"turn {n}", stream=n % 2 == 0, num_tokens=NUM_TOKENS) for n in range(4)]
    assert await turns[0].wait(20)
    for at, adapter in enumerate(adapters):
        report = await shell.publish(at + 1, adapter)
        assert report.updated == (engine,)
        assert await turns[0].wait(len(turns[0].token_ids) + 10)
    for turn in turns:
        await turn.wait(TO_THE_END)
        assert (turn.finish_reason, len(turn.token_ids), turn.error) == ("length", NUM_TOKENS, None)
        assert [run.policy_version for run in turn.policy_versions] == [0, 1, 2]
    async with HttpClient() as http:
        client = SglangBackend(engine, http, VOCAB_SIZE)
        assert await client.adapters() == ["rollmesh-v2"]
        for turn in turns:
            last = turn.policy_versions[-1].num_tokens
            scored = await client.score([*PROMPT, *turn.token_ids], "2", "rollmesh-v2")
            assert turn.logprobs[-last:].tolist() == pytest.approx(scored[-last:], abs=1e-3)
    await shell.publish(3, models[1])
    whole = worker.start("whole", stream=False, num_tokens=20)
    await whole.wait(TO_THE_END)
    await check_part(engine, whole, 3, 0, 20)


async def test_the_newer_of_two_publishers_wins_and_the_older_gets_an_error(
    worker: Worker, router_address: str, shell: PublishShell, engine: str, models: list[Path]
) -> None:
    turn = worker.start("turn", stream=True, num_tokens=NUM_TOKENS)
    assert await turn.wait(20)
    assert (await shell.publish(5, models[1])).updated == (engine,)
    late = PublishShell(router_address, PublishConfig())
    report = await late.publish(4, models[0])
    assert report.updated == ()
    assert (
        f"{engine}: {engine}: a publisher that still runs has published version 5"
        in report.failed[0]
    )
    await late.close()
    await turn.wait(TO_THE_END)
    assert [run.policy_version for run in turn.policy_versions] == [0, 5]


async def test_probe_of_other_weights_fences_the_engine_until_the_right_ones_load(
    worker: Worker, shell: PublishShell, engine: str, models: list[Path]
) -> None:
    report = await shell.publish(1, models[1])
    truth = Probe(PROMPT, tuple(await scores(engine, PROMPT, "1")))
    report = await shell.publish(2, models[0], truth)
    assert "log-probs differ" in report.failed[0]
    report = await shell.publish(3, models[1], truth)
    assert report.updated == (engine,)


async def test_engine_that_cannot_load_is_fenced_reported_and_given_no_turn(
    engine: str, models: list[Path], tmp_path: Path
) -> None:
    write_tiny_model(tmp_path / "wide", ["higher lower correct"] * 50, TinyShape(width=96), 0)
    serves_wide = ["--model-dir", str(tmp_path / "wide"), "--weight-version", "0"]
    other = Process("rollmesh.engine.embedded", *serves_wide)
    args = ["--set", f"run.folder={tmp_path}", "--set", "router.beat_s=0.1", "--engine", engine]
    process = Process("rollmesh.cli.main", "router", *args, "--engine", other.ready.address)
    worker = Worker(process.ready.address)
    shell = PublishShell(process.ready.address, PublishConfig())
    report = await shell.publish(1, models[1])
    assert report.updated == (engine,)
    assert [text.split(": ")[:2] for text in report.failed] == [[other.ready.address, "loading"]]
    url = other.ready.address
    await worker.watch.row(url, lambda row: row.phase is EnginePhase.FENCED)
    for n in range(20):
        turn = worker.start(f"turn {n}", stream=False, num_tokens=5)
        await turn.wait(TO_THE_END)
        assert (turn.engines, [run.policy_version for run in turn.policy_versions]) == (
            [engine],
            [1],
        )
    await shell.close()
    await worker.close()
    process.end()
    other.end()


async def test_publisher_that_vanishes_during_an_update_blocks_no_turn(
    worker: Worker, router_address: str, engine: str
) -> None:
    turn = worker.start("turn", stream=True, num_tokens=60)
    assert await turn.wait(5)
    publisher = Dialer(router_address, "doomed publisher")
    publisher.send(Packet(BeginUpdate(1, engine, 1, 0.5)))
    async with HttpClient() as http:
        await SglangBackend(engine, http).pause()
    publisher.close()
    await turn.wait(TO_THE_END)
    assert (turn.finish_reason, len(turn.token_ids)) == ("length", 60)
    assert [run.policy_version for run in turn.policy_versions] == [0]
