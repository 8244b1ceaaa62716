"""Scheduler process: journal before messages, over real sockets, and its status over HTTP."""

import socket
from collections.abc import Iterable, Iterator
from contextlib import closing
from pathlib import Path

import httpx
import msgspec
import pytest

from rollmesh.core.errors import AddressError, ConfigError, JournalError
from rollmesh.core.process import http_address, listen
from rollmesh.scheduler.planning.policies.fair import Fair
from rollmesh.scheduler.service.explain import FleetExplanation, explain_fleet
from rollmesh.scheduler.service.journal import SqliteJournal
from rollmesh.scheduler.service.process import (
    ServiceLoop,
    ServiceOptions,
    figures_of,
    open_hub,
    snapshots_of,
    status_app_of,
    status_of,
)
from rollmesh.scheduler.service.state import Row
from rollmesh.testing.clock import FakeClock
from rollmesh.wire.frames import Packet
from rollmesh.wire.messages import AnyMessage
from rollmesh.wire.scheduling import (
    GENERATION_CLUSTER,
    AdmitPipeline,
    HooksWired,
    JoinNode,
    PipelineSpec,
    RegisterPipeline,
    ReportProgress,
    RequestGpus,
    SchedulerAnswered,
    SchedulerHello,
    TakeGpus,
    TicketMoved,
    TicketState,
)
from rollmesh.wire.sockets import Dialer, Hub, wait
from tests.unit.scheduler.service.harness import SchedulerHarness

NODE = JoinNode("file-n0", "n0", 2, (), beats=False)
SPEC = PipelineSpec(pipeline_id="a", clusters={"actor_train": (0,)}, generation=())


class FullDisk(SqliteJournal):
    """A journal that refuses rows while it is full."""

    is_full = False

    def keep(self, rows: Iterable[Row]) -> None:
        if self.is_full:
            raise JournalError("no space left on device")
        super().keep(rows)


class RunningService:
    """The scheduler's loop with its sockets and journal, turned by the test."""

    def __init__(self, folder: Path, clock: FakeClock) -> None:
        ask = ServiceOptions(
            bind="tcp://127.0.0.1:0", http_bind="127.0.0.1:0", journal=folder, policy=Fair()
        )
        self.clock = clock
        self.hub = open_hub(ask.bind)
        self.journal = FullDisk(folder)
        self.loop = ServiceLoop(ask, self.hub, self.journal, snapshots_of(clock), clock)
        self.dialer = Dialer(self.hub.address, "test")

    def ask(self, message: AnyMessage, kind: type[AnyMessage]) -> AnyMessage:
        """Send a message; return the next answer of that kind."""
        self.dialer.send(Packet(message))
        return next(each for each in self.received() if isinstance(each, kind))

    def received(self) -> Iterator[AnyMessage]:
        while True:
            wait([self.hub], None, 0.05)
            self.loop.turn()
            for packet in self.dialer.receive():
                yield packet.message

    def close(self) -> None:
        self.dialer.close()
        self.hub.close()
        self.journal.close()


def start(folder: Path, now_s: float = 0.0) -> RunningService:
    service = RunningService(folder, FakeClock(now_s))
    service.loop.join((NODE,))
    service.loop.turn()
    return service


def granted(service: RunningService, key: str) -> TicketMoved:
    moved = service.ask(RequestGpus(key, "a", "actor_train", 1), TicketMoved)
    assert isinstance(moved, TicketMoved)
    if moved.state is TicketState.OFFERED:
        moved = service.ask(TakeGpus(key, moved.offer), TicketMoved)
        assert isinstance(moved, TicketMoved)
    return moved


def test_grants_survive_restarts(tmp_path: Path) -> None:
    with closing(start(tmp_path)) as service:
        for message in (RegisterPipeline("r", SPEC), AdmitPipeline("ad", "a")):
            answer = service.ask(message, SchedulerAnswered)
            assert isinstance(answer, SchedulerAnswered)
            assert answer.ok, answer.error
        first = service.ask(HooksWired("a"), SchedulerHello)
        assert granted(service, "k").gpus == (0,)
    with closing(start(tmp_path)) as service:
        second = service.ask(HooksWired("a"), SchedulerHello)
        assert first != second
        assert granted(service, "k").state is TicketState.GRANTED
        assert service.loop.scheduler.state.numbers.num_incarnations == 2


def test_the_loop_does_not_spin_before_it_may_plan(tmp_path: Path) -> None:
    """Progress requests a plan at once, and none is made before the coordinator reports."""
    spec = msgspec.structs.replace(SPEC, generation=(0,))
    with closing(start(tmp_path)) as service:
        for message in (RegisterPipeline("r", spec), AdmitPipeline("ad", "a")):
            service.ask(message, SchedulerAnswered)
        service.ask(HooksWired("a"), SchedulerHello)
        service.ask(RequestGpus("g", "a", GENERATION_CLUSTER, 6, 0, 8), TicketMoved)
    with closing(start(tmp_path)) as service:
        service.dialer.send(Packet(ReportProgress("a", "train", 1, 8, 4)))
        service.ask(HooksWired("a"), SchedulerHello)
        service.loop.turn()
        assert service.loop.scheduler.state.again_s <= service.loop.scheduler.state.now_s
        assert service.loop.idle_s() > 0.0


def test_the_schedulers_time_does_not_run_back_over_restarts(tmp_path: Path) -> None:
    with closing(start(tmp_path, now_s=1000.0)) as service:
        service.loop.turn()
        before_s = service.loop.scheduler.state.now_s
    with closing(start(tmp_path, now_s=10.0)) as service:
        service.loop.turn()
        assert service.loop.scheduler.state.now_s >= before_s
        service.clock.advance(5.0)
        service.loop.turn()
        assert service.loop.scheduler.state.now_s >= before_s + 5.0


def test_nothing_is_sent_before_its_rows_are_on_the_disk(tmp_path: Path) -> None:
    with closing(start(tmp_path)) as service:
        service.ask(RegisterPipeline("r", SPEC), SchedulerAnswered)
        service.journal.is_full = True
        service.dialer.send(Packet(AdmitPipeline("ad", "a")))
        while not service.loop.scheduler.state.answers.get("ad"):
            wait([service.hub], None, 0.05)
            service.loop.turn()
        service.dialer.send(Packet(HooksWired("a")))
        wait([service.dialer], None, 0.2)
        service.loop.turn()
        assert not list(service.dialer.receive())
        assert service.loop.idle_s() > 0.0
        assert service.loop.poll_hubs() == []  # it would spin on unread messages
        service.journal.is_full = False
        result = service.received()
        assert next(result) == SchedulerAnswered("ad", True)
        assert isinstance(next(result), SchedulerHello)
        assert service.loop.poll_hubs() == [service.hub]


def test_a_changed_node_is_refused_at_the_start(tmp_path: Path) -> None:
    start(tmp_path).close()
    refused = pytest.raises(ConfigError, match="'n0' had 2 GPUs and comes back with 3")
    with closing(RunningService(tmp_path, FakeClock())) as service, refused:
        service.loop.join((JoinNode("file-n0", "n0", 3, (), beats=False),))


def test_an_address_in_use_is_refused(tmp_path: Path) -> None:
    refused = pytest.raises(AddressError, match=r"bind = tcp://127\.0\.0\.1")
    with closing(Hub("tcp://127.0.0.1:0")) as hub, refused:
        open_hub(hub.address)


def test_a_snapshot_shows_phases_waits_and_faults() -> None:
    harness = SchedulerHarness(2)
    harness.pipeline("a", generation=(0, 1))
    harness.pipeline("b", train=(0,), generation=())
    harness.generate("a", "g")
    harness.act()
    harness.coordinators["a"].error = "no"
    harness.train("b", "t")
    harness.act()
    harness.run(3)
    status = status_of(harness.scheduler, {"malformed": 7})
    assert status.num_waiting == 1
    assert status.wait_s["0.5"] == 0.0
    figures = {
        (each.name, *sorted(each.labels.values())): each.value for each in figures_of(status)
    }
    assert figures["scheduler_workers", "a", "lost"] + figures.get(
        ("scheduler_workers", "a", "awake"), 0
    ) in (1, 2)
    assert figures["scheduler_events_total", "malformed"] == 7
    assert figures["scheduler_events_total", "pipeline.quarantined"] >= 1
    assert figures["scheduler_nodes", "up"] == 1
    assert figures["scheduler_waiting_seconds", "b"] > 0


def test_a_scheduler_without_requests_shows_no_waits() -> None:
    status = status_of(SchedulerHarness(2).scheduler, {})
    assert status.wait_s == {}
    assert status.fleet.num_free == 2


@pytest.fixture
def listening() -> Iterator[socket.socket]:
    bound = listen("127.0.0.1:0")
    yield bound
    bound.close()


def test_the_status_app_explains_a_pipeline_like_the_command_line(listening: socket.socket) -> None:
    harness = SchedulerHarness(2)
    harness.pipeline("a", generation=(0, 1))
    harness.pipeline("b", generation=(0, 1))
    harness.train("a", "t")
    harness.act()
    harness.train("b", "t2")
    snapshots = snapshots_of(FakeClock())
    status_app = status_app_of(listening, snapshots)
    status_app.start()
    with httpx.Client(base_url=http_address(listening), timeout=30.0) as client:
        assert client.get("/explain/b").status_code == 503
        snapshots.publish(status_of(harness.scheduler, {}))
        expected = explain_fleet(
            harness.scheduler.state.fleet, harness.scheduler.explain_context(), "b"
        )
        result = msgspec.json.decode(client.get("/explain/b").content, type=FleetExplanation)
        assert result == expected
        (b,) = result.pipelines
        assert b.waits[0].missing == {0: "a actor_train, for 0.0 s"}
        plain = client.get("/explain/b?text")
        assert plain.headers["Content-Type"].startswith("text/plain")
        assert plain.text.splitlines() == list(b.lines)
        unknown = client.get("/explain/c")
        assert (unknown.status_code, unknown.text) == (404, "no pipeline 'c'; a, b known\n")
        assert client.get("/explain/%0A%2F..").status_code == 404
        assert client.get("/status").json()["fleet"]["num_free"] == 1
        assert "rollmesh_scheduler_gpus_free 1.0" in client.get("/metrics").text
    status_app.close()
