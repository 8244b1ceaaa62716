"""Heartbeats continue while the loop is blocked; sinks are dialled on demand and evicted."""

import asyncio
from collections.abc import Iterator

import pytest
import structlog

from rollmesh.core.ids import GroupId
from rollmesh.serve.server import transport
from rollmesh.serve.server.transport import HeartbeatSettings, HeartbeatThread, WorkerTransport
from rollmesh.wire.frames import Packet
from rollmesh.wire.machine import ROUTER
from rollmesh.wire.messages import (
    AnyMessage,
    GroupAcked,
    GroupDelivered,
    GroupFinished,
    GroupStarted,
    RouterHello,
    WorkerBeat,
    WorkerLeft,
)
from rollmesh.wire.sockets import Hub, wait
from rollmesh.wire.worker_report import WorkerReport

REPORT = WorkerReport(
    worker_id="",
    state="draining",
    num_running=3,
    accepting=True,
    unacked_bytes=10,
    waits_for="held_bytes: 9 held, worker.max_held_bytes = 8",
    held_bytes=9,
    num_finished=4,
    num_failed=2,
    last_error="infra_error: engine gone",
    num_calls=5,
    num_tokens=6,
    num_left_behind=7,
)


@pytest.fixture
def hub() -> Iterator[Hub]:
    hub = Hub("tcp://127.0.0.1:0")
    yield hub
    hub.close()


def new_beats(hub: Hub, received: list[Packet]) -> HeartbeatThread:
    settings = HeartbeatSettings("w1", hub.address, 0.02)
    return HeartbeatThread(settings, None, lambda: REPORT, received.append)


def next_beat(hub: Hub) -> tuple[bytes, WorkerBeat]:
    for _ in range(100):
        wait([hub], None, 0.1)
        for route, packet in hub.receive(1):
            assert isinstance(packet.message, WorkerBeat)
            return route, packet.message
    raise AssertionError("no beat")


async def test_a_heartbeat_carries_the_report_and_the_memory(hub: Hub) -> None:
    beats = new_beats(hub, [])
    beats.start(asyncio.get_running_loop())
    _, beat = await asyncio.to_thread(next_beat, hub)
    beats.close()
    assert (beat.worker_id, beat.num_running, beat.accepting, beat.num_tokens) == ("w1", 3, True, 6)
    assert (beat.state, beat.num_failed, beat.num_left_behind) == ("draining", 2, 7)
    assert beat.last_error == "infra_error: engine gone"
    assert beat.rss_bytes > 2**20
    assert beat.stalled_in == ""


async def test_an_error_in_one_heartbeat_does_not_end_the_others(hub: Hub) -> None:
    faults = iter([OSError("too many open files"), MemoryError()])

    def report() -> WorkerReport:
        if fault := next(faults, None):
            raise fault
        return REPORT

    beats = HeartbeatThread(
        HeartbeatSettings("w1", hub.address, 0.02), None, report, lambda _: None
    )
    beats.start(asyncio.get_running_loop())
    _, beat = await asyncio.to_thread(next_beat, hub)
    beats.close()
    assert beat.num_running == 3


async def test_a_blocked_loop_does_not_stop_heartbeats_and_is_located(hub: Hub) -> None:
    beats = new_beats(hub, [])
    beats.start(asyncio.get_running_loop())

    def hold_the_loop() -> WorkerBeat:
        while True:
            _, beat = next_beat(hub)
            if beat.loop_lag_s > 0.2:
                return beat

    beat = hold_the_loop()  # on the loop's thread, on purpose
    beats.close()
    assert ".py:" in beat.stalled_in


async def test_a_message_on_the_heartbeat_socket_is_passed_to_the_loop(hub: Hub) -> None:
    received: list[Packet] = []
    beats = new_beats(hub, received)
    beats.start(asyncio.get_running_loop())
    route, _ = await asyncio.to_thread(next_beat, hub)
    hub.send(route, Packet(RouterHello(0.1), "i2"))
    async with asyncio.timeout(60):
        while not received:
            await asyncio.to_thread(next_beat, hub)
    beats.close()
    assert received[0].router == "i2"


def test_heartbeats_closed_before_they_start_leave_no_peer(hub: Hub) -> None:
    new_beats(hub, []).close()
    assert list(hub.receive()) == []


FINISHED = Packet(GroupFinished(GroupId("r1", 1), 1, "w1", True))


def next_route(hub: Hub) -> bytes:
    for _ in range(100):
        wait([hub], None, 0.1)
        for route, _ in hub.receive(1):
            return route
    raise AssertionError("no message")


async def test_router_and_sink_exchange_messages_with_the_worker_by_route() -> None:
    router, sink = Hub("tcp://127.0.0.1:0"), Hub("tcp://127.0.0.1:0")
    packets: list[tuple[bytes, Packet]] = []
    news = asyncio.Event()

    def receive(route: bytes, packet: Packet) -> None:
        packets.append((route, packet))
        news.set()

    post = WorkerTransport(router.address, "w1", None, receive)
    post.start()
    post.send(ROUTER, FINISHED)
    post.send(sink.address.encode(), FINISHED)
    assert await asyncio.to_thread(next_route, router) == b"w1"
    assert await asyncio.to_thread(next_route, sink) == b"w1"
    router.send(b"w1", Packet(RouterHello(1.0)))
    async with asyncio.timeout(60):
        await news.wait()
        news.clear()
        sink.send(b"w1", Packet(GroupAcked(GroupId("r1", 1), 1, False)))
        await news.wait()
    assert [route for route, _ in packets] == [ROUTER, sink.address.encode()]
    post.close()
    router.close()
    sink.close()


async def test_an_invalid_sink_address_affects_no_other_sink() -> None:
    router = Hub("tcp://127.0.0.1:0")
    post = WorkerTransport(router.address, "w1", None, lambda route, packet: None)
    post.start()
    for route in (b"nonsense", b"\xff\xfe"):
        post.send(route, FINISHED)
    post.send(ROUTER, FINISHED)
    assert await asyncio.to_thread(next_route, router) == b"w1"
    post.close()
    router.close()


async def test_the_least_recently_used_sink_is_evicted_and_dialled_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(transport, "MAX_SINKS", 1)
    monkeypatch.setattr(transport, "MAX_BUSY_SINKS", 1)
    hubs = [Hub("tcp://127.0.0.1:0") for _ in range(3)]
    router, first, second = hubs
    post = WorkerTransport(router.address, "w1", None, lambda route, packet: None)
    post.start()
    for sink in (first, second, first):
        post.send(sink.address.encode(), FINISHED)
        assert await asyncio.to_thread(next_route, sink) == b"w1"
    post.close()
    for hub in hubs:
        hub.close()


async def test_recently_used_sinks_stay_connected_even_if_they_are_many() -> None:
    """Their acks arrive after the last of them was dialled."""
    router, num_sinks = Hub("tcp://127.0.0.1:0"), 2 * transport.MAX_SINKS
    sinks = [Hub("tcp://127.0.0.1:0") for _ in range(num_sinks)]
    routes: set[bytes] = set()
    is_complete = asyncio.Event()

    def receive(route: bytes, _: Packet) -> None:
        routes.add(route)
        if len(routes) == num_sinks:
            is_complete.set()

    post = WorkerTransport(router.address, "w1", None, receive)
    for sink in sinks:
        post.send(sink.address.encode(), FINISHED)
    for sink in sinks:
        route = await asyncio.to_thread(next_route, sink)
        sink.send(route, Packet(GroupAcked(GroupId("r1", 1), 1, False)))
    async with asyncio.timeout(60):
        await is_complete.wait()
    assert routes == {sink.address.encode() for sink in sinks}
    post.close()
    for hub in (router, *sinks):
        hub.close()


async def test_a_silent_router_is_logged_once_and_again_when_it_is_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(transport, "SILENT_S", 1e-9)
    router, news = Hub("tcp://127.0.0.1:0"), asyncio.Event()
    post = WorkerTransport(router.address, "w1", None, lambda route, packet: news.set())
    with structlog.testing.capture_logs() as logs:
        post.start()
        post.check_silence()
        assert [each["event"] for each in logs] == ["router.silent"]
        assert router.address in logs[0]["error"]
        post.send(ROUTER, FINISHED)
        router.send(await asyncio.to_thread(next_route, router), Packet(RouterHello(1.0)))
        async with asyncio.timeout(60):
            await news.wait()
        assert [each["event"] for each in logs] == ["router.silent", "router.back"]
    post.close()
    router.close()


def all_at(hub: Hub, number: int) -> list[AnyMessage]:
    messages: list[AnyMessage] = []
    for _ in range(100):
        wait([hub], None, 0.1)
        messages += [packet.message for _, packet in hub.receive()]
        if len(messages) >= number:
            return messages
    raise AssertionError(f"only {messages} came")


async def test_the_newest_message_of_each_group_is_sent_before_later_messages() -> None:
    router = Hub("tcp://127.0.0.1:0")
    post = WorkerTransport(router.address, "w1", None, lambda route, packet: None)
    post.start()
    one, two = GroupId("r1", 1), GroupId("r1", 2)
    for message in (GroupStarted(one, 1), GroupStarted(two, 1), GroupDelivered(one, 1)):
        post.send(ROUTER, Packet(message))
    messages = await asyncio.to_thread(all_at, router, 2)
    assert messages == [GroupDelivered(one, 1), GroupStarted(two, 1)]
    left = WorkerLeft("w1", "drained")
    post.send(ROUTER, Packet(GroupDelivered(two, 1)))
    post.send(ROUTER, Packet(left))
    assert await asyncio.to_thread(all_at, router, 2) == [GroupDelivered(two, 1), left]
    post.send(ROUTER, Packet(GroupStarted(one, 2)))
    post.close()
    assert await asyncio.to_thread(all_at, router, 1) == [GroupStarted(one, 2)]
    router.close()
