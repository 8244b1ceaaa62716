"""Prompts extend sampled tokens exactly; frames produce the same ids as the library."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollmesh.core.types import OutputGrammar
from rollmesh.runtime.chat import (
    ROLES,
    ParsedReply,
    ParseOptions,
    ToolCall,
    ToolChoice,
    read_message,
)
from rollmesh.runtime.tokens.families import Family, choose_family
from rollmesh.runtime.tokens.prompts import Chat, Prompts
from rollmesh.runtime.tokens.tokenizer import Tokenizer, load_tokenizer
from rollmesh.testing.model_folder import write_model_folder

TOOLS = b'[{"type":"function","function":{"name":"f","parameters":{}}}]'


def chat(*messages: dict[str, object], tools: bytes = b"") -> Chat:
    raws = [msgspec.json.encode(message) for message in messages]
    return Chat(raws, [read_message(raw, n) for n, raw in enumerate(raws)], tools)


def read(prompts: Prompts, ids: list[int], reads_calls: bool, prefix: str) -> ParsedReply:
    """Parse a finished reply."""
    reader = prompts.reader(ParseOptions((), reads_calls, prefix))
    reader.feed(ids)
    reader.end(len(ids))
    return reader.answer()


USER: dict[str, object] = {"role": "user", "content": "guess"}
MORE: dict[str, object] = {"role": "user", "content": "higher"}


@pytest.mark.parametrize("which", ["prompts", "template_prompts"])
@pytest.mark.parametrize("tools", [b"", TOOLS])
def test_an_extension_equals_rendering_the_whole_chat(
    which: str, tools: bytes, tokenizer: Tokenizer, request: pytest.FixtureRequest
) -> None:
    prompts: Prompts = request.getfixturevalue(which)
    sampled = tokenizer.encode("I guess 4<|im_end|>")
    first = prompts.first(chat(USER, tools=tools))
    delta = prompts.extend(sampled, chat(MORE, tools=tools))
    whole = prompts.first(
        chat(USER, {"role": "assistant", "content": "I guess 4"}, MORE, tools=tools)
    )
    assert delta is not None
    assert [*first, *sampled, *delta] == list(whole)


@pytest.mark.parametrize("which", ["prompts", "template_prompts"])
def test_a_turn_cut_short_is_closed_first(
    which: str, tokenizer: Tokenizer, request: pytest.FixtureRequest
) -> None:
    prompts: Prompts = request.getfixturevalue(which)
    delta = prompts.extend(tokenizer.encode("I gu"), chat(MORE))
    assert delta is not None
    text = tokenizer.decode(delta)
    assert text == "<|im_end|>\n<|im_start|>user\nhigher<|im_end|>\n<|im_start|>assistant\n"


def test_assistant_messages_of_other_models_are_rendered_after_a_fixed_prefix(
    prompts: Prompts, tokenizer: Tokenizer
) -> None:
    sampled = tokenizer.encode("I guess 4<|im_end|>")
    foreign: dict[str, object] = {"role": "assistant", "content": "lower"}
    delta = prompts.extend(sampled, chat(USER, foreign, MORE))
    assert delta is not None
    assert tokenizer.decode(delta) == (
        "\n<|im_start|>user\nguess<|im_end|>\n<|im_start|>assistant\nlower<|im_end|>\n"
        "<|im_start|>user\nhigher<|im_end|>\n<|im_start|>assistant\n"
    )


def test_tool_results_extend_like_user_messages(prompts: Prompts, tokenizer: Tokenizer) -> None:
    sampled = tokenizer.encode("x<|im_end|>")
    delta = prompts.extend(sampled, chat({"role": "tool", "content": "42", "tool_call_id": "c"}))
    assert delta is not None
    assert "<tool_response>\n42\n</tool_response>" in tokenizer.decode(delta)


def test_calls_get_ids_and_broken_ones_stay_text(prompts: Prompts, tokenizer: Tokenizer) -> None:
    good = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
    broken = "<tool_call>\n{nope\n</tool_call>"
    ids = tokenizer.encode(f"so {good}{broken}<|im_end|>")
    answer = read(prompts, ids, True, "call_s_0")
    assert [(c.id, c.name, c.arguments) for c in answer.tool_calls] == [
        ("call_s_0_0", "f", '{"a": 1}')
    ]
    assert answer.content == f"so {broken}"
    assert read(prompts, ids, False, "x").content == f"so {good}{broken}"


def test_reasoning_is_separated_from_content(prompts: Prompts, tokenizer: Tokenizer) -> None:
    answer = read(prompts, tokenizer.encode("<think>\nhm\n</think>\n\n4<|im_end|>"), False, "x")
    assert (answer.reasoning, answer.content) == ("hm", "4")


@pytest.mark.parametrize(
    ("sampled", "content", "reasoning"),
    [
        ("<think>why</think>A<tool_call>B", "A<tool_call>B", "why"),
        ("<think>why<tool_call>B", "", "why<tool_call>B"),
        ("A <think>why</think><tool_call>B", "A <think>why</think><tool_call>B", ""),
        ("<think>\nwas cut ", "", "was cut"),
    ],
)
def test_nothing_is_lost_where_calls_are_not_parsed(
    prompts: Prompts, tokenizer: Tokenizer, sampled: str, content: str, reasoning: str
) -> None:
    answer = read(prompts, tokenizer.encode(sampled), False, "call")
    assert (answer.content, answer.reasoning) == (content, reasoning)


@pytest.mark.parametrize(
    ("choice", "text", "arguments"),
    [
        (ToolChoice("named", "f"), ' {"a": 1}}\n</tool_call>', '{"a": 1}'),
        (ToolChoice("required"), ' {"a": 1}}\n</tool_call>', '{"a": 1}'),
    ],
)
def test_a_required_call_is_opened_for_the_model(
    prompts: Prompts, tokenizer: Tokenizer, choice: ToolChoice, text: str, arguments: str
) -> None:
    prefill = prompts.prefill(choice, None, TOOLS)
    assert tokenizer.decode(prefill) == '<tool_call>\n{"name": "f", "arguments":'
    reader = prompts.reader(ParseOptions((), True, "c", prefill, TOOLS))
    sampled = tokenizer.encode(text)
    delta = reader.feed(sampled)
    assert delta is not None
    assert delta.num_tokens == len(sampled), "a prefill is not sampled"
    assert reader.end(len(sampled)).num_tokens == len(sampled)
    assert reader.answer() == ParsedReply("", "", (ToolCall("c_0", "f", arguments),))


def test_any_of_several_tools_may_be_called(prompts: Prompts, tokenizer: Tokenizer) -> None:
    tools = b'[{"function":{"name":"f"}},{"function":{"name":"g"}}]'
    prefill = prompts.prefill(ToolChoice("required"), None, tools)
    assert tokenizer.decode(prefill) == '<tool_call>\n{"name":'


def test_a_turn_without_a_required_call_has_no_prefill(prompts: Prompts) -> None:
    assert prompts.prefill(ToolChoice(), None, TOOLS) == ()
    assert prompts.prefill(ToolChoice("none"), None, TOOLS) == ()
    assert prompts.prefill(ToolChoice("required"), None, b"") == ()
    assert prompts.prefill(ToolChoice(), OutputGrammar("json_schema", "{}"), b"") == ()


def test_an_opened_reasoning_is_closed_before_a_grammar_or_a_call(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    source = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content }}<|im_end|>\n"
    source += "{% endfor %}{% if add_generation_prompt %}"
    source += "{{ '<|im_start|>assistant\\n<think>\\n' }}{% endif %}"
    folder = write_model_folder(tmp_path, chat_template=source)
    own = load_tokenizer(folder)
    prompts = Prompts(choose_family(folder, "auto", own), own)
    grammar = OutputGrammar("json_schema", "{}")
    prefill = prompts.prefill(ToolChoice(), grammar, b"")
    assert own.decode(prefill) == "\n</think>\n\n"
    reader = prompts.reader(ParseOptions((), True, "c", prefill))
    reader.feed(own.encode('{"a": 1}<|im_end|>'))
    assert reader.end(9).content == ""
    assert reader.answer() == ParsedReply('{"a": 1}')
    forced = own.decode(prompts.prefill(ToolChoice("named", "f"), grammar, TOOLS))
    assert forced == '\n</think>\n\n<tool_call>\n{"name": "f", "arguments":'


def test_a_turn_of_one_call_ends_with_its_call(prompts: Prompts, tokenizer: Tokenizer) -> None:
    assert prompts.call_end_ids == (tokenizer.convert_tokens_to_ids("</tool_call>"),)
    sampled = tokenizer.encode('<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>')
    delta = prompts.extend(sampled, chat({"role": "tool", "content": "42", "tool_call_id": "c"}))
    assert delta is not None
    assert tokenizer.decode(delta).startswith("<|im_end|>\n<|im_start|>user\n<tool_response>")


def test_an_end_of_text_is_not_the_end_of_a_turn(
    template_prompts: Prompts, tokenizer: Tokenizer
) -> None:
    delta = template_prompts.extend(tokenizer.encode("4<|endoftext|>"), chat(MORE))
    assert delta is not None
    assert tokenizer.decode(delta).startswith("<|im_end|>\n<|im_start|>user\nhigher")


FRAME_TOOLS = json.dumps(
    [{"type": "function", "function": {"name": "f\u00e9", "parameters": {"type": "object"}}}]
).encode()
TEXT = st.text(max_size=40) | st.sampled_from(
    [
        "",
        " \n x \n",
        "\n\n",
        "<|im_end|>",
        "<think>\nhm\n</think>",
        "  def f():\n\treturn 1\n",
        "e\u0301",
    ]
)
NEWS = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(sorted({*ROLES} - {"assistant"})), "content": TEXT}
    ),
    min_size=1,
    max_size=4,
)
REPLIES = st.sampled_from(
    [
        *(
            "I guess 4",
            "<think>\nhm\n</think>\n\n4",
            "<think>\nhm",
            "a <think> b",
            "",
            " \n<think>x",
        ),
        '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>',
        '<think>\nso\n<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>',
    ]
)


def renamed(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages with the roles that templates know."""
    return [{**message, "role": ROLES[message["role"]]} for message in messages]


class Chats:
    """Rollmesh's prompts and the library's renderer over one tokenizer."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer: Tokenizer = load_tokenizer(folder)
        self.family: Family = choose_family(folder, "auto", self.tokenizer)
        self.prompts = Prompts(self.family, self.tokenizer)

    def render(self, messages: list[dict[str, Any]], tools: bytes) -> list[int]:
        return self.family.renderer.render_ids(
            renamed(messages), tools=json.loads(tools or b"null"), add_generation_prompt=True
        )


@pytest.fixture(scope="module")
def chats(large_folder: Path) -> Chats:
    return Chats(large_folder)


def framed_chat(messages: list[dict[str, Any]], tools: bytes) -> Chat:
    raws = [msgspec.json.encode(message) for message in messages]
    return Chat(raws, [read_message(raw, n) for n, raw in enumerate(raws)], tools)


@given(messages=NEWS, tools=st.sampled_from([b"", FRAME_TOOLS]))
def test_a_first_prompt_equals_the_librarys(
    chats: Chats, messages: list[dict[str, Any]], tools: bytes
) -> None:
    assert list(chats.prompts.first(framed_chat(messages, tools))) == chats.render(messages, tools)


@given(
    turns=st.lists(st.tuples(REPLIES, st.booleans(), NEWS), min_size=1, max_size=12),
    tools=st.sampled_from([b"", FRAME_TOOLS]),
)
def test_an_extension_equals_the_librarys_bridge_over_the_whole_history(
    chats: Chats, turns: list[tuple[str, bool, list[dict[str, Any]]]], tools: bytes
) -> None:
    history = chats.render([{"role": "user", "content": "go"}], tools)
    for reply, is_closed, news in turns:
        sampled = chats.tokenizer.encode(reply + ("<|im_end|>" if is_closed else ""))
        ours = chats.prompts.extend(sampled, framed_chat(news, tools))
        bridged = chats.family.renderer.bridge_to_next_turn(
            history, sampled, renamed(news), tools=json.loads(tools or b"null")
        )
        assert ours is not None
        history += [*sampled, *ours]
        if bridged is None:
            # For a turn that ended in its reasoning the library would render everything again.
            assert is_closed
            assert "</think>" not in reply
        else:
            assert bridged.token_ids == history


@given(
    turns=st.lists(
        st.tuples(
            st.sampled_from(["I guess 4", "", "two\n\nlines \u4f60"]),
            st.lists(st.dictionaries(st.sampled_from("ab"), TEXT), max_size=2),
            NEWS,
        ),
        max_size=40,
    ),
    tools=st.sampled_from([b"", FRAME_TOOLS]),
)
def test_a_chat_grown_by_extensions_equals_its_complete_rendering(
    chats: Chats, turns: list[tuple[str, list[dict[str, str]], list[dict[str, Any]]]], tools: bytes
) -> None:
    messages: list[dict[str, Any]] = [{"role": "user", "content": "go"}]
    ids = list(chats.prompts.first(framed_chat(messages, tools)))
    for content, calls, news in turns:
        message: dict[str, Any] = {"role": "assistant", "content": content}
        if calls:
            message["tool_calls"] = [{"function": {"name": "f", "arguments": a}} for a in calls]
        messages.append(message)
        arguments = [json.dumps(a, ensure_ascii=False) for a in calls]
        head, tail = '<tool_call>\n{"name": "f", "arguments": ', "}\n</tool_call>"
        blocks = [f"{head}{text}{tail}" for text in arguments]
        sampled = chats.tokenizer.encode("\n".join(filter(None, [content, *blocks])) + "<|im_end|>")
        extension = chats.prompts.extend(sampled, framed_chat(news, tools))
        assert extension is not None
        ids += [*sampled, *extension]
        messages += news
    assert ids == chats.render(messages, tools)
