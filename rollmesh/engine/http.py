"""HTTP/1.1 to engines and providers: pooled connections, answers by callbacks, no task per call.

    call:  CONNECTING --connected--> SENT --head, data...--> ended | failed | closed by its caller
           CONNECTING --no descriptor, port or memory left here--> CONNECTING, after a while

- `send` never calls the receiver at once.
- A request on a connection that the server has just closed is sent once more, if no byte of an
  answer has come.
- Idle connections are closed before the server closes them.
- A dial that fails for a shortage of this process or machine is repeated for `shortage_wait_s`,
  then ends in LocalShortage, so that no caller takes it for a failure of the engine. A connection
  of the same origin that becomes idle meanwhile carries the call.
- There is no time limit on an answer: the caller closes the call.
"""

import asyncio
import functools
import re
import socket
import ssl
import sys
import types
from collections.abc import Iterable, Sequence
from typing import Self
from urllib.parse import urlsplit

import msgspec

from rollmesh.core.descriptors import require_one, shortage_of
from rollmesh.core.errors import AddressError, EngineUnavailable, LocalShortage
from rollmesh.core.logs import get_logger
from rollmesh.engine.connection import Call, Connection, Receiver, Target, one_line
from rollmesh.engine.parser import Headers
from rollmesh.engine.pieces import Piece

IDLE_S = 4.0
"""Idle connections are closed after this; SGLang's server closes its own after 5 s."""
CONNECT_TIMEOUT_S = 5.0
SHORTAGE_WAIT_S = 30.0
"""Dials that fail for a shortage of this process or machine are repeated for this long."""
FIRST_PAUSE_S = 0.05
LAST_PAUSE_S = 1.0
"""Pauses between such dials; each is twice as long as the one before, up to the last."""
SHORTAGE_LOG_S = 30.0
"""A shortage that lasts is logged this often."""
KEEPALIVE_S = 15
"""A peer that is silent for so long is asked whether it is there, where silence is minded."""
_CLOSED = "this process hung up"
_TARGET = re.compile(r"[\x21-\x7e]+")
_HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_HEADER_VALUE = re.compile(r"[\x20-\x7e\x80-\xff\t]*")

log = get_logger()


class Response(msgspec.Struct, frozen=True):
    """A whole answer."""

    status: int
    headers: Headers
    body: bytes


def target(method: str, url: str, headers: Iterable[tuple[str, str]] = ()) -> Target:
    """The target of `method` requests to `url`, sent with these headers beside Host and length.

    AddressError if `url` is no http(s) URL; ValueError if a header could break out of its line.
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
            raise ValueError(f"header {name!r} holds what no header may")
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
        minds_silence: bool = False,
        shortage_wait_s: float = SHORTAGE_WAIT_S,
    ) -> None:
        """`tls` is for https; by default the system's authorities are trusted. With
        `minds_silence` a peer that vanishes without closing its connection is an error within a
        minute or so; callers need it that wait for an answer without a limit."""
        self._tls = tls
        self._minds_silence = minds_silence
        self._shortage_wait_s = shortage_wait_s
        self._shortage_logged_s = float("-inf")
        self.held: dict[Call, str] = {}
        """Calls that wait until a connection can be opened here, and why it cannot."""
        self._idle: dict[str, list[Connection]] = {}
        self._connections: set[Connection] = set()
        self._opening: dict[asyncio.Task[None], Call] = {}
        self._sweeper: asyncio.TimerHandle | None = None
        self._emptied: asyncio.Future[None] | None = None

    @functools.cached_property
    def _loop(self) -> asyncio.AbstractEventLoop:
        """The loop that this is used from; on CPython 3.11 each asking costs a system call."""
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

    def send(self, target: Target, body: Sequence[Piece], receiver: Receiver) -> Call:
        """Begin a call; no body means a request without one. Never tells anything at once."""
        call = Call(target, body, receiver)
        if not self._begin_on_idle(call):
            self.connect(call)
        return call

    def _begin_on_idle(self, call: Call) -> bool:
        """Carry `call` by an idle connection, if there is one."""
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
        """A whole answer, whatever its status; EngineUnavailable also when time is over, and
        LocalShortage if it is over before a connection could be opened here."""
        whole = _Whole()
        call = self.send(target, body, whole)
        try:
            async with asyncio.timeout(timeout_s):
                return await whole.response
        except TimeoutError:
            if call in self.held:
                raise LocalShortage(self.held[call]) from None
            told = f"{target.origin}: no answer within {timeout_s:g} s"
            raise EngineUnavailable(told) from None
        finally:
            call.close()

    async def close(self) -> None:
        """End every call with an error and every connection."""
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
        """Open ones, idle or busy."""
        return len(self._connections)

    # what connections say

    def connect(self, call: Call) -> None:
        """Carry `call` by a new connection."""
        loop = asyncio.get_running_loop()
        if self._emptied:
            gone = EngineUnavailable(f"{call.target.origin}: {_CLOSED}")
            loop.call_soon(call.over().on_error, gone)
            return
        opening = loop.create_task(self._open(call), name="http.connect")
        self._opening[opening] = call
        opening.add_done_callback(lambda done: self._opening.pop(done))
        call.attach(opening=opening)

    def opened(self, connection: Connection) -> None:
        """It is there."""
        self._connections.add(connection)

    def rest(self, connection: Connection) -> None:
        """It is free for another call."""
        connection.idle_since_s = self._loop.time()
        self._idle.setdefault(connection.origin, []).append(connection)
        if self._sweeper is None:
            self._sweeper = self._loop.call_later(IDLE_S, self._sweep)

    def lost(self, connection: Connection) -> None:
        """It is gone; the sweep takes it out of the idle ones."""
        self._connections.discard(connection)
        if self._emptied and not self._connections and not self._emptied.done():
            self._emptied.set_result(None)

    def _sweep(self) -> None:
        oldest_s = self._loop.time() - IDLE_S
        for origin, idle in list(self._idle.items()):
            kept = [each for each in idle if each.idle_since_s > oldest_s and _is_open(each)]
            for connection in set(idle).difference(kept):
                connection.hang_up()
            self._idle[origin] = kept
            if not kept:
                del self._idle[origin]
        self._sweeper = None
        if self._idle:
            self._sweeper = self._loop.call_later(IDLE_S, self._sweep)

    async def _open(self, call: Call) -> None:
        """Begin `call` on a new connection; while none can be opened here, on an idle one."""
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

    def _failure_of(self, call: Call, error: OSError, until_s: float) -> EngineUnavailable | None:
        """The error that ends a call that was not dialed; None if it is held to be dialed again."""
        shortage = shortage_of(error)
        if not shortage:
            return EngineUnavailable(f"{call.target.origin}: cannot connect: {one_line(error)}")
        now_s = self._loop.time()
        if now_s >= self._shortage_logged_s + SHORTAGE_LOG_S:
            self._shortage_logged_s = now_s
            log.error("connections.short", why=shortage, num_connections=self.num_connections)
        for idle in self._idle.values():
            while idle:  # another origin's may be all that there is
                idle.pop().hang_up()
        if now_s >= until_s:
            return LocalShortage(shortage)
        self.held[call] = shortage
        return None

    async def _dial(self, target: Target) -> Connection:
        """A new connection; OSError or TimeoutError."""
        if target.is_tls and self._tls is None:
            require_one()  # without a descriptor the context would come without authorities
            self._tls = ssl.create_default_context()
        connection = Connection(self, target.origin)
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                await asyncio.get_running_loop().create_connection(
                    lambda: connection,
                    target.host,
                    target.port,
                    ssl=self._tls if target.is_tls else None,
                )
        except BaseException:
            # If cancelled, it may have been made just now, and uvloop closes it without a callback.
            self.lost(connection)
            raise
        if self._minds_silence and connection.transport:
            _mind_silence(connection.transport.get_extra_info("socket"))
        return connection


class _Whole:
    """Gathers an answer for `fetch`."""

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


def _mind_silence(carrier: socket.socket) -> None:
    carrier.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if sys.platform == "linux":
        carrier.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_S)
        carrier.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_S)
        carrier.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)


def _is_open(connection: Connection) -> bool:
    return connection.transport is not None and not connection.transport.is_closing()
