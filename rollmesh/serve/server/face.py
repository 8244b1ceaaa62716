"""GET /metrics of a worker's edge.

The request must carry the admin token of the environment. Where there is none, an edge on loopback
answers requests whose Host is a loopback name.
"""

import socket
from collections.abc import Iterator

from rollmesh.core.errors import SessionError
from rollmesh.core.handed import handed
from rollmesh.core.loopback import is_loopback, names_loopback
from rollmesh.core.metrics import CONTENT_TYPE, Exposition, Figure
from rollmesh.core.secret_file import ADMIN_TOKEN_VARIABLE, admin_token
from rollmesh.runtime.registry import Runtime
from rollmesh.serve.interception.auth import bears
from rollmesh.serve.interception.ending import refuse
from rollmesh.serve.interception.gauges import LoopLag
from rollmesh.serve.interception.request import Request

ROUTE = "/metrics"


class Face:
    """See the module; `handle` is the edge's door."""

    def __init__(self, exposition: Exposition, listening: socket.socket) -> None:
        host = listening.getsockname()[0]
        self._exposition = exposition
        self._token = (handed(ADMIN_TOKEN_VARIABLE) or admin_token()).encode()
        self._is_open = not self._token and is_loopback(host)

    async def handle(self, request: Request, path: str) -> bool:
        """Answer a request that is ours; False for any other."""
        if path != ROUTE or request.method != "GET":
            return False
        host = request.headers.get(b"host", b"").decode("latin-1")
        is_open = self._is_open and names_loopback([host])
        if is_open or bears(self._token, request.headers):
            lines = request.dated(CONTENT_TYPE.encode())
            request.answer(200, lines, self._exposition.render())
        else:
            why = f"send the token of {ADMIN_TOKEN_VARIABLE} as `Authorization: Bearer TOKEN`"
            error = SessionError(401, "invalid_admin_token", why)
            refuse(request, why.encode() + b"\n", error)
        return True


def worker_figures(runtime: Runtime, lag: LoopLag) -> Iterator[Figure]:
    """A source for the exposition, but for its arguments."""
    yield Figure("calls_total", runtime.num_calls, "Calls that asked for sampling.")
    yield Figure("sampled_tokens_total", runtime.num_tokens, "Sampled tokens.")
    yield Figure("loop_lag_seconds", lag.take(), "Worst lag of the event loop since last asked.")
