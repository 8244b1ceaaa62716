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
    """Return the joined pieces and the answer."""
    reader = PlainTextParser(tokenizer, tokenizer.encode("<|im_end|>"), stop)
    deltas = [reader.feed(chunk) for chunk in chunks]
    last = reader.end(sum(map(len, chunks)))
    return "".join([delta.content for delta in deltas if delta]) + last.content, reader.answer()


@pytest.mark.parametrize(
    ("sampled", "expected"),
    [
        (" <think> a ", " <think> a "),
        ("a STOP b", "a "),
        ("a STO", "a STO"),
        ("\u00e9<|im_end|>", "\u00e9"),
    ],
)
def test_everything_before_a_stop_string_is_text(
    tokenizer: Tokenizer, sampled: str, expected: str
) -> None:
    pieces, answer = read(tokenizer, [tokenizer.encode(sampled)], ("STOP",))
    assert pieces == answer.content == expected


@given(st.text(alphabet="aSTOP \u00e9\n"), st.lists(st.integers(1, 5)))
def test_the_pieces_add_up_to_the_answer_however_they_are_split(
    tokenizer: Tokenizer, sampled: str, sizes: list[int]
) -> None:
    ids, chunks = tokenizer.encode(sampled), []
    for size in sizes:
        chunks.append(ids[:size])
        ids = ids[size:]
    pieces, answer = read(tokenizer, [*chunks, ids], ("STOP", "TOP "))
    assert (
        ParsedReply(pieces)
        == answer
        == read(tokenizer, [tokenizer.encode(sampled)], ("STOP", "TOP "))[1]
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
def test_a_finished_reply_equals_the_streamed_one(
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


@pytest.mark.parametrize("sampled", ["", " I guess 4\n", f"so{END}", f"{END}", f"a{END}b"])
def test_plain_content_has_no_end_token_and_no_outer_white_space(
    prompts: Prompts, tokenizer: Tokenizer, sampled: str
) -> None:
    answer = prompts.answer(ParseOptions(), tokenizer.encode(sampled))
    assert answer == ParsedReply(sampled.partition(END)[0].strip())
