"""Prompts that are no chats."""

import pytest

from rollmesh.core.errors import SessionError
from rollmesh.runtime.prompts import Prompts
from rollmesh.runtime.tokenizer import Tokenizer
from rollmesh.runtime.turns import Turn
from rollmesh.testing.sampler import ScriptedSampler
from tests.unit.runtime.session_world import (
    Say,
    call,
    call_all,
    open_session,
    trained,
)


def raw(text: str = "", ids: tuple[int, ...] | None = None) -> Turn:
    prompt_text = None if ids is not None else text
    return Turn(messages=[], prompt_ids=ids, prompt_text=prompt_text, digest=hash((text, ids)))


async def test_a_raw_prompt_is_its_text_and_nothing_else(
    prompts: Prompts, tokenizer: Tokenizer, say: Say
) -> None:
    sampler = ScriptedSampler([say(" <think> 4 ")])
    session = open_session(sampler, prompts)
    _, answer = await call(session, raw("I guess"))
    assert list(sampler.requests[0].prompt_ids) == tokenizer.encode("I guess")
    assert answer.content == " <think> 4 "


@pytest.mark.parametrize("as_ids", [False, True])
async def test_a_raw_prompt_that_repeats_held_tokens_goes_on_from_them(
    prompts: Prompts, tokenizer: Tokenizer, say: Say, as_ids: bool
) -> None:
    letters = [i for char in " higher" for i in tokenizer.encode(char)]
    sampler = ScriptedSampler(None)
    session = open_session(sampler, prompts)
    prompt = tokenizer.encode("I guess")
    first = raw(ids=tuple(prompt)) if as_ids else raw("I guess")
    (reply,) = await session.attach(first)
    sampler.generations[0].end(*letters, reason="length")
    session.finish(reply)
    session.delivered(reply)
    more = tokenizer.encode(" lower")
    second = raw(ids=(*prompt, *letters, *more)) if as_ids else raw("I guess higher lower")
    await session.attach(second)
    assert list(sampler.requests[1].prompt_ids) == [*prompt, *letters, *more]
    session.seal("done")
    assert [row.parent for row in session.record().nodes][:3] == [-1, 0, 1]


async def test_the_same_raw_prompt_is_held_once(prompts: Prompts, say: Say) -> None:
    session = open_session(ScriptedSampler([say("4"), say("5")]), prompts)
    await call_all(session, raw("x"))
    await call_all(session, raw("x"))
    assert trained(session) == [(0, True, "stop"), (0, False, "stop")]


async def test_ids_that_the_model_has_not_are_refused(prompts: Prompts) -> None:
    session = open_session(ScriptedSampler(), prompts)
    for ids in ((), (-1,), (prompts.vocab_size,)):
        with pytest.raises(SessionError, match="prompt: expected token ids") as caught:
            await session.attach(raw(ids=ids))
        assert caught.value.status == 400
