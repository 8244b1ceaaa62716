"""A scope: the sessions of one rollout in this process, and the loans to its child tasks.

    OPEN --its agent has ended--> OVER --run again--> OPEN
    OPEN, OVER --end--> ENDED                   the rollouts of a group end with the group
    OPEN, OVER --end, while it is lent--> LENT --last borrower releases, or timeout--> ENDED

- A child task borrows the transcript, which its calls continue, or only the model, in a session of
  its own that is not trained on.
- A scope that ends releases all that it holds, once. A run that begins again keeps nothing.
- A borrower keeps a scope for at most LOAN_PATIENCE_S past its end. A loan that is dropped without
  a release, or recalled, is named in a warning; its key is answered with 410.
"""

import enum
import weakref
from collections.abc import Callable
from types import TracebackType
from typing import NamedTuple

import msgspec

from rollmesh.core.errors import TrajectoryEnded
from rollmesh.core.ids import RolloutId, new_id
from rollmesh.core.logs import get_logger
from rollmesh.core.types import EVAL_SAMPLING, SamplingPolicy
from rollmesh.runtime.restore import StoredSession
from rollmesh.runtime.sampling import derive_seed
from rollmesh.runtime.session import Session, SessionState
from rollmesh.runtime.session_deps import Locks, SessionDeps, SessionKeys, SessionOptions

log = get_logger()


class Loan:
    """Held by a borrower, who lets go of it by `release` or at the end of a `with`."""

    __slots__ = ("__weakref__", "_give_back", "api_key", "borrower")

    def __init__(self, borrower: str, api_key: str, give_back: Callable[[], None]) -> None:
        self.borrower = borrower
        """Who borrows, for people."""
        self.api_key = api_key
        self._give_back = give_back

    def release(self) -> None:
        """Let go. Idempotent."""
        self._give_back()

    def __enter__(self) -> "Loan":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()


class _Out(NamedTuple):
    """A loan that is out."""

    borrower: str
    session: Session
    locks: Locks
    loan: weakref.ref[Loan]


class Loans:
    """Of one scope."""

    __slots__ = ("__weakref__", "_num_made", "_on_back", "_out", "_session_keys")

    def __init__(
        self, session_keys: SessionKeys[Session], on_back: Callable[[Session, Locks], None]
    ) -> None:
        """`on_back` is told of each session whose key is back, for whatever reason."""
        self._session_keys = session_keys
        self._on_back = on_back
        self._out: dict[int, _Out] = {}
        self._num_made = 0

    def __len__(self) -> int:
        """How many are out."""
        return len(self._out)

    def make(self, borrower: str, session: Session) -> Loan:
        """A new key to `session`."""
        number, self._num_made = self._num_made, self._num_made + 1
        made = self._session_keys.make(session)
        this = weakref.ref(self)

        def give_back() -> None:
            loans = this()
            if loans is not None:
                loans._back(number)  # noqa: SLF001 - its own

        loan = Loan(borrower, made.api_key, give_back)
        self._out[number] = _Out(borrower, session, made.locks, weakref.ref(loan))
        return loan

    def has(self, session: Session) -> bool:
        """Whether a key to `session` is out."""
        return any(each.session is session for each in self._out.values())

    def sessions(self) -> list[Session]:
        """That keys are out for."""
        return list({each.session.session_id: each.session for each in self._out.values()}.values())

    def find_dropped(self) -> None:
        """Take back what nobody holds any more, and name who dropped it."""
        for number, each in list(self._out.items()):
            if each.loan() is None:
                self._leaked(number, each, "dropped without a release")

    def call_in(self, why: str, session: Session | None = None) -> None:
        """Take all back, or those of one session, and name who had not let go."""
        for number, each in list(self._out.items()):
            if session in (None, each.session):
                self._leaked(number, each, why)

    def _leaked(self, number: int, out: _Out, why: str) -> None:
        rollout_id = str(out.session.rollout_id)
        log.warning("loan.leaked", borrower=out.borrower, rollout_id=rollout_id, why=why)
        self._back(number)

    def _back(self, number: int) -> None:
        out = self._out.pop(number, None)
        if out is not None:
            self._session_keys.retire(out.locks)
            self._on_back(out.session, out.locks)


LOAN_PATIENCE_S = 30.0
"""What borrowers still have when the scope that they borrowed from was to end."""


class ScopeState(enum.StrEnum):
    """States of a scope."""

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
    """The sessions, keys and loans of one rollout."""

    __slots__ = (
        "_deps",
        "_lent_since_s",
        "_loans",
        "_locks",
        "_on_end",
        "_sampling",
        "_seed",
        "_session_keys",
        "is_grouped",
        "rollout_id",
        "session",
        "state",
    )  # fmt: skip

    def __init__(
        self,
        rollout_id: RolloutId,
        deps: SessionDeps,
        session_keys: SessionKeys[Session],
        is_grouped: bool,
    ) -> None:
        self.rollout_id = rollout_id
        self.is_grouped = is_grouped
        """It ends with its group, and not with its agent."""
        self.state = ScopeState.OVER
        self.session: Session | None = None
        """The newest run's."""
        self._deps = deps
        self._session_keys = session_keys
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
        kept: StoredSession | None = None,
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
            self._session_keys.reopen(kept.locks, self.session)
            self._locks.append(kept.locks)
            return OpenSession(self.session, "", "")
        session_keys = self._session_keys.make(self.session)
        self._locks.append(session_keys.locks)
        return OpenSession(self.session, session_keys.api_key, session_keys.path_secret)

    def close(self) -> None:
        """The agent has ended: its calls are over, what they left is kept. Idempotent."""
        if self.state is ScopeState.OPEN:
            assert self.session is not None
            self.state = ScopeState.OVER
            self.session.seal("the rollout has ended")
            self._session_keys.retire(self._locks[-1])

    def lend(self, borrower: str, *, appends: bool) -> Loan:
        """A key for `borrower`: to go on from the transcript, or to the model alone.

        TrajectoryEnded where the scope was to end already.
        """
        if self.state in (ScopeState.LENT, ScopeState.ENDED):
            raise TrajectoryEnded(str(self.rollout_id))
        self._loans = self._loans or Loans(self._session_keys, self._came_back)
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
            self.state, self._lent_since_s = ScopeState.LENT, self._deps.clock.now_s()
        else:
            self._finish()

    def look(self) -> None:
        """Has a borrower dropped its loan, or had its time? Only while LENT."""
        if self._loans and self.state is ScopeState.LENT:
            self._loans.find_dropped()
            if self._deps.clock.now_s() - self._lent_since_s >= LOAN_PATIENCE_S:
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
        kept: StoredSession | None = None,
        min_policy_version: int = -1,
    ) -> Session:
        ask = SessionOptions(
            kept.session_id if kept else new_id("s", 6),
            self.rollout_id,
            sampling,
            seed,
            kept.event_writer if kept else None,
            min_policy_version,
        )
        return Session(ask, self._deps, kept.past if kept else None)

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
            self._session_keys.close(locks)
        self.session = self._loans = None
        callbacks, self._on_end = self._on_end, []
        for callback in callbacks:
            callback()
