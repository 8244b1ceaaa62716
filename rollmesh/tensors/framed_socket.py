"""A connected socket that sends and receives frames and raw buffers.

- Buffers are sent from and received into their final place; nothing is joined in between.
- An end that does not read, or stops in the middle of a frame, has `patience_s` without progress.
  No memory is allocated for a length before its bytes arrive.
- Errors are OSError, or WireError for malformed data; a socket that has failed is unusable.
- One thread at a time, except `cut`.
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
from rollmesh.wire.sockets import notice_death, silence_times

PATIENCE_S: Final = 30.0
MAX_BUFFERS: Final = 1024
"""Buffers in one system call: IOV_MAX of Linux."""
WINDOW_BYTES: Final = 2**20
"""About so many bytes, or else one buffer, are passed to the kernel at once."""
STEP_BYTES: Final = 2**16
"""Size of the steps in which a header is received."""
CONNECTION_CLOSED: Final = "hung up"
DEAD_S: Final = 60
"""Silence of a machine after which a connection to it is closed. Longer than
network.silence_timeout_s: a transfer that is cut off begins again."""


class FramedSocket:
    """A TCP connection between a consumer and an owner."""

    def __init__(
        self, connected: socket.socket, patience_s: float = PATIENCE_S, received: bytes = b""
    ) -> None:
        """`received` was already read from the socket."""
        self.patience_s = patience_s
        self.num_received = 0
        """Bytes received so far."""
        self._socket = connected
        self._until_s = math.inf
        self._prefix = received
        """A length that was peeked at."""
        close_in_children(connected)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        notice_death(connected, silence_times(DEAD_S))

    def allow(self, timeout_s: float) -> None:
        """Set a deadline for all that follows, however steady its progress."""
        self._until_s = time.monotonic() + timeout_s

    def send(self, frame: bytes, buffers: Sequence[memoryview] = ()) -> None:
        """Send a frame and the buffers after it."""
        self._move([memoryview(frame), *buffers], self._socket.sendmsg)

    def wait_for_frame(self) -> bool:
        """Wait without a limit until a frame begins; return False if the other end has closed
        instead."""
        self._socket.settimeout(None)
        try:
            return bool(self._socket.recv(1, socket.MSG_PEEK))
        except ConnectionResetError:  # it closed with data of ours unread
            return False

    def peek(self) -> bytes:
        """Return the next LENGTH_BYTES; `receive` still includes them."""
        self._prefix = self._prefix or self._take(LENGTH_BYTES)
        return self._prefix

    def receive(self, max_bytes: int = MAX_HEADER_BYTES) -> bytes:
        """Receive the next frame's header."""
        length = length_of(self.peek(), max_bytes)
        self._prefix = b""
        return self._take(length)

    def receive_until(self, end: bytes, max_bytes: int) -> bytes:
        """Receive up to `end` from a client that does not send frames; later bytes are lost.
        WireError if it is longer than `max_bytes`."""
        received = bytearray(self.peek())
        while (at := received.find(end)) < 0:
            if len(received) >= max_bytes:
                raise WireError(f"no end within {max_bytes} bytes")
            self._socket.settimeout(self._wait_s())
            some = self._socket.recv(max_bytes - len(received))
            self._counted(len(some))
            received += some
        return bytes(received[: at + len(end)])

    def fill(self, buffers: Sequence[memoryview]) -> None:
        """Receive as many bytes as the buffers hold, in order."""
        self._move(buffers, lambda window: self._counted(self._socket.recvmsg_into(window)[0]))

    def share_machine(self) -> None:
        """Turn keepalive off: the other end is on this machine, whose kernel reports its death at
        once. One that is only stopped is then never considered dead."""
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 0)
        if sys.platform == "linux":
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 0)

    def wait_for_end(self) -> None:
        """Wait until the other end closes or dies; ignore what it sends."""
        over = select.poll()
        over.register(self._socket, getattr(select, "POLLRDHUP", select.POLLIN))
        over.poll()

    def stop_sending(self) -> None:
        """Close the sending direction."""
        self._shut(socket.SHUT_WR)

    def stop_receiving(self) -> None:
        """Wake a thread that waits to receive; the other end does not notice."""
        self._shut(socket.SHUT_RD)

    def cut(self) -> None:
        """Close both directions, which wakes the threads that wait at either end; from any
        thread."""
        self._shut(socket.SHUT_RDWR)

    def close(self) -> None:
        """Release the descriptor."""
        self._socket.close()

    def _move(self, buffers: Sequence[memoryview], move: Callable[[list[memoryview]], int]) -> None:
        """Pass the buffers to the kernel in windows: a call inspects every buffer it is given,
        however few bytes it then takes."""
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
        except OSError:  # already closed
            return

    def _take(self, num_bytes: int) -> bytes:
        taken = bytearray()  # grows as bytes arrive, since a length is only a claim
        while len(taken) < num_bytes:
            self._socket.settimeout(self._wait_s())
            some = self._socket.recv(min(STEP_BYTES, num_bytes - len(taken)))
            self._counted(len(some))
            taken += some
        return bytes(taken)

    def _counted(self, num_bytes: int) -> int:
        if not num_bytes:
            raise ConnectionResetError(CONNECTION_CLOSED)
        self.num_received += num_bytes
        return num_bytes

    def _wait_s(self) -> float:
        left_s = min(self.patience_s, self._until_s - time.monotonic())
        if left_s <= 0:
            raise TimeoutError("timed out")
        return left_s


def loss_reason(error: Exception) -> str:
    """Describe in a few words why a connection failed."""
    if isinstance(error, ConnectionResetError | BrokenPipeError):
        return CONNECTION_CLOSED
    if isinstance(error, TimeoutError):
        return "does not answer"
    return str(getattr(error, "strerror", None) or error).lower()
