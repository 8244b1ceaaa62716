"""Answers to raw prompts are text as it was sampled."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollmesh.runtime.chat import ParsedReply
from rollmesh.runtime.parsers import PlainTextParser
from rollmesh.runtime.tokenizer import Tokenizer


def read(
    tokenizer: Tokenizer, chunks: list[list[int]], stop: tuple[str, ...]
) -> tuple[str, ParsedReply]:
    """What the pieces say, joined, and the answer."""
    reader = PlainTextParser(tokenizer, tokenizer.encode("<|im_end|>"), stop)
    deltas = [reader.feed(chunk) for chunk in chunks]
    last = reader.end(sum(map(len, chunks)))
    return "".join([delta.content for delta in deltas if delta]) + last.content, reader.answer()


@pytest.mark.parametrize(
    ("said", "told"),
    [
        (" <think> a ", " <think> a "),
        ("a STOP b", "a "),
        ("a STO", "a STO"),
        ("\u00e9<|im_end|>", "\u00e9"),
    ],
)
def test_all_is_text_up_to_a_stop_string(tokenizer: Tokenizer, said: str, told: str) -> None:
    pieces, answer = read(tokenizer, [tokenizer.encode(said)], ("STOP",))
    assert pieces == answer.content == told


@given(st.text(alphabet="aSTOP \u00e9\n"), st.lists(st.integers(1, 5)))
def test_the_pieces_fold_to_the_answer_however_they_are_cut(
    tokenizer: Tokenizer, said: str, sizes: list[int]
) -> None:
    ids, chunks = tokenizer.encode(said), []
    for size in sizes:
        chunks.append(ids[:size])
        ids = ids[size:]
    pieces, answer = read(tokenizer, [*chunks, ids], ("STOP", "TOP "))
    assert (
        ParsedReply(pieces)
        == answer
        == read(tokenizer, [tokenizer.encode(said)], ("STOP", "TOP "))[1]
    )
    assert "STOP" not in pieces
