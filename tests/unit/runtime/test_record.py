"""Replies as messages."""

from rollmesh.runtime.chat import ParsedReply, ToolCall, read_message
from rollmesh.runtime.conversation import as_message


def test_a_reply_reads_back_as_the_message_it_makes() -> None:
    message = as_message(ParsedReply("x", "because", (ToolCall("c1", "f", '{"a": 1}'),)))
    raw = message.as_json()
    assert b'"reasoning_content":"because"' in raw
    assert read_message(raw, 0) == message
    assert message.tool_calls is not None
    assert message.tool_calls[0].parsed_arguments() == {"a": 1}
