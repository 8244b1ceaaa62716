"""Where relayed calls go: the endpoints, and the tries of a call.

Invariants: a session stays with its endpoint while that one answers (prefix cache); others take
over what it has not begun to answer; a call runs at one endpoint at a time. Driven by session.py.
"""

from collections.abc import Iterable, Sequence

import msgspec

from rollmesh.core.clock import Clock
from rollmesh.core.errors import EngineUnavailable, RequestLost
from rollmesh.engine.connection import Call, Target
from rollmesh.engine.http import HttpClient, target
from rollmesh.engine.pieces import Piece
from rollmesh.serve.interception.relay.call import RelayCall

COOL_DOWN_S = 2.0
"""An endpoint that failed is avoided for this long where there is another."""


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

    def begin(self, call: RelayCall, parcel: Parcel, upstream: Upstream) -> Call:
        """One try of it."""
        upstream.num_running += 1
        return self._client.send(upstream.target_of(parcel), parcel.body, call)

    def fail(self, upstream: Upstream, error: EngineUnavailable) -> None:
        """A call to it failed."""
        upstream.failed_s, upstream.fault = self._clock.now_s(), str(error)


class _Carrier:
    """The tries of one call.

    What was asked is kept until an answer begins, for the next try, and no longer.
    """

    __slots__ = ("_call", "_parcel", "_sent", "_tried", "_upstreams")

    def __init__(
        self, upstreams: Upstreams, call: RelayCall, parcel: Parcel, upstream: Upstream
    ) -> None:
        self._upstreams = upstreams
        self._call = call
        self._parcel: Parcel | None = parcel
        self._tried = [upstream]
        self._sent: Call | None = upstreams.begin(call, parcel, upstream)

    def fail(self, error: EngineUnavailable, retries: bool) -> bool:
        self._drop()
        if isinstance(error, RequestLost):
            return False
        self._upstreams.fail(self._tried[-1], error)
        upstream = self._upstreams.choose(None, self._tried) if retries else None
        if upstream is None or self._parcel is None:
            return False
        self._tried.append(upstream)
        self._sent = self._upstreams.begin(self._call, self._parcel, upstream)
        return True

    def settle(self) -> None:
        self._parcel = None
        if self._sent is not None:
            self._sent.body = ()

    def close(self) -> None:
        self._parcel = None
        if self._sent is not None:
            self._drop()

    def _drop(self) -> None:
        assert self._sent is not None
        self._tried[-1].num_running -= 1
        self._sent.close()
        self._sent = None
