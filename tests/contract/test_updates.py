"""Weights are updated during generation, by rollmesh's publisher through a router, on each engine.

Many turns run on the engine, through the sampler that workers have. No reader sees an abort; each
token has the version that sampled it, which the engine's scores under both weights confirm.
"""

import zlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from rollmesh.core.config import PublishConfig
from rollmesh.core.types import SamplingParams, policy_version_of
from rollmesh.engine.backend import EngineBackend
from rollmesh.engine.http import HttpClient
from rollmesh.engine.sglang import SglangBackend
from rollmesh.runtime.generation.events import GenerationRequest
from rollmesh.runtime.generation.generation import Generation
from rollmesh.trainer.publish import PublishShell
from rollmesh.trainer.weights.verdicts import Probe
from tests.contract.engines import EngineUnderContract
from tests.contract.model import write_contract_model
from tests.contract.processes import announced
from tests.fleet_worker import FleetWorker

PROMPT = tuple(range(5, 45))
NUM_TOKENS = 300
NUM_TURNS = 48
"""More than run at once: some wait in the engine's queue."""
TO_THE_END = 2**31
VOCAB_SIZE = 2**31
"""No token is out of range."""
TOLERANCE = 5e-3


@pytest.fixture(scope="module")
def other_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The contract's model with other weights."""
    return write_contract_model(tmp_path_factory.mktemp("models") / "other", seed=1)


@pytest.fixture
def router(address: str, tmp_path: Path) -> Iterator[str]:
    """A router that knows the engine."""
    argv = ["-m", "rollmesh.cli.main", "router", "--set", f"run.folder={tmp_path}"]
    with announced([*argv, "--set", "router.beat_s=0.1", "--engine", address]) as process:
        yield process.address


class Worker(FleetWorker):
    """Requests turns of every kind."""

    def start(self, at: int) -> Generation:
        """Start turn `at`; every third cannot be resumed, every second streams."""
        params = SamplingParams(
            max_tokens=NUM_TOKENS,
            seed=zlib.crc32(b"%d" % at),
            frequency_penalty=0.0 if at % 3 else 0.01,
        )
        request = GenerationRequest(
            generation_id=str(at),
            session_key=str(at),
            prompt_ids=PROMPT,
            params=params,
            stream=at % 2 == 0,
        )
        generation = self.sampler.start(request)
        generation.join()
        return generation


@pytest.fixture
async def worker(router: str) -> AsyncIterator[Worker]:
    worker = Worker(router, VOCAB_SIZE)
    yield worker
    await worker.close()


@pytest.fixture
async def shell(router: str) -> AsyncIterator[PublishShell]:
    shell = PublishShell(router, PublishConfig(lease_s=60.0))
    yield shell
    await shell.close()


async def check_scores(
    client: EngineBackend, turn: Generation, policy_version: int, label: int
) -> None:
    """Check that the engine, with the weights of that version under the name `label`, scores its
    tokens as recorded.
    """
    all_scores = await client.score([*PROMPT, *turn.token_ids], str(label))
    at = 0
    for run in turn.policy_versions:
        stop = at + run.num_tokens
        if run.policy_version == policy_version:
            scored = all_scores[len(PROMPT) - 1 + at : len(PROMPT) - 1 + stop]
            assert turn.logprobs[at:stop].tolist() == pytest.approx(scored, abs=TOLERANCE)
        at = stop


async def test_update_during_generation_interrupts_no_turn_and_is_recorded_for_every_token(
    engine: EngineUnderContract,
    address: str,
    other_folder: Path,
    worker: Worker,
    shell: PublishShell,
) -> None:
    own_folder = Path(engine.model_path)
    first = policy_version_of((await engine.get("/model_info"))["weight_version"]) + 1
    assert (await shell.publish(first, own_folder)).updated == (address,)
    turns = [worker.start(at) for at in range(NUM_TURNS)]
    for turn in turns[:16:2]:
        await turn.wait(20)
    report = await shell.publish(first + 1, other_folder)
    assert report.updated == (address,)
    num_spanning = 0
    for at, turn in enumerate(turns):
        await turn.wait(TO_THE_END)
        assert turn.error is None
        # It ends at an end token, or has all of its tokens.
        assert turn.finish_reason == "stop" or len(turn.token_ids) == NUM_TOKENS
        versions = [run.policy_version for run in turn.policy_versions]
        assert versions in ([first], [first, first + 1], [first + 1])
        num_spanning += len(versions) == 2
        # A turn with a penalty ends under the version of its start, or restarts.
        assert at % 3 or len(versions) == 1
    assert num_spanning > 5
    assert worker.faults == []
    resumed = [turn for at, turn in enumerate(turns) if at % 3]
    async with HttpClient() as http:
        client = SglangBackend(address, http)
        for turn in resumed:
            await check_scores(client, turn, first + 1, first + 1)
        # The first weights again, under another name: their scores are unchanged.
        truth = Probe(PROMPT, tuple(await client.score(PROMPT, "0")))
        report = await shell.publish(first + 2, own_folder)
        assert report.updated == (address,)
        for turn in resumed:
            await check_scores(client, turn, first, first + 2)
        assert (await shell.publish(first + 3, own_folder, truth)).updated == ()
        assert (await shell.publish(first + 4, other_folder, truth)).updated == (address,)
        await shell.publish(first + 5, own_folder)
