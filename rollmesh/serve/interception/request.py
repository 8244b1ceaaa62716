"""One HTTP request of an agent, and its answer's way back onto the connection.

    nothing --answer--> answered        nothing --open--> opened --send...--> --close--> answered

- An answer is one write; a stream has one write per event. A stream is chunked, or ends with its
  connection where the client speaks HTTP/1.0.
- A body over the limit is refused by the length in its head, or once the limit is passed, never
  after it was read whole.
- A body that stops coming, or comes too slowly, is refused (bodies.Pace).
- A compressed body is decompressed in steps, with a turn of the event loop between two steps, and
  refused once it grows to more than MAX_INFLATION times its size.

A writer awaits `drain` before it writes more.

Where a request carries its session's secret, and whether it carries the admin's token.

A secret has three places, tried in this order: the path (`/s/<secret>/v1/...`, for clients that
cannot set a key), `Authorization: Bearer`, `x-api-key`; the token is a Bearer and nothing else.
Invariants: a secret goes to the caller alone, and nothing here logs; the token is compared in
constant time. Driven by exchange.py, the relay's edge, and who answers admins.

How a client says that a request may be one that it has sent before.

Two ways: an `Idempotency-Key`, which its resends share, and the count that the SDKs of OpenAI and
Anthropic keep (`x-stainless-retry-count`; github.com/stainless-api). Invariant: a header that is
there but empty, or a count of 0, says nothing. Driven by exchange.py and the relay.
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
from rollmesh.engine.parser import Headers
from rollmesh.engine.pieces import Piece, Ready, parts, size_of
from rollmesh.serve.interception.body_limits import (
    COUNTED_BYTES,
    STEP_BYTES,
    BodyBudget,
    BodyReservation,
    SendDeadline,
)

JSON = b"application/json"
MAX_INFLATION = 100
"""A body may grow by this factor when it is decompressed, as in Envoy (max_inflate_ratio)."""
ANY_INFLATION_BYTES = 1024 * 1024
"""Up to this size a decompressed body may have grown by any factor."""
LOOK_S = 1.0
"""How often a writer whose client takes nothing looks whether it has still something to say."""
WRITE_BYTES = 64 * 1024
"""Of an answer in pieces, small ones are gathered up to here."""
_INPUT_BYTES = 64 * 1024
"""A compressed body is handed to zlib in pieces of this size, since zlib copies what it leaves."""
_LAST_CHUNK = b"0\r\n\r\n"
_WINDOWS = {b"gzip": zlib.MAX_WBITS | 16, b"x-gzip": zlib.MAX_WBITS | 16, b"deflate": 15}
_REASONS = {status.value: status.phrase.encode() for status in http.HTTPStatus}
_CONNECTION_LINES = {
    (True, True): b"",
    (True, False): b"Connection: keep-alive\r\n",
    (False, True): b"Connection: close\r\n",
    (False, False): b"Connection: close\r\n",
}
"""By whether the connection is kept, and whether it would be without saying so (HTTP/1.1)."""


class RequestTransport(Protocol):
    """The connection, as its request uses it."""

    bodies: BodyBudget
    """Where bodies get their place in memory."""
    is_clogged: bool
    """The client does not take what was written."""

    def write(self, data: bytes) -> None:
        """ConnectionResetError if the client hung up."""

    def want(self) -> "asyncio.Future[None]":
        """Read on; done when more of the body has come, or will not come."""

    async def drain(self, most_s: float) -> None:
        """Until it is not clogged, or for `most_s`."""

    def unix_s(self) -> float:
        """The time of day."""


class BodySink(Protocol):
    """Takes a body as it comes."""

    def append(self, piece: bytes, /) -> None:
        """More of it."""


class _BodyBuffer(io.BytesIO):
    """A body as one piece: there is never a second copy of what has come."""

    def append(self, piece: bytes) -> None:
        self.write(piece)


class HttpRequest:
    """See the module."""

    __slots__ = (
        "_body", "_is_chunked", "_is_opened", "_lines", "_reservation", "_taker", "_wire",
        "headers", "is_answered", "is_broken", "is_whole", "keeps", "method", "num_bytes",
        "num_sends", "owner", "path", "raw_headers",
    )  # fmt: skip

    def __init__(
        self, wire: RequestTransport, method: str, path: str, raw_headers: Headers
    ) -> None:
        self.method = method
        self.path = path
        """As it was sent, with the query."""
        self.raw_headers = raw_headers
        self.headers = {name.lower(): value for name, value in reversed(raw_headers)}
        """By name in lower case; of several, the first."""
        self.is_whole = False
        """The last byte of the body is here."""
        self.is_broken = False
        """It never will be."""
        self.is_answered = False
        """The last byte of the answer was written."""
        self.num_bytes = 0
        """Of the body that is here."""
        self.num_sends = 0
        """Writes of a stream."""
        self.owner: Hashable = None
        """Set once its key is known: the session, or admin, whose room its body takes."""
        self.keeps = False
        """Its connection goes on behind the answer."""
        self._is_chunked = False
        self._is_opened = False
        self._body: list[bytes] = []
        self._taker: BodySink = self._body
        self._lines = b""
        self._reservation: BodyReservation | None = None
        """The room of its body, once it is read."""
        self._wire = wire

    # what the connection tells

    def speak(self, protocol: str, keeps: bool) -> None:
        """How its client wants to be answered."""
        self._is_chunked, self.keeps = protocol == "1.1", keeps

    def add(self, data: bytes) -> None:
        """More of the body."""
        self._taker.append(data)
        self.num_bytes += len(data)

    # the body

    async def read(self, max_bytes: int, silence_s: float) -> bytes:
        """The body, once; SessionError 413 if it is too long, 408 if it stops coming, 400 if
        it breaks off."""
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
            return await self._inflated(body, max_bytes)
        if self._reservation is None:
            self._count_whole()
        return body

    async def read_into(self, taker: BodySink, max_bytes: int, silence_s: float) -> None:
        """The body, once, piece by piece as it comes; errors as of `read`."""
        if self._is_encoded:
            taker.append(await self.read(max_bytes, silence_s))
        elif self.is_whole:
            self._check_length(max_bytes)
            self._count_whole()
            self._hand_over(taker)
            self._taker = self._body  # else we would hold what is held there, until the answer
        else:
            await self._read_on(taker, max_bytes, silence_s)

    def release_body(self) -> None:
        """Give the body's room back: it is in memory no more. Answering the request does it too."""
        if self._reservation is not None:
            self._reservation.release()
            self._reservation = None

    async def _read_on(self, taker: BodySink, max_bytes: int, silence_s: float) -> None:
        """Read a body that is not whole."""
        length = self._check_length(max_bytes)
        final_bytes = max_bytes + length if self._is_encoded else length or max_bytes
        self._reservation = self._wire.bodies.begin(self.owner, final_bytes)
        # Until there is room for what is here, nothing more is read.
        await self._reservation.reach(self.num_bytes)
        if self._is_chunked and self.headers.get(b"expect", b"").lower() == b"100-continue":
            self._wire.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        self._hand_over(taker)
        try:
            await self._gather(max_bytes, silence_s)
        finally:
            self._taker = self._body
        self._check_length(max_bytes)
        if not self._is_encoded:
            self._held().settle(self.num_bytes)

    async def _inflated(self, body: bytes, max_bytes: int) -> bytes:
        """The decompressed body, for which room is taken step by step."""
        inflater = _Inflater(self.headers[b"content-encoding"], len(body), max_bytes)
        if self._reservation is None:
            self._reservation = self._wire.bodies.begin(self.owner, max_bytes + len(body))
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
        bodies, reservation = self._wire.bodies, self._held()
        pace = SendDeadline(now_s(), self.num_bytes, silence_s)
        while not self.is_whole and self.num_bytes <= max_bytes:
            if self.is_broken:
                why = "the body breaks off or is garbled"
                raise SessionError(400, "invalid_body", why)
            if self.num_bytes > reservation.num_bytes:
                waits_s = now_s()
                await reservation.reach(self.num_bytes)
                pace.pause(now_s() - waits_s)
                continue
            look_s, is_late = pace.look(now_s(), self.num_bytes, bodies.is_sought(reservation))
            if is_late:
                raise SessionError(408, "body_timeout", "the body stopped coming")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(look_s):
                    await self._wire.want()

    def _check_length(self, max_bytes: int) -> int:
        """The announced length, 0 for none; SessionError 413 if it or what has come is too long."""
        # Python counts the digits of an integer and refuses too many; llhttp does not mind zeros.
        length = int(self.headers.get(b"content-length", b"").lstrip(b"0") or b"0")
        if max(length, self.num_bytes) > max_bytes:
            raise _too_large(max_bytes)
        return length

    def _count_whole(self) -> None:
        if self.num_bytes >= COUNTED_BYTES:
            self._reservation = self._wire.bodies.hold(self.num_bytes, self.owner)

    def _hand_over(self, taker: BodySink) -> None:
        for piece in self._body:
            taker.append(piece)
        self._body.clear()
        self._taker = taker

    def _held(self) -> BodyReservation:
        assert self._reservation is not None
        return self._reservation

    # the answer

    @property
    def is_opened(self) -> bool:
        """The first byte of the answer was written."""
        return self._is_opened

    @property
    def is_clogged(self) -> bool:
        """The client does not take what was written: await `drain`."""
        return self._wire.is_clogged

    def dated(self, kind: bytes) -> bytes:
        """The header lines of an answer of our own, of this media type."""
        return _dated(kind, int(self._wire.unix_s()))

    def answer(self, status: int, lines: bytes, body: bytes) -> None:
        """The whole answer; ConnectionResetError if the client hung up."""
        head = self._sized(status, lines, len(body))
        self.is_answered = True
        self._wire.write(head if self.method == "HEAD" else head + body)

    async def answer_piecewise(self, status: int, lines: bytes, body: Sequence[Piece]) -> None:
        """The whole answer, of which no more is read than the client takes."""
        pending: list[Ready] = [self._sized(status, lines, sum(map(size_of, body)))]
        num_pending = 0
        for part in parts(body):
            pending.append(part)
            num_pending += len(part)
            if num_pending >= WRITE_BYTES:
                self._wire.write(b"".join(pending))
                pending, num_pending = [], 0
                await self.drain(_nothing_else)
        self.is_answered = True
        self._wire.write(b"".join(pending))

    def open(self, status: int, lines: bytes) -> None:
        """A stream begins; its head is written with the first of it."""
        # Without chunks only the connection's end can end a stream.
        self.keeps = self.keeps and self.is_whole and self._is_chunked
        self._lines = b"HTTP/1.1 %d %b\r\n%b%b%b\r\n" % (
            status,
            _REASONS.get(status, b""),
            lines,
            b"Transfer-Encoding: chunked\r\n" if self._is_chunked else b"",
            _CONNECTION_LINES[self.keeps, self._is_chunked],
        )

    def send(self, data: bytes) -> None:
        """Send more of a stream; its head alone if there is nothing yet."""
        self.num_sends += 1
        self._wire.write(self._framed(data) if data else self._head())

    def close(self, data: bytes = b"") -> None:
        """The last of a stream."""
        self.is_answered = True
        framed = self._framed(data) if data else self._head()
        self._wire.write(framed + _LAST_CHUNK if self._is_chunked else framed)

    async def drain(self, check: Callable[[], None]) -> None:
        """Until the client takes more; what `check` raises meanwhile ends the wait."""
        while self._wire.is_clogged:
            check()
            await self._wire.drain(LOOK_S)

    def _sized(self, status: int, lines: bytes, num_bytes: int) -> bytes:
        """The head of an answer of that length."""
        self._is_opened = True
        self.keeps = self.keeps and self.is_whole
        return b"HTTP/1.1 %d %b\r\n%bContent-Length: %d\r\n%b\r\n" % (
            status,
            _REASONS.get(status, b""),
            lines,
            num_bytes,
            _CONNECTION_LINES[self.keeps, self._is_chunked],
        )

    def _framed(self, data: bytes) -> bytes:
        framed = b"%x\r\n%b\r\n" % (len(data), data) if self._is_chunked else data
        return framed if self._is_opened else self._head() + framed

    def _head(self) -> bytes:
        head, self._lines, self._is_opened = self._lines, b"", True
        return head


def _nothing_else() -> None:
    """Nothing but a lost client ends the wait."""


@functools.lru_cache(maxsize=8)
def _dated(kind: bytes, unix_s: int) -> bytes:
    date = email.utils.formatdate(unix_s, usegmt=True).encode()
    return b"Content-Type: %b\r\nDate: %b\r\n" % (kind, date)


class _Inflater:
    """Decompresses one body, at most STEP_BYTES at a time; SessionErrors say what is wrong."""

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
            why = "the body's Content-Encoding is not known here; send gzip, deflate or none"
            raise SessionError(415, "unsupported_encoding", why)

    @property
    def num_bytes(self) -> int:
        """Decompressed so far."""
        return self._plain.tell()

    def take(self, encoded: bytes) -> bytes:
        """Decompress one step of it; returns the rest, empty once all of it was taken."""
        if self._inflater is None:
            self._plain.append(encoded)
            return b""
        try:
            self._plain.append(self._inflater.decompress(encoded, STEP_BYTES))
        except zlib.error:
            why = "the body is not encoded as its Content-Encoding says"
            raise SessionError(400, "invalid_body", why) from None
        if self.num_bytes > self._max_bytes:
            raise _too_large(self._max_bytes)
        if self.num_bytes > self._max_inflated_bytes:
            why = f"the body grows to more than {MAX_INFLATION} times its size when decompressed"
            raise SessionError(413, "body_too_large", f"{why}; send it uncompressed")
        return self._inflater.unconsumed_tail

    def end(self) -> bytes:
        """The whole body."""
        if self._inflater is not None and not self._inflater.eof:
            raise SessionError(400, "invalid_body", "the encoded body breaks off")
        return self._plain.getvalue()


def _too_large(max_bytes: int) -> SessionError:
    return SessionError(413, "body_too_large", f"the body is longer than {max_bytes} bytes")


def find_secret(path: str, headers: Mapping[bytes, bytes]) -> str:
    """The secret of a request, or '' if it has none; headers by name in lower case."""
    before, mark, rest = path.partition("/s/")
    if mark and "/v1" not in before:
        return rest.partition("/")[0]
    scheme, _, token = headers.get(b"authorization", b"").partition(b" ")
    if scheme.lower() != b"bearer" or not token:
        token = headers.get(b"x-api-key", b"")
    return token.strip().decode("utf-8", "surrogateescape")


def bears(token: bytes, headers: Mapping[bytes, bytes]) -> bool:
    """Whether a request carries this token; an empty one is carried by none."""
    scheme, _, said = headers.get(b"authorization", b"").partition(b" ")
    is_known = hmac.compare_digest(said.strip(), token)
    return is_known and bool(token) and scheme.lower() == b"bearer"


class RetryMark(NamedTuple):
    """What a request's headers say of it."""

    key: bytes
    """Its Idempotency-Key, b"" if it has none."""
    is_resent: bool
    """The same body, if it was answered before, wants that answer."""


def read_retry_mark(headers: Mapping[bytes, bytes]) -> RetryMark:
    """The mark of a request; headers by name in lower case."""
    key = headers.get(b"idempotency-key", b"")
    count = headers.get(b"x-stainless-retry-count", b"0")
    if not key and count == b"0":
        return _NONE
    return RetryMark(key, bool(key) or count not in (b"", b"0"))


_NONE = RetryMark(b"", is_resent=False)
