"""Whether a worker that drains waits for engines in vain: what it runs is better begun elsewhere.

    WAITS_FOR_NONE --it drains, and no engine serves--> WAITING --patience_s later--> STRANDED
           ^--------------------an engine serves-----------+

Invariant: time counts from when both are so. Pure; driven by duties.py.
"""


class Stranded:
    """See the module."""

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._from_s: float | None = None

    def look(self, now_s: float, *, drains: bool, any_serves: bool) -> bool:
        """Whether it is, now."""
        if any_serves or not drains:
            self._from_s = None
            return False
        if self._from_s is None:
            self._from_s = now_s
        return now_s - self._from_s >= self._patience_s
