"""Deltas fold to the answer, and calls come whole where they come in one piece."""

from rollmesh.runtime.chat import CallDelta, ToolCall, whole_calls


def test_finished_calls_are_deltas_of_one_piece_each() -> None:
    calls = [ToolCall("a", "f", "{}"), ToolCall("b", "g", '{"x": 1}')]
    assert whole_calls(calls) == (CallDelta(0, "a", "f", "{}"), CallDelta(1, "b", "g", '{"x": 1}'))
