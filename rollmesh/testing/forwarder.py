"""Forwarder of IP packets between hosts, with delay and loss: a kernel without netem has no other.

Each host's device is a TUN whose packets arrive here. A packet waits in a queue until its time has
come, then it is written to the TUN of its destination.

    host's TUN --read--> lost? no such host? --> DelayQueue --when due--> TUN of the destination
"""

import contextlib
import fcntl
import heapq
import itertools
import os
import random
import select
import socket
import struct
import threading
import time
from typing import Self

MTU_BYTES = 9000
MAX_QUEUED = 10_000
"""Packets in the queue; more are dropped, as by a router."""
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
_IPV4, _DESTINATION = 4, slice(16, 20)


class DelayQueue:
    """Packets in the order of the times at which they are due; equal times in order of arrival."""

    def __init__(self, max_queued: int = MAX_QUEUED) -> None:
        self._heap: list[tuple[float, int, bytes]] = []
        self._numbers = itertools.count()
        self._max_queued = max_queued

    def __len__(self) -> int:
        return len(self._heap)

    def push(self, due_s: float, packet: bytes) -> bool:
        """Add a packet; False if the queue is full."""
        if len(self._heap) >= self._max_queued:
            return False
        heapq.heappush(self._heap, (due_s, next(self._numbers), packet))
        return True

    def pop_due(self, now_s: float) -> list[bytes]:
        """Remove and return the packets that are due."""
        due = []
        while self._heap and self._heap[0][0] <= now_s:
            due.append(heapq.heappop(self._heap)[2])
        return due

    def wait_s(self, now_s: float) -> float | None:
        """Return the time until the next packet is due; None if there is none."""
        return max(0.0, self._heap[0][0] - now_s) if self._heap else None


class Forwarder:
    """A thread that forwards packets; `delay_s`, `jitter_s` and `loss` may change at any time.

    Delay and loss are those of one direction, so a round trip takes twice the delay.
    """

    def __init__(
        self, delay_s: float = 0.0, jitter_s: float = 0.0, loss: float = 0.0, seed: int = 0
    ) -> None:
        self.delay_s, self.jitter_s, self.loss = delay_s, jitter_s, loss
        self.num_forwarded = 0
        self.num_lost = 0
        self._random = random.Random(seed)
        self._queue = DelayQueue()
        self._lock = threading.Lock()
        self._tuns: dict[bytes, int] = {}
        """TUN of each address."""
        self._down: set[bytes] = set()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._is_closed = False
        self._thread = threading.Thread(target=self._forward, name="forwarder")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_closed = True
        os.eventfd_write(self._wake, 1)
        self._thread.join()
        for tun in self._tuns.values():
            os.close(tun)
        os.close(self._wake)

    def set_links(self, delay_s: float = 0.0, loss: float = 0.0) -> None:
        """Change delay and loss of all links; without arguments there is neither."""
        self.delay_s, self.loss = delay_s, loss

    def attach(self, address: str, tun: int) -> None:
        """Forward the packets of a host, and those for it; closes `tun` in the end."""
        with self._lock:
            self._tuns[socket.inet_aton(address)] = tun
        os.eventfd_write(self._wake, 1)

    def detach(self, address: str) -> None:
        """Remove a host, and with it its device."""
        with self._lock:
            os.close(self._tuns.pop(socket.inet_aton(address)))
        os.eventfd_write(self._wake, 1)

    def set_link(self, address: str, *, up: bool) -> None:
        """Drop all packets from and for a host, or forward them again."""
        with self._lock:
            (self._down.discard if up else self._down.add)(socket.inet_aton(address))

    def _forward(self) -> None:
        while not self._is_closed:
            ready = self._wait()
            with self._lock:
                for address, tun in self._tuns.items():
                    if tun in ready:
                        self._read(address, tun)
                for packet in self._queue.pop_due(time.monotonic()):
                    self._write(packet)

    def _wait(self) -> set[int]:
        """Wait until a packet arrives or is due; return the readable descriptors."""
        poll = select.poll()
        poll.register(self._wake, select.POLLIN)
        with self._lock:
            for tun in self._tuns.values():
                poll.register(tun, select.POLLIN)
            wait_s = self._queue.wait_s(time.monotonic())
        ready = {fd for fd, _ in poll.poll(None if wait_s is None else wait_s * 1000)}
        if self._wake in ready:
            os.eventfd_read(self._wake)
        return ready

    def _read(self, source: bytes, tun: int) -> None:
        """Queue all packets that have arrived from a host, or lose them."""
        with contextlib.suppress(BlockingIOError):
            while True:
                packet = os.read(tun, 2**16)
                is_lost = source in self._down or self._random.random() < self.loss
                delay_s = self.delay_s + self._random.random() * self.jitter_s
                if is_lost or not self._queue.push(time.monotonic() + delay_s, packet):
                    self.num_lost += 1

    def _write(self, packet: bytes) -> None:
        destination = packet[_DESTINATION]
        tun = self._tuns.get(destination)
        if packet[0] >> 4 != _IPV4 or tun is None or destination in self._down:
            self.num_lost += 1
            return
        try:
            os.write(tun, packet)
            self.num_forwarded += 1
        except OSError:  # its device is down
            self.num_lost += 1


def open_tun(name: str) -> int:
    """Make a TUN device in the network namespace of this thread; it exists until it is closed."""
    tun = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        fcntl.ioctl(tun, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TUN | _IFF_NO_PI))
    except OSError:
        os.close(tun)
        raise
    return tun
