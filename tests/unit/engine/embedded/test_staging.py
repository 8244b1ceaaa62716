"""What is made ahead: taken once by who says the same, and nobody's once other weights came.

The order of things is the test's own: the first thing that an engine does beside its steps is kept
back when it is done, until the test lets it go.
"""

import asyncio
import shutil
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiohttp import ClientResponse, web
from aiohttp.test_utils import TestClient, TestServer
from safetensors.torch import load_file

from rollmesh.core.errors import ModelError
from rollmesh.engine.embedded.engine import StepLoop
from rollmesh.engine.embedded.model import Model
from rollmesh.engine.embedded.weight_loading import DROPPED, Staging
from rollmesh.engine.embedded.weight_routes import WeightRoutes
from rollmesh.engine.shared_memory import LOAD_FORMAT, SharedSegment, encode_parts
from rollmesh.trainer.weights.transfer import WeightBuffer
from tests.unit.engine.embedded.driving import make_engine

Client = TestClient[web.Request, web.Application]
WAIT_S = 30.0


class KeepsBackTheFirst(ThreadPoolExecutor):
    """Its first job ends only when it may; that others are begun meanwhile is told."""

    def __init__(self) -> None:
        super().__init__(max_workers=2)
        self.may_end = threading.Event()
        self.first_is_done, self.another_began = asyncio.Event(), asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._has_first = False

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """As an Executor has it."""
        if self._has_first:
            self.another_began.set()
            return super().submit(fn, *args, **kwargs)
        self._has_first = True
        return super().submit(self._kept_back, fn, *args)

    def _kept_back(self, fn: Callable[..., Any], *args: Any) -> Any:
        result = fn(*args)
        self._loop.call_soon_threadsafe(self.first_is_done.set)
        self.may_end.wait(WAIT_S)
        return result


@pytest.fixture
async def executor() -> AsyncIterator[KeepsBackTheFirst]:
    found = KeepsBackTheFirst()
    asyncio.get_running_loop().set_default_executor(found)
    yield found
    found.may_end.set()


@pytest.fixture
async def client(model: Model, folder: Path) -> AsyncIterator[Client]:
    engine = make_engine(model)
    steps = StepLoop(engine, asyncio.get_running_loop())
    steps.start()
    app = web.Application()
    routes = WeightRoutes(steps, engine, str(folder))
    for path, methods in routes.handlers().items():
        for method, handler in methods.items():
            app.router.add_route(method, path, handler)
    async with TestClient(TestServer(app)) as found:
        yield found
    steps.stop()


@pytest.fixture
def laid(other_folder: Path, tmp_path: Path) -> Iterator[SharedSegment]:
    """All of a model, in memory that a test may take away."""
    weights = load_file(other_folder / "model.safetensors")
    buffer = WeightBuffer()
    part = buffer.store(weights, set(weights), tmp_path)
    laid = shutil.copy(part.path, f"{part.path}-copy")
    yield msgspec.structs.replace(part, path=laid)
    Path(laid).unlink(missing_ok=True)
    buffer.close()


def post(client: Client, path: str, body: dict[str, Any]) -> asyncio.Task[ClientResponse]:
    async def answer() -> ClientResponse:
        return await client.post(path, json=body)

    return asyncio.create_task(answer())


def body_of(part: SharedSegment) -> dict[str, Any]:
    says = {"serialized_named_tensors": encode_parts([part]), "weight_version": "9"}
    return says | {"load_format": LOAD_FORMAT}


def take_away(part: SharedSegment) -> None:
    Path(part.path).unlink()


async def test_update_waits_for_what_is_staged_as_it_says_and_reads_nothing_twice(
    executor: KeepsBackTheFirst, client: Client, laid: SharedSegment
) -> None:
    staging = post(client, "/stage_weights", body_of(laid))
    await executor.first_is_done.wait()
    take_away(laid)
    assert (await client.post("/begin_weight_update")).status == 200
    update = post(client, "/update_weights_from_tensor", body_of(laid))
    await executor.another_began.wait()
    assert not update.done(), "the publisher may lay the next version once it is answered"
    executor.may_end.set()
    answer = await update
    assert (answer.status, (await answer.json())["success"]) == (200, True)
    assert (await client.post("/end_weight_update")).status == 200
    await staging


async def test_what_was_staged_too_late_for_its_swap_does_not_stay(
    executor: KeepsBackTheFirst, client: Client, laid: SharedSegment, folder: Path
) -> None:
    staging = post(client, "/stage_weights", body_of(laid))
    await executor.first_is_done.wait()
    from_disk = {"model_path": str(folder), "weight_version": "9"}
    assert (await client.post("/update_weights_from_disk", json=from_disk)).status == 200
    executor.may_end.set()
    late = await staging
    assert (late.status, (await late.json())["message"]) == (400, DROPPED)
    take_away(laid)
    assert (await client.post("/begin_weight_update")).status == 200
    assert (await client.post("/update_weights_from_tensor", json=body_of(laid))).status == 400


async def test_of_two_that_are_staged_the_newer_stays_though_the_older_ends_last(
    executor: KeepsBackTheFirst, model: Model, other_model: Model
) -> None:
    staging = Staging()
    older = asyncio.create_task(staging.stage((["a"], "1"), lambda: model))
    await asyncio.sleep(0)
    await staging.stage((["b"], "2"), lambda: other_model)
    executor.may_end.set()
    with pytest.raises(ModelError, match=DROPPED):
        await older
    taken = staging.take((["b"], "2"))
    assert taken is not None
    assert await taken is other_model
    assert staging.take((["b"], "2")) is None


async def test_what_is_no_model_stages_nothing() -> None:
    staging = Staging()

    def fail() -> Model:
        raise ModelError("no such memory")

    with pytest.raises(ModelError, match="no such memory"):
        await staging.stage((["a"], "1"), fail)
    assert staging.take((["a"], "1")) is None
