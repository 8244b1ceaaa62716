"""The worker's sockets, and the thread that sends its heartbeats.

- One Dialer to the router and one to each sink. Sends never block. A silent router is dialled again
  and again. The least recently used Dialers of sinks are closed, but none that may still send an
  ack.
- Heartbeats have a Dialer and a thread of their own, so they go on while the event loop is held.
  Each probe asks the loop to answer. An answer later than `STALL_S` is a stall, and the function at
  the top of the loop's stack is named in the next beat and in the log. No fault ends the thread.
"""

import asyncio
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable

import msgspec

from rollmesh.core.addresses import is_loopback, split_address
from rollmesh.core.descriptors import share_in_use
from rollmesh.core.errors import AddressError
from rollmesh.core.ids import new_id
from rollmesh.core.logs import get_logger
from rollmesh.core.metrics import rss_bytes
from rollmesh.serve.server.stack import whereabouts
from rollmesh.wire.frames import Packet
from rollmesh.wire.keys import Keys
from rollmesh.wire.machine import MOMENT_S, ROUTER, GroupNewsBatcher
from rollmesh.wire.messages import GroupDelivered, GroupStarted, RouterHello, WorkerBeat
from rollmesh.wire.sockets import Dialer
from rollmesh.wire.worker_report import WorkerReport

log = get_logger()

MAX_SINKS, MAX_BUSY_SINKS = 64, 384
"""Limit on Dialers; the second applies while they may still receive an ack. zmq has 1,023
sockets.
"""
ACK_S = 2.0
"""A message that is not acked in this time is sent again."""
NUM_SPARE, FEW_LEFT_SHARE = 24, 0.8
"""Descriptors held in reserve, and closed if environment code has taken all others: a worker that
leaves for that reason must still deliver to a sink that it had not dialled.
"""
SILENT_S = 5.0
"""Silence of a router that is logged; it sends each second. Later repetitions are further apart."""

OnPacket = Callable[[bytes, Packet], None]
"""Called with each packet and its route: ROUTER, or the sink's address."""


class _Sink(msgspec.Struct):
    dialer: Dialer
    used_s: float = 0.0


class WorkerTransport:
    """The sockets to the router and the sinks."""

    def __init__(self, router: str, identity: str, keys: Keys | None, receive: OnPacket) -> None:
        self._identity = identity
        self._keys = keys
        self._on_packet = receive
        self._router = Dialer(router, identity, keys)
        self._sinks: OrderedDict[bytes, _Sink] = OrderedDict()
        """Least recently used first."""
        self._spare = [os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC) for _ in range(NUM_SPARE)]
        self._news = GroupNewsBatcher()
        self._news_of = ""
        """The router's incarnation from its last message."""
        self._flush_timer: asyncio.TimerHandle | None = None
        self._last_message_s = 0.0
        self._log_after_s = SILENT_S

    @property
    def num_sinks(self) -> int:
        """Number of Dialers of sinks."""
        return len(self._sinks)

    def start(self) -> None:
        """Begin to pass on the router's messages."""
        loop = asyncio.get_running_loop()
        self._last_message_s = loop.time()
        self._router.attach(loop, self._router_packet)

    def check_silence(self) -> None:
        """Log that the router has been silent for long."""
        silent_s = asyncio.get_running_loop().time() - self._last_message_s
        if silent_s >= self._log_after_s:
            self._log_after_s *= 2
            what = f"no word from {self._router.address} for {silent_s:.0f} s; we keep dialling"
            log.warning("router.silent", error=f"{what}; are its address and our keys right?")

    def send(self, route: bytes, packet: Packet) -> None:
        """Send to the router or to a sink, which is dialled if necessary."""
        if route == ROUTER:
            self._send_router(packet)
        elif sink := self._sink(route):
            sink.send(packet)

    def close(self) -> None:
        """Close all sockets; queued messages are sent in the background for a moment."""
        self._flush()
        for dialer in (self._router, *(each.dialer for each in self._sinks.values())):
            dialer.close()
        self._sinks.clear()
        self._give_up_spare()

    def _send_router(self, packet: Packet) -> None:
        if not isinstance(packet.message, GroupStarted | GroupDelivered):
            self._flush()  # keep the order
            self._router.send(packet)
            return
        if packet.router != self._news_of:
            self._flush()
            self._news_of = packet.router
        if self._flush_timer is None:
            self._flush_timer = asyncio.get_running_loop().call_later(MOMENT_S, self._flush)
        self._news.add(ROUTER, packet.message, 0.0)

    def _flush(self) -> None:
        """Send what had to wait."""
        if self._flush_timer is not None:
            self._flush_timer.cancel()
            self._flush_timer = None
        for outgoing in self._news.take():
            self._router.send(Packet(outgoing.message, self._news_of))

    def _router_packet(self, packet: Packet) -> None:
        if self._log_after_s > SILENT_S:
            log.info("router.back", address=self._router.address)
            self._log_after_s = SILENT_S
        self._last_message_s = asyncio.get_running_loop().time()
        self._on_packet(ROUTER, packet)

    def _sink(self, route: bytes) -> Dialer | None:
        loop = asyncio.get_running_loop()
        sink = self._sinks.get(route)
        if sink is None:
            self._make_place(loop.time())
            try:
                dialer = self._dial(route.decode("utf-8", "replace"))
            except AddressError as error:
                # The asking client's mistake; it gives up, or leaves, and the group is cancelled.
                log.error("sink.refused", error=str(error))
                return None
            self._warn_of_loopback(dialer.address)
            dialer.attach(loop, lambda packet: self._on_packet(route, packet))
            sink = self._sinks[route] = _Sink(dialer)
        sink.used_s = loop.time()
        self._sinks.move_to_end(route)
        return sink.dialer

    def _warn_of_loopback(self, sink: str) -> None:
        """Log that results would never arrive if the client is on another machine."""
        if is_loopback(split_address(sink)[0]) and not is_loopback(
            split_address(self._router.address)[0]
        ):
            why = (
                "an address of this machine: if the client is on another, results cannot reach it; "
                "give it an address that workers reach (trainer.bind, or network.advertise there)"
            )
            log.warning("sink.on_loopback", sink=sink, why=why)

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
        """Close the least recently used Dialers of sinks to make room for one, if they may be
        closed.
        """
        while len(self._sinks) >= MAX_SINKS:
            route, oldest = next(iter(self._sinks.items()))
            if now_s - oldest.used_s < ACK_S and len(self._sinks) < MAX_BUSY_SINKS:
                break
            del self._sinks[route]
            oldest.dialer.close()


STARTED_S = time.time()
"""Start time of this process, read once: hello and heartbeats must agree whatever the clock
does.
"""
_PROCESS = new_id("p")
STALL_S = 0.05
PROBE_S = 0.1


def identity(worker_id: str) -> str:
    """Return the name of this process's sockets.

    It is unique to the process: zmq gives a name to its newest owner, and the earlier one receives
    nothing more although its connection stays; two workers with one id would both go deaf.
    """
    return f"{worker_id}.{_PROCESS}"


class HeartbeatSettings(msgspec.Struct, frozen=True):
    """Identity, address and interval of the heartbeats."""

    worker_id: str
    router: str
    beat_s: float


class _Owed(msgspec.Struct):
    """A probe that the loop has not answered yet."""

    sign: threading.Event
    asked_s: float
    is_logged: bool = False


class HeartbeatThread:
    """Sends heartbeats; `receive` is called on the loop with a RouterHello that arrived."""

    def __init__(
        self,
        settings: HeartbeatSettings,
        keys: Keys | None,
        report: Callable[[], WorkerReport],
        receive: Callable[[Packet], None],
    ) -> None:
        self._settings = settings
        self._report = report
        self._on_packet = receive
        self._dialer = Dialer(settings.router, f"{identity(settings.worker_id)}.beat", keys)
        self._closing = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._loop_thread = 0
        self._lag_s = 0.0
        self._stalled_in = ""
        self._owed: _Owed | None = None
        self._last_fault = ""
        """Log a fault of this thread once, since it may occur in each turn."""
        self._thread = threading.Thread(target=self._run, name="beats", daemon=True)

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Watch `loop`, which runs on the calling thread."""
        self._loop, self._loop_thread = loop, threading.get_ident()
        self._thread.start()

    def close(self) -> None:
        """End the thread and close its socket."""
        self._closing.set()
        if self._thread.ident is not None:
            self._thread.join()
        self._dialer.close()

    def _run(self) -> None:
        next_beat_s = time.monotonic()
        while not self._closing.is_set():
            if time.monotonic() >= next_beat_s:
                next_beat_s = time.monotonic() + self._settings.beat_s
                self._try(self._beat)
            self._try(self._listen)
            self._try(self._probe)
            self._closing.wait(min(PROBE_S, max(0.0, next_beat_s - time.monotonic())))

    def _try(self, do: Callable[[], None]) -> None:
        try:
            do()
        except Exception as error:  # door: one fault here must not make a worker count as lost
            if str(error) != self._last_fault:
                self._last_fault = str(error)
                log.exception("beat.failed")

    def _beat(self) -> None:
        own = {
            "worker_id": self._settings.worker_id,
            "loop_lag_s": self._lag_s,
            "rss_bytes": rss_bytes(),
            "stalled_in": self._stalled_in,
            "started_s": STARTED_S,
        }
        beat = WorkerBeat(**msgspec.structs.asdict(self._report()) | own)
        self._lag_s, self._stalled_in = 0.0, ""
        self._dialer.send(Packet(beat))

    def _listen(self) -> None:
        for packet in self._dialer.receive():
            if isinstance(packet.message, RouterHello):
                self._call(self._on_packet, packet)

    def _probe(self) -> None:
        """Probe the loop unless it still owes an answer; measure how long it takes."""
        if self._owed is None:
            owed = _Owed(threading.Event(), time.monotonic())
            if not self._call(owed.sign.set):
                return
            self._owed = owed
        answered = self._owed.sign.wait(STALL_S)
        self._lag_s = max(self._lag_s, time.monotonic() - self._owed.asked_s)
        if not answered:
            self._stalled_in = whereabouts(self._loop_thread)
            if not self._owed.is_logged:
                log.warning("loop.stalled", stalled_in=self._stalled_in)
                self._owed.is_logged = True
            return
        if self._owed.is_logged:
            log.warning("loop.freed", lag_s=round(self._lag_s, 3))
        self._owed = None

    def _call(self, function: Callable[..., object], *args: object) -> bool:
        """Run `function` on the loop; return False if the loop is closed."""
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(function, *args)
        except RuntimeError:
            return False
        return True
