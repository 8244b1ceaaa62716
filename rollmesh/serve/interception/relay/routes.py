"""The relay's routes: authenticate, forward, and send the answer back as it arrives.

    POST .../chat/completions  .../completions  .../responses  .../messages     recorded
    POST .../messages/count_tokens   GET .../models                             not recorded

- Only these suffixes are forwarded, never the agent's own path: with the provider's key it could
  reach other resources.
- The answer's body is sent byte for byte, a stream's events as they arrive, and its end event when
  the call is written.
- An agent that disconnects leaves its call at once. The relay's own errors are in the agent's
  dialect.
"""

import sys
from collections import Counter

import msgspec

from rollmesh.core.config import InterceptionConfig
from rollmesh.core.errors import SessionError
from rollmesh.serve.interception.body_limits import DecodeGate
from rollmesh.serve.interception.dialects.dialect import Dialect
from rollmesh.serve.interception.dialects.registry import (
    COUNT_DIALECTS,
    DEFAULT_DIALECT,
    DIALECTS,
    dialect_of,
)
from rollmesh.serve.interception.exchange import ExchangeState, guard
from rollmesh.serve.interception.relay.call import ForwardState, RelayCall
from rollmesh.serve.interception.relay.capture import RelayCapture
from rollmesh.serve.interception.relay.upstream_answer import forwarded_headers
from rollmesh.serve.interception.relay.upstreams import ForwardedRequest, UpstreamPool
from rollmesh.serve.interception.request import HttpRequest, find_secret, read_retry_mark

MODELS_ROUTE = "/models"


class RelayDeps(msgspec.Struct, frozen=True):
    """Dependencies of all relayed exchanges."""

    capture: RelayCapture
    upstreams: UpstreamPool
    config: InterceptionConfig
    decode_gate: DecodeGate = msgspec.field(default_factory=DecodeGate)


class RelayRoutes:
    """Answers every request of the relay."""

    def __init__(self, deps: RelayDeps) -> None:
        self.num_exchanges: Counter[tuple[str, str]] = Counter()
        """Ended exchanges by route and last state."""
        self.num_open = 0
        self._deps = deps

    async def handle(self, request: HttpRequest, path: str) -> None:
        """Answer one request."""
        exchange = _RelayExchange(request, path, self._deps)
        self.num_open += 1
        try:
            await guard(exchange, exchange.run())
        finally:
            self.num_open -= 1
            route = exchange.route.strip("/") or "unknown"
            self.num_exchanges[route, exchange.state.value] += 1


class _RelayExchange:
    """One agent's connection to one call."""

    __slots__ = ("_deps", "_dialect", "_is_recorded", "request", "route", "state")

    def __init__(self, request: HttpRequest, path: str, deps: RelayDeps) -> None:
        self.state = ExchangeState.RECEIVED
        self.request = request
        self.route = ""
        """The suffix of the path that is forwarded; '' if none is."""
        self._dialect: Dialect | None = None
        self._is_recorded = False
        self._deps = deps
        self._find_route(request.method, path)

    def _find_route(self, method: str, path: str) -> None:
        if method == "GET" and path.endswith(MODELS_ROUTE):
            self.route = MODELS_ROUTE
        elif method == "POST":
            if (dialect := dialect_of(path)) is not None:
                self.route, self._dialect, self._is_recorded = dialect.route, dialect, True
            else:
                for route, dialect in COUNT_DIALECTS.items():
                    if path.endswith(route):
                        self.route, self._dialect = route, dialect

    async def run(self) -> None:
        request, dialect, config = self.request, self._dialect, self._deps.config
        if not self.route:
            raise SessionError(404, "unknown_route", f"no such route; there are {_known_routes()}")
        headers = request.headers
        secret = find_secret(request.path, headers)
        session = self._deps.capture.find(secret)
        request.owner = session.session_id
        limits = config.max_body_bytes, config.keepalive_s
        forwarded = self._forwarded(secret)
        if dialect is not None and self._is_recorded:
            body = session.follow(request.num_bytes if request.is_whole else sys.maxsize)
            with session.reading():
                await request.read_into(body, *limits)
                await self._deps.decode_gate.pass_through(request.num_bytes, session.session_id)
                call = session.call(dialect, forwarded, body, read_retry_mark(headers))
            # The session holds the rest of the body now, and counts it.
            del body
            request.release_body()
        else:
            forwarded.body = (await request.read(*limits),)
            call = session.pass_by(forwarded)
        del forwarded
        call.join()
        try:
            self.state = ExchangeState.ATTACHED
            await call.wait_for_head()
            request.release_body()
            await (self._stream(call) if call.is_stream else self._send_whole(call))
            await request.drain(call.check)
            call.is_delivered = True
            self.state = ExchangeState.DELIVERED
        finally:
            session.left(call)

    def refusal(self, error: SessionError) -> bytes:
        """The body of a refusal."""
        return (self._dialect or DEFAULT_DIALECT).error(error)

    def last_event(self, error: SessionError) -> bytes:
        """The event that ends a stream with an error."""
        # The bytes sent so far may end inside an event, which the blank line ends.
        return b"\n\n" + (self._dialect or DEFAULT_DIALECT).error_event(error)

    def _forwarded(self, secret: str) -> ForwardedRequest:
        request, dialect = self.request, self._dialect
        query = request.path.partition("?")[2]
        tail = f"?{query}" if query and secret not in query else ""
        prefers_x_api_key = dialect is not None and dialect.prefers_x_api_key
        key = self._deps.upstreams.key
        lines = forwarded_headers(request.raw_headers, secret, key, prefers_x_api_key)
        path = (self.route + tail).encode("ascii", "ignore")
        return ForwardedRequest(request.method.encode(), path, lines)

    async def _send_whole(self, call: RelayCall) -> None:
        """Send an answer that is not streamed in one write."""
        await call.wait(sys.maxsize)
        body = call.body
        self.state = ExchangeState.STREAMING
        self.request.answer(call.status, call.lines, body)

    async def _stream(self, call: RelayCall) -> None:
        """Send pieces as they arrive; each write has all that are visible."""
        self.request.open(call.status, call.lines)
        num_sent = 0
        while True:
            is_begun = call.state is ForwardState.ANSWERING
            if is_begun and not self.request.is_opened and not call.since(0)[0]:
                self.request.send(b"")
            await call.wait(num_sent)
            new, num_sent = call.since(num_sent)
            if new:
                self.request.send(new)
                self.state = ExchangeState.STREAMING
                await self.request.drain(call.check)
            elif call.state is ForwardState.WHOLE:
                break
        self.request.close()


def _known_routes() -> str:
    routes = [f"POST /v1{route}" for route in (*DIALECTS, *COUNT_DIALECTS)]
    return ", ".join([*routes, f"GET /v1{MODELS_ROUTE}"])
