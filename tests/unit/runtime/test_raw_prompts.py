"""Prompts that are no chats."""

import pytest

from rollmesh.core.errors import SessionError
from rollmesh.runtime.chat import Turn
from rollmesh.runtime.prompts import Prompts
from rollmesh.runtime.tokenizer import Tokenizer
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


@pytest.mark.parametrize("as_ids", [False, True])
async def test_the_longest_line_that_a_prompt_repeats_is_gone_on_from(
    prompts: Prompts, tokenizer: Tokenizer, as_ids: bool
) -> None:
    """A newer answer may be a beginning of an older line."""
    texts = ["I guess", " higher", " or", " lower", " hi", " end"]
    ids = {text: tokenizer.encode(text) for text in texts}
    ids[" hi"] = ids[" higher"][:1]
    texts[4] = tokenizer.decode(ids[" hi"])

    def asked(*parts: str) -> Turn:
        whole = tuple(i for part in parts for i in ids[part])
        return raw(ids=whole) if as_ids else raw("".join(parts))

    sampler = ScriptedSampler(None)
    session = open_session(sampler, prompts)
    for parts, said in [
        (texts[:1], " higher"),
        (texts[:3], " lower"),
        (texts[:1], " hi"),
        (["I guess", " higher", " or", " lower", " end"], " end"),
    ]:
        (reply,) = await session.attach(asked(*parts))
        sampler.generations[-1].end(*ids[said], reason="length")
        session.finish(reply)
        session.delivered(reply)
    session.seal("done")
    assert [row.parent for row in session.record().nodes] == [-1, 0, 1, 2, 0, 3, 5]


async def test_a_prompt_without_a_token_is_refused(prompts: Prompts) -> None:
    with pytest.raises(SessionError, match="prompt: expected") as caught:
        await open_session(ScriptedSampler(), prompts).attach(raw(""))
    assert caught.value.status == 400


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
