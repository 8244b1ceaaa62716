"""The intake acks only what it has stored, and leaves unread what is not consumed."""

import gc
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
import zmq
from structlog.testing import capture_logs

from rollmesh.core.config import JournalConfig
from rollmesh.core.errors import JournalError
from rollmesh.core.ids import GroupId
from rollmesh.serve.client import client as client_module
from rollmesh.serve.client import intake
from rollmesh.serve.client.client import QUEUE_RESULTS, Dropped, RolloutClient
from rollmesh.serve.client.intake import Taken
from rollmesh.serve.client.journal_entries import Published, StateSaved
from rollmesh.wire.frames import Packet, encode
from rollmesh.wire.messages import AskGroup, GroupAcked, GroupFinished
from rollmesh.wire.sockets import Dialer
from tests.disks import full_disk, small_disk
from tests.unit.serve.client.fake_router import (
    FakeRouter,
    deliver,
    next_ack,
    next_answer,
    result_of,
    send_result,
)
from tests.unit.serve.client.test_client import ask, open_client


@pytest.fixture
def router() -> Iterator[FakeRouter]:
    router = FakeRouter()
    yield router
    router.hub.close()


def test_a_result_is_not_acked_until_it_can_be_written(router: FakeRouter, tmp_path: Path) -> None:
    client = open_client(router, tmp_path)
    unwritten, foreign = ask(client), GroupId("another-run", 0)
    worker = Dialer(client.address, "w1")
    with capture_logs() as logs:
        with full_disk(2**20):
            for _ in range(3):
                send_result(worker, unwritten, task_id="too long for the disk" * 2**16)
            worker.send(Packet(GroupFinished(foreign, 1, "w1", True)))
            # This one is refused at once: the answer shows that the sink has read all messages
            # before it.
            assert next_answer(worker).group_id == foreign
        assert client.take(timeout_s=0) == []
        send_result(worker, unwritten)
        assert next_ack(worker) == GroupAcked(unwritten, 1, duplicate=False)
    logs = [each for each in logs if each["event"] != "result.refused"]
    assert [each["event"] for each in logs] == ["journal.failed", "journal.writes_again"]
    assert f"{tmp_path}/journal/" in logs[0]["error"]
    assert [arrival.group_id for arrival in client.take(timeout_s=60)] == [unwritten]
    worker.close()
    client.close()


def test_untaken_results_stay_with_their_workers(
    router: FakeRouter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(intake, "MAX_UNTAKEN_BYTES", 10)
    client = open_client(router, tmp_path)
    first, second = ask(client), ask(client)
    router.expect(AskGroup)
    deliver(client.address, first)  # These bytes exceed the limit: nothing is read after them.
    worker = Dialer(client.address, "w2")
    send_result(worker, second)
    client.note_step(0, [])
    client.note_step(0, [])  # The intake has run a whole turn and left the result unread.
    assert [arrival.group_id for arrival in client.take(timeout_s=60)] == [first]
    assert next_ack(worker).group_id == second
    assert [arrival.group_id for arrival in client.take(timeout_s=60)] == [second]
    worker.close()
    client.close()


def test_a_full_sink_reads_only_a_few_results(
    router: FakeRouter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Messages queued in zmq use the client's memory too, and are sent repeatedly."""
    monkeypatch.setattr(intake, "MAX_UNTAKEN_BYTES", 10)
    client = open_client(router, tmp_path)
    first, second = ask(client), ask(client)
    deliver(client.address, first)
    worker: zmq.Socket[bytes]
    with closing(zmq.Context.instance().socket(zmq.DEALER)) as worker:
        worker.setsockopt(zmq.SNDHWM, 1)
        worker.connect(client.address)
        frames = encode(result_of(second, task_id="t" * 2**22))
        num_sent = 0
        while bool(worker.poll(500, zmq.POLLOUT)):
            worker.send_multipart(frames)
            num_sent += 1
            assert num_sent < 2 * QUEUE_RESULTS + 4  # in the sink, in zmq and in the kernel
        assert [each.group_id for each in client.take(timeout_s=60)] == [first]
        assert [each.group_id for each in client.take(timeout_s=60)] == [second]
    client.close()


def test_results_on_disk_are_loaded_a_few_at_a_time(
    router: FakeRouter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = open_client(router, tmp_path)
    asked = [ask(client) for _ in range(5)]
    for group_id in asked:
        deliver(client.address, group_id)
    client.close()
    monkeypatch.setattr(client_module, "MAX_FILED_BYTES", 0)
    again = open_client(router, tmp_path)
    calls: list[None] = []
    again.watch(lambda: calls.append(None))
    taken = []
    while calls:
        calls.clear()
        taken.append([arrival.group_id for arrival in again.take(timeout_s=0)])
    assert taken == [[group_id] for group_id in asked]
    again.close()


def test_a_result_that_is_missing_on_disk_is_dropped(router: FakeRouter, tmp_path: Path) -> None:
    client = open_client(router, tmp_path)
    group_id = ask(client)
    deliver(client.address, group_id)
    client.close()
    again = open_client(router, tmp_path)
    for segment in (tmp_path / "journal").glob("*.journal"):
        segment.unlink()
    [dropped] = again.take(timeout_s=60)
    assert isinstance(dropped, Dropped)
    assert dropped.group_id == group_id
    assert dropped.reason.startswith("infra_error: ")
    again.close()


@pytest.mark.usefixtures("young_heap")
def test_a_failed_client_retains_neither_its_callers_nor_their_commands(
    router: FakeRouter, tmp_path: Path
) -> None:
    client = open_client(router, tmp_path)
    client.done_with([object()])  # type: ignore[list-item]
    taken = [failing_take(client) for _ in range(5)]
    gc.collect()
    assert sum(each() is not None for each in taken[:-1]) == 0
    with pytest.raises(TypeError):
        client.note_step(0, [])
    late = [GroupId("r", seq) for seq in range(100)]
    for group_id in late:
        client.done_with([group_id])
    commands = [each for each in gc.get_objects() if isinstance(each, Taken)]
    assert not [each for each in commands if each.group_ids[0] in late]
    client.close()


class CallersObject:
    """A local object of a caller."""


def failing_take(client: RolloutClient) -> "weakref.ref[CallersObject]":
    local = CallersObject()
    with pytest.raises(TypeError):
        client.take(timeout_s=60)
    return weakref.ref(local)


def test_a_note_that_the_disk_refused_is_written_when_there_is_room(
    router: FakeRouter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = RolloutClient(router.hub.address, JournalConfig(), tmp_path, keep=True)
    client.start(StateSaved())
    with capture_logs() as logs, ExitStack() as full:
        full.enter_context(small_disk(monkeypatch, tmp_path / "journal", 0))
        with pytest.raises(JournalError, match="No space left"):
            client.note_step(0, [])

        def make_room() -> bool:
            full.close()
            return True

        client.note_published(1, 0, make_room)
        full.enter_context(small_disk(monkeypatch, tmp_path / "journal", 0))
        with pytest.raises(JournalError, match="No space left"):
            client.note_step(1, [], again=lambda: False)
    assert [each["event"] for each in logs] == ["journal.failed"]
    client.close()
    again = RolloutClient(router.hub.address, JournalConfig(), tmp_path, keep=True)
    assert (again.history.steps, again.history.published) == ((), (Published(1, 0),))
    again.close()


def test_requests_that_the_disk_refused_are_sent_in_order_when_there_is_room(
    router: FakeRouter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = open_client(router, tmp_path, keep=True)
    with capture_logs() as logs, ExitStack() as full:
        full.enter_context(small_disk(monkeypatch, tmp_path / "journal", 0))
        first, unwanted, last = (ask(client) for _ in range(3))
        client.cancel(unwanted, "of no use")
        [cancelled] = client.take(timeout_s=60)
        assert cancelled == Dropped(unwanted, "cancelled: of no use")
        full.close()
        assert [router.expect(AskGroup)[1].group_id for _ in range(2)] == [first, last]
    assert [each["event"] for each in logs] == ["journal.failed"]
    assert client.take(timeout_s=0) == []
    client.close()
    again = RolloutClient(router.hub.address, JournalConfig(), tmp_path, keep=True)
    assert [each.group_id for each in again.history.open_asks] == [first, last]
    again.close()
