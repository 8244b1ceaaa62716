"""The publisher whose weights the fleet serves: which one, what it brought last, if it still runs.

    none --an update is finished--> RUNNING --silent for grace_s, or it reports its end--> GONE
    RUNNING, GONE --another one finishes an update--> RUNNING, that one

- While one runs, another one is let in with newer weights only. Once it is gone, any is: a new run
  counts from 1 again.
- A publisher that is kept out gives way only to one that was heard from since, as that may have
  been killed.
- What a publisher announces counts before any engine has it: all of them may be asleep. It lapses
  when the publisher is silent for grace_s, so that one that was killed holds no engine back.
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
        self._announced: tuple[bytes, int, float] | None = None
        """A publisher, the version that it publishes, and when it announced that last."""

    @property
    def told(self) -> int:
        """What it brought last, UNVERSIONED where nobody did in this life of the router."""
        return UNVERSIONED if self._route is None else self.published

    def newest(self, now_s: float) -> int:
        """The version that engines which come (back) must have at least."""
        if self._announced is None or now_s >= self._announced[2] + self._grace_s:
            return self.published
        return max(self.published, self._announced[1])

    def is_announced(self, now_s: float) -> bool:
        """Whether a publisher that still runs has announced a version."""
        return self._announced is not None and now_s < self._announced[2] + self._grace_s

    def announce(self, route: bytes, policy_version: int, now_s: float) -> None:
        """A publisher publishes that version; ignored where another one that runs is ahead."""
        is_any = policy_version != UNVERSIONED
        if is_any and not self.is_ahead_of(route, policy_version, now_s):
            self._announced = (route, policy_version, now_s)

    def hear(self, route: bytes, now_s: float) -> None:
        """A message came from `route`."""
        if route == self._route:
            self._heard_s = now_s

    def verified(self, route: bytes, policy_version: int, now_s: float) -> None:
        """An update is finished."""
        if route != self._route:
            self._kept_out = None
        if self._announced and self._announced[0] != route:
            self._announced = None
        self._route, self._heard_s, self.published = route, now_s, policy_version

    def leave(self, route: bytes) -> None:
        """The publisher reports its end."""
        if self._announced and self._announced[0] == route:
            self._announced = None
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
