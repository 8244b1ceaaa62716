"""What a forked child has no part in: sockets and locks that say that their process lives.

A data loader forks the process that trains, and its workers may outlive it for a while. Where they
kept its connections and locks, a killed owner would still seem to be there. Owns the set of these.
Invariants: a child has closed all of them before it runs a line of its own; the set holds weakly,
so what was dropped is not kept open by it. Driven by whoever opens such a thing.
"""

import os
from typing import Protocol
from weakref import WeakSet


class Closable(Protocol):
    """A socket, or a file."""

    def close(self) -> None:
        """Only in this process; closing it again is nothing."""


_opened: WeakSet[Closable] = WeakSet()


def close_in_children(opened: Closable) -> None:
    """A process that is forked from now on does not have it."""
    _opened.add(opened)


def _close_all() -> None:
    for each in [*_opened]:
        each.close()


os.register_at_fork(after_in_child=_close_all)
