"""Where relayed calls go: which endpoint, under which name, with which key.

Invariants: a session stays with its endpoint while that one answers (prefix cache), others take
over what it has not begun to answer; our own secrets never leave: an agent's key is replaced by the
provider's or dropped, and a header that quotes its path is dropped. Driven by session.py.
"""

from collections.abc import Iterable, Sequence

import msgspec

from rollmesh.core.clock import Clock
from rollmesh.core.errors import EngineUnavailable
from rollmesh.engine.connection import Call, Target
from rollmesh.engine.http import HttpClient, target
from rollmesh.serve.interception.relay.call import RelayCall

COOL_DOWN_S = 2.0
"""An endpoint that failed is avoided for this long where there is another."""

_HOP_BY_HOP = {
    b"connection",
    b"keep-alive",
    b"proxy-authenticate",
    b"proxy-authorization",
    b"proxy-connection",
    b"te",
    b"trailer",
    b"transfer-encoding",
    b"upgrade",
}
_NOT_FORWARDED = _HOP_BY_HOP | {
    b"host",
    b"content-length",
    b"expect",
    b"cookie",
    b"authorization",
    b"x-api-key",
    b"accept-encoding",  # the answer is read here too
}
_NOT_RETURNED = _HOP_BY_HOP | {b"content-length", b"set-cookie"}


class Parcel(msgspec.Struct, frozen=True, eq=False):
    """A request as it is forwarded, whoever gets it."""

    method: bytes
    path: bytes
    """Behind `/v1`, with the query."""
    headers: bytes
    """Lines, each with its end."""
    body: bytes


class Upstream:
    """One endpoint."""

    def __init__(self, url: str) -> None:
        """AddressError if `url` is none."""
        self.url = url
        base = url.rstrip("/")
        base = base if base.endswith("/v1") else f"{base}/v1"
        self._target = target("GET", base)
        first_line, _, self._host_line = self._target.prelude.partition(b"\r\n")
        self._path = first_line.split(b" ")[1]
        self.num_running = 0
        self.failed_s = float("-inf")
        self.fault = ""
        """How it failed last."""

    def target_of(self, parcel: Parcel) -> Target:
        """Where to send it."""
        mine = self._target
        prelude = b"%b %b%b HTTP/1.1\r\n%b%b" % (
            parcel.method,
            self._path,
            parcel.path,
            self._host_line,
            parcel.headers,
        )
        return Target(mine.origin, mine.host, mine.port, mine.is_tls, False, prelude)


class Upstreams:
    """All endpoints; each is as good as another."""

    def __init__(self, urls: Iterable[str], key: str, client: HttpClient, clock: Clock) -> None:
        """`key` is the provider's, '' where it wants none."""
        self.all = [Upstream(url) for url in urls]
        self._key = key.encode()
        self._client = client
        self._clock = clock

    def choose(self, home: Upstream | None, avoid: Sequence[Upstream] = ()) -> Upstream | None:
        """`home` while it is well, else the least loaded; None if all are to be avoided."""
        last_s = self._clock.now_s() - COOL_DOWN_S
        if home is not None and home.failed_s < last_s and not avoid:
            return home
        fit = [each for each in self.all if each not in avoid]
        well = [each for each in fit if each.failed_s < last_s] or fit
        return home if home in well else min(well, key=lambda each: each.num_running, default=None)

    def send(self, call: RelayCall, parcel: Parcel, home: Upstream | None) -> Upstream:
        """Begin `call`; where it went."""
        upstream = self.choose(home)
        assert upstream is not None, "a gateway has engines"
        call.carry(_Carrier(self, call, parcel, upstream))
        return upstream

    def begin(self, call: RelayCall, parcel: Parcel, upstream: Upstream) -> Call:
        """One try of it."""
        upstream.num_running += 1
        return self._client.send(upstream.target_of(parcel), [parcel.body], call)

    def fail(self, upstream: Upstream, error: EngineUnavailable) -> None:
        """A call to it failed."""
        upstream.failed_s, upstream.fault = self._clock.now_s(), str(error)

    def headers(
        self, sent: Iterable[tuple[bytes, bytes]], secret: str, prefers_x_api_key: bool
    ) -> bytes:
        """The lines to forward of what an agent sent; it showed us `secret`."""
        shown = secret.encode("utf-8", "surrogateescape")
        lines: list[bytes] = []
        for name, value in sent:
            lower = name.lower()
            if lower == b"x-api-key":
                prefers_x_api_key = True
            elif lower == b"authorization":
                prefers_x_api_key = False
            if lower not in _NOT_FORWARDED and shown not in value:
                lines.append(b"%b: %b\r\n" % (name, value))
        if self._key:
            line = b"x-api-key: %b\r\n" if prefers_x_api_key else b"Authorization: Bearer %b\r\n"
            lines.append(line % self._key)
        return b"".join(lines)


class _Carrier:
    """The tries of one call."""

    __slots__ = ("_call", "_parcel", "_sent", "_tried", "_upstreams")

    def __init__(
        self, upstreams: Upstreams, call: RelayCall, parcel: Parcel, upstream: Upstream
    ) -> None:
        self._upstreams = upstreams
        self._call = call
        self._parcel = parcel
        self._tried = [upstream]
        self._sent: Call | None = upstreams.begin(call, parcel, upstream)

    def fail(self, error: EngineUnavailable, retries: bool) -> bool:
        self._drop()
        self._upstreams.fail(self._tried[-1], error)
        upstream = self._upstreams.choose(None, self._tried) if retries else None
        if upstream is None:
            return False
        self._tried.append(upstream)
        self._sent = self._upstreams.begin(self._call, self._parcel, upstream)
        return True

    def close(self) -> None:
        if self._sent is not None:
            self._drop()

    def _drop(self) -> None:
        assert self._sent is not None
        self._tried[-1].num_running -= 1
        self._sent.close()
        self._sent = None


def returned_headers(headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """The lines to give back of what an upstream sent; the length is ours to say."""
    return b"".join([b"%b: %b\r\n" % (n, v) for n, v in headers if n.lower() not in _NOT_RETURNED])
