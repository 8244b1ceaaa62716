"""State of one engine of the fleet, and of the publisher whose weights the fleet serves.

    none --an update is finished--> RUNNING --silent for grace_s, or it reports its end--> GONE
    RUNNING, GONE --another one finishes an update--> RUNNING, that one

- Only the row of an engine is shown to other processes; fleet.py alone changes phases.
- While a publisher runs, another one is admitted with newer weights only. Once it is gone, any is:
  a new run counts from 1 again.
- A refused publisher gives up only to one that was active since, as that may have been killed.
- An announced version counts before any engine has it, since all may be asleep. It lapses when the
  publisher is silent for grace_s, so that a killed one holds no engine back.
"""

import enum

import msgspec

from rollmesh.core.types import UNVERSIONED
from rollmesh.wire.fleet import BeginUpdate, EnginePhase, EngineRow, SleepEngine

ADAPTER_PREFIX = "rollmesh-v"
"""Prefix of adapter names of publishers; other adapters are ignored."""

ASLEEP = "its GPUs are not its own now"
LAPSED = "asleep until it is woken: the process that put it to sleep is gone"


class Trust(enum.Enum):
    """State of an engine's weights that are not a trusted version."""

    FRESH = "fresh"
    """A new process: the version that it started with will be trusted."""
    BROKEN = "broken"
    """An update failed, or samples did not match the weights: untrusted until an update
    succeeds."""


def adapter_name(policy_version: int) -> str:
    """Return the name of the adapter of that version."""
    return f"{ADAPTER_PREFIX}{policy_version}"


class FleetMember:
    """One engine: its row and the fleet's private state of it."""

    def __init__(self, url: str) -> None:
        self.row = EngineRow(url, "", EnginePhase.JOINING, UNVERSIONED, detail="not probed yet")
        self.trusted: int | Trust = Trust.FRESH
        self.holder = b""
        """Route of the process that holds the lease."""
        self.taking: BeginUpdate | None = None
        """The request for its last update."""
        self.until_s = 0.0
        """When the lease ends, or a removed engine is forgotten."""
        self.next_probe_s = 0.0
        self.probe_serial: int | None = None
        self.probe_sent_s = 0.0
        self.num_failed_probes = 0
        self.faults_s: list[float] = []
        self.is_suspect = False
        """Whether it may have been left paused: the next probe resumes it first."""
        self.is_leaving = False
        """Whether it is to be removed when its requests have ended."""
        self.num_idle = 0
        """Consecutive probes without requests, while it drains."""

    def is_updated_by(self, route: bytes) -> bool:
        """Whether it is under that publisher's lease."""
        return self.row.phase is EnginePhase.UPDATING and self.holder == route

    def is_held_by_other(self, route: bytes, ask: BeginUpdate) -> bool:
        """Whether another publisher updates it; an earlier incarnation of the run that asks is dead
        and does not count."""
        if self.row.phase is not EnginePhase.UPDATING or self.holder == route:
            return False
        last = self.taking
        if last is None or not ask.publisher or ask.publisher != last.publisher:
            return True
        return ask.policy_version <= last.policy_version  # a late message of an earlier incarnation

    def set(
        self,
        phase: EnginePhase,
        detail: str = "",
        policy_version: int | None = None,
        adapter: str | None = None,
    ) -> None:
        """Set the phase and its reason; None leaves the weights unchanged."""
        row = self.row
        self.row = msgspec.structs.replace(
            row,
            phase=phase,
            detail=detail,
            policy_version=row.policy_version if policy_version is None else policy_version,
            adapter=row.adapter if adapter is None else adapter,
        )


def put_to_sleep(engine: FleetMember, route: bytes, ask: SleepEngine, now_s: float) -> str:
    """Put an engine to sleep; return why it is refused, else ''."""
    if engine.row.phase is EnginePhase.UPDATING:
        return f"{ask.url} is being updated; ask again when that is done"
    engine.set(EnginePhase.ASLEEP, ASLEEP)
    engine.holder = route
    engine.until_s = now_s + ask.lease_s
    engine.probe_serial = None
    engine.num_failed_probes = 0
    engine.faults_s.clear()
    return ""


def expire_sleep(engine: FleetMember, now_s: float) -> None:
    """Clear a sleeping engine's lease if it has lapsed."""
    if now_s >= engine.until_s:
        engine.holder = b""
        engine.set(EnginePhase.ASLEEP, LAPSED)


class ActivePublisher:
    """The publisher that finished the last update, and a publisher's announced version."""

    def __init__(self, grace_s: float, least_version: int) -> None:
        self.published = least_version
        """Version that was verified last; an engine that restarts waits for it, even if it is the
        only one."""
        self._grace_s = grace_s
        self._route: bytes | None = None
        """None until a publisher finishes an update with this router process."""
        self._seen_s = float("-inf")
        self._refused: bytes | None = None
        self._refused_s = 0.0
        """When that publisher was refused first."""
        self._announced: tuple[bytes, int, float] | None = None
        """A publisher, the version that it announced, and when it announced that last."""

    @property
    def verified_version(self) -> int:
        """Version that was verified last, UNVERSIONED if none was by this router process."""
        return UNVERSIONED if self._route is None else self.published

    def newest(self, now_s: float) -> int:
        """Return the oldest version with which an engine may join."""
        if self._announced is None or now_s >= self._announced[2] + self._grace_s:
            return self.published
        return max(self.published, self._announced[1])

    def is_announced(self, now_s: float) -> bool:
        """Whether a running publisher has announced a version."""
        return self._announced is not None and now_s < self._announced[2] + self._grace_s

    def announce(self, route: bytes, policy_version: int, now_s: float) -> None:
        """Note the version that a publisher will publish; ignored if another running one is
        ahead."""
        is_any = policy_version != UNVERSIONED
        if is_any and not self.is_ahead_of(route, policy_version, now_s):
            self._announced = (route, policy_version, now_s)

    def seen(self, route: bytes, now_s: float) -> None:
        """Note a message from `route`."""
        if route == self._route:
            self._seen_s = now_s

    def verified(self, route: bytes, policy_version: int, now_s: float) -> None:
        """Note a finished update."""
        if route != self._route:
            self._refused = None
        if self._announced and self._announced[0] != route:
            self._announced = None
        self._route, self._seen_s, self.published = route, now_s, policy_version

    def leave(self, route: bytes) -> None:
        """Note that a publisher has ended."""
        if self._announced and self._announced[0] == route:
            self._announced = None
        if route == self._route:
            self._seen_s = float("-inf")

    def is_running(self, now_s: float) -> bool:
        """Whether the publisher that finished the last update is running."""
        return now_s < self._seen_s + self._grace_s

    def is_ahead_of(self, route: bytes, policy_version: int, now_s: float) -> bool:
        """Whether another running publisher has that version or a newer one."""
        return self.is_running(now_s) and route != self._route and policy_version <= self.published

    def refuse(self, route: bytes, now_s: float) -> bool:
        """Refuse a publisher that is behind; return whether the active one was seen since the first
        refusal."""
        if route != self._refused:
            self._refused, self._refused_s = route, now_s
        return self._seen_s > self._refused_s
