"""How agents reach their sessions: two random 256-bit secrets each, kept only as SHA-256.

The API key is for clients that can set one, the path secret for those that cannot. Invariants: a
secret is told once, when its doors are made, and stands nowhere else; nothing of a closed session
is left here. Driven by the runtime's registry and by the relay.
"""

import hashlib
import secrets
from typing import Generic, NamedTuple, TypeVar

from rollmesh.core.errors import SessionError
from rollmesh.core.redaction import register_lookup

SECRET_BYTES = 32

S = TypeVar("S")

Locks = tuple[bytes, bytes]
"""The digests of a session's secrets."""


class MadeDoors(NamedTuple):
    """What is told of a session's secrets, once, and what closes its doors."""

    api_key: str
    path_secret: str
    locks: Locks


class Doors(Generic[S]):
    """One table for all sessions of a process."""

    def __init__(self) -> None:
        self._sessions: dict[bytes, S | None] = {}
        """By the digest of either secret; None where its time is over."""
        register_lookup(self.is_secret)

    def __len__(self) -> int:
        """How many secrets are known."""
        return len(self._sessions)

    def is_secret(self, word: str) -> bool:
        """Return whether the word is a secret of a session here, open or over."""
        return _digest(word) in self._sessions

    def make(self, session: S) -> MadeDoors:
        """Two new secrets that lead to `session`."""
        api_key = "sk-" + secrets.token_urlsafe(SECRET_BYTES)
        path_secret = secrets.token_urlsafe(SECRET_BYTES)
        locks = locks_of(api_key, path_secret)
        for lock in locks:
            self._sessions[lock] = session
        return MadeDoors(api_key, path_secret, locks)

    def reopen(self, locks: Locks, session: S) -> None:
        """The secrets of these digests lead to `session`, as they did in another process."""
        for lock in locks:
            self._sessions[lock] = session

    def find(self, secret: str) -> S:
        """The session of a secret; SessionError 401 if there is none, 410 if there was one."""
        lock = _digest(secret)
        session = self._sessions.get(lock)
        if session is None:
            if lock in self._sessions:
                raise SessionError(410, "session_sealed", "this key's session is over")
            raise SessionError(401, "invalid_api_key", "Incorrect API key: no session here has it.")
        return session

    def retire(self, locks: Locks) -> None:
        """Either secret is answered by a 410 from now on, until its doors are closed."""
        for lock in locks:
            self._sessions[lock] = None

    def close(self, locks: Locks) -> None:
        """Neither secret leads anywhere from now on."""
        for lock in locks:
            del self._sessions[lock]


def locks_of(api_key: str, path_secret: str) -> Locks:
    """The digests of these secrets."""
    return _digest(api_key), _digest(path_secret)


def _digest(secret: str) -> bytes:
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).digest()
