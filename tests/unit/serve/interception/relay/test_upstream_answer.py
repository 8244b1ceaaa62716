"""Parsing raw upstream answers, in the shapes that engines and providers send."""

import random
from typing import Any

import msgspec
import orjson
import pytest

from rollmesh.core.errors import EngineUnavailable
from rollmesh.engine.connection import Headers
from rollmesh.serve.interception.dialects.dialect import UpstreamChoice
from rollmesh.serve.interception.dialects.registry import DIALECTS
from rollmesh.serve.interception.pieces import joined
from rollmesh.serve.interception.relay.account import account_of
from rollmesh.serve.interception.relay.call import CallRequest, ForwardState, RelayCall
from rollmesh.serve.interception.relay.history import HistoryStore
from rollmesh.serve.interception.relay.upstream_answer import StreamEndDetector, read_answer
from rollmesh.serve.interception.report import SessionRewards

JSON = b"content-type: application/json\r\n"
SSE = b"Server: x\r\nContent-Type: text/event-stream; charset=utf-8\r\n"
CALL = {"id": "c1", "type": "function", "function": {"name": "run", "arguments": '{"a": 1}'}}


def plain(route: str, answer: Any) -> list[UpstreamChoice]:
    return read_answer(DIALECTS[route], JSON, orjson.dumps(answer)).choices


def stream(route: str, *chunks: Any) -> list[UpstreamChoice]:
    raw = b"".join([b": hi\n\nevent: x\ndata: %b\n\n" % orjson.dumps(each) for each in chunks])
    return read_answer(DIALECTS[route], SSE, raw + b"data: [DONE]\n\n").choices


def test_sglangs_plain_chat_has_tokens_log_probs_and_versions() -> None:
    choice = {
        "message": {"role": "assistant", "content": None, "tool_calls": [CALL]},
        "finish_reason": "tool_calls",
        "prompt_token_ids": [1, 2],
        "response_token_ids": [3, 4],
        "meta_info": {"output_token_logprobs": [[-0.5, 3, None], [-0.25, 4, None]]},
    }
    spans = [{"version": "1", "start": 0, "end": 1}, {"version": "2", "start": 1, "end": 2}]
    [answer] = plain(
        "/chat/completions", {"choices": [choice], "metadata": {"weight_versions": spans}}
    )
    assert answer.message == {"role": "assistant", "content": "", "tool_calls": [CALL]}
    assert (answer.prompt_ids, answer.token_ids, answer.logprobs) == ([1, 2], [3, 4], [-0.5, -0.25])
    assert answer.versions == [("1", 1), ("2", 1)]
    assert answer.finish_reason == "tool_calls"


def test_sglangs_stream_has_tokens_in_a_chunk_without_choices() -> None:
    [answer] = stream(
        "/chat/completions",
        {"choices": [{"index": 0, "delta": {"role": "assistant", "reasoning_content": "hm"}}]},
        {"choices": [{"index": 0, "delta": {"content": "I gu"}}]},
        {"choices": [{"index": 0, "delta": {"content": "ess"}, "finish_reason": "stop"}]},
        {"choices": [], "sglext": {"input_ids": [1, 2], "output_ids": [[3, 4]]}},
        {"choices": [], "usage": {"total_tokens": 4}},
    )
    assert answer.message == {"role": "assistant", "content": "I guess", "reasoning_content": "hm"}
    assert (answer.prompt_ids, answer.token_ids, answer.logprobs) == ([1, 2], [3, 4], None)


def test_vllms_stream_has_tokens_in_each_chunk() -> None:
    def chunk(text: str, ids: list[int], logprobs: list[float], **more: Any) -> Any:
        content = [{"token": "", "logprob": each} for each in logprobs]
        choice = {"index": 0, "delta": {"content": text}, "token_ids": ids}
        return {"choices": [{**choice, "logprobs": {"content": content}}], **more}

    [answer] = stream(
        "/chat/completions",
        chunk("a", [3], [-0.5], prompt_token_ids=[1, 2]),
        chunk("bc", [4, 5], [-0.25, -0.125]),
    )
    assert answer.message["content"] == "abc"
    assert (answer.prompt_ids, answer.token_ids) == ([1, 2], [3, 4, 5])
    assert answer.logprobs == [-0.5, -0.25, -0.125]


def test_streamed_tool_calls_add_up_and_choices_stay_separate() -> None:
    def chunk(index: int, **delta: Any) -> Any:
        return {"choices": [{"index": index, "delta": delta}]}

    def call(number: int, **function: str) -> Any:
        return [{"index": number, "id": f"c{number}", "function": function}]

    first, second = stream(
        "/chat/completions",
        chunk(1, content="x"),
        chunk(0, tool_calls=call(0, name="run", arguments='{"a"')),
        chunk(0, tool_calls=call(1, name="stop", arguments="{}")),
        chunk(0, tool_calls=[{"index": 0, "function": {"arguments": ": 1}"}}]),
        chunk(1, content="y"),
    )
    functions = [call["function"] for call in first.message["tool_calls"]]
    assert functions == [
        {"name": "run", "arguments": '{"a": 1}'},
        {"name": "stop", "arguments": "{}"},
    ]
    assert second.message["content"] == "xy"


def test_completions_of_older_servers_are_read() -> None:
    choice = {
        "text": "four",
        "token_ids": [3],
        "prompt_token_ids": [1],
        "logprobs": {"token_logprobs": [-0.5]},
    }
    [answer] = plain("/completions", {"choices": [choice]})
    assert answer.message["content"] == "four"
    assert (answer.prompt_ids, answer.token_ids, answer.logprobs) == ([1], [3], [-0.5])


def test_a_response_is_read_from_its_output_plain_or_streamed() -> None:
    part = {"type": "output_text", "text": "4", "logprobs": [{"token": "4", "logprob": -0.5}]}
    whole = {"status": "completed", "output": [{"type": "message", "content": [part]}]}
    [one] = plain("/responses", whole)
    [two] = stream(
        "/responses",
        {"type": "response.created", "response": {"status": "in_progress", "output": []}},
        {"type": "response.output_text.delta", "delta": "4"},
        {"type": "response.completed", "response": whole},
    )
    assert one == two
    assert one.message == {"output": whole["output"]}
    assert (one.finish_reason, one.logprobs, one.token_ids) == ("completed", [-0.5], None)


def test_a_message_is_built_from_its_blocks_plain_or_streamed() -> None:
    blocks = [
        {"type": "thinking", "thinking": "hm", "signature": "s"},
        {"type": "text", "text": "I guess"},
        {"type": "tool_use", "id": "t", "name": "run", "input": {"a": 1}},
    ]
    message = {"type": "message", "content": blocks, "stop_reason": "tool_use"}
    [one] = plain("/messages", message)

    def start(index: int, **block: Any) -> Any:
        return {"type": "content_block_start", "index": index, "content_block": block}

    def delta(index: int, kind: str, **fields: str) -> Any:
        delta_fields = {"type": kind, **fields}
        return {"type": "content_block_delta", "index": index, "delta": delta_fields}

    [two] = stream(
        "/messages",
        {"type": "message_start", "message": {**message, "content": []}},
        start(0, type="thinking", thinking=""),
        delta(0, "thinking_delta", thinking="hm"),
        delta(0, "signature_delta", signature="s"),
        start(1, type="text", text=""),
        delta(1, "text_delta", text="I gu"),
        delta(1, "text_delta", text="ess"),
        start(2, type="tool_use", id="t", name="run", input={}),
        delta(2, "input_json_delta", partial_json='{"a"'),
        delta(2, "input_json_delta", partial_json=": 1}"),
        {"type": "message_delta", "delta": {"stop_reason": "tool_use"}},
        {"type": "message_stop"},
    )
    assert one == two
    assert one.message == {"role": "assistant", "content": blocks}
    assert one.finish_reason == "tool_use"


@pytest.mark.parametrize("route", ["/chat/completions", "/completions", "/responses", "/messages"])
@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"<html>",
        b"null",
        b"[]",
        b'{"choices": 7}',
        b'{"choices": [7]}',
        b'{"output": [{"content": 7}]}',
        b'{"type": "message"}',
        b'data: {"choices": [{"delta": {"tool_calls": [{"index": "x"}]}}]}\n\n',
        b'data: {"type": "content_block_delta", "index": 3, "delta": {}}\n\n',
    ],
)
def test_an_invalid_answer_has_no_choice(route: str, raw: bytes) -> None:
    answer = read_answer(DIALECTS[route], SSE if raw.startswith(b"data") else JSON, raw)
    assert answer.choices == []
    assert answer.failure


@pytest.mark.parametrize("ids", [["3"], [-1], [2**31], [0.5], "34", {"a": 1}])
def test_invalid_token_ids_count_as_missing(ids: Any) -> None:
    choice = {"message": {"content": "4"}, "token_ids": ids}
    [answer] = plain("/chat/completions", {"choices": [choice]})
    assert answer.message["content"] == "4"
    assert answer.token_ids is None


def test_an_answer_with_broken_compression_has_no_choice() -> None:
    answer = read_answer(DIALECTS["/messages"], b"Content-Encoding: gzip\r\n", b"not gzip")
    assert answer.choices == []
    assert "cannot be inflated" in answer.unread


CHOICE = {
    "index": 0,
    "message": {"role": "assistant", "content": "4", "tool_calls": [CALL]},
    "delta": {"content": "4", "tool_calls": [{"index": 0, "function": {"arguments": "{"}}]},
    "text": "4",
    "token_ids": [3, 4],
    "response_token_ids": [3, 4],
    "prompt_token_ids": [1],
    "meta_info": {"output_token_logprobs": [[-0.5, 3, None], [-0.25, 4, None]]},
    "logprobs": {"content": [{"logprob": -0.5}, {"logprob": -0.25}], "token_logprobs": [-0.5, -1]},
}
SPANS = [{"version": "1", "start": 0, "end": 1}, {"version": "2", "start": 1, "end": 2}]
PART = {"type": "output_text", "text": "4", "logprobs": [{"logprob": -0.5}]}
BLOCK = {"type": "tool_use", "id": "t", "name": "run", "input": {}}
WHOLE = {"status": "completed", "output": [{"type": "message", "content": [PART]}]}
TEMPLATES: list[tuple[str, list[Any]]] = [
    (
        "/chat/completions",
        [
            {"choices": [CHOICE], "metadata": {"weight_versions": SPANS}},
            {"choices": [], "sglext": {"input_ids": [1], "output_ids": [[3, 4]]}},
        ],
    ),
    ("/completions", [{"choices": [CHOICE], "prompt_token_ids": [1]}]),
    ("/responses", [{**WHOLE, "type": "response.completed", "response": WHOLE}]),
    ("/messages", [{"type": "message", "content": [BLOCK], "stop_reason": "end_turn"}]),
    (
        "/messages",
        [
            {"type": "message_start"},
            {"type": "content_block_start", "index": 0, "content_block": BLOCK},
            {
                "type": "content_block_delta",
                "index": 0,
                "delta": {"type": "input_json_delta", "partial_json": "{}"},
            },
            {"type": "message_delta", "delta": {"stop_reason": "end_turn"}},
        ],
    ),
]
STRANGE: list[Any] = [None, True, -1, 0.5, 2**40, "", "x", [], {}, [[]], [None], {"a": 1}, ["x", 3]]


def mutated(chance: random.Random, value: Any) -> Any:
    """Return `value` with random changes."""
    if chance.random() < 0.04:
        return chance.choice(STRANGE)
    if isinstance(value, dict):
        kept = {key: mutated(chance, each) for key, each in value.items()}
        if kept and chance.random() < 0.1:
            del kept[chance.choice(list(kept))]
        return kept
    return [mutated(chance, each) for each in value] if isinstance(value, list) else value


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_any_upstream_answer_gives_a_consistent_report(seed: int, is_stream: bool) -> None:
    chance = random.Random(seed)
    num_samples = 0
    for _ in range(400):
        route, template = chance.choice(TEMPLATES)
        chunks = [mutated(chance, chunk) for chunk in template]
        rendered = account_of("s", [answered(route, is_stream, chunks)]).render(SessionRewards(1.0))
        account = msgspec.json.decode(joined(rendered))
        for sample in account["samples"]:
            num_samples += 1
            assert len(sample["token_ids"]) == len(sample["logprobs"]) == len(sample["loss_mask"])
            assert len(sample["policy_versions"]) == len(sample["token_ids"])
    assert num_samples > 20


def answered(route: str, is_stream: bool, chunks: list[Any]) -> RelayCall:
    """Return a delivered call with this answer."""
    history = HistoryStore()
    body = history.follow()
    body.append(b'{"messages":[{"role":"user"}]}')
    request = history.hold(body, "messages").request
    call = RelayCall(CallRequest(0, route, request, (), "", 0.0), 2**20, lambda _: None)
    call.send_on(NullTransport())
    kind = b"text/event-stream" if is_stream else b"application/json"
    call.on_head(200, [(b"Content-Type", kind)])
    pieces = [b"data: %b\n\n" % orjson.dumps(each) for each in chunks] if is_stream else []
    pieces += [b"data: [DONE]\n\n"] if is_stream else []
    for piece in pieces or [orjson.dumps(chunks[0])]:
        call.on_data(piece)
    call.on_end()
    call.move(ForwardState.WHOLE)
    call.is_delivered = True
    return call


class NullTransport:
    """A transport that does nothing."""

    url = "http://upstream"
    has_other = False

    def redirect(self, status: int, headers: Headers) -> str:
        return "no"

    def fail(self, error: EngineUnavailable, retries: bool) -> bool:
        return False

    def settle(self) -> None:
        return None

    def close(self) -> None:
        return None


BEFORE = (
    b'event: ping\r\ndata: {"text":"data: [DONE]\\nevent: message_stop\\nresponse.failed"}\r\n\r\n'
)
ENDS = {
    "/chat/completions": [b"data: [DONE]\n\n", b"data:[DONE]\r\n\r\n"],
    "/completions": [b"data: [DONE]\n\n"],
    "/messages": [b"event: message_stop\ndata: {}\n\n", b'data: {"type":"message_stop"}\n\n'],
    "/responses": [
        b"event: response.completed\ndata: {}\n\n",
        b"event:response.failed\ndata: {}\n\n",
        b'data: {"type": "response.incomplete"}\n\n',
    ],
}


@pytest.mark.parametrize(("route", "end"), [(r, end) for r, ends in ENDS.items() for end in ends])
@pytest.mark.parametrize("num_bytes", [1, 7, 1000])
def test_the_end_of_a_stream_is_detected_in_its_first_line_however_it_is_split(
    route: str, end: bytes, num_bytes: int
) -> None:
    stream = StreamEndDetector(DIALECTS[route])
    assert not any(stream.is_in(piece) for piece in pieces(BEFORE * 3, num_bytes))
    seen = [stream.is_in(piece) for piece in pieces(end, num_bytes)]
    shown = b"".join(pieces(end, num_bytes)[: seen.index(True)])
    assert b"\n" not in shown, "detected in the first line"


@pytest.mark.parametrize("route", ENDS)
def test_a_stream_may_consist_of_its_end_only(route: str) -> None:
    assert StreamEndDetector(DIALECTS[route]).is_in(ENDS[route][0])


def pieces(data: bytes, num_bytes: int) -> list[bytes]:
    return [data[at : at + num_bytes] for at in range(0, len(data), num_bytes)]
