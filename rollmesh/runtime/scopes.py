"""What one rollout holds in its process, and until when: its scope.

    OPEN --its agent has ended--> OVER --run again--> OPEN
    OPEN, OVER --end--> ENDED                   a group's rollouts end with their group
    OPEN, OVER --end, while it is lent--> LENT --last borrower lets go, patience is over--> ENDED

Owns the rollout's sessions, the doors that lead to them, and its loans. A child task borrows the
transcript, and its calls go on where that ends; or only the model, in a session of its own that
nobody trains on. Invariants: whatever hangs on a scope is let go when it has ended, once and at
once; a run that is begun again holds nothing of the run before; a borrower keeps a scope no longer
than LOAN_PATIENCE_S past its end, and is named if it tries. Driven by registry.py.
"""

import enum
from collections.abc import Callable

import msgspec

from rollmesh.core.errors import TrajectoryEnded
from rollmesh.core.ids import RolloutId, new_id
from rollmesh.core.types import EVAL_SAMPLING, SamplingPolicy
from rollmesh.runtime.doors import Doors, Locks
from rollmesh.runtime.kit import SessionAsk, SessionKit
from rollmesh.runtime.loans import Loan, Loans
from rollmesh.runtime.redo import KeptSession
from rollmesh.runtime.sampling import derive_seed
from rollmesh.runtime.session import Session, SessionState

LOAN_PATIENCE_S = 30.0
"""What borrowers still have when the scope that they borrowed from was to end."""


class ScopeState(enum.StrEnum):
    """See the module's drawing."""

    OPEN = "open"
    OVER = "over"
    LENT = "lent"
    ENDED = "ended"


class OpenSession(msgspec.Struct, frozen=True):
    """How an agent reaches its session; the secrets are nowhere else, and '' where told before."""

    session: Session
    api_key: str
    path_secret: str

    @property
    def session_id(self) -> str:
        return self.session.session_id


class Scope:
    """See the module."""

    __slots__ = (
        "_doors", "_kit", "_lent_since_s", "_loans", "_locks", "_on_end", "_sampling", "_seed",
        "is_grouped", "rollout_id", "session", "state",
    )  # fmt: skip

    def __init__(
        self, rollout_id: RolloutId, kit: SessionKit, doors: Doors[Session], is_grouped: bool
    ) -> None:
        self.rollout_id = rollout_id
        self.is_grouped = is_grouped
        """It ends with its group, and not with its agent."""
        self.state = ScopeState.OVER
        self.session: Session | None = None
        """The newest run's."""
        self._kit = kit
        self._doors = doors
        self._sampling = SamplingPolicy()
        self._seed = 0
        self._locks: list[Locks] = []
        """Of all keys that were ever made here: they say 410 until the end."""
        self._loans: Loans | None = None
        """Few scopes ever lend."""
        self._lent_since_s = 0.0
        self._on_end: list[Callable[[], None]] = []

    def begin(
        self,
        sampling: SamplingPolicy,
        seed: int,
        kept: KeptSession | None = None,
        min_policy_version: int = -1,
    ) -> OpenSession:
        """A run of the rollout, in a fresh session; what was lent of the run before is back.

        One that stands already has the secrets that it had.
        """
        self.close()
        if self._loans:
            self._loans.find_dropped()
            self._loans.call_in("the rollout is run again")
        if self.session is not None:
            self.session.forget()
        self.state = ScopeState.OPEN
        self._sampling, self._seed = sampling, seed
        self.session = self._new_session(sampling, seed, kept, min_policy_version)
        if kept is not None and kept.locks is not None:
            self._doors.reopen(kept.locks, self.session)
            self._locks.append(kept.locks)
            return OpenSession(self.session, "", "")
        doors = self._doors.make(self.session)
        self._locks.append(doors.locks)
        return OpenSession(self.session, doors.api_key, doors.path_secret)

    def close(self) -> None:
        """The agent has ended: its calls are over, what they left is kept. Idempotent."""
        if self.state is ScopeState.OPEN:
            assert self.session is not None
            self.state = ScopeState.OVER
            self.session.seal("the rollout has ended")
            self._doors.retire(self._locks[-1])

    def lend(self, borrower: str, *, appends: bool) -> Loan:
        """A key for `borrower`: to go on from the transcript, or to the model alone.

        TrajectoryEnded where the scope was to end already.
        """
        if self.state in (ScopeState.LENT, ScopeState.ENDED):
            raise TrajectoryEnded(str(self.rollout_id))
        self._loans = self._loans or Loans(self._doors, self._came_back)
        if not appends:
            return self._loans.make(borrower, self._session_of_borrower())
        assert self.state is ScopeState.OVER, "its own agent still speaks"
        assert self.session is not None
        if self.session.state is SessionState.SEALED:
            self.session.reopen()
        return self._loans.make(borrower, self.session)

    def call_in(self) -> None:
        """Nobody goes on from the transcript any more; a borrower that still could is named."""
        if self._loans:
            self._loans.find_dropped()
            self._loans.call_in("its rollout is to be recorded", self.session)

    def on_end(self, callback: Callable[[], None]) -> None:
        """Have this done once the scope has ended."""
        self._on_end.append(callback)

    def end(self) -> None:
        """Let go of everything, or as soon as nobody borrows. Idempotent."""
        if self.state in (ScopeState.LENT, ScopeState.ENDED):
            return
        self.close()
        if self._loans:
            self._loans.find_dropped()
        if self._loans:
            self.state, self._lent_since_s = ScopeState.LENT, self._kit.clock.now_s()
        else:
            self._finish()

    def look(self) -> None:
        """Has a borrower dropped its loan, or had its time? Only while LENT."""
        if self._loans and self.state is ScopeState.LENT:
            self._loans.find_dropped()
            if self._kit.clock.now_s() - self._lent_since_s >= LOAN_PATIENCE_S:
                self.give_up(f"still out {LOAN_PATIENCE_S:g} s after its scope was to end")

    def give_up(self, why: str) -> None:
        """Wait for borrowers no longer; after `end`."""
        if self._loans and self.state is ScopeState.LENT:
            self._loans.call_in(why)

    def sessions(self) -> list[Session]:
        """Its own, and those of borrowers."""
        own = [self.session] if self.session else []
        return own + [each for each in self._borrowers() if each is not self.session]

    @property
    def num_loans(self) -> int:
        """Those that are out."""
        return len(self._loans or ())

    def _borrowers(self) -> list[Session]:
        return self._loans.sessions() if self._loans else []

    def _new_session(
        self,
        sampling: SamplingPolicy,
        seed: int,
        kept: KeptSession | None = None,
        min_policy_version: int = -1,
    ) -> Session:
        ask = SessionAsk(
            kept.session_id if kept else new_id("s", 6),
            self.rollout_id,
            sampling,
            seed,
            kept.scribe if kept else None,
            min_policy_version,
        )
        return Session(ask, self._kit, kept.past if kept else None)

    def _session_of_borrower(self) -> Session:
        """Nobody trains on it, so it is sampled as its borrower asks; unlike the rollout's own."""
        sampling = msgspec.structs.replace(EVAL_SAMPLING, max_tokens=self._sampling.max_tokens)
        number = len(self._locks) + self.num_loans
        return self._new_session(sampling, derive_seed(self._seed, self.rollout_id.index, -number))

    def _came_back(self, session: Session, locks: Locks) -> None:
        assert self._loans is not None
        self._locks.append(locks)
        if not self._loans.has(session):
            session.seal("its loan has ended")
            if session is not self.session:
                session.forget()
        if self.state is ScopeState.LENT and not self._loans:
            self._finish()

    def _finish(self) -> None:
        self.state = ScopeState.ENDED
        if self.session is not None:
            self.session.forget()
        for locks in self._locks:
            self._doors.close(locks)
        self.session = self._loans = None
        callbacks, self._on_end = self._on_end, []
        for callback in callbacks:
            callback()
