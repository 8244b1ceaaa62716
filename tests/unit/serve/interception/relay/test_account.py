"""Reports of relayed sessions: samples if the engine sent enough, text for every call."""

import json
from typing import Any

import orjson
import pytest

from rollmesh.serve.interception.dialects.registry import DIALECTS
from rollmesh.serve.interception.pieces import joined
from rollmesh.serve.interception.report import SessionRewards
from rollmesh.testing.upstreams import ProviderRequest, ProviderResponse, ScriptedProvider
from tests.unit.serve.interception.relay.conftest import MakeRelay, Relay


def ask(*texts: str, **settings: Any) -> dict[str, Any]:
    roles = ["user", "assistant"]
    messages = [{"role": roles[n % 2], "content": text} for n, text in enumerate(texts)]
    return {"model": "m", "messages": messages, **settings}


def provider_answer(text: str, prompt: list[int], ids: list[int], **more: Any) -> ProviderResponse:
    """Return an answer as vLLM and SGLang send it; the log-prob of a token is minus its id over
    8.
    """
    choice = {
        "message": {"role": "assistant", "content": text},
        "finish_reason": "stop",
        "token_ids": ids,
        "logprobs": {"content": [{"logprob": -each / 8} for each in ids]},
    }
    answer = {"choices": [choice], "prompt_token_ids": prompt, **more}
    return ProviderResponse((orjson.dumps(answer),))


async def test_a_conversation_is_one_sample_in_which_each_token_trains_once(
    make_relay: MakeRelay,
) -> None:
    answers = [
        provider_answer("b", [1, 2], [3, 4], metadata={"weight_version": "7"}),
        provider_answer("d", [1, 2, 3, 4, 5], [6], metadata={"weight_version": "8"}),
        provider_answer("z", [1, 9], [2]),
    ]
    async with ScriptedProvider(answers) as provider:
        relay = await make_relay(provider)
        await relay.read(ask("a", temperature=0.5))
        await relay.read(ask("a", "b", "c", temperature=0.5))
        await relay.read(ask("other"))
    account = relay.account(session=1.0, by_node={2: 0.25})
    line, other = account["samples"]
    assert line["token_ids"] == [1, 2, 3, 4, 5, 6]
    assert line["loss_mask"] == [0, 0, 1, 1, 0, 1]
    assert line["logprobs"] == [0, 0, -3 / 8, -0.5, 0, -6 / 8]
    assert line["policy_versions"] == [-1, -1, 7, 7, -1, 8]
    assert (line["reward"], line["temperature"]) == (1.0, 0.5)
    assert (other["token_ids"], other["reward"], other["temperature"]) == ([1, 9, 2], 0.25, 1.0)
    assert [choice["lacks"] for call in account["calls"] for choice in call["choices"]] == [
        ["sampling_policy"],
        ["sampling_policy"],
        ["policy_versions", "sampling_policy"],
    ]
    [fork] = account["forks"]
    assert (fork["call"], fork["cause"], fork["message"]) == (2, "restart", 0)
    assert (account["num_calls"], account["capture"]) == (3, "relay")
    assert account["calls"][0]["settings"] == {"model": "m", "temperature": 0.5}


async def test_data_that_an_engine_does_not_return_is_named_and_the_text_is_kept(
    make_relay: MakeRelay,
) -> None:
    answers = {
        "/v1/chat/completions": {"choices": [{"message": {"content": "4"}}]},
        "/v1/completions": {"choices": [{"text": "4"}]},
        "/v1/responses": {"output": [{"type": "message", "content": []}]},
        "/v1/messages": {"type": "message", "content": [{"type": "text", "text": "4"}]},
    }

    def script(seen: ProviderRequest) -> ProviderResponse:
        return ProviderResponse((orjson.dumps(answers[seen.path]),))

    async with ScriptedProvider(script) as provider:
        relay = await make_relay(provider)
        for route in DIALECTS:
            await relay.read(ask("a"), f"/v1{route}")
    account = relay.account()
    assert account["samples"] == []
    lacks = ["prompt_token_ids", "token_ids", "logprobs", "policy_versions", "sampling_policy"]
    assert [call["choices"][0]["lacks"] for call in account["calls"]] == [lacks] * len(DIALECTS)
    assert [call["route"] for call in account["calls"]] == list(DIALECTS)
    assert account["messages"] == [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": [{"type": "text", "text": "4"}]},
    ]


async def test_failed_calls_are_in_the_report_and_do_not_train(make_relay: MakeRelay) -> None:
    answers = [
        provider_answer("b", [1], [2]),
        ProviderResponse((b"{}",), 429),
        ProviderResponse((b"{",), is_cut=True),
    ]
    async with ScriptedProvider(answers) as provider:
        relay: Relay = await make_relay(provider)
        for text in "abc":
            await relay.read(ask(text))
    account = relay.account()
    assert len(account["samples"]) == 1
    assert [(call["state"], call["status"]) for call in account["calls"]] == [
        ("whole", 200),
        ("whole", 429),
        ("cut", 200),
    ]
    assert "closed before" in account["calls"][2]["error"]
    assert account["messages"][0]["content"] == "a"
    assert relay.account() == account


ODD_SETTINGS = [
    b'"model":"\xff"',
    b'"temperature":1e999',
    b'"temperature":%b' % (b"9" * 400),
    b'"temperature":true',
    b'"temperature":"warm"',
    b'"\xff":1',
    b'"a\\"b":1',
    b'"a":%b1%b' % (b"[" * 900, b"]" * 900),
    b'"a":"\\ud800"',
]


@pytest.mark.parametrize("odd", ODD_SETTINGS)
async def test_a_session_has_a_report_whatever_its_agent_sent(
    make_relay: MakeRelay, odd: bytes
) -> None:
    async with ScriptedProvider(
        [provider_answer("b", [1], [2]), provider_answer("d", [3], [4])]
    ) as provider:
        relay = await make_relay(provider)
        assert (await relay.read(b'{"messages":[{"role":"user","content":"a"}],%b}' % odd))[
            0
        ] == 200
        assert (await relay.read(b'{"messages":[{"role":"user","content":"\xff"}]}'))[0] == 200
    account = json.loads(joined(relay.session.report().render(SessionRewards())))
    assert len(account["samples"]) == 2
    assert account["num_calls"] == 2


async def test_a_reward_names_its_call_by_number_or_by_response_id(
    make_relay: MakeRelay,
) -> None:
    answers = [
        provider_answer("b", [1], [2], id="chatcmpl-x"),
        provider_answer("d", [3], [4], id="chatcmpl-y"),
    ]
    async with ScriptedProvider(answers) as provider:
        relay: Relay = await make_relay(provider)
        await relay.read(ask("a"))
        await relay.read(ask("c"))
    session = relay.session
    assert [session.node_of(name) for name in (1, "chatcmpl-x", "chatcmpl-y")] == [1, 0, 1]
    unknown = 0
    for name in (2, -1, "chatcmpl", ""):
        try:
            session.node_of(name)
        except LookupError:
            unknown += 1
    assert unknown == 4


TOOLS = [{"name": "task", "input_schema": {}}, {"name": "read", "input_schema": {}}]
HELPER_TOOLS = [{"name": "read", "input_schema": {}}]


async def test_claude_codes_main_conversation_is_main_beside_four_busier_subagents(
    make_relay: MakeRelay,
) -> None:
    """Answers have exact tokens, as a proxy in front of vLLM adds them; this test uses those of
    chat.
    """
    seen: list[int] = []

    def script(asked: ProviderRequest) -> ProviderResponse:
        body = orjson.loads(asked.body)
        texts = [str(message["content"]) for message in body["messages"]]
        prompt = [hash(text) % 1000 for text in (str(body.get("system", ""))[-20:], *texts)]
        num_tokens = 100 if "helper" in str(body.get("system")) else 1
        seen.append(num_tokens)
        return provider_answer("b", prompt, [7] * num_tokens, id=f"r{len(seen)}")

    def settings(text: str, tools: Any) -> dict[str, Any]:
        billing = f"x-anthropic-billing-header: cch={len(seen)}\n"
        marked = [{**tool, "cache_control": {"n": len(seen)}} for tool in tools]
        return {"system": [{"type": "text", "text": billing + text}], "tools": marked}

    async with ScriptedProvider(script) as provider:
        relay = await make_relay(provider)
        await relay.read(ask("title of: fix it", **settings("a title", [])))
        await relay.read(ask("fix it", **settings("the agent", TOOLS)))
        for number in range(4):
            texts = [f"look at {number}"]
            for step in range(3):
                await relay.read(ask(*texts, **settings("a helper", HELPER_TOOLS)))
                texts += ["b", f"result {step}"]
        await relay.read(ask("what is new", **settings("the topic", [])))
        await relay.read(ask("fix it", "b", "results", **settings("the agent", TOOLS)))
        await relay.read(ask("in short: results", **settings("the agent", TOOLS)))
        await relay.read(ask("bye", **settings("the topic", [])))
    account = relay.account()
    expected = ["side", "main", *["subagent"] * 12, "side", "main", "main", "side"]
    assert [call["branch"] for call in account["calls"]] == expected
    branches = {sample["branch"] for sample in account["samples"] if len(sample["loss_mask"]) > 99}
    assert branches == {"subagent"}
    assert account["messages"] == [
        {"role": "user", "content": "in short: results"},
        {"role": "assistant", "content": "b"},
    ]


async def test_a_fork_row_shows_the_message_that_differs_with_its_calls(
    make_relay: MakeRelay,
) -> None:
    def call(argument: int) -> dict[str, Any]:
        function = {"name": "f", "arguments": f'{{"a": {argument}}}'}
        return {"role": "assistant", "tool_calls": [{"id": "c", "function": function}]}

    task, result = {"role": "user", "content": "a"}, {"role": "tool", "content": "4"}
    more = {"role": "user", "content": "more"}
    async with ScriptedProvider([provider_answer("b", [n], [n]) for n in range(4)]) as provider:
        relay = await make_relay(provider)
        for line in ([task], [task, call(1), result], [task, call(2), result, more]):
            await relay.read({"messages": line})
        await relay.read({"messages": [task, call(1), result, more]})
    [fork] = relay.account()["forks"]
    assert (fork["call"], fork["cause"], fork["message"]) == (2, "edited_history", 1)
    assert ('a\\": 1' in fork["held"], 'a\\": 2' in fork["got"]) == (True, True)
