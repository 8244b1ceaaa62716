"""A clock for tests and simulators that moves only by `advance_to` and `advance`, and never
back.
"""


class FakeClock:
    """A Clock whose monotonic and unix times move together."""

    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = start_s

    def now_s(self) -> float:
        return self._now_s

    def unix_s(self) -> float:
        return 1_000_000_000.0 + self._now_s

    def advance_to(self, now_s: float) -> None:
        """Move to `now_s`; raise ValueError if that is in the past."""
        if now_s < self._now_s:
            raise ValueError(f"time does not run back from {self._now_s} to {now_s}")
        self._now_s = now_s

    def advance(self, seconds: float) -> None:
        self.advance_to(self._now_s + seconds)
