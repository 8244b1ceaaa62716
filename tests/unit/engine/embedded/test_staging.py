"""Staged weights are used once, by the update that names them, or dropped.

The executor delays the end of its first job until the test releases it.
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


class FirstJobWaits(ThreadPoolExecutor):
    """Its first job ends only after `may_end`; `another_began` reports a second one."""

    def __init__(self) -> None:
        super().__init__(max_workers=2)
        self.may_end = threading.Event()
        self.first_is_done, self.another_began = asyncio.Event(), asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._has_first = False

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Executor.submit."""
        if self._has_first:
            self.another_began.set()
            return super().submit(fn, *args, **kwargs)
        self._has_first = True
        return super().submit(self._run_and_wait, fn, *args)

    def _run_and_wait(self, fn: Callable[..., Any], *args: Any) -> Any:
        result = fn(*args)
        self._loop.call_soon_threadsafe(self.first_is_done.set)
        self.may_end.wait(WAIT_S)
        return result


@pytest.fixture
async def executor() -> AsyncIterator[FirstJobWaits]:
    found = FirstJobWaits()
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
def segment(other_folder: Path, tmp_path: Path) -> Iterator[SharedSegment]:
    """A model's weights, in shared memory that a test may remove."""
    weights = load_file(other_folder / "model.safetensors")
    buffer = WeightBuffer()
    part = buffer.store(weights, set(weights), tmp_path)
    copy = shutil.copy(part.path, f"{part.path}-copy")
    yield msgspec.structs.replace(part, path=copy)
    Path(copy).unlink(missing_ok=True)
    buffer.close()


def post(client: Client, path: str, body: dict[str, Any]) -> asyncio.Task[ClientResponse]:
    async def answer() -> ClientResponse:
        return await client.post(path, json=body)

    return asyncio.create_task(answer())


def body_of(part: SharedSegment) -> dict[str, Any]:
    body = {"serialized_named_tensors": encode_parts([part]), "weight_version": "9"}
    return body | {"load_format": LOAD_FORMAT}


def remove(part: SharedSegment) -> None:
    Path(part.path).unlink()


async def test_an_update_waits_for_its_staged_weights_and_reads_nothing_twice(
    executor: FirstJobWaits, client: Client, segment: SharedSegment
) -> None:
    staging = post(client, "/stage_weights", body_of(segment))
    await executor.first_is_done.wait()
    remove(segment)
    assert (await client.post("/begin_weight_update")).status == 200
    update = post(client, "/update_weights_from_tensor", body_of(segment))
    await executor.another_began.wait()
    assert not update.done(), "the publisher may overwrite the segment after the answer"
    executor.may_end.set()
    answer = await update
    assert (answer.status, (await answer.json())["success"]) == (200, True)
    assert (await client.post("/end_weight_update")).status == 200
    await staging


async def test_weights_staged_after_another_update_are_dropped(
    executor: FirstJobWaits, client: Client, segment: SharedSegment, folder: Path
) -> None:
    staging = post(client, "/stage_weights", body_of(segment))
    await executor.first_is_done.wait()
    from_disk = {"model_path": str(folder), "weight_version": "9"}
    assert (await client.post("/update_weights_from_disk", json=from_disk)).status == 200
    executor.may_end.set()
    late = await staging
    assert (late.status, (await late.json())["message"]) == (400, DROPPED)
    remove(segment)
    assert (await client.post("/begin_weight_update")).status == 200
    assert (await client.post("/update_weights_from_tensor", json=body_of(segment))).status == 400


async def test_the_newer_of_two_stagings_stays_though_the_older_ends_last(
    executor: FirstJobWaits, model: Model, other_model: Model
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


async def test_a_failed_staging_stages_nothing() -> None:
    staging = Staging()

    def fail() -> Model:
        raise ModelError("no such memory")

    with pytest.raises(ModelError, match="no such memory"):
        await staging.stage((["a"], "1"), fail)
    assert staging.take((["a"], "1")) is None
