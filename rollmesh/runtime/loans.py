"""What a scope has lent to child tasks: a key each, to its transcript or to the model alone.

    OUT --released, dropped, or called in--> BACK

Owns the loans of one scope, and the doors that they lead through. Invariants: who has let go finds
a 410 behind its key; a Loan keeps nothing alive but itself, so a borrower that forgets it holds no
memory; one that was dropped without a word, or is still out when it is called in, is named in a
warning. Driven by scopes.py.
"""

import weakref
from collections.abc import Callable
from types import TracebackType
from typing import NamedTuple

from rollmesh.core.logs import get_logger
from rollmesh.runtime.doors import Doors, Locks
from rollmesh.runtime.session import Session

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

    __slots__ = ("__weakref__", "_doors", "_num_made", "_on_back", "_out")

    def __init__(self, doors: Doors[Session], on_back: Callable[[Session, Locks], None]) -> None:
        """`on_back` is told of each session whose key is back, for whatever reason."""
        self._doors = doors
        self._on_back = on_back
        self._out: dict[int, _Out] = {}
        self._num_made = 0

    def __len__(self) -> int:
        """How many are out."""
        return len(self._out)

    def make(self, borrower: str, session: Session) -> Loan:
        """A new key to `session`."""
        number, self._num_made = self._num_made, self._num_made + 1
        made = self._doors.make(session)
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
            self._doors.retire(out.locks)
            self._on_back(out.session, out.locks)
