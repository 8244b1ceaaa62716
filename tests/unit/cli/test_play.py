"""A conversation as lines: tool calls of every API are shown as calls."""

from typing import Any

import pytest

from rollmesh.cli.play import message_lines

QUOTED = '{"query": "red \\"shoes\\"", "limit": 3}'


@pytest.mark.parametrize(
    ("message", "lines"),
    [
        ({"role": "user", "content": "hi"}, ["user: hi"]),
        ({"role": "assistant", "content": None}, ["assistant: "]),
        (
            {
                "role": "assistant",
                "content": "Let me see.",
                "tool_calls": [{"function": {"name": "search", "arguments": QUOTED}}],
            },
            [
                "assistant: Let me see.",
                'assistant calls: search(query="red \\"shoes\\"", limit=3)',
            ],
        ),
        (
            {
                "role": "assistant",
                "content": [{"type": "tool_use", "name": "look", "input": {"at": [1]}}],
            },
            ["assistant calls: look(at=[1])"],
        ),
        (
            {
                "role": "user",
                "content": [{"type": "tool_result", "content": [{"type": "text", "text": "two"}]}],
            },
            ["user: two"],
        ),
        (
            {"type": "function_call", "name": "cut", "arguments": '{"a": '},
            ['function_call calls: cut({"a": )'],
        ),
        (
            {"role": "assistant", "tool_calls": [{"function": {"name": "now", "arguments": ""}}]},
            ["assistant calls: now()"],
        ),
        ({"role": "user", "content": [{"type": "image_url"}]}, ["user: [image_url]"]),
    ],
)
def test_a_message_is_shown_with_its_calls(message: dict[str, Any], lines: list[str]) -> None:
    assert list(message_lines(message)) == lines
