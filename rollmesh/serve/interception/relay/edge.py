"""The relay's routes: authenticate, forward, pass the answer back as it comes.

    POST .../chat/completions  .../completions  .../responses  .../messages     kept
    POST .../messages/count_tokens   GET .../models                             passed by

Only these ends are forwarded, never a path of the agent's own: with the provider's key it could
reach what is not for it. Invariants: the answer's body is passed byte for byte, a stream's events
as they arrive; an agent that hangs up leaves its call at once; our own refusals are in the agent's
dialect. Driven by the gateway's HTTP face.
"""

import asyncio
import http
from collections import Counter

import msgspec
from aiohttp import web
from aiohttp.http import HttpVersion11

from rollmesh.core.config import InterceptionConfig
from rollmesh.core.errors import SessionError
from rollmesh.core.logs import get_logger
from rollmesh.serve.interception.answer import CONNECTION_LINES, written
from rollmesh.serve.interception.auth import find_secret
from rollmesh.serve.interception.body import read_body
from rollmesh.serve.interception.edge import DIALECTS
from rollmesh.serve.interception.exchange import ExchangeState, refusal
from rollmesh.serve.interception.relay.call import RelayCall
from rollmesh.serve.interception.relay.capture import RelayCapture
from rollmesh.serve.interception.relay.headers import forwarded
from rollmesh.serve.interception.relay.heard import ROUTES
from rollmesh.serve.interception.relay.upstreams import Parcel, Upstreams

PASSED = {"POST": ("/messages/count_tokens",), "GET": ("/models",)}
_LAST_CHUNK = b"0\r\n\r\n"

log = get_logger()


class RelayKit(msgspec.Struct, frozen=True):
    """What all relayed exchanges share."""

    capture: RelayCapture
    upstreams: Upstreams
    config: InterceptionConfig


class RelayEdge:
    """`handle` answers every request."""

    def __init__(self, kit: RelayKit) -> None:
        self.num_exchanges: Counter[tuple[str, str]] = Counter()
        """Ended exchanges by route and last state."""
        self.num_open = 0
        self._kit = kit

    async def handle(self, request: web.BaseRequest, path: str) -> web.StreamResponse:
        """The answer; every error ends here."""
        route, is_kept = _route_of(request.method, path)
        exchange = _Exchange(request, self._kit)
        self.num_open += 1
        try:
            if not route:
                raise SessionError(404, "unknown_route", f"no such route; there are {_KNOWN}")
            return await exchange.run(route, is_kept)
        except SessionError as error:
            is_sealed = error.status == 410
            exchange.state = ExchangeState.SEALED if is_sealed else ExchangeState.FAILED
            return exchange.refuse(route, error)
        except (asyncio.CancelledError, ConnectionError):
            exchange.state = ExchangeState.ABANDONED
            raise
        except Exception:  # door: a fault of ours must not take other calls along
            exchange.state = ExchangeState.FAILED
            log.exception("relay.broken")
            fault = SessionError(500, "internal_error", "a fault in the gateway")
            return exchange.refuse(route, fault)
        finally:
            self.num_open -= 1
            self.num_exchanges[route.strip("/") or "unknown", exchange.state.value] += 1


class _Exchange:
    """One agent's connection to one call."""

    __slots__ = ("_is_open", "_kit", "_request", "state")

    def __init__(self, request: web.BaseRequest, kit: RelayKit) -> None:
        self.state = ExchangeState.RECEIVED
        self._request = request
        self._kit = kit
        self._is_open = False
        """The first byte of a stream left."""

    async def run(self, route: str, is_kept: bool) -> web.StreamResponse:
        request, config = self._request, self._kit.config
        headers = request.headers
        secret = find_secret(request.raw_path, headers)
        session = self._kit.capture.find(secret)
        body = await read_body(request, config.max_body_bytes, config.keepalive_s)
        self.state = ExchangeState.MATCHED
        parcel = self._parcel(route, secret, body)
        if is_kept:
            key = headers.get("Idempotency-Key", "")
            resent = headers.get("x-stainless-retry-count", "0") not in ("", "0")
            call = session.call(route, parcel, key, resent or bool(key))
        else:
            call = session.pass_by(parcel)
        call.join()
        try:
            self.state = ExchangeState.ATTACHED
            await call.wait_for_head()
            keeps = await (self._stream(call) if call.is_stream else self._send_whole(call))
            await request.writer.drain()
            call.is_delivered = True
            self.state = ExchangeState.DELIVERED
            return written(keeps)
        finally:
            call.leave()

    def refuse(self, route: str, error: SessionError) -> web.StreamResponse:
        """An error reply; once a stream has begun, an error event and its end."""
        body = DIALECTS.get(route, DIALECTS["/chat/completions"]).error(error)
        if not self._is_open:
            return refusal(body, error)
        name = b"event: error\n" if route == "/messages" else b""
        # What was passed may end within an event: the blank line ends that one.
        event = b"\n\n%bdata: %b\n\n" % (name, body)
        try:
            self._write(self._framed(event) + self._last())
        except ConnectionError:
            self.state = ExchangeState.ABANDONED
        return written(self._keeps_stream)

    def _parcel(self, route: str, secret: str, body: bytes) -> Parcel:
        request = self._request
        query = request.raw_path.partition("?")[2]
        tail = f"?{query}" if query and secret not in query else ""
        lines = forwarded(
            request.raw_headers, secret, self._kit.upstreams.key, route.startswith("/messages")
        )
        path = (route + tail).encode("ascii", "ignore")
        return Parcel(request.method.encode(), path, lines, body)

    async def _send_whole(self, call: RelayCall) -> bool:
        """A plain answer in one write; whether its connection is kept."""
        while call.is_running:
            await call.wait(len(call.pieces))
        body = call.body
        if call.failure is not None:
            raise call.failure.again()
        self.state = ExchangeState.STREAMING
        self._write(self._head(call, b"Content-Length: %d\r\n" % len(body)) + body)
        return bool(self._request.keep_alive)

    async def _stream(self, call: RelayCall) -> bool:
        """Pieces as they come, all that has arrived in one write."""
        framing = b"Transfer-Encoding: chunked\r\n" if self._is_chunked else b""
        head = self._head(call, framing)
        num_sent = 0
        while True:
            await call.wait(num_sent)
            new = call.pieces[num_sent:]
            if new:
                num_sent += len(new)
                self._write(head + self._framed(b"".join(new)))
                head, self._is_open, self.state = b"", True, ExchangeState.STREAMING
                await self._request.writer.drain()
            elif not call.is_running:
                break
        self._write(head + self._last())
        return self._keeps_stream

    @property
    def _is_chunked(self) -> bool:
        """Without chunks only the connection's end can end a stream."""
        return self._request.version >= HttpVersion11

    @property
    def _keeps_stream(self) -> bool:
        return self._is_chunked and bool(self._request.keep_alive)

    def _framed(self, data: bytes) -> bytes:
        return b"%x\r\n%b\r\n" % (len(data), data) if self._is_chunked else data

    def _last(self) -> bytes:
        return _LAST_CHUNK if self._is_chunked else b""

    def _head(self, call: RelayCall, framing: bytes) -> bytes:
        is_sized = framing.startswith(b"Content-Length")
        keeps = bool(self._request.keep_alive) and (is_sized or self._is_chunked)
        connection = CONNECTION_LINES[keeps, self._is_chunked]
        return b"HTTP/1.1 %d %b\r\n%b%b%b\r\n" % (
            call.status,
            _REASONS.get(call.status, b""),
            call.lines,
            framing,
            connection,
        )

    def _write(self, data: bytes) -> None:
        transport = self._request.transport
        if transport is None or transport.is_closing():
            raise ConnectionResetError("the client hung up")
        if data:
            transport.write(data)


_REASONS = {status.value: status.phrase.encode() for status in http.HTTPStatus}
_KNOWN = ", ".join(
    [*(f"POST /v1{route}" for route in (*ROUTES, *PASSED["POST"])), "GET /v1/models"]
)


def _route_of(method: str, path: str) -> tuple[str, bool]:
    """The end of the path that is forwarded, '' if none is, and whether its calls are kept."""
    for route in PASSED.get(method, ()):
        if path.endswith(route):
            return route, False
    if method == "POST":
        for route in ROUTES:
            if path.endswith(route):
                return route, True
    return "", False
