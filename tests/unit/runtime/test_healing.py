"""Agents that write their histories differently in every turn."""

import random
from typing import Any

import msgspec
import pytest

from rollmesh.runtime.chat import Turn, compile_rotating
from rollmesh.runtime.conversation.forks import HealedKind
from rollmesh.runtime.session import Session
from rollmesh.runtime.tokens.prompts import Prompts
from rollmesh.testing.sampler import ScriptedSampler
from tests.unit.runtime.session_calls import TOOLS, Message, ReplyIds, call, open_session

ROTATING = compile_rotating(["Today's date"])
ANSWERS = (
    "<think>hm</think>\n\n4",
    " so ",
    '<tool_call>\n{"name": "f", "arguments": {"a":   1, "b": [2]}}\n</tool_call>',
    '<think>x</think>go <tool_call>\n{"name": "f", "arguments": {"b": "y"}}\n</tool_call>',
)


class Respelling:
    """Writes the same messages differently each time, as real agents do."""

    def __init__(self, seed: int) -> None:
        self._chance = random.Random(seed)
        self._num_turns = 0

    def turn(self, messages: list[Message]) -> Turn:
        self._num_turns += 1
        spelled = [self._spell(dict(message)) for message in messages]
        spelled[0]["content"] = f"Be brief.\nToday's date: {self._num_turns}"
        raws = [self._encode(message) for message in spelled]
        digest = hash(tuple(raws))
        if self._chance.random() < 0.5:
            array = b"[" + b", ".join(raws) + b"]"
            return Turn(messages=[], messages_raw=array, digest=digest, tools=TOOLS)
        return Turn(messages=raws, digest=digest, tools=TOOLS)

    def _spell(self, message: Message) -> Message:
        chance = self._chance
        if message["role"] == "assistant":
            self._spell_answer(message)
        if isinstance(message.get("content"), str) and chance.random() < 0.3:
            part = {"type": "text", "text": message["content"]}
            marker: Message = {"cache_control": {"type": "ephemeral"}}
            message["content"] = [{**part, **marker} if chance.random() < 0.5 else part]
        if chance.random() < 0.3:
            message["provider_specific_fields"] = {"n": chance.randrange(9)}
        return message

    def _spell_answer(self, message: Message) -> None:
        chance = self._chance
        if chance.random() < 0.3:
            message.pop("reasoning_content", None)
        if chance.random() < 0.3 and message["content"]:
            message["content"] = f"\n{message['content']}"
        calls: Any = message.get("tool_calls")
        if calls and chance.random() < 0.6:
            arguments = msgspec.json.decode(calls[0]["function"]["arguments"])
            function = {"name": "f", "arguments": msgspec.json.encode(arguments).decode()}
            message["tool_calls"] = [{"id": calls[0]["id"], "function": function}]

    def _encode(self, message: Message) -> bytes:
        keys = list(message)
        self._chance.shuffle(keys)
        return msgspec.json.encode({key: message[key] for key in keys})


async def converse(session: Session, agent: Respelling, num_turns: int) -> None:
    messages: list[Message] = [{"role": "system"}, {"role": "user", "content": "go"}]
    for n in range(num_turns):
        _, answer = await call(session, agent.turn(messages))
        message: Message = {"role": "assistant", "content": answer.content}
        if answer.reasoning:
            message["reasoning_content"] = answer.reasoning
        messages.append(message)
        if not answer.tool_calls:
            messages.append({"role": "user", "content": f"{n}"})
            continue
        calls = [
            {"id": made.id, "function": {"name": made.name, "arguments": made.arguments}}
            for made in answer.tool_calls
        ]
        message["tool_calls"] = calls
        messages += [
            {"role": "tool", "tool_call_id": made.id, "content": f"{n}"}
            for made in answer.tool_calls
        ]


@pytest.mark.parametrize("seed", range(8))
async def test_an_agent_that_respells_its_history_never_forks(
    prompts: Prompts, reply_ids: ReplyIds, seed: int
) -> None:
    chance = random.Random(seed)
    sampler = ScriptedSampler(lambda _: reply_ids(chance.choice(ANSWERS)))
    session = open_session(sampler, prompts, 100_000, rotating=ROTATING)
    await converse(session, Respelling(seed), num_turns=30)
    report = session.fork_report()
    assert not report.forks
    assert set(report.healed) <= {kind.value for kind in HealedKind}
    assert len(report.healed) >= 5
    session.seal("done")
    assert [row.parent for row in session.record().nodes] == list(range(-1, 59))
    for before, generation, after in zip(
        sampler.requests, sampler.generations, sampler.requests[1:], strict=False
    ):
        held = [*before.prompt_ids, *generation.token_ids]
        assert list(after.prompt_ids)[: len(held)] == held
