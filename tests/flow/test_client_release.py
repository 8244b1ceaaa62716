"""A client keeps no reference to what it has handed out, however its groups ended."""

import asyncio
import gc
import weakref
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest

from rollmesh.core.errors import EnvFailedError, GroupIncomplete
from rollmesh.core.types import Task
from rollmesh.serve.client.asks import Asked
from rollmesh.serve.client.async_client import AsyncRolloutClient
from rollmesh.serve.client.sync_client import SyncRolloutClient
from rollmesh.wire.messages import AskGroup, CancelGroup, GroupFailed
from rollmesh.wire.sockets import Dialer
from tests.leftovers import MARK, assert_none_left, leftovers
from tests.unit.serve.client.fake_router import (
    FakeRouter,
    finished,
    next_ack,
    result_of,
    send_result,
)

TASK = Task(id="t", data={"what": "the client was asked for"})
PATIENCE_S = 60.0
ENV = "guess"


@pytest.fixture
def router() -> Iterator[FakeRouter]:
    router = FakeRouter()
    yield router
    router.hub.close()


@pytest.fixture
async def client(router: FakeRouter, young_heap: None) -> AsyncIterator[AsyncRolloutClient]:
    del young_heap
    async with asyncio.timeout(PATIENCE_S), AsyncRolloutClient(router.hub.address) as client:
        yield client


def end_next(router: FakeRouter, how: str) -> None:
    """End the next requested group in the way that `how` names."""
    route, ask, _ = router.expect(AskGroup)
    if how == "failed":
        router.send(route, GroupFailed(ask.group_id, "env_failed: no such module"))
        return
    record = result_of(ask.group_id, task_id=MARK.decode())
    worker = Dialer(ask.sink, "w1")
    for _ in range(2 if how == "twice" else 1):
        message = finished(ask.group_id, complete=how != "incomplete")
        worker.send(msgspec.structs.replace(record, message=message))
        next_ack(worker)
    worker.close()


async def test_awaited_results_are_not_kept(router: FakeRouter, client: AsyncRolloutClient) -> None:
    errors = {"failed": EnvFailedError, "incomplete": GroupIncomplete}
    for how in ("good", "failed", "incomplete", "twice"):
        running = asyncio.create_task(client.run(TASK, env=ENV))
        await asyncio.to_thread(end_next, router, how)
        if how in errors:
            with pytest.raises(errors[how]):
                await running
        else:
            assert leftovers()
            await running
        del running
    assert_none_left(Asked)


async def test_results_of_cancelled_calls_are_not_kept(
    router: FakeRouter, client: AsyncRolloutClient
) -> None:
    running = asyncio.create_task(client.run(TASK, env=ENV))
    _, ask, _ = await asyncio.to_thread(router.expect, AskGroup)
    running.cancel()
    await asyncio.to_thread(router.expect, CancelGroup)
    worker = Dialer(ask.sink, "w1")
    send_result(worker, ask.group_id, task_id=MARK.decode())
    assert (await asyncio.to_thread(next_ack, worker)).duplicate
    worker.close()
    del running, ask
    router.asks.clear()
    await asyncio.sleep(0)
    assert_none_left(Asked)


async def test_a_waiting_stream_keeps_no_earlier_results(
    router: FakeRouter, client: AsyncRolloutClient
) -> None:
    ways = ("good", "failed", "incomplete", "twice")
    for _ in ways:
        await client.ask(TASK, 1, env=ENV)
    unanswered = await client.ask(TASK, 1, env=ENV)
    stream = client.stream()
    for how in ways:
        await asyncio.to_thread(end_next, router, how)
        assert (await anext(stream)).group_id != unanswered
    waiting = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0)
    assert_none_left()
    await client.cancel(unanswered)
    await waiting


def test_a_stream_of_the_synchronous_client_keeps_no_earlier_results(
    router: FakeRouter, young_heap: None
) -> None:
    del young_heap
    with SyncRolloutClient(router.hub.address) as client, ThreadPoolExecutor() as pool:
        for _ in range(2):
            client.ask(TASK, 1, env=ENV)
        stream = client.stream()
        end_next(router, "good")
        next(stream)
        waiting = pool.submit(lambda: next(stream).group_id)
        assert_none_left()
        end_next(router, "good")
        waiting.result(PATIENCE_S)
        assert next(stream, None) is None
        del waiting
        assert_none_left(Asked)


class Local:
    """An object that a caller holds during a call."""


def call_and_fail(client: SyncRolloutClient) -> "weakref.ref[Local]":
    local = Local()
    with suppress(EnvFailedError):
        client.run(TASK, env=ENV)
    return weakref.ref(local)


def test_an_error_holds_no_cycle_that_keeps_its_callers_locals(
    router: FakeRouter, young_heap: None
) -> None:
    del young_heap
    with SyncRolloutClient(router.hub.address) as client, ThreadPoolExecutor() as pool:
        gc.disable()
        try:
            calling = pool.submit(call_and_fail, client)
            end_next(router, "failed")
            assert calling.result(PATIENCE_S)() is None
        finally:
            gc.enable()


async def test_groups_of_an_earlier_client_are_not_kept_after_arrival(
    router: FakeRouter, tmp_path: Path, young_heap: None
) -> None:
    del young_heap
    address = router.hub.address
    async with asyncio.timeout(PATIENCE_S):
        async with AsyncRolloutClient(address, tmp_path, keep=True) as client:
            await client.ask(TASK, 1, env=ENV)
            await asyncio.to_thread(router.expect, AskGroup)
        del client
        async with AsyncRolloutClient(address, tmp_path, keep=True) as again:
            assert list(again.reopened.values()) == [TASK]
            await asyncio.to_thread(end_next, router, "good")
            assert [arrival async for arrival in again.stream()]
            assert not again.reopened
            assert_none_left(Asked)
