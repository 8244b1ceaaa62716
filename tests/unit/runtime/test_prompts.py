"""Prompts extend what was sampled, token for token."""

import msgspec
import pytest

from rollmesh.runtime.prompts import Chat, Prompts
from rollmesh.runtime.tokenizer import Tokenizer
from rollmesh.runtime.turns import read_message

TOOLS = b'[{"type":"function","function":{"name":"f","parameters":{}}}]'


def chat(*messages: dict[str, object], tools: bytes = b"") -> Chat:
    raws = [msgspec.json.encode(message) for message in messages]
    return Chat(raws, [read_message(raw, n) for n, raw in enumerate(raws)], tools)


USER: dict[str, object] = {"role": "user", "content": "guess"}
MORE: dict[str, object] = {"role": "user", "content": "higher"}


@pytest.mark.parametrize("which", ["prompts", "template_prompts"])
@pytest.mark.parametrize("tools", [b"", TOOLS])
def test_an_extension_gives_what_rendering_all_would_give(
    which: str, tools: bytes, tokenizer: Tokenizer, request: pytest.FixtureRequest
) -> None:
    prompts: Prompts = request.getfixturevalue(which)
    said = tokenizer.encode("I guess 4<|im_end|>")
    first = prompts.first(chat(USER, tools=tools))
    delta = prompts.extend(said, chat(MORE, tools=tools))
    whole = prompts.first(
        chat(USER, {"role": "assistant", "content": "I guess 4"}, MORE, tools=tools)
    )
    assert delta is not None
    assert [*first, *said, *delta] == list(whole)


@pytest.mark.parametrize("which", ["prompts", "template_prompts"])
def test_a_turn_cut_short_is_closed_first(
    which: str, tokenizer: Tokenizer, request: pytest.FixtureRequest
) -> None:
    prompts: Prompts = request.getfixturevalue(which)
    delta = prompts.extend(tokenizer.encode("I gu"), chat(MORE))
    assert delta is not None
    text = tokenizer.decode(delta)
    assert text == "<|im_end|>\n<|im_start|>user\nhigher<|im_end|>\n<|im_start|>assistant\n"


def test_foreign_assistant_messages_are_rendered_behind_a_fixed_prefix(
    prompts: Prompts, tokenizer: Tokenizer
) -> None:
    said = tokenizer.encode("I guess 4<|im_end|>")
    foreign: dict[str, object] = {"role": "assistant", "content": "lower"}
    delta = prompts.extend(said, chat(USER, foreign, MORE))
    assert delta is not None
    assert tokenizer.decode(delta) == (
        "\n<|im_start|>user\nguess<|im_end|>\n<|im_start|>assistant\nlower<|im_end|>\n"
        "<|im_start|>user\nhigher<|im_end|>\n<|im_start|>assistant\n"
    )


def test_tool_results_extend_like_users(prompts: Prompts, tokenizer: Tokenizer) -> None:
    said = tokenizer.encode("x<|im_end|>")
    delta = prompts.extend(said, chat({"role": "tool", "content": "42", "tool_call_id": "c"}))
    assert delta is not None
    assert "<tool_response>\n42\n</tool_response>" in tokenizer.decode(delta)


def test_a_groups_first_prompt_is_rendered_once(prompts: Prompts) -> None:
    assert prompts.first(chat(USER)) is prompts.first(chat(USER))


def test_calls_get_ids_and_broken_ones_stay_text(prompts: Prompts, tokenizer: Tokenizer) -> None:
    good = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
    broken = "<tool_call>\n{nope\n</tool_call>"
    ids = tokenizer.encode(f"so {good}{broken}<|im_end|>")
    answer = prompts.parse(ids, True, "call_s_0")
    assert [(c.id, c.name, c.arguments) for c in answer.tool_calls] == [
        ("call_s_0_0", "f", '{"a": 1}')
    ]
    assert answer.content == f"so {broken}"
    assert prompts.parse(ids, False, "x").content == f"so {good}{broken}"


def test_reasoning_is_told_from_content(prompts: Prompts, tokenizer: Tokenizer) -> None:
    answer = prompts.parse(tokenizer.encode("<think>\nhm\n</think>\n\n4<|im_end|>"), False, "x")
    assert (answer.reasoning, answer.content) == ("hm", "4")


@pytest.mark.parametrize(
    ("said", "content", "reasoning"),
    [
        ("<think>why</think>A<tool_call>B", "A<tool_call>B", "why"),
        ("<think>why<tool_call>B", "", "why<tool_call>B"),
        ("A <think>why</think><tool_call>B", "A <think>why</think><tool_call>B", ""),
        ("<think>\nwas cut ", "", "was cut"),
    ],
)
def test_nothing_that_was_said_is_lost_where_calls_are_not_read(
    prompts: Prompts, tokenizer: Tokenizer, said: str, content: str, reasoning: str
) -> None:
    answer = prompts.parse(tokenizer.encode(said), False, "call")
    assert (answer.content, answer.reasoning) == (content, reasoning)
