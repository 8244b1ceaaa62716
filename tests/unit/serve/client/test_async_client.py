"""AsyncRolloutClient on real sockets, with a scripted router."""

import asyncio
import gc
import os
import sys
import tempfile
import tracemalloc
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from rollmesh.core.config import JournalConfig
from rollmesh.core.errors import (
    AddressError,
    ClientClosed,
    ConfigError,
    DeadlineExceeded,
    EnvFailedError,
    GroupCancelled,
    JournalError,
    Overloaded,
)
from rollmesh.core.ids import GroupId
from rollmesh.core.types import EVAL_SAMPLING, SamplingPolicy, Task
from rollmesh.serve.client import async_client
from rollmesh.serve.client.arrivals import RawResult
from rollmesh.serve.client.async_client import AsyncRolloutClient
from rollmesh.serve.client.client import Dropped, Finished
from rollmesh.wire.frames import decode_ask
from rollmesh.wire.keys import new_keys, read_keys
from rollmesh.wire.members import ROUTER, Access
from rollmesh.wire.messages import AskGroup, AskRefused, CancelGroup, ClientLeft, GroupFailed
from rollmesh.wire.sockets import Hub
from tests.unit.serve.client.fake_router import FakeRouter, deliver

TASK = Task(id="t")
PATIENCE_S = 60.0


@pytest.fixture
async def router() -> AsyncIterator[FakeRouter]:
    router = FakeRouter()
    yield router
    router.hub.close()


@pytest.fixture
async def client(router: FakeRouter) -> AsyncIterator[AsyncRolloutClient]:
    async with asyncio.timeout(PATIENCE_S), AsyncRolloutClient(router.hub.address) as client:
        yield client


async def next_ask(router: FakeRouter) -> AskGroup:
    _, message, _ = await asyncio.to_thread(router.expect, AskGroup)
    return message


async def finish(ask: AskGroup) -> None:
    """End the group at its sink, as a worker does."""
    await asyncio.to_thread(deliver, ask.sink, ask.group_id)


async def fail(router: FakeRouter, reason: str) -> GroupId:
    """End the next requested group without a result."""
    route, ask, _ = await asyncio.to_thread(router.expect, AskGroup)
    router.send(route, GroupFailed(ask.group_id, reason))
    return ask.group_id


async def test_run_returns_the_result_of_its_group(
    router: FakeRouter, client: AsyncRolloutClient
) -> None:
    running = asyncio.create_task(client.run(TASK, env="guess", priority=3, deadline_s=60.0))
    ask = await next_ask(router)
    assert (ask.num_samples, ask.env, ask.priority) == (1, "guess", 3)
    assert 59.0 < ask.deadline_s <= 60.0
    await finish(ask)
    finished = await running
    assert isinstance(finished, Finished)
    assert (finished.group_id, finished.record.task) == (ask.group_id, TASK)


async def test_many_tasks_share_a_client_and_each_gets_its_own_result(
    router: FakeRouter, client: AsyncRolloutClient
) -> None:
    running = {
        number: asyncio.create_task(client.run_group(TASK, number, env="guess"))
        for number in range(1, 9)
    }
    asks = [await next_ask(router) for _ in running]
    for ask in reversed(asks):
        await finish(ask)
    for ask in asks:
        assert (await running[ask.num_samples]).group_id == ask.group_id


async def test_sampling_depends_on_training_or_evaluation_and_seeds_differ(
    router: FakeRouter, client: AsyncRolloutClient
) -> None:
    async def asked(**options: Any) -> Any:
        await client.ask(TASK, 1, env="guess", **options)
        _, _, packet = await asyncio.to_thread(router.expect, AskGroup)
        return decode_ask(packet.body)

    first, second = await asked(), await asked(is_eval=True)
    assert (first.sampling, first.is_eval) == (SamplingPolicy(), False)
    assert (second.sampling, second.is_eval) == (EVAL_SAMPLING, True)
    assert first.seed != second.seed
    assert (await asked(seed=5)).seed == 5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"env": "guess", "deadline": 5.0}, "no such option of a call: deadline; it has env, "),
        ({}, "env"),
    ],
)
async def test_an_option_of_a_wrong_type_raises(
    client: AsyncRolloutClient, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(TypeError, match=message):
        await client.run(TASK, **options)


async def test_a_failed_group_raises_where_it_is_awaited(
    router: FakeRouter, client: AsyncRolloutClient
) -> None:
    running = asyncio.create_task(client.run(TASK, env="guess"))
    group_id = await fail(router, "env_failed: no module named guess")
    with pytest.raises(EnvFailedError, match="no module named guess") as raised:
        await running
    assert raised.value.group_id == group_id


async def test_a_late_group_raises_and_is_cancelled_in_the_mesh(
    router: FakeRouter, client: AsyncRolloutClient
) -> None:
    running = asyncio.create_task(client.run(TASK, env="guess", deadline_s=0.2))
    ask = await next_ask(router)
    with pytest.raises(DeadlineExceeded, match=r"within 0\.2 s"):
        await running
    _, cancel, _ = await asyncio.to_thread(router.expect, CancelGroup)
    assert cancel.group_id == ask.group_id


async def test_cancelling_the_coroutine_cancels_the_group(
    router: FakeRouter, client: AsyncRolloutClient
) -> None:
    running = asyncio.create_task(client.run(TASK, env="guess"))
    ask = await next_ask(router)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    _, cancel, _ = await asyncio.to_thread(router.expect, CancelGroup)
    assert cancel.group_id == ask.group_id


async def test_an_overload_raises_at_once_for_a_caller_without_patience(
    router: FakeRouter, client: AsyncRolloutClient
) -> None:
    running = asyncio.create_task(client.run(TASK, env="guess", patience_s=0.0))
    route, ask, _ = await asyncio.to_thread(router.expect, AskGroup)
    router.send(route, AskRefused(ask.group_id, "overloaded: 9 groups wait", 1.5))
    with pytest.raises(Overloaded) as raised:
        await running
    assert raised.value.retry_after_s == 1.5


async def test_a_call_with_patience_survives_a_refusal(
    router: FakeRouter, client: AsyncRolloutClient
) -> None:
    running = asyncio.create_task(client.run(TASK, env="guess"))
    route, ask, _ = await asyncio.to_thread(router.expect, AskGroup)
    router.send(route, AskRefused(ask.group_id, "overloaded: 9 groups wait", 0.1))
    again = await next_ask(router)
    assert again.group_id == ask.group_id
    await finish(again)
    await running


async def test_calls_past_the_limit_wait_for_room(
    router: FakeRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(async_client, "MAX_CALLS", 1)
    async with asyncio.timeout(PATIENCE_S), AsyncRolloutClient(router.hub.address) as client:
        first = asyncio.create_task(client.run(TASK, env="guess"))
        ask = await next_ask(router)
        second = asyncio.create_task(client.run(TASK, env="guess"))
        with pytest.raises(Overloaded):
            await client.run(TASK, env="guess", patience_s=0.0)
        await finish(ask)
        await first
        await finish(await next_ask(router))
        await second


async def test_a_stream_yields_results_as_they_end_and_ends_with_the_last(
    router: FakeRouter, client: AsyncRolloutClient
) -> None:
    asked = [await client.ask(TASK, 2, env="guess") for _ in range(3)]
    asks = {ask.group_id: ask for ask in [await next_ask(router) for _ in asked]}
    stream = client.stream()
    await finish(asks[asked[2]])
    assert (await anext(stream)).group_id == asked[2]
    await client.cancel(asked[0], "changed my mind")
    assert await anext(stream) == Dropped(asked[0], "cancelled: changed my mind")
    await finish(asks[asked[1]])
    assert (await anext(stream)).group_id == asked[1]
    assert await anext(stream, None) is None


async def test_concurrent_streams_share_results_and_end_together(
    router: FakeRouter, client: AsyncRolloutClient
) -> None:
    async def collect() -> list[GroupId]:
        return [arrival.group_id async for arrival in client.stream()]

    asked = {await client.ask(TASK, 2, env="guess") for _ in range(6)}
    listening = [asyncio.create_task(collect()) for _ in range(2)]
    for _ in asked:
        await finish(await next_ask(router))
    received = [group_id for each in listening for group_id in await each]
    assert sorted(received) == sorted(asked)


async def test_leaving_notifies_the_router_and_waiting_callers(router: FakeRouter) -> None:
    async with asyncio.timeout(PATIENCE_S):
        async with AsyncRolloutClient(router.hub.address) as client:
            running = asyncio.create_task(client.run(TASK, env="guess"))
            await next_ask(router)
        with pytest.raises(GroupCancelled, match="closed"):
            await running
        await asyncio.to_thread(router.expect, ClientLeft)


async def test_calls_of_a_closed_client_raise_instead_of_hanging(
    router: FakeRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(async_client, "MAX_CALLS", 1)
    async with asyncio.timeout(PATIENCE_S):
        async with AsyncRolloutClient(router.hub.address) as client:
            await client.ask(TASK, 1, env="guess")
            waiting = [asyncio.create_task(client.run(TASK, env="guess")) for _ in range(2)]
            await asyncio.sleep(0)  # both wait for capacity
        for each in waiting:
            with pytest.raises(ClientClosed):
                await each
        with pytest.raises(ClientClosed):
            await client.run(TASK, env="guess")


async def test_the_next_client_of_a_folder_streams_the_results_that_the_last_one_left(
    router: FakeRouter, tmp_path: Path
) -> None:
    async with asyncio.timeout(PATIENCE_S):
        address = router.hub.address
        async with AsyncRolloutClient(address, tmp_path, keep=True) as client:
            running = asyncio.create_task(client.run(TASK, env="guess"))
            had = await next_ask(router)
            await finish(had)
            await running
            unread, still_open = [await client.ask(TASK, 2, env="guess") for _ in range(2)]
            await finish(await next_ask(router))
            await next_ask(router)
        async with AsyncRolloutClient(address, tmp_path, keep=True) as again:
            assert again.reopened == {still_open: TASK}
            assert again.num_ended == 1
            stream = again.stream()
            assert (await anext(stream)).group_id == unread
            await finish(await next_ask(router))
            assert (await anext(stream)).group_id == still_open
            assert await anext(stream, None) is None
        async with AsyncRolloutClient(address, tmp_path, keep=True) as last:
            assert (last.num_ended, last.reopened) == (0, {})


@pytest.mark.usefixtures("young_heap")
async def test_unstreamed_results_wait_in_the_journal(
    router: FakeRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_bytes, num_results = 200_000, 20
    monkeypatch.setattr(async_client, "MAX_HELD_BYTES", 5 * num_bytes)
    async with asyncio.timeout(PATIENCE_S), AsyncRolloutClient(router.hub.address) as client:
        asks = []
        for _ in range(num_results):
            await client.ask(TASK, 1, env="guess")
            asks.append(await next_ask(router))
        tracemalloc.start()
        try:
            for ask in asks:
                await asyncio.to_thread(deliver, ask.sink, ask.group_id, 1, "x" * num_bytes)
            while client.num_ended < num_results:  # noqa: ASYNC110 - without an event
                await asyncio.sleep(0)
            held_bytes, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert held_bytes < 7 * num_bytes
        streamed = [arrival async for arrival in client.stream()]
        await client.ask(TASK, 1, env="guess")
        last = await next_ask(router)
        await asyncio.to_thread(deliver, last.sink, last.group_id, 1, "x" * num_bytes)
        while client.num_ended < 1:  # noqa: ASYNC110 - without an event
            await asyncio.sleep(0)
        # The streamed results have released their capacity.
        assert [each for each in gc.get_objects() if isinstance(each, RawResult)]
    assert [arrival.group_id for arrival in streamed] == [ask.group_id for ask in asks]
    assert all(isinstance(each, Finished) for each in streamed)


async def test_a_client_with_keep_and_without_a_folder_is_refused() -> None:
    with pytest.raises(ConfigError, match="keep: name a folder"):
        AsyncRolloutClient("tcp://127.0.0.1:1", keep=True)


async def test_the_folder_of_a_live_client_is_refused(router: FakeRouter, tmp_path: Path) -> None:
    async with AsyncRolloutClient(router.hub.address, tmp_path, journal=JournalConfig()):
        with pytest.raises(JournalError, match="another process"):
            AsyncRolloutClient(router.hub.address, tmp_path)


async def test_keys_are_read_from_the_file_that_the_environment_variable_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    new_keys(tmp_path / "keys.json")
    monkeypatch.setenv("ROLLMESH_KEYS", str(tmp_path / "keys.json"))
    guarded = FakeRouter()
    guarded.hub.close()
    keys = read_keys()
    assert keys
    guarded.hub = Hub("tcp://127.0.0.1:0", keys, access=Access(keys, ROUTER))
    async with asyncio.timeout(PATIENCE_S), AsyncRolloutClient(guarded.hub.address) as client:
        asked = await client.ask(TASK, 1, env="guess")
        assert (await next_ask(guarded)).group_id == asked
    guarded.hub.close()


async def test_a_router_on_another_machine_requires_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ROLLMESH_KEYS", raising=False)
    with pytest.raises(AddressError, match="set ROLLMESH_KEYS to the mesh's key file"):
        AsyncRolloutClient("tcp://192.0.2.7:5555")


KILLED = """
import os, sys
from rollmesh.serve.client.async_client import AsyncRolloutClient
client = AsyncRolloutClient(sys.argv[1])
os._exit(9)
"""


async def test_a_new_client_removes_scratch_folders_of_killed_clients_only(
    router: FakeRouter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    killed = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", KILLED, router.hub.address), env={"TMPDIR": str(tmp_path)}
    )
    assert await killed.wait() == 9
    [left] = os.listdir(tmp_path)
    async with AsyncRolloutClient(router.hub.address):
        [own] = os.listdir(tmp_path)
        assert own != left
        async with AsyncRolloutClient(router.hub.address):
            assert len(os.listdir(tmp_path)) == 2
        assert os.listdir(tmp_path) == [own]
    assert os.listdir(tmp_path) == []
