"""Scopes open, are found by their secrets, and leave nothing."""

import gc
import tracemalloc
import weakref

import msgspec
import pytest

from rollmesh.core.errors import SessionError
from rollmesh.core.ids import GroupId, RolloutId
from rollmesh.core.types import SamplingPolicy
from rollmesh.runtime.prompts import Prompts
from rollmesh.runtime.registry import Runtime
from rollmesh.runtime.session import Session, SessionState
from rollmesh.runtime.turns import Turn
from rollmesh.testing.sampler import ScriptedSampler
from tests.unit.runtime.session_world import MORE, USER, call, said, turn

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


async def test_nothing_of_an_ended_group_waits_for_the_collector(prompts: Prompts) -> None:
    sampler = ScriptedSampler(lambda _: [1, 2])
    sampler.keeps = False
    runtime = Runtime(sampler, prompts, 4096)
    opened = runtime.open_session(RolloutId(GROUP, 0), SamplingPolicy(), 0)
    gc.collect()
    gc.disable()
    try:
        _, answer = await call(opened.session, turn(USER))
        reply, _ = await call(opened.session, turn(USER, said(answer.content), MORE))
        left: list[weakref.ref[object]] = [
            weakref.ref(opened.session),
            weakref.ref(reply.source.context),
        ]
        runtime.end_group(GROUP)
        del opened, reply
        assert [ref() for ref in left] == [None, None]
    finally:
        gc.enable()


async def test_ten_thousand_sessions_are_cheap(prompts: Prompts) -> None:
    """60 MB before their first call, 120 MB after one of 1 KB each; a tenth of them here."""
    num_sessions, runtime = 1000, new_runtime(prompts)
    text = "a number " * 110
    gc.collect()
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        opened = [
            runtime.open_session(RolloutId(GroupId("r", n), 0), SamplingPolicy(), n)
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
