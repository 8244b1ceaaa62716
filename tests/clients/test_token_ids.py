"""The tokens of an answer, for clients such as Terminus 2, are the tokens of its samples.

Terminus sends `logprobs`, `return_token_ids` and a `session_id`, and trains on the answers.
"""

from collections.abc import AsyncIterator
from typing import Any, NamedTuple

import openai
import pytest
import pytest_asyncio

from tests.clients.drivers.openai_sdk import FUNCTION
from tests.clients.gateway import Opened
from tests.clients.script import COMMANDS, task
from tests.clients.tasks import Deployment, open_deployment

pytestmark = pytest.mark.asyncio(loop_scope="module")

TOOLS: Any = [{"type": "function", "function": FUNCTION}]
ASKED: Any = {
    "model": "policy",
    "tools": TOOLS,
    "logprobs": True,
    "extra_body": {"return_token_ids": True, "session_id": "terminus"},
}
RESULTS = ("notes.txt", "zebra", "closed")


class AnswerTokens(NamedTuple):
    """The token fields of one answer."""

    prompt_ids: list[int]
    token_ids: list[int]
    logprobs: list[float]
    message: dict[str, Any]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def deployment(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Deployment]:
    async with open_deployment(tmp_path_factory.mktemp("stage"), task()) as deployment:
        yield deployment


async def ask_plain(client: openai.AsyncOpenAI, messages: list[Any]) -> AnswerTokens:
    answer: Any = await client.chat.completions.create(messages=messages, **ASKED)
    choice = answer.choices[0]
    return AnswerTokens(
        answer.prompt_token_ids,
        choice.token_ids,
        [entry.logprob for entry in choice.logprobs.content],
        choice.message.model_dump(exclude_none=True),
    )


async def ask_streaming(client: openai.AsyncOpenAI, messages: list[Any]) -> AnswerTokens:
    prompt_ids: list[int] = []
    token_ids: list[int] = []
    logprobs: list[float] = []
    async with client.chat.completions.stream(messages=messages, **ASKED) as events:
        async for event in events:
            if event.type != "chunk":
                continue
            chunk: Any = event.chunk
            prompt_ids = getattr(chunk, "prompt_token_ids", None) or prompt_ids
            for choice in chunk.choices:
                token_ids += getattr(choice, "token_ids", None) or []
                logprobs += [entry.logprob for entry in (choice.logprobs or NOTHING).content or []]
        message = (await events.get_final_completion()).choices[0].message
    return AnswerTokens(prompt_ids, token_ids, logprobs, message.model_dump(exclude_none=True))


class NOTHING:
    """Log-probs of a chunk without any."""

    content: list[Any] | None = None


async def converse(opened: Opened, stream: bool) -> list[AnswerTokens]:
    """The task's three turns, with results that the test invents."""
    messages: list[Any] = [{"role": "user", "content": "Which word?"}]
    answers: list[AnswerTokens] = []
    async with openai.AsyncOpenAI(base_url=opened.base_url, api_key=opened.api_key) as client:
        while not answers or answers[-1].message.get("tool_calls"):
            answers.append(await (ask_streaming if stream else ask_plain)(client, messages))
            messages.append(answers[-1].message)
            for call, result in zip(
                answers[-1].message.get("tool_calls", ()), RESULTS, strict=False
            ):
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
    return answers


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
async def test_an_answer_has_the_tokens_of_its_sample(deployment: Deployment, stream: bool) -> None:
    opened = await deployment.gateway.open()
    answers = await converse(opened, stream)
    (sample,) = (await deployment.gateway.finish(opened))["samples"]
    assert len(answers) == len(COMMANDS)
    for turn in answers:
        begin, end = len(turn.prompt_ids), len(turn.prompt_ids) + len(turn.token_ids)
        assert sample["token_ids"][:end] == turn.prompt_ids + turn.token_ids
        assert sample["logprobs"][begin:end] == turn.logprobs
        assert all(sample["loss_mask"][begin:end])
    assert sum(map(bool, sample["loss_mask"])) == sum(len(turn.token_ids) for turn in answers)
