"""Accept connections, in one thread: consumers in their handshake, and HTTP requests for a shard.

    ACCEPTED --whole handshake--> admitted, passed on;  --silent, wrong, too many--> closed

    curl -H "Authorization: Bearer $ROLLMESH_ADMIN_TOKEN" http://10.0.0.4:7000/tensors/0x2a00000001

- At most MAX_UNPROVEN connections are pending; one more closes the oldest. Each has HANDSHAKE_S and
  takes as much memory as it has sent, at most MAX_REQUEST_BYTES.
- One port serves both: "GET " read as a length is longer than any header. Ranks never use HTTP.
- An HTTP request without the admin token gets 401, also on loopback, and always if none is set. It
  is passed on when it is complete; one answer, and the connection closes.
"""

import hmac
import math
import selectors
import socket
import threading
import time
from collections.abc import Callable
from http import HTTPStatus
from typing import Final, Protocol

from rollmesh.core.errors import ShardMissing, WireError
from rollmesh.core.logs import get_logger
from rollmesh.core.process import close_in_children
from rollmesh.core.secret_files import ADMIN_TOKEN_VARIABLE
from rollmesh.tensors.framed_socket import FramedSocket, loss_reason
from rollmesh.tensors.frames import LENGTH_BYTES, Admitted, KeyProof, length_of
from rollmesh.tensors.handshake import MAX_GREETING_BYTES, HandshakeRefused, OwnerHandshake
from rollmesh.tensors.store import OwnerStore
from rollmesh.wire.keys import Keys
from rollmesh.wire.sockets import HANDSHAKE_S

HTTP_START: Final = b"GET "
MAX_REQUEST_BYTES: Final = 8192
_PATH = "/tensors/"


def has_token(request: bytes, token: str) -> bool:
    """Return whether a complete request has the token."""
    return _has_token(token, request.decode("latin-1").split("\r\n")[1:])


def refused_page() -> bytes:
    """Return the answer to a request without the token."""
    why = f"send the token of {ADMIN_TOKEN_VARIABLE} as Bearer; the owner needs it set too"
    text = f"{why}\n".encode()
    return _head(HTTPStatus.UNAUTHORIZED, "text/plain", len(text)) + text


def answer_page(framed: FramedSocket, store: OwnerStore, token: str) -> None:
    """Read one request and answer it; OSError if the client is gone."""
    request = framed.receive_until(b"\r\n\r\n", MAX_REQUEST_BYTES).decode("latin-1")
    framed.allow(math.inf)
    path, *headers = request.split("\r\n")
    path = path.removeprefix(HTTP_START.decode()).partition(" ")[0]
    if not _has_token(token, headers):
        framed.send(refused_page())
        return
    shard_id = _id_in(path)
    if shard_id is None:
        _send_text(
            framed, HTTPStatus.NOT_FOUND, f"there is {_PATH}ID here, decimal or 0x..., and no more"
        )
        return
    try:
        content = store.read(shard_id)
    except ShardMissing as error:
        _send_text(framed, HTTPStatus.NOT_FOUND, str(error))
        return
    shape = ",".join(map(str, content.shape))
    extra = f"X-Rollmesh-Dtype: {content.dtype}\r\nX-Rollmesh-Shape: {shape}\r\n"
    head = _head(HTTPStatus.OK, "application/octet-stream", content.data.nbytes, extra)
    framed.send(head, [content.data.data])


def _has_token(token: str, headers: list[str]) -> bool:
    for header in headers:
        name, _, value = header.partition(":")
        if name.lower() == "authorization":
            given = value.strip().removeprefix("Bearer ")
            return bool(token) and hmac.compare_digest(given.encode("latin-1"), token.encode())
    return False


def _id_in(path: str) -> int | None:
    try:
        shard_id = int(path.removeprefix(_PATH), 0)
    except ValueError:
        return None
    return shard_id if path.startswith(_PATH) and 0 <= shard_id < 1 << 64 else None


def _send_text(framed: FramedSocket, status: HTTPStatus, why: str) -> None:
    text = f"{why}\n".encode()
    framed.send(_head(status, "text/plain", len(text)) + text)


def _head(status: HTTPStatus, kind: str, num_bytes: int, more: str = "") -> bytes:
    first = f"HTTP/1.1 {status.value} {status.phrase}\r\n"
    about = f"Content-Type: {kind}\r\nContent-Length: {num_bytes}\r\nConnection: close\r\n"
    return f"{first}{about}{more}\r\n".encode()


log = get_logger()

MAX_UNPROVEN: Final = 64
"""Limit of connections that have not finished their handshake."""
ACCEPT_RETRY_S: Final = 0.2
"""Delay between attempts to accept without a free descriptor."""
_END: Final = b"\r\n\r\n"


class AdmittedHandler(Protocol):
    """The server that admitted consumers are passed to; raises OSError or RuntimeError if it is
    full."""

    def serve_consumer(self, framed: FramedSocket, proof: KeyProof) -> None:
        """Serve an admitted consumer."""

    def serve_page(self, framed: FramedSocket) -> None:
        """Serve an HTTP request with the token."""


class _PendingConnection:
    """One connection, and what it has sent."""

    def __init__(self, connected: socket.socket, admission: OwnerHandshake, until_s: float) -> None:
        self.socket = connected
        self.admission = admission
        self.until_s = until_s
        self.received = bytearray()

    @property
    def is_page(self) -> bool:
        return self.received[:LENGTH_BYTES] == HTTP_START

    def num_missing(self) -> int:
        """Return the missing bytes of the next message; WireError if it would be too long."""
        num_received = len(self.received)
        if num_received < LENGTH_BYTES:
            return LENGTH_BYTES - num_received
        if self.is_page:
            if num_received >= MAX_REQUEST_BYTES:
                raise WireError(f"no end within {MAX_REQUEST_BYTES} bytes")
            return 0 if _END in self.received else MAX_REQUEST_BYTES - num_received
        length = length_of(bytes(self.received[:LENGTH_BYTES]), MAX_GREETING_BYTES)
        return LENGTH_BYTES + length - num_received


class ConnectionAcceptor:
    """Accepts connections and admits consumers, in the thread that calls `run`."""

    def __init__(
        self, server: AdmittedHandler, keys: Keys | None, admitted: Admitted, token: str
    ) -> None:
        self._server = server
        self._keys = keys
        self._admitted = admitted
        self._token = token
        self._pending: dict[socket.socket, _PendingConnection] = {}
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
                    elif pending := self._pending.get(key.fileobj):  # type: ignore[call-overload]
                        self._advance(pending, selector)
                now_s = time.monotonic()
                for late in [each for each in self._pending.values() if now_s >= each.until_s]:
                    self._drop(late, selector, "does not answer")
            for pending in [*self._pending.values()]:
                self._remove(pending, selector).close()

    def _left_s(self) -> float | None:
        oldest = next(iter(self._pending.values()), None)
        return max(0.0, oldest.until_s - time.monotonic()) if oldest else None

    def _accept(
        self,
        listening: socket.socket,
        selector: selectors.BaseSelector,
        wait: Callable[[float], bool],
    ) -> None:
        try:
            connected, _ = listening.accept()
        except (BlockingIOError, ConnectionError):  # already closed
            return
        except OSError as error:
            if not wait(ACCEPT_RETRY_S):
                log.warning("server.full", why=loss_reason(error))
            return
        if len(self._pending) >= MAX_UNPROVEN:
            oldest = next(iter(self._pending.values()))
            self._drop(oldest, selector, f"{MAX_UNPROVEN} others came before it proved its keys")
        connected.setblocking(False)
        close_in_children(connected)
        admission = OwnerHandshake(self._keys, self._admitted)
        pending = _PendingConnection(connected, admission, time.monotonic() + HANDSHAKE_S)
        self._pending[connected] = pending
        selector.register(connected, selectors.EVENT_READ)

    def _advance(self, pending: _PendingConnection, selector: selectors.BaseSelector) -> None:
        """Read what has arrived, and answer complete messages."""
        try:
            data = pending.socket.recv(pending.num_missing())
            if not data:
                raise ConnectionResetError
            pending.received += data
            if not pending.num_missing():
                self._answer(pending, selector)
        except BlockingIOError:
            return
        except HandshakeRefused as declined:
            self._send(pending, declined.answer)
            self._drop(pending, selector, str(declined))
        except (OSError, WireError, RuntimeError) as error:
            self._drop(pending, selector, loss_reason(error))

    def _answer(self, pending: _PendingConnection, selector: selectors.BaseSelector) -> None:
        received = bytes(pending.received)
        if pending.is_page:
            if has_token(received, self._token):
                connected = self._remove(pending, selector)
                self._pass_on(
                    connected,
                    lambda: self._server.serve_page(FramedSocket(connected, received=received)),
                )
            else:
                self._send(pending, refused_page())
                self._drop(pending, selector, "a page without the token")
            return
        pending.received.clear()
        answer, proof = pending.admission.take(received[LENGTH_BYTES:])
        self._send(pending, answer)
        if proof is not None:
            connected = self._remove(pending, selector)
            self._pass_on(
                connected, lambda: self._server.serve_consumer(FramedSocket(connected), proof)
            )

    def _pass_on(self, connected: socket.socket, handle: Callable[[], None]) -> None:
        connected.setblocking(True)
        try:
            handle()
        except (OSError, RuntimeError) as error:  # already closed, or over the limit
            log.warning("consumer.refused", why=loss_reason(error))
            connected.close()

    def _send(self, pending: _PendingConnection, answer: bytes) -> None:
        """Send all or nothing: the empty send buffer of a new connection takes it."""
        if pending.socket.send(answer) < len(answer):
            raise ConnectionResetError

    def _remove(
        self, pending: _PendingConnection, selector: selectors.BaseSelector
    ) -> socket.socket:
        selector.unregister(pending.socket)
        del self._pending[pending.socket]
        return pending.socket

    def _drop(
        self, pending: _PendingConnection, selector: selectors.BaseSelector, why: str
    ) -> None:
        self._remove(pending, selector).close()
        log.info("consumer.not_admitted", why=why)
