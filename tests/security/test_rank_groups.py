"""Attacks on a trainer's ranks: messages of strangers to the controller of a running rank group."""

import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager

import pytest
from structlog.testing import capture_logs

from rollmesh.trainer.controller.answers import decode_values, encode_values
from rollmesh.trainer.controller.hub import RankHub
from rollmesh.trainer.controller.rank_group import NO_STEP, RankGroupSettings
from rollmesh.trainer.controller.spec import RankSpec, RoleSpec, Topology
from rollmesh.wire.frames import Packet
from rollmesh.wire.messages import AnyMessage
from rollmesh.wire.ranks import CallEnded, RankBeat, RankHello, RankLeft, RankReady
from rollmesh.wire.scheduling import ReportPreempt
from rollmesh.wire.sockets import Dialer
from tests.flow.rank_group import ROLE, SMALL

WAIT_S = 60.0
SETTINGS = RankGroupSettings(start_s=WAIT_S, beat_s=0.1, silence_s=WAIT_S)
ATTACKS: list[AnyMessage] = [
    RankHello(0, 1),
    RankHello(1, 1),
    RankReady(1, "tcp://10.6.6.6:666"),
    CallEnded(0, 1, "forged"),
    ReportPreempt("a", 0, "http://h:1"),
    RankBeat(0, 1, 10**6),
    RankLeft(0, "told to end"),
]


class TwoRanks:
    """Two ranks, their controller's hub, and the address that ranks connect to."""

    def __init__(self) -> None:
        self.address = ""
        self.hub = RankHub("tcp://127.0.0.1:0", None, SETTINGS, self._specs)

    def _specs(self, address: str) -> Sequence[RankSpec]:
        self.address = address
        return [
            RankSpec(
                controller=address,
                rank=rank,
                topology=Topology(2),
                roles={"sums": RoleSpec(make=ROLE)},
                plane=SMALL,
            )
            for rank in range(2)
        ]

    def sum_of_ranks(self) -> float:
        """The result of a collective call of both ranks."""
        body = encode_values(((1.0,), {}, None))
        bodies = self.hub.call("sums", "all_of", NO_STEP, (body, body)).result(WAIT_S)
        return float(decode_values(bodies[0])["total"])

    def attack(self, name: str) -> None:
        """Send every attack under this route; return when the controller has received them."""
        before, until_s = self.hub.num_foreign, time.monotonic() + WAIT_S
        with closing_dialer(self.address, name) as stranger:
            for message in ATTACKS:
                assert stranger.send(Packet(message))
            while self.hub.num_foreign < before + len(ATTACKS):
                assert time.monotonic() < until_s
                self.sum_of_ranks()


@contextmanager
def closing_dialer(address: str, name: str) -> Iterator[Dialer]:
    with closing(Dialer(address, name)) as dialer:
        yield dialer


@pytest.mark.slow
def test_a_strangers_messages_change_nothing_in_a_running_rank_group() -> None:
    led = TwoRanks()
    with capture_logs() as logged:
        led.hub.start()
        try:
            led.hub.formed.result(WAIT_S)
            owners, pids = led.hub.owners(), led.hub.pids()
            for name in ("stranger", "rank-0", "rank-1"):
                led.attack(name)
                assert led.sum_of_ranks() == 3.0
            assert (led.hub.owners(), led.hub.pids()) == (owners, pids)
        finally:
            led.hub.close("done")
    events = [each["event"] for each in logged]
    assert events.count("crew.foreign_message") == 1
    assert "ranks.lost" not in events


@pytest.mark.slow
def test_a_stranger_that_connects_before_the_ranks_does_not_choose_their_rendezvous() -> None:
    led = TwoRanks()
    with closing_dialer(led.address, "rank-0") as stranger:
        for message in ATTACKS:
            assert stranger.send(Packet(message))
        led.hub.start()
        try:
            led.hub.formed.result(WAIT_S)
            assert led.sum_of_ranks() == 3.0
        finally:
            led.hub.close("done")
