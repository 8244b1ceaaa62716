"""A scope: the sessions of one rollout in this process, and the loans to its child tasks.

    OPEN --its agent has ended--> OVER --run again--> OPEN
    OPEN, OVER --end--> ENDED                   the rollouts of a group end with the group
    OPEN, OVER --end, while it is lent--> LENT --last borrower releases, or timeout--> ENDED

- A child task borrows the transcript, which its calls continue, or only the model, in a session of
  its own that is not trained on.
- An ended scope releases all that it holds, once. A rollout that is run again keeps nothing.
- A borrower keeps a scope for at most LOAN_PATIENCE_S past its end. A loan that is dropped without
  a release, or recalled, is named in a warning; its key gets a 410.
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
from rollmesh.runtime.generation.sampling import derive_seed
from rollmesh.runtime.restore import StoredSession
from rollmesh.runtime.session import Session, SessionState
from rollmesh.runtime.session_deps import KeyDigests, SessionDeps, SessionKeys, SessionOptions

log = get_logger()


class Loan:
    """A loan of a borrower, ended by `release` or by the end of a `with`."""

    __slots__ = ("__weakref__", "_give_back", "api_key", "borrower")

    def __init__(self, borrower: str, api_key: str, give_back: Callable[[], None]) -> None:
        self.borrower = borrower
        """Name of the borrower, for people."""
        self.api_key = api_key
        self._give_back = give_back

    def release(self) -> None:
        """End the loan. Idempotent."""
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


class _OpenLoan(NamedTuple):
    """An open loan."""

    borrower: str
    session: Session
    locks: KeyDigests
    loan: weakref.ref[Loan]


class OpenLoans:
    """The open loans of one scope."""

    __slots__ = ("__weakref__", "_num_made", "_on_back", "_out", "_session_keys")

    def __init__(
        self, session_keys: SessionKeys[Session], on_return: Callable[[Session, KeyDigests], None]
    ) -> None:
        """`on_return` is called with each session whose key is returned, for whatever reason."""
        self._session_keys = session_keys
        self._on_back = on_return
        self._out: dict[int, _OpenLoan] = {}
        self._num_made = 0

    def __len__(self) -> int:
        """Number of open loans."""
        return len(self._out)

    def make(self, borrower: str, session: Session) -> Loan:
        """A new key to `session`."""
        number, self._num_made = self._num_made, self._num_made + 1
        made = self._session_keys.make(session)
        this = weakref.ref(self)

        def give_back() -> None:
            loans = this()
            if loans is not None:
                loans._return_key(number)  # noqa: SLF001 - same module

        loan = Loan(borrower, made.api_key, give_back)
        self._out[number] = _OpenLoan(borrower, session, made.locks, weakref.ref(loan))
        return loan

    def has(self, session: Session) -> bool:
        """Whether a key to `session` is lent."""
        return any(each.session is session for each in self._out.values())

    def sessions(self) -> list[Session]:
        """Sessions whose keys are lent."""
        return list({each.session.session_id: each.session for each in self._out.values()}.values())

    def find_dropped(self) -> None:
        """Recall loans that were dropped without a release, and name their borrowers."""
        for number, each in list(self._out.items()):
            if each.loan() is None:
                self._leaked(number, each, "dropped without a release")

    def recall(self, why: str, session: Session | None = None) -> None:
        """Recall all loans, or those of one session, and name their borrowers."""
        for number, each in list(self._out.items()):
            if session in (None, each.session):
                self._leaked(number, each, why)

    def _leaked(self, number: int, out: _OpenLoan, why: str) -> None:
        rollout_id = str(out.session.rollout_id)
        log.warning("loan.leaked", borrower=out.borrower, rollout_id=rollout_id, why=why)
        self._return_key(number)

    def _return_key(self, number: int) -> None:
        out = self._out.pop(number, None)
        if out is not None:
            self._session_keys.retire(out.locks)
            self._on_back(out.session, out.locks)


LOAN_PATIENCE_S = 30.0
"""Time that borrowers have left when the scope that they borrowed from should end."""


class ScopeState(enum.StrEnum):
    """State of a scope."""

    OPEN = "open"
    OVER = "over"
    LENT = "lent"
    ENDED = "ended"


class OpenSession(msgspec.Struct, frozen=True):
    """How an agent reaches its session; the secrets are stored nowhere else, and '' if returned
    before."""

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
        """The scope ends with its group, not with its agent."""
        self.state = ScopeState.OVER
        self.session: Session | None = None
        """The session of the newest run."""
        self._deps = deps
        self._session_keys = session_keys
        self._sampling = SamplingPolicy()
        self._seed = 0
        self._locks: list[KeyDigests] = []
        """Digests of all keys of this scope: they get a 410 until the end."""
        self._loans: OpenLoans | None = None
        """None in most scopes, which never lend."""
        self._lent_since_s = 0.0
        self._on_end: list[Callable[[], None]] = []

    def begin(
        self,
        sampling: SamplingPolicy,
        seed: int,
        stored: StoredSession | None = None,
        min_policy_version: int = -1,
    ) -> OpenSession:
        """Begin a run of the rollout in a new session; loans of the previous run are recalled.

        A restored session keeps its secrets.
        """
        self.close()
        if self._loans:
            self._loans.find_dropped()
            self._loans.recall("the rollout is run again")
        if self.session is not None:
            self.session.forget()
        self.state = ScopeState.OPEN
        self._sampling, self._seed = sampling, seed
        self.session = self._new_session(sampling, seed, stored, min_policy_version)
        if stored is not None and stored.locks is not None:
            self._session_keys.reopen(stored.locks, self.session)
            self._locks.append(stored.locks)
            return OpenSession(self.session, "", "")
        session_keys = self._session_keys.make(self.session)
        self._locks.append(session_keys.locks)
        return OpenSession(self.session, session_keys.api_key, session_keys.path_secret)

    def close(self) -> None:
        """End the agent's calls; their results are kept. Idempotent."""
        if self.state is ScopeState.OPEN:
            assert self.session is not None
            self.state = ScopeState.OVER
            self.session.seal("the rollout has ended")
            self._session_keys.retire(self._locks[-1])

    def lend(self, borrower: str, *, appends: bool) -> Loan:
        """A key with which `borrower` continues the transcript, or uses only the model.

        TrajectoryEnded if the scope should have ended already.
        """
        if self.state in (ScopeState.LENT, ScopeState.ENDED):
            raise TrajectoryEnded(str(self.rollout_id))
        self._loans = self._loans or OpenLoans(self._session_keys, self._came_back)
        if not appends:
            return self._loans.make(borrower, self._session_of_borrower())
        assert self.state is ScopeState.OVER, "its own agent has not ended"
        assert self.session is not None
        if self.session.state is SessionState.SEALED:
            self.session.reopen()
        return self._loans.make(borrower, self.session)

    def recall(self) -> None:
        """Recall the loans of the transcript, and name their borrowers."""
        if self._loans:
            self._loans.find_dropped()
            self._loans.recall("its rollout is about to be recorded", self.session)

    def on_end(self, callback: Callable[[], None]) -> None:
        """Call `callback` when the scope has ended."""
        self._on_end.append(callback)

    def end(self) -> None:
        """End the scope, or as soon as nothing is lent. Idempotent."""
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
        """End the scope if its loans were dropped, or their time is over; only while LENT."""
        if self._loans and self.state is ScopeState.LENT:
            self._loans.find_dropped()
            if self._deps.clock.now_s() - self._lent_since_s >= LOAN_PATIENCE_S:
                self.give_up(f"not released {LOAN_PATIENCE_S:g} s after its scope's end")

    def give_up(self, why: str) -> None:
        """End the scope without waiting for borrowers any longer; after `end`."""
        if self._loans and self.state is ScopeState.LENT:
            self._loans.recall(why)

    def sessions(self) -> list[Session]:
        """Its own session, and those of borrowers."""
        own = [self.session] if self.session else []
        return own + [each for each in self._borrowers() if each is not self.session]

    @property
    def num_loans(self) -> int:
        """Number of open loans."""
        return len(self._loans or ())

    def _borrowers(self) -> list[Session]:
        return self._loans.sessions() if self._loans else []

    def _new_session(
        self,
        sampling: SamplingPolicy,
        seed: int,
        stored: StoredSession | None = None,
        min_policy_version: int = -1,
    ) -> Session:
        options = SessionOptions(
            stored.session_id if stored else new_id("s", 6),
            self.rollout_id,
            sampling,
            seed,
            stored.event_writer if stored else None,
            min_policy_version,
        )
        return Session(options, self._deps, stored.restored if stored else None)

    def _session_of_borrower(self) -> Session:
        """A session of a borrower, which is sampled as the borrower requests, since it is not
        trained on."""
        sampling = msgspec.structs.replace(EVAL_SAMPLING, max_tokens=self._sampling.max_tokens)
        number = len(self._locks) + self.num_loans
        return self._new_session(sampling, derive_seed(self._seed, self.rollout_id.index, -number))

    def _came_back(self, session: Session, locks: KeyDigests) -> None:
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
