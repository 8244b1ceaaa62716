"""The endpoints that relayed calls go to, and the attempts of one call.

- A session stays with its endpoint while that one answers (prefix cache); others take over what it
  has not begun to answer. A call runs at one endpoint at a time.
- A redirect is followed with the same method and body, at most MAX_REDIRECTS times, on the same
  scheme, host and port or from http to https on the same host. Any other redirect is a failure of
  the endpoint: the provider's key and the prompt go to no host that the gateway was not given.
"""

from collections.abc import Iterable, Sequence
from urllib.parse import urljoin

import msgspec

from rollmesh.core.clock import Clock
from rollmesh.core.errors import AddressError, EngineUnavailable, LocalShortage, RequestLost
from rollmesh.engine.connection import Call, Target
from rollmesh.engine.http import HttpClient, target
from rollmesh.engine.parser import Headers
from rollmesh.engine.pieces import Piece
from rollmesh.serve.interception.relay.call import RelayCall

COOL_DOWN_S = 2.0
"""An endpoint that failed is avoided for this long where there is another."""
MAX_REDIRECTS = 3
"""Redirects that one attempt follows."""


class Parcel(msgspec.Struct, eq=False):
    """A request as it is forwarded, whoever gets it."""

    method: bytes
    path: bytes
    """Behind `/v1`, with the query."""
    headers: bytes
    """Lines, each with its end."""
    body: Sequence[Piece] = ()
    """Set once it is read."""


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
        return _with(self._target, parcel, self._path + parcel.path, self._host_line)


class Upstreams:
    """All endpoints; each is as good as another."""

    def __init__(self, urls: Iterable[str], key: str, client: HttpClient, clock: Clock) -> None:
        """`key` is the provider's, '' where it wants none."""
        self.all = [Upstream(url) for url in urls]
        self.key = key.encode()
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

    def has_other(self, tried: Sequence[Upstream]) -> bool:
        """Whether an endpoint is left that is not among `tried`."""
        return any(each not in tried for each in self.all)

    def begin(self, call: RelayCall, parcel: Parcel, upstream: Upstream, target: Target) -> Call:
        """Send a call to one endpoint, at this address of it."""
        upstream.num_running += 1
        return self._client.send(target, parcel.body, call)

    def fail(self, upstream: Upstream, error: EngineUnavailable) -> None:
        """A call to it failed."""
        upstream.failed_s, upstream.fault = self._clock.now_s(), str(error)


class _Carrier:
    """The attempts of one call.

    The request is kept until an answer begins, for the next attempt, and no longer.
    """

    __slots__ = ("_call", "_num_redirects", "_parcel", "_sent", "_tried", "_upstreams")

    def __init__(
        self, upstreams: Upstreams, call: RelayCall, parcel: Parcel, upstream: Upstream
    ) -> None:
        self._upstreams = upstreams
        self._call = call
        self._parcel: Parcel | None = parcel
        self._tried: list[Upstream] = []
        self._num_redirects = 0
        self._sent: Call | None = None
        self._try(upstream, parcel)

    @property
    def url(self) -> str:
        return self._tried[-1].url

    @property
    def has_other(self) -> bool:
        return self._upstreams.has_other(self._tried)

    def redirect(self, status: int, headers: Headers) -> str:
        assert self._sent is not None
        assert self._parcel is not None
        found = (value.decode("latin-1") for name, value in headers if name.lower() == b"location")
        place = next(found, "")
        self._num_redirects += 1
        if self._num_redirects > MAX_REDIRECTS:
            return f"it redirects more than {MAX_REDIRECTS} times"
        if not place:
            return f"it redirects ({status}) without a Location"
        if status == 303 and self._parcel.method != b"GET":
            return f"it redirects ({status}) to a GET, which answers no call: {place}"
        target = redirected(self._sent.target, self._parcel, place)
        if target is None:
            why = "to another origin, which must not get the provider's key"
            remedy = "start the gateway with the final address as --engine"
            return f"it redirects ({status}) {why}; {remedy}: {place}"
        self._drop()
        upstream = self._tried[-1]
        self._sent = self._upstreams.begin(self._call, self._parcel, upstream, target)
        return ""

    def fail(self, error: EngineUnavailable, retries: bool) -> bool:
        self._drop()
        if isinstance(error, RequestLost | LocalShortage):  # another upstream would get no more
            return False
        self._upstreams.fail(self._tried[-1], error)
        upstream = self._upstreams.choose(None, self._tried) if retries else None
        if upstream is None or self._parcel is None:
            return False
        self._try(upstream, self._parcel)
        return True

    def settle(self) -> None:
        self._parcel = None
        if self._sent is not None:
            self._sent.body = ()

    def close(self) -> None:
        self._parcel = None
        if self._sent is not None:
            self._drop()

    def _try(self, upstream: Upstream, parcel: Parcel) -> None:
        self._tried.append(upstream)
        self._num_redirects = 0
        target = upstream.target_of(parcel)
        self._sent = self._upstreams.begin(self._call, parcel, upstream, target)

    def _drop(self) -> None:
        assert self._sent is not None
        self._tried[-1].num_running -= 1
        self._sent.close()
        self._sent = None


def redirected(sent: Target, parcel: Parcel, place: str) -> Target | None:
    """Where a redirect leads from `sent`; None where it may not be followed."""
    path = sent.prelude.split(b" ", 2)[1].decode("latin-1")
    try:
        found = target("GET", urljoin(sent.origin + path, place).partition("#")[0])
    except (AddressError, ValueError):
        return None
    is_upgrade = found.host == sent.host and found.is_tls and not sent.is_tls
    if found.origin != sent.origin and not is_upgrade:
        return None
    first_line, _, host_line = found.prelude.partition(b"\r\n")
    return _with(found, parcel, first_line.split(b" ")[1], host_line)


def _with(at: Target, parcel: Parcel, path: bytes, host_line: bytes) -> Target:
    """The target of a parcel at an origin."""
    prelude = b"%b %b HTTP/1.1\r\n%b%b" % (parcel.method, path, host_line, parcel.headers)
    return Target(at.origin, at.host, at.port, at.is_tls, False, prelude)
