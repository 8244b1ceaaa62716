"""What an agent shows back of a turn that stalled, and what it is answered with."""

from collections.abc import Sequence

import pytest

from rollmesh.core.types import EVAL_SAMPLING
from rollmesh.runtime.chat import RequestedSampling
from rollmesh.runtime.prompts import Prompts
from rollmesh.runtime.session import Session
from rollmesh.runtime.tokenizer import Tokenizer
from rollmesh.testing.sampler import ScriptedSampler
from tests.unit.runtime.session_world import (
    MORE,
    TO_THE_END,
    TOOLS,
    USER,
    Message,
    open_session,
    said,
    turn,
    with_fields,
)

BEGUN = "<think>\nhm\n</think>\n\n4"
REST = ' or 5\n<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call><|im_end|>'


def shown(reasoning: str, text: str = "", **more: object) -> Message:
    return {"role": "assistant", "content": text, "reasoning_content": reasoning, **more}


class Stalled:
    """A session whose first turn stalled after BEGUN; its reader has left."""

    def __init__(self, prompts: Prompts, tokenizer: Tokenizer) -> None:
        self.sampler = ScriptedSampler()
        self.session: Session = open_session(self.sampler, prompts, sampling=EVAL_SAMPLING)
        self.tokens: Sequence[int] = tokenizer.encode(BEGUN)
        self.rest: Sequence[int] = tokenizer.encode(REST)

    async def start(self) -> "Stalled":
        (self.reply,) = await self.session.attach(turn(USER, tools=TOOLS))
        self.reply.join()
        self.sampler.generations[0].show(*self.tokens)
        self.reply.leave()
        return self

    async def is_resumed_by(self, *echo: Message, **fields: object) -> bool:
        asked = turn(USER, *echo, tools=TOOLS)
        (reply,) = await self.session.attach(with_fields(asked, **fields) if fields else asked)
        return reply is self.reply


@pytest.fixture
async def stalled(prompts: Prompts, tokenizer: Tokenizer) -> Stalled:
    return await Stalled(prompts, tokenizer).start()


async def test_a_turn_that_is_shown_back_as_far_as_it_was_finished_goes_on(
    stalled: Stalled,
) -> None:
    """Codex puts finished items of a stalled turn into its next request, again and again."""
    session = stalled.session
    for echo in (shown("hm"), shown("hm\nhm")):
        assert await stalled.is_resumed_by(echo)
    stalled.reply.join()
    stalled.sampler.generations[0].end(*stalled.rest)
    await stalled.reply.wait(TO_THE_END)
    answer = session.finish(stalled.reply)
    assert (answer.reasoning, answer.content, len(answer.tool_calls)) == ("hm", "4 or 5", 1)
    assert await stalled.is_resumed_by(shown("hm", "4 or 5"))
    session.delivered(stalled.reply)
    (made,) = answer.tool_calls
    call = {"id": made.id, "function": {"name": made.name, "arguments": made.arguments}}
    result: Message = {"role": "tool", "tool_call_id": made.id, "content": "6"}
    merged = shown("hm\nhm\nhm", "4 or 54 or 5", tool_calls=[call])
    await session.attach(turn(USER, merged, result, tools=TOOLS))
    exact = [*stalled.reply.prompt_ids(), *stalled.tokens, *stalled.rest]
    assert list(stalled.sampler.requests[1].prompt_ids)[: len(exact)] == exact
    assert session.fork_report().forks == []


@pytest.mark.parametrize(
    "echo",
    [
        [shown("other")],
        [said("4")],  # a text that may go on: a prefill looks alike
        [shown("hm", "4")],
        [shown("hm"), MORE],
        [MORE],
        [],
    ],
)
async def test_what_was_not_finished_of_the_turn_is_no_resend_of_it(
    stalled: Stalled, echo: list[Message]
) -> None:
    assert await stalled.is_resumed_by(*echo) == (not echo)


async def test_a_turn_that_is_asked_otherwise_is_another(stalled: Stalled) -> None:
    assert not await stalled.is_resumed_by(shown("hm"), sampling=RequestedSampling(temperature=0.5))


async def test_a_delivered_turn_is_not_given_to_one_that_goes_on_from_its_reasoning(
    stalled: Stalled,
) -> None:
    stalled.reply.join()
    stalled.sampler.generations[0].end(*stalled.rest)
    await stalled.reply.wait(TO_THE_END)
    stalled.session.finish(stalled.reply)
    stalled.session.delivered(stalled.reply)
    assert not await stalled.is_resumed_by(shown("hm"))
