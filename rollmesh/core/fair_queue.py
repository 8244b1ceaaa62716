"""A queue in which owners take turns: round robin over owners, in order of arrival for each.

- However many items one owner has in the queue, they delay each other owner by one item at a time.
- An owner whose last item was taken starts behind the others when it comes back.
- An item can leave the queue at any time, and then delays no other.
"""

from collections.abc import Hashable
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)


class FairQueue(Generic[T]):
    """The queue; every operation takes constant time."""

    def __init__(self) -> None:
        self._lines: dict[Hashable, dict[T, None]] = {}
        """Items by owner, in order of arrival; the next owner first."""
        self._owners: dict[T, Hashable] = {}

    def __len__(self) -> int:
        """Number of items."""
        return len(self._owners)

    def put(self, owner: Hashable, item: T) -> None:
        """Add an item that is not in the queue."""
        self._owners[item] = owner
        self._lines.setdefault(owner, {})[item] = None

    def take(self) -> T | None:
        """Remove and return the first item of the next owner; None if the queue is empty."""
        if not self._lines:
            return None
        owner = next(iter(self._lines))
        line = self._lines.pop(owner)
        item = next(iter(line))
        del line[item], self._owners[item]
        if line:
            self._lines[owner] = line
        return item

    def remove(self, item: T) -> None:
        """Remove an item, if it is in the queue."""
        if item not in self._owners:
            return
        owner = self._owners.pop(item)
        del self._lines[owner][item]
        if not self._lines[owner]:
            del self._lines[owner]
