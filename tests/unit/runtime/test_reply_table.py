"""Equal requests: which share an answer, and which of two answers stands."""

from rollmesh.runtime.prompts import Prompts
from rollmesh.testing.sampler import ScriptedSampler
from tests.unit.runtime.session_world import MORE, USER, Say, call, open_session, said, turn


async def test_the_same_body_attaches_while_it_is_undelivered(prompts: Prompts, say: Say) -> None:
    sampler = ScriptedSampler()
    session = open_session(sampler, prompts)
    (one,), (two,) = await session.attach(turn(USER)), await session.attach(turn(USER))
    assert one is two
    sampler.generations[0].end(*say("4"))
    assert session.finish(one) == session.finish(two)
    assert session.num_calls == 1


async def test_a_marked_retry_after_delivery_is_answered_again(prompts: Prompts, say: Say) -> None:
    session = open_session(ScriptedSampler([say("4")]), prompts)
    first, answer = await call(session, turn(USER))
    assert first.answer is None  # it is parsed again from its tokens
    again, same = await call(session, turn(USER, is_retry=True))
    assert again is first
    assert same == answer
    assert session.num_calls == 1


async def test_the_same_body_after_delivery_is_a_sibling_that_supersedes(
    prompts: Prompts, say: Say
) -> None:
    sampler = ScriptedSampler([say("4"), say("5")])
    session = open_session(sampler, prompts)
    await call(session, turn(USER))
    _, answer = await call(session, turn(USER))
    assert answer.content == "5"
    session.seal("done")
    rows = [(n.parent, n.superseded) for n in session.record().nodes if n.sampled]
    assert rows == [(0, True), (0, False)]
    assert sampler.requests[0].params.seed != sampler.requests[1].params.seed


async def test_a_request_that_is_asked_again_is_sampled_after_the_same_tokens(
    prompts: Prompts, say: Say
) -> None:
    sampler = ScriptedSampler([say("4"), say("5"), say("4"), say("6")])
    session = open_session(sampler, prompts)
    for asked in (turn(USER), turn(USER, said("4"), MORE)) * 2:
        await call(session, asked)
    before, again = sampler.requests[1], sampler.requests[3]
    assert list(before.prompt_ids) == list(again.prompt_ids)
    session.seal("done")
    assert len([node for node in session.record().nodes if not node.sampled]) == 2
