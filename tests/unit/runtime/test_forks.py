"""Causes and places of forks, and differences that are healed instead."""

import msgspec
import pytest

from rollmesh.runtime.chat import Turn, read_message
from rollmesh.runtime.conversation.forks import ForkCause, first_difference
from tests.unit.runtime.history_world import (
    MORE,
    SAID,
    SYSTEM,
    TOOLS,
    USER,
    Held,
    Message,
    said,
    turn,
    user,
)

LONG = "The user wants a number and has refused four and five so far."


@pytest.fixture
def held() -> Held:
    """Three finished turns of a chat with a system text."""
    held = Held()
    held.talk(SYSTEM, USER, SAID, MORE, said("5"), user("still higher"), said(LONG))
    return held


@pytest.mark.parametrize(
    ("asked", "cause"),
    [
        (turn(SYSTEM, USER, SAID, MORE, said("5"), user("still higher"), said(LONG), MORE), None),
        (turn(SYSTEM, USER), None),
        (turn(SYSTEM, USER, SAID, MORE, tools=TOOLS), ForkCause.TOOLS_CHANGED),
        (turn(SYSTEM, USER, tools=TOOLS), ForkCause.TOOLS_CHANGED),
        (turn({"role": "system", "content": "other"}, USER, SAID, MORE), ForkCause.SYSTEM_CHANGED),
        (turn({"role": "system", "content": "other"}, USER), ForkCause.SYSTEM_CHANGED),
        (turn({"role": "system", "content": "a title"}, user("t")), ForkCause.OTHER_CHAT),
        (turn(user("x"), tools=TOOLS), ForkCause.OTHER_CHAT),
        (turn(SYSTEM, user("another task")), ForkCause.RESTARTED),
        (turn(SYSTEM, user(f"So far: {LONG}")), ForkCause.COMPACTED),
        (turn(SYSTEM, USER, user("in short")), ForkCause.COMPACTED),
        (turn(SYSTEM, said("5"), user("still higher"), said(LONG), MORE), ForkCause.COMPACTED),
        (turn(SYSTEM, USER, SAID, said(LONG), MORE), ForkCause.COMPACTED),
        (turn(SYSTEM, USER, said("7"), MORE), ForkCause.EDITED),
        (turn(SYSTEM, USER, SAID, user("cut"), said("5"), MORE), ForkCause.EDITED),
        (turn(SYSTEM, USER, SAID, user("lower")), ForkCause.REWOUND),
    ],
)
def test_a_fork_says_its_cause(held: Held, asked: Turn, cause: ForkCause | None) -> None:
    held.ask(asked)
    assert held.cause == cause


def test_what_was_said_in_two_messages_and_comes_back_in_one_is_healed_of_nothing() -> None:
    held = Held()
    _, context = held.ask(turn(USER, said("4")))
    held.say(context, said(" or 5"))
    held.ask(turn(USER, said("4 or 5"), MORE))
    assert held.cause is None
    assert held.log.healed == {}
    held.ask(turn(USER, said(" 4 or 5"), MORE))
    assert held.log.healed == {"white_space": 1}


def test_answers_of_others_behind_the_end_of_a_line_are_no_fork() -> None:
    held = Held()
    held.talk(SYSTEM, USER, SAID)
    held.ask(turn(SYSTEM, USER, SAID, MORE, said("of another model"), user("on")))
    assert held.cause is None


def test_a_chat_that_begins_with_answers_of_others_is_no_edit() -> None:
    held = Held()
    few_shots = [user("2+2"), said("4"), user("3+3"), said("6")]
    held.talk(SYSTEM, USER, SAID)
    held.ask(turn({"role": "system", "content": "helper"}, *few_shots, USER))
    assert held.cause is ForkCause.OTHER_CHAT


def test_a_call_that_was_never_answered_makes_no_fork_of_the_next() -> None:
    held = Held()
    held.ask(turn(SYSTEM, USER))
    held.ask(turn(SYSTEM, MORE))
    assert held.cause is None
    _, context = held.ask(turn(SYSTEM, USER))
    held.say(context, SAID)
    held.ask(turn(SYSTEM, USER, SAID, MORE))
    held.ask(turn(SYSTEM, USER, SAID, user("lower")))
    assert held.cause is None


def test_the_first_difference_is_shown(held: Held) -> None:
    held.ask(turn(SYSTEM, USER, SAID, user("higher please"), said("5"), MORE))
    assert held.where == (3, "higher", "higher please")
    held.ask(turn(SYSTEM, user("x" * 300)))
    at, old, new = held.where
    assert (at, old, len(new)) == (1, "guess", 80)


def call(arguments: object, call_id: str = "c1") -> Message:
    function = {"name": "f", "arguments": arguments}
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": call_id, "function": function}],
    }


@pytest.mark.parametrize(
    ("ours", "theirs", "kinds"),
    [
        (said("4"), said("4"), []),
        (said("4"), {"content": "4", "role": "assistant", "refusal": None}, []),
        (said("4"), said("\n4"), ["white_space"]),
        (said("4"), {**said("4"), "provider_specific_fields": {"a": 1}}, ["extra_keys"]),
        (said("4"), {**said("4"), "content": [{"type": "text", "text": "4"}]}, ["part_list"]),
        (
            said("4"),
            {
                **said("4"),
                "content": [{"type": "text", "text": "4", "cache_control": {"type": "ephemeral"}}],
            },
            ["cache_marker", "part_list"],
        ),
        ({**said("4"), "reasoning_content": "hm"}, said("4"), ["dropped_reasoning"]),
        (
            {**said("4"), "reasoning_content": "hm"},
            said("<think>hm</think>4"),
            ["inlined_reasoning"],
        ),
        (call('{"a":   1}'), call('{"a": 1}'), ["reserialised_arguments"]),
        (call('{"a":   1}'), call({"a": 1}), ["reserialised_arguments"]),
        (call('{"a":1}'), call('{"a":1}', "toolu_9"), ["changed_call_ids"]),
        (call('{"a":1}'), call('{"a":2}'), ["changed_call"]),
        (call('{"a":1}'), {**call('{"a":1}'), "content": "now"}, ["changed_text"]),
    ],
)
def test_what_is_seen_past_is_counted(ours: Message, theirs: Message, kinds: list[str]) -> None:
    held = Held()
    held.talk(SYSTEM, USER, ours)
    for _ in range(2):
        match, _ = held.ask(turn(SYSTEM, USER, theirs, MORE))
    assert match.is_held
    assert held.cause is None
    assert held.log.report().healed == dict.fromkeys(kinds, 1)


def test_parts_are_no_difference_where_a_dialect_has_nothing_else() -> None:
    held = Held()
    held.talk(SYSTEM, USER, SAID)
    parts: Message = {"role": "assistant", "content": [{"type": "text", "text": "4"}]}
    read = msgspec.structs.replace(
        turn(SYSTEM, USER, parts, MORE), read=lambda raw, at: [read_message(raw, at)]
    )
    held.ask(read)
    assert held.log.report().healed == {}


def test_a_rotating_line_is_counted() -> None:
    held = Held()
    for day in ("Monday", "Tuesday"):
        held.ask(turn({"role": "system", "content": f"a\nToday's date: {day}"}, USER))
    assert held.log.report().healed == {"system_line": 1}


@pytest.mark.parametrize(
    ("one", "two", "at"), [("", "", 0), ("abc", "abd", 2), ("abc", "ab", 2), ("x", "y", 0)]
)
def test_the_first_difference_of_two_sequences(one: str, two: str, at: int) -> None:
    assert first_difference(one, two) == at
    assert first_difference(list(one), list(two)) == at
