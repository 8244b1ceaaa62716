"""Parts of answers that several dialects share: events, OpenAI's errors, the order of blocks.

- An event's JSON is on one line, since orjson writes no line breaks (event format: WHATWG HTML,
  section 9.2, server-sent events).
- OpenAI's clients key on an error's `code` (`context_length_exceeded`) and `type`.
- Blocks come as reasoning, content, calls; content that arrives after a call has begun follows the
  calls. An answer that is not streamed has the blocks that its events would have built.
"""

from collections.abc import Iterator
from typing import Any

import msgspec
import orjson

from rollmesh.core.errors import SessionError
from rollmesh.runtime.chat import CallDelta, Delta, ToolCall
from rollmesh.serve.interception.dialects.dialect import ReplyView, object_schema

_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}


def openai_error(error: SessionError) -> dict[str, Any]:
    """The error as OpenAI's APIs encode it."""
    default = "server_error" if error.status >= 500 else "invalid_request_error"
    kind = _TYPES.get(error.status, default)
    return {"error": {"message": str(error), "type": kind, "param": None, "code": error.code}}


def sse_event(data: dict[str, Any]) -> bytes:
    """Encode an event without a name."""
    return b"data: " + orjson.dumps(data) + b"\n\n"


def named_sse_event(data: dict[str, Any]) -> bytes:
    """Encode an event named by its `type`: some clients read the name, others the type."""
    return b"event: %b\ndata: %b\n\n" % (data["type"].encode(), orjson.dumps(data))


TEXT_SCHEMA = {"type": "string"}
NUMBER_SCHEMA = {"type": "integer"}
OPENAI_ERROR = object_schema(
    error=object_schema(
        message=TEXT_SCHEMA,
        type=TEXT_SCHEMA,
        param={"type": ["string", "null"]},
        code=TEXT_SCHEMA,
    )
)
"""The JSON schema of `openai_error`."""
COUNTS_SCHEMA = object_schema(input_tokens=NUMBER_SCHEMA, output_tokens=NUMBER_SCHEMA)
"""The `usage` of Responses and Messages."""

DONE = b"data: [DONE]\n\n"
"""The end of a stream of Chat and Completions."""


class OpenAIDialect:
    """The parts of Dialect that OpenAI's APIs share."""

    count_route = ""
    end_events = frozenset[str]()
    error_events = frozenset[str]()
    prefers_x_api_key = False

    def error(self, error: SessionError) -> bytes:
        return orjson.dumps(openai_error(error))

    def error_event(self, error: SessionError) -> bytes:
        return sse_event(openai_error(error))


class TextPiece(msgspec.Struct, frozen=True):
    """The next piece of an answer's text."""

    text: str


class ReasoningPiece(msgspec.Struct, frozen=True):
    """The next piece of an answer's reasoning."""

    text: str


def parts_of(delta: Delta, has_called: bool) -> Iterator[ReasoningPiece | TextPiece | CallDelta]:
    """A delta's parts in order; `has_called` if an earlier delta began a call."""
    if delta.reasoning:
        yield ReasoningPiece(delta.reasoning)
    if delta.content and not has_called:
        yield TextPiece(delta.content)
    yield from delta.calls
    if delta.content and has_called:
        yield TextPiece(delta.content)


def blocks_of(view: ReplyView) -> list[ReasoningPiece | TextPiece | ToolCall]:
    """The blocks of a committed reply; adjacent pieces of one kind are joined."""
    blocks: list[ReasoningPiece | TextPiece | ToolCall] = []
    calls = dict(enumerate(view.answer.tool_calls))
    has_called = False
    for delta in view.deltas():
        for part in parts_of(delta, has_called):
            if isinstance(part, CallDelta):
                blocks += [calls.pop(part.index)] if part.index in calls else []
                has_called = True
            elif blocks and type(blocks[-1]) is type(part):
                blocks[-1] = type(part)(blocks[-1].text + part.text)
            else:
                blocks.append(part)
    return blocks
