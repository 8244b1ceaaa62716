"""One engine of the fleet: its row in the table, and what the fleet remembers beside it.

Owns no rule: phases change by fleet.py's. Invariant: the row alone is shown to others. Driven by
fleet.py.
"""

import enum

import msgspec

from rollmesh.wire.fleet import EnginePhase, EngineRow

UNVERSIONED = -1
"""The policy version of weights that carry none, such as those SGLang was started with."""


class Trust(enum.Enum):
    """What the fleet knows about an engine's weights, where that is not a version."""

    FRESH = "fresh"
    """A new process: the version that it came up with will be trusted."""
    BROKEN = "broken"
    """An update failed, or what it sampled is not of its weights: nothing is trusted until an
    update succeeds."""


class Member:
    """See the module."""

    def __init__(self, url: str) -> None:
        self.row = EngineRow(url, "", EnginePhase.JOINING, UNVERSIONED, detail="not probed yet")
        self.trusted: int | Trust = Trust.FRESH
        self.holder = b""
        self.until_s = 0.0
        """When the lease ends, or the memory of a removed engine."""
        self.next_probe_s = 0.0
        self.probe_serial: int | None = None
        self.probe_sent_s = 0.0
        self.num_failed_probes = 0
        self.faults_s: list[float] = []
        self.is_suspect = False
        """Maybe left paused: the next probe resumes it first."""

    def set(self, phase: EnginePhase, detail: str = "", policy_version: int | None = None) -> None:
        """Into this phase, for this reason."""
        if policy_version is None:
            policy_version = self.row.policy_version
        self.row = msgspec.structs.replace(
            self.row, phase=phase, detail=detail, policy_version=policy_version
        )
