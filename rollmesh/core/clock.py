"""Clocks, passed in as arguments so that tests and the simulator control time.

State machines never call `time`; the code around them passes `now_s()`. `rollmesh.testing` has a
clock that only moves when advanced.
"""

import time
from typing import Protocol


class Clock(Protocol):
    """A source of the time."""

    def now_s(self) -> float:
        """Return monotonic seconds; only differences are meaningful."""

    def unix_s(self) -> float:
        """Return seconds since 1970, for records that people read."""


class SystemClock:
    """The machine's clock."""

    def now_s(self) -> float:
        return time.monotonic()

    def unix_s(self) -> float:
        return time.time()
