"""Which part of a request a history has stored."""

import gc
import operator
import sys
import tracemalloc
import weakref
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from rollmesh.core.errors import SessionError
from rollmesh.runtime import blobs
from rollmesh.runtime.blobs import Blob
from rollmesh.runtime.chat import ChatMessage, Turn, read_message
from rollmesh.runtime.conversation.history import (
    ALIASES_PER_NODE,
    LONG_BYTES,
    MESSAGE_NODE_BYTES,
)
from tests.disks import no_room_in_memory
from tests.unit.runtime.history_world import (
    MORE,
    SAID,
    SYSTEM,
    TOOLS,
    USER,
    Held,
    Message,
    array_turn,
    said,
    texts,
    turn,
    user,
)


@pytest.fixture
def held() -> Held:
    """One finished turn: context node 0, sampled node 1."""
    held = Held()
    held.talk(SYSTEM, USER, SAID)
    return held


@pytest.fixture
def spilling(tmp_path: Path) -> Iterator[None]:
    """A memory budget of 0, so that every blob is spilled."""
    with no_room_in_memory(tmp_path):
        yield


def test_the_first_request_is_new() -> None:
    match, _ = Held().ask(turn(SYSTEM, USER))
    assert texts(match.new) == ["rules", "guess"]


def test_an_extension_builds_on_what_was_sampled(held: Held) -> None:
    match, _ = held.ask(turn(SYSTEM, USER, SAID, MORE))
    assert match.message_node.node == 1
    assert texts(match.new) == ["higher"]


def test_the_same_messages_again_are_held(held: Held) -> None:
    match, message_node = held.ask(turn(SYSTEM, USER))
    assert match.is_held
    assert message_node.node == 0


@pytest.mark.parametrize(
    "echo",
    [
        {"role": "assistant", "content": "\n4"},
        {"role": "assistant", "content": [{"type": "text", "text": "4"}]},
        {"role": "assistant", "content": "4", "reasoning_content": "hm", "extra": {}},
        {"role": "assistant", "content": "<think>hm</think>\n4"},
    ],
)
def test_an_echo_that_means_the_same_is_found(held: Held, echo: Message) -> None:
    match, _ = held.ask(turn(SYSTEM, USER, echo, MORE))
    assert match.message_node.node == 1
    again, _ = held.ask(turn(SYSTEM, USER, echo, MORE))
    assert again.is_held


def test_a_date_that_moves_on_changes_nothing() -> None:
    held = Held()

    def asked(day: str, *rest: Message) -> Turn:
        return turn({"role": "system", "content": f"rules\nToday's date: {day}\n"}, USER, *rest)

    _, context = held.ask(asked("Monday"))
    held.say(context, SAID)
    match, _ = held.ask(asked("Tuesday", SAID, MORE))
    assert match.message_node.node == 1
    other, _ = Held(None).ask(asked("Monday"))
    assert len(other.new) == 2


def test_tools_in_other_spelling_are_the_same_tools() -> None:
    held = Held()
    held.talk(USER, SAID, tools=TOOLS)
    other = b'[ {"function": {"name": "f"}, "type": "function"} ]'
    assert held.ask(turn(USER, SAID, MORE, tools=other))[0].message_node.node == 1


def test_asking_on_after_an_answer_leaves_the_answer_its_tokens(held: Held) -> None:
    asked_on = turn(SYSTEM, USER, SAID)
    match, context = held.ask(asked_on)
    assert (match.message_node.node, match.new) == (1, [])
    assert held.ask(asked_on)[0].is_held
    assert held.ask(turn(SYSTEM, USER, SAID, MORE))[0].message_node.node == 1
    more = said("or 5")
    answer = held.say(context, more)
    match, last = held.ask(turn(SYSTEM, USER, SAID, more, MORE))
    assert match.message_node is answer
    assert held.texts(last) == ["rules", "guess", "4", "or 5", "higher"]


@pytest.mark.parametrize("seen", ["let me", "let"])
def test_a_cut_answer_and_the_next_one_shown_as_one_lead_to_the_next(seen: str) -> None:
    """Codex resends the visible part of a truncated turn; its items are then adjacent."""
    held = Held()
    _, context = held.ask(turn(USER))
    cut = read_message(msgspec.json.encode(said("let me")), 0)
    held.history.add_sampled(context, cut, 1, is_void=True)
    held.num_nodes = 2
    _, context = held.ask(turn(USER, said(seen)))
    call = {"id": "call_s_1_0", "function": {"name": "f", "arguments": "{}"}}
    made: Message = {"role": "assistant", "content": "", "tool_calls": [call]}
    answer = held.say(context, made)
    result: Message = {"role": "tool", "tool_call_id": "call_s_1_0", "content": "42"}
    match, _ = held.ask(turn(USER, {**made, "content": seen}, result))
    assert match.message_node is answer
    assert len(match.new) == 1
    assert held.ask(turn(USER, said(seen), made, result))[0].is_held
    assert held.cause is None


@pytest.mark.parametrize("name", ["f", ""])
def test_an_answer_behind_an_agents_call_or_empty_turn_is_known_by_itself(name: str) -> None:
    def made(name: str, content: str = "") -> Message:
        call = {"id": "call_0", "function": {"name": name, "arguments": "{}"}}
        shown: Message = {"role": "assistant", "content": content}
        return {**shown, "tool_calls": [call]} if name else shown

    held = Held()
    _, context = held.ask(turn(USER, made(name)))
    answer = held.say(context, SAID)
    for other in (made("g"), made(name, "4")):
        assert held.ask(turn(USER, other, MORE))[0].message_node.parent is None
    assert held.ask(turn(USER, made(name), SAID, MORE))[0].message_node is answer


def test_each_message_is_held_once(held: Held) -> None:
    before = held.history.num_bytes
    asked = turn(SYSTEM, USER, SAID, MORE)
    _, message_node = held.ask(asked)
    assert held.history.num_bytes == before + len(asked.messages[-1]) + MESSAGE_NODE_BYTES
    assert [each.raw for each in message_node.line()] == [
        *asked.messages[:2],
        message_node.line()[2].raw,
        asked.messages[3],
    ]


LONG = user("x" * LONG_BYTES)


def test_a_long_message_is_one_blob_however_many_turns_and_siblings_show_it(held: Held) -> None:
    sibling = Held()
    sibling.talk(SYSTEM, LONG, SAID)
    before = held.history.num_bytes
    _, message_node = held.ask(turn(SYSTEM, USER, SAID, LONG))
    _, edited = held.ask(turn(SYSTEM, user("other"), LONG, MORE))
    assert held.history.num_bytes < before + 6 * MESSAGE_NODE_BYTES
    blob = message_node.content
    assert isinstance(blob, Blob)
    assert [each.content for each in edited.line() if each.content is blob] == [blob]
    assert blob in [each.content for each in sibling.history.sampled[0].line()]
    assert held.history.blob_bytes == sibling.history.blob_bytes == blob.num_bytes
    ended = weakref.ref(blob)
    for history in (held.history, sibling.history):
        history.forget()
    del message_node, edited, blob, history, held.history, sibling.history
    assert ended() is None


def test_its_bytes_are_what_it_takes() -> None:
    tracemalloc.start()
    held, talk = Held(), list[Message]()
    for n in range(300):
        talk += [user(f"question {n}, in some words"), said(f"answer {n}, in others")]
        array = array_turn(*talk[:-1])
        held.say(held.history.hold(held.history.match(array), 2 * n), talk[-1])
    del array, talk
    gc.collect()
    taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert 0.75 < held.history.num_bytes / taken < 1.25


def test_a_history_goes_on_whose_long_messages_are_spilled(held: Held, spilling: None) -> None:
    _, context = held.ask(turn(SYSTEM, USER, SAID, LONG))
    told = said("y" * LONG_BYTES)
    answer = held.say(context, told)
    assert blobs.spill_over() > 2 * LONG_BYTES
    match, message_node = held.ask(turn(SYSTEM, USER, SAID, LONG, told, MORE))
    assert (match.message_node, texts(match.new)) == (answer, ["higher"])
    assert held.texts(message_node)[3:] == ["x" * LONG_BYTES, "y" * LONG_BYTES, "higher"]
    match, _ = held.ask(turn(SYSTEM, LONG, told))
    assert match.deepest.depth == 1


def test_of_two_answers_with_one_text_the_reasoning_tells_which(held: Held) -> None:
    _, context = held.ask(turn(SYSTEM, user("why")))
    answers: list[Message] = [
        {"role": "assistant", "content": "so", "reasoning_content": why} for why in ("a", "b")
    ]
    message_nodes = [held.say(context, answer) for answer in answers]
    for answer, message_node in zip(answers, message_nodes, strict=True):
        assert held.ask(turn(SYSTEM, user("why"), answer, MORE))[0].message_node is message_node


def read_blocks(unit: bytes, position: int) -> list[ChatMessage]:
    """A made-up dialect whose units are lists of [role, text]."""
    return [
        read_message(msgspec.json.encode({"role": role, "content": text}), position)
        for role, text in msgspec.json.decode(unit)
    ]


def block_turn(*units: list[tuple[str, str]]) -> Turn:
    return Turn(messages=[msgspec.json.encode(unit) for unit in units], read=read_blocks)


def test_units_of_another_dialect_mean_the_same_messages(held: Held) -> None:
    match, _ = held.ask(
        block_turn([("system", "rules"), ("user", "guess")], [("assistant", "4")], [("user", "on")])
    )
    assert match.message_node.node == 1
    assert texts(match.new) == ["on"]
    assert held.ask(turn(SYSTEM, USER, SAID, user("on")))[0].is_held


def test_a_unit_of_several_messages_is_read_once() -> None:
    held = Held()
    unit = [("user", "a"), ("user", "b")]
    _, context = held.ask(block_turn(unit))
    held.say(context, SAID)
    asked = msgspec.structs.replace(block_turn(unit, [("assistant", "4")]), read=_refuse_user)
    assert held.ask(asked)[0].message_node.node == 1


def _refuse_user(unit: bytes, position: int) -> list[ChatMessage]:
    assert position == 1, "the first unit is held by its bytes"
    return read_blocks(unit, position)


def test_a_unit_that_says_nothing_changes_nothing(held: Held) -> None:
    asked = block_turn([("system", "rules"), ("user", "guess")], [], [("assistant", "4")], [])
    assert held.ask(asked)[0].message_node.node == 1
    with pytest.raises(SessionError, match="at least one"):
        held.ask(block_turn([]))


def test_a_unit_that_is_only_half_known_goes_on_from_the_last_answer(held: Held) -> None:
    held.ask(turn(SYSTEM, USER, SAID, user("a")))
    match, _ = held.ask(
        block_turn(
            [("system", "rules"), ("user", "guess")],
            [("assistant", "4")],
            [("user", "a"), ("user", "b")],
        )
    )
    assert match.message_node.node == 1
    assert texts(match.new) == ["a", "b"]


def test_spellings_that_are_remembered_are_bounded(held: Held) -> None:
    for n in range(100):
        echo = {"role": "assistant", "content": "4", "nonce": n}
        assert held.ask(turn(SYSTEM, USER, echo))[0].message_node.node <= 2
    message_nodes = {id(message_node): message_node for message_node in _all_spots(held)}
    num_keys = sum(len(message_node.children or {}) for message_node in message_nodes.values())
    assert num_keys <= (ALIASES_PER_NODE + 3) * len(message_nodes)


def test_counting_what_is_held_takes_the_same_however_many_answers_wait(held: Held) -> None:
    """Bytes are counted at each call, and a repeated request adds one answer each time."""
    said = read_message(msgspec.json.encode(SAID), 0)
    _, context = held.ask(turn(SYSTEM, USER))
    num_events: list[int] = []
    before = held.history.num_bytes
    for node in range(10, 60):
        held.history.add_sampled(context, said, node)
        num_events.append(0)
        sys.setprofile(lambda *_: operator.setitem(num_events, -1, num_events[-1] + 1))
        num_bytes = held.history.num_bytes
        sys.setprofile(None)
        assert num_bytes == before + (node - 9) * len(said.text())
    assert len(set(num_events)) == 1
    held.history.catch_up()
    assert held.history.num_bytes > num_bytes


def _all_spots(held: Held) -> list:  # type: ignore[type-arg] # of message_nodes
    waiting, found = list(held.history.roots.values()), []
    while waiting:
        message_node = waiting.pop()
        found.append(message_node)
        waiting += dict.fromkeys((message_node.children or {}).values())
    return found


def test_a_growing_array_is_split_behind_what_is_known() -> None:
    held = Held()
    messages: list[Message] = [SYSTEM, USER]
    for n in range(40):
        match, context = held.ask(array_turn(*messages))
        assert len(match.lookup.units) == (1 if n else 2)
        assert match.message_node.node == (2 * n - 1 if n else -1)
        held.say(context, said(f"a{n}"))
        messages += [said(f"a{n}"), user(f"u{n}")]


def test_an_array_that_parts_from_a_known_one_is_read_as_a_whole() -> None:
    held = Held()
    _, context = held.ask(array_turn(SYSTEM, USER))
    held.say(context, SAID)
    held.ask(array_turn(SYSTEM, USER, SAID, MORE))
    match, _ = held.ask(array_turn(SYSTEM, USER, SAID, user("lower")))
    assert match.message_node.node == 1
    assert texts(match.new) == ["lower"]
    edited, _ = held.ask(array_turn(SYSTEM, USER, said("5"), MORE))
    assert texts(edited.new) == ["rules", "guess", "5", "higher"]


def test_what_a_leap_saw_past_is_counted_once() -> None:
    held = Held()
    held.ask(array_turn(USER))
    held.ask(array_turn(USER, MORE))
    part = {"type": "text", "text": "higher", "cache_control": {"type": "ephemeral"}}
    held.ask(array_turn(USER, {"role": "user", "content": [part]}, user("new")))
    assert held.log.report().healed == {"cache_marker": 1, "part_list": 1}


def test_a_call_id_that_an_agent_uses_again_names_another_call() -> None:
    def asked(name: str) -> Turn:
        call = {"id": "call_0", "function": {"name": name, "arguments": "{}"}}
        shown: Message = {"role": "assistant", "tool_calls": [call]}
        return turn(USER, shown, {"role": "tool", "tool_call_id": "call_0", "content": "42"})

    held = Held()
    held.ask(asked("f"))
    match, _ = held.ask(asked("g"))
    assert not match.is_held
    assert match.new[1].tool_calls is not None
    assert match.new[1].tool_calls[0].function.name == "g"


def test_the_same_array_again_is_held_without_splitting_it() -> None:
    held = Held()
    held.ask(array_turn(SYSTEM, USER))
    match, _ = held.ask(array_turn(SYSTEM, USER))
    assert match.is_held
    assert match.lookup.units == []


def test_a_bad_message_is_named_by_its_place_in_the_request() -> None:
    held = Held()
    held.ask(array_turn(SYSTEM, USER))
    with pytest.raises(SessionError, match=r"messages\[2\]: unknown role"):
        held.ask(array_turn(SYSTEM, USER, {"role": "wizard"}))
    system, array = msgspec.json.encode(SYSTEM), msgspec.json.encode([USER, {"role": "wizard"}])
    with pytest.raises(SessionError, match=r"messages\[1\]: unknown role"):
        held.ask(Turn(messages=[system], messages_raw=array))
    with pytest.raises(SessionError, match="messages"):
        held.ask(Turn(messages=[], messages_raw=b"{}"))
