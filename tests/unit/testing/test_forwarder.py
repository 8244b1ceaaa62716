"""The forwarder of packets: what it delays, loses and delivers, between sockets instead of TUNs."""

import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from rollmesh.testing.forwarder import DelayQueue, Forwarder

ONE, OTHER, NOWHERE = "10.0.0.1", "10.0.0.2", "10.0.0.9"
NOTICED_WITHIN_S = 30.0


def test_packets_leave_the_queue_when_they_are_due_and_in_order() -> None:
    queue = DelayQueue()
    assert queue.wait_s(0.0) is None
    for due_s, packet in [(2.0, b"late"), (1.0, b"first"), (1.0, b"second")]:
        assert queue.push(due_s, packet)
    assert queue.wait_s(0.25) == 0.75
    assert queue.pop_due(0.99) == []
    assert queue.pop_due(1.0) == [b"first", b"second"]
    assert queue.wait_s(5.0) == 0.0
    assert queue.pop_due(5.0) == [b"late"]


def test_full_queue_drops_packets() -> None:
    queue = DelayQueue(max_queued=1)
    assert queue.push(1.0, b"kept")
    assert not queue.push(0.0, b"dropped")
    assert queue.pop_due(1.0) == [b"kept"]


class Ends:
    """A forwarder and the hosts' ends of its devices."""

    def __init__(self, stack: ExitStack, **options: Any) -> None:
        self.forwarder = stack.enter_context(Forwarder(**options))
        self._ends = {}
        for address in (ONE, OTHER):
            end, tun = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
            tun.setblocking(False)
            end.settimeout(NOTICED_WITHIN_S)
            self._ends[address] = stack.enter_context(end)
            self.forwarder.attach(address, tun.detach())

    def send(self, number: int, source: str = ONE, destination: str = OTHER) -> None:
        addresses = socket.inet_aton(source) + socket.inet_aton(destination)
        self._ends[source].send(b"\x45" + bytes(11) + addresses + bytes([number]))

    def receive(self, destination: str = OTHER) -> int:
        return self._ends[destination].recv(2**16)[-1]


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def test_packets_arrive_in_order_after_the_delay(stack: ExitStack) -> None:
    ends = Ends(stack, delay_s=0.1)
    begun_s = time.monotonic()
    for number in range(5):
        ends.send(number)
    assert [ends.receive() for _ in range(5)] == [0, 1, 2, 3, 4]
    assert time.monotonic() - begun_s >= 0.1
    ends.send(7, source=OTHER, destination=ONE)
    assert ends.receive(ONE) == 7
    assert time.monotonic() - begun_s >= 0.2


def test_share_of_packets_is_lost_and_the_seed_decides_which(stack: ExitStack) -> None:
    arrived = []
    for _ in range(2):
        ends = Ends(stack, loss=0.5, seed=3)
        for number in range(100):
            ends.send(number)
        num_arrived = until_forwarded(ends)
        ends.forwarder.loss = 0.0
        ends.send(255)
        numbers = list(iter(ends.receive, 255))
        assert len(numbers) == num_arrived
        arrived.append(numbers)
    assert arrived[0] == arrived[1]
    assert 20 <= len(arrived[0]) <= 80


def until_forwarded(ends: Ends) -> int:
    """Wait until each of 100 packets is lost or delivered; return how many were delivered."""
    deadline_s = time.monotonic() + NOTICED_WITHIN_S
    while ends.forwarder.num_lost + ends.forwarder.num_forwarded < 100:
        assert time.monotonic() < deadline_s
    return ends.forwarder.num_forwarded


def test_host_whose_link_is_down_neither_sends_nor_receives(stack: ExitStack) -> None:
    ends = Ends(stack)
    ends.forwarder.set_link(OTHER, up=False)
    ends.send(1)
    ends.send(2, source=OTHER, destination=ONE)
    ends.send(3, source=ONE, destination=ONE)
    assert ends.receive(ONE) == 3
    deadline_s = time.monotonic() + NOTICED_WITHIN_S
    while ends.forwarder.num_lost < 2:
        assert time.monotonic() < deadline_s
    ends.forwarder.set_link(OTHER, up=True)
    ends.send(4)
    assert ends.receive() == 4


def test_packets_for_unknown_or_removed_hosts_are_lost(stack: ExitStack) -> None:
    ends = Ends(stack)
    ends.send(1, destination=NOWHERE)
    ends.send(2)
    assert ends.receive() == 2
    assert ends.forwarder.num_lost == 1
    ends.forwarder.detach(OTHER)
    ends.send(3)
    ends.send(4, destination=ONE)
    assert ends.receive(ONE) == 4
    assert ends.forwarder.num_lost == 2
