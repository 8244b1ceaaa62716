"""The chat dialect: accepted requests, refusals, and optional fields of answers."""

from typing import Any

import msgspec
import pytest

from rollmesh.core.errors import SessionError
from rollmesh.core.types import OutputGrammar
from rollmesh.runtime.chat import ToolChoice
from rollmesh.serve.interception.dialects.chat import ChatDialect
from rollmesh.serve.interception.dialects.dialect import RequestBody
from rollmesh.serve.interception.dialects.token_listing import TokenListing
from tests.unit.serve.interception.conftest import StartAgent

USER = {"role": "user", "content": "guess"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'


def decode(**fields: object) -> Any:
    body = msgspec.json.encode({"messages": [USER], **fields})
    (turn,) = ChatDialect().decode(RequestBody(body)).turns
    return turn


def test_sampling_fields_are_read_under_all_their_names() -> None:
    turn = decode(max_tokens=5, max_completion_tokens=7, stop="x", temperature=0, seed=2**70)
    assert turn.sampling.max_tokens == 7
    assert turn.sampling.stop == ("x",)
    assert turn.sampling.temperature == 0
    assert 0 <= turn.sampling.seed < 2**63
    assert decode(stop=["a", ""]).sampling.stop == ("a",)


def test_nulls_and_unknown_keys_are_accepted() -> None:
    turn = decode(tools=None, stop=None, stream=None, n=None, store=False, session_id="x", user=[])
    assert turn.tools == b""
    assert not turn.stream
    assert decode(tools=[]).tools == b""


def test_tool_choice_none_forbids_calls() -> None:
    assert decode(tools=[TOOL]).reads_calls
    assert not decode(tools=[TOOL], tool_choice="none").reads_calls


@pytest.mark.parametrize(
    ("choice", "meant"),
    [
        ("auto", ToolChoice()),
        ("none", ToolChoice("none")),
        ("required", ToolChoice("required")),
        ({"type": "function", "function": {"name": "f"}}, ToolChoice("named", "f")),
        ({"type": "allowed_tools", "allowed_tools": {"mode": "required"}}, ToolChoice("required")),
        (None, ToolChoice()),
    ],
)
def test_every_form_of_tool_choice_is_read(choice: object, meant: ToolChoice) -> None:
    assert decode(tools=[TOOL], tool_choice=choice).tool_choice == meant


def test_deprecated_functions_are_tools_and_a_call_ends_the_turn() -> None:
    turn = decode(functions=[TOOL["function"]], function_call={"name": "f"})
    assert msgspec.json.decode(turn.tools) == [TOOL]
    assert turn.tool_choice == ToolChoice("named", "f")
    assert not turn.parallel_calls
    assert decode(functions=[TOOL["function"]], function_call="none").tool_choice.kind == "none"


@pytest.mark.parametrize(
    ("fields", "grammar"),
    [
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, ("json_schema", '{"type": "object"}')),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"a": 1}}}},
            ("json_schema", '{"a":1}'),
        ),
        ({"guided_json": {"a": 1}}, ("json_schema", '{"a":1}')),
        ({"guided_json": '{"a": 1}'}, ("json_schema", '{"a": 1}')),
        ({"json_schema": '{"a": 1}'}, ("json_schema", '{"a": 1}')),
        ({"guided_json": {"maximum": 10**30}}, ("json_schema", f'{{"maximum":{10**30}}}')),
        ({"regex": "a+"}, ("regex", "a+")),
        ({"guided_regex": "a+"}, ("regex", "a+")),
        ({"guided_choice": ["a.b", "c"]}, ("regex", "(a\\.b|c)")),
        ({"ebnf": "root ::= a"}, ("ebnf", "root ::= a")),
        ({"guided_grammar": "root ::= a"}, ("ebnf", "root ::= a")),
        ({"structured_outputs": {"regex": "a+"}}, ("regex", "a+")),
    ],
)
def test_every_constraint_becomes_a_grammar(
    fields: dict[str, object], grammar: tuple[Any, str] | None
) -> None:
    assert decode(**fields).sampling.grammar == (
        None if grammar is None else OutputGrammar(*grammar)
    )


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"top_logprobs": 21, "logprobs": True}, "top_logprobs"),
        ({"response_format": {"type": "json_schema"}}, "schema: expected a JSON schema"),
        ({"response_format": {"type": "xml"}}, "response_format: 'xml'"),
        ({"regex": "a", "ebnf": "b"}, "more than one constraint"),
        ({"temperature": -1}, "temperature"),
        ({"messages": []}, "messages"),
        ({"tool_choice": "required"}, "tool_choice: a call is required"),
        ({"tools": [TOOL], "tool_choice": {"function": {"name": "g"}}}, "'g' is not among"),
        ({"tools": [TOOL], "tool_choice": "perhaps"}, "'perhaps' is not supported"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"guided_json": "{"}, "guided_json: expected a JSON schema"),
    ],
)
def test_settings_that_cannot_be_honoured_are_refused(fields: dict[str, object], why: str) -> None:
    with pytest.raises(SessionError, match=why) as caught:
        decode(**fields)
    assert caught.value.status == 400


async def test_tool_calls_are_complete_with_stable_ids(start_agent: StartAgent) -> None:
    agent = await start_agent(f"I call {CALL}{CALL}")
    _, answer = await agent.answer({"messages": [USER], "tools": [TOOL], "model": "mine"})
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == "I call"
    calls = choice["message"]["tool_calls"]
    assert [call["function"] for call in calls] == [{"name": "f", "arguments": '{"a": 1}'}] * 2
    session_id = agent.opened.session_id
    assert [call["id"] for call in calls] == [f"call_{session_id}_0_{n}" for n in range(2)]
    assert answer["id"] == f"chatcmpl-{session_id}-0"
    assert answer["model"] == "mine"


async def test_streamed_tool_calls_are_indexed(start_agent: StartAgent) -> None:
    agent = await start_agent(CALL + CALL)
    async with agent.post({"messages": [USER], "tools": [TOOL], "stream": True}) as response:
        lines = (await response.read()).split(b"\n\n")
    choices = [msgspec.json.decode(line[6:])["choices"][0] for line in lines[:-2]]
    assert choices[-1]["finish_reason"] == "tool_calls"
    pieces = [piece for each in choices for piece in each["delta"].get("tool_calls", [])]
    texts = {0: "", 1: ""}
    for piece in pieces:
        texts[piece["index"]] += piece["function"]["arguments"]
    assert texts == {0: '{"a": 1}', 1: '{"a": 1}'}
    named = [piece for piece in pieces if "id" in piece]
    assert [(p["function"]["name"], p["type"]) for p in named] == [("f", "function")] * 2
    assert len({piece["id"] for piece in named}) == 2


async def test_every_chunk_has_the_fields_that_clients_require(start_agent: StartAgent) -> None:
    agent = await start_agent(f"<think>so</think>I call {CALL}{CALL}")
    asked = {"messages": [USER], "tools": [TOOL], "stream": True}
    *chunks, done = [data for _, data in await agent.events(asked)]
    assert done is None
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in chunks}) == 1
    assert all(len(chunk["choices"]) == 1 for chunk in chunks), "no chunk with unrequested usage"
    choices = [chunk["choices"][0] for chunk in chunks]
    assert {choice["index"] for choice in choices} == {0}
    assert [c["finish_reason"] for c in choices] == [None] * (len(choices) - 1) + ["tool_calls"]
    assert [c["delta"].get("role") for c in choices] == ["assistant"] + [None] * (len(choices) - 1)
    text = "".join(choice["delta"].get("content") or "" for choice in choices)
    reasoning = "".join(choice["delta"].get("reasoning_content", "") for choice in choices)
    assert (text, reasoning) == ("I call", "so")


async def test_a_deprecated_function_call_is_recognised_in_the_next_request(
    start_agent: StartAgent,
) -> None:
    agent = await start_agent(CALL, "done")
    asked = {"messages": [USER], "functions": [TOOL["function"]]}
    _, first = await agent.answer(asked)
    result = {"role": "function", "name": "f", "content": "4"}
    history = [USER, first["choices"][0]["message"], result]
    status, _ = await agent.answer({**asked, "messages": history})
    assert status == 200
    before = [*agent.sampler.requests[0].prompt_ids, *agent.ids(CALL + "<|im_end|>")]
    assert list(agent.sampler.requests[1].prompt_ids)[: len(before)] == before


async def test_deprecated_functions_are_answered_with_a_function_call(
    start_agent: StartAgent,
) -> None:
    agent = await start_agent(CALL, CALL)
    asked = {"messages": [USER], "functions": [TOOL["function"]]}
    _, answer = await agent.answer(asked)
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == "function_call"
    assert choice["message"]["function_call"] == {"name": "f", "arguments": '{"a": 1}'}
    async with agent.post({**asked, "stream": True}) as response:
        lines = (await response.read()).split(b"\n\n")
    choices = [msgspec.json.decode(line[6:])["choices"][0] for line in lines[:-2]]
    calls = [each["delta"].get("function_call", {}) for each in choices]
    assert "".join(call.get("arguments", "") for call in calls) == '{"a": 1}'
    assert [call["name"] for call in calls if "name" in call] == ["f"]


async def test_token_ids_and_logprobs_are_returned_on_request(start_agent: StartAgent) -> None:
    agent = await start_agent("I guess 4", "I guess 4")
    asked = {"messages": [USER], "logprobs": True, "return_token_ids": True}
    _, answer = await agent.answer(asked)
    (choice,) = answer["choices"]
    ids = agent.ids("I guess 4<|im_end|>")
    assert choice["token_ids"] == ids
    assert answer["prompt_token_ids"] == list(agent.sampler.requests[0].prompt_ids)
    content = choice["logprobs"]["content"]
    assert "".join(token["token"] for token in content) == "I guess 4<|im_end|>"
    assert [token["logprob"] for token in content] == [-0.5 - n / 64 for n in range(len(ids))]
    async with agent.post({**asked, "stream": True}) as response:
        lines = (await response.read()).split(b"\n\n")
    chunks = [msgspec.json.decode(line[6:])["choices"][0] for line in lines[:-2]]
    assert [i for chunk in chunks for i in chunk["token_ids"]] == ids
    streamed = [token for chunk in chunks for token in chunk["logprobs"]["content"]]
    assert streamed == content


async def test_token_ids_and_logprobs_are_absent_without_request(start_agent: StartAgent) -> None:
    agent = await start_agent("4")
    _, answer = await agent.answer({"messages": [USER]})
    assert "prompt_token_ids" not in answer
    assert answer["choices"][0]["logprobs"] is None
    assert "token_ids" not in answer["choices"][0]


PIECES = {1: b"a", 2: "\u00e9".encode()[:1], 3: b'"'}


def rows(*args: object) -> list[dict[str, object]]:
    found: list[dict[str, object]] = msgspec.json.decode(TokenListing().rows(*args))  # type: ignore[arg-type] # spelled out by the tests
    return found


def test_a_token_that_is_part_of_a_character_has_its_true_bytes() -> None:
    (row,) = rows(PIECES.__getitem__, [2], [-0.25], ())
    assert row == {"token": "\ufffd", "logprob": -0.25, "bytes": [0xC3], "top_logprobs": []}


def test_alternatives_are_listed_token_by_token() -> None:
    tops = [[(-0.5, 1), (-1.5, 3)], []]
    first, second = rows(PIECES.__getitem__, [1, 3], [-0.5, -2.0], tops)
    assert first["top_logprobs"] == [
        {"token": "a", "logprob": -0.5, "bytes": [97]},
        {"token": '"', "logprob": -1.5, "bytes": [34]},
    ]
    assert (second["token"], second["top_logprobs"]) == ('"', [])


def test_no_tokens_are_an_empty_list() -> None:
    assert rows(PIECES.__getitem__, [], [], ()) == []
