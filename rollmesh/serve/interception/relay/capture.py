"""The relay's open sessions and the doors that lead to them.

Invariant: nothing of a closed session is left here. Driven by book.py, which opens and closes, and
by edge.py, which finds.
"""

from rollmesh.core.clock import Clock
from rollmesh.core.config import InterceptionConfig
from rollmesh.core.errors import SessionError
from rollmesh.core.ids import new_id
from rollmesh.runtime.session_deps import Locks, SessionKeys
from rollmesh.serve.interception.capture import (
    CapturedSession,
    CaptureOptions,
    JournaledSession,
    OpenedSession,
)
from rollmesh.serve.interception.journal.gateway_journal import GatewayJournal
from rollmesh.serve.interception.relay.deeds import RelayPast, decode
from rollmesh.serve.interception.relay.scribe import RelayScribe
from rollmesh.serve.interception.relay.session import RelaySession, RelayTotals
from rollmesh.serve.interception.relay.upstreams import Upstreams


class RelayCapture:
    """Satisfies Capture."""

    def __init__(
        self,
        upstreams: Upstreams,
        clock: Clock,
        config: InterceptionConfig,
        archive: GatewayJournal | None = None,
    ) -> None:
        self._archive = archive
        self._upstreams = upstreams
        self._clock = clock
        self._config = config
        self._doors: SessionKeys[RelaySession] = SessionKeys()
        self._locks: dict[str, Locks] = {}
        """By session id."""
        self.totals = RelayTotals()

    def open(self, wish: CaptureOptions) -> OpenedSession:
        """SessionError 400 where rules are wished for: a relay changes no request."""
        if wish.sampling is not None:
            why = "sampling: a relay forwards requests as they are; rules need --capture tokens"
            raise SessionError(400, "unsupported_sampling", why)
        session_id = new_id("s", 6)
        scribe = RelayScribe(self._archive, session_id) if self._archive else None
        session = self.stand(session_id, scribe, None)
        doors = self._doors.make(session)
        self._locks[session_id] = doors.locks
        return OpenedSession(session, doors.api_key, doors.path_secret)

    def regain(self, standing: JournaledSession) -> "RelayRegaining":
        assert self._archive is not None
        scribe = RelayScribe(self._archive, standing.session_id)
        past = RelayPast(standing.read, self._config.max_body_bytes)
        return RelayRegaining(self, standing, scribe, past)

    def stand(
        self, session_id: str, scribe: RelayScribe | None, past: RelayPast | None
    ) -> RelaySession:
        """A session, with what it did in another process; its doors are another matter."""
        return RelaySession(
            session_id, self._upstreams, self._clock, self._config, self.totals, scribe, past
        )

    def reopen(self, session: RelaySession, locks: Locks) -> None:
        """The doors that led to it lead to it again."""
        self._doors.reopen(locks, session)
        self._locks[session.session_id] = locks

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


class RelayRegaining:
    """Satisfies Regaining."""

    def __init__(
        self,
        capture: RelayCapture,
        standing: JournaledSession,
        scribe: RelayScribe,
        past: RelayPast,
    ) -> None:
        self._capture = capture
        self._standing = standing
        self._scribe = scribe
        self._past = past

    def take(self, deeds: bytes) -> None:
        for deed in decode(deeds):
            self._past.take(deed)

    def end(self) -> RelaySession:
        self._scribe.namer.num_spots = self._past.num_spots
        session = self._capture.stand(self._standing.session_id, self._scribe, self._past)
        self._capture.reopen(session, self._standing.locks)
        return session

    def finished(self, num_calls: int) -> RelaySession:
        session = self._capture.stand(self._standing.session_id, self._scribe, None)
        self._capture.reopen(session, self._standing.locks)
        session.num_calls = num_calls
        session.seal("it was finished")
        return session
