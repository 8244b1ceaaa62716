"""When a pipeline will ask for generation again, by what it did before.

A mark is what each of its steps has: its demand ends, a cluster is granted for a phase. As long
after a mark as its signal came the last time, it will come this time, and the newest mark knows
best. Owns what is learned of one pipeline. Invariants: nothing is foreseen by a mark that was not
seen before; while there is demand there is no mark. Driven by the service's demands and by the
simulator; read by policies/foresight.py.

    ended > granted, granted... > signalled > (it generates) > ended...
"""

import math

import msgspec

_ENDED = "ended"


class Habits(msgspec.Struct, kw_only=True):
    """See the module."""

    marks: dict[str, float] = {}
    """Since its demand ended: when each was seen first, the newest last."""
    until_s: dict[str, float] = {}
    """By mark, how long after it the signal came the last time."""
    estimate: int = 0
    """Rollouts, as the last signal said; 0: unknown."""

    def ended(self, now_s: float) -> None:
        """Its demand is closed."""
        self.marks[_ENDED] = now_s

    def granted(self, cluster: str, priority: int, now_s: float) -> None:
        """A phase begins; while it generates that tells nothing."""
        if self.marks:
            self.marks.setdefault(f"{cluster}/{priority}", now_s)

    def signalled(self, estimate: int, now_s: float) -> None:
        """It asks for generation."""
        for name, marked_s in self.marks.items():
            self.until_s[name] = now_s - marked_s
        self.marks, self.estimate = {}, estimate

    def broken_off(self) -> None:
        """Nobody is there who would ask."""
        self.marks = {}

    @property
    def marked_s(self) -> float | None:
        """When the newest mark was seen."""
        return next(reversed(self.marks.values())) if self.marks else None

    @property
    def expected_s(self) -> float:
        """When it will ask; inf: nobody knows."""
        if not self.marks:
            return math.inf
        name, marked_s = next(reversed(self.marks.items()))
        return marked_s + self.until_s.get(name, math.inf)
