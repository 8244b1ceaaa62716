"""What was read of units that show images is known again, wherever the unit stands then."""

import base64

import msgspec
import pytest

from rollmesh.runtime.chat import ChatMessage, Turn, read_message
from rollmesh.runtime.message_trie import MAX_UNITS, MIN_UNIT_BYTES, ParseCache, read_chat
from tests.unit.runtime.history_world import Held
from tests.unit.runtime.session_world import SYSTEM, USER, Message, said

OLD: Message = {"role": "tool", "tool_call_id": "c", "content": "[an older screenshot]"}


def shot(number: int, role: str = "tool", num_bytes: int = MIN_UNIT_BYTES) -> Message:
    """A message with a screenshot."""
    shown = base64.b64encode(bytes([number]) * num_bytes).decode()
    image = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{shown}"}}
    return {"role": role, "content": [{"type": "text", "text": f"look {number}"}, image]}


class Reader:
    """Reads chat units, and counts those of some length."""

    def __init__(self) -> None:
        self.num_long = 0

    def __call__(self, raw: bytes, position: int) -> list[ChatMessage]:
        """As the dialect's."""
        self.num_long += len(raw) >= MIN_UNIT_BYTES
        return read_chat(raw, position)


def ask(held: Held, read: Reader, *messages: Message) -> list[ChatMessage]:
    """Ask and be answered; what was new of the request."""
    match, context = held.ask(
        Turn(messages=[], messages_raw=msgspec.json.encode(messages), read=read)
    )
    held.say(context, said("4"))
    return match.new


def test_screenshots_behind_an_edit_are_not_read_again() -> None:
    held, read = Held(), Reader()
    ask(held, read, SYSTEM, shot(0), said("4"), shot(1))
    assert read.num_long == 2
    told = ask(held, read, SYSTEM, OLD, said("4"), shot(1), said("4"), shot(2))
    assert read.num_long == 3, "only the newest"
    assert [m for m in told if m.images()] == [
        read_message(msgspec.json.encode(shot(n)), 0) for n in (1, 2)
    ]
    assert all(m.images()[0] is held.history.images[m.images()[0].digest] for m in told[-1:])


@pytest.mark.parametrize(
    "message",
    [
        pytest.param(shot(3, "assistant"), id="an assistant's, who is known by less than he says"),
        pytest.param(shot(3, num_bytes=100), id="a short one"),
        pytest.param({"role": "user", "content": "x" * 2 * MIN_UNIT_BYTES}, id="a text"),
    ],
)
def test_other_units_are_read_anew(message: Message) -> None:
    held, read = Held(), Reader()
    ask(held, read, SYSTEM, USER, said("4"), message, shot(1))
    assert read.num_long == 1 + (len(msgspec.json.encode(message)) >= MIN_UNIT_BYTES)
    before = read.num_long
    ask(held, read, SYSTEM, OLD, said("4"), message, shot(1))
    assert read.num_long == before + (len(msgspec.json.encode(message)) >= MIN_UNIT_BYTES)


def test_another_reader_reads_for_himself() -> None:
    held, one, other = Held(), Reader(), Reader()
    ask(held, one, SYSTEM, USER, said("4"), shot(1))
    ask(held, other, SYSTEM, OLD, said("4"), shot(1))
    assert (one.num_long, other.num_long) == (1, 1)


def test_the_newest_units_are_known() -> None:
    (message,) = read_chat(msgspec.json.encode(shot(1)), 0)
    images = {image.digest: image for image in message.images()}
    parse_cache = ParseCache(images)
    units = [b"%d" % n + b"x" * MIN_UNIT_BYTES for n in range(MAX_UNITS + 1)]
    for unit in units:
        parse_cache.keep(read_chat, hash(unit), [message], [message.as_json()])
    assert len(parse_cache) == MAX_UNITS
    assert parse_cache.find(read_chat, units[0]) is None
    assert parse_cache.find(read_chat, units[-1]) == [message]
