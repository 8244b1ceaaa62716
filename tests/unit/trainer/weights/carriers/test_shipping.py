"""Each engine gets the weights by some way, and the folder is whole whatever that is."""

import asyncio
import os
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path

import pytest
from structlog.testing import capture_logs
from transformers import AutoModelForCausalLM

from rollmesh.core.errors import EngineError, EngineRefused, EngineUnavailable, ModelError
from rollmesh.engine.client import EngineClient
from rollmesh.engine.http import HttpClient
from rollmesh.testing.engine import ScriptedEngine
from rollmesh.trainer.models.folders import begin_without_weights, load_model, partial_path
from rollmesh.trainer.ranks import named_weights
from rollmesh.trainer.weights.carriers import shipping as shippings
from rollmesh.trainer.weights.carriers.cargo import Cargo
from rollmesh.trainer.weights.carriers.hold import Hold
from rollmesh.trainer.weights.carriers.shipping import Shipping

TIMEOUT_S = 10.0


class FakeWay:
    """A carrier that does nothing, or fails as it is told."""

    name = "fake"

    def __init__(self, *failures: EngineError) -> None:
        self.failures = list(failures)
        self.carried: list[int] = []
        self.gate: asyncio.Event | None = None
        self.has_begun = False
        self.prepared: list[tuple[str, int]] = []

    async def begin(self, cargo: Cargo, clients: Sequence[EngineClient], timeout_s: float) -> None:
        assert timeout_s < TIMEOUT_S
        self.has_begun = True
        self.prepared = [(client.url, cargo.policy_version) for client in clients]

    async def load(self, client: EngineClient, cargo: Cargo, timeout_s: float) -> None:
        assert self.has_begun
        assert timeout_s == TIMEOUT_S
        if self.gate:
            await self.gate.wait()
        if self.failures:
            raise self.failures.pop(0)
        self.carried.append(cargo.policy_version)

    async def finish(self) -> None:
        """Nothing is kept."""

    async def close(self) -> None:
        """Nothing is open."""


@pytest.fixture
def hold() -> Iterator[Hold]:
    hold = Hold()
    yield hold
    hold.close()


@pytest.fixture
def cargo(tiny_folder: Path, tmp_path: Path, hold: Hold) -> Cargo:
    """A version that a policy has just laid out."""
    model, folder = load_model(tiny_folder), tmp_path / "weights" / "v000007"
    begin_without_weights(model, tiny_folder, folder)
    weights = named_weights(model)
    return Cargo(7, str(folder), (hold.lay(weights, set(weights), folder.parent),))


@pytest.fixture
async def engine() -> AsyncIterator[ScriptedEngine]:
    async with ScriptedEngine() as engine:
        yield engine


@pytest.fixture
async def client(engine: ScriptedEngine) -> AsyncIterator[EngineClient]:
    async with HttpClient() as http:
        yield EngineClient(engine.url, http)


async def test_without_a_carrier_the_folder_is_whole_before_any_engine_is_called(
    cargo: Cargo, client: EngineClient, engine: ScriptedEngine, tiny_folder: Path
) -> None:
    shipping = Shipping(None, TIMEOUT_S)
    await shipping.begin(cargo)
    again = AutoModelForCausalLM.from_pretrained(cargo.folder)
    for one, other in zip(again.parameters(), load_model(tiny_folder).parameters(), strict=True):
        assert one.equal(other)
    await shipping.load(client, 7, cargo.folder)
    assert engine.weight_version == "7"
    await shipping.finish()
    assert not partial_path(Path(cargo.folder)).exists()


async def test_with_a_carrier_the_folder_is_written_beside_it(
    cargo: Cargo, client: EngineClient, engine: ScriptedEngine
) -> None:
    way = FakeWay()
    shipping = Shipping(way, TIMEOUT_S)
    await shipping.begin(cargo)
    await shipping.load(client, 7, cargo.folder)
    assert way.carried == [7]
    assert not engine.seen
    await shipping.finish()
    assert (Path(cargo.folder) / "model.safetensors").exists()


async def test_engines_that_serve_are_prepared_but_those_that_read_files(
    cargo: Cargo, client: EngineClient
) -> None:
    way = FakeWay(EngineRefused("not this way"))
    shipping = Shipping(way, TIMEOUT_S)
    await shipping.begin(cargo, [client])
    assert way.prepared == [(client.url, 7)]
    await shipping.load(client, 7, cargo.folder)
    await shipping.finish()
    await shipping.begin(cargo, [client])
    assert way.prepared == [], "it has refused"
    await shipping.finish()


async def test_an_engine_that_comes_later_reads_the_folder(
    cargo: Cargo, client: EngineClient, engine: ScriptedEngine
) -> None:
    way = FakeWay()
    shipping = Shipping(way, TIMEOUT_S)
    await shipping.begin(cargo)
    await shipping.finish()
    await shipping.load(client, 7, cargo.folder)
    assert not way.carried
    assert engine.weight_version == "7"


async def test_what_is_whole_as_a_folder_goes_by_that(
    cargo: Cargo, client: EngineClient, engine: ScriptedEngine
) -> None:
    """Adapters, and models that transformers converts."""
    way = FakeWay()
    shipping = Shipping(way, TIMEOUT_S)
    await shipping.begin(Cargo(7, cargo.folder))
    await shipping.load(client, 7, cargo.folder)
    await shipping.finish()
    assert not way.carried
    assert engine.weight_version == "7"
    assert partial_path(Path(cargo.folder)).exists(), "nothing was written"


async def test_what_refuses_the_carrier_gets_files_from_then_on_and_that_is_said_once(
    cargo: Cargo, client: EngineClient, engine: ScriptedEngine
) -> None:
    way = FakeWay(EngineRefused("HTTP 404: Not Found"))
    shipping = Shipping(way, TIMEOUT_S)
    await shipping.begin(cargo)
    with capture_logs() as told:
        for _ in range(2):
            await shipping.load(client, 7, cargo.folder)
    assert engine.num_seen("/update_weights_from_disk") == 2
    [event] = told
    assert (event["event"], event["url"], event["mode"]) == (
        "engine.takes_files",
        client.url,
        "fake",
    )
    assert "404" in event["why"]
    await shipping.finish()


async def test_what_fails_once_gets_the_file_and_the_next_version_by_the_carrier(
    cargo: Cargo, client: EngineClient, engine: ScriptedEngine
) -> None:
    way = FakeWay(EngineUnavailable("a peer left the group"))
    shipping = Shipping(way, TIMEOUT_S)
    await shipping.begin(cargo)
    await shipping.load(client, 7, cargo.folder)
    assert engine.weight_version == "7"
    await shipping.load(client, 7, cargo.folder)
    assert way.carried == [7]
    await shipping.finish()


async def test_finish_waits_for_who_looks_at_the_cargo(cargo: Cargo, client: EngineClient) -> None:
    way = FakeWay()
    way.gate = asyncio.Event()
    shipping = Shipping(way, TIMEOUT_S)
    await shipping.begin(cargo)
    loading = asyncio.create_task(shipping.load(client, 7, cargo.folder))
    await asyncio.sleep(0)
    finishing = asyncio.create_task(shipping.finish())
    await asyncio.wait([finishing], timeout=0.05)
    assert not finishing.done()
    way.gate.set()
    await asyncio.gather(loading, finishing)
    assert way.carried == [7]


async def test_finish_waits_for_who_comes_to_the_cargo_while_the_file_is_written(
    cargo: Cargo, client: EngineClient
) -> None:
    way = FakeWay()
    way.gate = asyncio.Event()
    # A pipe without a reader: the file is being written until there is one.
    pipe = partial_path(Path(cargo.folder)) / "model.safetensors"
    os.mkfifo(pipe)
    shipping = Shipping(way, TIMEOUT_S)
    await shipping.begin(cargo)
    finishing = asyncio.create_task(shipping.finish())
    await asyncio.wait([finishing], timeout=0.05)
    loading = asyncio.create_task(shipping.load(client, 7, cargo.folder))
    await asyncio.sleep(0)
    await asyncio.to_thread(pipe.read_bytes)
    await asyncio.wait([finishing], timeout=0.2)
    assert not pipe.exists(), "the folder is whole"
    assert not finishing.done()
    way.gate.set()
    await asyncio.gather(loading, finishing)
    assert way.carried == [7]


async def test_a_folder_that_an_engine_reads_is_known(
    cargo: Cargo, client: EngineClient, engine: ScriptedEngine
) -> None:
    shipping = Shipping(None, TIMEOUT_S)
    await shipping.begin(cargo)
    loading = asyncio.create_task(shipping.load(client, 7, cargo.folder))
    await engine.until(lambda: engine.num_seen("/update_weights_from_disk") == 1)
    assert shipping.is_loading(Path(cargo.folder))
    await loading
    assert not shipping.is_loading(Path(cargo.folder))


async def test_a_disk_that_refuses_is_one_line_that_names_the_folder(cargo: Cargo) -> None:
    partial_path(Path(cargo.folder)).rename(Path(cargo.folder).with_name("elsewhere"))
    with pytest.raises(ModelError, match="v000007: cannot be written: no such file") as caught:
        await Shipping(None, TIMEOUT_S).begin(cargo)
    assert "\n" not in str(caught.value)
    way = FakeWay()
    shipping = Shipping(way, TIMEOUT_S)
    await shipping.begin(cargo)
    with capture_logs() as told:
        await shipping.finish()
    assert [event["event"] for event in told] == ["weights.not_written"]


def fill(cargo: Cargo) -> None:
    """The disk is full: what is written as the weights' file is refused, until that is removed."""
    (partial_path(Path(cargo.folder)) / "model.safetensors").symlink_to("/dev/full")


async def test_a_file_that_a_full_disk_refused_is_written_when_there_is_room(
    cargo: Cargo, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shippings, "AGAIN_S", 0.01)
    fill(cargo)
    shipping = Shipping(None, TIMEOUT_S)
    with capture_logs() as told:
        await shipping.begin(cargo)
    assert [(event["event"], event["log_level"]) for event in told] == [("weights.wait", "error")]
    assert "v000007: cannot be written: no space left on device" in told[0]["error"]
    again = AutoModelForCausalLM.from_pretrained(cargo.folder)
    for one, other in zip(again.parameters(), load_model(tiny_folder).parameters(), strict=True):
        assert one.equal(other)


async def test_a_close_ends_the_wait_for_room(cargo: Cargo) -> None:
    fill(cargo)
    shipping = Shipping(None, TIMEOUT_S)
    beginning = asyncio.create_task(shipping.begin(cargo))
    await asyncio.wait([beginning], timeout=0.05)
    assert not beginning.done()
    await shipping.close()
    await beginning
    assert partial_path(Path(cargo.folder)).exists(), "it has not become whole"
