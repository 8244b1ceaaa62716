"""One engine of the fleet: its row in the table, and what the fleet remembers beside it.

Owns no rule: phases change by fleet.py's. Invariant: the row alone is shown to others. Driven by
fleet.py.
"""

import enum

import msgspec

from rollmesh.wire.fleet import BeginUpdate, EnginePhase, EngineRow

UNVERSIONED = -1
"""The policy version of weights that carry none, such as those SGLang was started with."""


ADAPTER_PREFIX = "rollmesh-v"
"""Of the names under which publishers load adapters; others at an engine are nobody's here."""


class Trust(enum.Enum):
    """What the fleet knows about an engine's weights, where that is not a version."""

    FRESH = "fresh"
    """A new process: the version that it came up with will be trusted."""
    BROKEN = "broken"
    """An update failed, or what it sampled is not of its weights: nothing is trusted until an
    update succeeds."""


def adapter_name(policy_version: int) -> str:
    """Under which an engine has the adapter of that version, if it is one."""
    return f"{ADAPTER_PREFIX}{policy_version}"


class Member:
    """See the module."""

    def __init__(self, url: str) -> None:
        self.row = EngineRow(url, "", EnginePhase.JOINING, UNVERSIONED, detail="not probed yet")
        self.trusted: int | Trust = Trust.FRESH
        self.holder = b""
        """Whose lease it is under, as a route: that of one life of a publisher."""
        self.taking: BeginUpdate | None = None
        """The ask for its last update."""
        self.until_s = 0.0
        """When the lease ends, or the memory of a removed engine."""
        self.next_probe_s = 0.0
        self.probe_serial: int | None = None
        self.probe_sent_s = 0.0
        self.num_failed_probes = 0
        self.faults_s: list[float] = []
        self.is_suspect = False
        """Maybe left paused: the next probe resumes it first."""

    def is_updated_by(self, route: bytes) -> bool:
        """Whether it is under that publisher's lease."""
        return self.row.phase is EnginePhase.UPDATING and self.holder == route

    def is_held_from(self, route: bytes, ask: BeginUpdate) -> bool:
        """Whether another publisher updates it, and not an earlier life of the run that asks, which
        is dead and does no more."""
        if self.row.phase is not EnginePhase.UPDATING or self.holder == route:
            return False
        last = self.taking
        if last is None or not ask.publisher or ask.publisher != last.publisher:
            return True
        return ask.policy_version <= last.policy_version  # said late, by an earlier life

    def set(
        self,
        phase: EnginePhase,
        detail: str = "",
        policy_version: int | None = None,
        adapter: str | None = None,
    ) -> None:
        """Into this phase, for this reason; None leaves its weights what they are."""
        row = self.row
        self.row = msgspec.structs.replace(
            row,
            phase=phase,
            detail=detail,
            policy_version=row.policy_version if policy_version is None else policy_version,
            adapter=row.adapter if adapter is None else adapter,
        )
