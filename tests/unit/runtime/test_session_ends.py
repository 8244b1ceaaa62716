"""A session that a limit of ours ends: no new calls, and none for a borrower either."""

import pytest

from rollmesh.core.errors import SessionError
from rollmesh.runtime.prompts import Prompts
from rollmesh.testing.sampler import ScriptedSampler
from tests.unit.runtime.session_world import MORE, USER, Say, open_session, trained, turn


async def test_a_session_that_ends_early_refuses_new_calls_and_finishes_those_under_way(
    prompts: Prompts, say: Say
) -> None:
    sampler = ScriptedSampler()
    session = open_session(sampler, prompts)
    (reply,) = await session.attach(turn(USER))
    reply.join()
    session.end_early("too large")
    session.end_early("something else")
    with pytest.raises(SessionError, match="too large") as caught:
        await session.attach(turn(MORE))
    assert (caught.value.status, caught.value.code) == (400, "session_over_limit")
    assert (await session.attach(turn(USER)))[0] is reply  # the same call
    sampler.generations[0].end(*say("4"))
    assert session.finish(reply).content == "4"
    session.delivered(reply)
    assert trained(session) == [(0, False, "stop")]


async def test_a_session_that_ended_early_is_not_opened_again_for_anybody(
    prompts: Prompts,
) -> None:
    session = open_session(ScriptedSampler(), prompts)
    session.end_early("too large")
    session.seal("done")
    session.end_early("something else")
    session.reopen()
    with pytest.raises(SessionError, match="too large"):
        await session.attach(turn(USER))
