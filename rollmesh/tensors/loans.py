"""Arrays that lie in an owner's memory: each is lent, and given back once nobody looks at it.

    LENT --its array has gone, with all that was made of it--> ENDED --told to the owner--> over

Owns what one connection was lent. Invariants: a loan ends when the last view of its array has gone,
by itself and never before; each is told back once, so that a shard that was lent twice is told
twice. An array may go in any thread, also in one that holds a lock of ours, so its end is merely
written down. Driven by connection.py.
"""

from collections import deque
from collections.abc import Callable, Iterable
from weakref import KeyedRef

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.uint8]
_Loan = KeyedRef[int, Array]
"""The key is the shard's id."""


class Loans:
    """See the module."""

    def __init__(self, on_end: Callable[[], None]) -> None:
        """`on_end` is called after each end, in whatever thread; it must not wait for a lock."""
        self._on_end = on_end
        self._lent: dict[int, _Loan] = {}
        self._ended: deque[int] = deque()

    def __len__(self) -> int:
        """How many are lent."""
        return len(self._lent)

    def lend(self, shard_id: int, array: Array) -> None:
        """`array` lies in the owner's memory; the loan lasts as long as it does."""
        loan = KeyedRef(array, self._end, shard_id)
        self._lent[id(loan)] = loan

    def give_back(self, shard_ids: Iterable[int]) -> None:
        """These were lent, and no array was made of them."""
        self._ended.extend(shard_ids)

    def take_ended(self, limit: int) -> list[int]:
        """At most `limit` of those that have ended and are not told yet; they are told now."""
        ended = self._ended
        return [ended.popleft() for _ in range(min(limit, len(ended)))]

    def _end(self, loan: _Loan) -> None:
        del self._lent[id(loan)]
        self._ended.append(loan.key)
        self._on_end()
