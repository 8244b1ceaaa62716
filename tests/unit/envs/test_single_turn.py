"""One question and one answer: the prompt, and the reward of an answer."""

from collections.abc import Iterator

import pytest

from rollmesh.core.types import Score, Task
from rollmesh.envs.multi_turn import SingleTurnEnv
from rollmesh.testing.upstreams import ChatAnswer, ChatEndpoint

TASK = Task("t", {"question": "2 + 2?"})


class Plain(SingleTurnEnv):
    def tasks(self, split: str, seed: int) -> Iterator[Task]:
        yield TASK

    def grade(self, task: Task, answer: str) -> float | Score:
        return float(answer == "4")


class GradesAsync(Plain):
    async def grade(self, task: Task, answer: str) -> Score:  # type: ignore[override]
        return Score(0.5, {"num_chars": float(len(answer))})


async def answer(env: SingleTurnEnv, reply: str | ChatAnswer) -> tuple[Score, bool, int]:
    async with ChatEndpoint([reply, reply]) as server:
        transcript = await env.run(TASK, server.endpoint)
        await env.close()
    return await env.score(TASK, transcript), transcript.truncated, len(server.requests)


async def test_one_answer_is_asked_for_and_graded() -> None:
    assert await answer(Plain(), "4") == (Score(1.0), False, 1)
    assert await answer(Plain(), "5") == (Score(0.0), False, 1)


async def test_grade_may_be_a_coroutine_that_returns_a_score() -> None:
    assert await answer(GradesAsync(), "four") == (Score(0.5, {"num_chars": 4.0}), False, 1)


@pytest.mark.parametrize(("reason", "is_truncated"), [("length", True), ("stop", False)])
async def test_a_cut_answer_is_graded_and_truncated(reason: str, is_truncated: bool) -> None:
    found = await answer(Plain(), ChatAnswer("4", finish_reason=reason))
    assert found == (Score(1.0), is_truncated, 1)
