"""The two kinds of socket of the mesh: a Hub, and a Dialer that dials it.

A Hub is a ZMQ ROUTER (the router process, a sink's intake), a Dialer a DEALER (workers, clients,
publishers). Each is used by one thread (zmq's rule).

- Every queue is finite. A send never blocks, and returns whether the message was accepted.
- A frame has at most MAX_FRAME_BYTES, so a peer that has not proved its keys uses no more memory.
- A malformed or oversized message is counted and skipped, never fatal.
- A vanished peer costs its own messages and nothing else. A Dialer reconnects by itself.
"""

import asyncio
import contextlib
import math
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import zmq
from zmq.utils.monitor import recv_monitor_message

from rollmesh.core.errors import AddressError, WireError
from rollmesh.core.heap import SOME_FREED_BYTES, note_freed
from rollmesh.core.network_config import NetworkConfig
from rollmesh.wire.frames import Buffer, Packet, decode, encode
from rollmesh.wire.keys import KEYS_VARIABLE, Keys, check_bind
from rollmesh.wire.machine import unpack_news
from rollmesh.wire.members import Access, gate

QUEUE_MESSAGES = 4096
"""High-water mark of each direction, per peer."""
COPIED_BYTES = 2**16
"""Longer frames are sent without a copy, so that data of repeated messages is in memory once."""
MAX_FRAME_BYTES = 8 * 2**20
"""A longer frame ends its connection (zmq's MAXMSGSIZE), also before the handshake. Longer data is
sent as several frames (frames.py)."""
MAX_MESSAGE_BYTES = 2**30
"""Bytes of all frames of a message. A longer one is skipped after its arrival: zmq gathers all
frames of a message before it delivers the first."""
IDLE_FRACTION, PROBE_FRACTION = 0.4, 0.2
"""The silence before the kernel probes a peer, and the interval of its probes (tcp(7), keepalive),
as fractions of network.silence_timeout_s."""
CONNECT_TIMEOUT_S = 2.0
"""A Dialer's attempt to connect ends after this and the next begins, for the same reason."""
HANDSHAKE_S = 10.0
"""Connections without a completed handshake are closed after this time."""
SPARE_DESCRIPTORS = 16
"""A socket, and zmq's own at the first, take up to 12."""
GREET_S = 3.0
"""Time for which `refusal` waits for a hub's greeting."""
SERVER_KEY = "#"
"""Separates an address from the public key of its socket."""
LINGER_MS = 200
"""Time for which a closed socket may still send queued messages."""
FRAME_COST_BYTES = 64
"""Approximate overhead of a frame."""
_DONTWAIT, _POLLIN = int(zmq.DONTWAIT), int(zmq.POLLIN)
_MORE = int(zmq.DONTWAIT | zmq.SNDMORE)


class SilenceTimes(NamedTuple):
    """When the kernel closes a connection whose other end is silent: the peer lost power or the
    network is cut.

    TCP doubles the pause before each repetition, so an old connection would be silent for as long
    again after a cut; a new one is not. A stopped process stays connected: its kernel answers.
    """

    idle_s: int
    probe_s: int
    num_probes: int
    dead_ms: int
    """Also the limit for sent data that is not acknowledged (TCP_USER_TIMEOUT)."""


def silence_times(timeout_s: float) -> SilenceTimes:
    """Return the times of connections that are closed after this silence, at least 3 s."""
    idle_s, probe_s = round(IDLE_FRACTION * timeout_s), round(PROBE_FRACTION * timeout_s)
    num_probes = round((timeout_s - idle_s) / probe_s)
    return SilenceTimes(idle_s, probe_s, num_probes, round(timeout_s * 1000))


_silence = silence_times(NetworkConfig().silence_timeout_s)


def set_silence_timeout(timeout_s: float) -> None:
    """Set network.silence_timeout_s for the connections that this process opens from now on."""
    global _silence  # noqa: PLW0603 - like the umask, it is one of the process
    _silence = silence_times(timeout_s)


class WakeSignal:
    """Wakes a thread that waits in `wait`; `ring` and `close` may be called from any thread.

    Once closed it touches no descriptor, since the number may belong to another file.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a signal handler may ring while its thread does
        try:
            self._fd: int | None = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        except OSError as error:
            raise _no_socket(str(error.strerror)) from None

    def fileno(self) -> int:
        """Return its descriptor; ValueError once it is closed."""
        if self._fd is None:
            raise ValueError("this doorbell is closed")
        return self._fd

    def ring(self) -> None:
        """Wake the waiter, now or at its next wait; no effect once closed."""
        with self._lock:
            if self._fd is not None:
                os.eventfd_write(self._fd, 1)

    def hush(self) -> None:
        """Clear previous rings."""
        with self._lock, contextlib.suppress(BlockingIOError):
            if self._fd is not None:
                os.eventfd_read(self._fd)

    def close(self) -> None:
        """Close the descriptor. Idempotent."""
        with self._lock:
            closed, self._fd = self._fd, None
            if closed is not None:
                os.close(closed)


class Hub:
    """A bound ROUTER socket: many peers, each addressed by its route."""

    def __init__(
        self,
        bind: str,
        keys: Keys | None = None,
        max_frame_bytes: int = MAX_FRAME_BYTES,
        queue_messages: int = QUEUE_MESSAGES,
        access: Access | None = None,
    ) -> None:
        """Bind `bind` (`tcp://host:0` picks a port); AddressError if it is taken or needs keys.

        Up to `queue_messages` of each peer are queued here; further ones stay with the peer. With
        keys, `access` decides which peers are admitted and what each may send (default: holders of
        the same key file).
        """
        check_bind(bind, keys)
        self.socket = _open(zmq.ROUTER, max_frame_bytes)
        self.socket.setsockopt(zmq.RCVHWM, queue_messages)
        self.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self.socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self._access = (access or Access(keys)) if keys else None
        self._domain = ""
        if keys and self._access:
            keys.guard(self.socket)
            self._domain = gate().open(self.socket, self._access)
        try:
            self.socket.bind(bind)
        except zmq.ZMQError as error:
            self.socket.close()
            if self._domain:
                gate().close(self._domain)
            why = str(error.strerror).lower()
            raise AddressError(f"{bind}: cannot listen there: {why}; choose another") from None
        self.address: str = self.socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._departures = _departures_of(self.socket)
        self._own_key = keys.public if keys and keys.public != keys.hub_public else ""
        self.peer_address = self.address_for_peers(self.address)
        self.num_malformed = 0
        self.num_unsent = 0
        self.num_departed = 0
        """Ended connections. Memory of their gathered messages is free."""

    def address_for_peers(self, address: str) -> str:
        """Return `address` with the public key of this socket, if it is not the hub's."""
        return f"{address}{SERVER_KEY}{self._own_key}" if self._own_key else address

    @property
    def num_refused(self) -> int:
        """Messages that their senders' keys may not send."""
        return self._access.num_refused if self._access else 0

    def send(self, route: bytes, packet: Packet) -> bool:
        """Queue `packet` for the peer; return False (and count) if it is gone or its queue is
        full."""
        sent = _send(self.socket, [route, *encode(packet)])
        self.num_unsent += not sent
        return sent

    def send_all(self, routes: Iterable[bytes], packet: Packet) -> None:
        """Queue `packet` for many peers, encoded once."""
        frames = encode(packet)
        self.num_unsent += sum([not _send(self.socket, [route, *frames]) for route in routes])

    def receive(self, max_packets: int = 1024) -> Iterator[tuple[bytes, Packet]]:
        """Yield arrived messages, without waiting."""
        self._count_departures()
        for _ in range(max_packets):
            received = _receive_from(self.socket)
            if received is None:
                return
            frames, last = received
            try:
                packet = decode(frames[1:])
            except WireError:
                self.num_malformed += 1
                continue
            for each in unpack_news(packet):
                if self._access and not self._access.takes(_sender(last), each.message):
                    continue
                yield frames[0], each

    def close(self) -> None:
        """Close the socket; queued messages are sent in the background for a moment."""
        if self.socket.closed:
            return
        self.socket.disable_monitor()
        self._departures.close()
        self.socket.close(linger=LINGER_MS)
        if self._domain:
            gate().close(self._domain)

    def _count_departures(self) -> None:
        """Count ended connections, so that the heap trimmer returns their memory."""
        num_ended = 0
        while _receive(self._departures):
            num_ended += 1
        if num_ended:
            self.num_departed += num_ended
            note_freed(num_ended * SOME_FREED_BYTES)


class Dialer:
    """A DEALER that dials one Hub and reconnects."""

    def __init__(
        self, address: str, identity: str, keys: Keys | None = None, *, is_secret: bool = False
    ) -> None:
        """`identity` is the route that the Hub sees; AddressError if `address` is invalid.

        With keys the route gets a random suffix, so that no other peer can take it over, unless it
        `is_secret` by itself.
        """
        target, _, server = address.partition(SERVER_KEY)
        if server and not keys:
            raise AddressError(f"{target}: it asks for keys; set {KEYS_VARIABLE} to the key file")
        self.socket = _open(zmq.DEALER, MAX_FRAME_BYTES)
        end = f"~{secrets.token_hex(8)}" if keys and not is_secret else ""
        self.socket.setsockopt_string(zmq.IDENTITY, f"{identity}{end}")
        self.socket.setsockopt(zmq.RECONNECT_IVL, 50)
        self.socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        self.socket.setsockopt(zmq.CONNECT_TIMEOUT, int(CONNECT_TIMEOUT_S * 1000))
        if keys:
            _sign(self.socket, target, keys, server)
        try:
            self.socket.connect(target)
        except zmq.ZMQError as error:
            self.socket.close()
            why = str(error.strerror).lower()
            raise AddressError(f"{target}: {why}; write it as tcp://host:port") from None
        self.address = target
        self.num_malformed = 0
        self.num_unsent = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._on_packet: Callable[[Packet], None] | None = None

    def send(self, packet: Packet) -> bool:
        """Queue `packet`; return False (and count) if the queue is full."""
        sent = _send(self.socket, encode(packet))
        self.num_unsent += not sent
        if self._loop:
            self._rearm()
        return sent

    def receive(self, max_packets: int = 1024) -> Iterator[Packet]:
        """Yield arrived messages, without waiting."""
        for _ in range(max_packets):
            frames = _receive(self.socket)
            if frames is None:
                return
            try:
                packet = decode(frames)
            except WireError:
                self.num_malformed += 1
                continue
            yield from unpack_news(packet)

    def attach(self, loop: asyncio.AbstractEventLoop, on_packet: Callable[[Packet], None]) -> None:
        """Deliver each packet to `on_packet` on `loop`, which must be the only user."""
        self._loop, self._on_packet = loop, on_packet
        loop.add_reader(self._fd(), self._drain)
        loop.call_soon(self._drain)

    def close(self) -> None:
        """Close the socket; queued messages are sent in the background for a moment."""
        if self._loop:
            self._loop.remove_reader(self._fd())
            self._loop = None
        self.socket.close(linger=LINGER_MS)

    def _fd(self) -> int:
        fd = self.socket.getsockopt(zmq.FD)
        assert isinstance(fd, int)
        return fd

    def _drain(self) -> None:
        if self._on_packet is None or self.socket.closed:
            return
        for packet in self.receive():
            self._on_packet(packet)
        self._rearm()

    def _rearm(self) -> None:
        # zmq's FD is edge-triggered and any call on the socket may consume the edge, so look again.
        if self._loop and not self.socket.closed:
            events = self.socket.getsockopt(zmq.EVENTS)
            assert isinstance(events, int)
            if events & zmq.POLLIN:
                self._loop.call_soon(self._drain)


def wait(sockets: Sequence[Hub | Dialer], doorbell: WakeSignal | None, timeout_s: float) -> None:
    """Block until a socket has something to receive, the bell rings, or `timeout_s` is over."""
    asked = [(each.socket, _POLLIN) for each in sockets]
    if doorbell is None:
        zmq.zmq_poll(asked, math.ceil(timeout_s * 1000))
        return
    bell = doorbell.fileno()
    readable = zmq.zmq_poll([*asked, (bell, _POLLIN)], math.ceil(timeout_s * 1000))
    if any(each is bell for each, _ in readable):
        doorbell.hush()


def notice_death(connected: socket.socket, times: SilenceTimes | None = None) -> None:
    """Make the kernel close a TCP connection whose other end has been silent for too long: by
    default for network.silence_timeout_s.
    """
    times = times or _silence
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if sys.platform == "linux":
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, times.idle_s)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, times.probe_s)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, times.dead_ms)


def _departures_of(socket: "zmq.Socket[bytes]") -> "zmq.Socket[bytes]":
    """Return a socket that receives a message for each ended connection of `socket`.

    Its queue has no limit: a full one would block zmq's thread, and the end of the monitor.
    """
    address = f"inproc://departures-{secrets.token_hex(8)}"
    socket.monitor(address, int(zmq.EVENT_DISCONNECTED))
    departures: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PAIR)
    departures.setsockopt(zmq.RCVHWM, 0)
    departures.connect(address)
    return departures


def _open(kind: int, max_frame_bytes: int) -> "zmq.Socket[bytes]":
    _check_room()
    try:
        socket: zmq.Socket[bytes] = zmq.Context.instance().socket(kind)
    except zmq.ZMQError as error:
        raise _no_socket(str(error.strerror)) from None
    socket.setsockopt(zmq.SNDHWM, QUEUE_MESSAGES)
    socket.setsockopt(zmq.RCVHWM, QUEUE_MESSAGES)
    socket.setsockopt(zmq.MAXMSGSIZE, max_frame_bytes)
    socket.setsockopt(zmq.LINGER, LINGER_MS)
    socket.setsockopt(zmq.HANDSHAKE_IVL, int(HANDSHAKE_S * 1000))
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
    socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, _silence.idle_s)
    socket.setsockopt(zmq.TCP_KEEPALIVE_INTVL, _silence.probe_s)
    socket.setsockopt(zmq.TCP_KEEPALIVE_CNT, _silence.num_probes)
    socket.setsockopt(zmq.TCP_MAXRT, _silence.dead_ms)
    return socket


def _check_room() -> None:
    """AddressError if few descriptors are left, since zmq aborts a process that lacks one."""
    spare: list[int] = []
    try:
        while len(spare) < SPARE_DESCRIPTORS:
            spare.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
    except OSError as error:
        raise _no_socket(str(error.strerror)) from None
    finally:
        for each in spare:
            os.close(each)


def _no_socket(why: str) -> AddressError:
    limit = "raise the limit: ulimit -n"
    return AddressError(f"no socket can be opened: {why.lower()}; {limit}")


# pyzmq's own multipart calls combine enum flags and look at each frame again: 10 us instead of 4
# for three frames. Only the first frame can be refused: zmq accepts a message whole.


def _send(socket: "zmq.Socket[bytes]", frames: list[Buffer]) -> bool:
    *first, last = frames
    try:
        for frame in first:
            socket.send(frame, _MORE, copy=len(frame) < COPIED_BYTES)
        socket.send(last, _DONTWAIT, copy=len(last) < COPIED_BYTES)
    except zmq.ZMQError:
        return False
    return True


def _receive(socket: "zmq.Socket[bytes]") -> list[bytes] | None:
    received = _receive_from(socket)
    return received[0] if received else None


def _receive_from(socket: "zmq.Socket[bytes]") -> tuple[list[bytes], zmq.Frame] | None:
    """Return a message's frames, and the last one as a zmq frame, which knows its sender."""
    try:
        frame = socket.recv(_DONTWAIT, copy=False)
    except zmq.ZMQError:
        return None
    frames = [frame.bytes]
    num_bytes = len(frames[0])
    while frame.more:
        frame = socket.recv(_DONTWAIT, copy=False)
        num_bytes += len(frame) + FRAME_COST_BYTES
        if num_bytes <= MAX_MESSAGE_BYTES:
            frames.append(frame.bytes)
    # Without its body it fails to decode, so it is counted as malformed.
    return (frames if num_bytes <= MAX_MESSAGE_BYTES else frames[:1]), frame


def _sender(frame: zmq.Frame) -> str:
    """Return the public key that its connection proved, as Z85 text."""
    try:
        return str(frame.get("User-Id"))
    except zmq.ZMQError:
        return ""


def _sign(socket: "zmq.Socket[bytes]", address: str, keys: Keys, server: str) -> None:
    try:
        keys.sign(socket, server)
    except zmq.ZMQError:
        socket.close()
        raise AddressError(f"{address}: its public key, {server!r}, is none") from None


_NO_PEER = frozenset({zmq.EVENT_CLOSED, zmq.EVENT_CONNECT_RETRIED, zmq.EVENT_DISCONNECTED})
_REFUSALS = {
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: "refuses our key: it was removed, or is of another mesh",
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: "does not have the hub's key that our key file names",
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: "takes no keys, or only keys: one of us has none",
}
_ASKS_FOR_KEYS = "admits only holders of its keys, or is not a router"


def refusal(address: str, keys: Keys | None, timeout_s: float = GREET_S) -> str:
    """Return why the hub at `address` refuses these keys; '' if it admits them, or does not answer
    in time."""
    target, _, server = address.partition(SERVER_KEY)
    socket = _open(zmq.DEALER, MAX_FRAME_BYTES)
    monitor = socket.get_monitor_socket(zmq.EVENT_ALL)
    try:
        if keys:
            _sign(socket, target, keys, server)
        try:
            socket.connect(target)
        except zmq.ZMQError:
            return ""  # an invalid address is reported by the Dialer
        end_s = time.monotonic() + timeout_s
        while (left_s := end_s - time.monotonic()) > 0:
            if not monitor.poll(math.ceil(left_s * 1000)):
                break
            event = recv_monitor_message(monitor)["event"]
            if event in _REFUSALS:
                return _REFUSALS[zmq.Event(event)] if keys else _ASKS_FOR_KEYS
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED or event in _NO_PEER:
                break
        return ""
    finally:
        if not socket.closed:
            socket.disable_monitor()
            socket.close(linger=0)
        monitor.close(linger=0)


def check_admitted(address: str, keys: Keys | None) -> None:
    """AddressError in one line if the hub at `address` answers and refuses these keys."""
    if why := refusal(address, keys):
        ours = f"key {keys.name} ({keys.folder or KEYS_VARIABLE})" if keys else "no key"
        raise AddressError(
            f"{address.partition(SERVER_KEY)[0]}: {why} (we have {ours}); name the key file of "
            f"its mesh by {KEYS_VARIABLE}, or its run by --run"
        )
