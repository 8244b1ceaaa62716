"""What a turn asks for."""

from rollmesh.runtime.chat import ToolChoice, Turn


def test_calls_are_read_only_where_tools_are_offered_and_allowed() -> None:
    assert not Turn(messages=[]).reads_calls
    assert Turn(messages=[], tools=b"[{}]").reads_calls
    assert not Turn(messages=[], tools=b"[{}]", tool_choice=ToolChoice("none")).reads_calls
