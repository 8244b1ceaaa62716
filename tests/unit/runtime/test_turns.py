"""Messages by meaning, and what is refused."""

import msgspec
import pytest

from rollmesh.core.errors import SessionError
from rollmesh.runtime.turns import ToolChoice, Turn, read_message, read_tools


def meanings(**fields: object) -> list[int]:
    return read_message(msgspec.json.encode(fields), 0).meanings()


def call(arguments: object, name: str = "f", call_id: str = "c1") -> dict[str, object]:
    function = {"name": name, "arguments": arguments}
    return {"id": call_id, "type": "function", "function": function}


def test_parts_and_strings_mean_the_same() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert meanings(role="user", content=parts) == meanings(role="user", content="ab")


def test_refusal_part_of_an_assistant_is_text() -> None:
    parts = [{"type": "refusal", "refusal": "no"}]
    assert meanings(role="assistant", content=parts) == meanings(role="assistant", content="no")


def test_cache_markers_and_extra_keys_mean_nothing() -> None:
    marked = [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}]
    assert meanings(role="user", content=marked, extra=1) == meanings(role="user", content="a")


def test_reserialised_arguments_mean_the_same() -> None:
    ours = meanings(role="assistant", content=None, tool_calls=[call('{"b": 1,   "a": [2]}')])
    theirs = meanings(role="assistant", content="", tool_calls=[call({"a": [2], "b": 1})])
    assert ours == theirs


def test_ids_match_before_arguments_and_arguments_before_text() -> None:
    ours = meanings(role="assistant", content="x", tool_calls=[call('{"a": 1}')])
    same_id = meanings(role="assistant", content="y", tool_calls=[call('{"a": 2}')])
    same_call = meanings(role="assistant", content="z", tool_calls=[call('{"a":1}', call_id="c9")])
    other = meanings(role="assistant", content="x", tool_calls=[call('{"a": 2}', call_id="c9")])
    assert same_id[0] == ours[0]
    assert same_call[-1] == ours[-1]
    assert not set(other) & set(ours)


def test_assistant_text_is_known_without_reasoning_and_outer_space() -> None:
    plain = meanings(role="assistant", content="four")
    assert meanings(role="assistant", content="\nfour ", reasoning_content="hm") == plain
    assert meanings(role="assistant", content="<think>hm</think>\n\nfour") == plain
    assert meanings(role="user", content="four") != meanings(role="user", content="four ")


def test_a_template_gets_text_and_objects() -> None:
    raw = msgspec.json.encode(
        {"role": "assistant", "content": None, "tool_calls": [call('{"a": 1}')]}
    )
    message = read_message(raw, 0).for_template()
    assert message["content"] == ""
    assert message["tool_calls"][0]["function"] == {"name": "f", "arguments": {"a": 1}}
    developer = read_message(b'{"role":"developer","content":"x"}', 0)
    assert developer.for_template() == {"role": "system", "content": "x"}


@pytest.mark.parametrize(
    ("raw", "why"),
    [
        (b"[1]", r"messages\[3\]: Expected `object`"),
        (b'{"role":"wizard","content":"x"}', r"messages\[3\]: unknown role 'wizard'"),
        (b'{"role":"user","content":7}', r"messages\[3\]"),
        (b'{"role":"user","content":"\xff"}', r"messages\[3\]"),
        (
            b'{"role":"user","content":[{"type":"image_url","image_url":{"url":"x"}}]}',
            r"messages\[3\]: content of type 'image_url': this model reads text only",
        ),
    ],
)
def test_an_unreadable_message_is_named(raw: bytes, why: str) -> None:
    with pytest.raises(SessionError, match=why) as caught:
        read_message(raw, 3)
    assert caught.value.status == 400


def test_tools_must_be_a_list_of_objects() -> None:
    assert read_tools(b'[{"type":"function"}]') == [{"type": "function"}]
    for raw in (b"{}", b"[1]", b"[{]"):
        with pytest.raises(SessionError, match="tools"):
            read_tools(raw)


def test_calls_are_read_only_where_tools_are_offered_and_allowed() -> None:
    assert not Turn(messages=[]).reads_calls
    assert Turn(messages=[], tools=b"[{}]").reads_calls
    assert not Turn(messages=[], tools=b"[{}]", tool_choice=ToolChoice("none")).reads_calls
