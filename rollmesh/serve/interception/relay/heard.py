"""What an upstream's raw answer says, in whatever dialect: text, tokens, log-probs, versions.

Answers are kept as bytes and read here, once a session is finished. Where engines put tokens:

    SGLang  choices[].response_token_ids, .prompt_token_ids, .meta_info, sglext, metadata
    vLLM    choices[].token_ids, prompt_token_ids on top or in the choice, also in each chunk
    OpenAI  choices[].logprobs.content[].logprob: no ids

Invariant: whatever bytes came, there is an answer; what they do not say is None. Pure; driven by
account.py.
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
    """Of the whole answer; '' if it tells none."""


def hear(route: str, lines: bytes, body: bytes) -> list[Heard]:
    """The choices of a whole answer with status 200 and these header lines; none if it is none."""
    is_stream = tells_events(lines)
    try:
        if value_in(lines, b"content-encoding") in (b"gzip", b"deflate"):
            body = zlib.decompress(body, zlib.MAX_WBITS | 32)
        told = list(_events(body)) if is_stream else [orjson.loads(body)]
        found = _READERS[route]([each for each in told if isinstance(each, dict)])
    except (zlib.error, orjson.JSONDecodeError, *_MISSHAPEN):
        return []
    response_id = _id_in(told)
    for heard in found:
        heard.response_id = response_id
        heard.prompt_ids = _sound(heard.prompt_ids, list[TokenId])
        heard.token_ids = _sound(heard.token_ids, list[TokenId])
        heard.logprobs = _sound(heard.logprobs, list[float])
    return found


def _sound(told: Any, kind: type[T]) -> T | None:
    """What was told if it is of that kind, else None: as good as not told."""
    try:
        return msgspec.convert(told, kind)
    except msgspec.ValidationError:
        return None


def _id_in(told: list[Any]) -> str:
    """The first that is told: in chat on top, in streams of others in their first event."""
    for each in told:
        if not isinstance(each, dict):
            continue
        for part in (each, each.get("response"), each.get("message")):
            if isinstance(part, dict) and isinstance(part.get("id"), str):
                return str(part["id"])
    return ""


_MISSHAPEN = (KeyError, TypeError, ValueError, AttributeError, IndexError)


def _events(body: bytes) -> Iterator[Any]:
    for line in body.splitlines():
        data = line[5:].strip() if line.startswith(b"data:") else b""
        if data and data != b"[DONE]":
            yield orjson.loads(data)


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
