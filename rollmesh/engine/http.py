"""HTTP/1.1 client for engines and providers: pooled connections, callbacks, no task per call.

    call:  CONNECTING --connected--> SENT --head, data...--> ended | failed | closed by its caller
           CONNECTING --no descriptor, port or memory left here--> CONNECTING, after a while

- `send` never calls the receiver synchronously.
- A request on a connection that the server has just closed is sent once more if no byte of an
  answer has come.
- Idle connections are closed before the server closes them.
- A dial that fails for a shortage of this process or machine is repeated for `shortage_wait_s`,
  then ends in LocalShortage, so that callers do not blame the engine. A connection of the same
  origin that becomes idle meanwhile carries the call.
- There is no time limit on an answer: the caller closes the call. A peer that lost power or is cut
  off is an error after network.silence_timeout_s.
"""

import asyncio
import functools
import re
import ssl
import types
from collections.abc import Iterable, Sequence
from typing import Self
from urllib.parse import urlsplit

import msgspec

from rollmesh.core.config import EngineConfig
from rollmesh.core.descriptors import require_one, shortage_of
from rollmesh.core.errors import AddressError, EngineUnavailable, LocalShortage
from rollmesh.core.logs import get_logger
from rollmesh.engine.connection import (
    Headers,
    HttpCall,
    HttpConnection,
    Piece,
    ResponseReceiver,
    Target,
    one_line,
)
from rollmesh.wire.sockets import notice_death

IDLE_S = 4.0
"""Idle connections are closed after this; SGLang's server closes its own after 5 s."""
CONNECT_TIMEOUT_S = EngineConfig().connect_timeout_s
"""For clients without settings."""
SHORTAGE_WAIT_S = 30.0
"""Time for which dials that fail for a local shortage are repeated."""
FIRST_PAUSE_S = 0.05
LAST_PAUSE_S = 1.0
"""Pauses between these dials; each is twice the one before, up to the last."""
SHORTAGE_LOG_S = 30.0
"""Interval at which a lasting shortage is logged."""
_CLOSED = "this process hung up"
_TARGET = re.compile(r"[\x21-\x7e]+")
_HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_HEADER_VALUE = re.compile(r"[\x20-\x7e\x80-\xff\t]*")

log = get_logger()


class Response(msgspec.Struct, frozen=True):
    """A whole response."""

    status: int
    headers: Headers
    body: bytes


def target(method: str, url: str, headers: Iterable[tuple[str, str]] = ()) -> Target:
    """Return the target of `method` requests to `url`, with these headers besides Host and length.

    AddressError if `url` is not an http(s) URL; ValueError if a header could break out of its line.
    """
    try:
        parts = urlsplit(url)
        port = parts.port or (443 if parts.scheme == "https" else 80)
    except ValueError:
        raise AddressError(f"{url}: not an http:// or https:// URL") from None
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    is_plain = bool(_TARGET.fullmatch(path) and _TARGET.fullmatch(parts.netloc))
    if parts.scheme not in ("http", "https") or not parts.hostname or not is_plain:
        raise AddressError(f"{url}: not an http:// or https:// URL")
    if "@" in parts.netloc:
        raise AddressError(f"{parts.hostname}: name and password in a URL are not supported")
    lines = [f"{method} {path} HTTP/1.1", f"Host: {parts.netloc}"]
    for name, value in headers:
        if not _HEADER_NAME.fullmatch(name) or not _HEADER_VALUE.fullmatch(value):
            raise ValueError(f"header {name!r} holds characters that no header may")
        lines.append(f"{name}: {value}")
    return Target(
        origin=f"{parts.scheme}://{parts.hostname}:{port}",
        host=parts.hostname,
        port=port,
        is_tls=parts.scheme == "https",
        is_head=method == "HEAD",
        prelude="\r\n".join([*lines, ""]).encode("latin-1"),
    )


class HttpClient:
    """Calls any number of origins; used from one event loop, as `async with HttpClient()`."""

    def __init__(
        self,
        tls: ssl.SSLContext | None = None,
        *,
        connect_timeout_s: float = CONNECT_TIMEOUT_S,
        shortage_wait_s: float = SHORTAGE_WAIT_S,
    ) -> None:
        """`tls` is for https; by default the system's authorities are trusted."""
        self._tls = tls
        self._connect_timeout_s = connect_timeout_s
        self._shortage_wait_s = shortage_wait_s
        self._shortage_logged_s = float("-inf")
        self.held: dict[HttpCall, str] = {}
        """Calls waiting until a connection can be opened here, with the reason."""
        self._idle: dict[str, list[HttpConnection]] = {}
        self._connections: set[HttpConnection] = set()
        self._opening: dict[asyncio.Task[None], HttpCall] = {}
        self._sweeper: asyncio.TimerHandle | None = None
        self._emptied: asyncio.Future[None] | None = None

    @functools.cached_property
    def _loop(self) -> asyncio.AbstractEventLoop:
        """The event loop; each lookup costs a system call on CPython 3.11."""
        return asyncio.get_running_loop()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: types.TracebackType | None,
    ) -> None:
        await self.close()

    def send(self, target: Target, body: Sequence[Piece], receiver: ResponseReceiver) -> HttpCall:
        """Start a call; an empty body means a request without one. Never calls the receiver
        synchronously."""
        call = HttpCall(target, body, receiver)
        if not self._begin_on_idle(call):
            self.connect(call)
        return call

    def _begin_on_idle(self, call: HttpCall) -> bool:
        """Carry `call` on an idle connection, if there is one."""
        idle = self._idle.get(call.target.origin)
        oldest_s = self._loop.time() - IDLE_S
        while idle:
            connection = idle.pop()
            if connection.idle_since_s > oldest_s and _is_open(connection):
                connection.begin(call)
                return True
            connection.hang_up()
        return False

    async def fetch(
        self, target: Target, body: Sequence[Piece] = (), *, timeout_s: float
    ) -> Response:
        """Return a whole response of any status. EngineUnavailable after `timeout_s`; LocalShortage
        if no connection could be opened here by then."""
        whole = _Collector()
        call = self.send(target, body, whole)
        try:
            async with asyncio.timeout(timeout_s):
                return await whole.response
        except TimeoutError:
            if call in self.held:
                raise LocalShortage(self.held[call]) from None
            why = f"{target.origin}: no answer within {timeout_s:g} s"
            raise EngineUnavailable(why) from None
        finally:
            call.close()

    async def close(self) -> None:
        """End all calls with an error and close all connections."""
        if self._sweeper:
            self._sweeper.cancel()
        self._emptied = asyncio.get_running_loop().create_future()
        opening = dict(self._opening)
        for task, call in opening.items():
            task.cancel()
            call.over().on_error(EngineUnavailable(f"{call.target.origin}: {_CLOSED}"))
        await asyncio.gather(*opening, return_exceptions=True)
        for connection in self._connections:
            connection.hang_up()
        if self._connections:
            await self._emptied

    @property
    def num_connections(self) -> int:
        """Open connections, idle or busy."""
        return len(self._connections)

    # callbacks of connections

    def connect(self, call: HttpCall) -> None:
        """Carry `call` on a new connection."""
        loop = asyncio.get_running_loop()
        if self._emptied:
            gone = EngineUnavailable(f"{call.target.origin}: {_CLOSED}")
            loop.call_soon(call.over().on_error, gone)
            return
        opening = loop.create_task(self._open(call), name="http.connect")
        self._opening[opening] = call
        opening.add_done_callback(lambda done: self._opening.pop(done))
        call.attach(opening=opening)

    def opened(self, connection: HttpConnection) -> None:
        self._connections.add(connection)

    def rest(self, connection: HttpConnection) -> None:
        """Keep the connection for another call."""
        connection.idle_since_s = self._loop.time()
        self._idle.setdefault(connection.origin, []).append(connection)
        if self._sweeper is None:
            self._sweeper = self._loop.call_later(IDLE_S, self._sweep)

    def lost(self, connection: HttpConnection) -> None:
        """Forget the connection; the sweep removes it from the idle ones."""
        self._connections.discard(connection)
        if self._emptied and not self._connections and not self._emptied.done():
            self._emptied.set_result(None)

    def _sweep(self) -> None:
        oldest_s = self._loop.time() - IDLE_S
        for origin, idle in list(self._idle.items()):
            remaining = [each for each in idle if each.idle_since_s > oldest_s and _is_open(each)]
            for connection in set(idle).difference(remaining):
                connection.hang_up()
            self._idle[origin] = remaining
            if not remaining:
                del self._idle[origin]
        self._sweeper = None
        if self._idle:
            self._sweeper = self._loop.call_later(IDLE_S, self._sweep)

    async def _open(self, call: HttpCall) -> None:
        """Start `call` on a new connection, or on one that becomes idle while none can be
        opened."""
        until_s = self._loop.time() + self._shortage_wait_s
        pause_s = FIRST_PAUSE_S
        try:
            while not (call in self.held and self._begin_on_idle(call)):
                try:
                    connection = await self._dial(call.target)
                except (OSError, TimeoutError) as error:
                    if failure := self._failure_of(call, error, until_s):
                        call.over().on_error(failure)
                        return
                    await asyncio.sleep(min(pause_s, until_s - self._loop.time()))
                    pause_s = min(2 * pause_s, LAST_PAUSE_S)
                else:
                    connection.begin(call)
                    return
        finally:
            self.held.pop(call, None)

    def _failure_of(
        self, call: HttpCall, error: OSError, until_s: float
    ) -> EngineUnavailable | None:
        """Return the error of a failed dial; None if the call is held to dial again."""
        shortage = shortage_of(error)
        if not shortage:
            return EngineUnavailable(f"{call.target.origin}: cannot connect: {one_line(error)}")
        now_s = self._loop.time()
        if now_s >= self._shortage_logged_s + SHORTAGE_LOG_S:
            self._shortage_logged_s = now_s
            log.error("connections.short", why=shortage, num_connections=self.num_connections)
        for idle in self._idle.values():
            while idle:  # another origin's may be the only ones
                idle.pop().hang_up()
        if now_s >= until_s:
            return LocalShortage(shortage)
        self.held[call] = shortage
        return None

    async def _dial(self, target: Target) -> HttpConnection:
        """Open a connection; OSError or TimeoutError if that fails."""
        if target.is_tls and self._tls is None:
            require_one()  # without a descriptor the context would lack its authorities
            self._tls = ssl.create_default_context()
        connection = HttpConnection(self, target.origin)
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                await asyncio.get_running_loop().create_connection(
                    lambda: connection,
                    target.host,
                    target.port,
                    ssl=self._tls if target.is_tls else None,
                )
        except BaseException:
            # The connection may have just been made, and uvloop closes it without a callback.
            self.lost(connection)
            raise
        if connection.transport:
            notice_death(connection.transport.get_extra_info("socket"))
        return connection


class _Collector:
    """Collects a response for `fetch`."""

    def __init__(self) -> None:
        self.response: asyncio.Future[Response] = asyncio.get_running_loop().create_future()
        self._status = 0
        self._headers: Headers = []
        self._pieces: list[bytes] = []

    def on_head(self, status: int, headers: Headers) -> None:
        self._status, self._headers = status, headers

    def on_data(self, data: bytes) -> None:
        self._pieces.append(data)

    def on_end(self) -> None:
        if not self.response.done():
            body = b"".join(self._pieces)
            self.response.set_result(Response(self._status, self._headers, body))

    def on_error(self, error: EngineUnavailable) -> None:
        if not self.response.done():
            self.response.set_exception(error)


def _is_open(connection: HttpConnection) -> bool:
    return connection.transport is not None and not connection.transport.is_closing()
