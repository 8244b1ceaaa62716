"""Numbers that JSON allows, but a journal or a float cannot hold, are refused at once."""

import msgspec
import pytest

from tests.unit.serve.interception.conftest import (  # noqa: F401 - fixtures among them
    StartAgent,
    prompts,
    start_agent,
    tokenizer,
)

USER = {"role": "user", "content": "go"}
TOO_LARGE = 2**64


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [USER], "top_k": -TOO_LARGE}),
        ("/v1/chat/completions", {"messages": [USER], "max_tokens": TOO_LARGE}),
        ("/v1/completions", {"prompt": "go", "best_of": TOO_LARGE}),
        ("/v1/messages", {"messages": [USER], "max_tokens": 3, "top_k": TOO_LARGE}),
    ],
)
async def test_an_integer_that_no_journal_holds_is_refused(
    start_agent: StartAgent,  # noqa: F811 - the fixture
    path: str,
    body: dict[str, object],
) -> None:
    agent = await start_agent(always="I guess 4")
    key = {"x_api_key": agent.opened.api_key}
    status, answer = await agent.answer(body, path, **key)
    assert status == 400, answer


async def test_a_number_that_no_float_holds_is_refused(
    start_agent: StartAgent,  # noqa: F811 - the fixture
) -> None:
    agent = await start_agent(always="I guess 4")
    huge = msgspec.Raw(b"1" + b"0" * 400)
    status, answer = await agent.answer({"input": [{**USER, "content": huge}]}, "/v1/responses")
    assert (status, answer["error"]["code"]) == (400, "invalid_body")
