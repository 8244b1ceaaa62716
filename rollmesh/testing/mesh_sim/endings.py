"""How groups ended at one client of the simulated mesh.

Invariant: a group ends once, in all lives of its client, and for a reason that begins with a code
of wire/messages.py; otherwise AssertionError, at once. Driven by client.py and visitor.py.
"""

from rollmesh.core.ids import GroupId

CODES = {
    "attempts_exhausted",
    "cancelled",
    "client_left",
    "deadline",
    "env_failed",
    "incomplete",
    "infra_error",
    "overloaded",
    "quarantined",
}


class Endings:
    """See the module."""

    def __init__(self) -> None:
        self.reasons: dict[GroupId, str] = {}
        """By group; '' where it brought a result."""

    def __contains__(self, group_id: object) -> bool:
        return group_id in self.reasons

    def __len__(self) -> int:
        return len(self.reasons)

    @property
    def num_results(self) -> int:
        return sum(not reason for reason in self.reasons.values())

    def add(self, group_id: GroupId, reason: str) -> None:
        """The group has ended at its sink."""
        assert group_id not in self.reasons, f"{group_id} ended twice"
        code = reason.partition(":")[0]
        assert code in CODES or not reason, f"{group_id} ended for no known reason: {reason}"
        self.reasons[group_id] = reason
