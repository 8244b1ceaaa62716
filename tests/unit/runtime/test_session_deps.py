"""Secrets open their session and no other, and nothing once it is closed."""

import pytest

from rollmesh.core.errors import SessionError
from rollmesh.runtime.session_deps import SessionKeys


def test_both_secrets_lead_to_their_session_until_it_is_closed() -> None:
    session_keys: SessionKeys[str] = SessionKeys()
    one, other = session_keys.make("one"), session_keys.make("other")
    assert [session_keys.find(secret) for secret in (one.api_key, one.path_secret)] == [
        "one",
        "one",
    ]
    session_keys.close(one.locks)
    for secret in (one.api_key, one.path_secret, "", "\ud800"):
        with pytest.raises(SessionError, match="no session here has it") as refused:
            session_keys.find(secret)
        assert refused.value.status == 401
    assert session_keys.find(other.path_secret) == "other"


def test_secrets_are_long_different_and_not_kept() -> None:
    session_keys: SessionKeys[str] = SessionKeys()
    made = [session_keys.make("s") for _ in range(100)]
    told = {secret for each in made for secret in (each.api_key, each.path_secret)}
    assert len(told) == 200
    assert min(map(len, told)) >= 43
    kept = repr(vars(session_keys)) + repr([each.locks for each in made])
    assert not any(secret in kept for secret in told)
