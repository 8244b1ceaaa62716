"""Read an upstream's raw answer in its dialect: text, tokens, log-probs, versions, or its failure.

Answers are kept as bytes and parsed when their session is finished, or when its fault is asked for.
Where engines put tokens:

    SGLang  choices[].response_token_ids, .prompt_token_ids, .meta_info, sglext, metadata
    vLLM    choices[].token_ids, prompt_token_ids on top or in the choice, also in each chunk
    OpenAI  choices[].logprobs.content[].logprob: no ids

- Any bytes give an Answer; fields that the bytes do not have are None.
- An answer is the model's only if it has no error object or event and, if it is a stream, has its
  end event or a finish reason for each choice.
"""

import zlib
from collections.abc import Iterable, Iterator
from typing import Annotated, Any, TypeVar

import msgspec
import orjson

from rollmesh.serve.interception.relay.headers import tells_events, value_in

Json = dict[str, Any]
T = TypeVar("T")
TokenId = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]

_ENDS = frozenset({"message_stop", "response.completed", "response.incomplete", "response.failed"})
_ERROR_KINDS = frozenset({"error", "response.failed", "response.error"})
_ABORTED = frozenset({"abort", "error"})
"""Finish reasons of an answer that its engine gave up."""
_MAX_QUOTED_CHARS = 300
NO_END = "the stream ended without its end event and without a finish reason"
EMPTY_STREAM = "the stream is empty"


class Heard(msgspec.Struct):
    """One choice of an answer."""

    message: Json
    """In the shape of the answer's dialect."""
    finish_reason: str = ""
    prompt_ids: list[int] | None = None
    token_ids: list[int] | None = None
    logprobs: list[float] | None = None
    versions: list[tuple[str, int]] | None = None
    """(weight version, number of tokens) in order."""
    response_id: str = ""
    """The id of the whole answer; '' if it has none."""
    is_gapless: bool = True
    """No part of its stream was unreadable, or its tokens are as many as `usage` counts."""


class Answer(msgspec.Struct):
    """A complete HTTP answer with status 200, as far as it can be parsed."""

    choices: list[Heard] = []
    failure: str = ""
    """Why this is not a whole answer of the model; '' if it is one."""
    unread: str = ""
    """The part that could not be parsed, and why; '' if everything was."""
    is_cut: bool = False
    """It is a stream that ended before its end event."""


def read_answer(route: str, lines: bytes, body: bytes) -> Answer:
    """Parse the body of an answer with status 200 and these header lines."""
    is_stream = tells_events(lines)
    encoding = value_in(lines, b"content-encoding")
    if encoding in (b"gzip", b"deflate"):
        try:
            body = zlib.decompress(body, zlib.MAX_WBITS | 32)
        except zlib.error as error:
            answer = _unreadable(f"the {encoding.decode()} body cannot be inflated: {error}")
            answer.is_cut = is_stream
            return answer
    elif encoding not in (b"", b"identity"):
        return Answer(unread=f"content-encoding {encoding.decode('latin-1')} is not supported")
    answer = _read_stream(route, body) if is_stream else _read_body(route, lines, body)
    for heard in answer.choices:
        heard.prompt_ids = _sound(heard.prompt_ids, list[TokenId])
        heard.token_ids = _sound(heard.token_ids, list[TokenId])
        heard.logprobs = _sound(heard.logprobs, list[float])
    return answer


def error_in(body: bytes) -> str:
    """The message of the error object that a JSON body is; '' if it is none."""
    try:
        told = orjson.loads(body)
    except orjson.JSONDecodeError:
        return ""
    return _error_of(told) if isinstance(told, dict) else ""


def _read_body(route: str, lines: bytes, body: bytes) -> Answer:
    try:
        told = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        if not body.strip():
            return _unreadable("the body is empty")
        kind = value_in(lines, b"content-type").decode("latin-1")
        return _unreadable(f"the body ({kind or 'no content type'}) is not JSON: {error}")
    if not isinstance(told, dict):
        return _unreadable("the body is JSON, but not an object")
    if failure := _error_of(told):
        return Answer(failure=failure)
    choices = _choices(route, [told])
    return Answer(choices) if choices else _unreadable(f"the body is not an answer of {route}")


def _read_stream(route: str, body: bytes) -> Answer:
    stream = _Stream()
    for name, data in _data_lines(body):
        stream.take(name, data)
    unread = ""
    if stream.num_bad:
        unread = f"{stream.num_bad} of {stream.num_lines} data lines are not JSON objects"
    if stream.failure:
        return Answer(failure=stream.failure, unread=unread)
    choices = _choices(route, stream.events)
    if not stream.is_ended and not (choices and all(heard.finish_reason for heard in choices)):
        if not stream.num_lines:
            return Answer(failure=EMPTY_STREAM, unread=EMPTY_STREAM, is_cut=True)
        return Answer(failure=NO_END, unread=unread, is_cut=True)
    if not choices:
        return _unreadable(unread or f"the stream is not an answer of {route}")
    if stream.num_bad:
        num_used = _num_used(stream.events)
        for heard in choices:
            heard.is_gapless = len(choices) == 1 and len(heard.token_ids or ()) == num_used
    return Answer(choices, unread=unread)


class _Stream(msgspec.Struct):
    """The events of a streamed answer."""

    events: list[Json] = []
    failure: str = ""
    is_ended: bool = False
    """Its end event came."""
    num_lines: int = 0
    num_bad: int = 0
    """Lines that are no JSON object."""

    def take(self, name: bytes, data: bytes) -> None:
        """Add one data line, of the event with this name."""
        self.num_lines += 1
        if data == b"[DONE]":
            self.is_ended = True
            return
        try:
            event = orjson.loads(data)
        except orjson.JSONDecodeError:
            event = None
        if isinstance(event, dict):
            self.events.append(event)
        elif name != b"error":
            self.num_bad += 1
        event = event if isinstance(event, dict) else {}
        kind = event.get("type") or name.decode("latin-1")
        if isinstance(kind, str) and kind in _ENDS:
            self.is_ended = True
        if not self.failure:
            is_named = name == b"error"
            self.failure = _error_of(event) or (_quoted(data.decode("latin-1")) if is_named else "")


def _choices(route: str, told: list[Json]) -> list[Heard]:
    """The choices of a parsed answer; none if it has another shape."""
    try:
        found = _READERS[route](told)
    except _MISSHAPEN:
        return []
    response_id = _id_in(told)
    for heard in found:
        heard.response_id = response_id
    return found


def _unreadable(why: str) -> Answer:
    return Answer(failure=f"the answer cannot be read: {why}", unread=why)


def _error_of(told: Json) -> str:
    """The message of the error that an object or event reports; '' if it reports none."""
    inner = told.get("response")
    inner = inner if isinstance(inner, dict) else {}
    kind = told.get("type")
    error = told.get("error") or inner.get("error")
    choices = told.get("choices")
    for choice in choices if isinstance(choices, list) else ():
        if isinstance(choice, dict):
            reason = choice.get("finish_reason")
            is_aborted = isinstance(reason, str) and reason in _ABORTED
            error = error or choice.get("error") or (is_aborted and f"finish_reason {reason}")
    is_error = (
        bool(error)
        or told.get("object") == "error"
        or (isinstance(kind, str) and kind in _ERROR_KINDS)
        or "failed" in (told.get("status"), inner.get("status"))
    )
    return _quoted(error or told) if is_error else ""


def _quoted(error: Any) -> str:
    message = error.get("message") if isinstance(error, dict) else error
    if not isinstance(message, str):
        message = orjson.dumps(error).decode()
    return f"the answer is an error of the upstream: {message[:_MAX_QUOTED_CHARS]}"


def _num_used(told: list[Json]) -> int:
    """Sampled tokens by the newest `usage`; -1 if there is none."""
    for event in reversed(told):
        usage = event.get("usage")
        if isinstance(usage, dict) and isinstance(usage.get("completion_tokens"), int):
            return int(usage["completion_tokens"])
    return -1


def _sound(told: Any, kind: type[T]) -> T | None:
    """The value if it has that type, else None."""
    try:
        return msgspec.convert(told, kind)
    except msgspec.ValidationError:
        return None


def _id_in(told: list[Json]) -> str:
    """The answer's id: on top in chat, within the first event in streams of other dialects."""
    for each in told:
        for part in (each, each.get("response"), each.get("message")):
            if isinstance(part, dict) and isinstance(part.get("id"), str):
                return str(part["id"])
    return ""


_MISSHAPEN = (KeyError, TypeError, ValueError, AttributeError, IndexError)


def _data_lines(body: bytes) -> Iterator[tuple[bytes, bytes]]:
    """(name of the event, data) for each data line of a stream."""
    name = b""
    for line in body.splitlines():
        if line.startswith(b"data:"):
            if data := line[5:].strip():
                yield name, data
        elif line.startswith(b"event:"):
            name = line[6:].strip()
        elif not line:
            name = b""


# chat completions and completions: one object, or chunks that add up to it


def _hear_choices(told: list[Json]) -> list[Heard]:
    found: dict[int, Heard] = {}
    prompt_ids = None
    for chunk in told:
        prompt_ids = chunk.get("prompt_token_ids") or prompt_ids
        for choice in chunk.get("choices") or ():
            index = choice.get("index", 0)
            heard = found.setdefault(index, Heard({"role": "assistant", "content": ""}))
            _add_choice(heard, choice)
    for chunk in told:
        _add_extension(found, chunk)
    for heard in found.values():
        heard.prompt_ids = heard.prompt_ids or prompt_ids
        if heard.versions is None and heard.token_ids is not None:
            heard.versions = _versions(told, len(heard.token_ids))
    return [found[index] for index in sorted(found)]


def _add_choice(heard: Heard, choice: Json) -> None:
    said = choice.get("message") or choice.get("delta") or {"content": choice.get("text")}
    message = heard.message
    for key in ("content", "reasoning_content", "reasoning", "refusal"):
        if isinstance(said.get(key), str):
            message[key] = (message.get(key) or "") + said[key]
    for number, piece in enumerate(said.get("tool_calls") or ()):
        _add_call(message.setdefault("tool_calls", []), piece.get("index", number), piece)
    heard.finish_reason = choice.get("finish_reason") or heard.finish_reason
    heard.prompt_ids = choice.get("prompt_token_ids") or heard.prompt_ids
    meta = choice.get("meta_info") or {}
    pairs = meta.get("output_token_logprobs")
    if pairs:
        heard.token_ids = [pair[1] for pair in pairs]
        heard.logprobs = [pair[0] for pair in pairs]
        return
    ids = choice.get("response_token_ids") or choice.get("token_ids")
    if isinstance(ids, list):
        heard.token_ids = (heard.token_ids or []) + ids
    logprobs = list(_logprobs(choice.get("logprobs") or {}))
    if logprobs:
        heard.logprobs = (heard.logprobs or []) + logprobs


def _add_call(calls: list[Json], index: int, piece: Json) -> None:
    while len(calls) <= index:
        calls.append({"id": "", "type": "function", "function": {"name": "", "arguments": ""}})
    call, function = calls[index], piece.get("function") or {}
    call["id"] = piece.get("id") or call["id"]
    call["function"]["name"] += function.get("name") or ""
    call["function"]["arguments"] += function.get("arguments") or ""


def _logprobs(told: Json) -> Iterable[float]:
    """Chat's list of tokens, or the plain list of the older completions."""
    content = told.get("content")
    return told.get("token_logprobs") or [each["logprob"] for each in content or ()]


def _add_extension(found: dict[int, Heard], chunk: Json) -> None:
    """SGLang's `sglext`, which a stream has in a chunk without choices."""
    extension = chunk.get("sglext") or {}
    for index, ids in enumerate(extension.get("output_ids") or ()):
        if index in found and ids:
            found[index].token_ids = ids
    if extension.get("input_ids"):
        for heard in found.values():
            heard.prompt_ids = extension["input_ids"]


def _versions(told: list[Json], num_tokens: int) -> list[tuple[str, int]] | None:
    for chunk in told:
        metadata = chunk.get("metadata") or {}
        spans = metadata.get("weight_versions")
        if spans:
            return [(str(span["version"]), span["end"] - span["start"]) for span in spans]
        if metadata.get("weight_version") is not None:
            return [(str(metadata["weight_version"]), num_tokens)]
    return None


# responses: the whole stands in the last event


def _hear_response(told: list[Json]) -> list[Heard]:
    whole = told[-1]
    for event in told:
        if event.get("type") in ("response.completed", "response.incomplete"):
            whole = event["response"]
    output = whole["output"]
    logprobs = [
        each["logprob"]
        for item in output
        for part in item.get("content") or ()
        for each in part.get("logprobs") or ()
    ]
    incomplete = (whole.get("incomplete_details") or {}).get("reason")
    finish_reason = incomplete or whole.get("status") or ""
    return [Heard({"output": output}, finish_reason, logprobs=logprobs or None)]


# messages: one object, or events that build its blocks


def _hear_message(told: list[Json]) -> list[Heard]:
    if told[0].get("type") == "message":
        message = told[0]
        content, reason = message["content"], message.get("stop_reason") or ""
        return [Heard({"role": "assistant", "content": content}, reason)]
    if told[0].get("type") != "message_start":
        return []
    blocks: dict[int, Json] = {}
    inputs: dict[int, str] = {}
    reason = ""
    for event in told:
        match event.get("type"):
            case "content_block_start":
                blocks[event["index"]] = dict(event["content_block"])
            case "content_block_delta":
                _add_block(blocks[event["index"]], event["delta"], inputs, event["index"])
            case "message_delta":
                reason = event["delta"].get("stop_reason") or reason
    for index, text in inputs.items():
        blocks[index]["input"] = orjson.loads(text or "{}")
    content = [blocks[index] for index in sorted(blocks)]
    return [Heard({"role": "assistant", "content": content}, reason)]


def _add_block(block: Json, delta: Json, inputs: dict[int, str], index: int) -> None:
    if delta.get("type") == "input_json_delta":
        inputs[index] = inputs.get(index, "") + delta["partial_json"]
        return
    for key in ("text", "thinking", "signature"):
        if isinstance(delta.get(key), str):
            block[key] = block.get(key, "") + delta[key]


_READERS = {
    "/chat/completions": _hear_choices,
    "/completions": _hear_choices,
    "/responses": _hear_response,
    "/messages": _hear_message,
}
ROUTES = tuple(_READERS)
"""The ends of paths whose answers can be read; a longer one stands before one that ends it."""
