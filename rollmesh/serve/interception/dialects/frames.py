"""The bytes that all dialects are made of: server-sent events and refusals.

Invariant: an event's JSON stands on one line, since orjson writes no line breaks. Event format:
WHATWG HTML, section 9.2 (server-sent events). Driven by the dialects.
"""

from typing import Any, TypeVar

import msgspec
import orjson

from rollmesh.core.errors import DECODE_ERRORS, SessionError

DONE = b"data: [DONE]\n\n"
"""What ends a stream of OpenAI's older APIs."""

Body = TypeVar("Body")


def event(data: dict[str, Any]) -> bytes:
    """An event without a name."""
    return b"data: " + orjson.dumps(data) + b"\n\n"


def named_event(data: dict[str, Any]) -> bytes:
    """An event that is named by its `type`: half of the clients read the one, half the other."""
    return b"event: %b\ndata: %b\n\n" % (data["type"].encode(), orjson.dumps(data))


def read_body(decoder: "msgspec.json.Decoder[Body]", body: bytes, kind: str) -> Body:
    """The body as its struct; SessionError 400 says which key is wrong."""
    try:
        if not body.isascii():
            body.decode()  # most of it is kept unopened, and must come out as the text it is
        return decoder.decode(body)
    except DECODE_ERRORS as error:
        raise refusal("invalid_request", f"the body is no {kind}: {error}") from None


def present(raw: msgspec.Raw) -> bytes:
    """A key's JSON; empty where it is missing, null or an empty list."""
    text = bytes(raw)
    return b"" if text in (b"", b"null", b"[]") else text


def refusal(code: str, message: str) -> SessionError:
    """The request is wrong."""
    return SessionError(400, code, message)
