"""OpenAI's Completions API: raw prompts in all forms, choices in order."""

from typing import Any

import msgspec
import pytest

from rollmesh.core.errors import SessionError
from rollmesh.serve.interception.dialects.completions import CompletionsDialect, read_prompts
from rollmesh.serve.interception.dialects.dialect import RequestBody
from tests.unit.serve.interception.conftest import StartAgent

PATH = "/v1/completions"


def decode(**fields: object) -> Any:
    body = msgspec.json.encode({"prompt": "x", **fields})
    return CompletionsDialect().decode(RequestBody(body)).turns


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("a", ["a"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [(1, 2)]),
        ([[1], [2, 3]], [(1,), (2, 3)]),
    ],
)
def test_a_prompt_comes_in_four_forms(prompt: object, prompts: list[object]) -> None:
    assert read_prompts(msgspec.json.encode(prompt)) == prompts


@pytest.mark.parametrize("prompt", [[], [[]], [1, "a"], [["a"]], {}, 7, [-1], ["a"] * 129])
def test_other_prompts_are_refused(prompt: object) -> None:
    with pytest.raises(SessionError, match="prompt: expected") as caught:
        read_prompts(msgspec.json.encode(prompt))
    assert caught.value.status == 400


@pytest.mark.parametrize("fields", [{"suffix": "x"}, {"best_of": 3}, {"logprobs": 21}, {"n": 0}])
def test_settings_that_cannot_be_honoured_are_refused(fields: dict[str, object]) -> None:
    with pytest.raises(SessionError):
        decode(**fields)


def test_a_batch_is_several_distinct_turns() -> None:
    turns = decode(prompt=["a", "a"], n=2, logprobs=3)
    assert [turn.prompt_text for turn in turns] == ["a", "a"]
    assert {turn.num_choices for turn in turns} == {2}
    assert {turn.num_top_logprobs for turn in turns} == {3}
    assert len({turn.digest for turn in turns}) == 2
    assert decode()[0].sampling.max_tokens == 16, "the default of OpenAI's reference"


async def test_the_next_raw_prompt_continues_the_last_one(start_agent: StartAgent) -> None:
    agent = await start_agent(" on")
    status, answer = await agent.answer({"prompt": "go", "model": "mine"}, PATH)
    assert status == 200
    assert list(agent.sampler.requests[0].prompt_ids) == agent.ids("go")
    assert answer["object"] == "text_completion"
    assert answer["id"] == f"cmpl-{agent.opened.session_id}-0"
    choice = {"index": 0, "text": " on", "logprobs": None, "finish_reason": "stop"}
    assert answer["choices"] == [choice]
    num_prompt, num_sampled = len(agent.ids("go")), len(agent.ids(" on")) + 1
    assert answer["usage"] == {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_sampled,
        "total_tokens": num_prompt + num_sampled,
    }


async def test_echo_and_logprobs_list_the_prompt_without_log_probs(start_agent: StartAgent) -> None:
    agent = await start_agent(" on")
    asked = {"prompt": agent.ids("go"), "echo": True, "logprobs": 0, "return_token_ids": True}
    _, answer = await agent.answer(asked, PATH)
    (choice,) = answer["choices"]
    assert choice["text"] == "go on"
    listed = choice["logprobs"]
    num_prompt, sampled = len(agent.ids("go")), agent.ids(" on<|im_end|>")
    assert "".join(listed["tokens"]) == "go on<|im_end|>"
    assert listed["token_logprobs"][:num_prompt] == [None] * num_prompt
    assert listed["token_logprobs"][num_prompt:] == [-0.5 - n / 64 for n in range(len(sampled))]
    assert listed["text_offset"][:2] == [0, len(listed["tokens"][0])]
    assert choice["token_ids"] == sampled
    assert choice["prompt_token_ids"] == agent.ids("go")


async def test_streamed_choices_of_a_batch_add_up_to_the_plain_ones(
    start_agent: StartAgent,
) -> None:
    replies = [" one", " two", " three", " four"]
    agent = await start_agent(*replies, *replies)
    asked = {"prompt": ["a", "b"], "n": 2, "echo": True}
    _, plain = await agent.answer(asked, PATH)
    assert [each["index"] for each in plain["choices"]] == [0, 1, 2, 3]
    assert [each["text"] for each in plain["choices"]] == ["a one", "a two", "b three", "b four"]
    stream = {**asked, "stream": True, "stream_options": {"include_usage": True}}
    events = [data for _, data in await agent.events(stream, PATH)]
    assert events[-1] is None
    assert events[-2]["choices"] == []
    assert events[-2]["usage"] == plain["usage"]
    texts, reasons = [""] * 4, [None] * 4
    for event in events[:-2]:
        (choice,) = event["choices"]
        texts[choice["index"]] += choice["text"]
        reasons[choice["index"]] = choice["finish_reason"]
    assert texts == [each["text"] for each in plain["choices"]]
    assert reasons == ["stop"] * 4
