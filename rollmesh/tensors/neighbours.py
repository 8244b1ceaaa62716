"""The consumers of one owner, by machine: of those on one, one fetches, and the others from him.

Owns the addresses at which consumers that are connected lend what they fetched. Invariant: who is
sent to a neighbour is sent to one whose address is smaller than his own, so that nobody ever waits
for somebody who waits for him; all of a machine are sent to the same. Any thread; driven by
guest.py, of an owner that is on another machine.
"""

import threading
from collections import Counter


class Neighbours:
    """See the module."""

    def __init__(self) -> None:
        self._there: dict[str, Counter[str]] = {}
        """By the memory that they share; how often each is connected."""
        self._lock = threading.Lock()

    def enter(self, memory: str, address: str) -> None:
        """Who sees `memory` lends at `address` what he fetches."""
        with self._lock:
            self._there.setdefault(memory, Counter())[address] += 1

    def leave(self, memory: str, address: str) -> None:
        """One that entered is gone."""
        with self._lock:
            there = self._there[memory]
            there[address] -= 1
            if not there[address]:
                del there[address]
            if not there:
                del self._there[memory]

    def nearest(self, memory: str, address: str) -> str:
        """Whom to ask who sees `memory` and lends at `address`, or nowhere; '' for nobody."""
        with self._lock:
            first = min(self._there.get(memory, ()), default="")
        return first if not address or first < address else ""
