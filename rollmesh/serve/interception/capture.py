"""Interfaces of a capture, which records the calls of gateway sessions.

The implementations are token_capture.py (exact tokens) and relay/capture.py (forwarded calls).

- Secrets are returned once, when a session is opened.
- A sealed session produces one report, which replaces it.
"""

from collections.abc import Callable, Mapping
from typing import Protocol

import msgspec

from rollmesh.core.types import Outcome, SamplingPolicy
from rollmesh.runtime.session_deps import KeyDigests
from rollmesh.serve.interception.report import SessionReport

NO_COUNTS: Mapping[str, int] = {}
"""Shared by the many sessions without forks."""


class CaptureOptions(msgspec.Struct, frozen=True):
    """Options of a new session."""

    sampling: SamplingPolicy | None = None
    """None: the capture's default."""
    seed: int | None = None
    """None: a random one."""


class CapturedSession(Protocol):
    """One session of a capture."""

    @property
    def session_id(self) -> str: ...
    @property
    def num_calls(self) -> int: ...
    @property
    def is_busy(self) -> bool:
        """Whether calls are running."""

    @property
    def held_bytes(self) -> int: ...
    def held(self) -> Mapping[str, int]:
        """`held_bytes` by kind; `blobs` may be shared with other sessions."""

    @property
    def fault(self) -> str:
        """Why the last ended call got no answer; '' if it got one."""

    @property
    def natural_outcome(self) -> Outcome:
        """Outcome of the session if `finish` names none."""

    @property
    def spent_because(self) -> str:
        """The limit that ended the session, so that it accepts no more calls; '' if none did."""

    @property
    def forks(self) -> Mapping[str, int]:
        """Number of forks by cause."""

    @property
    def healed(self) -> Mapping[str, int]:
        """Number of repaired differences in histories, which caused no fork, by kind."""

    def node_of(self, name: int | str) -> int:
        """Return the sampled node of a number or a response id; LookupError if there is none."""

    def seal(self, reason: str) -> None:
        """Refuse further calls and wake the waiting ones. Idempotent."""

    def report(self) -> SessionReport:
        """Build the report of a sealed session: `samples`, `messages`, `forks`, `healed`,
        `num_calls` and others."""

    def forget(self) -> None:
        """Release everything but the keys, which identify late callers, who get a 410. The session
        must be sealed and its report built."""


class OpenedSession(msgspec.Struct, frozen=True):
    """A new session and its two secrets."""

    captured: CapturedSession
    api_key: str
    path_secret: str
    sampling: SamplingPolicy | None = None
    """Resolved sampling rules; None if the capture does not sample."""
    seed: int = 0


class JournaledSession(msgspec.Struct, frozen=True):
    """A session of an earlier process, as found in the journal."""

    session_id: str
    locks: KeyDigests
    sampling: SamplingPolicy | None
    seed: int
    read: Callable[[int], bytes]
    """Reads a long text or an image by its number."""


class SessionRestore(Protocol):
    """Replays the journaled events of one session, in order."""

    def take(self, events: bytes) -> None:
        """Apply encoded events."""

    def end(self) -> CapturedSession:
        """Return the restored open session."""

    def finished(self, num_calls: int) -> CapturedSession:
        """Return the restored finished session, which keeps only its keys."""


class Capture(Protocol):
    """Opens and closes the sessions of one kind of capture."""

    def open(self, options: CaptureOptions) -> OpenedSession:
        """Open a new session."""

    def close(self, captured: CapturedSession) -> None:
        """Seal and forget the session. Idempotent."""


class DurableCapture(Capture, Protocol):
    """A capture whose sessions can be restored by a later process."""

    def restore(self, journaled: JournaledSession) -> SessionRestore:
        """Start the restoration of a journaled session; needs a journal."""
