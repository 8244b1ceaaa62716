"""A memo returns what its function made, makes it once, and keeps a budget of bytes."""

import random

import pytest

from rollmesh.core.memo import MAX_BYTES, MAX_TEXT_BYTES, Memo
from rollmesh.runtime import chat
from rollmesh.runtime.conversation import conversation, history
from rollmesh.runtime.tokens import tool_calls
from rollmesh.serve.interception.dialects import chat as chat_dialect
from rollmesh.serve.interception.dialects import request_parts

OF_TOOLS = [
    tool_calls.string_parameters,
    history.tools_key_of,
    conversation.shared_tools,
    request_parts.tools_of_messages,
    request_parts.tools_of_responses,
    request_parts._names,  # noqa: SLF001 - one of those that read tools
    chat_dialect._from_functions,  # noqa: SLF001 - the same
]


def test_a_result_is_computed_once() -> None:
    made: list[str] = []

    @Memo
    def shout(text: str, mark: str) -> str:
        made.append(text)
        return text.upper() + mark

    assert [shout("a", "!"), shout("b", "!"), shout("a", "!"), shout("a", "?")] == [
        "A!", "B!", "A!", "A?",
    ]  # fmt: skip
    assert made == ["a", "b", "a"]


def test_an_error_is_not_kept() -> None:
    tried: list[bytes] = []

    @Memo
    def refuse(raw: bytes) -> None:
        tried.append(raw)
        raise ValueError("no")

    for _ in range(2):
        with pytest.raises(ValueError, match="no"):
            refuse(b"x")
    assert len(tried) == 2


def test_the_oldest_results_are_dropped_and_long_texts_never_kept() -> None:
    made: list[int] = []

    @Memo
    def measure(text: str) -> int:
        made.append(len(text))
        return len(text)

    texts = [chr(97 + n) * (MAX_TEXT_BYTES - 1000) for n in range(20)]
    for text in texts:
        measure(text)
        assert measure.num_bytes <= MAX_BYTES
    for text in (texts[-1], texts[0], "x" * MAX_TEXT_BYTES, "x" * MAX_TEXT_BYTES):
        measure(text)
    assert len(made) == 20 + 3


def test_short_texts_are_bounded_too() -> None:
    measure = Memo(len)
    for number in range(20_000):
        measure(str(number))
    assert measure.num_bytes <= MAX_BYTES


@pytest.mark.parametrize("memo", OF_TOOLS)
def test_tools_of_ended_rollouts_are_kept_within_bounds(memo: Memo[[bytes], object]) -> None:
    rng = random.Random(1)
    for _ in range(20):
        description = rng.randbytes(200_000).hex().encode()
        memo(
            b'[{"type":"function","name":"f","function":{"name":"f","description":"%b"}}]'
            % description
        )
        assert memo.num_bytes <= MAX_BYTES


def test_system_texts_of_ended_rollouts_are_kept_within_bounds() -> None:
    rotating = chat.compile_rotating(("Today is",))
    assert rotating
    for number in range(20):
        assert chat.settled(f"{number}\n" + "x" * 400_000, rotating)
        assert chat.settled.num_bytes <= MAX_BYTES
