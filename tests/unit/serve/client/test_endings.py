"""Endings: the code that a reason begins with decides which error is raised."""

import pytest

from rollmesh.core.errors import (
    AttemptsExhausted,
    DeadlineExceeded,
    EnvFailedError,
    GroupCancelled,
    GroupError,
    GroupIncomplete,
    Overloaded,
    Quarantined,
    RollmeshError,
)
from rollmesh.core.ids import GroupId
from rollmesh.core.types import GroupRecord, Task
from rollmesh.serve.client.arrivals import Dropped
from rollmesh.serve.client.async_client import error_of

GROUP = GroupId("r1", 3)


@pytest.mark.parametrize(
    ("reason", "kind"),
    [
        ("deadline: no result within 5 s", DeadlineExceeded),
        ("cancelled: by the router", GroupCancelled),
        ("client_left: c1 was silent", GroupCancelled),
        ("env_failed: no module named x", EnvFailedError),
        ("attempts_exhausted: 3 have begun", AttemptsExhausted),
        ("quarantined: w1 killed by signal 9, w2 killed by signal 9", Quarantined),
        ("infra_error: 1 of 4 rollouts: no engine", GroupIncomplete),
        ("bad_ask: num_samples must be at least 1", GroupError),
        ("malformed: not a group's record", GroupError),
        ("a reason of tomorrow", GroupError),
    ],
)
def test_reason_is_raised_as_its_kind(reason: str, kind: type[GroupError]) -> None:
    record = GroupRecord(task=Task(id="t"))
    error = error_of(Dropped(GROUP, reason, record))
    assert type(error) is kind
    assert (error.group_id, error.reason, error.record) == (GROUP, reason, record)
    assert str(error) == f"group r1/3: {reason}"
    assert isinstance(error, RollmeshError)


def test_overload_says_when_to_come_back() -> None:
    error = error_of(Dropped(GROUP, "overloaded: 9 groups wait", retry_after_s=1.5))
    assert isinstance(error, Overloaded)
    assert error.retry_after_s == 1.5
