"""The gateway's sessions: who is open, what they were rewarded with, when they are forgotten.

    OPEN --finish--> FINISHED --finish, reward--> FINISHED      any --delete, expiry--> gone

Invariants: a session is in the book from its opening to its deletion, or until nobody used it or
asked about it for `retention_s`; the first `finish` decides the outcome, and every later one gives
the same account again, so an answer that was lost loses nothing; of a finished session nothing but
its account is held, whose long parts lie in blobs, and so on disk when memory is short; where there
is an archive, what is told was written there before; what could not be made again of it stands
aside for as long, on disk alone. Driven by admin.py, by the gateway's clock and by
archive/recovery.py.
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
"""Who is told that there is no room may ask again then."""

log = get_logger()


class RegistryState(enum.StrEnum):
    """See the module's drawing."""

    OPEN = "open"
    FINISHED = "finished"


class RegisteredSession:
    """One session of the book."""

    __slots__ = (
        "captured",
        "created_s",
        "finished",
        "is_filed",
        "metadata",
        "node_rewards",
        "num_calls_seen",
        "reward",
        "touched_s",
    )

    def __init__(self, captured: CapturedSession, metadata: bytes, created_s: float) -> None:
        self.captured = captured
        self.metadata = metadata
        """As the opener sent it, JSON."""
        self.created_s = created_s
        """Unix time."""
        self.touched_s = 0.0
        self.num_calls_seen = 0
        self.finished: FinishedSession | None = None
        self.is_filed = False
        """Its account is in the journal."""
        self.reward: float | None = None
        self.node_rewards: dict[int, float] = NO_REWARDS

    @property
    def state(self) -> RegistryState:
        return RegistryState.FINISHED if self.finished else RegistryState.OPEN

    @property
    def told(self) -> "FinishedSession | CapturedSession":
        """Who tells of its forks and faults."""
        return self.finished or self.captured

    @property
    def held_bytes(self) -> int:
        """Of its session, or of its account beside the blobs."""
        return self.finished.account.num_bytes if self.finished else self.captured.held_bytes

    def describe(self) -> dict[str, Any]:
        """For people who look after it."""
        captured, told = self.captured, self.told
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
            "forks": dict(told.forks),
            "healed": dict(told.healed),
            "fault": told.fault,
            "spent_because": told.spent_because,
        }


class SetAside(NamedTuple):
    """A session that is on disk alone, and since when."""

    why: str
    since_s: float


class SessionRegistry:
    """See the module."""

    def __init__(
        self,
        capture: Capture,
        clock: Clock,
        retention_s: float,
        max_bytes: int = sys.maxsize,
        archive: GatewayJournal | None = None,
    ) -> None:
        """A process that holds more than `max_bytes` opens no session; without an archive the
        sessions end with it."""
        self._max_bytes = max_bytes
        self._held_bytes = 0
        """Of the process, as weighed last."""
        self._capture = capture
        self._archive = archive
        self._clock = clock
        self._retention_s = retention_s
        self._entries: OrderedDict[str, RegisteredSession] = OrderedDict()
        """By id; the longest untouched first."""
        self.aside: dict[str, SetAside] = {}
        """By id: sessions of the journal that could not be made again."""
        self.num_opened = 0
        self.num_expired = 0
        self._closed_forks: Counter[str] = Counter()
        self._closed_healed: Counter[str] = Counter()

    def __len__(self) -> int:
        """Sessions that it knows."""
        return len(self._entries)

    def open(self, wish: CaptureOptions, metadata: bytes) -> OpenedSession:
        """A new session; SessionError 503 if the process holds too much for one more."""
        if self._held_bytes > self._max_bytes and self._entries:
            num_finished = sum([entry.finished is not None for entry in self._entries.values()])
            raise SessionError(
                503,
                "over_budget",
                f"{self._held_bytes} bytes are held, worker.max_held_bytes = {self._max_bytes}; of "
                f"{len(self._entries)} sessions {num_finished} are finished: delete those that "
                "you have the account of",
                RETRY_AFTER_S,
            )
        opened = self._capture.open(wish)
        entry = RegisteredSession(opened.captured, metadata, self._clock.unix_s())
        if self._archive is not None:
            try:
                self._archive.open(
                    session_writer.opened_entry(opened, entry.metadata, entry.created_s)
                )
            except SessionError:
                self._capture.close(opened.captured)
                raise
        self.enter(entry)
        self.num_opened += 1
        return opened

    def enter(self, entry: RegisteredSession) -> None:
        """A session is here, new or as another process left it."""
        entry.touched_s = self._clock.now_s()
        entry.num_calls_seen = entry.captured.num_calls
        self._entries[entry.captured.session_id] = entry

    def set_aside(self, session_id: str, why: str) -> None:
        """The journal has this session, and it could not be made again."""
        self.aside[session_id] = SetAside(why, self._clock.now_s())

    def free(self, session_id: str) -> bool:
        """Forget one that was set aside; whether there was one."""
        is_here = self.aside.pop(session_id, None) is not None
        if is_here and self._archive is not None:
            self._archive.close(session_id)
        return is_here

    def weigh(self, held_bytes: int) -> None:
        """So much is held in the process."""
        self._held_bytes = held_bytes

    def find(self, session_id: str) -> RegisteredSession:
        """The entry, touched; SessionError 404 if there is none, 409 if it is set aside."""
        entry = self._entries.get(session_id)
        if (aside := self.aside.get(session_id)) is not None:
            why = f"it could not be made again of the journal ({aside.why}); DELETE frees it"
            raise SessionError(409, "session_set_aside", why)
        if entry is None:
            why = f"no session {session_id!r} here; it was never opened, was deleted, or expired"
            raise SessionError(404, "no_such_session", why)
        self._touch(entry)
        return entry

    def entries(self) -> Iterable[RegisteredSession]:
        """All, the longest untouched first."""
        return self._entries.values()

    def reward(self, entry: RegisteredSession, reward: float, node: int | str | None) -> None:
        """Give it to the session, or to one of its turns; a later word replaces an earlier one."""
        if fault := reward_fault(reward):
            raise SessionError(400, "invalid_reward", f"reward: {fault}")
        if node is None:
            self._file_reward(entry, reward, None)
            entry.reward = reward
            return
        try:
            teller = entry.finished.account if entry.finished else entry.captured
            number = teller.node_of(node)
        except LookupError:
            why = f"node: {node!r} is neither a sampled node nor a response of this session"
            raise SessionError(404, "no_such_node", why) from None
        self._file_reward(entry, reward, number)
        entry.node_rewards = {**entry.node_rewards, number: reward}

    def finish(self, entry: RegisteredSession, outcome: Outcome | None) -> list[Piece]:
        """Seal the session; its account as JSON in pieces."""
        finished = entry.finished or self._finish(entry, outcome)
        if self._archive is not None and not entry.is_filed:
            session_writer.write_report(self._archive, entry.captured, finished)
            entry.is_filed = True
        rewards = SessionRewards(entry.reward, entry.node_rewards)
        return finished.account.told(
            rewards, outcome=finished.outcome, spent_because=finished.spent_because
        )

    def _finish(self, entry: RegisteredSession, outcome: Outcome | None) -> FinishedSession:
        captured = entry.captured
        fault, spent = captured.fault, captured.spent_because
        natural = captured.natural_outcome
        captured.seal("it was finished")
        entry.finished = finished = FinishedSession(
            Outcome.TRUNCATED if spent else outcome or natural,
            captured.account(),
            captured.forks,
            captured.healed,
            fault,
            spent,
        )
        captured.forget()
        return finished

    def delete(self, entry: RegisteredSession) -> None:
        """Forget it; who still waits in it is woken."""
        captured = entry.captured
        del self._entries[captured.session_id]
        self._closed_forks.update(entry.told.forks)
        self._closed_healed.update(entry.told.healed)
        self._capture.close(captured)
        if self._archive is not None:
            self._archive.close(captured.session_id)

    def expire(self) -> None:
        """Forget what nobody touched for the retention time."""
        last_s = self._clock.now_s() - self._retention_s
        for session_id in [each for each, aside in self.aside.items() if aside.since_s <= last_s]:
            log.warning("session.expired", session_id=session_id, state="set_aside")
            self.num_expired += 1
            self.free(session_id)
        while self._entries:
            entry = next(iter(self._entries.values()))
            if entry.touched_s > last_s:
                return
            captured = entry.captured
            if captured.is_busy or captured.num_calls != entry.num_calls_seen:
                self._touch(entry)  # its agent did
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
        """By cause, of all sessions since the start."""
        counts = self._closed_forks.copy()
        for entry in self._entries.values():
            if forks := entry.told.forks:
                counts.update(forks)
        return counts

    def healed(self) -> Counter[str]:
        """By kind, of all sessions since the start."""
        counts = self._closed_healed.copy()
        for entry in self._entries.values():
            if healed := entry.told.healed:
                counts.update(healed)
        return counts

    def _file_reward(self, entry: RegisteredSession, reward: float, node: int | None) -> None:
        if self._archive is not None:
            self._archive.reward(entry.captured.session_id, reward, node)

    def _touch(self, entry: RegisteredSession) -> None:
        entry.touched_s = self._clock.now_s()
        entry.num_calls_seen = entry.captured.num_calls
        self._entries.move_to_end(entry.captured.session_id)
