"""The part of a request that a history has stored."""

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
from tests.unit.runtime.stored_chat import (
    ANSWER,
    MORE,
    SYSTEM,
    TOOLS,
    USER,
    Message,
    StoredChat,
    array_turn,
    assistant,
    texts,
    turn,
    user,
)


@pytest.fixture
def stored() -> StoredChat:
    """One finished turn: context node 0, sampled node 1."""
    stored = StoredChat()
    stored.play(SYSTEM, USER, ANSWER)
    return stored


@pytest.fixture
def spilling(tmp_path: Path) -> Iterator[None]:
    """A memory budget of 0, so that every blob is spilled."""
    with no_room_in_memory(tmp_path):
        yield


def test_the_first_request_is_new() -> None:
    match, _ = StoredChat().ask(turn(SYSTEM, USER))
    assert texts(match.new) == ["rules", "guess"]


def test_an_extension_continues_the_sampled_node(stored: StoredChat) -> None:
    match, _ = stored.ask(turn(SYSTEM, USER, ANSWER, MORE))
    assert match.message_node.node == 1
    assert texts(match.new) == ["higher"]


def test_repeated_messages_are_found(stored: StoredChat) -> None:
    match, message_node = stored.ask(turn(SYSTEM, USER))
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
def test_an_answer_sent_back_with_the_same_meaning_is_found(
    stored: StoredChat, echo: Message
) -> None:
    match, _ = stored.ask(turn(SYSTEM, USER, echo, MORE))
    assert match.message_node.node == 1
    again, _ = stored.ask(turn(SYSTEM, USER, echo, MORE))
    assert again.is_held


def test_a_rotating_date_changes_nothing() -> None:
    stored = StoredChat()

    def asked(day: str, *rest: Message) -> Turn:
        return turn({"role": "system", "content": f"rules\nToday's date: {day}\n"}, USER, *rest)

    _, context = stored.ask(asked("Monday"))
    stored.answer(context, ANSWER)
    match, _ = stored.ask(asked("Tuesday", ANSWER, MORE))
    assert match.message_node.node == 1
    other, _ = StoredChat(None).ask(asked("Monday"))
    assert len(other.new) == 2


def test_tools_written_differently_are_the_same_tools() -> None:
    stored = StoredChat()
    stored.play(USER, ANSWER, tools=TOOLS)
    other = b'[ {"function": {"name": "f"}, "type": "function"} ]'
    assert stored.ask(turn(USER, ANSWER, MORE, tools=other))[0].message_node.node == 1


def test_a_request_that_ends_with_an_answer_keeps_the_tokens_of_the_answer(
    stored: StoredChat,
) -> None:
    asked_on = turn(SYSTEM, USER, ANSWER)
    match, context = stored.ask(asked_on)
    assert (match.message_node.node, match.new) == (1, [])
    assert stored.ask(asked_on)[0].is_held
    assert stored.ask(turn(SYSTEM, USER, ANSWER, MORE))[0].message_node.node == 1
    more = assistant("or 5")
    answer = stored.answer(context, more)
    match, last = stored.ask(turn(SYSTEM, USER, ANSWER, more, MORE))
    assert match.message_node is answer
    assert stored.texts(last) == ["rules", "guess", "4", "or 5", "higher"]


@pytest.mark.parametrize("seen", ["let me", "let"])
def test_a_truncated_answer_merged_with_the_next_one_is_found(seen: str) -> None:
    """Codex resends the visible part of a truncated turn; its items are then adjacent."""
    stored = StoredChat()
    _, context = stored.ask(turn(USER))
    cut = read_message(msgspec.json.encode(assistant("let me")), 0)
    stored.history.add_sampled(context, cut, 1, is_void=True)
    stored.num_nodes = 2
    _, context = stored.ask(turn(USER, assistant(seen)))
    call = {"id": "call_s_1_0", "function": {"name": "f", "arguments": "{}"}}
    made: Message = {"role": "assistant", "content": "", "tool_calls": [call]}
    answer = stored.answer(context, made)
    result: Message = {"role": "tool", "tool_call_id": "call_s_1_0", "content": "42"}
    match, _ = stored.ask(turn(USER, {**made, "content": seen}, result))
    assert match.message_node is answer
    assert len(match.new) == 1
    assert stored.ask(turn(USER, assistant(seen), made, result))[0].is_held
    assert stored.cause is None


@pytest.mark.parametrize("name", ["f", ""])
def test_an_answer_after_an_agents_own_call_or_empty_turn_is_found(name: str) -> None:
    def made(name: str, content: str = "") -> Message:
        call = {"id": "call_0", "function": {"name": name, "arguments": "{}"}}
        shown: Message = {"role": "assistant", "content": content}
        return {**shown, "tool_calls": [call]} if name else shown

    stored = StoredChat()
    _, context = stored.ask(turn(USER, made(name)))
    answer = stored.answer(context, ANSWER)
    for other in (made("g"), made(name, "4")):
        assert stored.ask(turn(USER, other, MORE))[0].message_node.parent is None
    assert stored.ask(turn(USER, made(name), ANSWER, MORE))[0].message_node is answer


def test_each_message_is_stored_once(stored: StoredChat) -> None:
    before = stored.history.num_bytes
    request = turn(SYSTEM, USER, ANSWER, MORE)
    _, message_node = stored.ask(request)
    assert stored.history.num_bytes == before + len(request.messages[-1]) + MESSAGE_NODE_BYTES
    assert [each.raw for each in message_node.line()] == [
        *request.messages[:2],
        message_node.line()[2].raw,
        request.messages[3],
    ]


LONG = user("x" * LONG_BYTES)


def test_a_long_message_is_one_blob_for_all_turns_and_siblings(stored: StoredChat) -> None:
    sibling = StoredChat()
    sibling.play(SYSTEM, LONG, ANSWER)
    before = stored.history.num_bytes
    _, message_node = stored.ask(turn(SYSTEM, USER, ANSWER, LONG))
    _, edited = stored.ask(turn(SYSTEM, user("other"), LONG, MORE))
    assert stored.history.num_bytes < before + 6 * MESSAGE_NODE_BYTES
    blob = message_node.content
    assert isinstance(blob, Blob)
    assert [each.content for each in edited.line() if each.content is blob] == [blob]
    assert blob in [each.content for each in sibling.history.sampled[0].line()]
    assert stored.history.blob_bytes == sibling.history.blob_bytes == blob.num_bytes
    ended = weakref.ref(blob)
    for history in (stored.history, sibling.history):
        history.forget()
    del message_node, edited, blob, history, stored.history, sibling.history
    assert ended() is None


def test_its_byte_count_matches_the_allocated_memory() -> None:
    tracemalloc.start()
    stored, messages = StoredChat(), list[Message]()
    for n in range(300):
        messages += [user(f"question {n}, in some words"), assistant(f"answer {n}, in others")]
        array = array_turn(*messages[:-1])
        stored.answer(stored.history.hold(stored.history.match(array), 2 * n), messages[-1])
    del array, messages
    gc.collect()
    taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert 0.75 < stored.history.num_bytes / taken < 1.25


def test_a_history_with_spilled_messages_is_continued(stored: StoredChat, spilling: None) -> None:
    _, context = stored.ask(turn(SYSTEM, USER, ANSWER, LONG))
    answer_sent = assistant("y" * LONG_BYTES)
    answer = stored.answer(context, answer_sent)
    assert blobs.spill_over() > 2 * LONG_BYTES
    match, message_node = stored.ask(turn(SYSTEM, USER, ANSWER, LONG, answer_sent, MORE))
    assert (match.message_node, texts(match.new)) == (answer, ["higher"])
    assert stored.texts(message_node)[3:] == ["x" * LONG_BYTES, "y" * LONG_BYTES, "higher"]
    match, _ = stored.ask(turn(SYSTEM, LONG, answer_sent))
    assert match.deepest.depth == 1


def test_answers_with_the_same_text_are_distinguished_by_reasoning(stored: StoredChat) -> None:
    _, context = stored.ask(turn(SYSTEM, user("why")))
    answers: list[Message] = [
        {"role": "assistant", "content": "so", "reasoning_content": why} for why in ("a", "b")
    ]
    message_nodes = [stored.answer(context, answer) for answer in answers]
    for answer, message_node in zip(answers, message_nodes, strict=True):
        assert stored.ask(turn(SYSTEM, user("why"), answer, MORE))[0].message_node is message_node


def read_blocks(unit: bytes, position: int) -> list[ChatMessage]:
    """Read a unit of an invented dialect whose units are lists of [role, text]."""
    return [
        read_message(msgspec.json.encode({"role": role, "content": text}), position)
        for role, text in msgspec.json.decode(unit)
    ]


def block_turn(*units: list[tuple[str, str]]) -> Turn:
    return Turn(messages=[msgspec.json.encode(unit) for unit in units], read=read_blocks)


def test_units_of_another_dialect_match_the_same_messages(stored: StoredChat) -> None:
    match, _ = stored.ask(
        block_turn([("system", "rules"), ("user", "guess")], [("assistant", "4")], [("user", "on")])
    )
    assert match.message_node.node == 1
    assert texts(match.new) == ["on"]
    assert stored.ask(turn(SYSTEM, USER, ANSWER, user("on")))[0].is_held


def test_a_unit_of_several_messages_is_read_once() -> None:
    stored = StoredChat()
    unit = [("user", "a"), ("user", "b")]
    _, context = stored.ask(block_turn(unit))
    stored.answer(context, ANSWER)
    asked = msgspec.structs.replace(block_turn(unit, [("assistant", "4")]), read=_refuse_user)
    assert stored.ask(asked)[0].message_node.node == 1


def _refuse_user(unit: bytes, position: int) -> list[ChatMessage]:
    assert position == 1, "the first unit is stored by its bytes"
    return read_blocks(unit, position)


def test_a_unit_without_messages_changes_nothing(stored: StoredChat) -> None:
    asked = block_turn([("system", "rules"), ("user", "guess")], [], [("assistant", "4")], [])
    assert stored.ask(asked)[0].message_node.node == 1
    with pytest.raises(SessionError, match="at least one"):
        stored.ask(block_turn([]))


def test_a_partly_known_unit_continues_from_the_last_answer(stored: StoredChat) -> None:
    stored.ask(turn(SYSTEM, USER, ANSWER, user("a")))
    match, _ = stored.ask(
        block_turn(
            [("system", "rules"), ("user", "guess")],
            [("assistant", "4")],
            [("user", "a"), ("user", "b")],
        )
    )
    assert match.message_node.node == 1
    assert texts(match.new) == ["a", "b"]


def test_the_number_of_remembered_spellings_is_bounded(stored: StoredChat) -> None:
    for n in range(100):
        echo = {"role": "assistant", "content": "4", "nonce": n}
        assert stored.ask(turn(SYSTEM, USER, echo))[0].message_node.node <= 2
    message_nodes = {id(message_node): message_node for message_node in _all_spots(stored)}
    num_keys = sum(len(message_node.children or {}) for message_node in message_nodes.values())
    assert num_keys <= (ALIASES_PER_NODE + 3) * len(message_nodes)


def test_counting_bytes_takes_the_same_time_for_any_number_of_answers(stored: StoredChat) -> None:
    """Bytes are counted at each call, and a repeated request adds one answer each time."""
    message = read_message(msgspec.json.encode(ANSWER), 0)
    _, context = stored.ask(turn(SYSTEM, USER))
    num_events: list[int] = []
    before = stored.history.num_bytes
    for node in range(10, 60):
        stored.history.add_sampled(context, message, node)
        num_events.append(0)
        sys.setprofile(lambda *_: operator.setitem(num_events, -1, num_events[-1] + 1))
        num_bytes = stored.history.num_bytes
        sys.setprofile(None)
        assert num_bytes == before + (node - 9) * len(message.text())
    assert len(set(num_events)) == 1
    stored.history.catch_up()
    assert stored.history.num_bytes > num_bytes


def _all_spots(stored: StoredChat) -> list:  # type: ignore[type-arg] # of message_nodes
    waiting, found = list(stored.history.roots.values()), []
    while waiting:
        message_node = waiting.pop()
        found.append(message_node)
        waiting += dict.fromkeys((message_node.children or {}).values())
    return found


def test_a_growing_array_is_split_only_after_its_known_prefix() -> None:
    stored = StoredChat()
    messages: list[Message] = [SYSTEM, USER]
    for n in range(40):
        match, context = stored.ask(array_turn(*messages))
        assert len(match.lookup.units) == (1 if n else 2)
        assert match.message_node.node == (2 * n - 1 if n else -1)
        stored.answer(context, assistant(f"a{n}"))
        messages += [assistant(f"a{n}"), user(f"u{n}")]


def test_an_array_that_differs_from_a_known_one_is_read_completely() -> None:
    stored = StoredChat()
    _, context = stored.ask(array_turn(SYSTEM, USER))
    stored.answer(context, ANSWER)
    stored.ask(array_turn(SYSTEM, USER, ANSWER, MORE))
    match, _ = stored.ask(array_turn(SYSTEM, USER, ANSWER, user("lower")))
    assert match.message_node.node == 1
    assert texts(match.new) == ["lower"]
    edited, _ = stored.ask(array_turn(SYSTEM, USER, assistant("5"), MORE))
    assert texts(edited.new) == ["rules", "guess", "5", "higher"]


def test_differences_healed_in_a_known_prefix_are_counted_once() -> None:
    stored = StoredChat()
    stored.ask(array_turn(USER))
    stored.ask(array_turn(USER, MORE))
    part = {"type": "text", "text": "higher", "cache_control": {"type": "ephemeral"}}
    stored.ask(array_turn(USER, {"role": "user", "content": [part]}, user("new")))
    assert stored.log.report().healed == {"cache_marker": 1, "part_list": 1}


def test_a_reused_call_id_names_another_call() -> None:
    def asked(name: str) -> Turn:
        call = {"id": "call_0", "function": {"name": name, "arguments": "{}"}}
        shown: Message = {"role": "assistant", "tool_calls": [call]}
        return turn(USER, shown, {"role": "tool", "tool_call_id": "call_0", "content": "42"})

    stored = StoredChat()
    stored.ask(asked("f"))
    match, _ = stored.ask(asked("g"))
    assert not match.is_held
    assert match.new[1].tool_calls is not None
    assert match.new[1].tool_calls[0].function.name == "g"


def test_a_repeated_array_is_found_without_splitting_it() -> None:
    stored = StoredChat()
    stored.ask(array_turn(SYSTEM, USER))
    match, _ = stored.ask(array_turn(SYSTEM, USER))
    assert match.is_held
    assert match.lookup.units == []


def test_an_invalid_message_is_named_by_its_position_in_the_request() -> None:
    stored = StoredChat()
    stored.ask(array_turn(SYSTEM, USER))
    with pytest.raises(SessionError, match=r"messages\[2\]: unknown role"):
        stored.ask(array_turn(SYSTEM, USER, {"role": "wizard"}))
    system, array = msgspec.json.encode(SYSTEM), msgspec.json.encode([USER, {"role": "wizard"}])
    with pytest.raises(SessionError, match=r"messages\[1\]: unknown role"):
        stored.ask(Turn(messages=[system], messages_raw=array))
    with pytest.raises(SessionError, match="messages"):
        stored.ask(Turn(messages=[], messages_raw=b"{}"))
