"""Tasks with tools: every call gets its result, and an answer without one ends the conversation."""

from collections.abc import Iterator, Sequence

import pytest

from rollmesh.core.errors import EnvError
from rollmesh.core.types import Score, Task
from rollmesh.envs.chat import ToolCall
from rollmesh.envs.env import Transcript
from rollmesh.envs.multi_turn import Prompt, Talk
from rollmesh.envs.tools import Function, ToolEnv
from rollmesh.testing.upstreams import ChatAnswer, ChatEndpoint

TASK = Task("t", {"question": "How much?"})


def double(number: int) -> int:
    """Twice the number."""
    return 2 * number


class Doubles(ToolEnv):
    def tasks(self, split: str, seed: int) -> Iterator[Task]:
        yield TASK

    def score(self, task: Task, transcript: Transcript) -> Score:
        return Score(1.0)


class Notes(Doubles):
    """A notebook for each rollout."""

    async def begin(self, task: Task, talk: Talk) -> Prompt:
        talk.held = []
        return "Write."

    def tools(self, talk: Talk) -> Sequence[Function]:
        def note(word: str) -> int:
            talk.held.append(word)
            return len(talk.held)

        return [note]

    async def finish(self, task: Task, talk: Talk) -> None:
        talk.data["notes"] = talk.held


def calling(*calls: tuple[str, str, str]) -> ChatAnswer:
    return ChatAnswer(finish_reason="tool_calls", calls=tuple(ToolCall(*each) for each in calls))


async def work(env: ToolEnv, *answers: str | ChatAnswer) -> tuple[Transcript, ChatEndpoint]:
    async with ChatEndpoint(answers) as server:
        transcript = await env.run(TASK, server.endpoint)
        await env.close()
    return transcript, server


async def test_each_call_of_an_answer_gets_its_result_in_order() -> None:
    calls = calling(("c1", "double", '{"number": 4}'), ("c2", "double", "{}"), ("c3", "half", "{}"))
    transcript, server = await work(Doubles(tools=[double]), calls, "8")
    first, second = server.requests
    assert [each["function"]["name"] for each in first.body["tools"]] == ["double"]
    question, call, *results = second.body["messages"]
    assert (question["content"], len(call["tool_calls"])) == ("How much?", 3)
    assert [(each["role"], each["tool_call_id"]) for each in results] == [
        ("tool", "c1"),
        ("tool", "c2"),
        ("tool", "c3"),
    ]
    assert results[0]["content"] == "8"
    assert all(each["content"].startswith("error: ") for each in results[1:])
    assert transcript.data["answer"] == "8"
    assert (transcript.data["num_tool_calls"], transcript.data["num_tool_errors"]) == (3, 2)
    assert not transcript.truncated


async def test_calls_at_the_turn_limit_truncate() -> None:
    again = calling(("c", "double", '{"number": 1}'))
    transcript, server = await work(Doubles(tools=[double], max_turns=2), again, again, "never")
    assert transcript.truncated
    assert len(server.requests) == 2


async def test_each_rollout_works_on_its_own_state() -> None:
    env = Notes()
    for word in ("a", "b"):
        transcript, _ = await work(env, calling(("c", "note", f'{{"word": "{word}"}}')), "done")
        assert transcript.data["notes"] == [word]


def test_a_tool_without_a_schema_is_refused_at_once() -> None:
    with pytest.raises(EnvError, match="has no type hint"):
        Doubles(tools=[untyped])


def untyped(number) -> None: ...  # type: ignore[no-untyped-def]
