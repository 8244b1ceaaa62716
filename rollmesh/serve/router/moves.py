"""What clients are to hear of their groups' moves: together and a moment later, not one by one.

A busy router would otherwise spend most of its messages on them. Invariants: of a group only its
newest move is told, at most `MOMENT_S` late; what a client may be waiting for (a hello, a failure,
a refusal) does not pass through here. Driven by process.py.
"""

import math

from rollmesh.core.ids import GroupId
from rollmesh.wire.machine import Send
from rollmesh.wire.messages import GroupMoved, GroupsMoved

MOMENT_S = 0.01


class Moves:
    """Those that have not been told."""

    def __init__(self) -> None:
        self.due_s = math.inf
        """When to call `take`."""
        self._by_route: dict[bytes, dict[GroupId, GroupMoved]] = {}

    def add(self, route: bytes, moved: GroupMoved, now_s: float) -> None:
        """The client at `route` is to hear of it."""
        self._by_route.setdefault(route, {})[moved.group_id] = moved
        self.due_s = min(self.due_s, now_s + MOMENT_S)

    def take(self) -> list[Send]:
        """All of it, one message a client."""
        told = []
        for route, newest in self._by_route.items():
            moves = tuple(newest.values())
            told.append(Send(route, GroupsMoved(moves) if len(moves) > 1 else moves[0]))
        self._by_route.clear()
        self.due_s = math.inf
        return told
