"""Causes and positions of forks, and differences that are healed instead."""

import msgspec
import pytest

from rollmesh.runtime.chat import Turn, read_message
from rollmesh.runtime.conversation.forks import ForkCause, first_difference
from tests.unit.runtime.stored_chat import (
    ANSWER,
    MORE,
    SYSTEM,
    TOOLS,
    USER,
    Message,
    StoredChat,
    assistant,
    turn,
    user,
)

LONG = "The user wants a number and has refused four and five so far."


@pytest.fixture
def stored() -> StoredChat:
    """Three finished turns of a chat with a system text."""
    stored = StoredChat()
    stored.play(SYSTEM, USER, ANSWER, MORE, assistant("5"), user("still higher"), assistant(LONG))
    return stored


@pytest.mark.parametrize(
    ("asked", "cause"),
    [
        (
            turn(
                SYSTEM,
                USER,
                ANSWER,
                MORE,
                assistant("5"),
                user("still higher"),
                assistant(LONG),
                MORE,
            ),
            None,
        ),
        (turn(SYSTEM, USER), None),
        (turn(SYSTEM, USER, ANSWER, MORE, tools=TOOLS), ForkCause.TOOLS_CHANGED),
        (turn(SYSTEM, USER, tools=TOOLS), ForkCause.TOOLS_CHANGED),
        (
            turn({"role": "system", "content": "other"}, USER, ANSWER, MORE),
            ForkCause.SYSTEM_CHANGED,
        ),
        (turn({"role": "system", "content": "other"}, USER), ForkCause.SYSTEM_CHANGED),
        (turn({"role": "system", "content": "a title"}, user("t")), ForkCause.OTHER_CHAT),
        (turn(user("x"), tools=TOOLS), ForkCause.OTHER_CHAT),
        (turn(SYSTEM, user("another task")), ForkCause.RESTARTED),
        (turn(SYSTEM, user(f"So far: {LONG}")), ForkCause.COMPACTED),
        (turn(SYSTEM, USER, user("in short")), ForkCause.COMPACTED),
        (
            turn(SYSTEM, assistant("5"), user("still higher"), assistant(LONG), MORE),
            ForkCause.COMPACTED,
        ),
        (turn(SYSTEM, USER, ANSWER, assistant(LONG), MORE), ForkCause.COMPACTED),
        (turn(SYSTEM, USER, assistant("7"), MORE), ForkCause.EDITED),
        (turn(SYSTEM, USER, ANSWER, user("cut"), assistant("5"), MORE), ForkCause.EDITED),
        (turn(SYSTEM, USER, ANSWER, user("lower")), ForkCause.REWOUND),
    ],
)
def test_a_fork_has_its_cause(stored: StoredChat, asked: Turn, cause: ForkCause | None) -> None:
    stored.ask(asked)
    assert stored.cause == cause


def test_two_answers_sent_back_as_one_message_are_no_healed_difference() -> None:
    stored = StoredChat()
    _, context = stored.ask(turn(USER, assistant("4")))
    stored.answer(context, assistant(" or 5"))
    stored.ask(turn(USER, assistant("4 or 5"), MORE))
    assert stored.cause is None
    assert stored.log.healed == {}
    stored.ask(turn(USER, assistant(" 4 or 5"), MORE))
    assert stored.log.healed == {"white_space": 1}


def test_answers_of_other_models_after_the_last_turn_are_no_fork() -> None:
    stored = StoredChat()
    stored.play(SYSTEM, USER, ANSWER)
    stored.ask(turn(SYSTEM, USER, ANSWER, MORE, assistant("of another model"), user("on")))
    assert stored.cause is None


def test_a_chat_that_begins_with_answers_of_other_models_is_another_chat() -> None:
    stored = StoredChat()
    few_shots = [user("2+2"), assistant("4"), user("3+3"), assistant("6")]
    stored.play(SYSTEM, USER, ANSWER)
    stored.ask(turn({"role": "system", "content": "helper"}, *few_shots, USER))
    assert stored.cause is ForkCause.OTHER_CHAT


def test_an_unanswered_request_causes_no_fork() -> None:
    stored = StoredChat()
    stored.ask(turn(SYSTEM, USER))
    stored.ask(turn(SYSTEM, MORE))
    assert stored.cause is None
    _, context = stored.ask(turn(SYSTEM, USER))
    stored.answer(context, ANSWER)
    stored.ask(turn(SYSTEM, USER, ANSWER, MORE))
    stored.ask(turn(SYSTEM, USER, ANSWER, user("lower")))
    assert stored.cause is None


def test_the_first_difference_is_reported(stored: StoredChat) -> None:
    stored.ask(turn(SYSTEM, USER, ANSWER, user("higher please"), assistant("5"), MORE))
    assert stored.where == (3, "higher", "higher please")
    stored.ask(turn(SYSTEM, user("x" * 300)))
    at, old, new = stored.where
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
        (assistant("4"), assistant("4"), []),
        (assistant("4"), {"content": "4", "role": "assistant", "refusal": None}, []),
        (assistant("4"), assistant("\n4"), ["white_space"]),
        (assistant("4"), {**assistant("4"), "provider_specific_fields": {"a": 1}}, ["extra_keys"]),
        (
            assistant("4"),
            {**assistant("4"), "content": [{"type": "text", "text": "4"}]},
            ["part_list"],
        ),
        (
            assistant("4"),
            {
                **assistant("4"),
                "content": [{"type": "text", "text": "4", "cache_control": {"type": "ephemeral"}}],
            },
            ["cache_marker", "part_list"],
        ),
        ({**assistant("4"), "reasoning_content": "hm"}, assistant("4"), ["dropped_reasoning"]),
        (
            {**assistant("4"), "reasoning_content": "hm"},
            assistant("<think>hm</think>4"),
            ["inlined_reasoning"],
        ),
        (call('{"a":   1}'), call('{"a": 1}'), ["reserialised_arguments"]),
        (call('{"a":   1}'), call({"a": 1}), ["reserialised_arguments"]),
        (call('{"a":1}'), call('{"a":1}', "toolu_9"), ["changed_call_ids"]),
        (call('{"a":1}'), call('{"a":2}'), ["changed_call"]),
        (call('{"a":1}'), {**call('{"a":1}'), "content": "now"}, ["changed_text"]),
    ],
)
def test_healed_differences_are_counted(ours: Message, theirs: Message, kinds: list[str]) -> None:
    stored = StoredChat()
    stored.play(SYSTEM, USER, ours)
    for _ in range(2):
        match, _ = stored.ask(turn(SYSTEM, USER, theirs, MORE))
    assert match.is_held
    assert stored.cause is None
    assert stored.log.report().healed == dict.fromkeys(kinds, 1)


def test_parts_are_no_difference_in_a_dialect_without_strings() -> None:
    stored = StoredChat()
    stored.play(SYSTEM, USER, ANSWER)
    parts: Message = {"role": "assistant", "content": [{"type": "text", "text": "4"}]}
    read = msgspec.structs.replace(
        turn(SYSTEM, USER, parts, MORE), read=lambda raw, at: [read_message(raw, at)]
    )
    stored.ask(read)
    assert stored.log.report().healed == {}


def test_a_healed_rotating_line_is_counted() -> None:
    stored = StoredChat()
    for day in ("Monday", "Tuesday"):
        stored.ask(turn({"role": "system", "content": f"a\nToday's date: {day}"}, USER))
    assert stored.log.report().healed == {"system_line": 1}


@pytest.mark.parametrize(
    ("one", "two", "at"), [("", "", 0), ("abc", "abd", 2), ("abc", "ab", 2), ("x", "y", 0)]
)
def test_the_first_difference_of_two_sequences_is_found(one: str, two: str, at: int) -> None:
    assert first_difference(one, two) == at
    assert first_difference(list(one), list(two)) == at
