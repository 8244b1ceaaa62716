"""Time as a thing that is handed in, so that tests and the simulator own it.

Invariant: nothing in rollmesh that decides by time calls `time` itself; shells hand `now_s()` to
the step machines. `rollmesh.testing` ships the clock that stands still until told.
"""

import time
from typing import Protocol


class Clock(Protocol):
    """Where a shell reads the time."""

    def now_s(self) -> float:
        """Monotonic seconds; only differences mean something."""

    def unix_s(self) -> float:
        """Seconds since 1970, for records that people read."""


class SystemClock:
    """The machine's own clock."""

    def now_s(self) -> float:
        return time.monotonic()

    def unix_s(self) -> float:
        return time.time()
