"""The keys that open sessions, and the dependencies that all sessions of a process share.

Agents find a session by one of two random 256-bit secrets: an API key, or a path for clients that
cannot set one. A secret is returned once, and only its SHA-256 is stored.
"""

import hashlib
import secrets
import sys
from collections.abc import Callable
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import msgspec

from rollmesh.core.clock import Clock
from rollmesh.core.errors import SessionError
from rollmesh.core.ids import RolloutId
from rollmesh.core.redaction import register_lookup
from rollmesh.core.types import SamplingPolicy
from rollmesh.runtime.chat import Rotating
from rollmesh.runtime.conversation.shared_prefixes import SharedPrefixes
from rollmesh.runtime.generation.events import GenerationRequest
from rollmesh.runtime.replies import LiveGeneration
from rollmesh.runtime.session_log import EventWriter
from rollmesh.runtime.tokens.prompts import Prompts

SECRET_BYTES = 32

S = TypeVar("S")

KeyDigests = tuple[bytes, bytes]
"""The digests of a session's secrets."""


class NewSessionKeys(NamedTuple):
    """The secrets of a session, returned once, and the digests that close them."""

    api_key: str
    path_secret: str
    locks: KeyDigests


class SessionKeys(Generic[S]):
    """The keys of all sessions of a process."""

    def __init__(self) -> None:
        self._sessions: dict[bytes, S | None] = {}
        """By the digest of either secret; None if the session is over."""
        register_lookup(self.is_secret)

    def __len__(self) -> int:
        """Number of known secrets."""
        return len(self._sessions)

    def is_secret(self, text: str) -> bool:
        """Whether the word is a secret of a session here, open or over."""
        return _digest(text) in self._sessions

    def make(self, session: S) -> NewSessionKeys:
        """Two new secrets for `session`."""
        api_key = "sk-" + secrets.token_urlsafe(SECRET_BYTES)
        path_secret = secrets.token_urlsafe(SECRET_BYTES)
        locks = locks_of(api_key, path_secret)
        for lock in locks:
            self._sessions[lock] = session
        return NewSessionKeys(api_key, path_secret, locks)

    def reopen(self, locks: KeyDigests, session: S) -> None:
        """Accept the secrets of these digests again, as in another process."""
        for lock in locks:
            self._sessions[lock] = session

    def find(self, secret: str) -> S:
        """The session of a secret; SessionError 401 if there is none, 410 if it is over."""
        lock = _digest(secret)
        session = self._sessions.get(lock)
        if session is None:
            if lock in self._sessions:
                raise SessionError(410, "session_sealed", "this key's session is over")
            raise SessionError(401, "invalid_api_key", "Incorrect API key: no session here has it.")
        return session

    def retire(self, locks: KeyDigests) -> None:
        """Answer both secrets with 410 until they are closed."""
        for lock in locks:
            self._sessions[lock] = None

    def close(self, locks: KeyDigests) -> None:
        """Forget both secrets."""
        for lock in locks:
            del self._sessions[lock]


def locks_of(api_key: str, path_secret: str) -> KeyDigests:
    """The digests of these secrets."""
    return _digest(api_key), _digest(path_secret)


def _digest(secret: str) -> bytes:
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).digest()


class AnySampler(Protocol):
    """Starts generations; implemented by sampler.Sampler."""

    def start(self, request: GenerationRequest) -> LiveGeneration: ...
    def waiting(self) -> dict[str, Any] | None:
        """Number of calls that wait for an engine, for how long and why; None if none waits."""


class RuntimeCounters(msgspec.Struct):
    """Counters, incremented on the hot path and read by a metrics collector."""

    num_calls: int = 0
    """Generations started."""
    num_tokens: int = 0
    """Tokens sampled."""


class SessionDeps(msgspec.Struct, frozen=True):
    """Dependencies of all sessions of a process."""

    sampler: AnySampler
    prompts: Prompts
    clock: Clock
    max_context_tokens: int
    totals: RuntimeCounters
    shared_prefixes: SharedPrefixes
    rotating: Rotating = None
    on_sealed: list[Callable[[RolloutId], None]] = []
    """Called with the rollout of each session that is sealed."""
    max_session_bytes: int = sys.maxsize
    max_turns_at_once: int = sys.maxsize

    def check_fits(self, num_choices: int) -> None:
        """SessionError 400 if one call requests more choices than a session may sample at once."""
        limit = self.max_turns_at_once
        if num_choices > limit:
            why = f"the call asks for {num_choices} answers (prompts x n), at most {limit} are"
            why = f"{why} sampled at once for one session (interception.max_turns_at_once)"
            raise SessionError(400, "too_many_choices", why)

    def over_limit(self, held_bytes: int) -> str:
        """The error text for a session that holds more bytes than it may."""
        limit = self.max_session_bytes
        return f"the session holds {held_bytes} bytes, interception.max_session_bytes = {limit}"


class SessionOptions(msgspec.Struct, frozen=True):
    """Options of a session."""

    session_id: str
    rollout_id: RolloutId
    sampling: SamplingPolicy
    seed: int
    event_writer: EventWriter | None = None
    """Writes the session's events; None if it does not outlive the process."""
    min_policy_version: int = -1
    """The oldest weights that may answer its first call; -1: any."""
