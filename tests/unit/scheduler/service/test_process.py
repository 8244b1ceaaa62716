"""The process's loop keeps rows before it sends messages, over real sockets and a real disk."""

from collections.abc import Iterable, Iterator
from contextlib import closing
from pathlib import Path

import msgspec
import pytest

from rollmesh.core.errors import AddressError, ConfigError, JournalError
from rollmesh.scheduler.planning.policies.fair import Fair
from rollmesh.scheduler.service.journal import SqliteJournal
from rollmesh.scheduler.service.process import ServiceLoop, ServiceOptions, open_hub, snapshots_of
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

NODE = JoinNode("file-n0", "n0", 2, (), beats=False)
SPEC = PipelineSpec(pipeline_id="a", clusters={"actor_train": (0,)}, generation=())


class FullDisk(SqliteJournal):
    """A journal that refuses rows while it is full."""

    is_full = False

    def keep(self, rows: Iterable[Row]) -> None:
        if self.is_full:
            raise JournalError("no space left on device")
        super().keep(rows)


class Life:
    """A scheduler as in its process, in a thread."""

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
        return next(each for each in self.heard() if isinstance(each, kind))

    def heard(self) -> Iterator[AnyMessage]:
        while True:
            wait([self.hub], None, 0.05)
            self.loop.turn()
            for packet in self.dialer.receive():
                yield packet.message

    def close(self) -> None:
        self.dialer.close()
        self.hub.close()
        self.journal.close()


def begin(folder: Path, now_s: float = 0.0) -> Life:
    life = Life(folder, FakeClock(now_s))
    life.loop.join((NODE,))
    life.loop.turn()
    return life


def granted(life: Life, key: str) -> TicketMoved:
    moved = life.ask(RequestGpus(key, "a", "actor_train", 1), TicketMoved)
    assert isinstance(moved, TicketMoved)
    if moved.state is TicketState.OFFERED:
        moved = life.ask(TakeGpus(key, moved.offer), TicketMoved)
        assert isinstance(moved, TicketMoved)
    return moved


def test_grants_are_held_over_restarts(tmp_path: Path) -> None:
    with closing(begin(tmp_path)) as life:
        for message in (RegisterPipeline("r", SPEC), AdmitPipeline("ad", "a")):
            answer = life.ask(message, SchedulerAnswered)
            assert isinstance(answer, SchedulerAnswered)
            assert answer.ok, answer.error
        first = life.ask(HooksWired("a"), SchedulerHello)
        assert granted(life, "k").gpus == (0,)
    with closing(begin(tmp_path)) as life:
        second = life.ask(HooksWired("a"), SchedulerHello)
        assert first != second
        assert granted(life, "k").state is TicketState.GRANTED
        assert life.loop.scheduler.state.numbers.num_incarnations == 2


def test_it_does_not_spin_while_it_may_not_plan_yet(tmp_path: Path) -> None:
    """Progress triggers a plan at once, and there is none before the coordinator reports."""
    spec = msgspec.structs.replace(SPEC, generation=(0,))
    with closing(begin(tmp_path)) as life:
        for message in (RegisterPipeline("r", spec), AdmitPipeline("ad", "a")):
            life.ask(message, SchedulerAnswered)
        life.ask(HooksWired("a"), SchedulerHello)
        life.ask(RequestGpus("g", "a", GENERATION_CLUSTER, 6, 0, 8), TicketMoved)
    with closing(begin(tmp_path)) as life:
        life.dialer.send(Packet(ReportProgress("a", "train", 1, 8, 4)))
        life.ask(HooksWired("a"), SchedulerHello)
        life.loop.turn()
        assert life.loop.scheduler.state.again_s <= life.loop.scheduler.state.now_s
        assert life.loop.idle_s() > 0.0


def test_its_time_does_not_run_back_over_restarts(tmp_path: Path) -> None:
    with closing(begin(tmp_path, now_s=1000.0)) as life:
        life.loop.turn()
        before_s = life.loop.scheduler.state.now_s
    with closing(begin(tmp_path, now_s=10.0)) as life:
        life.loop.turn()
        assert life.loop.scheduler.state.now_s >= before_s
        life.clock.advance(5.0)
        life.loop.turn()
        assert life.loop.scheduler.state.now_s >= before_s + 5.0


def test_nothing_is_sent_before_its_rows_are_on_the_disk(tmp_path: Path) -> None:
    with closing(begin(tmp_path)) as life:
        life.ask(RegisterPipeline("r", SPEC), SchedulerAnswered)
        life.journal.is_full = True
        life.dialer.send(Packet(AdmitPipeline("ad", "a")))
        while not life.loop.scheduler.state.answers.get("ad"):
            wait([life.hub], None, 0.05)
            life.loop.turn()
        life.dialer.send(Packet(HooksWired("a")))
        wait([life.dialer], None, 0.2)
        life.loop.turn()
        assert not list(life.dialer.receive())
        assert life.loop.idle_s() > 0.0
        assert life.loop.poll_hubs() == []  # or it would spin on what waits to be heard
        life.journal.is_full = False
        result = life.heard()
        assert next(result) == SchedulerAnswered("ad", True)
        assert isinstance(next(result), SchedulerHello)
        assert life.loop.poll_hubs() == [life.hub]


def test_a_node_that_has_changed_is_named_at_the_start(tmp_path: Path) -> None:
    begin(tmp_path).close()
    text = pytest.raises(ConfigError, match="'n0' had 2 GPUs and comes back with 3")
    with closing(Life(tmp_path, FakeClock())) as life, text:
        life.loop.join((JoinNode("file-n0", "n0", 3, (), beats=False),))


def test_an_address_that_is_taken_is_named(tmp_path: Path) -> None:
    text = pytest.raises(AddressError, match=r"bind = tcp://127\.0\.0\.1")
    with closing(Hub("tcp://127.0.0.1:0")) as hub, text:
        open_hub(hub.address)
