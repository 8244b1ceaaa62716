"""The relay's open sessions, found by their secrets.

Invariant: secrets are kept as SHA-256 only, and nothing of a closed session is left here. Driven by
book.py, which opens and closes, and by edge.py, which finds.
"""

import hashlib
import secrets

from rollmesh.core.clock import Clock
from rollmesh.core.errors import SessionError
from rollmesh.core.ids import new_id
from rollmesh.serve.interception.capture import CapturedSession, Opened, SessionWish
from rollmesh.serve.interception.relay.session import RelaySession, RelayTotals
from rollmesh.serve.interception.relay.upstreams import Upstreams

SECRET_BYTES = 32


class RelayCapture:
    """Satisfies Capture."""

    def __init__(self, upstreams: Upstreams, clock: Clock, max_answer_bytes: int) -> None:
        self._upstreams = upstreams
        self._clock = clock
        self._max_answer_bytes = max_answer_bytes
        self._sessions: dict[bytes, RelaySession] = {}
        """By the SHA-256 of either secret."""
        self._digests: dict[str, tuple[bytes, bytes]] = {}
        """By session id."""
        self.totals = RelayTotals()

    def open(self, wish: SessionWish) -> Opened:
        """SessionError 400 where rules are wished for: a relay changes no request."""
        if wish.sampling is not None:
            why = "sampling: a relay forwards requests as they are; rules need --capture tokens"
            raise SessionError(400, "unsupported_sampling", why)
        session = RelaySession(
            new_id("s", 6), self._upstreams, self._clock, self._max_answer_bytes, self.totals
        )
        api_key = "sk-" + secrets.token_urlsafe(SECRET_BYTES)
        path_secret = secrets.token_urlsafe(SECRET_BYTES)
        digests = _digest(api_key), _digest(path_secret)
        self._sessions.update(dict.fromkeys(digests, session))
        self._digests[session.session_id] = digests
        return Opened(session, api_key, path_secret)

    def find(self, secret: str) -> RelaySession:
        """The session of a secret; SessionError 401 if there is none."""
        session = self._sessions.get(_digest(secret))
        if session is None:
            why = "Incorrect API key: no session of this gateway has it."
            raise SessionError(401, "invalid_api_key", why)
        return session

    def close(self, captured: CapturedSession) -> None:
        assert isinstance(captured, RelaySession)
        captured.seal("it was deleted")
        digests = self._digests.pop(captured.session_id, ())
        captured.forget()
        for digest in digests:
            del self._sessions[digest]


def _digest(secret: str) -> bytes:
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).digest()
