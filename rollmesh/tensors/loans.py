"""Arrays that lie in memory of others: each is lent, and given back once nobody looks at it.

    LENT --its array has gone, with all that was made of it--> ENDED --told to the lender--> over

Owns what one lender lent. Invariants: a loan ends when the last view of its array has gone, by
itself and never before; each is told once, so that a shard that was lent twice is told twice. An
array may go in any thread, also in one that holds a lock of ours, so its end is merely written
down. A forked child is not asked how long it looks. One thread at a time lends and takes; driven by
connection.py, whose lender is an owner, and by landing.py, which lends its own.
"""

import contextlib
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.uint8]
Key = TypeVar("Key")
"""By what the lender knows it: a shard's id, or a slot."""


class _Loan(weakref.ref[Array], Generic[Key]):
    """Calls back when its array has gone. weakref.KeyedRef is the same, at four times the price."""

    __slots__ = ("key",)
    key: Key


class Loans(Generic[Key]):
    """See the module."""

    def __init__(self, on_end: Callable[[], None]) -> None:
        """`on_end` is called after each end, in whatever thread; it must not wait for a lock."""
        self._on_end = on_end
        self._lent: dict[int, _Loan[Key]] = {}
        self._ended: deque[Key] = deque()

    def __len__(self) -> int:
        """How many are lent."""
        return len(self._lent)

    def lend(self, keys: Iterable[Key], arrays: Iterable[Array]) -> None:
        """Each array lies in the lender's memory; a loan lasts as long as its array does."""
        lent, end = self._lent, self._end
        for key, array in zip(keys, arrays, strict=True):
            loan: _Loan[Key] = _Loan(array, end)
            loan.key = key
            lent[id(loan)] = loan

    def give_back(self, keys: Iterable[Key]) -> None:
        """These were lent, and no array was made of them."""
        self._ended.extend(keys)

    def take_ended(self, limit: int) -> list[Key]:
        """At most `limit` of those that have ended and are not told yet; they are told now."""
        told: list[Key] = []
        # Others take too: what was there a moment ago may be gone.
        with contextlib.suppress(IndexError):
            while len(told) < limit:
                told.append(self._ended.popleft())
        return told

    def _end(self, loan: weakref.ref[Array]) -> None:
        assert isinstance(loan, _Loan)
        del self._lent[id(loan)]
        self._ended.append(loan.key)
        self._on_end()
