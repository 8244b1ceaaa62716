"""Scopes open, are found by their secrets, and leave nothing."""

import pytest

from rollmesh.core.errors import SessionError
from rollmesh.core.ids import GroupId, RolloutId
from rollmesh.core.types import SamplingPolicy
from rollmesh.runtime.prompts import Prompts
from rollmesh.runtime.registry import Runtime
from rollmesh.runtime.session import Session, SessionState
from rollmesh.runtime.turns import Turn
from rollmesh.testing.sampler import ScriptedSampler

GROUP = GroupId("r", 0)


def new_runtime(prompts: Prompts) -> Runtime:
    return Runtime(ScriptedSampler(lambda _: [1, 2]), prompts, 4096)


def test_a_session_is_found_by_either_secret_and_by_nothing_else(prompts: Prompts) -> None:
    runtime = new_runtime(prompts)
    one = runtime.open_session(RolloutId(GROUP, 0), SamplingPolicy(), 0)
    two = runtime.open_session(RolloutId(GROUP, 1), SamplingPolicy(), 0)
    assert runtime.find(one.api_key) is one.session
    assert runtime.find(two.path_secret) is two.session
    for wrong in ("", one.session_id, one.api_key[:-1], "sk-\ud800"):
        with pytest.raises(SessionError) as caught:
            runtime.find(wrong)
        assert caught.value.status == 401


def test_secrets_are_not_kept(prompts: Prompts) -> None:
    runtime = new_runtime(prompts)
    opened = runtime.open_session(RolloutId(GROUP, 0), SamplingPolicy(), 0)
    assert len(opened.path_secret) >= 43
    kept = repr(vars(runtime)) + repr([getattr(opened.session, name) for name in Session.__slots__])
    assert opened.api_key not in kept
    assert opened.path_secret not in kept


async def test_the_end_of_a_group_leaves_nothing(prompts: Prompts) -> None:
    runtime = new_runtime(prompts)
    opened = runtime.open_session(RolloutId(GROUP, 0), SamplingPolicy(), 0)
    again = runtime.open_session(RolloutId(GROUP, 0), SamplingPolicy(), 0)
    other = runtime.open_session(RolloutId(GroupId("r", 1), 0), SamplingPolicy(), 0)
    (reply,) = await opened.session.attach(Turn(messages=[b'{"role":"user","content":"x"}']))
    opened.session.finish(reply)
    assert (runtime.num_calls, runtime.num_tokens) == (1, 2)
    assert runtime.held_bytes > 0
    runtime.end_group(GROUP)
    runtime.end_group(GROUP)
    assert runtime.held_bytes == 0
    assert opened.session.state is again.session.state is SessionState.SEALED
    with pytest.raises(SessionError):
        runtime.find(opened.api_key)
    assert runtime.find(other.api_key) is other.session
