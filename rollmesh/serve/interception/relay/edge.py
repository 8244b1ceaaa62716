"""The relay's routes: authenticate, forward, pass the answer back as it comes.

    POST .../chat/completions  .../completions  .../responses  .../messages     kept
    POST .../messages/count_tokens   GET .../models                             passed by

Only these ends are forwarded, never a path of the agent's own: with the provider's key it could
reach what is not for it. Invariants: the answer's body is passed byte for byte, a stream's events
as they arrive, and the one that ends it when the call is written; an agent that hangs up leaves its
call at once; our own refusals are in the agent's dialect. Driven by the gateway's HTTP face.
"""

import sys
from collections import Counter

import msgspec

from rollmesh.core.config import InterceptionConfig
from rollmesh.core.errors import SessionError
from rollmesh.serve.interception.agent_server import DIALECTS
from rollmesh.serve.interception.body_limits import DecodeGate
from rollmesh.serve.interception.exchange import ExchangeState, guard
from rollmesh.serve.interception.relay.call import CallState, RelayCall
from rollmesh.serve.interception.relay.capture import RelayCapture
from rollmesh.serve.interception.relay.headers import forwarded
from rollmesh.serve.interception.relay.heard import ROUTES
from rollmesh.serve.interception.relay.upstreams import Parcel, Upstreams
from rollmesh.serve.interception.request import HttpRequest, find_secret, read_retry_mark

PASSED = {"POST": ("/messages/count_tokens",), "GET": ("/models",)}


class RelayKit(msgspec.Struct, frozen=True):
    """What all relayed exchanges share."""

    capture: RelayCapture
    upstreams: Upstreams
    config: InterceptionConfig
    turnstile: DecodeGate = msgspec.field(default_factory=DecodeGate)


class RelayEdge:
    """`handle` answers every request."""

    def __init__(self, kit: RelayKit) -> None:
        self.num_exchanges: Counter[tuple[str, str]] = Counter()
        """Ended exchanges by route and last state."""
        self.num_open = 0
        self._kit = kit

    async def handle(self, request: HttpRequest, path: str) -> None:
        """Answer it."""
        route, is_kept = _route_of(request.method, path)
        exchange = _Exchange(request, route, self._kit)
        self.num_open += 1
        try:
            await guard(exchange, exchange.run(is_kept))
        finally:
            self.num_open -= 1
            self.num_exchanges[route.strip("/") or "unknown", exchange.state.value] += 1


class _Exchange:
    """One agent's connection to one call."""

    __slots__ = ("_kit", "_route", "request", "state")

    def __init__(self, request: HttpRequest, route: str, kit: RelayKit) -> None:
        self.state = ExchangeState.RECEIVED
        self.request = request
        self._route = route
        self._kit = kit

    async def run(self, is_kept: bool) -> None:
        request, route, config = self.request, self._route, self._kit.config
        if not route:
            raise SessionError(404, "unknown_route", f"no such route; there are {_KNOWN}")
        headers = request.headers
        secret = find_secret(request.path, headers)
        session = self._kit.capture.find(secret)
        request.owner = session.session_id
        limits = config.max_body_bytes, config.keepalive_s
        parcel = self._parcel(secret)
        if is_kept:
            body = session.follow(request.num_bytes if request.is_whole else sys.maxsize)
            with session.reading():
                await request.read_into(body, *limits)
                await self._kit.turnstile.pass_through(request.num_bytes, session.session_id)
                call = session.call(route, parcel, body, read_retry_mark(headers))
            # What is left of it is the session's now, and counted there.
            del body
            request.release_body()
        else:
            parcel.body = (await request.read(*limits),)
            call = session.pass_by(parcel)
        del parcel
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
        return DIALECTS.get(self._route, DIALECTS["/chat/completions"]).error(error)

    def last_event(self, error: SessionError) -> bytes:
        """What ends a stream that has begun."""
        name = b"event: error\n" if self._route == "/messages" else b""
        # What was passed may end within an event: the blank line ends that one.
        return b"\n\n%bdata: %b\n\n" % (name, self.refusal(error))

    def _parcel(self, secret: str) -> Parcel:
        request, route = self.request, self._route
        query = request.path.partition("?")[2]
        tail = f"?{query}" if query and secret not in query else ""
        lines = forwarded(
            request.raw_headers, secret, self._kit.upstreams.key, route.startswith("/messages")
        )
        path = (route + tail).encode("ascii", "ignore")
        return Parcel(request.method.encode(), path, lines)

    async def _send_whole(self, call: RelayCall) -> None:
        """A plain answer in one write."""
        await call.wait(sys.maxsize)
        body = call.body
        self.state = ExchangeState.STREAMING
        self.request.answer(call.status, call.lines, body)

    async def _stream(self, call: RelayCall) -> None:
        """Send pieces as they come, all that are there in one write."""
        self.request.open(call.status, call.lines)
        num_sent = 0
        while True:
            is_begun = call.state is CallState.ANSWERING
            if is_begun and not self.request.is_opened and not call.since(0)[0]:
                self.request.send(b"")
            await call.wait(num_sent)
            new, num_sent = call.since(num_sent)
            if new:
                self.request.send(new)
                self.state = ExchangeState.STREAMING
                await self.request.drain(call.check)
            elif call.state is CallState.WHOLE:
                break
        self.request.close()


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
