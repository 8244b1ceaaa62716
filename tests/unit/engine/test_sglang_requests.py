"""Bodies as SGLang takes them, and answers told byte by byte as it gives them."""

import time
from typing import Any

import orjson
import pytest

from rollmesh.core.errors import EngineBroke, EngineOverloaded, EngineRefused, EngineUnavailable
from rollmesh.core.types import OutputGrammar, SamplingParams, VersionRun
from rollmesh.engine.connection import parts
from rollmesh.engine.sglang import BatchResponse, StreamResponse, encode_request, encode_score
from tests.unit.engine.http_peer import Unread
from tests.unit.engine.token_receiver import LegEar, leg

VOCAB_SIZE = 100


def body_of(**fields: Any) -> dict[str, Any]:
    body: dict[str, Any] = orjson.loads(b"".join(parts(encode_request(leg(**fields), VOCAB_SIZE))))
    return body


NEUTRAL = {
    "temperature": 1.0,
    "top_p": 1.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "repetition_penalty": 1.0,
}
"""May be said or not."""


def test_plain_body_says_what_is_needed_and_no_more() -> None:
    body = body_of()
    sampling = body.pop("sampling_params")
    assert NEUTRAL | sampling == NEUTRAL | {"max_new_tokens": 5}
    assert body == {
        "input_ids": [5, 6, 7],
        "return_logprob": True,
        "rid": "r",
        "extra_key": "0",
    }


def test_every_sampling_field_has_the_name_that_sglang_knows() -> None:
    params = SamplingParams(
        max_tokens=9,
        temperature=0.5,
        top_p=0.9,
        top_k=3,
        min_p=0.1,
        stop=("never sent: matched by us",),
        stop_token_ids=(1, 2),
        seed=4,
        frequency_penalty=0.1,
        presence_penalty=0.2,
        repetition_penalty=1.3,
        logit_bias=((7, -1.5), (8, 2.0)),
    )
    assert body_of(params=params, max_new_tokens=8, stream=True)["sampling_params"] == {
        "max_new_tokens": 8,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 3,
        "min_p": 0.1,
        "stop_token_ids": [1, 2],
        "sampling_seed": 4,
        "frequency_penalty": 0.1,
        "presence_penalty": 0.2,
        "repetition_penalty": 1.3,
        "logit_bias": {"7": -1.5, "8": 2.0},
    }


@pytest.mark.parametrize("kind", ["json_schema", "regex", "ebnf"])
def test_grammar_is_sent_under_its_kind(kind: Any) -> None:
    params = SamplingParams(max_tokens=9, grammar=OutputGrammar(kind, "text"))
    assert body_of(params=params)["sampling_params"][kind] == "text"


def test_images_and_likeliest_tokens_are_asked_for() -> None:
    body = body_of(images=("data:image/png;base64,AA==", "https://a/b.png"), num_top_logprobs=3)
    assert body["image_data"] == ["data:image/png;base64,AA==", "https://a/b.png"]
    assert body["top_logprobs_num"] == 3


@pytest.mark.parametrize("image", ["/etc/passwd", "file:///etc/passwd", "data:text/html,x"])
def test_image_is_never_a_file_of_the_engines_machine(image: str) -> None:
    with pytest.raises(EngineRefused, match="address"):
        body_of(images=(image,))


@pytest.mark.parametrize("order", ["us", "su", "u", "uu", "ssuus", "s"])
def test_images_are_pieces_that_nobody_read(order: str) -> None:
    addresses = [f"data:image/png;base64,{'A' * n}=" for n in range(len(order))]
    images = [
        Unread(each.encode()) if kind == "u" else each
        for kind, each in zip(order, addresses, strict=True)
    ]
    pieces = encode_request(leg(images=tuple(images)), VOCAB_SIZE)
    unread = [each for each in images if isinstance(each, Unread)]
    assert [each for each in pieces if isinstance(each, Unread)] == unread
    assert not any(each.num_read for each in unread)
    sent = orjson.loads(b"".join(parts(pieces)))
    assert sent.pop("image_data") == addresses
    assert sent == body_of()


def test_ready_json_is_not_copied_or_looked_into() -> None:
    ready = b"5,6"
    pieces = encode_request(leg(prompt_ids=[VOCAB_SIZE], prompt_json=ready), VOCAB_SIZE)
    assert pieces[1] is ready


def test_score_asks_for_all_log_probs_and_no_token() -> None:
    body = orjson.loads(b"".join(encode_score([1, 2], "k", VOCAB_SIZE)))
    assert body["input_ids"] == [1, 2]
    assert body["sampling_params"] == {"max_new_tokens": 0}
    assert (body["return_logprob"], body["logprob_start_len"]) == (True, 0)


# answers


class Told:
    """One leg's answer, fed by the test."""

    def __init__(self, *, stream: bool = True) -> None:
        self.ear = LegEar()
        self.num_costly = 0
        kind = StreamResponse if stream else BatchResponse
        self.answer = kind("http://e", self.ear, self._count, VOCAB_SIZE)
        self.answer.on_head(200, [])

    def _count(self) -> None:
        self.num_costly += 1


def event(
    token_ids: list[int], num_tokens: int, finish: Any = None, weights: str = "1", **more: Any
) -> bytes:
    meta = {
        "completion_tokens": num_tokens,
        "weight_version": weights,
        "finish_reason": finish,
        "output_token_logprobs": [[-token / 8, token, None] for token in token_ids],
        **more,
    }
    return b"data: %b\n\n" % orjson.dumps({"output_ids": token_ids, "meta_info": meta})


LENGTH = {"type": "length", "length": 3}
DONE = b"data: [DONE]\n\n"
INCREMENTAL = [event([1], 1), event([2], 2), event([3], 3, LENGTH), DONE]
CUMULATIVE = [event([1], 1), event([1, 2], 2), event([1, 2, 3], 3, LENGTH), DONE]


@pytest.mark.parametrize("events", [INCREMENTAL, CUMULATIVE])
@pytest.mark.parametrize("size", [1, 7, 100, 10_000])
def test_tokens_are_told_once_however_the_bytes_are_cut(events: list[bytes], size: int) -> None:
    told = Told()
    raw = b"".join(events)
    for at in range(0, len(raw), size):
        told.answer.on_data(raw[at : at + size])
    told.answer.on_end()
    assert told.ear.token_ids == [1, 2, 3]
    assert [lp for chunk in told.ear.chunks for lp in chunk.logprobs] == [-1 / 8, -2 / 8, -3 / 8]
    assert told.ear.ends == [None]
    finish = told.ear.chunks[-1].finish
    assert finish
    assert finish.kind == "length"


@pytest.mark.parametrize("events", [INCREMENTAL, CUMULATIVE])
def test_events_of_one_read_are_one_chunk(events: list[bytes]) -> None:
    told = Told()
    told.answer.on_data(b"".join(events))
    assert [list(chunk.token_ids) for chunk in told.ear.chunks] == [[1, 2, 3]]


def test_of_cumulative_events_that_come_together_only_the_newest_is_opened() -> None:
    told = Told()
    told.answer.on_data(event([1], 1))
    told.answer.on_data(b"data: this would not even parse\n\n" + event([1, 2, 3], 3))
    assert told.ear.token_ids == [1, 2, 3]
    assert told.num_costly == 1


def test_tokens_of_two_weights_in_one_read_are_two_chunks() -> None:
    told = Told()
    told.answer.on_data(event([1], 1, weights="1") + event([2], 2, weights="2"))
    told_of = [(list(chunk.token_ids), chunk.policy_version) for chunk in told.ear.chunks]
    assert told_of == [([1], 1), ([2], 2)]


def test_versions_that_the_engine_tells_at_the_end_are_kept() -> None:
    spans = [{"version": "1", "start": 0, "end": 1}, {"version": "2", "start": 1, "end": 2}]
    told = Told()
    told.answer.on_data(event([1], 1) + event([2], 2, LENGTH, weight_versions=spans))
    assert told.ear.chunks[-1].policy_versions == (VersionRun(1, 1), VersionRun(2, 1))


def test_tokens_before_a_number_became_a_name_keep_their_number() -> None:
    spans = [{"version": "7", "start": 0, "end": 1}, {"version": "step_8", "start": 1, "end": 2}]
    told = Told()
    told.answer.on_data(event([1], 1) + event([2], 2, LENGTH, weight_versions=spans))
    assert told.ear.chunks[-1].policy_versions == (VersionRun(7, 1), VersionRun(-1, 1))


def test_likeliest_tokens_of_cumulative_events_are_told_once() -> None:
    places = [[[-0.5, 1, None], [-1.5, 9, None]], [[-0.25, 2, None], [-2.5, 8, None]]]
    told = Told()
    told.answer.on_data(event([1], 1, output_top_logprobs=places[:1]))
    told.answer.on_data(event([1, 2], 2, output_top_logprobs=places))
    tops = [place for chunk in told.ear.chunks for place in chunk.top_logprobs]
    assert tops == [((-0.5, 1), (-1.5, 9)), ((-0.25, 2), (-2.5, 8))]


def test_connection_that_breaks_behind_the_finish_harms_nobody() -> None:
    told = Told()
    told.answer.on_data(b"".join(INCREMENTAL[:3]))
    told.answer.on_error(EngineUnavailable("reset"))
    assert told.ear.ends == [None]


def test_stream_that_ends_without_a_finish_was_cut() -> None:
    told = Told()
    told.answer.on_data(INCREMENTAL[0] + DONE)
    told.answer.on_end()
    assert told.ear.token_ids == [1]
    assert "the stream was cut" in str(told.ear.ends[0])


@pytest.mark.parametrize("status", [200, 500])
def test_long_plain_answer_costs_what_it_is_long(status: int) -> None:
    """The likeliest tokens of a long turn are tens of megabytes; copied at each read, a minute."""
    told = Told(stream=False)
    told.answer.on_head(status, [])
    raw = event([1], 1, LENGTH)[6:-2]
    began_s = time.process_time()
    for piece in [*[b" " * 1024] * 20_000, raw]:
        told.answer.on_data(piece)
    told.answer.on_end()
    assert time.process_time() - began_s < 2.0
    assert told.ear.token_ids == ([1] if status == 200 else [])


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("token_id", [-1, VOCAB_SIZE])
def test_tokens_of_another_vocabulary_never_reach_a_record(stream: bool, token_id: int) -> None:
    told = Told(stream=stream)
    raw = event([1, token_id], 2, LENGTH)
    told.answer.on_data(raw if stream else raw[6:])
    if not stream:
        told.answer.on_end()
    assert told.ear.chunks == []
    assert "does it serve this model" in str(told.ear.ends[0])


@pytest.mark.parametrize("raw", [b'{"text": "hi"}', event([1], 1)[6:]])
def test_plain_answer_without_a_finish_is_none(raw: bytes) -> None:
    """Or its reader would wait for the rest until the engine counts as silent."""
    told = Told(stream=False)
    told.answer.on_data(raw)
    told.answer.on_end()
    assert told.ear.chunks == []
    assert str(told.ear.ends[0]) == "http://e: answered without a finish reason"


@pytest.mark.parametrize("stream", [False, True])
def test_an_engine_broke_at_a_leg_that_it_took_and_told_nothing_of(stream: bool) -> None:
    refused, cut = Told(stream=stream), Told(stream=stream)
    refused.answer.on_head(500, [])
    refused.answer.on_end()
    cut.answer.on_error(EngineUnavailable("reset"))
    assert [type(told.ear.ends[0]) for told in (refused, cut)] == [EngineBroke] * 2


def test_one_that_was_not_reached_or_told_tokens_did_not_break_at_the_leg() -> None:
    ear, told = LegEar(), Told()
    BatchResponse("http://e", ear, lambda: None, VOCAB_SIZE).on_error(EngineUnavailable("refused"))
    told.answer.on_data(INCREMENTAL[0])
    told.answer.on_error(EngineUnavailable("reset"))
    assert [type(each.ends[0]) for each in (ear, told.ear)] == [EngineUnavailable] * 2


@pytest.mark.parametrize(
    ("raw", "kind"),
    [
        (event([2], 2), EngineUnavailable),
        (event([1], 3), EngineUnavailable),
        (event([1], 0), EngineUnavailable),
        (event([1], 0, LENGTH), EngineUnavailable),
        (b"data: {\n\n", EngineUnavailable),
        (b'data: {"error": {"message": "too long", "code": 400}}\n\n', EngineRefused),
        (b'data: {"error": {"message": "full", "code": 503}}\n\n', EngineOverloaded),
        (event([], 0, {"type": "abort", "message": "m", "status_code": 400}), EngineRefused),
        (event([], 0, {"type": "abort", "message": "m", "status_code": 503}), EngineOverloaded),
    ],
)
def test_event_that_tells_no_tokens_ends_the_leg(raw: bytes, kind: type[Exception]) -> None:
    told = Told()
    told.answer.on_data(raw)
    [error] = told.ear.ends
    assert type(error) is kind
    assert str(error).startswith("http://e: ")
    assert told.ear.chunks == []


@pytest.mark.parametrize("num_reads", [1, 2])
def test_error_event_behind_tokens_is_no_refusal(num_reads: int) -> None:
    events = [event([1], 1), b'data: {"error": {"message": "oom"}}\n\n' + DONE]
    told = Told()
    for read in [b"".join(events)] if num_reads == 1 else events:
        told.answer.on_data(read)
    assert type(told.ear.ends[0]) is EngineUnavailable


@pytest.mark.parametrize("stream", [True, False])
def test_an_engine_that_lacks_the_adapter_is_at_fault_and_not_the_request(stream: bool) -> None:
    why = b'{"error": {"message": "Got LoRA adapter that has never been loaded: rollmesh-v3"}}'
    told = Told(stream=stream)
    if not stream:
        told.answer.on_head(400, [])
    told.answer.on_data(b"data: " + why + b"\n\n" if stream else why)
    if not stream:
        told.answer.on_end()
    assert type(told.ear.ends[0]) is EngineUnavailable


def test_the_adapter_is_named_where_there_is_one() -> None:
    assert "lora_path" not in body_of()
    assert body_of(adapter="rollmesh-v3")["lora_path"] == "rollmesh-v3"
    assert orjson.loads(b"".join(encode_score([1, 2], "0", VOCAB_SIZE, "a")))["lora_path"] == "a"


def test_comments_that_keep_a_stream_alive_tell_nothing() -> None:
    told = Told()
    told.answer.on_data(b": ping\n\n" + event([1], 1) + b": ping\n\n")
    told.answer.on_data(b": ping\n\n")
    assert told.ear.token_ids == [1]
    assert told.ear.ends == []


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, EngineRefused),
        (404, EngineRefused),
        (408, EngineUnavailable),
        (429, EngineOverloaded),
        (500, EngineBroke),
        (503, EngineOverloaded),
    ],
)
@pytest.mark.parametrize("stream", [True, False])
def test_status_says_what_the_error_is(status: int, kind: type[Exception], stream: bool) -> None:
    told = Told(stream=stream)
    told.answer.on_head(status, [])
    told.answer.on_data(b'{"error": {"message": "so')
    told.answer.on_data(b' it is"}}')
    told.answer.on_end()
    [error] = told.ear.ends
    assert type(error) is kind
    assert str(error) == f"http://e: HTTP {status}: so it is"
