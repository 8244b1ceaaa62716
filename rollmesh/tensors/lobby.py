"""Consumers that have dialled an owner and have proved nothing yet: one thread for all of them.

    ARRIVED --whole handshake--> admitted, and the server's;  --silent, wrong, too many--> cut

- At most `MAX_UNPROVEN` are here; one more cuts the oldest.
- Each has HANDSHAKE_S and takes as much memory as it has sent, at most MAX_REQUEST_BYTES.
- A request for a page is passed on when it is whole and carries the token.
"""

import selectors
import socket
import threading
import time
from collections.abc import Callable
from typing import Final, Protocol

from rollmesh.core.errors import WireError
from rollmesh.core.logs import get_logger
from rollmesh.core.process import close_in_children
from rollmesh.tensors.frames import LENGTH_BYTES, Admitted, Proof, length_of
from rollmesh.tensors.handshake import MAX_GREETING_BYTES, Admission, Declined
from rollmesh.tensors.line import Line, why_lost
from rollmesh.tensors.page import BEGINNING, MAX_REQUEST_BYTES, refused_page, shows_token
from rollmesh.wire.keys import Keys
from rollmesh.wire.sockets import HANDSHAKE_S

log = get_logger()

MAX_UNPROVEN: Final = 64
"""Connections that have not finished their handshake."""
NO_ROOM_S: Final = 0.2
"""Between two tries to accept, where there is no descriptor."""
_END: Final = b"\r\n\r\n"


class Server(Protocol):
    """The server that admitted consumers are passed to; OSError or RuntimeError if it is full."""

    def seat(self, line: Line, proof: Proof) -> None:
        """An admitted consumer."""

    def show(self, line: Line) -> None:
        """One that asks for a page and has the token."""


class _Arrival:
    """One connection, and what it has sent."""

    def __init__(self, connected: socket.socket, admission: Admission, until_s: float) -> None:
        self.socket = connected
        self.admission = admission
        self.until_s = until_s
        self.received = bytearray()

    @property
    def is_page(self) -> bool:
        return self.received[:LENGTH_BYTES] == BEGINNING

    def num_missing(self) -> int:
        """Bytes that are missing in the next message; WireError where it would be too long."""
        num_received = len(self.received)
        if num_received < LENGTH_BYTES:
            return LENGTH_BYTES - num_received
        if self.is_page:
            if num_received >= MAX_REQUEST_BYTES:
                raise WireError(f"no end within {MAX_REQUEST_BYTES} bytes")
            return 0 if _END in self.received else MAX_REQUEST_BYTES - num_received
        length = length_of(bytes(self.received[:LENGTH_BYTES]), MAX_GREETING_BYTES)
        return LENGTH_BYTES + length - num_received


class Lobby:
    """Accepts connections and admits consumers, in the thread that calls `run`."""

    def __init__(self, server: Server, keys: Keys | None, admitted: Admitted, token: str) -> None:
        self._server = server
        self._keys = keys
        self._admitted = admitted
        self._token = token
        self._arrivals: dict[socket.socket, _Arrival] = {}
        """The oldest first."""

    def run(self, listening: socket.socket, is_stopping: threading.Event) -> None:
        """Accept and admit until `is_stopping` is set and `listening` is shut down."""
        listening.setblocking(False)
        with selectors.DefaultSelector() as selector:
            close_in_children(selector)
            selector.register(listening, selectors.EVENT_READ)
            while not is_stopping.is_set():
                for key, _ in selector.select(self._left_s()):
                    if key.fileobj is listening:
                        self._accept(listening, selector, is_stopping.wait)
                    elif arrival := self._arrivals.get(key.fileobj):  # type: ignore[call-overload]
                        self._advance(arrival, selector)
                now_s = time.monotonic()
                for late in [each for each in self._arrivals.values() if now_s >= each.until_s]:
                    self._cut(late, selector, "does not answer")
            for arrival in [*self._arrivals.values()]:
                self._leave(arrival, selector).close()

    def _left_s(self) -> float | None:
        oldest = next(iter(self._arrivals.values()), None)
        return max(0.0, oldest.until_s - time.monotonic()) if oldest else None

    def _accept(
        self,
        listening: socket.socket,
        selector: selectors.BaseSelector,
        wait: Callable[[float], bool],
    ) -> None:
        try:
            connected, _ = listening.accept()
        except (BlockingIOError, ConnectionError):  # it has gone again
            return
        except OSError as error:
            if not wait(NO_ROOM_S):
                log.warning("server.full", why=why_lost(error))
            return
        if len(self._arrivals) >= MAX_UNPROVEN:
            oldest = next(iter(self._arrivals.values()))
            self._cut(oldest, selector, f"{MAX_UNPROVEN} others came before it proved its keys")
        connected.setblocking(False)
        close_in_children(connected)
        admission = Admission(self._keys, self._admitted)
        arrival = _Arrival(connected, admission, time.monotonic() + HANDSHAKE_S)
        self._arrivals[connected] = arrival
        selector.register(connected, selectors.EVENT_READ)

    def _advance(self, arrival: _Arrival, selector: selectors.BaseSelector) -> None:
        """Read what has come, and answer what is whole."""
        try:
            data = arrival.socket.recv(arrival.num_missing())
            if not data:
                raise ConnectionResetError
            arrival.received += data
            if not arrival.num_missing():
                self._answer(arrival, selector)
        except BlockingIOError:
            return
        except Declined as declined:
            self._send(arrival, declined.answer)
            self._cut(arrival, selector, str(declined))
        except (OSError, WireError, RuntimeError) as error:
            self._cut(arrival, selector, why_lost(error))

    def _answer(self, arrival: _Arrival, selector: selectors.BaseSelector) -> None:
        received = bytes(arrival.received)
        if arrival.is_page:
            if shows_token(received, self._token):
                connected = self._leave(arrival, selector)
                self._pass_on(
                    connected, lambda: self._server.show(Line(connected, received=received))
                )
            else:
                self._send(arrival, refused_page())
                self._cut(arrival, selector, "a page without the token")
            return
        arrival.received.clear()
        answer, proof = arrival.admission.take(received[LENGTH_BYTES:])
        self._send(arrival, answer)
        if proof is not None:
            connected = self._leave(arrival, selector)
            self._pass_on(connected, lambda: self._server.seat(Line(connected), proof))

    def _pass_on(self, connected: socket.socket, seat: Callable[[], None]) -> None:
        connected.setblocking(True)
        try:
            seat()
        except (OSError, RuntimeError) as error:  # it has gone again, or is one too many
            log.warning("guest.refused", why=why_lost(error))
            connected.close()

    def _send(self, arrival: _Arrival, answer: bytes) -> None:
        """All of it or none: the buffer of a connection that has been sent nothing takes it."""
        if arrival.socket.send(answer) < len(answer):
            raise ConnectionResetError

    def _leave(self, arrival: _Arrival, selector: selectors.BaseSelector) -> socket.socket:
        selector.unregister(arrival.socket)
        del self._arrivals[arrival.socket]
        return arrival.socket

    def _cut(self, arrival: _Arrival, selector: selectors.BaseSelector, why: str) -> None:
        self._leave(arrival, selector).close()
        log.info("guest.not_admitted", why=why)
