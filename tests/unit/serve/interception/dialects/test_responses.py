"""OpenAI's Responses API: requests and answers, plain and as a chain of events."""

import asyncio
from typing import Any

import msgspec
import pytest

from rollmesh.core.errors import SessionError
from rollmesh.core.types import OutputGrammar
from rollmesh.runtime.chat import Turn
from rollmesh.serve.interception.dialects.dialect import RequestBody
from rollmesh.serve.interception.dialects.responses import ResponsesDialect, read_unit
from tests.unit.serve.interception.conftest import Event, StartAgent, read_events

PATH = "/v1/responses"
TOOL = {"type": "function", "name": "f", "description": "d", "parameters": {"type": "object"}}
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
ASK: dict[str, Any] = {"model": "m", "input": "guess"}
ANSWERED = f"<think>so</think>I call{CALL}"


def decode(**fields: object) -> Turn:
    (turn,) = ResponsesDialect().decode(RequestBody(msgspec.json.encode({**ASK, **fields}))).turns
    return turn


def read(turn: Turn) -> list[dict[str, Any]]:
    """The chat messages of a request, as they are rendered."""
    units = [read_unit(raw, n) for n, raw in enumerate(turn.messages)]
    return [message.for_template() for unit in units for message in unit]


def test_a_text_is_a_user_message_and_instructions_come_first() -> None:
    assert read(decode(instructions="be brief")) == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "guess"},
    ]


def test_a_resend_is_recognised_for_any_order_of_its_client_metadata() -> None:
    # codex changes their order each time, and sends a turn up to six times.
    first = decode(client_metadata={"turn_id": "t", "window": 0})
    assert decode(client_metadata={"window": 0, "turn_id": "t"}).digest == first.digest
    assert decode(client_metadata={"turn_id": "t"}, input="other").digest != first.digest


def test_the_items_of_a_turn_are_one_message() -> None:
    items = [
        {"type": "message", "role": "developer", "id": "x", "content": "be brief"},
        {"role": "user", "content": [{"type": "input_text", "text": "guess"}]},
        {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "x", "text": "hm"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I"}]},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": '{"a": 1}'},
        {"type": "web_search_call", "id": "w"},
        {"type": "custom_tool_call", "call_id": "d", "name": "g", "input": "x"},
        {"type": "function_call_output", "call_id": "c", "output": "1"},
        {
            "type": "custom_tool_call_output",
            "call_id": "d",
            "output": [{"type": "input_text", "text": "2"}],
        },
    ]
    turn = decode(input=items)
    assert len(turn.messages) == 5

    def call(name: str, call_id: str, arguments: object) -> dict[str, Any]:
        function = {"name": name, "arguments": arguments}
        return {"id": call_id, "type": "function", "function": function}

    assert read(turn) == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "guess"},
        {
            "role": "assistant",
            "content": "I",
            "reasoning_content": "hm",
            "tool_calls": [call("f", "c", {"a": 1}), call("g", "d", {"input": "x"})],
        },
        {"role": "tool", "content": "1", "tool_call_id": "c"},
        {"role": "tool", "content": "2", "tool_call_id": "d"},
    ]


def test_images_are_images() -> None:
    url = "data:image/png;base64,aGk="
    parts = [{"type": "input_image", "image_url": url}, {"type": "input_text", "text": "?"}]
    (unit,) = decode(input=[{"role": "user", "content": parts}]).messages
    (message,) = read_unit(unit, 0)
    assert [image.text() for image in message.images()] == ["data:image/png;base64,aGk="]
    assert message.text() == "?"


def test_the_bytes_of_a_unit_do_not_change_as_the_history_grows() -> None:
    history = [
        {"role": "user", "content": "a"},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "1"},
    ]
    grown = [*history, {"role": "user", "content": "b"}]
    assert decode(input=grown).messages[:3] == decode(input=history).messages


@pytest.mark.parametrize(
    ("item", "why"),
    [
        ({"type": "mystery"}, "'mystery'"),
        ({"role": "user", "content": [{"type": "input_file"}]}, "'input_file'"),
        ({"role": "king", "content": "x"}, "king"),
        ({"role": "user", "content": [7]}, "must be objects"),
    ],
)
def test_unreadable_items_are_refused_with_their_position(item: object, why: str) -> None:
    with pytest.raises(SessionError, match=why) as caught:
        read(decode(input=[item]))
    assert caught.value.status == 400
    assert "0]" in str(caught.value)


@pytest.mark.parametrize("body", [{"input": []}, {"input": 7}, {"input": [7]}, {}])
def test_a_body_without_input_is_refused(body: object) -> None:
    with pytest.raises(SessionError):
        ResponsesDialect().decode(RequestBody(msgspec.json.encode(body)))


def test_tools_that_only_openais_servers_have_are_omitted() -> None:
    others: list[object] = [{"type": "web_search"}, {"type": "namespace", "name": "n", "tools": []}]
    function = {"name": "f", "description": "d", "parameters": {"type": "object"}}
    assert msgspec.json.decode(decode(tools=[*others, TOOL]).tools) == [
        {"type": "function", "function": function}
    ]
    assert decode(tools=others).tools == b""
    named = decode(tools=[TOOL], tool_choice={"type": "function", "name": "f"})
    assert (named.tool_choice.kind, named.tool_choice.name) == ("named", "f")


def test_formats_become_grammars_and_the_previous_response_is_named() -> None:
    form = {"type": "json_schema", "name": "n", "schema": {"type": "object"}}
    turn = decode(text={"format": form}, previous_response_id="resp_s-3", max_output_tokens=9)
    assert turn.sampling.grammar == OutputGrammar("json_schema", '{"type":"object"}')
    assert turn.previous_reply == "s-3"
    assert turn.sampling.max_tokens == 9
    assert decode(text={"format": {"type": "text"}, "verbosity": "low"}).sampling.grammar is None


async def test_a_plain_response_has_items_and_usage(start_agent: StartAgent) -> None:
    agent = await start_agent(ANSWERED)
    include = ["reasoning.encrypted_content"]
    asked = {**ASK, "tools": [TOOL], "instructions": "be brief", "include": include}
    status, answer = await agent.answer(asked, PATH)
    assert status == 200
    head = f"{agent.opened.session_id}-0"
    reasoning, message, call = answer["output"]
    assert reasoning["summary"] == [{"type": "summary_text", "text": "so"}]
    assert reasoning["encrypted_content"]
    (part,) = message["content"]
    assert (message["role"], part["type"], part["text"]) == ("assistant", "output_text", "I call")
    call_id = f"call_{head.replace('-', '_')}_0"
    assert (call["call_id"], call["name"], call["arguments"]) == (call_id, "f", '{"a": 1}')
    assert {item["status"] for item in (message, call)} == {"completed"}
    assert len({item["id"] for item in answer["output"]}) == 3
    assert (answer["id"], answer["status"], answer["error"]) == (f"resp_{head}", "completed", None)
    assert answer["tools"] == [TOOL]
    usage = answer["usage"]
    assert usage["input_tokens"] == len(agent.sampler.requests[0].prompt_ids)
    assert usage["output_tokens"] == len(agent.ids(ANSWERED + "<|im_end|>"))
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]


def folded(events: list[Event]) -> dict[str, Any]:
    """Return the response that a client builds from the events; check their sequence."""
    assert all(name == data["type"] for name, data in events)
    assert [data["sequence_number"] for _, data in events] == list(range(len(events)))
    assert [name for name, _ in events[:2]] == ["response.created", "response.in_progress"]
    output: list[Any] = []
    texts: list[str] = []
    for name, data in events[2:-1]:
        kind = name.removeprefix("response.")
        if kind == "output_item.added":
            assert data["output_index"] == len(output)
            output.append(data["item"])
            texts.append("")
        elif kind.endswith(".delta"):
            assert data["item_id"] == output[-1]["id"]
            texts[data["output_index"]] += data["delta"]
        elif kind == "output_item.done":
            assert data["item"]["id"] == output[-1]["id"]
            output[-1] = data["item"]
        elif kind in ("output_text.done", "reasoning_summary_text.done"):
            assert data["text"] == texts[-1]
        elif kind == "function_call_arguments.done":
            assert data["arguments"] == texts[-1]
        else:
            assert kind.startswith(("content_part.", "reasoning_summary_part."))
    response = events[-1][1]["response"]
    assert response["output"] == output
    assert {events[0][1]["response"]["id"], events[1][1]["response"]["id"]} == {response["id"]}
    assert events[-1][0] == f"response.{response['status']}"
    return dict(response)


@pytest.mark.parametrize("reply", [ANSWERED, "4", "", f"{CALL}{CALL}", "<think>only</think>"])
async def test_events_add_up_to_the_plain_response(start_agent: StartAgent, reply: str) -> None:
    agent = await start_agent(reply, reply)
    asked = {**ASK, "tools": [TOOL]}
    whole = folded(await agent.events({**asked, "stream": True}, PATH))
    _, plain = await agent.answer(asked, PATH)
    for response in (whole, plain):
        assert response.pop("id")
        for item in response["output"]:
            assert item.pop("id")
            item.pop("call_id", None)
    assert whole == plain


async def test_a_cut_response_is_incomplete(start_agent: StartAgent) -> None:
    agent = await start_agent()
    async with asyncio.TaskGroup() as group:
        waiting = group.create_task(agent.events({**ASK, "stream": True}, PATH))
        made = agent.sampler.generations
        await agent.sampler.until(lambda: len(made) == 1 and made[0].machine.num_readers > 0)
        made[0].end(*agent.ids("too lo"), reason="length")
    response = folded(waiting.result())
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}
    assert response["output"][0]["status"] == "incomplete"


async def test_parts_are_streamed_while_they_are_generated(start_agent: StartAgent) -> None:
    agent = await start_agent()
    ask = {**ASK, "tools": [TOOL], "stream": True}
    async with asyncio.TaskGroup() as group:
        opening = group.create_task(agent.post(ask, PATH).__aenter__())
        made = agent.sampler.generations
        await agent.sampler.until(lambda: len(made) == 1 and made[0].machine.num_readers > 0)
        made[0].show(*agent.ids("<think>so it"))
        response = await opening
        await response.content.readuntil(b'"delta":"so it","summary_index":0}\n\n')
        made[0].show(*agent.ids('</think>\n<tool_call>\n{"name": "f", "arguments": {"a"'))
        await response.content.readuntil(b'"delta":"{\\"a\\""}\n\n')
        made[0].end(*agent.ids(": 1}}\n</tool_call><|im_end|>"))
        assert b"event: response.completed\n" in await response.read()
        response.release()


async def test_a_failure_after_the_first_byte_fails_the_response(start_agent: StartAgent) -> None:
    agent = await start_agent()
    async with asyncio.TaskGroup() as group:
        opening = group.create_task(agent.post({**ASK, "stream": True}, PATH).__aenter__())
        made = agent.sampler.generations
        await agent.sampler.until(lambda: len(made) == 1 and made[0].machine.num_readers > 0)
        made[0].show(*agent.ids("I"))
        response = await opening
        raw = await response.content.readuntil(b"output_text.delta")
        agent.opened.session.seal("the rollout ended")
        events = read_events(raw + await response.read())
        response.release()
    (_, error), (name, failed) = events[-2:]
    assert (error["type"], error["code"]) == ("error", "session_sealed")
    assert name == "response.failed"
    assert failed["response"]["error"]["code"] == "session_sealed"
    assert failed["response"]["id"] == events[0][1]["response"]["id"]


async def test_a_response_is_continued_by_its_id(start_agent: StartAgent) -> None:
    agent = await start_agent("4", "5")
    _, first = await agent.answer({**ASK, "instructions": "be brief"}, PATH)
    more = {"input": "and now?", "previous_response_id": first["id"]}
    status, second = await agent.answer({**ASK, **more}, PATH)
    assert status == 200
    assert second["previous_response_id"] == first["id"]
    before = [*agent.sampler.requests[0].prompt_ids, *agent.ids("4<|im_end|>")]
    assert list(agent.sampler.requests[1].prompt_ids)[: len(before)] == before
    unknown = {**ASK, "previous_response_id": "resp_none"}
    status, answer = await agent.answer(unknown, PATH)
    assert (status, answer["error"]["code"]) == (400, "previous_response_not_found")


async def test_the_next_turn_extends_the_sampled_tokens(start_agent: StartAgent) -> None:
    agent = await start_agent(ANSWERED, "done", "more")
    asked = {**ASK, "tools": [TOOL], "instructions": "be brief"}
    _, first = await agent.answer(asked, PATH)
    call_id = first["output"][-1]["call_id"]
    result = {"type": "function_call_output", "call_id": call_id, "output": "4"}
    history = [{"role": "user", "content": "guess"}, *first["output"], result]
    status, second = await agent.answer({**asked, "input": history}, PATH)
    assert status == 200
    before = [*agent.sampler.requests[0].prompt_ids, *agent.ids(ANSWERED + "<|im_end|>")]
    assert list(agent.sampler.requests[1].prompt_ids)[: len(before)] == before
    more = {**asked, "input": "and now?", "previous_response_id": second["id"]}
    assert (await agent.answer(more, PATH))[0] == 200
    before = [*agent.sampler.requests[1].prompt_ids, *agent.ids("done<|im_end|>")]
    assert list(agent.sampler.requests[2].prompt_ids)[: len(before)] == before
    assert agent.opened.session.fork_report().forks == []


def named(item: dict[str, Any]) -> dict[str, Any]:
    return {"type": "item_reference", "id": item["id"]}


TWO_CALLS = f"<think>so</think>I call{CALL}{CALL.replace('1', '2')}"
LATE_TEXT = f"{CALL}and so{CALL.replace('1', '2')}"


@pytest.mark.parametrize(
    "reply", [ANSWERED, TWO_CALLS, LATE_TEXT, CALL, "only text", f"I call{CALL}"]
)
@pytest.mark.parametrize("is_stream", [False, True])
async def test_items_referenced_by_id_are_those_that_were_returned(
    start_agent: StartAgent, reply: str, is_stream: bool
) -> None:
    """Reference all items of the model by id, as Vercel's AI SDK 6 does in its second step."""
    agent = await start_agent(reply, "done")
    asked = {**ASK, "tools": [TOOL], "store": True, "stream": is_stream}
    task = {"role": "user", "content": [{"type": "input_text", "text": "guess"}]}
    asked["input"] = [{"role": "system", "content": "be brief"}, task]
    if is_stream:
        _, last = (await agent.events(asked, PATH))[-1]
        output = last["response"]["output"]
    else:
        output = (await agent.answer(asked, PATH))[1]["output"]
    results = [
        {"type": "function_call_output", "call_id": item["call_id"], "output": "4"}
        for item in output
        if item["type"] == "function_call"
    ] or [{"role": "user", "content": "more"}]
    history = [*asked["input"], *map(named, output), *results]
    status, _ = await agent.answer({**asked, "input": history, "stream": False}, PATH)
    assert status == 200
    before = [*agent.sampler.requests[0].prompt_ids, *agent.ids(reply + "<|im_end|>")]
    assert list(agent.sampler.requests[1].prompt_ids)[: len(before)] == before
    assert agent.opened.session.fork_report().forks == []
    assert agent.opened.session.fork_report().healed == {}


async def test_each_call_can_be_referenced_alone(start_agent: StartAgent) -> None:
    agent = await start_agent(TWO_CALLS, "done")
    _, first = await agent.answer({**ASK, "tools": [TOOL]}, PATH)
    second_call = first["output"][-1]
    result = {"type": "function_call_output", "call_id": second_call["call_id"], "output": "4"}
    history = [{"role": "user", "content": "guess"}, {"id": second_call["id"]}, result]
    status, _ = await agent.answer({**ASK, "tools": [TOOL], "input": history}, PATH)
    assert status == 200
    asked = agent.tokenizer.decode(list(agent.sampler.requests[1].prompt_ids))
    assert '"a": 2' in asked
    assert '"a": 1' not in asked


async def test_an_unknown_item_id_is_a_clear_400(
    start_agent: StartAgent,
) -> None:
    agent = await start_agent("4")
    _, first = await agent.answer(ASK, PATH)
    known = first["output"][0]["id"]
    reply = first["id"].removeprefix("resp_")
    others = [f"fc_{reply}_0", f"rs_{reply}_0", f"msg_{reply}9_0", "msg_s0-0_0", "x", known + "x"]
    for name in others:
        history = [{"role": "user", "content": "a"}, {"type": "item_reference", "id": name}]
        status, answer = await agent.answer({**ASK, "input": history}, PATH)
        assert (status, answer["error"]["code"]) == (400, "item_not_found")
        assert repr(name) in answer["error"]["message"]
    assert len(agent.sampler.requests) == 1
