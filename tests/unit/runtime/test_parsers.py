"""Answers to raw prompts are the sampled text; a finished reply equals its parser's answer."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollmesh.runtime.chat import ParsedReply, ParseOptions
from rollmesh.runtime.tokens.parsers import PlainTextParser
from rollmesh.runtime.tokens.prompts import Prompts
from rollmesh.runtime.tokens.tokenizer import Tokenizer


def read(
    tokenizer: Tokenizer, chunks: list[list[int]], stop: tuple[str, ...]
) -> tuple[str, ParsedReply]:
    """The joined pieces, and the answer."""
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


END = "<|im_end|>"
CALL_TEXT = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
PIECES = [
    "hello",
    " world",
    "\n",
    " ",
    "\xe9",
    "\u2029",
    "<think>",
    "</think>",
    CALL_TEXT,
    END,
    "Obs",
]


def fold(prompts: Prompts, options: ParseOptions, token_ids: Sequence[int]) -> ParsedReply:
    reader = prompts.reader(options)
    reader.feed(token_ids)
    reader.end(len(token_ids))
    return reader.answer()


@given(
    pieces=st.lists(st.sampled_from(PIECES), max_size=6),
    ends=st.sampled_from(["", END]),
    num_cut=st.integers(0, 2),
    reads_calls=st.booleans(),
    stop=st.sampled_from([(), ("Obs",)]),
    prefill=st.sampled_from(["", "<think>"]),
)
def test_a_finished_reply_says_what_its_reader_tells(
    prompts: Prompts,
    tokenizer: Tokenizer,
    pieces: list[str],
    ends: str,
    num_cut: int,
    reads_calls: bool,
    stop: tuple[str, ...],
    prefill: str,
) -> None:
    ids = tokenizer.encode("".join(pieces))
    ids = ids[: len(ids) - num_cut] + tokenizer.encode(ends)
    options = ParseOptions(stop, reads_calls, "c", tuple(tokenizer.encode(prefill)))
    assert prompts.answer(options, ids) == fold(prompts, options, ids)


@pytest.mark.parametrize("said", ["", " I guess 4\n", f"so{END}", f"{END}", f"a{END}b"])
def test_content_alone_is_told_without_its_end_and_outer_white_space(
    prompts: Prompts, tokenizer: Tokenizer, said: str
) -> None:
    answer = prompts.answer(ParseOptions(), tokenizer.encode(said))
    assert answer == ParsedReply(said.partition(END)[0].strip())
