"""The two kinds of socket of the mesh: a Hub that is dialled, and a Dialer that dials it.

A Hub is a ZMQ ROUTER (the router process, a sink's intake), a Dialer a DEALER (workers, clients,
publishers). One thread uses each of them (zmq's rule).

- Every queue is finite. A send never blocks, and returns whether the message was taken.
- A frame has at most MAX_FRAME_BYTES, so a peer that has not shown its keys holds no more memory.
- A malformed or oversized message is counted and skipped, never fatal.
- A vanished peer costs its own messages and nothing else. A Dialer reconnects by itself.
"""

import asyncio
import contextlib
import math
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

import zmq
from zmq.utils.monitor import recv_monitor_message

from rollmesh.core.errors import AddressError, WireError
from rollmesh.core.heap import SOME_FREED_BYTES, note_freed
from rollmesh.wire.frames import Buffer, Packet, decode, encode
from rollmesh.wire.keys import KEYS_VARIABLE, Keys, check_bind
from rollmesh.wire.members import Access, gate
from rollmesh.wire.news import spread

QUEUE_MESSAGES = 4096
"""High-water mark of each direction, per peer."""
COPIED_BYTES = 2**16
"""A longer frame is sent from where it stands: what is sent again, and waits, is there once."""
MAX_FRAME_BYTES = 8 * 2**20
"""A longer frame ends its connection (zmq's MAXMSGSIZE): also one of a peer that has not finished
its handshake. What is longer travels as several frames (frames.py)."""
MAX_MESSAGE_BYTES = 2**30
"""Bytes of all frames of a message. A longer one is skipped once it is there: zmq gathers the
frames of a message, however many a peer sends, before it hands out the first."""
IDLE_S, PROBE_S, DEAD_S = 30, 10, 60
"""A peer that is silent for IDLE_S is probed by the kernel, every PROBE_S, and gone after DEAD_S:
who lost power, or stands behind a firewall that forgot it, says no goodbye (tcp(7), keepalive and
TCP_USER_TIMEOUT). A stopped process is not gone: its kernel answers."""
HANDSHAKE_S = 10.0
"""Whoever has not shown its keys by then, or is no peer at all, is cut off."""
SPARE_DESCRIPTORS = 16
"""A socket, and zmq's own at the first, take up to 12."""
GREET_S = 3.0
"""How long `refusal` waits for a hub's greeting."""
SERVER_KEY = "#"
"""Between an address and the public key of the socket there."""
LINGER_MS = 200
"""How long a closed socket may still send what was queued."""
FRAME_COST_BYTES = 64
"""What a frame takes besides its content, about."""
_DONTWAIT, _POLLIN = int(zmq.DONTWAIT), int(zmq.POLLIN)
_MORE = int(zmq.DONTWAIT | zmq.SNDMORE)


class Doorbell:
    """Wakes a thread that waits in `wait`; `ring` and `close` may be called from any thread.

    Closed, it touches no descriptor any more, since its number may be another file's by then.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a signal handler may ring while its thread does
        try:
            self._fd: int | None = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        except OSError as error:
            raise _no_socket(str(error.strerror)) from None

    def fileno(self) -> int:
        """Its descriptor; ValueError once it is closed."""
        if self._fd is None:
            raise ValueError("this doorbell is closed")
        return self._fd

    def ring(self) -> None:
        """Wake the waiter, now or at its next wait; nothing happens once it is closed."""
        with self._lock:
            if self._fd is not None:
                os.eventfd_write(self._fd, 1)

    def hush(self) -> None:
        """Forget the rings so far."""
        with self._lock, contextlib.suppress(BlockingIOError):
            if self._fd is not None:
                os.eventfd_read(self._fd)

    def close(self) -> None:
        """Give the descriptor back. Idempotent."""
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

        `queue_messages` of a peer may have arrived and not been received; the others stay with it.
        With keys, `access` decides which peers are let in and what each may send (default: those
        that hold the same key file).
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
        own = keys.public if keys and keys.public != keys.hub_public else ""
        self.peer_address = f"{self.address}{SERVER_KEY}{own}" if own else self.address
        """The address for peers, with the public key of this socket if that is not the hub's."""
        self.num_malformed = 0
        self.num_unsent = 0
        self.num_departed = 0
        """Connections that have ended. What zmq had gathered of their messages is free memory."""

    @property
    def num_refused(self) -> int:
        """Messages that their senders' keys may not send."""
        return self._access.num_refused if self._access else 0

    def send(self, route: bytes, packet: Packet) -> bool:
        """Queue `packet` for the peer; False (and counted) if it is gone or its queue is full."""
        sent = _send(self.socket, [route, *encode(packet)])
        self.num_unsent += not sent
        return sent

    def send_all(self, routes: Iterable[bytes], packet: Packet) -> None:
        """The same to many peers, encoded once."""
        frames = encode(packet)
        self.num_unsent += sum([not _send(self.socket, [route, *frames]) for route in routes])

    def receive(self, max_packets: int = 1024) -> Iterator[tuple[bytes, Packet]]:
        """What has arrived, without waiting."""
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
            for each in spread(packet):
                if self._access and not self._access.takes(_sender(last), each.message):
                    continue
                yield frames[0], each

    def close(self) -> None:
        """Drop the socket; what was queued goes out in the background for a moment."""
        if self.socket.closed:
            return
        self.socket.disable_monitor()
        self._departures.close()
        self.socket.close(linger=LINGER_MS)
        if self._domain:
            gate().close(self._domain)

    def _count_departures(self) -> None:
        """Count what has ended, so that the keeper of the heap gives its memory back."""
        num_ended = 0
        while _receive(self._departures):
            num_ended += 1
        if num_ended:
            self.num_departed += num_ended
            note_freed(num_ended * SOME_FREED_BYTES)


class Dialer:
    """A DEALER that dials one Hub and keeps redialling it."""

    def __init__(
        self, address: str, identity: str, keys: Keys | None = None, *, is_secret: bool = False
    ) -> None:
        """`identity` is the route that the Hub sees; AddressError if `address` is no address.

        With keys the route gets a random end, so that no other peer can take it over, unless it
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
        """Queue `packet`; False (and counted) if the queue is full."""
        sent = _send(self.socket, encode(packet))
        self.num_unsent += not sent
        if self._loop:
            self._rearm()
        return sent

    def receive(self, max_packets: int = 1024) -> Iterator[Packet]:
        """What has arrived, without waiting."""
        for _ in range(max_packets):
            frames = _receive(self.socket)
            if frames is None:
                return
            try:
                packet = decode(frames)
            except WireError:
                self.num_malformed += 1
                continue
            yield from spread(packet)

    def attach(self, loop: asyncio.AbstractEventLoop, on_packet: Callable[[Packet], None]) -> None:
        """From now on hand every packet to `on_packet` on `loop`, which must be the only user."""
        self._loop, self._on_packet = loop, on_packet
        loop.add_reader(self._fd(), self._drain)
        loop.call_soon(self._drain)

    def close(self) -> None:
        """Drop the socket; what was queued goes out in the background for a moment."""
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
        # zmq's FD is edge-triggered and any call on the socket may swallow the edge, so look again.
        if self._loop and not self.socket.closed:
            events = self.socket.getsockopt(zmq.EVENTS)
            assert isinstance(events, int)
            if events & zmq.POLLIN:
                self._loop.call_soon(self._drain)


def wait(sockets: Sequence[Hub | Dialer], doorbell: Doorbell | None, timeout_s: float) -> None:
    """Block until a socket has something to receive, the bell was rung, or `timeout_s` is over."""
    asked = [(each.socket, _POLLIN) for each in sockets]
    if doorbell is None:
        zmq.zmq_poll(asked, math.ceil(timeout_s * 1000))
        return
    bell = doorbell.fileno()
    heard = zmq.zmq_poll([*asked, (bell, _POLLIN)], math.ceil(timeout_s * 1000))
    if any(each is bell for each, _ in heard):
        doorbell.hush()


def _departures_of(socket: "zmq.Socket[bytes]") -> "zmq.Socket[bytes]":
    """A socket that receives a message for each connection of `socket` that ends."""
    return socket.get_monitor_socket(int(zmq.EVENT_DISCONNECTED))


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
    socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, IDLE_S)
    socket.setsockopt(zmq.TCP_KEEPALIVE_INTVL, PROBE_S)
    socket.setsockopt(zmq.TCP_KEEPALIVE_CNT, (DEAD_S - IDLE_S) // PROBE_S)
    socket.setsockopt(zmq.TCP_MAXRT, DEAD_S * 1000)
    return socket


def _check_room() -> None:
    """AddressError where few descriptors are left: zmq aborts the process that lacks one."""
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


# pyzmq's own multipart calls combine enum flags and look at each frame again: 10 us where three
# frames take 4. Only the first frame can be refused: zmq takes a message whole.


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
    """A message's frames, and the last of them as zmq has it, which knows its sender."""
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
    # Without its body it does not decode, so it is counted as malformed.
    return (frames if num_bytes <= MAX_MESSAGE_BYTES else frames[:1]), frame


def _sender(frame: zmq.Frame) -> str:
    """The public key that its connection proved, as Z85 text."""
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


def refusal(address: str, keys: Keys | None, timeout_s: float = GREET_S) -> str:
    """Why a hub that listens at `address` does not let these keys in; '' if it does, or if nothing
    answers there in time."""
    target, _, server = address.partition(SERVER_KEY)
    socket = _open(zmq.DEALER, MAX_FRAME_BYTES)
    monitor = socket.get_monitor_socket(zmq.EVENT_ALL)
    try:
        if keys:
            _sign(socket, target, keys, server)
        try:
            socket.connect(target)
        except zmq.ZMQError:
            return ""  # no address: the Dialer names it
        end_s = time.monotonic() + timeout_s
        while (left_s := end_s - time.monotonic()) > 0:
            if not monitor.poll(math.ceil(left_s * 1000)):
                break
            event = recv_monitor_message(monitor)["event"]
            if event in _REFUSALS:
                return _REFUSALS[zmq.Event(event)]
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED or event in _NO_PEER:
                break
        return ""
    finally:
        if not socket.closed:
            socket.disable_monitor()
            socket.close(linger=0)
        monitor.close(linger=0)


def check_admitted(address: str, keys: Keys | None) -> None:
    """AddressError in one line if the hub at `address` answers and does not let these keys in."""
    if why := refusal(address, keys):
        ours = f"key {keys.name} ({keys.folder or KEYS_VARIABLE})" if keys else "no key"
        raise AddressError(
            f"{address.partition(SERVER_KEY)[0]}: {why} (we have {ours}); name the key file of "
            f"its mesh by {KEYS_VARIABLE}, or its run by --run"
        )
