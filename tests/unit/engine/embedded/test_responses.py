"""Answers have SGLang's shape, whole or in pieces, with the policy version of each token."""

import pytest
from tokenizers import Tokenizer, decoders, models

from rollmesh.engine.embedded.request import FinishReason, Progress, Request
from rollmesh.engine.embedded.request_parser import PromptRequest
from rollmesh.engine.embedded.responses import ResponseBuilder, ResponseJson
from tests.unit.engine.embedded.driving import ask

TOKENIZER = Tokenizer(models.WordLevel({"a": 0, "b": 1, "c": 2, "d": 3}, unk_token="a"))
SPELLING = Tokenizer(models.BPE({"a": 0, "b": 1, "c": 2, "d": 3}, []))
SPELLING.decoder = decoders.ByteLevel()


def sampled(tokens: list[int], versions: list[str]) -> Request:
    request = ask([1, 2], "mine", new=len(tokens))
    for at, (token, policy_version) in enumerate(zip(tokens, versions, strict=True)):
        request.append(token, -0.5 - at, policy_version)
    return request


def pieces(request: Request, counts: list[int], *, is_incremental: bool) -> list[ResponseJson]:
    answering = ResponseBuilder(PromptRequest(request, True, True), TOKENIZER, is_incremental)
    finish = FinishReason("length", length=counts[-1])
    return [
        answering.answer(Progress(request, n, "1", finish if n == counts[-1] else None))
        for n in counts
    ]


def test_a_whole_answer_has_ids_logprobs_and_versions() -> None:
    request = sampled([2, 3, 0], ["0", "0", "1"])
    request.num_cached = 1
    (answer,) = pieces(request, [3], is_incremental=False)
    meta = answer["meta_info"]
    assert answer["output_ids"] == [2, 3, 0]
    assert answer["text"].replace(" ", "") == "cda"
    assert meta["id"] == "mine"
    assert meta["finish_reason"] == {"type": "length", "length": 3}
    assert meta["output_token_logprobs"] == [(-0.5, 2, None), (-1.5, 3, None), (-2.5, 0, None)]
    assert meta["output_token_logprobs_length"] == 3
    assert meta["input_token_logprobs"] == []
    assert (meta["prompt_tokens"], meta["completion_tokens"], meta["cached_tokens"]) == (2, 3, 1)
    assert meta["weight_version"] == "1"
    assert meta["weight_versions"] == [
        {"version": "0", "start": 0, "end": 2},
        {"version": "1", "start": 2, "end": 3},
    ]


def test_pieces_are_cumulative_or_disjoint() -> None:
    request = sampled([2, 3, 0], ["0"] * 3)
    whole = pieces(request, [1, 3], is_incremental=False)
    assert [piece["output_ids"] for piece in whole] == [[2], [2, 3, 0]]
    assert [len(piece["meta_info"]["output_token_logprobs"]) for piece in whole] == [1, 3]
    disjoint = pieces(request, [1, 3], is_incremental=True)
    assert [piece["output_ids"] for piece in disjoint] == [[2], [3, 0]]
    assert [len(piece["meta_info"]["output_token_logprobs"]) for piece in disjoint] == [1, 2]
    assert [piece["meta_info"]["completion_tokens"] for piece in disjoint] == [1, 3]
    assert [piece["meta_info"]["finish_reason"] is None for piece in disjoint] == [True, False]
    assert "".join(piece["text"] for piece in disjoint) == whole[1]["text"]


def test_a_piece_holds_nothing_that_was_sampled_after_it() -> None:
    request = sampled([2, 3, 0], ["0", "0", "1"])
    (answer, _) = pieces(request, [2, 3], is_incremental=True)
    assert answer["output_ids"] == [2, 3]
    assert answer["meta_info"]["weight_versions"] == [{"version": "0", "start": 0, "end": 2}]


def test_a_stop_token_is_in_the_ids_and_not_in_the_text() -> None:
    request = sampled([2, 3], ["0", "0"])
    answering = ResponseBuilder(
        PromptRequest(request, False, True), TOKENIZER, is_incremental=False
    )
    answer = answering.answer(Progress(request, 2, "0", FinishReason("stop", matched=3)))
    assert answer["output_ids"] == [2, 3]
    assert answer["text"] == "c"
    assert "output_token_logprobs" not in answer["meta_info"]


def stopped(matched: str, **of_ask: bool) -> list[ResponseJson]:
    """Two events of an output of a, b, c and d that ended at `matched`."""
    request = sampled([0, 1, 2, 3], ["0"] * 4)
    answering = ResponseBuilder(PromptRequest(request, **of_ask), SPELLING, is_incremental=True)
    finish = FinishReason("stop", matched=matched)
    return [answering.answer(Progress(request, n, "0", f)) for n, f in ((1, None), (4, finish))]


def test_a_stop_string_is_in_the_ids_and_not_in_the_text() -> None:
    early, last = stopped("cd")
    assert (early["text"], last["text"]) == ("a", "b")
    assert last["output_ids"] == [1, 2, 3]
    assert last["meta_info"]["finish_reason"] == {"type": "stop", "matched": "cd"}
    _, untrimmed = stopped("c", trims_stop=False)
    assert untrimmed["text"] == "bc"


def test_a_pattern_that_stopped_is_not_cut_from_the_text() -> None:
    _, last = stopped("c+d")
    assert last["text"] == "bcd"
    assert last["meta_info"]["finish_reason"]["matched"] == "c+d"


def test_the_likeliest_tokens_are_reported_with_their_ids() -> None:
    request = ask([1, 2], new=2, num_top=1, logprob_start=0)
    request.prompt_logprobs, request.prompt_tops = [-3.0], [[(-0.1, 9)]]
    for token in (2, 3):
        request.append(token, -0.5, "0", [(-0.25, token)])
    answering = ResponseBuilder(
        PromptRequest(request, wants_logprobs=True), None, is_incremental=True
    )
    finish = FinishReason("length", length=2)
    events = [answering.answer(Progress(request, n, "0", f)) for n, f in ((1, None), (2, finish))]
    tops = [event["meta_info"]["output_top_logprobs"] for event in events]
    assert tops == [[[(-0.25, 2, None)]], [[(-0.25, 3, None)]]]
    assert events[1]["meta_info"]["input_top_logprobs"] == [None, [(-0.1, 9, None)]]


@pytest.mark.parametrize(
    ("start", "expected"),
    [
        (0, [(None, 1, None), (-3.0, 2, None)]),
        (1, [(None, 2, None)]),
        (2, []),
        (None, []),
    ],
)
def test_a_scored_prompt_begins_with_no_logprob(
    start: int | None, expected: list[tuple[float | None, int, None]]
) -> None:
    request = ask([1, 2], new=0, logprob_start=start)
    request.prompt_logprobs = [-3.0][start or 0 :]
    answering = ResponseBuilder(PromptRequest(request, True, True), None, is_incremental=False)
    answer = answering.answer(Progress(request, 0, "0", FinishReason("length", length=0)))
    assert answer["meta_info"]["input_token_logprobs"] == expected
    assert answer["meta_info"]["weight_versions"] == [{"version": "0", "start": 0, "end": 0}]
    assert "text" not in answer
