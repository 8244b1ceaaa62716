"""Frames give the ids that the library gives, by its bridge over all history or by rendering."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollmesh.runtime.chat import ROLES, read_message
from rollmesh.runtime.families import Family, choose_family
from rollmesh.runtime.prompts import Chat, Prompts
from rollmesh.runtime.tokenizer import Tokenizer, load_tokenizer

TOOLS = json.dumps(
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
SAID = st.sampled_from(
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
    """In the roles that templates know."""
    return [{**message, "role": ROLES[message["role"]]} for message in messages]


class Chats:
    """Our prompts and the library's renderer over one tokenizer."""

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


def chat(messages: list[dict[str, Any]], tools: bytes) -> Chat:
    raws = [msgspec.json.encode(message) for message in messages]
    return Chat(raws, [read_message(raw, n) for n, raw in enumerate(raws)], tools)


@given(messages=NEWS, tools=st.sampled_from([b"", TOOLS]))
def test_a_first_prompt_is_what_the_library_renders(
    chats: Chats, messages: list[dict[str, Any]], tools: bytes
) -> None:
    assert list(chats.prompts.first(chat(messages, tools))) == chats.render(messages, tools)


@given(
    turns=st.lists(st.tuples(SAID, st.booleans(), NEWS), min_size=1, max_size=12),
    tools=st.sampled_from([b"", TOOLS]),
)
def test_an_extension_is_what_the_library_bridges_over_all_history(
    chats: Chats, turns: list[tuple[str, bool, list[dict[str, Any]]]], tools: bytes
) -> None:
    history = chats.render([{"role": "user", "content": "go"}], tools)
    for said, is_closed, news in turns:
        sampled = chats.tokenizer.encode(said + ("<|im_end|>" if is_closed else ""))
        ours = chats.prompts.extend(sampled, chat(news, tools))
        bridged = chats.family.renderer.bridge_to_next_turn(
            history, sampled, renamed(news), tools=json.loads(tools or b"null")
        )
        assert ours is not None
        history += [*sampled, *ours]
        if bridged is None:
            # A turn that ended in its reasoning: the library would render all anew.
            assert is_closed
            assert "</think>" not in said
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
    tools=st.sampled_from([b"", TOOLS]),
)
def test_a_long_chat_grows_to_what_rendering_all_of_it_gives(
    chats: Chats, turns: list[tuple[str, list[dict[str, str]], list[dict[str, Any]]]], tools: bytes
) -> None:
    messages: list[dict[str, Any]] = [{"role": "user", "content": "go"}]
    ids = list(chats.prompts.first(chat(messages, tools)))
    for content, calls, news in turns:
        said: dict[str, Any] = {"role": "assistant", "content": content}
        if calls:
            said["tool_calls"] = [{"function": {"name": "f", "arguments": a}} for a in calls]
        messages.append(said)
        arguments = [json.dumps(a, ensure_ascii=False) for a in calls]
        head, tail = '<tool_call>\n{"name": "f", "arguments": ', "}\n</tool_call>"
        blocks = [f"{head}{text}{tail}" for text in arguments]
        sampled = chats.tokenizer.encode("\n".join(filter(None, [content, *blocks])) + "<|im_end|>")
        extension = chats.prompts.extend(sampled, chat(news, tools))
        assert extension is not None
        ids += [*sampled, *extension]
        messages += news
    assert ids == chats.render(messages, tools)
