"""The upstream endpoints of relayed calls, and the attempts of one call.

- A session stays with its endpoint while that one answers (prefix cache); another one takes over
  calls that it has not begun to answer. A call runs at one endpoint at a time.
- A redirect is followed with the same method and body, at most MAX_REDIRECTS times, on the same
  scheme, host and port, or from http to https on the same host. Any other redirect is a failure of
  the endpoint: the provider's key and the prompt are sent only to configured hosts.
"""

from collections.abc import Iterable, Sequence
from urllib.parse import urljoin

import msgspec

from rollmesh.core.clock import Clock
from rollmesh.core.errors import AddressError, EngineUnavailable, LocalShortage, RequestLost
from rollmesh.engine.connection import Headers, HttpCall, Piece, Target
from rollmesh.engine.http import HttpClient, target
from rollmesh.serve.interception.relay.call import RelayCall

MAX_REDIRECTS = 3
"""Redirects that one attempt follows."""


class ForwardedRequest(msgspec.Struct, eq=False):
    """A request as it is forwarded, to whichever endpoint."""

    method: bytes
    path: bytes
    """The path after `/v1`, with the query."""
    headers: bytes
    """Header lines, each with CRLF."""
    body: Sequence[Piece] = ()
    """Set once it has been read."""


class UpstreamEndpoint:
    """One endpoint and its state."""

    def __init__(self, url: str) -> None:
        """AddressError if `url` is not a valid address."""
        self.url = url
        base = url.rstrip("/")
        base = base if base.endswith("/v1") else f"{base}/v1"
        self._target = target("GET", base)
        first_line, _, self._host_line = self._target.prelude.partition(b"\r\n")
        self._path = first_line.split(b" ")[1]
        self.num_running = 0
        self.failed_s = float("-inf")
        self.fault = ""
        """The error of its last failure."""

    def target_of(self, forwarded: ForwardedRequest) -> Target:
        """The HTTP target of a request at this endpoint."""
        return _with(self._target, forwarded, self._path + forwarded.path, self._host_line)


class UpstreamPool:
    """All endpoints, which are interchangeable."""

    def __init__(
        self,
        urls: Iterable[str],
        key: str,
        client: HttpClient,
        clock: Clock,
        cool_down_s: float,
    ) -> None:
        """`key` is the provider's, '' if it needs none. If there are others, a failed endpoint is
        avoided for `cool_down_s`."""
        self.all = [UpstreamEndpoint(url) for url in urls]
        self.key = key.encode()
        self._client = client
        self._clock = clock
        self._cool_down_s = cool_down_s

    def choose(
        self, home: UpstreamEndpoint | None, avoid: Sequence[UpstreamEndpoint] = ()
    ) -> UpstreamEndpoint | None:
        """`home` while it is healthy, else the least loaded one; None if all are in `avoid`."""
        last_s = self._clock.now_s() - self._cool_down_s
        if home is not None and home.failed_s < last_s and not avoid:
            return home
        allowed = [each for each in self.all if each not in avoid]
        fit = [each for each in allowed if each.failed_s < last_s] or allowed
        return home if home in fit else min(fit, key=lambda each: each.num_running, default=None)

    def send(
        self, call: RelayCall, forwarded: ForwardedRequest, home: UpstreamEndpoint | None
    ) -> UpstreamEndpoint:
        """Start `call`; return its endpoint."""
        upstream = self.choose(home)
        assert upstream is not None, "a gateway has engines"
        call.send_on(_Attempts(self, call, forwarded, upstream))
        return upstream

    def has_other(self, tried: Sequence[UpstreamEndpoint]) -> bool:
        """Whether an endpoint is not in `tried`."""
        return any(each not in tried for each in self.all)

    def begin(
        self,
        call: RelayCall,
        forwarded: ForwardedRequest,
        upstream: UpstreamEndpoint,
        target: Target,
    ) -> HttpCall:
        """Send a call to one endpoint, at this target."""
        upstream.num_running += 1
        return self._client.send(target, forwarded.body, call)

    def fail(self, upstream: UpstreamEndpoint, error: EngineUnavailable) -> None:
        """Record a failed call."""
        upstream.failed_s, upstream.fault = self._clock.now_s(), str(error)


class _Attempts:
    """The attempts of one call; the request is kept for them until an answer begins."""

    __slots__ = ("_call", "_forwarded", "_num_redirects", "_sent", "_tried", "_upstreams")

    def __init__(
        self,
        upstreams: UpstreamPool,
        call: RelayCall,
        forwarded: ForwardedRequest,
        upstream: UpstreamEndpoint,
    ) -> None:
        self._upstreams = upstreams
        self._call = call
        self._forwarded: ForwardedRequest | None = forwarded
        self._tried: list[UpstreamEndpoint] = []
        self._num_redirects = 0
        self._sent: HttpCall | None = None
        self._try(upstream, forwarded)

    @property
    def url(self) -> str:
        return self._tried[-1].url

    @property
    def has_other(self) -> bool:
        return self._upstreams.has_other(self._tried)

    def redirect(self, status: int, headers: Headers) -> str:
        assert self._sent is not None
        assert self._forwarded is not None
        found = (value.decode("latin-1") for name, value in headers if name.lower() == b"location")
        place = next(found, "")
        self._num_redirects += 1
        if self._num_redirects > MAX_REDIRECTS:
            return f"it redirects more than {MAX_REDIRECTS} times"
        if not place:
            return f"it redirects ({status}) without a Location"
        if status == 303 and self._forwarded.method != b"GET":
            return f"it redirects ({status}) to a GET, which answers no call: {place}"
        target = redirected(self._sent.target, self._forwarded, place)
        if target is None:
            why = "to another origin, which must not get the provider's key"
            remedy = "start the gateway with the final address as --engine"
            return f"it redirects ({status}) {why}; {remedy}: {place}"
        self._drop()
        upstream = self._tried[-1]
        self._sent = self._upstreams.begin(self._call, self._forwarded, upstream, target)
        return ""

    def fail(self, error: EngineUnavailable, retries: bool) -> bool:
        self._drop()
        if isinstance(error, RequestLost | LocalShortage):  # another upstream would get no more
            return False
        self._upstreams.fail(self._tried[-1], error)
        upstream = self._upstreams.choose(None, self._tried) if retries else None
        if upstream is None or self._forwarded is None:
            return False
        self._try(upstream, self._forwarded)
        return True

    def settle(self) -> None:
        self._forwarded = None
        if self._sent is not None:
            self._sent.body = ()

    def close(self) -> None:
        self._forwarded = None
        if self._sent is not None:
            self._drop()

    def _try(self, upstream: UpstreamEndpoint, forwarded: ForwardedRequest) -> None:
        self._tried.append(upstream)
        self._num_redirects = 0
        target = upstream.target_of(forwarded)
        self._sent = self._upstreams.begin(self._call, forwarded, upstream, target)

    def _drop(self) -> None:
        assert self._sent is not None
        self._tried[-1].num_running -= 1
        self._sent.close()
        self._sent = None


def redirected(sent: Target, forwarded: ForwardedRequest, place: str) -> Target | None:
    """The target of a redirect from `sent`; None if it must not be followed."""
    path = sent.prelude.split(b" ", 2)[1].decode("latin-1")
    try:
        found = target("GET", urljoin(sent.origin + path, place).partition("#")[0])
    except (AddressError, ValueError):
        return None
    is_upgrade = found.host == sent.host and found.is_tls and not sent.is_tls
    if found.origin != sent.origin and not is_upgrade:
        return None
    first_line, _, host_line = found.prelude.partition(b"\r\n")
    return _with(found, forwarded, first_line.split(b" ")[1], host_line)


def _with(at: Target, forwarded: ForwardedRequest, path: bytes, host_line: bytes) -> Target:
    """The target of a request at the origin of `at`."""
    prelude = b"%b %b HTTP/1.1\r\n%b%b" % (forwarded.method, path, host_line, forwarded.headers)
    return Target(at.origin, at.host, at.port, at.is_tls, False, prelude)
