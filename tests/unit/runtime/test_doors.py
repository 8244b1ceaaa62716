"""Secrets lead to their session and to no other, and to nothing once it is closed."""

import pytest

from rollmesh.core.errors import SessionError
from rollmesh.runtime.doors import Doors


def test_both_secrets_lead_to_their_session_until_it_is_closed() -> None:
    doors: Doors[str] = Doors()
    one, other = doors.make("one"), doors.make("other")
    assert [doors.find(secret) for secret in (one.api_key, one.path_secret)] == ["one", "one"]
    doors.close(one.locks)
    for secret in (one.api_key, one.path_secret, "", "\ud800"):
        with pytest.raises(SessionError, match="no session here has it") as refused:
            doors.find(secret)
        assert refused.value.status == 401
    assert doors.find(other.path_secret) == "other"


def test_secrets_are_long_different_and_not_kept() -> None:
    doors: Doors[str] = Doors()
    made = [doors.make("s") for _ in range(100)]
    told = {secret for each in made for secret in (each.api_key, each.path_secret)}
    assert len(told) == 200
    assert min(map(len, told)) >= 43
    kept = repr(vars(doors)) + repr([each.locks for each in made])
    assert not any(secret in kept for secret in told)
