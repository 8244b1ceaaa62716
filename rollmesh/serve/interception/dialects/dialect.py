"""The protocol of a dialect: pure functions between the bytes of an HTTP API and rollmesh's types.

    body --Dialect.decode--> DecodedRequest --turns--> session --replies--> .whole | .stream
    upstream's events or object --Dialect.read_answer--> UpstreamChoice (relay)

- A dialect has no access to sockets or sessions.
- `decode` returns a DecodedRequest or raises a SessionError that names the problem, whatever the
  bytes are.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import msgspec

from rollmesh.core.errors import SessionError
from rollmesh.core.types import DialectName
from rollmesh.runtime.chat import Delta, Turn
from rollmesh.runtime.conversation.message_trie import key_of
from rollmesh.serve.interception.reply_view import ReplyView

Json = dict[str, Any]


class RequestBody(msgspec.Struct, frozen=True):
    """A request's body with what its headers add."""

    body: bytes
    salt: bytes = b""
    """Further identity of the request: the dialect, an Idempotency-Key."""
    is_retry: bool = False
    """The client marked it as a resend."""

    @property
    def digest(self) -> int:
        """Identity of the request, stable across processes."""
        return key_of(self.salt, self.body)

    def digest_without(self, part: bytes) -> int:
        """Identity of the request without `part`, which has no meaning for the model."""
        before, _, after = self.body.partition(part)
        return key_of(self.salt, before, after)


class AnswerStream(Protocol):
    """Encoder of one streamed answer; choices may arrive interleaved."""

    def piece(self, choice: int, delta: Delta) -> bytes:
        """Events of the next delta of a choice; the first piece opens the stream."""

    def end(self, choice: int, delta: Delta) -> bytes:
        """Events of the last delta of a choice and of its finish."""

    def close(self) -> bytes:
        """Events after the last choice."""

    def error(self, error: SessionError) -> bytes:
        """The event of a failure after the first byte."""


class DecodedRequest(Protocol):
    """One decoded request, and how to encode its answer."""

    turns: tuple[Turn, ...]
    """Turns to sample: one, except for batched raw prompts. The exchange takes them out, since they
    hold the request's history."""

    @property
    def is_streamed(self) -> bool:
        """Whether the answer is a stream of events."""

    def whole(self, views: Sequence[ReplyView]) -> bytes:
        """The body of an answer that is not streamed; `views` are the committed replies of all
        turns, in order."""

    def stream(self, views: Sequence[ReplyView]) -> AnswerStream:
        """An encoder of the answer's events."""


class UpstreamChoice(msgspec.Struct):
    """One choice of an answer that a relay received; None for fields that the answer lacks."""

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
    """No part of its stream was unreadable, or `usage` confirms its number of tokens."""


class ApiSchema(msgspec.Struct, frozen=True):
    """The JSON schemas of a dialect, for the OpenAPI document."""

    operation: str
    """Name of the operation and of the answer's schema, such as `ChatCompletion`."""
    request: type[msgspec.Struct]
    answer: Json
    """Guaranteed fields of an answer."""
    error_name: str
    error: Json


def object_schema(**properties: Any) -> Json:
    """The JSON schema of an object with these required properties."""
    return {"type": "object", "properties": properties, "required": list(properties)}


class Dialect(Protocol):
    """One HTTP API, for the gateway (`decode`, `error`) and for the relay (the rest)."""

    name: DialectName
    """Recorded with each sampled answer."""
    route: str
    """End of the request path, such as `/chat/completions`."""
    count_route: str
    """End of the path that counts the tokens of a request; '' if the API has none."""
    history_key: str
    """Key of the body whose array is the conversation."""
    end_events: frozenset[str]
    """Types of the events that end a stream; empty if it ends with `data: [DONE]`."""
    error_events: frozenset[str]
    """Types of the events that report a failure."""
    prefers_x_api_key: bool
    """The provider's key is sent as `x-api-key`, unless the agent used `Authorization`."""
    schema: ApiSchema

    def decode(self, request: RequestBody) -> DecodedRequest:
        """Decode a request; SessionError 400 if it is malformed."""

    def error(self, error: SessionError) -> bytes:
        """The body of a failed answer."""

    def error_event(self, error: SessionError) -> bytes:
        """The event that ends a stream whose encoder is not known here (relay)."""

    def read_answer(self, events: Sequence[Json]) -> list[UpstreamChoice]:
        """The choices of an upstream's answer: of one object, or of the events of a stream.

        Empty, or KeyError, TypeError, ValueError, AttributeError or IndexError, if the answer has
        another shape.
        """
