"""RolloutClient on real sockets: what is asked for is handed out once, and survives a restart."""

import resource
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

import pytest

from rollmesh.core.config import JournalConfig
from rollmesh.core.errors import AddressError, JournalError
from rollmesh.core.ids import GroupId
from rollmesh.core.types import GroupRecord, SamplingPolicy, Task
from rollmesh.serve.client.client import Dropped, Finished, RolloutClient
from rollmesh.wire.bodies import decode_ask, encode_record
from rollmesh.wire.frames import Packet
from rollmesh.wire.messages import (
    AnyMessage,
    AskGroup,
    CancelGroup,
    ClientHello,
    ClientLeft,
    GroupAcked,
    GroupFailed,
    GroupFinished,
    RouterHello,
)
from rollmesh.wire.sockets import Dialer, Hub, wait

CONFIG = JournalConfig(segment_bytes=2**16)
M = TypeVar("M")


class FakeRouter:
    """A hub that answers hellos and remembers what it is told."""

    def __init__(self) -> None:
        self.hub = Hub("tcp://127.0.0.1:0")
        self.packets: list[tuple[bytes, Packet]] = []

    def expect(self, kind: type[M]) -> tuple[bytes, M, Packet]:
        """The next message of this kind, removed; others stay."""
        for _ in range(200):
            for at, (route, packet) in enumerate(self.packets):
                if isinstance(packet.message, kind):
                    del self.packets[at]
                    return route, packet.message, packet
            wait([self.hub], None, 0.1)
            for route, packet in self.hub.receive():
                if isinstance(packet.message, ClientHello):
                    self.say(route, RouterHello(0.1))
                self.packets.append((route, packet))
        raise AssertionError(f"no {kind.__name__}")

    def say(self, route: bytes, message: AnyMessage) -> None:
        self.hub.send(route, Packet(message, "i1"))


@pytest.fixture
def router() -> Iterator[FakeRouter]:
    router = FakeRouter()
    yield router
    router.hub.close()


def open_client(router: FakeRouter, folder: Path) -> RolloutClient:
    client = RolloutClient(router.hub.address, CONFIG, folder)
    client.start()
    return client


def ask(client: RolloutClient) -> GroupId:
    return client.ask(
        Task(id="t", data={"n": 1}), env="guess", num_samples=2, sampling=SamplingPolicy(), seed=5
    )


def send_result(worker: Dialer, group_id: GroupId, attempt: int = 1, task_id: str = "t") -> None:
    """Send a complete result as a worker does."""
    body = encode_record(GroupRecord(task=Task(id=task_id)))
    worker.send(Packet(GroupFinished(group_id, attempt, "w1", True), "", body, (b"", b"")))


def next_ack(worker: Dialer) -> GroupAcked:
    for _ in range(200):
        wait([worker], None, 0.1)
        for packet in worker.receive(1):
            assert isinstance(packet.message, GroupAcked)
            return packet.message
    raise AssertionError("no ack")


def deliver(client: RolloutClient, group_id: GroupId, attempt: int = 1) -> GroupAcked:
    """Send a complete result; the sink's ack."""
    worker = Dialer(client.address, f"w{attempt}")
    send_result(worker, group_id, attempt)
    ack = next_ack(worker)
    worker.close()
    return ack


def test_ask_reaches_the_router_and_its_result_is_acked_and_taken(
    router: FakeRouter, tmp_path: Path
) -> None:
    client = open_client(router, tmp_path)
    group_id = ask(client)
    _, message, packet = router.expect(AskGroup)
    assert (message.group_id, message.env, message.num_samples) == (group_id, "guess", 2)
    assert message.sink == client.address
    assert decode_ask(packet.body).seed == 5
    assert deliver(client, group_id) == GroupAcked(group_id, 1, duplicate=False)
    [finished] = client.take(timeout_s=5)
    assert isinstance(finished, Finished)
    assert finished.group_id == group_id
    assert deliver(client, group_id, attempt=2) == GroupAcked(group_id, 2, duplicate=True)
    assert client.take(timeout_s=0) == []
    client.close()
    router.expect(ClientLeft)


def test_cancelled_group_is_handed_out_as_dropped(router: FakeRouter, tmp_path: Path) -> None:
    client = open_client(router, tmp_path)
    group_id = ask(client)
    router.expect(AskGroup)
    client.cancel(group_id, "no longer needed")
    assert client.take(timeout_s=5) == [Dropped(group_id, "cancelled: no longer needed")]
    _, message, _ = router.expect(CancelGroup)
    assert message.group_id == group_id
    assert deliver(client, group_id).duplicate
    client.close()


def test_failed_group_is_handed_out_as_dropped(router: FakeRouter, tmp_path: Path) -> None:
    client = open_client(router, tmp_path)
    group_id = ask(client)
    route, _, _ = router.expect(AskGroup)
    router.say(route, GroupFailed(group_id, "env_failed: no such module"))
    assert client.take(timeout_s=5) == [Dropped(group_id, "env_failed: no such module")]
    client.close()


def test_untaken_results_are_handed_out_again_after_a_restart(
    router: FakeRouter, tmp_path: Path
) -> None:
    client = open_client(router, tmp_path)
    trained, waiting = ask(client), ask(client)
    for group_id in (trained, waiting):
        deliver(client, group_id)
    client.note_step(0, [trained])
    client.note_published(1, 1)
    client.close()
    again = open_client(router, tmp_path)
    [finished] = again.take(timeout_s=5)
    assert finished.group_id == waiting
    assert deliver(again, trained).duplicate
    assert ask(again).run_id != trained.run_id
    again.close()


def test_freeing_keeps_what_was_not_taken_yet(router: FakeRouter, tmp_path: Path) -> None:
    client = open_client(router, tmp_path)
    group_id = ask(client)
    deliver(client, group_id)
    client.free(2**62)
    client.close()
    again = open_client(router, tmp_path)
    assert [arrival.group_id for arrival in again.take(timeout_s=5)] == [group_id]
    again.close()


def test_asks_wait_while_the_journal_is_full(router: FakeRouter, tmp_path: Path) -> None:
    client = RolloutClient(router.hub.address, JournalConfig(max_bytes=1), tmp_path)
    client.start()
    group_id = ask(client)
    client.note_step(0, [])  # the ask before it is carried out by now
    router.expect(ClientHello)
    client.cancel(group_id, "gave up")
    assert client.take(timeout_s=5) == [Dropped(group_id, "cancelled: gave up")]
    client.close()
    router.expect(ClientLeft)
    assert not any(isinstance(packet.message, AskGroup) for _, packet in router.packets)


def test_result_that_cannot_be_written_is_not_acked_until_it_can(
    router: FakeRouter, tmp_path: Path
) -> None:
    client = open_client(router, tmp_path)
    unwritten, foreign = ask(client), GroupId("another-run", 0)
    worker = Dialer(client.address, "w1")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, limits[1]))
    try:
        send_result(worker, unwritten, task_id="too long for the disk" * 2**16)
        send_result(worker, foreign)  # needs no writing: its ack says that both were seen
        assert next_ack(worker).group_id == foreign
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert client.take(timeout_s=0) == []
    send_result(worker, unwritten)
    assert next_ack(worker) == GroupAcked(unwritten, 1, duplicate=False)
    assert [arrival.group_id for arrival in client.take(timeout_s=5)] == [unwritten]
    worker.close()
    client.close()


def test_take_comes_back_empty_after_its_time(router: FakeRouter, tmp_path: Path) -> None:
    client = open_client(router, tmp_path)
    assert client.take(timeout_s=0.01) == []
    client.close()


def test_bad_address_is_one_clear_line(router: FakeRouter, tmp_path: Path) -> None:
    with pytest.raises(AddressError, match="nonsense"):
        RolloutClient("nonsense", CONFIG, tmp_path / "a")
    with pytest.raises(AddressError, match="cannot listen"):
        RolloutClient(router.hub.address, CONFIG, tmp_path / "b", bind=router.hub.address)


def test_two_clients_do_not_share_a_journal(router: FakeRouter, tmp_path: Path) -> None:
    client = open_client(router, tmp_path)
    with pytest.raises(JournalError, match="another process"):
        RolloutClient(router.hub.address, CONFIG, tmp_path)
    client.close()


def test_a_sink_that_workers_could_not_dial_is_refused(tmp_path: Path) -> None:
    for bind in ("tcp://0.0.0.0:0", "tcp://*:5556", "tcp://[::]:5556"):
        with pytest.raises(AddressError, match="peers are told it and cannot dial it"):
            RolloutClient("tcp://127.0.0.1:1", CONFIG, tmp_path, bind=bind)
    assert list(tmp_path.iterdir()) == []
