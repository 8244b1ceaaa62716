"""Numbers that JSON holds, and a journal or a float does not, are refused at once."""

import msgspec
import pytest

from tests.unit.serve.interception.conftest import (  # noqa: F401 - fixtures among them
    MakeDesk,
    make_desk,
    prompts,
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
    make_desk: MakeDesk,  # noqa: F811 - the fixture
    path: str,
    body: dict[str, object],
) -> None:
    desk = await make_desk(always="I guess 4")
    key = {"x_api_key": desk.opened.api_key}
    status, answer = await desk.answer(body, path, **key)
    assert status == 400, answer


async def test_a_number_that_no_float_holds_is_refused(
    make_desk: MakeDesk,  # noqa: F811 - the fixture
) -> None:
    desk = await make_desk(always="I guess 4")
    huge = msgspec.Raw(b"1" + b"0" * 400)
    status, answer = await desk.answer({"input": [{**USER, "content": huge}]}, "/v1/responses")
    assert (status, answer["error"]["code"]) == (400, "invalid_body")
