"""Lookups in the message trie, prefix hashes, keys, and the cache of parsed units."""

import asyncio
import base64
import gc
import os
import subprocess
import sys
import zlib
from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest

from rollmesh.runtime.chat import ChatMessage, Turn, read_message
from rollmesh.runtime.conversation.message_trie import (
    MAX_PREFIX_HASHES,
    MAX_UNITS,
    MIN_UNIT_BYTES,
    TAIL_BYTES,
    Lookup,
    Match,
    MessageNode,
    ParseCache,
    PrefixIndex,
    key_of,
    read_chat,
    split_array,
    unit_key,
)
from rollmesh.runtime.tokens.prompts import Prompts
from rollmesh.testing.sampler import ScriptedSampler
from tests.unit.runtime.session_calls import (
    MORE,
    SYSTEM,
    USER,
    Message,
    ReplyIds,
    assistant,
    open_session,
)
from tests.unit.runtime.stored_chat import StoredChat, array_turn

NUM_WORDS = 10_000
LONG: Message = {"role": "user", "content": [{"type": "text", "text": "word " * NUM_WORDS}]}


def test_units_that_were_matched_are_released() -> None:
    stored = StoredChat()
    _, context = stored.ask(array_turn(SYSTEM, USER))
    stored.answer(context, assistant("4"))
    match, _ = stored.ask(array_turn(SYSTEM, USER, assistant("4"), MORE))
    lookup = match.lookup
    assert (lookup.num_units, lookup.units, lookup.pending) == (4, [msgspec.json.encode(MORE)], {})


def test_an_unreadable_unit_is_named_by_its_position_in_the_array() -> None:
    stored = StoredChat()
    _, context = stored.ask(array_turn(SYSTEM, USER))
    stored.answer(context, assistant("4"))
    bad: Message = {"role": "wizard"}
    for known in (1, 2):
        with pytest.raises(Exception, match=r"^messages\[4\]: unknown role 'wizard'"):
            stored.ask(array_turn(SYSTEM, USER, assistant("4"), MORE, bad))
        assert stored.ask(array_turn(SYSTEM, USER, assistant("4"), MORE))[0].is_held is (known == 2)


@pytest.mark.parametrize("is_array", [False, True])
async def test_no_part_of_a_request_is_retained_while_its_turn_is_sampled(
    prompts: Prompts, reply_ids: ReplyIds, is_array: bool
) -> None:
    """This includes the first turn of a session, a long text in a thread, and a turn that
    extends it.
    """
    sampler = ScriptedSampler()
    session = open_session(sampler, prompts, 10**6)
    history: list[Message] = [SYSTEM, LONG]
    for answer in ("4", "5"):
        units = [msgspec.json.encode(message) for message in history]
        kept = b"[%b]" % b",".join(units) if is_array else units[-1]
        asked = Turn(messages_raw=kept, messages=[]) if is_array else Turn(messages=units)
        with ThreadPoolExecutor() as threads:
            asyncio.get_running_loop().set_default_executor(threads)
            (reply,) = await session.attach(asked)
        await asyncio.sleep(0)  # the stack of the loop holds the awaited objects until then
        reply.join()
        del asked, units
        gc.collect()
        num_references = sys.getrefcount(kept)
        assert num_references == 2
        assert not [each for each in gc.get_objects() if type(each) in (Lookup, Match)]
        sampler.generations[-1].end(*reply_ids(answer))
        session.finish(reply)
        session.delivered(reply)
        reply.leave()
        history += [assistant(answer), LONG]


START, END = MessageNode(None, b""), MessageNode(None, b"{}")


def test_a_growing_array_is_found_by_its_prefix() -> None:
    prefixes = PrefixIndex()
    prefixes.add(None, START, b'[{"a":1}]', END, 1)
    found = prefixes.find(START, b'[{"a":1}, {"b":2}]')
    assert found is not None
    assert found.end is END
    assert list(found.rest(b'[{"a":1}, {"b":2}]')) == [b'{"b":2}']
    assert list(found.rest(b'[{"a":1}]')) == []


def test_other_prefixes_and_other_start_nodes_are_not_found() -> None:
    prefixes = PrefixIndex()
    prefixes.add(None, START, b'[{"a":1}]', END, 1)
    assert prefixes.find(START, b'[{"a":2}]') is None
    assert prefixes.find(START, b'[{"a"') is None
    assert prefixes.find(END, b'[{"a":1}]') is None


def test_a_long_conversation_is_one_prefix_hash_of_few_segments() -> None:
    prefixes = PrefixIndex()
    array = b'[{"n":0}]'
    prefixes.add(None, START, array, END, 1)
    for n in range(1, 50):
        array = array[:-1] + b',{"n":%d}]' % n
        known = prefixes.find(START, array)
        assert known is not None
        assert known.num_units == n
        prefixes.add(known, START, array, END, n + 1)
    assert known is not None
    assert len(known.segments) <= 16


def test_only_the_newest_prefix_hashes_are_kept() -> None:
    prefixes = PrefixIndex()
    arrays = [b'[{"n":%d}]' % n for n in range(MAX_PREFIX_HASHES + 1)]
    for array in arrays:
        prefixes.add(None, START, array, END, 1)
    assert prefixes.find(START, arrays[0]) is None
    assert all(prefixes.find(START, array) for array in arrays[1:])


def test_white_space_before_the_closing_bracket_prevents_a_match() -> None:
    prefixes = PrefixIndex()
    prefixes.add(None, START, b'[{"a":1} ]', END, 1)
    assert prefixes.find(START, b'[{"a":1} ]') is None
    assert list(split_array(b'[{"a":1} ]')) == [b'{"a":1}']


def test_few_arrays_of_a_history_that_is_edited_at_each_turn_are_kept() -> None:
    prefixes = PrefixIndex()
    num_turns = 8 * MAX_PREFIX_HASHES
    known = []
    for n in range(num_turns):
        array = b'[{"n":%d}]' % n
        prefixes.add(None, START, array, END, 1)
        known.append(prefixes.find(START, array) is not None)
    assert all(known[: 2 * MAX_PREFIX_HASHES])
    assert (
        sum(known[2 * MAX_PREFIX_HASHES :])
        == (num_turns - 2 * MAX_PREFIX_HASHES) // MAX_PREFIX_HASHES
    )


def test_a_history_that_is_no_longer_edited_is_soon_found_again() -> None:
    prefixes = PrefixIndex()
    for n in range(3 * MAX_PREFIX_HASHES + 1):
        prefixes.add(None, START, b'[{"n":%d}]' % n, END, 1)
    array, num_strange = b'[{"m":0}]', 0
    for m in range(1, 50):
        found = prefixes.find(START, array)
        num_strange += found is None
        prefixes.add(found, START, array, END, m)
        array = array[:-1] + b',{"m":%d}]' % m
    assert num_strange <= MAX_PREFIX_HASHES


PROGRAM = """from rollmesh.runtime.conversation.message_trie import key_of, unit_key
print(key_of(b'a' * 9000, b'b'), unit_key(b'c' * 9000))
"""


def test_keys_are_equal_in_all_processes() -> None:
    for salt in ("1", "2"):
        env = {**os.environ, "PYTHONHASHSEED": salt}
        program = subprocess.run(
            [sys.executable, "-c", PROGRAM], env=env, stdout=subprocess.PIPE, check=True
        )
        keys = key_of(b"a" * 9000, b"b"), unit_key(b"c" * 9000)
        assert tuple(map(int, program.stdout.split())) == keys


def test_texts_that_differ_anywhere_have_different_keys() -> None:
    text = b"x" * (3 * TAIL_BYTES)
    others = [text[:at] + b"y" + text[at + 1 :] for at in range(0, len(text), 511)]
    all_texts = [text, text + b"x", *others]
    assert len({key_of(each) for each in all_texts}) == len(all_texts)
    assert len({unit_key(each) for each in all_texts}) == len(all_texts)


def test_two_units_of_one_length_and_crc_have_different_keys() -> None:
    # "plumless" and "buckeroo" are a known collision of CRC-32.
    assert zlib.crc32(b"plumless") == zlib.crc32(b"buckeroo")
    assert unit_key(b"plumless") != unit_key(b"buckeroo")


def test_moving_a_byte_to_the_next_part_changes_the_key() -> None:
    assert len({key_of(b"ab", b"c"), key_of(b"a", b"bc"), key_of(b"abc"), key_of(b"abc", b"")}) == 4


def test_a_key_fits_a_signed_integer_of_64_bits() -> None:
    assert all(-(2**63) <= key_of(b"%d" % n) < 2**63 for n in range(1000))


OLD: Message = {"role": "tool", "tool_call_id": "c", "content": "[an older screenshot]"}


def shot(number: int, role: str = "tool", num_bytes: int = MIN_UNIT_BYTES) -> Message:
    """Return a message with a screenshot."""
    shown = base64.b64encode(bytes([number]) * num_bytes).decode()
    image = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{shown}"}}
    return {"role": role, "content": [{"type": "text", "text": f"look {number}"}, image]}


class Reader:
    """Parses chat units, and counts the long ones."""

    def __init__(self) -> None:
        self.num_long = 0

    def __call__(self, raw: bytes, position: int) -> list[ChatMessage]:
        """Parse a unit, like a dialect's parser."""
        self.num_long += len(raw) >= MIN_UNIT_BYTES
        return read_chat(raw, position)


def ask(stored: StoredChat, read: Reader, *messages: Message) -> list[ChatMessage]:
    """Request and answer; return the new messages of the request."""
    match, context = stored.ask(
        Turn(messages=[], messages_raw=msgspec.json.encode(messages), read=read)
    )
    stored.answer(context, assistant("4"))
    return match.new


def test_screenshots_after_an_edit_are_not_parsed_again() -> None:
    stored, read = StoredChat(), Reader()
    ask(stored, read, SYSTEM, shot(0), assistant("4"), shot(1))
    assert read.num_long == 2
    new_messages = ask(stored, read, SYSTEM, OLD, assistant("4"), shot(1), assistant("4"), shot(2))
    assert read.num_long == 3, "only the newest is parsed"
    assert [m for m in new_messages if m.images()] == [
        read_message(msgspec.json.encode(shot(n)), 0) for n in (1, 2)
    ]
    assert all(
        m.images()[0] is stored.history.images[m.images()[0].digest] for m in new_messages[-1:]
    )


@pytest.mark.parametrize(
    "message",
    [
        pytest.param(shot(3, "assistant"), id="an assistant's"),
        pytest.param(shot(3, num_bytes=100), id="a short one"),
        pytest.param({"role": "user", "content": "x" * 2 * MIN_UNIT_BYTES}, id="a text"),
    ],
)
def test_other_units_are_parsed_again(message: Message) -> None:
    stored, read = StoredChat(), Reader()
    ask(stored, read, SYSTEM, USER, assistant("4"), message, shot(1))
    assert read.num_long == 1 + (len(msgspec.json.encode(message)) >= MIN_UNIT_BYTES)
    before = read.num_long
    ask(stored, read, SYSTEM, OLD, assistant("4"), message, shot(1))
    assert read.num_long == before + (len(msgspec.json.encode(message)) >= MIN_UNIT_BYTES)


def test_each_parser_has_its_own_cache_entries() -> None:
    stored, one, other = StoredChat(), Reader(), Reader()
    ask(stored, one, SYSTEM, USER, assistant("4"), shot(1))
    ask(stored, other, SYSTEM, OLD, assistant("4"), shot(1))
    assert (one.num_long, other.num_long) == (1, 1)


def test_the_newest_units_are_cached() -> None:
    (message,) = read_chat(msgspec.json.encode(shot(1)), 0)
    images = {image.digest: image for image in message.images()}
    parse_cache = ParseCache(images)
    units = [b"%d" % n + b"x" * MIN_UNIT_BYTES for n in range(MAX_UNITS + 1)]
    for unit in units:
        parse_cache.keep(read_chat, hash(unit), [message], [message.as_json()])
    assert len(parse_cache) == MAX_UNITS
    assert parse_cache.find(read_chat, units[0]) is None
    assert parse_cache.find(read_chat, units[-1]) == [message]
