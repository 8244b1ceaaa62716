"""Scopes open, are found by their secrets, and leave nothing."""

import gc
import tracemalloc
import weakref

import msgspec
import pytest

from rollmesh.core.errors import SessionError, TrajectoryEnded
from rollmesh.core.heap import freed_bytes
from rollmesh.core.ids import GroupId, RolloutId
from rollmesh.core.types import SamplingPolicy
from rollmesh.runtime.chat import Turn
from rollmesh.runtime.registry import MAX_REMEMBERED, Runtime
from rollmesh.runtime.session import Session, SessionState
from rollmesh.runtime.session_deps import SessionKeys
from rollmesh.runtime.tokens.prompts import Prompts
from rollmesh.testing.sampler import ScriptedSampler
from tests.unit.runtime.session_calls import MORE, USER, assistant, call, turn

GROUP = GroupId("r", 0)
ROLLOUT = RolloutId(GROUP, 0)


def new_runtime(prompts: Prompts) -> Runtime:
    return Runtime(ScriptedSampler(lambda _: [1, 2]), prompts, 4096)


def test_a_session_is_found_by_either_secret_and_by_nothing_else(prompts: Prompts) -> None:
    runtime = new_runtime(prompts)
    one = runtime.register_trajectory(ROLLOUT, SamplingPolicy(), 0)
    two = runtime.register_trajectory(RolloutId(GROUP, 1), SamplingPolicy(), 0)
    assert runtime.sessions.find(one.api_key) is one.session
    assert runtime.sessions.find(two.path_secret) is two.session
    for wrong in ("", one.session_id, one.api_key[:-1], "sk-\ud800"):
        with pytest.raises(SessionError) as caught:
            runtime.sessions.find(wrong)
        assert caught.value.status == 401


def test_secrets_are_not_kept(prompts: Prompts) -> None:
    runtime = new_runtime(prompts)
    opened = runtime.register_trajectory(ROLLOUT, SamplingPolicy(), 0)
    assert len(opened.path_secret) >= 43
    kept = repr(vars(runtime)) + repr([getattr(opened.session, name) for name in Session.__slots__])
    assert opened.api_key not in kept
    assert opened.path_secret not in kept


async def test_the_end_of_a_group_leaves_nothing(prompts: Prompts) -> None:
    runtime = new_runtime(prompts)
    first = runtime.register_trajectory(ROLLOUT, SamplingPolicy(), 0)
    other = runtime.register_trajectory(RolloutId(GroupId("r", 1), 0), SamplingPolicy(), 0)
    (reply,) = await first.session.attach(turn(USER))
    first.session.finish(reply)
    assert (runtime.num_calls, runtime.num_tokens) == (1, 2)
    assert all(runtime.held()[what] > 0 for what in ("graph", "history"))
    num_held, num_freed = first.session.held_bytes, freed_bytes()
    runtime.cleanup_group(GROUP)
    assert freed_bytes() - num_freed >= num_held  # a trim must be able to return this memory
    runtime.cleanup_group(GROUP)
    assert sum(runtime.held().values()) == 0
    assert first.session.state is SessionState.SEALED
    with pytest.raises(SessionError):
        runtime.sessions.find(first.api_key)
    assert runtime.sessions.find(other.api_key) is other.session
    assert runtime.entries() == {"scopes": 1, "groups": 1, "doors": 2, "loans": 0}


async def test_a_rollout_that_is_run_again_retains_nothing_of_its_earlier_run(
    prompts: Prompts,
) -> None:
    runtime = new_runtime(prompts)
    first = runtime.register_trajectory(ROLLOUT, SamplingPolicy(), 0)
    await call(first.session, turn(USER))
    assert sum(runtime.held().values()) > 0
    again = runtime.register_trajectory(ROLLOUT, SamplingPolicy(), 0)
    assert sum(runtime.held().values()) == first.session.held_bytes == 0
    assert runtime.resolve_trajectory(ROLLOUT) is again.session
    with pytest.raises(SessionError, match="over") as caught:
        runtime.sessions.find(first.api_key)
    assert caught.value.status == 410


def test_an_ungrouped_rollout_ends_with_its_agent_and_a_grouped_one_with_its_group(
    prompts: Prompts,
) -> None:
    runtime, alone = new_runtime(prompts), RolloutId(GroupId("gw", 0), 0)
    runtime.register_trajectory(alone, SamplingPolicy(), 0, is_grouped=False)
    runtime.register_trajectory(ROLLOUT, SamplingPolicy(), 0)
    for rollout_id in (alone, ROLLOUT):
        runtime.cleanup_rollout(rollout_id)
        runtime.cleanup_rollout(rollout_id)
    assert runtime.resolve_trajectory(ROLLOUT).state is SessionState.SEALED
    with pytest.raises(TrajectoryEnded) as caught:
        runtime.resolve_trajectory(alone)
    assert caught.value.trajectory == "gw/0/0"
    runtime.cleanup_group(GROUP)
    assert set(runtime.entries().values()) == {0}


def test_an_unavailable_trajectory_is_an_error_with_its_name_and_reason(prompts: Prompts) -> None:
    runtime = new_runtime(prompts)
    with pytest.raises(TrajectoryEnded, match="r/0/0 is not here: it was not registered"):
        runtime.resolve_trajectory(ROLLOUT)
    runtime.register_trajectory(ROLLOUT, SamplingPolicy(), 0)
    runtime.cleanup_group(GROUP)
    for ask in (
        lambda: runtime.resolve_trajectory(ROLLOUT),
        lambda: runtime.lend(ROLLOUT, "child", appends=False),
    ):
        with pytest.raises(TrajectoryEnded, match="r/0/0 is not here: its scope has ended"):
            ask()


def test_names_of_ended_rollouts_are_eventually_forgotten(prompts: Prompts) -> None:
    runtime = new_runtime(prompts)
    for index in range(MAX_REMEMBERED + 1):
        runtime.register_trajectory(RolloutId(GROUP, index), SamplingPolicy(), 0)
    runtime.cleanup_group(GROUP)
    with pytest.raises(TrajectoryEnded, match="ended long ago"):
        runtime.resolve_trajectory(ROLLOUT)
    with pytest.raises(TrajectoryEnded, match="its scope has ended"):
        runtime.resolve_trajectory(RolloutId(GROUP, 1))


async def test_an_ended_group_is_freed_without_the_garbage_collector(prompts: Prompts) -> None:
    sampler = ScriptedSampler(lambda _: [1, 2])
    sampler.keeps = False
    runtime = Runtime(sampler, prompts, 4096)
    opened = runtime.register_trajectory(ROLLOUT, SamplingPolicy(), 0)
    gc.collect()
    gc.disable()
    try:
        _, answer = await call(opened.session, turn(USER))
        reply, _ = await call(opened.session, turn(USER, assistant(answer.content), MORE))
        left: list[weakref.ref[object]] = [
            weakref.ref(opened.session),
            weakref.ref(reply.source.context),
        ]
        runtime.cleanup_group(GROUP)
        del opened, reply
        assert [ref() for ref in left] == [None, None]
    finally:
        gc.enable()


async def test_a_kept_session_of_an_ended_group_retains_nothing(prompts: Prompts) -> None:
    """Gateways keep finished sessions like this."""
    sampler = ScriptedSampler(lambda _: [1, 2])
    sampler.keeps = False
    runtime = Runtime(sampler, prompts, 4096)
    session = runtime.register_trajectory(ROLLOUT, SamplingPolicy(), 0).session
    gc.disable()
    try:
        reply, _ = await call(session, turn(USER))
        left = weakref.ref(reply.source.context)
        del reply
        runtime.cleanup_group(GROUP)
        assert left() is None
    finally:
        gc.enable()


async def test_ten_thousand_sessions_are_cheap(prompts: Prompts) -> None:
    """60 MB before their first call and 120 MB after one of 1 KB each; the test runs a tenth of
    them.
    """
    num_sessions, runtime = 1000, new_runtime(prompts)
    text = "a number " * 110
    gc.collect()
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        opened = [
            runtime.register_trajectory(RolloutId(GroupId("r", n), 0), SamplingPolicy(), n)
            for n in range(num_sessions)
        ]
        empty, _ = tracemalloc.get_traced_memory()
        for n, each in enumerate(opened):
            raw = msgspec.json.encode([{"role": "user", "content": f"{n} {text}"}])
            await call(each.session, Turn(messages=[], messages_raw=raw, digest=hash(raw)))
        full, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (empty - before) / num_sessions < 6_000
    assert (full - before) / num_sessions < 12_000


def test_both_secrets_find_their_session_until_it_is_closed() -> None:
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


def test_secrets_are_long_and_unique_and_not_stored() -> None:
    session_keys: SessionKeys[str] = SessionKeys()
    made = [session_keys.make("s") for _ in range(100)]
    secrets = {secret for each in made for secret in (each.api_key, each.path_secret)}
    assert len(secrets) == 200
    assert min(map(len, secrets)) >= 43
    kept = repr(vars(session_keys)) + repr([each.locks for each in made])
    assert not any(secret in kept for secret in secrets)
