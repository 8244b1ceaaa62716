"""One TCP connection as both its ends have it: frames and raw buffers, in and out.

Owns a connected socket. Invariants: buffers leave from where they lie and arrive where they shall
lie, nothing is joined in between; whoever does not read, or stops in the middle of a frame, is
given `patience_s` without a byte, and no memory is taken for what a length merely claims. What goes
wrong is an OSError, or a WireError for what cannot be read; a line that has failed is of no more
use. Driven by one thread at a time: guest.py's, or whoever calls an owner; `cut` may come from any.
"""

import math
import select
import socket
import sys
import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Final

from rollmesh.core.errors import WireError
from rollmesh.core.process import close_in_children
from rollmesh.tensors.frames import LENGTH_BYTES, MAX_HEADER_BYTES, length_of
from rollmesh.wire.sockets import DEAD_S, IDLE_S, PROBE_S

PATIENCE_S: Final = 30.0
MAX_BUFFERS: Final = 1024
"""In one system call: IOV_MAX of Linux."""
WINDOW_BYTES: Final = 2**20
"""About so many bytes, or else one buffer, are offered to the kernel at once."""
STEP_BYTES: Final = 2**16
"""A header is received in steps of so many bytes."""
HUNG_UP: Final = "hung up"


class Line:
    """See the module."""

    def __init__(
        self, connected: socket.socket, patience_s: float = PATIENCE_S, received: bytes = b""
    ) -> None:
        """`received` was read from the socket already."""
        self.patience_s = patience_s
        self.num_received = 0
        """Bytes, so far."""
        self._socket = connected
        self._until_s = math.inf
        self._prefix = received
        """A length that was looked at."""
        close_in_children(connected)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        _notice_death(connected, DEAD_S)

    def allow(self, timeout_s: float) -> None:
        """Whatever is done from now on is to be done by then, however steadily it goes on."""
        self._until_s = time.monotonic() + timeout_s

    def send(self, frame: bytes, buffers: Sequence[memoryview] = ()) -> None:
        """The frame, and the buffers behind it."""
        self._move([memoryview(frame), *buffers], self._socket.sendmsg)

    def goes_on(self) -> bool:
        """Wait, however long, until a frame begins; False where the other has hung up instead."""
        self._socket.settimeout(None)
        try:
            return bool(self._socket.recv(1, socket.MSG_PEEK))
        except ConnectionResetError:  # with something of ours unread
            return False

    def look_ahead(self) -> bytes:
        """The next LENGTH_BYTES; `receive` has them none the less."""
        self._prefix = self._prefix or self._take(LENGTH_BYTES)
        return self._prefix

    def receive(self, max_bytes: int = MAX_HEADER_BYTES) -> bytes:
        """The next frame's header."""
        length = length_of(self.look_ahead(), max_bytes)
        self._prefix = b""
        return self._take(length)

    def receive_until(self, end: bytes, max_bytes: int) -> bytes:
        """Up to `end`, of one who does not speak in frames, and what follows is lost; WireError
        where that is longer."""
        heard = bytearray(self.look_ahead())
        while (at := heard.find(end)) < 0:
            if len(heard) >= max_bytes:
                raise WireError(f"no end within {max_bytes} bytes")
            self._socket.settimeout(self._wait_s())
            some = self._socket.recv(max_bytes - len(heard))
            self._counted(len(some))
            heard += some
        return bytes(heard[: at + len(end)])

    def fill(self, buffers: Sequence[memoryview]) -> None:
        """Receive as much as they hold, the first first."""
        self._move(buffers, lambda window: self._counted(self._socket.recvmsg_into(window)[0]))

    def share_machine(self) -> None:
        """The other end is on this machine, whose kernel tells of its death at once: from now on
        one that is merely stopped is never taken for dead."""
        _notice_death(self._socket, 0)

    def wait_for_end(self) -> None:
        """Until the other hangs up or dies; what it still says is not listened to."""
        over = select.poll()
        over.register(self._socket, getattr(select, "POLLRDHUP", select.POLLIN))
        over.poll()

    def stop_sending(self) -> None:
        """The other is told that nothing more comes."""
        self._shut(socket.SHUT_WR)

    def stop_receiving(self) -> None:
        """Whoever waits here is told that nothing more comes; the other end is not told."""
        self._shut(socket.SHUT_RD)

    def cut(self) -> None:
        """End both directions: whoever waits at either end is told at once."""
        self._shut(socket.SHUT_RDWR)

    def close(self) -> None:
        """Give the descriptor back."""
        self._socket.close()

    def _move(self, buffers: Sequence[memoryview], move: Callable[[list[memoryview]], int]) -> None:
        """Let the kernel have a window of them after the other: it looks at each buffer of a window
        anew, however few of the bytes it then takes."""
        ends = [*accumulate(buffer.nbytes for buffer in buffers)]
        done = 0
        while ends and done < ends[-1]:
            first = bisect_right(ends, done)
            last = bisect_left(ends, done + WINDOW_BYTES, first) + 1
            window = [*buffers[first : min(last, first + MAX_BUFFERS)]]
            window[0] = window[0][window[0].nbytes - (ends[first] - done) :]
            self._socket.settimeout(self._wait_s())
            done += move(window)

    def _shut(self, how: int) -> None:
        try:
            self._socket.shutdown(how)
        except OSError:  # it had ended
            return

    def _take(self, num_bytes: int) -> bytes:
        taken = bytearray()  # it grows as bytes arrive, since a length is only a claim
        while len(taken) < num_bytes:
            self._socket.settimeout(self._wait_s())
            some = self._socket.recv(min(STEP_BYTES, num_bytes - len(taken)))
            self._counted(len(some))
            taken += some
        return bytes(taken)

    def _counted(self, num_bytes: int) -> int:
        if not num_bytes:
            raise ConnectionResetError(HUNG_UP)
        self.num_received += num_bytes
        return num_bytes

    def _wait_s(self) -> float:
        left_s = min(self.patience_s, self._until_s - time.monotonic())
        if left_s <= 0:
            raise TimeoutError("timed out")
        return left_s


def why_lost(error: Exception) -> str:
    """What a failed line died of, in a few words."""
    if isinstance(error, ConnectionResetError | BrokenPipeError):
        return HUNG_UP
    if isinstance(error, TimeoutError):
        return "does not answer"
    return str(getattr(error, "strerror", None) or error).lower()


def _notice_death(connected: socket.socket, dead_s: int) -> None:
    """A machine that lost power says no goodbye (see wire/sockets.py, whose times these are); not
    at all for 0."""
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, int(dead_s > 0))
    if sys.platform == "linux":
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, IDLE_S)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, PROBE_S)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, dead_s * 1000)
