"""A broadcast to engines of which one is stopped, dead or absent: the others do not wait long.

Two engines in their own processes, and a third for the test that kills it.
"""

import asyncio
import os
import shutil
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack
from pathlib import Path

import msgspec
import pytest
from safetensors.torch import load_file
from structlog.testing import capture_logs

from rollmesh.core.errors import EngineUnavailable
from rollmesh.engine.backend import EngineBackend
from rollmesh.engine.http import HttpClient
from rollmesh.engine.sglang import SglangBackend
from rollmesh.testing.engine import ScriptedEngine
from rollmesh.trainer.models.folders import partial_path
from rollmesh.trainer.weights.transfer import Payload, Transfer, WeightBuffer
from rollmesh.trainer.weights.transports import distributed
from rollmesh.trainer.weights.transports.distributed import GATHER_S, DistributedTransport
from rollmesh.trainer.weights.transports.sender import JoinGroup, OpenGroup, WeightSender
from tests.contract.model import write_contract_model
from tests.contract.processes import EngineProcess, embedded_engine

PROBE = [7, 8, 9, 10, 11, 12]
TIMEOUT_S = 20.0
"""Timeout of a load that is given up: the transfer takes eight seconds of it, the file the rest."""
PATIENCE_S = 60.0
"""Timeout of a load that must not be given up: on a busy machine a group takes seconds to open."""
NEVER_S = 10 * PATIENCE_S


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """One model with two sets of weights."""
    folder = tmp_path_factory.mktemp("models")
    return [write_contract_model(folder / str(seed), seed) for seed in range(2)]


@pytest.fixture(scope="module")
def engines(folders: list[Path]) -> Iterator[list[EngineProcess]]:
    with ExitStack() as stack:
        yield [stack.enter_context(embedded_engine(folders[0])) for _ in range(2)]


@pytest.fixture
async def clients(engines: list[EngineProcess]) -> AsyncIterator[list[SglangBackend]]:
    async with HttpClient() as http:
        yield [SglangBackend(engine.address, http) for engine in engines]


@pytest.fixture
def payload(folders: list[Path], tmp_path: Path) -> Iterator[Payload]:
    """The second set, as a policy provides it."""
    weights = load_file(folders[1] / "model.safetensors")
    folder, buffer = tmp_path / "v000005", WeightBuffer()
    shutil.copytree(
        folders[1], partial_path(folder), ignore=shutil.ignore_patterns("*.safetensors")
    )
    yield Payload(5, str(folder), (buffer.store(weights, set(weights), tmp_path),))
    buffer.close()


@pytest.fixture
async def transfer(request: pytest.FixtureRequest, payload: Payload) -> AsyncIterator[Transfer]:
    transfer = Transfer(DistributedTransport(), getattr(request, "param", PATIENCE_S))
    await transfer.begin(payload)
    yield transfer
    await transfer.close()


gives_up = pytest.mark.parametrize("transfer", [TIMEOUT_S], indirect=True, ids=["gives up"])


async def scores(client: EngineBackend) -> list[float]:
    return await client.score(PROBE, "probe")


async def test_all_engines_that_join_together_are_in_one_group(
    clients: list[SglangBackend], transfer: Transfer, payload: Payload, folders: list[Path]
) -> None:
    await clients[0].update_from_disk(folders[1], 1)
    expected = await scores(clients[0])
    await asyncio.gather(*(transfer.load(client, 5, payload.folder) for client in clients))
    for client in clients:
        assert await scores(client) == expected
        info = await client.model_info()
        assert info.policy_version == 5
    assert (await clients[1].model_info()).model_path == str(folders[0])


async def test_an_engine_without_transfer_sessions_gets_the_file_and_the_others_the_broadcast(
    clients: list[SglangBackend], transfer: Transfer, payload: Payload
) -> None:
    """Like SGLang before 0.5.21; it is asked once."""
    async with ScriptedEngine() as older, HttpClient() as http:
        all_three = [SglangBackend(older.url, http), *clients]
        with capture_logs() as events:
            for _ in range(2):
                await asyncio.gather(
                    *(transfer.load(each, 5, payload.folder) for each in all_three)
                )
        assert older.weight_version == "5"
        assert older.num_seen("/begin_weight_update") == 1
    for client in clients:
        info = await client.model_info()
        assert info.policy_version == 5
        assert info.model_path != payload.folder
    assert [each["event"] for each in events] == ["engine.takes_files"]


@pytest.mark.slow
@gives_up
async def test_a_stopped_engine_blocks_no_other_and_they_get_the_file(
    engines: list[EngineProcess],
    clients: list[SglangBackend],
    transfer: Transfer,
    payload: Payload,
) -> None:
    os.kill(engines[0].pid, signal.SIGSTOP)
    try:
        with capture_logs() as logs:
            async with asyncio.timeout(PATIENCE_S):
                stopped = asyncio.create_task(transfer.load(clients[0], 5, payload.folder))
                await transfer.load(clients[1], 5, payload.folder)
    finally:
        os.kill(engines[0].pid, signal.SIGCONT)
    assert (await clients[1].model_info()).policy_version == 5
    assert (await clients[1].model_info()).model_path == payload.folder
    events = [event["event"] for event in logs]
    assert events.count("group.torn_down") == 1
    await asyncio.wait([stopped])


@pytest.mark.slow
@gives_up
async def test_an_engine_that_dies_blocks_no_other(
    folders: list[Path], clients: list[SglangBackend], transfer: Transfer, payload: Payload
) -> None:
    with embedded_engine(folders[0]) as doomed:
        async with HttpClient() as http:
            group = [SglangBackend(doomed.address, http), clients[1]]
            await asyncio.gather(*(transfer.load(each, 5, payload.folder) for each in group))
            doomed.child.kill()
            doomed.child.wait()
            loads = [transfer.load(each, 5, payload.folder) for each in group]
            async with asyncio.timeout(PATIENCE_S):
                dead, alive = await asyncio.gather(*loads, return_exceptions=True)
    assert alive is None
    assert isinstance(dead, EngineUnavailable)
    assert (await clients[1].model_info()).model_path == payload.folder


async def test_exited_sender_is_an_error_without_a_wait() -> None:
    sender = await WeightSender.started()
    opened = await sender.order(OpenGroup("group", "gloo", "127.0.0.1", 2, PATIENCE_S))
    assert opened.port
    await sender.close()
    with pytest.raises(EngineUnavailable, match="exited"):
        await sender.order(JoinGroup())


async def test_an_absent_engine_is_waited_for_only_until_the_group_opens(
    clients: list[SglangBackend], transfer: Transfer, payload: Payload
) -> None:
    await asyncio.gather(*(transfer.load(client, 5, payload.folder) for client in clients))
    await transfer.load(clients[1], 5, payload.folder)
    assert (await clients[1].model_info()).policy_version == 5


async def test_all_engines_are_in_one_group_again_after_one_was_late(
    clients: list[SglangBackend], payload: Payload, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(distributed, "GATHER_S", 0.1)
    carrier = DistributedTransport()
    await carrier.load(clients[1], payload, PATIENCE_S)
    await carrier.load(clients[0], payload, PATIENCE_S)
    monkeypatch.setattr(distributed, "GATHER_S", NEVER_S)
    newer = msgspec.structs.replace(payload, policy_version=6)
    first = asyncio.create_task(carrier.load(clients[0], newer, PATIENCE_S))
    await asyncio.wait([first], timeout=0.6)
    assert not first.done(), "it waits for the other"
    async with asyncio.timeout(PATIENCE_S):
        await asyncio.gather(first, carrier.load(clients[1], newer, PATIENCE_S))
    for client in clients:
        assert (await client.model_info()).policy_version == 6
    await carrier.close()


async def test_a_load_that_is_given_up_ends_the_transfer_for_all(
    engines: list[EngineProcess], clients: list[SglangBackend], payload: Payload
) -> None:
    """The publisher loses this engine, and it does not block the others."""
    carrier = DistributedTransport()
    await carrier.begin(payload, clients, NEVER_S)
    stuck, other = (asyncio.create_task(carrier.load(each, payload, NEVER_S)) for each in clients)
    os.kill(engines[0].pid, signal.SIGSTOP)
    try:
        await asyncio.wait([stuck, other], timeout=GATHER_S + 0.5)
        stuck.cancel()
        async with asyncio.timeout(PATIENCE_S):
            with pytest.raises(EngineUnavailable, match="its load was cancelled"):
                await other
    finally:
        os.kill(engines[0].pid, signal.SIGCONT)
    assert stuck.cancelled()
    await carrier.close()
