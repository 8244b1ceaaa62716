"""What a worker may hold in memory, and whether it is full.

    LIGHT --it holds the limit--> FULL --under ROOM_SHARE of it, or no group is here--> LIGHT

Invariants: pure; between the two bounds nothing changes, so that a worker does not offer itself and
withdraw with each beat; one that has nothing to finish takes groups whatever it counts, or it would
wait for ever. Driven by duties.py, whose shell weighs what is held at each tick.
"""

import enum

ROOM_SHARE = 0.8


class BudgetState(enum.Enum):
    """See the module's drawing."""

    LIGHT = "light"
    FULL = "full"


class Budget:
    """See the module."""

    def __init__(self, max_bytes: int) -> None:
        self.state = BudgetState.LIGHT
        self.held_bytes = 0
        """As weighed last."""
        self._max_bytes = max_bytes

    def weigh(self, held_bytes: int, *, has_groups: bool) -> None:
        """So much is held; `has_groups` says whether any of it will go by itself."""
        self.held_bytes = held_bytes
        if not has_groups or held_bytes < ROOM_SHARE * self._max_bytes:
            self.state = BudgetState.LIGHT
        elif held_bytes >= self._max_bytes:
            self.state = BudgetState.FULL

    @property
    def waits_for(self) -> str:
        """What keeps the worker from taking groups; '' if nothing does."""
        if self.state is BudgetState.LIGHT:
            return ""
        return f"held_bytes: {self.held_bytes} held, worker.max_held_bytes = {self._max_bytes}"
