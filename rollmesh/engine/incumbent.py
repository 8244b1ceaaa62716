"""The publisher whose weights the fleet serves: who it is, what it brought last, if it still runs.

    nobody --an update is finished--> RUNNING --silent for grace_s, says that it leaves--> GONE
    RUNNING, GONE --another one finishes an update--> RUNNING, that one

Invariants: while one runs, another one is let in with newer weights only; with that one gone,
with any: a run that begins anew counts from 1 again. Whoever is kept out is told to give way only
by one that has asked for something since: until then it may have been killed. Driven by fleet.py.
"""

from rollmesh.engine.member import UNVERSIONED


class Incumbent:
    """See the module."""

    def __init__(self, grace_s: float, least_version: int) -> None:
        self.published = least_version
        """What was verified last; an engine that was restarted waits for it, even alone."""
        self._grace_s = grace_s
        self._route: bytes | None = None
        """Nobody's in this life of the router."""
        self._heard_s = float("-inf")
        self._kept_out: bytes | None = None
        self._kept_out_s = 0.0
        """Since when that one is."""

    @property
    def told(self) -> int:
        """What it brought last, UNVERSIONED where nobody did in this life of the router."""
        return UNVERSIONED if self._route is None else self.published

    def hear(self, route: bytes, now_s: float) -> None:
        """Somebody asks for something."""
        if route == self._route:
            self._heard_s = now_s

    def verified(self, route: bytes, policy_version: int, now_s: float) -> None:
        """An update is finished."""
        if route != self._route:
            self._kept_out = None
        self._route, self._heard_s, self.published = route, now_s, policy_version

    def leave(self, route: bytes) -> None:
        """It says so."""
        if route == self._route:
            self._heard_s = float("-inf")

    def is_running(self, now_s: float) -> bool:
        """Whether the publisher that finished the last update still runs."""
        return now_s < self._heard_s + self._grace_s

    def is_ahead_of(self, route: bytes, policy_version: int, now_s: float) -> bool:
        """Whether another publisher, which still runs, is at that version or further."""
        return self.is_running(now_s) and route != self._route and policy_version <= self.published

    def keep_out(self, route: bytes, now_s: float) -> bool:
        """It is ahead of that publisher: whether it has been heard since it was so first."""
        if route != self._kept_out:
            self._kept_out, self._kept_out_s = route, now_s
        return self._heard_s > self._kept_out_s
