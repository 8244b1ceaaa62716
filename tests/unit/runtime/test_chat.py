"""Messages by meaning, refused messages, deltas, turns, and replies as messages."""

import re

import msgspec
import pytest

from rollmesh.core.errors import ConfigError, SessionError
from rollmesh.runtime.chat import (
    CallDelta,
    ChatMessage,
    ParsedReply,
    ToolCall,
    ToolChoice,
    Turn,
    compile_rotating,
    read_held,
    read_message,
    read_tools,
    whole_calls,
)
from rollmesh.runtime.conversation.conversation import as_message
from rollmesh.runtime.images import hold_image


def meanings(**fields: object) -> list[int]:
    return read_message(msgspec.json.encode(fields), 0).meanings()


def call(arguments: object, name: str = "f", call_id: str = "c1") -> dict[str, object]:
    function = {"name": name, "arguments": arguments}
    return {"id": call_id, "type": "function", "function": function}


def test_parts_and_strings_have_the_same_meaning() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert meanings(role="user", content=parts) == meanings(role="user", content="ab")


def test_a_refusal_part_of_an_assistant_is_text() -> None:
    parts = [{"type": "refusal", "refusal": "no"}]
    assert meanings(role="assistant", content=parts) == meanings(role="assistant", content="no")


def test_cache_markers_and_extra_keys_have_no_meaning() -> None:
    marked = [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}]
    assert meanings(role="user", content=marked, extra=1) == meanings(role="user", content="a")


def test_reserialised_arguments_have_the_same_meaning() -> None:
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


def test_assistant_text_matches_without_reasoning_and_outer_space() -> None:
    plain = meanings(role="assistant", content="four")
    reasoned = meanings(role="assistant", content="\nfour ", reasoning_content="hm")
    assert reasoned[-1:] == plain
    assert reasoned[0] not in plain
    assert meanings(role="assistant", content="<think>hm</think>\n\nfour") == plain
    assert meanings(role="user", content="four") == meanings(role="user", content="four ")
    assert meanings(role="user", content="four") != meanings(role="user", content="fo ur")


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
            b'{"role":"user","content":[{"type":"input_audio","input_audio":{"data":"x"}}]}',
            r"messages\[3\]: content of type 'input_audio'",
        ),
        (
            b'{"role":"user","content":[{"type":"image_url","image_url":{"url":"x"}}]}',
            r"messages\[3\]: image_url: expected a data: or http",
        ),
        (
            b'{"role":"user","content":[{"type":"image_url","image_url":{"url":"data:image/png;base64,?"}}]}',
            r"messages\[3\]: image_url: its base64 is invalid",
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


def shown(text: str, address: str) -> dict[str, object]:
    image = {"type": "image_url", "image_url": {"url": address}}
    return {"role": "user", "content": [{"type": "text", "text": text}, image]}


def test_an_image_is_identified_by_its_content_and_refused_by_text_models() -> None:
    pixel, other = "data:image/png;base64,aWo=", "data:image/png;base64,aWs="
    assert meanings(**shown("a", pixel)) == meanings(**shown("a", pixel))
    assert meanings(**shown("a", pixel)) != meanings(**shown("a", other))
    assert meanings(**shown("a", pixel)) != meanings(role="user", content="a")
    message = read_message(msgspec.json.encode(shown("a", pixel)), 0)
    assert message.images() == [hold_image(pixel)]
    with pytest.raises(SessionError, match="reads text only") as caught:
        message.for_template()
    assert (caught.value.status, caught.value.code) == (400, "unsupported_content")


def test_a_stored_message_has_its_images_as_digests_only() -> None:
    image = hold_image("data:image/png;base64," + "aWlq" * 100)
    raw = msgspec.json.encode(shown("a", "data:image/png;base64," + "aWlq" * 100))
    message = read_message(raw, 0)
    held = message.as_json()
    assert len(held) < 300
    assert read_held(held, {image.digest: image}) == message


def test_a_client_cannot_name_an_image_that_it_did_not_send() -> None:
    image = hold_image("data:image/png;base64,aWo=")
    part = {"type": "text", "text": "x", "image": {"digest": image.digest}}
    message = read_message(msgspec.json.encode({"role": "user", "content": [part]}), 0)
    assert message.images() == []


def test_an_agents_own_calls_are_matched_by_their_content_only() -> None:
    """Agents reuse call ids in every chat, with different messages before a call."""

    def made(name: str, content: str = "", call_id: str = "call_0") -> ChatMessage:
        call = {"id": call_id, "function": {"name": name, "arguments": "{}"}}
        message = {"role": "assistant", "content": content, "tool_calls": [call]}
        return read_message(msgspec.json.encode(message), 0)

    held = set(made("f", "first").meanings(is_ours=False))
    assert held.isdisjoint(made("g", "first").meanings())
    assert held.isdisjoint(made("f", "then").meanings())
    assert not held.isdisjoint(made("f", "first", "call_1").meanings())


def test_a_part_may_have_additional_keys() -> None:
    for image in ("a.png", {"digest": "d"}, None):
        part = {"text": "x", "image": image, "rollmesh_image": None}
        message = read_message(msgspec.json.encode({"role": "user", "content": [part]}), 0)
        assert message.images() == []
        assert msgspec.json.decode(message.as_json())["content"] == [{"type": "text", "text": "x"}]


def test_white_space_between_parts_of_a_system_text_is_a_difference() -> None:
    rotating = compile_rotating(["Today: "])

    def known(*texts: str) -> list[int]:
        parts = [{"type": "text", "text": text} for text in texts]
        message = {"role": "system", "content": parts}
        return read_message(msgspec.json.encode(message), 0).meanings(rotating)

    assert known("Today: Monday", "ab ", "c") == known("Today: Sunday", "ab c\n")
    assert known("ab ", "c") != known("ab", "c")


@pytest.mark.parametrize("pattern", ["(", "(?i)today", "x*", ""])
def test_a_rotating_line_needs_a_nonempty_prefix(pattern: str) -> None:
    with pytest.raises(ConfigError, match=r"interception\.rotating_lines: "):
        compile_rotating(["Today: ", pattern])


def test_rotating_lines_of_a_system_text_have_no_meaning() -> None:
    rotating = re.compile(r"(?m)^Today: .*$")

    def known(role: str, day: str) -> list[int]:
        message = {"role": role, "content": f"Be kind.\nToday: {day}\nBe brief."}
        return read_message(msgspec.json.encode(message), 0).meanings(rotating)

    assert known("system", "Monday") == known("developer", "Sunday")
    assert known("user", "Monday") != known("user", "Sunday")


def test_each_finished_call_is_one_delta() -> None:
    calls = [ToolCall("a", "f", "{}"), ToolCall("b", "g", '{"x": 1}')]
    assert whole_calls(calls) == (CallDelta(0, "a", "f", "{}"), CallDelta(1, "b", "g", '{"x": 1}'))


def test_calls_are_parsed_only_where_tools_are_offered_and_allowed() -> None:
    assert not Turn(messages=[]).reads_calls
    assert Turn(messages=[], tools=b"[{}]").reads_calls
    assert not Turn(messages=[], tools=b"[{}]", tool_choice=ToolChoice("none")).reads_calls


def test_a_reply_is_read_back_as_its_own_message() -> None:
    message = as_message(ParsedReply("x", "because", (ToolCall("c1", "f", '{"a": 1}'),)))
    raw = message.as_json()
    assert b'"reasoning_content":"because"' in raw
    assert read_message(raw, 0) == message
    assert message.tool_calls is not None
    assert message.tool_calls[0].parsed_arguments() == {"a": 1}
