"""The router receives heartbeats of a worker whose loop is held, and the function that holds it."""

import asyncio
from collections.abc import Iterator

import pytest

from rollmesh.serve.server.transport import HeartbeatSettings, HeartbeatThread
from rollmesh.wire.frames import Packet
from rollmesh.wire.messages import RouterHello, WorkerBeat
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


def new_beats(hub: Hub, heard: list[Packet]) -> HeartbeatThread:
    settings = HeartbeatSettings("w1", hub.address, 0.02)
    return HeartbeatThread(settings, None, lambda: REPORT, heard.append)


def next_beat(hub: Hub) -> tuple[bytes, WorkerBeat]:
    for _ in range(100):
        wait([hub], None, 0.1)
        for route, packet in hub.receive(1):
            assert isinstance(packet.message, WorkerBeat)
            return route, packet.message
    raise AssertionError("no beat")


async def test_beat_carries_the_report_and_the_memory(hub: Hub) -> None:
    beats = new_beats(hub, [])
    beats.start(asyncio.get_running_loop())
    _, beat = await asyncio.to_thread(next_beat, hub)
    beats.close()
    assert (beat.worker_id, beat.num_running, beat.accepting, beat.num_tokens) == ("w1", 3, True, 6)
    assert (beat.state, beat.num_failed, beat.num_left_behind) == ("draining", 2, 7)
    assert beat.last_error == "infra_error: engine gone"
    assert beat.rss_bytes > 2**20
    assert beat.stalled_in == ""


async def test_fault_of_one_beat_does_not_end_the_others(hub: Hub) -> None:
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


async def test_held_loop_does_not_stop_the_beats_and_is_named(hub: Hub) -> None:
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


async def test_hello_that_comes_on_the_beats_socket_is_handed_to_the_loop(hub: Hub) -> None:
    heard: list[Packet] = []
    beats = new_beats(hub, heard)
    beats.start(asyncio.get_running_loop())
    route, _ = await asyncio.to_thread(next_beat, hub)
    hub.send(route, Packet(RouterHello(0.1), "i2"))
    async with asyncio.timeout(60):
        while not heard:
            await asyncio.to_thread(next_beat, hub)
    beats.close()
    assert heard[0].router == "i2"


def test_beats_closed_before_they_start_leave_no_peer(hub: Hub) -> None:
    new_beats(hub, []).close()
    assert list(hub.receive()) == []
