"""Storage of relayed requests: each message once, in whatever order and shape it arrives."""

import random
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rollmesh.runtime import blobs
from rollmesh.runtime.conversation.forks import ForkCause
from rollmesh.serve.interception.pieces import joined
from rollmesh.serve.interception.relay.history import (
    MIN_PREFIX_BYTES,
    NODE_BYTES,
    HistoryStore,
    StoredRequest,
)

IMAGE_BYTES = 100_000
READ_BYTES = 20_000
"""Size of one read."""


def hold(
    history: HistoryStore, raw: bytes, num_reads: int = 1, key: str = "messages"
) -> StoredRequest | None:
    """Store a body that arrives in `num_reads` reads; it must be forwarded unchanged."""
    body = history.follow()
    step = -(-len(raw) // num_reads) or 1
    for at in range(0, len(raw), step):
        body.append(raw[at : at + step])
    stored = history.hold(body, key)
    assert joined(stored.pieces) == raw
    return stored.request


def screenshot(number: int) -> dict[str, Any]:
    url = f"data:image/png;base64,{number:04}".ljust(IMAGE_BYTES, "A")
    return {"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}


def messages_of(request: StoredRequest) -> list[bytes]:
    return [joined(pieces) for pieces in request.node.messages()]


def body(*messages: object, **settings: object) -> bytes:
    return msgspec.json.encode({"model": "m", "messages": list(messages), **settings})


def message_of(text: str, role: str = "user") -> dict[str, str]:
    return {"role": role, "content": text}


def test_a_growing_history_is_stored_once_and_restored() -> None:
    history = HistoryStore(min_prefix_bytes=0)
    messages: list[Any] = [message_of("rules " * 50, "system")]
    requests = []
    for turn in range(40):
        messages += [
            message_of(f"answer {turn} " * 30, "assistant"),
            message_of(f"result {turn} " * 30),
        ]
        request = hold(history, body(*messages))
        assert request is not None
        assert request.fork == ""
        requests.append((request, list(messages)))
    for request, sent in requests:
        assert [msgspec.json.decode(raw) for raw in messages_of(request)] == sent
    # The text is stored, and once more as the prefix that matches the next request.
    assert history.num_bytes - 81 * NODE_BYTES < 2.05 * len(body(*messages))


@pytest.mark.parametrize("seed", range(20))
def test_histories_in_any_order_are_restored(seed: int) -> None:
    chance = random.Random(seed)
    history = HistoryStore(min_prefix_bytes=0)
    line: list[Any] = []
    for _ in range(60):
        match chance.randrange(5):
            case 0:
                line = line[: chance.randrange(len(line) + 1)]
            case 1 if line:
                line[chance.randrange(len(line))] = message_of(f"edit {chance.random()}")
            case _:
                texts = ["a", 'quote "]', "b" * 30_000, "\u00e9,]", 'x"' * 9_000]
                line.append(message_of(chance.choice(texts)))
        raw = body(*line)
        if chance.randrange(2):
            raw = msgspec.json.format(raw, indent=2)
        request = hold(history, raw, chance.randrange(1, 9))
        assert request is not None
        assert [msgspec.json.decode(each) for each in messages_of(request)] == line


def test_the_same_request_is_recognised_with_any_white_space() -> None:
    history = HistoryStore(min_prefix_bytes=0)
    one = hold(history, body(message_of("a"), temperature=0))
    spaced = hold(history, msgspec.json.format(body(message_of("a"), temperature=0)))
    warmer = hold(history, body(message_of("a"), temperature=1))
    other = hold(history, body(message_of("b"), temperature=0))
    assert one
    assert [one.is_same(each) for each in (one, warmer, other) if each] == [
        True,
        False,
        False,
    ]
    assert spaced
    assert one.settings == spaced.settings


def test_an_image_is_stored_once_even_if_its_message_changes() -> None:
    image = "data:image/png;base64," + "QUJD" * 10_000

    def shown(marker: bool) -> dict[str, Any]:
        part = {"type": "image_url", "image_url": {"url": image}}
        return {"role": "user", "content": [{**part, "cache_control": {}} if marker else part]}

    history = HistoryStore(min_prefix_bytes=0)
    first = hold(history, body(shown(True)))
    again = hold(history, body(shown(False), message_of("ok", "assistant"), shown(True)))
    assert first
    assert again
    assert msgspec.json.decode(messages_of(again)[0]) == shown(False)
    assert msgspec.json.decode(messages_of(again)[2]) == shown(True)
    assert history.num_blob_bytes == len(image)
    assert history.num_bytes < 10_000


def test_while_a_long_history_is_received_only_its_new_part_is_buffered() -> None:
    history = HistoryStore(min_prefix_bytes=0)
    shown: list[Any] = []
    for number in range(6):
        shown.append(screenshot(number))
        raw = body(*shown)
        coming = history.follow()
        for at in range(0, len(raw), READ_BYTES):
            coming.append(raw[at : at + READ_BYTES])
        assert len(coming.rest) < IMAGE_BYTES + READ_BYTES
        request, forwarded = history.hold(coming, "messages")
        assert joined(forwarded) == raw
        assert sum(len(piece) for piece in forwarded if isinstance(piece, bytes)) < 2000
        assert request
        assert request.fork == ""
        shown.append(message_of("click", "assistant"))


def test_an_agent_that_sends_only_the_last_images_has_each_stored_once() -> None:
    history = HistoryStore(min_prefix_bytes=0)
    messages: list[Any] = []
    for number in range(8):
        messages.append(screenshot(number))
        old = [
            message_of("(an old screenshot)") if each["role"] == "user" else each
            for each in messages
        ]
        request = hold(history, body(*old[:-5], *messages[-5:]), num_reads=9)
        assert request
        messages.append(message_of("click", "assistant"))
    assert history.num_blob_bytes == 8 * IMAGE_BYTES
    assert history.num_bytes < 100_000


def test_sessions_with_equal_contents_share_their_bytes() -> None:
    one, other = HistoryStore(min_prefix_bytes=0), HistoryStore(min_prefix_bytes=0)
    text = message_of("a long text " * 3000)
    first, second = hold(one, body(screenshot(1), text)), hold(other, body(text, screenshot(1)))
    assert first
    assert second
    image, words = (pieces[1] for pieces in first.node.messages())
    shared = [pieces[1] for pieces in second.node.messages()]
    assert shared[0] is words
    assert shared[1] is image


def test_spilled_contents_are_still_matched_and_forwarded(tmp_path: Path) -> None:
    history = HistoryStore(min_prefix_bytes=0)
    first = body(screenshot(1))
    assert hold(history, first)
    blobs.settle(0, tmp_path)
    try:
        assert blobs.spill_over() >= IMAGE_BYTES
    finally:
        blobs.settle(sys.maxsize, None)
    raw = body(screenshot(1), message_of("click", "assistant"), screenshot(2))
    coming = history.follow()
    for at in range(0, len(raw), READ_BYTES):
        coming.append(raw[at : at + READ_BYTES])
    assert coming.num_matched == len(first) - len(b"]}")
    assert joined(history.hold(coming, "messages").pieces) == raw


@pytest.mark.parametrize(
    ("one", "other", "messages"),
    [
        (b'{"prompt":[1,2]}', b'{"prompt":[1,23,4]}', [b"1", b"23", b"4"]),
        (b'{"prompt":[1,2]}', b'{"prompt":[12]}', [b"12"]),
        (b'{"prompt":[1,2]}', b'{"prompt":[1,2 , 3 ]}', [b"1", b"2", b"3"]),
        (b'{"prompt":[1]}', b'{"prompt":[1],"prompt":[0,7]}', [b"0", b"7"]),
        (b'{"prompt":[1]}', b'{"prompt":[1],"prompt":[7]}', [b"7"]),
        (b'{"prompt":[1,2]}', b'{"prompt":[1,2,]}', None),
        (b'{"prompt":[1,2]}', b'{"prompt":[1,2', None),
    ],
)
def test_a_body_that_shares_a_prefix_is_parsed_like_a_new_one(
    one: bytes, other: bytes, messages: list[bytes] | None
) -> None:
    history = HistoryStore(min_prefix_bytes=0)
    assert hold(history, one, key="prompt")
    request = hold(history, other, key="prompt")
    assert (messages_of(request) if request else None) == messages


@pytest.mark.parametrize(
    ("key", "raw", "messages"),
    [
        ("input", b'{"input":"hi"}', [b'"hi"']),
        ("input", b'{"input":"hi","prompt":{"id":"p"}}', [b'"hi"']),
        ("prompt", b'{"prompt":[1,2,3]}', [b"1", b"2", b"3"]),
        ("prompt", b'{"model":"hi","prompt":"hi"}', [b'"hi"']),
        ("messages", b"{}", []),
    ],
)
def test_the_history_is_read_from_the_dialects_key(
    key: str, raw: bytes, messages: list[bytes]
) -> None:
    request = hold(HistoryStore(min_prefix_bytes=0), raw, key=key)
    assert request is not None
    assert messages_of(request) == messages


@pytest.mark.parametrize("raw", [b"", b"[]", b"{", b'{"messages":[}', b"\xff", b"[" * 5000])
def test_an_invalid_body_is_no_request(raw: bytes) -> None:
    assert hold(HistoryStore(min_prefix_bytes=0), raw) is None


def test_a_fork_has_one_of_the_documented_causes() -> None:
    history = HistoryStore(min_prefix_bytes=0)
    a, b, c = message_of("a"), message_of("b", "assistant"), message_of("c")
    tools = [{"type": "function"}]

    def fork(*messages: object, **settings: object) -> str:
        request = hold(history, body(*messages, **settings))
        assert request is not None
        assert request.fork in ("", *ForkCause)
        return request.fork

    assert fork(a) == ""
    assert fork(a, b, c) == ""
    assert fork(a) == ""
    assert fork(a, b, c, b, c) == ""
    assert fork(a, b, message_of("edited")) == "rewind"
    assert fork(message_of("edited"), b) == "edited_history"
    assert fork(message_of("edited"), b, c) == ""
    assert fork(a, b, c, b, message_of("x"), b) == "rewind"
    assert fork(message_of("another task")) == "restart"
    assert fork(a, message_of("answers dropped")) == "compaction"
    assert fork(a, message_of("in short"), b, c) == "compaction"
    assert fork(a, b, c, tools=tools) == "changed_tools"
    assert fork(a, b, c, tools=tools) == ""
    assert fork(a, b, c, tools=tools, system="s") == "changed_system_text"
    assert fork(message_of("look"), tools=[], system="helper") == "subagent_or_side_call"


def test_a_first_system_message_is_the_system_text_of_a_chat() -> None:
    history = HistoryStore(min_prefix_bytes=0)
    one, other, title = (message_of(text, "system") for text in ("one", "other", "title"))
    task, answer = message_of("task"), message_of("4", "assistant")

    def fork(*messages: object) -> str:
        request = hold(history, body(*messages))
        assert request is not None
        return request.fork

    assert fork(one, task) == ""
    assert fork(one, task, answer, message_of("more")) == ""
    assert fork(other, task, answer, message_of("more")) == "changed_system_text"
    assert fork(title, message_of("what is it about?")) == "subagent_or_side_call"
    assert fork(one, message_of("another task")) == "restart"
    assert fork(one, message_of("edited"), answer, message_of("more")) == "edited_history"
    longer = (
        one,
        task,
        answer,
        message_of("more"),
        message_of("5", "assistant"),
        message_of("go on"),
    )
    assert fork(*longer) == ""
    assert (
        fork(one, message_of("summary"), message_of("5", "assistant"), message_of("go on"))
        == "compaction"
    )


@pytest.mark.parametrize("seed", range(20))
def test_short_bodies_are_stored_like_others(seed: int) -> None:
    chance = random.Random(seed)
    short, prefixed = HistoryStore(), HistoryStore(min_prefix_bytes=0)
    messages: list[dict[str, str]] = []
    for turn in range(30):
        if chance.random() < 0.3:
            del messages[chance.randrange(len(messages) + 1) :]
        messages += [message_of(f"result {turn} " * 8), message_of("ok", "assistant")][
            : chance.randint(1, 2)
        ]
        raw = body(*messages, temperature=chance.choice((0, 1)))
        one, other = hold(short, raw), hold(prefixed, raw)
        assert one
        assert other
        assert messages_of(one) == messages_of(other)
        assert (one.settings, one.fork) == (other.settings, other.fork)
        assert len(raw) < MIN_PREFIX_BYTES
    assert short.num_bytes < prefixed.num_bytes
