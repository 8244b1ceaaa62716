"""Weights are stored byte for byte, written as stock safetensors, and loaded by every engine."""

import asyncio
import json
import os
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from structlog.testing import capture_logs
from transformers import AutoModelForCausalLM

from rollmesh.core.errors import EngineError, EngineRefused, EngineUnavailable, ModelError
from rollmesh.engine.backend import EngineBackend
from rollmesh.engine.http import HttpClient
from rollmesh.engine.sglang import SglangBackend
from rollmesh.engine.shared_memory import SharedSegment
from rollmesh.tensors.segment import SHARED_MEMORY, AttachedSegment
from rollmesh.testing.engine import ScriptedEngine
from rollmesh.trainer.models.folders import begin_without_weights, load_model, partial_path
from rollmesh.trainer.ranks import named_weights
from rollmesh.trainer.weights import transfer as transfer_module
from rollmesh.trainer.weights.transfer import (
    ALIGNMENT,
    Payload,
    Transfer,
    WeightBuffer,
    write_shards,
)
from tests.unit.trainer.weights.random_weights import random_weights, read


def test_every_dtype_and_shape_is_restored_exactly(tmp_path: Path) -> None:
    weights = random_weights(seed=0)
    buffer = WeightBuffer()
    part = buffer.store(weights, set(weights), tmp_path)
    assert {name: tensor.dtype for name, tensor in weights.items()} == {
        name: tensor.dtype for name, tensor in read(part).items()
    }
    for name, tensor in read(part).items():
        assert torch.equal(tensor, weights[name]), name
    assert all(piece.offset % ALIGNMENT == 0 for piece in part.pieces)
    assert not list(tmp_path.iterdir())
    buffer.close()


def test_transposed_tensor_is_stored_in_its_logical_order(tmp_path: Path) -> None:
    weights = {"w": torch.arange(6.0).view(2, 3).t()}
    buffer = WeightBuffer()
    part = buffer.store(weights, {"w"}, tmp_path)
    assert torch.equal(read(part)["w"], weights["w"])
    buffer.close()


def test_next_version_reuses_the_memory(tmp_path: Path) -> None:
    buffer = WeightBuffer()
    first = buffer.store(random_weights(seed=0), {"matrix"}, tmp_path)
    newer = random_weights(seed=1)
    second = buffer.store(newer, {"matrix"}, tmp_path)
    assert second == first
    assert torch.equal(read(second)["matrix"], newer["matrix"])
    buffer.close()


def test_rank_stores_only_its_own_tensors(tmp_path: Path) -> None:
    buffer = WeightBuffer()
    part = buffer.store(random_weights(seed=0), {"vector", "scalar"}, tmp_path)
    assert [piece.name for piece in part.pieces] == ["vector", "scalar"]
    buffer.close()


def test_closed_buffer_is_unlinked_and_stays_mapped_for_its_readers(
    tmp_path: Path,
) -> None:
    weights = random_weights(seed=0)
    buffer = WeightBuffer()
    part = buffer.store(weights, set(weights), tmp_path)
    seen = AttachedSegment(part.path)
    buffer.close()
    assert not Path(part.path).exists()
    assert SharedSegment(part.path, part.pieces) == part
    [vector] = [piece for piece in part.pieces if piece.name == "vector"]
    data = seen.view(vector.offset, vector.num_bytes)
    assert data.tobytes() == weights["vector"].numpy().tobytes()


def test_too_small_shared_memory_falls_back_to_a_logged_file_beside_the_versions(
    tmp_path: Path,
) -> None:
    weights = random_weights(seed=0)
    buffer = WeightBuffer(shared=tmp_path / "absent")
    with capture_logs() as logs:
        part = buffer.store(weights, set(weights), tmp_path / "weights")
    assert Path(part.path).parent == tmp_path / "weights"
    assert torch.equal(read(part)["matrix"], weights["matrix"])
    [event] = [each for each in logs if each["event"] == "weights.beside_memory"]
    assert event["folder"] == str(tmp_path / "absent")
    buffer.close()
    assert not list((tmp_path / "weights").iterdir())


@pytest.mark.parametrize("folder", [SHARED_MEMORY])
def test_nothing_is_left_in_shared_memory(folder: Path, tmp_path: Path) -> None:
    before = set(folder.glob("rollmesh-*"))
    buffer = WeightBuffer()
    buffer.store(random_weights(seed=0), {"matrix"}, tmp_path)
    assert set(folder.glob("rollmesh-*")) - before
    buffer.close()
    assert set(folder.glob("rollmesh-*")) <= before


WEIGHTS = random_weights(seed=3)


@pytest.fixture
def parts(tmp_path: Path) -> Iterator[tuple[SharedSegment, SharedSegment]]:
    """Two ranks' parts of one payload."""
    buffers = WeightBuffer(), WeightBuffer()
    of_first = {"matrix", "counts", "nothing"}
    shares = of_first, WEIGHTS.keys() - of_first
    first, second = (
        buffer.store(WEIGHTS, share, tmp_path)
        for buffer, share in zip(buffers, shares, strict=True)
    )
    yield first, second
    for buffer in buffers:
        buffer.close()


def assert_are_ours(found: dict[str, torch.Tensor]) -> None:
    assert found.keys() == WEIGHTS.keys()
    for name, tensor in found.items():
        assert tensor.dtype == WEIGHTS[name].dtype
        assert torch.equal(tensor, WEIGHTS[name]), name


def test_small_weights_are_one_file(
    parts: tuple[SharedSegment, SharedSegment], tmp_path: Path
) -> None:
    write_shards(tmp_path, parts)
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]
    assert_are_ours(load_file(tmp_path / "model.safetensors"))


@pytest.mark.parametrize("max_bytes", [1, 200, 960])
def test_large_weights_are_shards_with_an_index(
    parts: tuple[SharedSegment, SharedSegment], tmp_path: Path, max_bytes: int
) -> None:
    write_shards(tmp_path, parts, max_bytes)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_bytes())
    found: dict[str, torch.Tensor] = {}
    for name in sorted(set(index["weight_map"].values())):
        shard = load_file(tmp_path / name)
        num_bytes = sum(tensor.nbytes for tensor in shard.values())
        assert num_bytes <= max_bytes or len(shard) == 1
        assert {index["weight_map"][each] for each in shard} == {name}
        found |= shard
    assert_are_ours(found)
    assert index["metadata"]["total_size"] == sum(each.nbytes for each in found.values())
    assert len(list(tmp_path.glob("*.safetensors"))) > 1


TIMEOUT_S = 10.0


class FakeTransport:
    """A transport that does nothing, or raises the given failures."""

    name = "fake"

    def __init__(self, *failures: EngineError) -> None:
        self.failures = list(failures)
        self.carried: list[int] = []
        self.gate: asyncio.Event | None = None
        self.has_begun = False
        self.prepared: list[tuple[str, int]] = []

    async def begin(
        self, payload: Payload, clients: Sequence[EngineBackend], timeout_s: float
    ) -> None:
        assert timeout_s < TIMEOUT_S
        self.has_begun = True
        self.prepared = [(client.url, payload.policy_version) for client in clients]

    async def load(self, client: EngineBackend, payload: Payload, timeout_s: float) -> None:
        assert self.has_begun
        assert timeout_s == TIMEOUT_S
        if self.gate:
            await self.gate.wait()
        if self.failures:
            raise self.failures.pop(0)
        self.carried.append(payload.policy_version)

    async def finish(self) -> None:
        """Do nothing."""

    async def close(self) -> None:
        """Do nothing."""


@pytest.fixture
def buffer() -> Iterator[WeightBuffer]:
    buffer = WeightBuffer()
    yield buffer
    buffer.close()


@pytest.fixture
def payload(tiny_folder: Path, tmp_path: Path, buffer: WeightBuffer) -> Payload:
    """The payload of a version that a policy has just stored."""
    model, folder = load_model(tiny_folder), tmp_path / "weights" / "v000007"
    begin_without_weights(model, tiny_folder, folder)
    weights = named_weights(model)
    return Payload(7, str(folder), (buffer.store(weights, set(weights), folder.parent),))


@pytest.fixture
async def engine() -> AsyncIterator[ScriptedEngine]:
    async with ScriptedEngine() as engine:
        yield engine


@pytest.fixture
async def client(engine: ScriptedEngine) -> AsyncIterator[SglangBackend]:
    async with HttpClient() as http:
        yield SglangBackend(engine.url, http)


async def test_without_a_transport_the_folder_is_complete_before_any_engine_is_called(
    payload: Payload, client: EngineBackend, engine: ScriptedEngine, tiny_folder: Path
) -> None:
    transfer = Transfer(None, TIMEOUT_S)
    await transfer.begin(payload)
    again = AutoModelForCausalLM.from_pretrained(payload.folder)
    for one, other in zip(again.parameters(), load_model(tiny_folder).parameters(), strict=True):
        assert one.equal(other)
    await transfer.load(client, 7, payload.folder)
    assert engine.weight_version == "7"
    await transfer.finish()
    assert not partial_path(Path(payload.folder)).exists()


async def test_with_a_transport_the_folder_is_written_as_well(
    payload: Payload, client: EngineBackend, engine: ScriptedEngine
) -> None:
    transport = FakeTransport()
    transfer = Transfer(transport, TIMEOUT_S)
    await transfer.begin(payload)
    await transfer.load(client, 7, payload.folder)
    assert transport.carried == [7]
    assert not engine.seen
    await transfer.finish()
    assert (Path(payload.folder) / "model.safetensors").exists()


async def test_serving_engines_are_prepared_unless_they_read_files(
    payload: Payload, client: EngineBackend
) -> None:
    transport = FakeTransport(EngineRefused("not this transport"))
    transfer = Transfer(transport, TIMEOUT_S)
    await transfer.begin(payload, [client])
    assert transport.prepared == [(client.url, 7)]
    await transfer.load(client, 7, payload.folder)
    await transfer.finish()
    await transfer.begin(payload, [client])
    assert transport.prepared == [], "it has refused"
    await transfer.finish()


async def test_engine_that_joins_later_reads_the_folder(
    payload: Payload, client: EngineBackend, engine: ScriptedEngine
) -> None:
    transport = FakeTransport()
    transfer = Transfer(transport, TIMEOUT_S)
    await transfer.begin(payload)
    await transfer.finish()
    await transfer.load(client, 7, payload.folder)
    assert not transport.carried
    assert engine.weight_version == "7"


async def test_complete_folder_is_loaded_as_it_is(
    payload: Payload, client: EngineBackend, engine: ScriptedEngine
) -> None:
    """A payload without parts: an adapter, or a model that transformers converts."""
    transport = FakeTransport()
    transfer = Transfer(transport, TIMEOUT_S)
    await transfer.begin(Payload(7, payload.folder))
    await transfer.load(client, 7, payload.folder)
    await transfer.finish()
    assert not transport.carried
    assert engine.weight_version == "7"
    assert partial_path(Path(payload.folder)).exists(), "nothing was written"


async def test_engine_that_refuses_the_transport_gets_files_and_one_log_line(
    payload: Payload, client: EngineBackend, engine: ScriptedEngine
) -> None:
    transport = FakeTransport(EngineRefused("HTTP 404: Not Found"))
    transfer = Transfer(transport, TIMEOUT_S)
    await transfer.begin(payload)
    with capture_logs() as logs:
        for _ in range(2):
            await transfer.load(client, 7, payload.folder)
    assert engine.num_seen("/update_weights_from_disk") == 2
    [event] = logs
    assert (event["event"], event["url"], event["mode"]) == (
        "engine.takes_files",
        client.url,
        "fake",
    )
    assert "404" in event["why"]
    await transfer.finish()


async def test_engine_that_fails_once_gets_the_file_and_then_the_transport_again(
    payload: Payload, client: EngineBackend, engine: ScriptedEngine
) -> None:
    transport = FakeTransport(EngineUnavailable("a peer left the group"))
    transfer = Transfer(transport, TIMEOUT_S)
    await transfer.begin(payload)
    await transfer.load(client, 7, payload.folder)
    assert engine.weight_version == "7"
    await transfer.load(client, 7, payload.folder)
    assert transport.carried == [7]
    await transfer.finish()


async def test_finish_waits_for_loads_that_read_the_payload(
    payload: Payload, client: EngineBackend
) -> None:
    transport = FakeTransport()
    transport.gate = asyncio.Event()
    transfer = Transfer(transport, TIMEOUT_S)
    await transfer.begin(payload)
    loading = asyncio.create_task(transfer.load(client, 7, payload.folder))
    await asyncio.sleep(0)
    finishing = asyncio.create_task(transfer.finish())
    await asyncio.wait([finishing], timeout=0.05)
    assert not finishing.done()
    transport.gate.set()
    await asyncio.gather(loading, finishing)
    assert transport.carried == [7]


async def test_finish_waits_for_loads_that_begin_while_the_file_is_written(
    payload: Payload, client: EngineBackend
) -> None:
    transport = FakeTransport()
    transport.gate = asyncio.Event()
    # A pipe without a reader blocks the write until it is read.
    pipe = partial_path(Path(payload.folder)) / "model.safetensors"
    os.mkfifo(pipe)
    transfer = Transfer(transport, TIMEOUT_S)
    await transfer.begin(payload)
    finishing = asyncio.create_task(transfer.finish())
    await asyncio.wait([finishing], timeout=0.05)
    loading = asyncio.create_task(transfer.load(client, 7, payload.folder))
    await asyncio.sleep(0)
    await asyncio.to_thread(pipe.read_bytes)
    await asyncio.wait([finishing], timeout=0.2)
    assert not pipe.exists(), "the folder is whole"
    assert not finishing.done()
    transport.gate.set()
    await asyncio.gather(loading, finishing)
    assert transport.carried == [7]


async def test_folder_that_an_engine_reads_is_reported(
    payload: Payload, client: EngineBackend, engine: ScriptedEngine
) -> None:
    transfer = Transfer(None, TIMEOUT_S)
    await transfer.begin(payload)
    loading = asyncio.create_task(transfer.load(client, 7, payload.folder))
    await engine.until(lambda: engine.num_seen("/update_weights_from_disk") == 1)
    assert transfer.is_loading(Path(payload.folder))
    await loading
    assert not transfer.is_loading(Path(payload.folder))


async def test_disk_error_is_one_line_that_names_the_folder(payload: Payload) -> None:
    partial_path(Path(payload.folder)).rename(Path(payload.folder).with_name("elsewhere"))
    with pytest.raises(ModelError, match="v000007: cannot be written: no such file") as caught:
        await Transfer(None, TIMEOUT_S).begin(payload)
    assert "\n" not in str(caught.value)
    transport = FakeTransport()
    transfer = Transfer(transport, TIMEOUT_S)
    await transfer.begin(payload)
    with capture_logs() as logs:
        await transfer.finish()
    assert [event["event"] for event in logs] == ["weights.not_written"]


def fill(payload: Payload) -> None:
    """Simulate a full disk: writing the weights' file fails until it is removed."""
    (partial_path(Path(payload.folder)) / "model.safetensors").symlink_to("/dev/full")


async def test_file_refused_by_a_full_disk_is_written_once_there_is_space(
    payload: Payload, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer_module, "RETRY_FILE_S", 0.01)
    fill(payload)
    transfer = Transfer(None, TIMEOUT_S)
    with capture_logs() as logs:
        await transfer.begin(payload)
    assert [(event["event"], event["log_level"]) for event in logs] == [("weights.wait", "error")]
    assert "v000007: cannot be written: no space left on device" in logs[0]["error"]
    again = AutoModelForCausalLM.from_pretrained(payload.folder)
    for one, other in zip(again.parameters(), load_model(tiny_folder).parameters(), strict=True):
        assert one.equal(other)


async def test_close_ends_the_wait_for_space(payload: Payload) -> None:
    fill(payload)
    transfer = Transfer(None, TIMEOUT_S)
    beginning = asyncio.create_task(transfer.begin(payload))
    await asyncio.wait([beginning], timeout=0.05)
    assert not beginning.done()
    await transfer.close()
    await beginning
    assert partial_path(Path(payload.folder)).exists(), "it has not become whole"
