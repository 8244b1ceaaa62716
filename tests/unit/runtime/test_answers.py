"""The names of a session's answers."""

import pytest

from rollmesh.core.errors import SessionError
from rollmesh.runtime.prompts import Prompts
from rollmesh.testing.sampler import ScriptedSampler
from tests.unit.runtime.session_world import MORE, USER, Say, call, open_session, said, turn


async def test_an_answer_is_known_by_its_replys_name_and_by_its_number(
    prompts: Prompts, say: Say
) -> None:
    session = open_session(ScriptedSampler([say("4"), say("5")]), prompts)
    first, answer = await call(session, turn(USER))
    second, _ = await call(session, turn(USER, said(answer.content), MORE))
    for reply in (first, second):
        assert session.node_of(reply.head.id) == session.node_of(reply.node) == reply.node
    assert first.node != second.node


async def test_no_name_leads_to_a_call_that_has_no_answer_yet_nor_to_anothers(
    prompts: Prompts,
) -> None:
    session = open_session(ScriptedSampler(None), prompts)
    (waiting,) = await session.attach(turn(USER))
    own = session.session_id
    for name in (waiting.head.id, f"{own}-1", f"{own}--1", f"{own}-\u00b2", own, "", "s_other-0"):
        with pytest.raises(SessionError, match="not found"):
            session.node_of(name)
