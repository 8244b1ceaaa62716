"""A finished reply says what its reader would have told."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollmesh.runtime.chat import ParsedReply, ParseOptions
from rollmesh.runtime.prompts import Prompts
from rollmesh.runtime.tokenizer import Tokenizer

END = "<|im_end|>"
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
PIECES = ["hello", " world", "\n", " ", "\xe9", "\u2029", "<think>", "</think>", CALL, END, "Obs"]


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
