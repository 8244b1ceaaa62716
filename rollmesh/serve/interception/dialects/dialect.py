"""The protocol of a dialect: pure functions between the bytes of an HTTP API and rollmesh's types.

    body --Dialect.decode--> DecodedRequest --turns--> session --replies--> .whole | .stream
    upstream's events or object --Dialect.read_answer--> UpstreamChoice (relay)

- A dialect has no access to sockets or sessions. It sees a reply through ReplyView, whose values
  are the same each time the same request is answered, so a repeated answer is byte-identical.
- `decode` returns a DecodedRequest or raises a SessionError that names the problem, whatever the
  bytes are.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import msgspec

from rollmesh.core.errors import SessionError
from rollmesh.core.types import DialectName
from rollmesh.runtime.chat import AnswerOptions, Delta, ParsedReply, Turn, whole_calls
from rollmesh.runtime.conversation.message_trie import key_of
from rollmesh.runtime.replies import Reply, ReplyHead
from rollmesh.runtime.session import Session
from rollmesh.serve.interception.dialects.token_listing import TokenListing


class ReplyView:
    """One reply as one exchange presents it."""

    __slots__ = ("_context", "_reply", "_session", "head", "model", "options")

    def __init__(
        self, session: Session, reply: Reply, options: AnswerOptions, context: "ViewContext"
    ) -> None:
        self.head: ReplyHead = reply.head
        self.options = options
        self.model = options.model or context.model_name
        self._session = session
        self._reply = reply
        self._context = context

    @property
    def answer(self) -> ParsedReply:
        """The parsed answer of a committed reply."""
        return self._session.finish(self._reply)

    def deltas(self) -> list[Delta]:
        """Return a committed reply as deltas, in the order of its content and calls."""
        answer = self.answer
        if not (answer.content and answer.tool_calls):
            calls = whole_calls(answer.tool_calls)
            return [Delta(answer.content, answer.reasoning, calls, self.num_tokens)]
        # Content may be before and after the calls: only the tokens show where.
        reader = self._session.answers.reader(self._reply)
        first = reader.feed(self._reply.token_ids())
        return [*([first] if first else []), reader.end(self.num_tokens)]

    @property
    def finish_reason(self) -> str:
        """`stop`, `length` or `tool_calls`, of a committed reply."""
        return self._reply.finish_reason

    @property
    def matched_stop(self) -> str | None:
        """The stop string that ended a committed reply, if one did."""
        return self._reply.matched_stop

    @property
    def num_tokens(self) -> int:
        """Number of sampled tokens of a committed reply."""
        return self._reply.num_tokens

    def prompt_ids(self) -> list[int]:
        """Return the exact prompt tokens of the reply."""
        return list(self._reply.prompt_ids())

    def prompt_text(self) -> str:
        """Return the prompt as text."""
        pieces = map(self._context.token_bytes, self._reply.prompt_ids())
        return b"".join(pieces).decode("utf-8", "replace")

    def token_ids(self, start: int, stop: int) -> list[int]:
        """Return the sampled tokens `start` to `stop`."""
        return list(self._reply.token_ids(start)[: stop - start])

    def token_text(self, token_id: int) -> str:
        """Return the text of a token; the replacement character for a part of a character."""
        return self._context.token_bytes(token_id).decode("utf-8", "replace")

    def logprobs(self, start: int, stop: int) -> list[float]:
        """Return the log-probs of the sampled tokens `start` to `stop`."""
        return list(self._reply.logprobs()[start:stop])

    def top_logprobs(self, start: int, stop: int) -> Sequence[Sequence[tuple[float, int]]]:
        """Return the most likely alternatives of those tokens; empty if none were requested."""
        if not self.options.num_top_logprobs:
            return ()
        num, rows = self.options.num_top_logprobs, self._reply.top_logprobs()
        # An engine may have returned none for all or a part of the reply.
        return [row[:num] for row in rows[start:stop]] if len(rows) >= stop else ()

    def listed_tokens(self, start: int, stop: int) -> bytes:
        """Return the JSON array of those tokens with their log-probs."""
        return self._context.listing.rows(
            self._context.token_bytes,
            self.token_ids(start, stop),
            self.logprobs(start, stop),
            self.top_logprobs(start, stop),
        )


class ViewContext:
    """Shared by all reply views of a server."""

    def __init__(self, model_name: str, token_bytes: Callable[[int], bytes]) -> None:
        self.model_name = model_name
        """Name in answers to requests without a model name."""
        self.token_bytes = token_bytes
        """Returns the bytes of a token, which may be a part of a character."""
        self.listing = TokenListing()


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
