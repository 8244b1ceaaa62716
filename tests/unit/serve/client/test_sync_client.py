"""SyncRolloutClient on real sockets, with a scripted router."""

import asyncio
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest

from rollmesh.core.config import JournalConfig
from rollmesh.core.errors import ClientClosed, EnvFailedError, GroupCancelled
from rollmesh.core.types import SamplingPolicy, Task
from rollmesh.serve.client.arrivals import Dropped, Finished
from rollmesh.serve.client.client import RolloutClient
from rollmesh.serve.client.sync_client import SyncRolloutClient
from rollmesh.wire.messages import AskGroup, CancelGroup, ClientLeft, GroupFailed
from tests.unit.serve.client.fake_router import FakeRouter, deliver

TASK = Task(id="t")
PATIENCE_S = 60.0


@pytest.fixture
def router() -> Iterator[FakeRouter]:
    router = FakeRouter()
    yield router
    router.hub.close()


@pytest.fixture
def client(router: FakeRouter) -> Iterator[SyncRolloutClient]:
    with SyncRolloutClient(router.hub.address) as client:
        yield client


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor() as pool:
        yield pool


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """Make SIGINT raise KeyboardInterrupt, whatever handler earlier tests installed."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def next_ask(router: FakeRouter) -> AskGroup:
    return router.expect(AskGroup)[1]


def test_threads_share_a_client_and_each_gets_its_own_result(
    router: FakeRouter, client: SyncRolloutClient, pool: ThreadPoolExecutor
) -> None:
    running = {n: pool.submit(client.run_group, TASK, n, env="guess") for n in range(1, 5)}
    asks = [next_ask(router) for _ in running]
    for ask in reversed(asks):
        deliver(ask.sink, ask.group_id)
    for ask in asks:
        finished = running[ask.num_samples].result(PATIENCE_S)
        assert isinstance(finished, Finished)
        assert finished.group_id == ask.group_id


def test_a_failed_group_raises_where_it_is_waited_for(
    router: FakeRouter, client: SyncRolloutClient, pool: ThreadPoolExecutor
) -> None:
    running = pool.submit(client.run, TASK, env="guess", deadline_s=60.0)
    route, ask, _ = router.expect(AskGroup)
    router.send(route, GroupFailed(ask.group_id, "env_failed: no module named guess"))
    with pytest.raises(EnvFailedError, match="no module named guess"):
        running.result(PATIENCE_S)


def test_a_stream_yields_all_results_and_ends_with_the_last(
    router: FakeRouter, client: SyncRolloutClient
) -> None:
    asked = [client.ask(TASK, 2, env="guess") for _ in range(3)]
    asks = {ask.group_id: ask for ask in [next_ask(router) for _ in asked]}
    stream = client.stream()
    deliver(asks[asked[2]].sink, asked[2])
    assert next(stream).group_id == asked[2]
    client.cancel(asked[0], "changed my mind")
    assert next(stream) == Dropped(asked[0], "cancelled: changed my mind")
    deliver(asks[asked[1]].sink, asked[1])
    assert [arrival.group_id for arrival in stream] == [asked[1]]


async def test_the_client_works_inside_a_running_loop_as_in_a_notebook(router: FakeRouter) -> None:
    async with asyncio.timeout(PATIENCE_S):
        with SyncRolloutClient(router.hub.address) as client:
            asked = client.ask(TASK, 1, env="guess")
            ask = await asyncio.to_thread(next_ask, router)
            deliver(ask.sink, ask.group_id)
            assert [arrival.group_id for arrival in client.stream()] == [asked]


@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_in_a_waiting_call_cancels_its_group_and_no_other(
    router: FakeRouter, client: SyncRolloutClient, pool: ThreadPoolExecutor
) -> None:
    other = pool.submit(client.run, TASK, env="other")
    others_ask = next_ask(router)

    def interrupt() -> None:
        assert next_ask(router).env == "mine"
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    interrupting = pool.submit(interrupt)
    with pytest.raises(KeyboardInterrupt):
        client.run(TASK, env="mine")
    interrupting.result(PATIENCE_S)
    assert router.expect(CancelGroup)[1].group_id != others_ask.group_id
    deliver(others_ask.sink, others_ask.group_id)
    assert other.result(PATIENCE_S).group_id == others_ask.group_id


def test_closing_ends_waiting_and_later_calls(router: FakeRouter, pool: ThreadPoolExecutor) -> None:
    client = SyncRolloutClient(router.hub.address)
    running = pool.submit(client.run, TASK, env="guess")
    next_ask(router)
    client.close()
    client.close()
    with pytest.raises(GroupCancelled, match="closed"):
        running.result(PATIENCE_S)
    with pytest.raises(ClientClosed, match="was closed"):
        client.run(TASK, env="guess")
    router.expect(ClientLeft)


def test_results_of_an_abandoned_stream_count_as_taken(
    router: FakeRouter, client: SyncRolloutClient
) -> None:
    for _ in range(2):
        client.ask(TASK, 1, env="guess")
        ask = next_ask(router)
        deliver(ask.sink, ask.group_id)
    had = [arrival.group_id for arrival, _ in zip(client.stream(), range(1), strict=False)]
    assert [arrival.group_id for arrival in client.stream()] != had


def error_in_a_fork(call: Callable[[], object]) -> str:
    """Return the ClientClosed that `call` raises in a forked process."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            call()
        except ClientClosed as error:
            os.write(writing, str(error).encode())
        finally:
            os._exit(0)
    os.close(writing)
    message = os.read(reading, 1000)
    os.close(reading)
    os.waitpid(child, 0)
    return message.decode()


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_calls_in_a_forked_process_raise_at_once(
    router: FakeRouter, client: SyncRolloutClient, tmp_path: Path
) -> None:
    why = f"this client is that of process {os.getpid()}: open another"
    assert error_in_a_fork(lambda: client.run(TASK, env="guess")) == why
    with closing(RolloutClient(router.hub.address, JournalConfig(), tmp_path)) as plain:
        plain.start()
        assert error_in_a_fork(lambda: plain.take(60.0)) == why
        ask = {"env": "guess", "num_samples": 1, "sampling": SamplingPolicy(), "seed": 0}
        assert error_in_a_fork(lambda: plain.ask(TASK, **ask)) == why  # type: ignore[arg-type]
