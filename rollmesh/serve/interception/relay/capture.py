"""The relay's open sessions and the doors that lead to them.

Invariant: nothing of a closed session is left here. Driven by book.py, which opens and closes, and
by edge.py, which finds.
"""

from rollmesh.core.clock import Clock
from rollmesh.core.config import InterceptionConfig
from rollmesh.core.errors import SessionError
from rollmesh.core.ids import new_id
from rollmesh.runtime.doors import Doors, Locks
from rollmesh.serve.interception.capture import CapturedSession, Opened, SessionWish
from rollmesh.serve.interception.relay.session import RelaySession, RelayTotals
from rollmesh.serve.interception.relay.upstreams import Upstreams


class RelayCapture:
    """Satisfies Capture."""

    def __init__(self, upstreams: Upstreams, clock: Clock, config: InterceptionConfig) -> None:
        self._upstreams = upstreams
        self._clock = clock
        self._config = config
        self._doors: Doors[RelaySession] = Doors()
        self._locks: dict[str, Locks] = {}
        """By session id."""
        self.totals = RelayTotals()

    def open(self, wish: SessionWish) -> Opened:
        """SessionError 400 where rules are wished for: a relay changes no request."""
        if wish.sampling is not None:
            why = "sampling: a relay forwards requests as they are; rules need --capture tokens"
            raise SessionError(400, "unsupported_sampling", why)
        session = RelaySession(
            new_id("s", 6), self._upstreams, self._clock, self._config, self.totals
        )
        doors = self._doors.make(session)
        self._locks[session.session_id] = doors.locks
        return Opened(session, doors.api_key, doors.path_secret)

    def find(self, secret: str) -> RelaySession:
        """The session of a secret; SessionError 401 if there is none."""
        return self._doors.find(secret)

    @property
    def num_doors(self) -> int:
        """Keys that lead somewhere."""
        return len(self._doors)

    def close(self, captured: CapturedSession) -> None:
        assert isinstance(captured, RelaySession)
        captured.seal("it was deleted")
        captured.forget()
        locks = self._locks.pop(captured.session_id, None)
        if locks is not None:
            self._doors.close(locks)
