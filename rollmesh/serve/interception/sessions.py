"""Registry of the gateway's sessions, their rewards and their expiry.

    OPEN --finish--> FINISHED --finish, reward--> FINISHED      any --delete, expiry--> gone

- A session is registered from its opening to its deletion, or until it was neither used nor
  requested for `retention_s`.
- The first `finish` decides the outcome; later ones return the same report, so `finish` is
  retryable.
- Of a finished session only the report is held.
- With a journal, effects are journaled before they are returned. A session that could not be
  restored stays on disk for `retention_s` and can be deleted.
"""

import enum
import sys
from collections import Counter, OrderedDict
from collections.abc import Iterable
from typing import Any, NamedTuple

import msgspec

from rollmesh.core.clock import Clock
from rollmesh.core.errors import SessionError
from rollmesh.core.logs import get_logger
from rollmesh.core.types import Outcome, reward_fault
from rollmesh.serve.interception.capture import (
    Capture,
    CapturedSession,
    CaptureOptions,
    OpenedSession,
)
from rollmesh.serve.interception.journal import session_writer
from rollmesh.serve.interception.journal.gateway_journal import GatewayJournal
from rollmesh.serve.interception.pieces import Piece
from rollmesh.serve.interception.report import NO_REWARDS, FinishedSession, SessionRewards

RETRY_AFTER_S = 5.0
"""Retry-After of a refused opening."""

log = get_logger()


class RegistryState(enum.StrEnum):
    """States of the drawing above."""

    OPEN = "open"
    FINISHED = "finished"


class RegisteredSession:
    """One registered session."""

    __slots__ = (
        "captured",
        "created_s",
        "finished",
        "is_report_stored",
        "metadata",
        "node_rewards",
        "num_calls_seen",
        "reward",
        "touched_s",
    )

    def __init__(self, captured: CapturedSession, metadata: bytes, created_s: float) -> None:
        self.captured = captured
        self.metadata = metadata
        """JSON as given by the opener."""
        self.created_s = created_s
        """Unix time."""
        self.touched_s = 0.0
        self.num_calls_seen = 0
        self.finished: FinishedSession | None = None
        self.is_report_stored = False
        """Whether the journal holds the report."""
        self.reward: float | None = None
        self.node_rewards: dict[int, float] = NO_REWARDS

    @property
    def state(self) -> RegistryState:
        return RegistryState.FINISHED if self.finished else RegistryState.OPEN

    @property
    def source(self) -> "FinishedSession | CapturedSession":
        """The object that knows the session's forks and faults."""
        return self.finished or self.captured

    @property
    def held_bytes(self) -> int:
        """Bytes of the session, or of its report outside of blobs."""
        return self.finished.report.num_bytes if self.finished else self.captured.held_bytes

    def describe(self) -> dict[str, Any]:
        """Describe the session as JSON-compatible values, for the admin API."""
        captured, source = self.captured, self.source
        return {
            "session_id": captured.session_id,
            "state": self.state.value,
            "outcome": self.finished.outcome if self.finished else None,
            "metadata": msgspec.Raw(self.metadata),
            "created_s": self.created_s,
            "num_calls": captured.num_calls,
            "is_busy": captured.is_busy,
            "held_bytes": self.held_bytes,
            "reward": self.reward,
            "node_rewards": {str(node): reward for node, reward in self.node_rewards.items()},
            "forks": dict(source.forks),
            "healed": dict(source.healed),
            "fault": source.fault,
            "spent_because": source.spent_because,
        }


class SetAside(NamedTuple):
    """A session that is only on disk, because it could not be restored."""

    why: str
    since_s: float


class SessionRegistry:
    """All sessions of one gateway process."""

    def __init__(
        self,
        capture: Capture,
        clock: Clock,
        retention_s: float,
        max_bytes: int = sys.maxsize,
        journal: GatewayJournal | None = None,
    ) -> None:
        """Create an empty registry. If the process holds more than `max_bytes`, `open` refuses.
        Without a journal, sessions end with the process."""
        self._max_bytes = max_bytes
        self._held_bytes = 0
        """Bytes held by the process, as last reported."""
        self._capture = capture
        self._journal = journal
        self._clock = clock
        self._retention_s = retention_s
        self._entries: OrderedDict[str, RegisteredSession] = OrderedDict()
        """Sessions by id, the least recently used first."""
        self.set_aside_sessions: dict[str, SetAside] = {}
        """Journaled sessions that could not be restored, by id."""
        self.num_opened = 0
        self.num_expired = 0
        self._closed_forks: Counter[str] = Counter()
        self._closed_healed: Counter[str] = Counter()

    def __len__(self) -> int:
        """Number of sessions."""
        return len(self._entries)

    def open(self, options: CaptureOptions, metadata: bytes) -> OpenedSession:
        """Open a session; SessionError 503 if the process holds too many bytes."""
        if self._held_bytes > self._max_bytes and self._entries:
            num_finished = sum([entry.finished is not None for entry in self._entries.values()])
            raise SessionError(
                503,
                "over_budget",
                f"{self._held_bytes} bytes are held, worker.max_held_bytes = {self._max_bytes}; of "
                f"{len(self._entries)} sessions {num_finished} are finished: delete those whose "
                "report you have",
                RETRY_AFTER_S,
            )
        opened = self._capture.open(options)
        entry = RegisteredSession(opened.captured, metadata, self._clock.unix_s())
        if self._journal is not None:
            try:
                self._journal.open(
                    session_writer.opened_entry(opened, entry.metadata, entry.created_s)
                )
            except SessionError:
                self._capture.close(opened.captured)
                raise
        self.add(entry)
        self.num_opened += 1
        return opened

    def add(self, entry: RegisteredSession) -> None:
        """Add a new or restored session."""
        entry.touched_s = self._clock.now_s()
        entry.num_calls_seen = entry.captured.num_calls
        self._entries[entry.captured.session_id] = entry

    def set_aside(self, session_id: str, why: str) -> None:
        """Register a journaled session that could not be restored."""
        self.set_aside_sessions[session_id] = SetAside(why, self._clock.now_s())

    def delete_set_aside(self, session_id: str) -> bool:
        """Delete a set-aside session; return whether there was one."""
        is_here = self.set_aside_sessions.pop(session_id, None) is not None
        if is_here and self._journal is not None:
            self._journal.close(session_id)
        return is_here

    def set_held_bytes(self, held_bytes: int) -> None:
        """Set the number of bytes held by the process."""
        self._held_bytes = held_bytes

    def find(self, session_id: str) -> RegisteredSession:
        """Return a session and mark it as used; SessionError 404 if there is none, 409 if it is set
        aside."""
        entry = self._entries.get(session_id)
        if (aside := self.set_aside_sessions.get(session_id)) is not None:
            why = f"it could not be restored from the journal ({aside.why}); DELETE removes it"
            raise SessionError(409, "session_set_aside", why)
        if entry is None:
            why = f"no session {session_id!r}; it was never opened, was deleted, or expired"
            raise SessionError(404, "no_such_session", why)
        self._touch(entry)
        return entry

    def entries(self) -> Iterable[RegisteredSession]:
        """Return all sessions, the least recently used first."""
        return self._entries.values()

    def reward(self, entry: RegisteredSession, reward: float, node: int | str | None) -> None:
        """Set the reward of the session, or of one of its turns, replacing an earlier one."""
        if fault := reward_fault(reward):
            raise SessionError(400, "invalid_reward", f"reward: {fault}")
        if node is None:
            self._journal_reward(entry, reward, None)
            entry.reward = reward
            return
        try:
            source = entry.finished.report if entry.finished else entry.captured
            number = source.node_of(node)
        except LookupError:
            why = f"node: {node!r} is neither a sampled node nor a response of this session"
            raise SessionError(404, "no_such_node", why) from None
        self._journal_reward(entry, reward, number)
        entry.node_rewards = {**entry.node_rewards, number: reward}

    def finish(self, entry: RegisteredSession, outcome: Outcome | None) -> list[Piece]:
        """Seal the session and return its report as JSON in pieces."""
        finished = entry.finished or self._finish(entry, outcome)
        if self._journal is not None and not entry.is_report_stored:
            session_writer.write_report(self._journal, entry.captured, finished)
            entry.is_report_stored = True
        rewards = SessionRewards(entry.reward, entry.node_rewards)
        return finished.report.render(
            rewards, outcome=finished.outcome, spent_because=finished.spent_because
        )

    def _finish(self, entry: RegisteredSession, outcome: Outcome | None) -> FinishedSession:
        captured = entry.captured
        fault, spent = captured.fault, captured.spent_because
        natural = captured.natural_outcome
        captured.seal("it was finished")
        entry.finished = finished = FinishedSession(
            Outcome.TRUNCATED if spent else outcome or natural,
            captured.report(),
            captured.forks,
            captured.healed,
            fault,
            spent,
        )
        captured.forget()
        return finished

    def delete(self, entry: RegisteredSession) -> None:
        """Remove the session and wake its waiting calls."""
        captured = entry.captured
        del self._entries[captured.session_id]
        self._closed_forks.update(entry.source.forks)
        self._closed_healed.update(entry.source.healed)
        self._capture.close(captured)
        if self._journal is not None:
            self._journal.close(captured.session_id)

    def expire(self) -> None:
        """Remove sessions that were unused for the retention time."""
        last_s = self._clock.now_s() - self._retention_s
        for session_id in [
            each for each, aside in self.set_aside_sessions.items() if aside.since_s <= last_s
        ]:
            log.warning("session.expired", session_id=session_id, state="set_aside")
            self.num_expired += 1
            self.delete_set_aside(session_id)
        while self._entries:
            entry = next(iter(self._entries.values()))
            if entry.touched_s > last_s:
                return
            captured = entry.captured
            if captured.is_busy or captured.num_calls != entry.num_calls_seen:
                self._touch(entry)  # its agent used it
                continue
            log.warning(
                "session.expired",
                session_id=captured.session_id,
                state=entry.state.value,
                num_calls=captured.num_calls,
            )
            self.num_expired += 1
            self.delete(entry)

    def forks(self) -> Counter[str]:
        """Count forks by cause, over all sessions since the start."""
        counts = self._closed_forks.copy()
        for entry in self._entries.values():
            if forks := entry.source.forks:
                counts.update(forks)
        return counts

    def healed(self) -> Counter[str]:
        """Count repaired differences by kind, over all sessions since the start."""
        counts = self._closed_healed.copy()
        for entry in self._entries.values():
            if healed := entry.source.healed:
                counts.update(healed)
        return counts

    def _journal_reward(self, entry: RegisteredSession, reward: float, node: int | None) -> None:
        if self._journal is not None:
            self._journal.reward(entry.captured.session_id, reward, node)

    def _touch(self, entry: RegisteredSession) -> None:
        entry.touched_s = self._clock.now_s()
        entry.num_calls_seen = entry.captured.num_calls
        self._entries.move_to_end(entry.captured.session_id)
