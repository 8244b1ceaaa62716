"""Request bodies in SGLang's format, and its answers in reads of any size."""

import time
from typing import Any

import orjson
import pytest

from rollmesh.core.errors import EngineBroke, EngineOverloaded, EngineRefused, EngineUnavailable
from rollmesh.core.types import OutputGrammar, SamplingParams, VersionRun
from rollmesh.engine.connection import parts
from rollmesh.engine.sglang import BatchResponse, StreamResponse, encode_request, encode_score
from tests.unit.engine.http_peer import Unread
from tests.unit.engine.token_receiver import TokenRecorder, engine_request

VOCAB_SIZE = 100


def body_of(**fields: Any) -> dict[str, Any]:
    body: dict[str, Any] = orjson.loads(
        b"".join(parts(encode_request(engine_request(**fields), VOCAB_SIZE)))
    )
    return body


NEUTRAL = {
    "temperature": 1.0,
    "top_p": 1.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "repetition_penalty": 1.0,
}
"""Parameters that a body may leave out."""


def test_a_plain_body_has_only_the_necessary_fields() -> None:
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


def test_images_and_likeliest_tokens_are_requested() -> None:
    body = body_of(images=("data:image/png;base64,AA==", "https://a/b.png"), num_top_logprobs=3)
    assert body["image_data"] == ["data:image/png;base64,AA==", "https://a/b.png"]
    assert body["top_logprobs_num"] == 3


@pytest.mark.parametrize("image", ["/etc/passwd", "file:///etc/passwd", "data:text/html,x"])
def test_image_is_never_a_file_of_the_engines_machine(image: str) -> None:
    with pytest.raises(EngineRefused, match="address"):
        body_of(images=(image,))


@pytest.mark.parametrize("order", ["us", "su", "u", "uu", "ssuus", "s"])
def test_images_are_sent_as_unread_pieces(order: str) -> None:
    addresses = [f"data:image/png;base64,{'A' * n}=" for n in range(len(order))]
    images = [
        Unread(each.encode()) if kind == "u" else each
        for kind, each in zip(order, addresses, strict=True)
    ]
    pieces = encode_request(engine_request(images=tuple(images)), VOCAB_SIZE)
    unread = [each for each in images if isinstance(each, Unread)]
    assert [each for each in pieces if isinstance(each, Unread)] == unread
    assert not any(each.num_read for each in unread)
    sent = orjson.loads(b"".join(parts(pieces)))
    assert sent.pop("image_data") == addresses
    assert sent == body_of()


def test_ready_json_is_neither_copied_nor_parsed() -> None:
    ready = b"5,6"
    pieces = encode_request(engine_request(prompt_ids=[VOCAB_SIZE], prompt_json=ready), VOCAB_SIZE)
    assert pieces[1] is ready


def test_score_asks_for_all_log_probs_and_no_token() -> None:
    body = orjson.loads(b"".join(encode_score([1, 2], "k", VOCAB_SIZE)))
    assert body["input_ids"] == [1, 2]
    assert body["sampling_params"] == {"max_new_tokens": 0}
    assert (body["return_logprob"], body["logprob_start_len"]) == (True, 0)


# answers


class ResponseFeed:
    """The response parser of one request; the test feeds it bytes."""

    def __init__(self, *, stream: bool = True) -> None:
        self.recorder = TokenRecorder()
        self.num_costly = 0
        kind = StreamResponse if stream else BatchResponse
        self.response = kind("http://e", self.recorder, self._count, VOCAB_SIZE)
        self.response.on_head(200, [])

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
def test_tokens_are_reported_once_however_the_bytes_are_cut(events: list[bytes], size: int) -> None:
    feed = ResponseFeed()
    raw = b"".join(events)
    for at in range(0, len(raw), size):
        feed.response.on_data(raw[at : at + size])
    feed.response.on_end()
    assert feed.recorder.token_ids == [1, 2, 3]
    assert [lp for chunk in feed.recorder.chunks for lp in chunk.logprobs] == [
        -1 / 8,
        -2 / 8,
        -3 / 8,
    ]
    assert feed.recorder.ends == [None]
    finish = feed.recorder.chunks[-1].finish
    assert finish
    assert finish.kind == "length"


@pytest.mark.parametrize("events", [INCREMENTAL, CUMULATIVE])
def test_events_of_one_read_are_one_chunk(events: list[bytes]) -> None:
    feed = ResponseFeed()
    feed.response.on_data(b"".join(events))
    assert [list(chunk.token_ids) for chunk in feed.recorder.chunks] == [[1, 2, 3]]


def test_only_the_newest_cumulative_event_of_a_read_is_parsed() -> None:
    feed = ResponseFeed()
    feed.response.on_data(event([1], 1))
    feed.response.on_data(b"data: this would not even parse\n\n" + event([1, 2, 3], 3))
    assert feed.recorder.token_ids == [1, 2, 3]
    assert feed.num_costly == 1


def test_tokens_of_two_weights_in_one_read_are_two_chunks() -> None:
    feed = ResponseFeed()
    feed.response.on_data(event([1], 1, weights="1") + event([2], 2, weights="2"))
    versions = [(list(chunk.token_ids), chunk.policy_version) for chunk in feed.recorder.chunks]
    assert versions == [([1], 1), ([2], 2)]


def test_versions_in_the_last_event_are_kept() -> None:
    spans = [{"version": "1", "start": 0, "end": 1}, {"version": "2", "start": 1, "end": 2}]
    feed = ResponseFeed()
    feed.response.on_data(event([1], 1) + event([2], 2, LENGTH, weight_versions=spans))
    assert feed.recorder.chunks[-1].policy_versions == (VersionRun(1, 1), VersionRun(2, 1))


def test_tokens_sampled_before_unnumbered_weights_keep_their_version() -> None:
    spans = [{"version": "7", "start": 0, "end": 1}, {"version": "step_8", "start": 1, "end": 2}]
    feed = ResponseFeed()
    feed.response.on_data(event([1], 1) + event([2], 2, LENGTH, weight_versions=spans))
    assert feed.recorder.chunks[-1].policy_versions == (VersionRun(7, 1), VersionRun(-1, 1))


def test_likeliest_tokens_of_cumulative_events_are_reported_once() -> None:
    places = [[[-0.5, 1, None], [-1.5, 9, None]], [[-0.25, 2, None], [-2.5, 8, None]]]
    feed = ResponseFeed()
    feed.response.on_data(event([1], 1, output_top_logprobs=places[:1]))
    feed.response.on_data(event([1, 2], 2, output_top_logprobs=places))
    tops = [place for chunk in feed.recorder.chunks for place in chunk.top_logprobs]
    assert tops == [((-0.5, 1), (-1.5, 9)), ((-0.25, 2), (-2.5, 8))]


def test_a_connection_error_after_the_finish_is_ignored() -> None:
    feed = ResponseFeed()
    feed.response.on_data(b"".join(INCREMENTAL[:3]))
    feed.response.on_error(EngineUnavailable("reset"))
    assert feed.recorder.ends == [None]


def test_a_stream_without_a_finish_is_an_error() -> None:
    feed = ResponseFeed()
    feed.response.on_data(INCREMENTAL[0] + DONE)
    feed.response.on_end()
    assert feed.recorder.token_ids == [1]
    assert "the stream was cut" in str(feed.recorder.ends[0])


@pytest.mark.parametrize("status", [200, 500])
def test_a_long_plain_answer_is_read_in_linear_time(status: int) -> None:
    """A long turn's likeliest tokens are tens of MB; copying them at each read takes a minute."""
    feed = ResponseFeed(stream=False)
    feed.response.on_head(status, [])
    raw = event([1], 1, LENGTH)[6:-2]
    began_s = time.process_time()
    for piece in [*[b" " * 1024] * 20_000, raw]:
        feed.response.on_data(piece)
    feed.response.on_end()
    assert time.process_time() - began_s < 2.0
    assert feed.recorder.token_ids == ([1] if status == 200 else [])


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("token_id", [-1, VOCAB_SIZE])
def test_tokens_of_another_vocabulary_never_reach_a_record(stream: bool, token_id: int) -> None:
    feed = ResponseFeed(stream=stream)
    raw = event([1, token_id], 2, LENGTH)
    feed.response.on_data(raw if stream else raw[6:])
    if not stream:
        feed.response.on_end()
    assert feed.recorder.chunks == []
    assert "does it serve this model" in str(feed.recorder.ends[0])


@pytest.mark.parametrize("raw", [b'{"text": "hi"}', event([1], 1)[6:]])
def test_a_plain_answer_without_a_finish_is_an_error(raw: bytes) -> None:
    """Otherwise its reader would wait for the rest until the engine counts as silent."""
    feed = ResponseFeed(stream=False)
    feed.response.on_data(raw)
    feed.response.on_end()
    assert feed.recorder.chunks == []
    assert str(feed.recorder.ends[0]) == "http://e: answered without a finish reason"


@pytest.mark.parametrize("stream", [False, True])
def test_an_engine_that_took_a_request_and_returned_no_token_is_broken(stream: bool) -> None:
    refused, cut = ResponseFeed(stream=stream), ResponseFeed(stream=stream)
    refused.response.on_head(500, [])
    refused.response.on_end()
    cut.response.on_error(EngineUnavailable("reset"))
    assert [type(feed.recorder.ends[0]) for feed in (refused, cut)] == [EngineBroke] * 2


def test_an_engine_that_was_not_reached_or_returned_tokens_is_only_unavailable() -> None:
    recorder, feed = TokenRecorder(), ResponseFeed()
    BatchResponse("http://e", recorder, lambda: None, VOCAB_SIZE).on_error(
        EngineUnavailable("refused")
    )
    feed.response.on_data(INCREMENTAL[0])
    feed.response.on_error(EngineUnavailable("reset"))
    assert [type(each.ends[0]) for each in (recorder, feed.recorder)] == [EngineUnavailable] * 2


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
def test_an_invalid_event_ends_the_request(raw: bytes, kind: type[Exception]) -> None:
    feed = ResponseFeed()
    feed.response.on_data(raw)
    [error] = feed.recorder.ends
    assert type(error) is kind
    assert str(error).startswith("http://e: ")
    assert feed.recorder.chunks == []


@pytest.mark.parametrize("num_reads", [1, 2])
def test_an_error_event_after_tokens_is_no_refusal(num_reads: int) -> None:
    events = [event([1], 1), b'data: {"error": {"message": "oom"}}\n\n' + DONE]
    feed = ResponseFeed()
    for read in [b"".join(events)] if num_reads == 1 else events:
        feed.response.on_data(read)
    assert type(feed.recorder.ends[0]) is EngineUnavailable


@pytest.mark.parametrize("stream", [True, False])
def test_an_engine_that_lacks_the_adapter_is_at_fault_and_not_the_request(stream: bool) -> None:
    why = b'{"error": {"message": "Got LoRA adapter that has never been loaded: rollmesh-v3"}}'
    feed = ResponseFeed(stream=stream)
    if not stream:
        feed.response.on_head(400, [])
    feed.response.on_data(b"data: " + why + b"\n\n" if stream else why)
    if not stream:
        feed.response.on_end()
    assert type(feed.recorder.ends[0]) is EngineUnavailable


def test_the_adapter_is_named_where_there_is_one() -> None:
    assert "lora_path" not in body_of()
    assert body_of(adapter="rollmesh-v3")["lora_path"] == "rollmesh-v3"
    assert orjson.loads(b"".join(encode_score([1, 2], "0", VOCAB_SIZE, "a")))["lora_path"] == "a"


def test_keep_alive_comments_are_ignored() -> None:
    feed = ResponseFeed()
    feed.response.on_data(b": ping\n\n" + event([1], 1) + b": ping\n\n")
    feed.response.on_data(b": ping\n\n")
    assert feed.recorder.token_ids == [1]
    assert feed.recorder.ends == []


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
def test_the_http_status_determines_the_error(
    status: int, kind: type[Exception], stream: bool
) -> None:
    feed = ResponseFeed(stream=stream)
    feed.response.on_head(status, [])
    feed.response.on_data(b'{"error": {"message": "so')
    feed.response.on_data(b' it is"}}')
    feed.response.on_end()
    [error] = feed.recorder.ends
    assert type(error) is kind
    assert str(error) == f"http://e: HTTP {status}: so it is"
