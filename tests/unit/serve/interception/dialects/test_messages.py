"""Anthropic's Messages API: requests and answers, plain and as events."""

import asyncio
from typing import Any

import msgspec
import pytest

from rollmesh.core.errors import SessionError
from rollmesh.core.types import OutputGrammar
from rollmesh.runtime.chat import ChatMessage, ToolChoice, Turn
from rollmesh.serve.interception.dialects.dialect import RequestBody
from rollmesh.serve.interception.dialects.messages import MessagesDialect, read_unit
from tests.unit.serve.interception.conftest import Event, StartAgent

PATH = "/v1/messages"
USER = {"role": "user", "content": "guess"}
TOOL = {"name": "f", "description": "d", "input_schema": {"type": "object"}}
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
ASK: dict[str, Any] = {"model": "m", "max_tokens": 64, "messages": [USER]}
ANSWERED = f"<think>so</think>I call{CALL}"


def decode(**fields: object) -> Turn:
    (turn,) = MessagesDialect().decode(RequestBody(msgspec.json.encode({**ASK, **fields}))).turns
    return turn


def read(message: object) -> list[dict[str, Any]]:
    """The chat messages of a unit, as they are rendered."""
    return [each.for_template() for each in _units(message)]


def _units(message: object) -> list[ChatMessage]:
    return read_unit(msgspec.json.encode(message), 3)


def test_the_system_text_is_the_first_unit() -> None:
    turn = decode(system=[{"type": "text", "text": "be brief", "cache_control": {"type": "x"}}])
    assert msgspec.json.decode(turn.messages_raw) == [USER]
    assert [(m.role, m.text()) for m in read_unit(turn.messages[0], 0)] == [("system", "be brief")]
    assert decode(system="").messages == []
    assert read_unit(decode(system="x").messages[0], 0)[0].text() == "x"


def test_each_tool_result_is_a_separate_message() -> None:
    content = [
        {"type": "tool_result", "tool_use_id": "a", "content": "1", "is_error": True},
        {"type": "tool_result", "tool_use_id": "b", "content": [{"type": "text", "text": "2"}]},
        {"type": "text", "text": "go on", "cache_control": {"type": "ephemeral"}},
    ]
    assert read({"role": "user", "content": content}) == [
        {"role": "tool", "content": "1", "tool_call_id": "a"},
        {"role": "tool", "content": "2", "tool_call_id": "b"},
        {"role": "user", "content": "go on"},
    ]


def test_an_assistants_blocks_are_one_message() -> None:
    content = [
        {"type": "thinking", "thinking": "hm", "signature": "x"},
        {"type": "redacted_thinking", "data": "x"},
        {"type": "text", "text": "I call"},
        {"type": "tool_use", "id": "a", "name": "f", "input": {"x": 1}},
    ]
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
    assert read({"role": "assistant", "content": content}) == [
        {
            "role": "assistant",
            "content": "I call",
            "reasoning_content": "hm",
            "tool_calls": [call],
        }
    ]


def test_images_stay_images_and_text_documents_become_text() -> None:
    source = {"type": "base64", "media_type": "image/png", "data": "aGk="}
    (message,) = _units({"role": "user", "content": [{"type": "image", "source": source}]})
    assert [image.text() for image in message.images()] == ["data:image/png;base64,aGk="]
    text = {"type": "document", "source": {"type": "text", "data": "page"}}
    assert read({"role": "user", "content": [text, "more"]})[0]["content"] == "pagemore"


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ([{"type": "document", "source": {"type": "url", "url": "x"}}], "'document'"),
        ([{"type": "image", "source": {"type": "base64", "data": "x"}}], "image"),
        ([{"type": "what"}], "'what'"),
        ({"a": 1}, "messages.3."),
    ],
)
def test_unreadable_parts_are_refused_with_their_position(content: object, why: str) -> None:
    with pytest.raises(SessionError, match=why) as caught:
        _units({"role": "user", "content": content})
    assert caught.value.status == 400


def test_every_form_of_tool_choice_is_read() -> None:
    server_tool = {"type": "web_search_20250305", "name": "web_search"}
    turn = decode(tools=[TOOL, server_tool], tool_choice={"type": "any"})
    function = {"name": "f", "description": "d", "parameters": {"type": "object"}}
    assert msgspec.json.decode(turn.tools) == [{"type": "function", "function": function}]
    assert turn.tool_choice == ToolChoice("required")
    assert turn.parallel_calls
    choice: dict[str, object] = {"type": "tool", "name": "f", "disable_parallel_tool_use": True}
    named = decode(tools=[TOOL], tool_choice=choice)
    assert named.tool_choice == ToolChoice("named", "f")
    assert not named.parallel_calls
    assert decode(tools=[TOOL], tool_choice={"type": "none"}).tool_choice == ToolChoice("none")
    assert decode(tools=[server_tool]).tools == b""


def test_sampling_fields_are_read() -> None:
    schema = {"type": "json_schema", "schema": {"type": "object"}}
    turn = decode(stop_sequences=["x", ""], top_k=5, output_config={"format": schema})
    assert (turn.sampling.max_tokens, turn.sampling.stop, turn.sampling.top_k) == (64, ("x",), 5)
    assert turn.sampling.grammar == OutputGrammar("json_schema", '{"type":"object"}')
    unread: dict[str, Any] = {"thinking": {"type": "enabled"}, "metadata": {"user_id": "u"}}
    assert decode(**unread).sampling.max_tokens == 64


async def test_a_plain_answer_has_blocks_and_usage(start_agent: StartAgent) -> None:
    agent = await start_agent(ANSWERED)
    status, answer = await agent.answer({**ASK, "tools": [TOOL]}, PATH)
    assert status == 200
    session_id = agent.opened.session_id
    thinking, text, use = answer["content"]
    assert (thinking["type"], thinking["thinking"]) == ("thinking", "so")
    assert thinking["signature"]
    assert text == {"type": "text", "text": "I call"}
    call_id = f"call_{session_id.replace('-', '_')}_0_0"
    assert use == {"type": "tool_use", "id": call_id, "name": "f", "input": {"a": 1}}
    assert (answer["id"], answer["type"]) == (f"msg_{session_id}-0", "message")
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("tool_use", None)
    num_sampled = len(agent.ids(ANSWERED + "<|im_end|>"))
    assert answer["usage"]["output_tokens"] == num_sampled
    assert answer["usage"]["input_tokens"] == len(agent.sampler.requests[0].prompt_ids)


def folded(events: list[Event]) -> dict[str, Any]:
    """Return the message that a client builds from the events."""
    assert all(name == data["type"] for name, data in events)
    assert events[0][0] == "message_start"
    assert [name for name, _ in events[-2:]] == ["message_delta", "message_stop"]
    message = events[0][1]["message"]
    for name, data in events[1:-2]:
        if name == "content_block_start":
            assert data["index"] == len(message["content"])
            message["content"].append({**data["content_block"], "json": ""})
        elif name == "content_block_delta":
            assert data["index"] == len(message["content"]) - 1, "one block at a time"
            block, delta = message["content"][-1], data["delta"]
            key = {"text_delta": "text", "thinking_delta": "thinking"}.get(delta["type"])
            if delta["type"] == "signature_delta":
                block["signature"] = delta["signature"]
            else:
                block[key or "json"] += delta["text" if key == "text" else key or "partial_json"]
        else:
            assert name == "content_block_stop"
            block = message["content"][-1]
            written = block.pop("json")
            if block["type"] == "tool_use":
                block["input"] = msgspec.json.decode(written)
    message |= events[-2][1]["delta"]
    message["usage"] = events[-2][1]["usage"]
    return dict(message)


@pytest.mark.parametrize("reply", [ANSWERED, "4", "", f"{CALL}{CALL}", "<think>only</think>"])
async def test_events_add_up_to_the_plain_answer(start_agent: StartAgent, reply: str) -> None:
    agent = await start_agent(reply, reply)
    asked = {**ASK, "tools": [TOOL]}
    whole = folded(await agent.events({**asked, "stream": True}, PATH))
    _, plain = await agent.answer(asked, PATH)
    for message in (whole, plain):
        message.pop("id")
        for block in message["content"]:
            assert block.pop("id", "x"), "calls are named"
            assert block.pop("signature", "x"), "thinking is signed"
    assert whole == plain


async def test_blocks_are_streamed_while_they_are_generated(start_agent: StartAgent) -> None:
    agent = await start_agent()
    ask = {**ASK, "tools": [TOOL], "stream": True}
    async with asyncio.TaskGroup() as group:
        opening = group.create_task(agent.post(ask, PATH).__aenter__())
        made = agent.sampler.generations
        await agent.sampler.until(lambda: len(made) == 1 and made[0].machine.num_readers > 0)
        made[0].show(*agent.ids("<think>so it"))
        response = await opening
        first_events = await response.content.readuntil(
            b'"thinking_delta","thinking":"so it"}}\n\n'
        )
        assert first_events.startswith(b"event: message_start\n")
        made[0].show(*agent.ids('</think>\n<tool_call>\n{"name": "f", "arguments": {"a"'))
        await response.content.readuntil(b'"partial_json":"{\\"a\\""}}\n\n')
        made[0].end(*agent.ids(": 1}}\n</tool_call><|im_end|>"))
        assert (await response.read()).endswith(
            b'event: message_stop\ndata: {"type":"message_stop"}\n\n'
        )
        response.release()


async def test_the_stop_reason_is_in_the_apis_terms(start_agent: StartAgent) -> None:
    agent = await start_agent("4", "go on STOP x", "too long")
    assert (await agent.answer(ASK, PATH))[1]["stop_reason"] == "end_turn"
    stopped = {**ASK, "stop_sequences": ["STOP"]}
    _, answer = await agent.answer(stopped, PATH)
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", "STOP")
    assert answer["content"] == [{"type": "text", "text": "go on"}]


async def test_tokens_are_counted_without_sampling(start_agent: StartAgent) -> None:
    agent = await start_agent("4")
    status, counted = await agent.answer({"messages": [USER]}, PATH + "/count_tokens")
    assert status == 200
    assert agent.runtime.num_calls == 0
    _, answer = await agent.answer(ASK, PATH)
    assert counted == {"input_tokens": answer["usage"]["input_tokens"]}


async def test_the_next_turn_extends_the_sampled_tokens(start_agent: StartAgent) -> None:
    agent = await start_agent(ANSWERED, "done")
    asked = {**ASK, "tools": [TOOL], "system": "be brief"}
    _, first = await agent.answer(asked, PATH)
    use = first["content"][-1]
    result = {"type": "tool_result", "tool_use_id": use["id"], "content": "4"}
    history = [USER, {"role": "assistant", "content": first["content"]}]
    history.append({"role": "user", "content": [result]})
    status, _ = await agent.answer({**asked, "messages": history}, PATH)
    assert status == 200
    before = [*agent.sampler.requests[0].prompt_ids, *agent.ids(ANSWERED + "<|im_end|>")]
    assert list(agent.sampler.requests[1].prompt_ids)[: len(before)] == before
    assert not agent.opened.session.fork_report().forks


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"),
        (401, "authentication_error"),
        (404, "not_found_error"),
        (410, "invalid_request_error"),
        (413, "request_too_large"),
        (429, "rate_limit_error"),
        (500, "api_error"),
        (503, "overloaded_error"),
    ],
)
def test_errors_have_anthropics_shape(status: int, kind: str) -> None:
    error = msgspec.json.decode(MessagesDialect().error(SessionError(status, "c", "why")))
    assert error == {"type": "error", "error": {"type": kind, "message": "why", "code": "c"}}
