"""The contract of weights without a file: from memory of the host, and from a group.

The publisher's own transports load them, from the memory in which a policy places them.
"""

import asyncio
import base64
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import msgspec
import pytest
from safetensors.torch import load_file

from rollmesh.engine.backend import EngineBackend
from rollmesh.engine.http import HttpClient
from rollmesh.engine.sglang import SglangBackend
from rollmesh.trainer.weights.transfer import Payload, WeightBuffer
from rollmesh.trainer.weights.transports.distributed import GATHER_S, DistributedTransport
from rollmesh.trainer.weights.transports.sglang import update_session
from rollmesh.trainer.weights.transports.tensor import TensorTransport
from tests.contract.engines import EngineUnderContract
from tests.contract.model import write_contract_model

PROBE = [7, 8, 9, 10, 11, 12]
TIMEOUT_S = 30.0
CLOSE = 1e-5


@pytest.fixture(scope="session")
def newer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One model with other weights."""
    return write_contract_model(tmp_path_factory.mktemp("models") / "newer", seed=1)


@pytest.fixture(scope="session")
def payload(newer_folder: Path) -> Iterator[Payload]:
    """The newer weights, in the memory of a rank."""
    weights = load_file(newer_folder / "model.safetensors")
    buffer = WeightBuffer()
    yield Payload(71, str(newer_folder), (buffer.store(weights, set(weights), newer_folder),))
    buffer.close()


@pytest.fixture
async def client(engine: EngineUnderContract, address: str) -> AsyncIterator[SglangBackend]:
    """The publisher's client; afterwards the engine has its own weights again."""
    before = (await engine.get("/model_info"))["weight_version"]
    async with HttpClient() as http:
        client = SglangBackend(address, http)
        yield client
    restored = await engine.post(
        "/update_weights_from_disk", model_path=engine.model_path, weight_version=before
    )
    assert restored.json()["success"] is True


async def scores_of_folder(
    engine: EngineUnderContract, client: EngineBackend, folder: Path
) -> list[float]:
    await client.update_from_disk(folder, 70)
    scores = await client.score(PROBE, "70")
    await client.update_from_disk(Path(engine.model_path), 69)
    assert await client.score(PROBE, "69") != pytest.approx(scores, abs=CLOSE)
    return scores


async def test_weights_from_memory_score_like_those_of_the_file(
    engine: EngineUnderContract, client: EngineBackend, payload: Payload, newer_folder: Path
) -> None:
    expected = await scores_of_folder(engine, client, newer_folder)
    await client.pause()
    await client.flush()
    carrier = TensorTransport()
    await carrier.load(client, payload, TIMEOUT_S)
    await client.resume()
    assert await client.score(PROBE, "71") == pytest.approx(expected, abs=CLOSE)
    assert (await client.model_info()).policy_version == 71
    await carrier.finish()
    await carrier.close()


@pytest.mark.slow
async def test_broadcast_weights_score_like_those_of_the_file_repeatedly(
    engine: EngineUnderContract, client: EngineBackend, payload: Payload, newer_folder: Path
) -> None:
    expected = await scores_of_folder(engine, client, newer_folder)
    carrier = DistributedTransport()
    await carrier.begin(payload, [client], TIMEOUT_S)
    await client.pause()
    await client.flush()
    await carrier.load(client, payload, TIMEOUT_S)
    await client.resume()
    assert await client.score(PROBE, "71") == pytest.approx(expected, abs=CLOSE)
    assert (await client.model_info()).policy_version == 71
    await client.update_from_disk(Path(engine.model_path), 72)
    await client.pause()
    # The group exists, and no other engine will join.
    async with asyncio.timeout(GATHER_S):
        await carrier.load(client, msgspec.structs.replace(payload, policy_version=73), TIMEOUT_S)
    await client.resume()
    assert await client.score(PROBE, "73") == pytest.approx(expected, abs=CLOSE)
    await carrier.close()


async def test_a_transfer_session_of_a_killed_publisher_is_closed(
    engine: EngineUnderContract, client: EngineBackend, payload: Payload
) -> None:
    await client.command("/begin_weight_update", {})
    async with update_session(client):
        pass
    assert (await engine.post("/end_weight_update")).status_code == 400


async def test_a_load_that_fails_leaves_no_transfer_session_open(
    engine: EngineUnderContract, client: EngineBackend
) -> None:
    with pytest.raises(ZeroDivisionError):
        async with update_session(client):
            raise ZeroDivisionError
    assert (await engine.post("/begin_weight_update")).status_code == 200
    assert (await engine.post("/begin_weight_update")).status_code == 400
    assert (await engine.post("/end_weight_update")).status_code == 200


async def test_weights_outside_of_a_transfer_session_are_refused(
    engine: EngineUnderContract,
) -> None:
    encoded = base64.b64encode(b"{}").decode()
    for form in ("shared_memory", None):
        body = {"serialized_named_tensors": [encoded], "load_format": form}
        refused = await engine.post("/update_weights_from_tensor", **body)
        assert refused.status_code == 400
        assert refused.json()["success"] is False
    await engine.generate(PROBE)


async def test_a_transfer_session_waits_for_no_request(
    engine: EngineUnderContract, client: EngineBackend
) -> None:
    """Requests that a pause holds continue after it."""
    await client.pause()
    held = asyncio.create_task(engine.generate(PROBE))
    async with update_session(client):
        pass
    assert not held.done()
    await client.resume()
    assert (await held)["meta_info"]["finish_reason"]["type"] == "length"
