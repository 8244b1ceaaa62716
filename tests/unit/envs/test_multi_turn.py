"""Conversations: roles, endings, and the call of `finish` after every beginning."""

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from rollmesh.core.errors import EnvError, InfraError
from rollmesh.core.types import Score, Task
from rollmesh.envs.chat import ChatReply, Message
from rollmesh.envs.env import Endpoint, Transcript
from rollmesh.envs.multi_turn import MultiTurnEnv, Prompt, Talk
from rollmesh.testing.upstreams import ChatAnswer, ChatEndpoint, ChatRequestSeen

TASK = Task("t", {"question": "What?"})
TOO_LONG = ChatAnswer(status=400, body=b'{"error": {"code": "context_length_exceeded"}}')


class Asks(MultiTurnEnv):
    """Reply "more" until an answer contains "enough"; plain methods, which run in threads."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.finished: list[Talk] = []

    def tasks(self, split: str, seed: int) -> Iterator[Task]:
        yield TASK

    def respond(self, task: Task, talk: Talk, reply: ChatReply) -> Prompt | None:
        talk.data["replies"] = [*talk.data.get("replies", []), reply.text]
        return None if "enough" in reply.text else "more"

    def finish(self, task: Task, talk: Talk) -> None:
        talk.data["is_finished"] = True
        self.finished.append(talk)

    def score(self, task: Task, transcript: Transcript) -> Score:
        return Score(1.0)


async def converse(
    env: MultiTurnEnv, *answers: str | ChatAnswer
) -> tuple[Transcript, ChatEndpoint]:
    async with ChatEndpoint(answers) as server:
        try:
            return await env.run(TASK, server.endpoint), server
        finally:
            await env.close()


def roles(request: ChatRequestSeen) -> list[tuple[str, str]]:
    return [(each["role"], each["content"]) for each in request.body["messages"]]


async def test_every_request_holds_the_whole_conversation() -> None:
    transcript, server = await converse(Asks(system="Be brief.", max_tokens=9), "a", "enough")
    opening = [("system", "Be brief."), ("user", "What?")]
    assert roles(server.requests[0]) == opening
    assert roles(server.requests[1]) == [*opening, ("assistant", "a"), ("user", "more")]
    assert [request.body["max_tokens"] for request in server.requests] == [9, 9]
    assert not transcript.truncated
    assert transcript.data["answer"] == "enough"
    assert transcript.data["num_turns"] == 2
    assert transcript.data["replies"] == ["a", "enough"]
    assert transcript.data["is_finished"]
    assert len(transcript.data["messages"]) == 5


async def test_the_models_message_is_sent_back_unchanged() -> None:
    thinking = ChatAnswer("a", reasoning="hm")
    _, server = await converse(Asks(), thinking, "enough")
    message = server.requests[1].body["messages"][1]
    assert message == {"role": "assistant", "content": "a", "reasoning_content": "hm"}


async def test_turns_at_their_limit_truncate() -> None:
    transcript, server = await converse(Asks(max_turns=2), "a", "b", "c")
    assert transcript.truncated
    assert len(server.requests) == 2
    assert transcript.data["replies"] == ["a", "b"]


async def test_full_context_truncates() -> None:
    transcript, _ = await converse(Asks(), "a", TOO_LONG)
    assert transcript.truncated
    assert transcript.data["answer"] == "a"


async def test_last_answer_cut_at_its_end_truncates() -> None:
    transcript, _ = await converse(Asks(), ChatAnswer("enough", finish_reason="length"))
    assert transcript.truncated
    transcript, _ = await converse(Asks(), ChatAnswer("a", finish_reason="length"), "enough")
    assert not transcript.truncated


async def test_finish_is_called_when_the_endpoint_fails() -> None:
    env = Asks()
    with pytest.raises(InfraError):
        await converse(env, "a", ChatAnswer(body=b"gibberish"))
    assert len(env.finished) == 1


async def test_finish_is_called_when_the_rollout_is_cancelled() -> None:
    env = Asks()
    asked = asyncio.Event()
    loop = asyncio.get_running_loop()

    class Waits(Asks):
        async def respond(self, task: Task, talk: Talk, reply: ChatReply) -> Prompt | None:  # type: ignore[override]
            loop.call_soon(asked.set)
            await asyncio.Event().wait()
            return None

    env = Waits()
    async with ChatEndpoint(["a"]) as server:
        running = asyncio.create_task(env.run(TASK, server.endpoint))
        await asked.wait()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        await env.close()
    assert len(env.finished) == 1


async def test_finish_is_called_when_the_opening_raises() -> None:
    env = Asks()
    with pytest.raises(KeyError):
        await env.run(Task("no question"), Endpoint("http://127.0.0.1:1/v1", "k", "m"))
    assert [talk.held for talk in env.finished] == [None]


async def test_an_env_may_add_whole_messages() -> None:
    class Shows(Asks):
        def begin(self, task: Task, talk: Talk) -> list[Message]:
            return [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]

    _, server = await converse(Shows(), "enough")
    assert roles(server.requests[0]) == [("user", "x"), ("assistant", "y")]


@pytest.mark.parametrize("settings", [{"max_turns": 0}, {"max_tokens": -1}])
def test_invalid_limits_are_refused(settings: dict[str, int]) -> None:
    with pytest.raises(EnvError):
        Asks(**settings)
