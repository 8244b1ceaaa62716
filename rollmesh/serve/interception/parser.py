"""The requests that came on one connection, in their order, and why it can be read no further.

- The parser is llhttp (httptools), which refuses two lengths, garbled chunks, folded lines and bare
  line ends. A request of HTTP/1.1 has one Host header, which is checked here.
- Nothing is read behind a fault.
- A body ends where its own head says, also if the client asks for another protocol, which is
  declined by not answering to it.
"""

import re
from collections import deque

import httptools
import msgspec
from httptools.parser.protocol import HTTPProtocol

from rollmesh.engine.connection import MAX_MUTE_BYTES
from rollmesh.engine.parser import Headers
from rollmesh.serve.interception.request import Request, Wire

MAX_AHEAD = 32
"""Requests that may wait behind the one that is handled."""


class Fault(msgspec.Struct, frozen=True):
    """Why a connection can be read no further."""

    status: int
    why: str


class RequestParser(HTTPProtocol):
    """See the module."""

    # What is None llhttp does not call.
    on_status = on_chunk_header = on_chunk_complete = None  # type: ignore[assignment]

    def __init__(self, wire: Wire) -> None:
        self.requests: deque[Request] = deque()
        """That nobody handles yet; the last one's body may not be whole."""
        self.incoming: Request | None = None
        """Whose body is not whole."""
        self.fault: Fault | None = None
        self.is_in_head = False
        """A request has begun, and its head is not whole."""
        self._wire = wire
        self._llhttp = httptools.HttpRequestParser(self)
        self._url = b""
        self._headers: Headers = []
        self._num_mute_bytes = 0
        """Since the last byte of a body or the last request's end."""

    def feed(self, data: bytes) -> None:
        """What one read brought."""
        self._num_mute_bytes += len(data)
        while data and self.fault is None:
            try:
                self._llhttp.feed_data(data)
                break
            except httptools.HttpParserUpgrade as upgrade:
                data = self._declined(data[upgrade.args[0] :])
            except httptools.HttpParserError as error:
                self.fail(400, f"this is no HTTP: {error}")
        if self._num_mute_bytes > MAX_MUTE_BYTES:
            self.fail(431, "headers or chunk extensions are too long")

    def fail(self, status: int, why: str) -> None:
        """Read no further."""
        if self.fault is None:
            self.fault = Fault(status, why)
        if self.incoming:
            self.incoming.is_broken, self.incoming = True, None

    def close(self) -> None:
        """Nothing more comes. Else this, llhttp and the wire would hold each other, and all that
        was read, until the garbage collector comes."""
        self.requests.clear()
        self.incoming = None
        del self._llhttp, self._wire

    def _declined(self, rest: bytes) -> bytes:
        """The head again without its wish for another protocol, which would hide its body."""
        method = self._llhttp.get_method()
        if method == b"CONNECT":
            self.fail(405, "this is no proxy")
            return b""
        protocol = self._llhttp.get_http_version().encode()
        lines = [b"%b %b HTTP/%b" % (method, self._url, protocol)]
        lines += [b"%b: %b" % line for line in self._headers if line[0].lower() != b"upgrade"]
        self._llhttp = httptools.HttpRequestParser(self)
        return b"\r\n".join([*lines, b"", rest])

    # llhttp's callbacks

    def on_message_begin(self) -> None:
        self.is_in_head = True
        self._url = b""
        self._headers = []

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        # What comes behind the body is of no use to us.
        if self.incoming is None:
            self._headers.append((name, value))

    def on_headers_complete(self) -> None:
        llhttp = self._llhttp
        protocol = llhttp.get_http_version()
        if llhttp.should_upgrade() or self.fault:
            return
        self.is_in_head = False
        if protocol not in ("1.1", "1.0"):
            self.fail(400, "only HTTP/1.0 and 1.1 are spoken here")
        elif len(self.requests) > MAX_AHEAD:
            self.fail(400, f"more than {MAX_AHEAD} requests wait for their answers")
        else:
            url = self._url if self._url.startswith(b"/") else _path_of(self._url)
            path = url.decode("utf-8", "surrogateescape")
            request = Request(self._wire, llhttp.get_method().decode(), path, self._headers)
            request.speak(protocol, llhttp.should_keep_alive())
            num_hosts = int(b"host" in request.headers)
            if len(request.headers) < len(self._headers):  # some name came twice
                num_hosts = sum([name.lower() == b"host" for name, _ in self._headers])
            if num_hosts > 1 or (num_hosts == 0 and protocol == "1.1"):
                self.fail(400, f"expected one Host header, found {num_hosts} (RFC 9112, 3.2)")
                return
            if request.headers.get(b"transfer-encoding", b"chunked").lower() != b"chunked":
                self.fail(501, "of transfer codings only chunked is known here")
                return
            self.incoming = request
            self.requests.append(request)

    def on_body(self, body: bytes) -> None:
        self._num_mute_bytes = 0
        if self.incoming:
            self.incoming.add(body)

    def on_message_complete(self) -> None:
        self._num_mute_bytes = 0
        if self.incoming:
            self.incoming.is_whole = True
            self.incoming = None


def _path_of(target: bytes) -> bytes:
    """A request's target without the scheme and the host that stand before it for a proxy."""
    _, mark, rest = target.partition(b"://")
    if not mark:
        return target
    host = re.match(rb"[^/?#]*", rest)
    assert host
    path = rest[host.end() :]
    return path if path.startswith(b"/") else b"/" + path
