"""Which error a group that ended without a result is raised as.

    overloaded  deadline  cancelled, client_left  env_failed  attempts_exhausted  quarantined
    infra_error: GroupIncomplete      anything else (bad_ask, malformed): GroupError

Invariant: total; the code that a reason begins with decides alone. Driven by calls.py.
"""

from rollmesh.core.errors import (
    AttemptsExhausted,
    DeadlineExceeded,
    EnvFailed,
    GroupCancelled,
    GroupError,
    GroupIncomplete,
    Overloaded,
    Quarantined,
)
from rollmesh.serve.client.arrivals import Dropped

ERRORS: dict[str, type[GroupError]] = {
    "deadline": DeadlineExceeded,
    "cancelled": GroupCancelled,
    "client_left": GroupCancelled,
    "env_failed": EnvFailed,
    "attempts_exhausted": AttemptsExhausted,
    "quarantined": Quarantined,
    "infra_error": GroupIncomplete,
}
"""By the code that a reason begins with."""


def code_of(reason: str) -> str:
    """`deadline` of `deadline: no result within 5 s`."""
    return reason.partition(":")[0]


def error_of(dropped: Dropped) -> GroupError | Overloaded:
    """What to raise where somebody awaited this group."""
    code = code_of(dropped.reason)
    if code == "overloaded":
        return Overloaded(f"group {dropped.group_id}: {dropped.reason}", dropped.retry_after_s)
    return ERRORS.get(code, GroupError)(dropped.group_id, dropped.reason, dropped.record)
