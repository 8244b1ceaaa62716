"""What the gateway asks of a way to capture calls; there are two, tokens.py and relay/capture.py.

Invariants: secrets are told once, when a session opens; a session that is sealed gives one account
of itself, which stands for it from then on. Driven by book.py.
"""

from collections.abc import Callable, Mapping
from typing import Protocol

import msgspec

from rollmesh.core.types import Outcome, SamplingPolicy
from rollmesh.runtime.session_deps import Locks
from rollmesh.serve.interception.report import SessionReport

NO_COUNTS: Mapping[str, int] = {}
"""Of the many sessions in which nothing forked."""


class CaptureOptions(msgspec.Struct, frozen=True):
    """What a session is opened with."""

    sampling: SamplingPolicy | None = None
    """None: the capture's own rules."""
    seed: int | None = None
    """None: a random one."""


class CapturedSession(Protocol):
    """One session, as the book sees it."""

    @property
    def session_id(self) -> str: ...
    @property
    def num_calls(self) -> int: ...
    @property
    def is_busy(self) -> bool:
        """Calls are running."""

    @property
    def held_bytes(self) -> int: ...
    def held(self) -> Mapping[str, int]:
        """The same by what; `blobs` are those of other sessions, too."""

    @property
    def fault(self) -> str:
        """Why the newest ended call got no answer; '' if it got one."""

    @property
    def natural_outcome(self) -> Outcome:
        """How its rollout ends if its finisher names no outcome."""

    @property
    def spent_because(self) -> str:
        """Which limit of ours ended it, so that it has no more calls; '' if none did."""

    @property
    def forks(self) -> Mapping[str, int]:
        """Forks by cause."""

    @property
    def healed(self) -> Mapping[str, int]:
        """Differences in histories that did not fork, by kind."""

    def node_of(self, name: int | str) -> int:
        """The sampled node of that number, or of a response's id; LookupError if there is none."""

    def seal(self, reason: str) -> None:
        """No more calls; who still waits is woken. Idempotent."""

    def account(self) -> SessionReport:
        """`samples`, `messages`, `forks`, `healed`, `num_calls` and what else there is to say; of a
        sealed session."""

    def forget(self) -> None:
        """Let go of all but the doors, which tell who still comes that the session is over; of a
        sealed session, once its account was made."""


class OpenedSession(msgspec.Struct, frozen=True):
    """A new session and the two secrets that lead to it."""

    captured: CapturedSession
    api_key: str
    path_secret: str
    sampling: SamplingPolicy | None = None
    """What it was opened with, where the capture samples."""
    seed: int = 0


class JournaledSession(msgspec.Struct, frozen=True):
    """A session that another process has opened, as that wrote it down."""

    session_id: str
    locks: Locks
    sampling: SamplingPolicy | None
    seed: int
    read: Callable[[int], bytes]
    """The long text or image that is kept under a number."""


class SessionRestore(Protocol):
    """A session on its way back: what it did, in order, and then its end."""

    def take(self, deeds: bytes) -> None:
        """It has done this, as its scribe wrote it."""

    def end(self) -> CapturedSession:
        """It goes on."""

    def finished(self, num_calls: int) -> CapturedSession:
        """It was finished: its doors alone are left, which tell who still comes so."""


class Capture(Protocol):
    """A way to capture calls, and the sessions that are open in it."""

    def open(self, wish: CaptureOptions) -> OpenedSession:
        """A new session."""

    def close(self, captured: CapturedSession) -> None:
        """Seal it and forget it. Idempotent."""


class DurableCapture(Capture, Protocol):
    """One whose sessions may outlive their process."""

    def regain(self, standing: JournaledSession) -> SessionRestore:
        """A session of another process; only where there is an archive."""
