"""Deltas fold to the answer, however the tokens are cut."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollmesh.runtime.deltas import Delta
from rollmesh.runtime.prompts import Prompts
from rollmesh.runtime.tokenizer import Tokenizer

CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
SAID = [
    "I guess 4",
    "  I guess 4 \n",
    "<think>\nhm, higher\n</think>\n\nI guess 4",
    "<think>never closed",
    f"I call {CALL}",
    f"<think>why</think>{CALL}{CALL}",
    "",
    "a <think> in the middle",
]


def fold(deltas: list[Delta]) -> tuple[str, str, int]:
    content = "".join(d.content for d in deltas)
    reasoning = "".join(d.reasoning for d in deltas)
    return content, reasoning, sum(len(d.tool_calls) for d in deltas)


@given(said=st.sampled_from(SAID), sizes=st.lists(st.integers(1, 5), max_size=30))
def test_deltas_fold_to_the_answer_however_tokens_arrive(
    prompts: Prompts, tokenizer: Tokenizer, said: str, sizes: list[int]
) -> None:
    ids = tokenizer.encode(said + "<|im_end|>")
    reader = prompts.reader((), reads_calls=True)
    deltas: list[Delta] = []
    rest = ids
    for size in [*sizes, len(ids)]:
        delta = reader.feed(rest[:size])
        rest = rest[size:]
        if delta is not None:
            assert delta.content or delta.reasoning
            deltas.append(delta)
    answer = prompts.parse(ids, True, "call")
    deltas.append(reader.end(answer, len(ids)))
    assert fold(deltas) == (answer.content, answer.reasoning, len(answer.tool_calls))
    assert deltas[-1].num_tokens == len(ids)


PIECES = [
    *("hello", " world", "\n", " ", "<think>", "</think>", "<tool_call>", "</tool_call>"),
    *(CALL, "\xe9", "\xe9 cut in two"),
]


@given(
    pieces=st.lists(st.sampled_from(PIECES), max_size=8),
    size=st.integers(1, 4),
    reads_calls=st.booleans(),
    ends=st.booleans(),
)
def test_deltas_fold_to_the_answer_whatever_a_model_says(
    prompts: Prompts,
    tokenizer: Tokenizer,
    pieces: list[str],
    size: int,
    reads_calls: bool,
    ends: bool,
) -> None:
    ids: list[int] = []
    for piece in pieces:
        encoded = tokenizer.encode(piece)
        ids += encoded[:1] if piece.endswith("in two") else encoded
    ids += tokenizer.encode("<|im_end|>") if ends else []
    reader = prompts.reader((), reads_calls)
    deltas = [reader.feed(ids[at : at + size]) for at in range(0, len(ids), size)]
    answer = prompts.parse(ids, reads_calls, "call")
    told = fold([*filter(None, deltas), reader.end(answer, len(ids))])
    assert told == (answer.content, answer.reasoning, len(answer.tool_calls))


def test_text_is_sent_as_it_comes(prompts: Prompts, tokenizer: Tokenizer) -> None:
    reader = prompts.reader((), reads_calls=False)
    first = reader.feed(tokenizer.encode("hello"))
    second = reader.feed(tokenizer.encode(" world"))
    assert first is not None
    assert (first.content, first.num_tokens) == ("hello", len(tokenizer.encode("hello")))
    assert second is not None
    assert second.content == " world"


@pytest.mark.parametrize("stop", ["Observation:", "s"])
def test_the_beginning_of_a_stop_string_waits(
    prompts: Prompts, tokenizer: Tokenizer, stop: str
) -> None:
    reader = prompts.reader((stop,), reads_calls=False)
    sent = [reader.feed([i]) for i in tokenizer.encode("go " + stop)]
    assert "".join(d.content for d in sent if d) == "go"
    missed = prompts.reader(("Observation:",), reads_calls=False)
    sent = [missed.feed([i]) for i in tokenizer.encode("Observant")]
    assert "".join(d.content for d in sent if d) == "Observant"


def test_markup_is_text_where_no_calls_are_read(prompts: Prompts, tokenizer: Tokenizer) -> None:
    reader = prompts.reader((), reads_calls=False)
    delta = reader.feed(tokenizer.encode(CALL))
    assert delta is not None
    assert delta.content == CALL
