"""Read an upstream's raw answer: header lines, the end of a stream, and its content or failure.

Answers are kept as bytes and parsed when their session is finished, or when a fault is looked up.

- Any bytes give an UpstreamAnswer; fields that the bytes lack are None.
- An answer is the model's only if it has no error object or event and, if it is a stream, has its
  end event or a finish reason for each choice.
- The gateway's secrets and the agent's key are never forwarded; cookies pass in neither direction,
  since agents share the provider's account; hop-by-hop headers stay on their connection.
"""

import functools
import re
import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, Any, TypeVar

import msgspec
import orjson

from rollmesh.serve.interception.dialects.dialect import Dialect, Json, UpstreamChoice

Header = tuple[bytes, bytes]

_HOP_BY_HOP = {
    b"connection",
    b"keep-alive",
    b"proxy-authenticate",
    b"proxy-authorization",
    b"proxy-connection",
    b"te",
    b"trailer",
    b"transfer-encoding",
    b"upgrade",
}
_NOT_FORWARDED = _HOP_BY_HOP | {
    b"host",
    b"content-length",
    b"content-encoding",  # the body is decompressed here
    b"expect",
    b"cookie",
    b"authorization",
    b"x-api-key",
    b"accept-encoding",  # the answer is parsed here, too
    b"openai-organization",  # the agent must not choose the billed account
    b"openai-project",
    b"anthropic-organization",
}
_NOT_RETURNED = _HOP_BY_HOP | {b"content-length", b"set-cookie"}


def forwarded_headers(
    sent: Iterable[Header], secret: str, key: bytes, prefers_x_api_key: bool
) -> bytes:
    """Header lines for the upstream, from the headers of an agent that authenticated with `secret`.

    `key` is the provider's, b"" for none; it replaces the agent's own. Lines that `Connection`
    names are hop-by-hop (RFC 9110, 7.6.1) and are left out.
    """
    shown = secret.encode("utf-8", "surrogateescape")
    lines: list[bytes] = []
    nominated: set[bytes] = set()
    for name, value in sent:
        lower = name.lower()
        if lower == b"x-api-key":
            prefers_x_api_key = True
        elif lower == b"authorization":
            prefers_x_api_key = False
        elif lower == b"connection":
            nominated.update(option.strip().lower() for option in value.split(b","))
        elif lower not in _NOT_FORWARDED and shown not in value:
            lines.append(b"%b: %b\r\n" % (name, value))
    if nominated - _NOT_FORWARDED:
        lines = [line for line in lines if line.partition(b":")[0].lower() not in nominated]
    if key:
        line = b"x-api-key: %b\r\n" if prefers_x_api_key else b"Authorization: Bearer %b\r\n"
        lines.append(line % key)
    return b"".join(lines)


def returned_headers(received: Iterable[Header]) -> bytes:
    """Header lines for the agent, from an upstream's headers; the server adds the body's length."""
    kept = [(n, v) for n, v in received if n.lower() not in _NOT_RETURNED]
    return b"".join([b"%b: %b\r\n" % header for header in kept])


def is_event_stream(lines: bytes) -> bool:
    """Whether an answer with these header lines is a stream of events."""
    # Most are not: then one search over all lines is enough.
    is_mentioned = b"event-stream" in lines.lower()
    return is_mentioned and b"event-stream" in header_value(lines, b"content-type")


def header_value(lines: bytes, name: bytes) -> bytes:
    """A header's value in lower case, b"" if absent; `name` is in lower case."""
    for line in lines.split(b"\r\n"):
        found, _, value = line.partition(b":")
        if found.lower() == name:
            return value.strip().lower()
    return b""


_DONE = b"[DONE]"


class StreamEndDetector:
    """Finds the event that ends a dialect's stream; `is_in` takes the stream's pieces in order.

    - The event is found however its bytes are split into pieces.
    - Text of the model never matches, since JSON has no line breaks inside a string.
    - A compressed stream is not searched: its HTTP answer ends it.
    """

    __slots__ = ("_event_names", "_num_tail_bytes", "_pattern", "_tail")

    def __init__(self, dialect: Dialect) -> None:
        self._event_names, self._pattern, self._num_tail_bytes = _end_pattern(dialect.end_events)
        self._tail = b"\n"

    def is_in(self, piece: bytes) -> bool:
        """Whether the end event begins in this piece, or began in the one before."""
        text = self._tail + piece
        self._tail = text[-self._num_tail_bytes :]
        # Most pieces have none of the words, and this search is faster than that for a line.
        for event_name in self._event_names:
            if event_name in text:
                return self._pattern.search(text) is not None
        return False


@functools.cache
def _end_pattern(end_events: frozenset[str]) -> tuple[tuple[bytes, ...], re.Pattern[bytes], int]:
    """Words of which each end event has one, the lines that are one, and the bytes such a line has
    at most."""
    if not end_events:
        return (_DONE,), re.compile(rb"[\r\n]data: ?\[DONE\]"), 48
    event_names = tuple(name.encode() for name in sorted(end_events))
    names = b"|".join(map(re.escape, event_names))
    line = re.compile(rb'[\r\n](?:event: ?|data: ?{"type": ?")(?:%b)' % names)
    return event_names, line, max(map(len, event_names)) + 24


T = TypeVar("T")
TokenId = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]

_ABORTED = frozenset({"abort", "error"})
"""Finish reasons of an answer that its engine aborted."""
_MAX_QUOTED_CHARS = 300
_WRONG_SHAPE = (KeyError, TypeError, ValueError, AttributeError, IndexError)
NO_END = "the stream ended without its end event and without a finish reason"
EMPTY_STREAM = "the stream is empty"


class UpstreamAnswer(msgspec.Struct):
    """A complete HTTP answer with status 200, as far as it can be parsed."""

    choices: list[UpstreamChoice] = []
    failure: str = ""
    """Why this is not a whole answer of the model; '' if it is one."""
    unread: str = ""
    """The part that could not be parsed, and why; '' if everything was."""
    is_cut: bool = False
    """The stream ended before its end event."""


def read_answer(dialect: Dialect, lines: bytes, body: bytes) -> UpstreamAnswer:
    """Parse the body of an answer with status 200 and these header lines."""
    is_stream = is_event_stream(lines)
    encoding = header_value(lines, b"content-encoding")
    if encoding in (b"gzip", b"deflate"):
        try:
            body = zlib.decompress(body, zlib.MAX_WBITS | 32)
        except zlib.error as error:
            answer = _unreadable(f"the {encoding.decode()} body cannot be inflated: {error}")
            answer.is_cut = is_stream
            return answer
    elif encoding not in (b"", b"identity"):
        name = encoding.decode("latin-1")
        return UpstreamAnswer(unread=f"content-encoding {name} is not supported")
    answer = _read_stream(dialect, body) if is_stream else _read_body(dialect, lines, body)
    for choice in answer.choices:
        choice.prompt_ids = _valid(choice.prompt_ids, list[TokenId])
        choice.token_ids = _valid(choice.token_ids, list[TokenId])
        choice.logprobs = _valid(choice.logprobs, list[float])
    return answer


def error_in(dialect: Dialect | None, body: bytes) -> str:
    """The message of a JSON body that is an error object; '' if it is none."""
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError:
        return ""
    return _error_of(dialect, value) if isinstance(value, dict) else ""


def _read_body(dialect: Dialect, lines: bytes, body: bytes) -> UpstreamAnswer:
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        if not body.strip():
            return _unreadable("the body is empty")
        kind = header_value(lines, b"content-type").decode("latin-1")
        return _unreadable(f"the body ({kind or 'no content type'}) is not JSON: {error}")
    if not isinstance(value, dict):
        return _unreadable("the body is JSON, but not an object")
    if failure := _error_of(dialect, value):
        return UpstreamAnswer(failure=failure)
    choices = _choices(dialect, [value])
    if not choices:
        return _unreadable(f"the body is not an answer of {dialect.route}")
    return UpstreamAnswer(choices)


def _read_stream(dialect: Dialect, body: bytes) -> UpstreamAnswer:
    stream = _StreamParser(dialect)
    for name, data in _data_lines(body):
        stream.feed(name, data)
    unread = ""
    if stream.num_bad:
        unread = f"{stream.num_bad} of {stream.num_lines} data lines are not JSON objects"
    if stream.failure:
        return UpstreamAnswer(failure=stream.failure, unread=unread)
    choices = _choices(dialect, stream.events)
    if not stream.is_ended and not (choices and all(each.finish_reason for each in choices)):
        if not stream.num_lines:
            return UpstreamAnswer(failure=EMPTY_STREAM, unread=EMPTY_STREAM, is_cut=True)
        return UpstreamAnswer(failure=NO_END, unread=unread, is_cut=True)
    if not choices:
        return _unreadable(unread or f"the stream is not an answer of {dialect.route}")
    if stream.num_bad:
        num_used = _num_used(stream.events)
        for choice in choices:
            choice.is_gapless = len(choices) == 1 and len(choice.token_ids or ()) == num_used
    return UpstreamAnswer(choices, unread=unread)


class _StreamParser:
    """Collects the events of a streamed answer."""

    def __init__(self, dialect: Dialect) -> None:
        self.events: list[Json] = []
        self.failure = ""
        self.is_ended = False
        """The end event was received."""
        self.num_lines = 0
        self.num_bad = 0
        """Lines that are no JSON object."""
        self._dialect = dialect

    def feed(self, name: bytes, data: bytes) -> None:
        """Add one data line of the event with this name."""
        self.num_lines += 1
        if data == _DONE:
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
        if isinstance(kind, str) and kind in self._dialect.end_events:
            self.is_ended = True
        if not self.failure:
            self.failure = _error_of(self._dialect, event)
            if not self.failure and name == b"error":
                self.failure = _quoted(data.decode("latin-1"))


def _choices(dialect: Dialect, events: Sequence[Json]) -> list[UpstreamChoice]:
    """The choices of a parsed answer; none if it has another shape."""
    try:
        found = dialect.read_answer(events)
    except _WRONG_SHAPE:
        return []
    response_id = _id_in(events)
    for choice in found:
        choice.response_id = response_id
    return found


def _unreadable(why: str) -> UpstreamAnswer:
    return UpstreamAnswer(failure=f"the answer cannot be read: {why}", unread=why)


def _error_of(dialect: Dialect | None, value: Json) -> str:
    """The message of the error that an object or event reports; '' if it reports none."""
    inner = value.get("response")
    inner = inner if isinstance(inner, dict) else {}
    kind = value.get("type")
    error = value.get("error") or inner.get("error")
    choices = value.get("choices")
    for choice in choices if isinstance(choices, list) else ():
        if isinstance(choice, dict):
            reason = choice.get("finish_reason")
            is_aborted = isinstance(reason, str) and reason in _ABORTED
            error = error or choice.get("error") or (is_aborted and f"finish_reason {reason}")
    error_events = dialect.error_events if dialect else ()
    is_error = (
        bool(error)
        or value.get("object") == "error"
        or (isinstance(kind, str) and (kind == "error" or kind in error_events))
        or "failed" in (value.get("status"), inner.get("status"))
    )
    return _quoted(error or value) if is_error else ""


def _quoted(error: Any) -> str:
    message = error.get("message") if isinstance(error, dict) else error
    if not isinstance(message, str):
        message = orjson.dumps(error).decode()
    return f"the answer is an error of the upstream: {message[:_MAX_QUOTED_CHARS]}"


def _num_used(events: Sequence[Json]) -> int:
    """Sampled tokens by the newest `usage`; -1 if there is none."""
    for event in reversed(events):
        usage = event.get("usage")
        if isinstance(usage, dict) and isinstance(usage.get("completion_tokens"), int):
            return int(usage["completion_tokens"])
    return -1


def _valid(value: Any, kind: type[T]) -> T | None:
    """The value if it has that type, else None."""
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError:
        return None


def _id_in(events: Sequence[Json]) -> str:
    """The answer's id: at the top level in chat, nested in the first event in other streams."""
    for event in events:
        for part in (event, event.get("response"), event.get("message")):
            if isinstance(part, dict) and isinstance(part.get("id"), str):
                return str(part["id"])
    return ""


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
