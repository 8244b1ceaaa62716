"""The worker's sockets: one Dialer to its router, one to each sink that still wants something.

Invariants: every send is a hint, and only news of groups waits, for a moment; a router that stays
silent is dialled for ever, and told of in the log; the Dialers of sinks that were not used for
longest are closed, so that clients that come and go leave nothing behind, but none that may still
owe its ack. Driven by worker.py, on its loop.
"""

import asyncio
import os
from collections import OrderedDict
from collections.abc import Callable

import msgspec

from rollmesh.core.descriptors import share_in_use
from rollmesh.core.errors import AddressError
from rollmesh.core.logs import get_logger
from rollmesh.wire.frames import Packet
from rollmesh.wire.keys import Keys
from rollmesh.wire.machine import ROUTER
from rollmesh.wire.messages import GroupDelivered, GroupStarted
from rollmesh.wire.news import MOMENT_S, News
from rollmesh.wire.sockets import Dialer

log = get_logger()

MAX_SINKS, MAX_BUSY_SINKS = 64, 384
"""Dialled at the same time; the second while they may still owe an ack. zmq has 1,023 sockets."""
ACK_S = 2.0
"""What is not acked in this time is sent again anyhow."""
NUM_SPARE, FEW_LEFT_SHARE = 24, 0.8
"""Descriptors held back, and given up where environment code has taken all others: a worker that
leaves for that must still bring what it has to a sink that it had not dialled."""
SILENT_S = 5.0
"""A router speaks each second; one that does not for so long is told of, each time later."""

Hear = Callable[[bytes, Packet], None]
"""Told of each packet with its route: ROUTER, or the sink's address."""


class _Sink(msgspec.Struct):
    dialer: Dialer
    used_s: float = 0.0


class Post:
    """See the module."""

    def __init__(self, router: str, identity: str, keys: Keys | None, hear: Hear) -> None:
        self._identity = identity
        self._keys = keys
        self._hear = hear
        self._router = Dialer(router, identity, keys)
        self._sinks: OrderedDict[bytes, _Sink] = OrderedDict()
        """The one used longest ago first."""
        self._spare = [os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC) for _ in range(NUM_SPARE)]
        self._news = News()
        self._news_of = ""
        """The router's incarnation as its news has it."""
        self._telling: asyncio.TimerHandle | None = None
        self._heard_s = 0.0
        self._told_s = SILENT_S

    @property
    def num_sinks(self) -> int:
        """That are dialled."""
        return len(self._sinks)

    def start(self) -> None:
        """Begin to hand over what the router says."""
        loop = asyncio.get_running_loop()
        self._heard_s = loop.time()
        self._router.attach(loop, self._hear_router)

    def look_for_silence(self) -> None:
        """Say so where the router has not spoken for long."""
        silent_s = asyncio.get_running_loop().time() - self._heard_s
        if silent_s >= self._told_s:
            self._told_s *= 2
            what = f"no word from {self._router.address} for {silent_s:.0f} s; we keep dialling"
            log.warning("router.silent", error=f"{what}; are its address and our keys right?")

    def send(self, route: bytes, packet: Packet) -> None:
        """Send to the router or to a sink, which is dialled if need be."""
        if route == ROUTER:
            self._send_router(packet)
        elif sink := self._sink(route):
            sink.send(packet)

    def close(self) -> None:
        """Close all sockets; what was queued goes out in the background for a moment."""
        self._tell()
        for dialer in (self._router, *(each.dialer for each in self._sinks.values())):
            dialer.close()
        self._sinks.clear()
        self._give_up_spare()

    def _send_router(self, packet: Packet) -> None:
        if not isinstance(packet.message, GroupStarted | GroupDelivered):
            self._tell()  # what was said before stays before
            self._router.send(packet)
            return
        if packet.router != self._news_of:
            self._tell()
            self._news_of = packet.router
        if self._telling is None:
            self._telling = asyncio.get_running_loop().call_later(MOMENT_S, self._tell)
        self._news.add(ROUTER, packet.message, 0.0)

    def _tell(self) -> None:
        """Say what has waited for a moment."""
        if self._telling is not None:
            self._telling.cancel()
            self._telling = None
        for told in self._news.take():
            self._router.send(Packet(told.message, self._news_of))

    def _hear_router(self, packet: Packet) -> None:
        if self._told_s > SILENT_S:
            log.info("router.back", address=self._router.address)
            self._told_s = SILENT_S
        self._heard_s = asyncio.get_running_loop().time()
        self._hear(ROUTER, packet)

    def _sink(self, route: bytes) -> Dialer | None:
        loop = asyncio.get_running_loop()
        sink = self._sinks.get(route)
        if sink is None:
            self._make_place(loop.time())
            try:
                dialer = self._dial(route.decode("utf-8", "replace"))
            except AddressError as error:
                # The asking client's mistake; it gives up, or goes, and the group is cancelled.
                log.error("sink.refused", error=str(error))
                return None
            dialer.attach(loop, lambda packet: self._hear(route, packet))
            sink = self._sinks[route] = _Sink(dialer)
        sink.used_s = loop.time()
        self._sinks.move_to_end(route)
        return sink.dialer

    def _dial(self, address: str) -> Dialer:
        try:
            return Dialer(address, self._identity, self._keys)
        except AddressError:
            if not self._spare or share_in_use() < FEW_LEFT_SHARE:
                raise
        self._give_up_spare()
        return Dialer(address, self._identity, self._keys)

    def _give_up_spare(self) -> None:
        while self._spare:
            os.close(self._spare.pop())

    def _make_place(self, now_s: float) -> None:
        """For one more sink: those go that were used longest ago, and not just now, if may be."""
        while len(self._sinks) >= MAX_SINKS:
            route, oldest = next(iter(self._sinks.items()))
            if now_s - oldest.used_s < ACK_S and len(self._sinks) < MAX_BUSY_SINKS:
                break
            del self._sinks[route]
            oldest.dialer.close()
