"""One HTTP request of an agent, and its answer.

    nothing --answer--> answered        nothing --open--> opened --send...--> --close--> answered

- An answer is one write; a stream has one write per event, and is chunked, or for HTTP/1.0 ends
  with the connection. Await `drain` before writing more.
- A body over the limit is refused by its announced length, or once it exceeds the limit. A body
  that arrives too slowly is refused (body_limits.SendDeadline).
- A compressed body is decompressed in steps, between which the event loop runs, and refused if it
  grows to more than MAX_INFLATION times its size.
"""

import asyncio
import contextlib
import email.utils
import functools
import hmac
import http
import io
import zlib
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import NamedTuple, Protocol

from rollmesh.core.errors import SessionError
from rollmesh.engine.connection import Headers, Piece, Ready, parts, size_of
from rollmesh.serve.interception.body_limits import (
    COUNTED_BYTES,
    STEP_BYTES,
    BodyBudget,
    BodyReservation,
    SendDeadline,
)

JSON = b"application/json"
MAX_INFLATION = 100
"""Maximum growth of a compressed body, as in Envoy (max_inflate_ratio)."""
ANY_INFLATION_BYTES = 1024 * 1024
"""Up to this size any growth is allowed."""
DRAIN_CHECK_S = 1.0
"""How often a writer checks whether to go on while the client does not read."""
WRITE_BYTES = 64 * 1024
"""Short pieces of an answer are joined up to this size."""
_INPUT_BYTES = 64 * 1024
"""zlib gets input of this size, because it copies what it leaves."""
_LAST_CHUNK = b"0\r\n\r\n"
_WINDOWS = {b"gzip": zlib.MAX_WBITS | 16, b"x-gzip": zlib.MAX_WBITS | 16, b"deflate": 15}
_REASONS = {status.value: status.phrase.encode() for status in http.HTTPStatus}
_CONNECTION_LINES = {
    (True, True): b"",
    (True, False): b"Connection: keep-alive\r\n",
    (False, True): b"Connection: close\r\n",
    (False, False): b"Connection: close\r\n",
}
"""By (keep-alive, keep-alive is the protocol's default)."""


class RequestTransport(Protocol):
    """The connection, as used by its requests."""

    bodies: BodyBudget
    """Memory budget of bodies."""
    is_write_paused: bool
    """The client does not read what was written."""

    def write(self, data: bytes) -> None:
        """Write bytes; ConnectionResetError if the client disconnected."""

    def more_data(self) -> "asyncio.Future[None]":
        """Resume reading; the future is done when more of the body has arrived, or none will."""

    async def drain(self, timeout_s: float) -> None:
        """Wait until writing is possible, for at most `timeout_s`."""

    def unix_s(self) -> float:
        """Return the time of day."""


class BodySink(Protocol):
    """Receives a body as it arrives."""

    def append(self, piece: bytes, /) -> None:
        """Add bytes."""


class _BodyBuffer(io.BytesIO):
    """A body in one growing buffer, so that it is never held twice."""

    def append(self, piece: bytes) -> None:
        self.write(piece)


class HttpRequest:
    """A request; the connection fills it, a handler reads and answers it."""

    __slots__ = (
        "_body", "_is_chunked", "_is_opened", "_lines", "_reservation", "_sink", "_transport",
        "headers", "is_answered", "is_broken", "is_whole", "keep_alive", "method", "num_bytes",
        "num_sends", "owner", "path", "raw_headers",
    )  # fmt: skip

    def __init__(
        self, transport: RequestTransport, method: str, path: str, raw_headers: Headers
    ) -> None:
        self.method = method
        self.path = path
        """Path and query, unchanged."""
        self.raw_headers = raw_headers
        self.headers = {name.lower(): value for name, value in reversed(raw_headers)}
        """By lower-case name; of repeated headers the first."""
        self.is_whole = False
        """The last byte of the body has arrived."""
        self.is_broken = False
        """The body ended early."""
        self.is_answered = False
        """The last byte of the answer was written."""
        self.num_bytes = 0
        """Bytes of the body that have arrived."""
        self.num_sends = 0
        """Writes of the stream."""
        self.owner: Hashable = None
        """Session or admin whose budget the body uses; set once the key is known."""
        self.keep_alive = False
        """Whether the connection is kept alive after the answer."""
        self._is_chunked = False
        self._is_opened = False
        self._body: list[bytes] = []
        self._sink: BodySink = self._body
        self._lines = b""
        self._reservation: BodyReservation | None = None
        """Budget of the body, once it is read."""
        self._transport = transport

    # called by the connection

    def set_protocol(self, protocol: str, keep_alive: bool) -> None:
        """Set how to answer: the protocol version, and whether to keep the connection."""
        self._is_chunked, self.keep_alive = protocol == "1.1", keep_alive

    def add(self, data: bytes) -> None:
        """Add bytes of the body."""
        self._sink.append(data)
        self.num_bytes += len(data)

    # the body

    async def read(self, max_bytes: int, silence_s: float) -> bytes:
        """Read the body, once; SessionError 413 if it is too long, 408 if it stops arriving, 400 if
        it ends early."""
        if self.is_whole:
            if self.num_bytes > max_bytes:
                raise _too_large(max_bytes)
            body = self._body[0] if len(self._body) == 1 else b"".join(self._body)
            self._body.clear()
        else:
            growing = _BodyBuffer()
            await self._read_on(growing, max_bytes, silence_s)
            body = growing.getvalue()
        if self._is_encoded:
            return await self._decompressed(body, max_bytes)
        if self._reservation is None:
            self._count_whole()
        return body

    async def read_into(self, sink: BodySink, max_bytes: int, silence_s: float) -> None:
        """Read the body, once, in pieces as they arrive; errors as for `read`."""
        if self._is_encoded:
            sink.append(await self.read(max_bytes, silence_s))
        elif self.is_whole:
            self._check_length(max_bytes)
            self._count_whole()
            self._hand_over(sink)
            self._sink = self._body  # drop the reference to the sink's data
        else:
            await self._read_on(sink, max_bytes, silence_s)

    def release_body(self) -> None:
        """Return the body's budget when the body is no longer in memory; answering does it too."""
        if self._reservation is not None:
            self._reservation.release()
            self._reservation = None

    async def _read_on(self, sink: BodySink, max_bytes: int, silence_s: float) -> None:
        """Read an incomplete body."""
        length = self._check_length(max_bytes)
        final_bytes = max_bytes + length if self._is_encoded else length or max_bytes
        self._reservation = self._transport.bodies.begin(self.owner, final_bytes)
        # Nothing more is read until the budget covers what has arrived.
        await self._reservation.reach(self.num_bytes)
        if self._is_chunked and self.headers.get(b"expect", b"").lower() == b"100-continue":
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        self._hand_over(sink)
        try:
            await self._gather(max_bytes, silence_s)
        finally:
            self._sink = self._body
        self._check_length(max_bytes)
        if not self._is_encoded:
            self._held().settle(self.num_bytes)

    async def _decompressed(self, body: bytes, max_bytes: int) -> bytes:
        """Decompress the body in steps, each with budget."""
        inflater = _Inflater(self.headers[b"content-encoding"], len(body), max_bytes)
        if self._reservation is None:
            self._reservation = self._transport.bodies.begin(self.owner, max_bytes + len(body))
        reservation = self._reservation
        with memoryview(body) as whole:
            for start in range(0, len(whole), _INPUT_BYTES):
                rest = bytes(whole[start : start + _INPUT_BYTES])
                while rest:
                    await reservation.reach(len(body) + inflater.num_bytes + STEP_BYTES)
                    rest = inflater.take(rest)
                    await asyncio.sleep(0)
        plain = inflater.end()
        reservation.settle(len(plain))
        return plain

    @property
    def _is_encoded(self) -> bool:
        return b"content-encoding" in self.headers

    async def _gather(self, max_bytes: int, silence_s: float) -> None:
        now_s = asyncio.get_running_loop().time
        bodies, reservation = self._transport.bodies, self._held()
        deadline = SendDeadline(now_s(), self.num_bytes, silence_s)
        while not self.is_whole and self.num_bytes <= max_bytes:
            if self.is_broken:
                why = "the body ended early or is malformed"
                raise SessionError(400, "invalid_body", why)
            if self.num_bytes > reservation.num_bytes:
                waits_s = now_s()
                await reservation.reach(self.num_bytes)
                deadline.pause(now_s() - waits_s)
                continue
            is_contended = bodies.is_contended(reservation)
            check_s, is_late = deadline.check(now_s(), self.num_bytes, is_contended)
            if is_late:
                raise SessionError(408, "body_timeout", "the body stopped arriving")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(check_s):
                    await self._transport.more_data()

    def _check_length(self, max_bytes: int) -> int:
        """Return the announced length, 0 if none; SessionError 413 if the body is too long."""
        # Python limits the digits of an integer; llhttp accepts leading zeros.
        length = int(self.headers.get(b"content-length", b"").lstrip(b"0") or b"0")
        if max(length, self.num_bytes) > max_bytes:
            raise _too_large(max_bytes)
        return length

    def _count_whole(self) -> None:
        if self.num_bytes >= COUNTED_BYTES:
            self._reservation = self._transport.bodies.hold(self.num_bytes, self.owner)

    def _hand_over(self, sink: BodySink) -> None:
        for piece in self._body:
            sink.append(piece)
        self._body.clear()
        self._sink = sink

    def _held(self) -> BodyReservation:
        assert self._reservation is not None
        return self._reservation

    # the answer

    @property
    def is_opened(self) -> bool:
        """Whether the first byte of the answer was written."""
        return self._is_opened

    @property
    def is_write_paused(self) -> bool:
        """Whether the client does not read what was written: await `drain`."""
        return self._transport.is_write_paused

    def header_lines(self, kind: bytes) -> bytes:
        """Return Content-Type and Date header lines."""
        return _dated(kind, int(self._transport.unix_s()))

    def answer(self, status: int, lines: bytes, body: bytes) -> None:
        """Write the complete answer; ConnectionResetError if the client disconnected."""
        head = self._sized(status, lines, len(body))
        self.is_answered = True
        self._transport.write(head if self.method == "HEAD" else head + body)

    async def answer_in_parts(self, status: int, lines: bytes, body: Sequence[Piece]) -> None:
        """Write the complete answer in parts, reading each only when the client has taken the
        last."""
        pending: list[Ready] = [self._sized(status, lines, sum(map(size_of, body)))]
        num_pending = 0
        for part in parts(body):
            pending.append(part)
            num_pending += len(part)
            if num_pending >= WRITE_BYTES:
                self._transport.write(b"".join(pending))
                pending, num_pending = [], 0
                await self.drain(_no_check)
        self.is_answered = True
        self._transport.write(b"".join(pending))

    def open(self, status: int, lines: bytes) -> None:
        """Start a stream; its head is written with the first data."""
        # Without chunks only the end of the connection ends a stream.
        self.keep_alive = self.keep_alive and self.is_whole and self._is_chunked
        self._lines = b"HTTP/1.1 %d %b\r\n%b%b%b\r\n" % (
            status,
            _REASONS.get(status, b""),
            lines,
            b"Transfer-Encoding: chunked\r\n" if self._is_chunked else b"",
            _CONNECTION_LINES[self.keep_alive, self._is_chunked],
        )

    def send(self, data: bytes) -> None:
        """Write more of a stream; without data, only its head."""
        self.num_sends += 1
        self._transport.write(self._chunk(data) if data else self._head())

    def close(self, data: bytes = b"") -> None:
        """Write the end of a stream."""
        self.is_answered = True
        framed = self._chunk(data) if data else self._head()
        self._transport.write(framed + _LAST_CHUNK if self._is_chunked else framed)

    async def drain(self, check: Callable[[], None]) -> None:
        """Wait until the client reads; an exception of `check`, which runs meanwhile, ends the
        wait."""
        while self._transport.is_write_paused:
            check()
            await self._transport.drain(DRAIN_CHECK_S)

    def _sized(self, status: int, lines: bytes, num_bytes: int) -> bytes:
        """Build the head of an answer of known length."""
        self._is_opened = True
        self.keep_alive = self.keep_alive and self.is_whole
        return b"HTTP/1.1 %d %b\r\n%bContent-Length: %d\r\n%b\r\n" % (
            status,
            _REASONS.get(status, b""),
            lines,
            num_bytes,
            _CONNECTION_LINES[self.keep_alive, self._is_chunked],
        )

    def _chunk(self, data: bytes) -> bytes:
        framed = b"%x\r\n%b\r\n" % (len(data), data) if self._is_chunked else data
        return framed if self._is_opened else self._head() + framed

    def _head(self) -> bytes:
        head, self._lines, self._is_opened = self._lines, b"", True
        return head


def _no_check() -> None:
    """Check nothing: only a lost client ends the wait."""


@functools.lru_cache(maxsize=8)
def _dated(kind: bytes, unix_s: int) -> bytes:
    date = email.utils.formatdate(unix_s, usegmt=True).encode()
    return b"Content-Type: %b\r\nDate: %b\r\n" % (kind, date)


class _Inflater:
    """Decompresses one body, at most STEP_BYTES at a time; raises SessionError."""

    def __init__(self, coding: bytes, encoded_bytes: int, max_bytes: int) -> None:
        self._coding = coding.strip().lower()
        self._plain = _BodyBuffer()
        self._max_bytes = max_bytes
        self._max_inflated_bytes = max(ANY_INFLATION_BYTES, MAX_INFLATION * encoded_bytes)
        if self._coding == b"identity":
            self._inflater = None
        elif self._coding in _WINDOWS:
            self._inflater = zlib.decompressobj(_WINDOWS[self._coding])
        else:
            why = "unsupported Content-Encoding; send gzip, deflate or none"
            raise SessionError(415, "unsupported_encoding", why)

    @property
    def num_bytes(self) -> int:
        """Decompressed bytes so far."""
        return self._plain.tell()

    def take(self, encoded: bytes) -> bytes:
        """Decompress one step; return the remaining input, b"" at the end."""
        if self._inflater is None:
            self._plain.append(encoded)
            return b""
        try:
            self._plain.append(self._inflater.decompress(encoded, STEP_BYTES))
        except zlib.error:
            why = "the body does not match its Content-Encoding"
            raise SessionError(400, "invalid_body", why) from None
        if self.num_bytes > self._max_bytes:
            raise _too_large(self._max_bytes)
        if self.num_bytes > self._max_inflated_bytes:
            why = f"the body grows to more than {MAX_INFLATION} times its size when decompressed"
            raise SessionError(413, "body_too_large", f"{why}; send it uncompressed")
        return self._inflater.unconsumed_tail

    def end(self) -> bytes:
        """Return the complete body."""
        if self._inflater is not None and not self._inflater.eof:
            raise SessionError(400, "invalid_body", "the compressed body ended early")
        return self._plain.getvalue()


def _too_large(max_bytes: int) -> SessionError:
    return SessionError(413, "body_too_large", f"the body is longer than {max_bytes} bytes")


def find_secret(path: str, headers: Mapping[bytes, bytes]) -> str:
    """Return a request's session secret, '' if it has none; headers by lower-case name.

    Sources in order: the path (`/s/<secret>/v1/...`, for clients that cannot set a key),
    `Authorization: Bearer`, `x-api-key`.
    """
    before, mark, rest = path.partition("/s/")
    if mark and "/v1" not in before:
        return rest.partition("/")[0]
    scheme, _, token = headers.get(b"authorization", b"").partition(b" ")
    if scheme.lower() != b"bearer" or not token:
        token = headers.get(b"x-api-key", b"")
    return token.strip().decode("utf-8", "surrogateescape")


def has_bearer(token: bytes, headers: Mapping[bytes, bytes]) -> bool:
    """Whether a request has this Bearer token, compared in constant time; an empty token never
    matches."""
    scheme, _, bearer = headers.get(b"authorization", b"").partition(b" ")
    is_known = hmac.compare_digest(bearer.strip(), token)
    return is_known and bool(token) and scheme.lower() == b"bearer"


class RetryMark(NamedTuple):
    """Whether a client marked a request as a retry."""

    key: bytes
    """The Idempotency-Key, b"" if there is none."""
    is_resent: bool
    """If the same body was answered before, return that answer."""


def read_retry_mark(headers: Mapping[bytes, bytes]) -> RetryMark:
    """Read the mark from headers by lower-case name.

    Sources: `Idempotency-Key`, which retries share, and the retry count of the SDKs of OpenAI and
    Anthropic (`x-stainless-retry-count`; github.com/stainless-api). Empty headers and a count of 0
    are ignored.
    """
    key = headers.get(b"idempotency-key", b"")
    count = headers.get(b"x-stainless-retry-count", b"0")
    if not key and count == b"0":
        return _NONE
    return RetryMark(key, bool(key) or count not in (b"", b"0"))


_NONE = RetryMark(b"", is_resent=False)
