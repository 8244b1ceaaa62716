"""What is kept of requests: each message once, whatever order and shape they come in."""

import random
from typing import Any

import msgspec
import pytest

from rollmesh.serve.interception.relay.threads import MAX_TIP_BYTES, Threads


def body(*messages: object, **settings: object) -> bytes:
    return msgspec.json.encode({"model": "m", "messages": list(messages), **settings})


def said(text: str, role: str = "user") -> dict[str, str]:
    return {"role": role, "content": text}


def test_a_growing_history_is_kept_once_and_told_again() -> None:
    threads = Threads()
    messages: list[Any] = [said("rules " * 50, "system")]
    told = []
    for turn in range(40):
        messages += [said(f"answer {turn} " * 30, "assistant"), said(f"result {turn} " * 30)]
        request = threads.hold(body(*messages))
        assert request is not None
        assert request.fork == ""
        told.append((request, list(messages)))
    for request, sent in told:
        assert [msgspec.json.decode(raw) for raw in request.spot.messages()] == sent
    assert threads.num_bytes < 1.05 * len(body(*messages))


@pytest.mark.parametrize("seed", range(20))
def test_any_order_of_histories_is_told_again(seed: int) -> None:
    chance = random.Random(seed)
    threads = Threads()
    line: list[Any] = []
    for _ in range(60):
        match chance.randrange(5):
            case 0:
                line = line[: chance.randrange(len(line) + 1)]
            case 1 if line:
                line[chance.randrange(len(line))] = said(f"edit {chance.random()}")
            case _:
                line.append(said(chance.choice(["a", 'quote "]', "b" * 3000, "\u00e9,]"])))
        raw = body(*line)
        if chance.randrange(2):
            raw = msgspec.json.format(raw, indent=2)
        request = threads.hold(raw)
        assert request is not None
        assert [msgspec.json.decode(each) for each in request.spot.messages()] == line


def test_the_same_request_is_known_whatever_its_white_space() -> None:
    threads = Threads()
    one = threads.hold(body(said("a"), temperature=0))
    spaced = threads.hold(msgspec.json.format(body(said("a"), temperature=0)))
    warmer = threads.hold(body(said("a"), temperature=1))
    other = threads.hold(body(said("b"), temperature=0))
    assert one
    assert [one.asks_the_same(each) for each in (one, warmer, other) if each] == [
        True,
        False,
        False,
    ]
    assert spaced
    assert one.settings == spaced.settings


def test_an_image_is_kept_once_though_its_message_changes() -> None:
    image = "data:image/png;base64," + "QUJD" * 10_000

    def shown(marker: bool) -> dict[str, Any]:
        part = {"type": "image_url", "image_url": {"url": image}}
        return {"role": "user", "content": [{**part, "cache_control": {}} if marker else part]}

    threads = Threads()
    first = threads.hold(body(shown(True)))
    again = threads.hold(body(shown(False), said("ok", "assistant"), shown(True)))
    assert first
    assert again
    assert msgspec.json.decode(again.spot.messages()[0]) == shown(False)
    assert msgspec.json.decode(again.spot.messages()[2]) == shown(True)
    assert threads.num_bytes < len(image) + 1000


def test_a_history_too_long_to_compare_is_walked() -> None:
    threads = Threads()
    long = said("x " * MAX_TIP_BYTES)
    first, second = threads.hold(body(long)), threads.hold(body(long, said("b")))
    assert first
    assert second
    assert second.spot.parent is first.spot
    assert second.fork == ""


@pytest.mark.parametrize(
    ("raw", "messages"),
    [
        (b'{"input":"hi"}', [b'"hi"']),
        (b'{"prompt":[1,2,3]}', [b"1", b"2", b"3"]),
        (b'{"model":"hi","prompt":"hi"}', [b'"hi"']),
        (b"{}", []),
    ],
)
def test_other_dialects_have_their_histories_elsewhere(raw: bytes, messages: list[bytes]) -> None:
    request = Threads().hold(raw)
    assert request is not None
    assert request.spot.messages() == messages


@pytest.mark.parametrize("raw", [b"", b"[]", b"{", b'{"messages":[}', b"\xff", b"[" * 5000])
def test_what_is_no_request_is_none(raw: bytes) -> None:
    assert Threads().hold(raw) is None


def test_forks_are_told_with_their_cause() -> None:
    threads = Threads()
    a, b, c = said("a"), said("b", "assistant"), said("c")
    tools = [{"type": "function"}]

    def fork(*messages: object, **settings: object) -> str:
        request = threads.hold(body(*messages, **settings))
        assert request is not None
        return request.fork

    assert fork(a) == ""
    assert fork(a, b, c) == ""
    assert fork(a) == ""
    assert fork(a, b, c, b, c) == ""
    assert fork(a, b, said("edited")) == "rewound"
    assert fork(said("edited"), b) == "restarted"
    assert fork(said("edited"), b, c) == ""
    assert fork(a, b, c, b, said("x"), b) == "rewound"
    assert fork(said("edited"), said("y"), c) == "history_changed"
    assert fork(a, b, c, tools=tools) == "tools_changed"
    assert fork(a, b, c, tools=tools) == ""
    assert fork(a, b, c, tools=tools, system="s") == "system_changed"
