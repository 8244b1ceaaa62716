"""The replies of a session, and which of them an equal request gets again.

    SAMPLING --generation ends--> COMMITTED --last byte sent--> DELIVERED
    SAMPLING --generation void, session sealed--> VOID
    COMMITTED --session sealed before delivery--> VOID

- A reply outlives its connections: a retry joins it, resumes it, or gets the same bytes again.
- From COMMITTED on, a reply's tokens are a node of the token graph and its generation is gone.
- Until they are delivered, the replies of a request answer every equal request. Later they answer
  requests that the client marks as retries. An unmarked one gets new replies, which supersede the
  old ones once they are delivered; superseded replies that no request follows do not train.
"""

import enum
import re
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Protocol

import msgspec

from rollmesh.core.errors import (
    EngineError,
    EngineOverloaded,
    EngineRefused,
    RequestLost,
    SessionError,
)
from rollmesh.core.types import DialectName, SamplingParams, VersionRun
from rollmesh.engine.backend import TopLogprobs
from rollmesh.runtime.chat import DeltaReader, ParsedReply, ParseOptions, RequestedSampling, Turn
from rollmesh.runtime.conversation.message_trie import NO_NODE, MessageNode
from rollmesh.runtime.conversation.token_graph import Sampled, TokenGraph
from rollmesh.runtime.generation.generation import GenerationState
from rollmesh.runtime.generation.sampling import forced_fields
from rollmesh.runtime.tokens.prompts import Prompts

RETRY_AFTER_S = 1.0
VOID_FINISH = "void"
"""The finish reason of a node that was never delivered."""
_OVERFLOW = re.compile("(longer than|exceeds) the model's (maximum )?context length")
"""SGLang's error for a request that is longer than its context."""


class LiveGeneration(Protocol):
    """The methods of a generation that the session needs; implemented by generation.Generation."""

    @property
    def state(self) -> GenerationState: ...
    @property
    def token_ids(self) -> Sequence[int]: ...
    @property
    def logprobs(self) -> Sequence[float]: ...
    @property
    def top_logprobs(self) -> Sequence[TopLogprobs]: ...
    @property
    def policy_versions(self) -> Sequence[VersionRun]: ...
    @property
    def engines(self) -> Sequence[str]: ...
    @property
    def finish_reason(self) -> str: ...
    @property
    def matched_stop(self) -> int | str | None: ...
    @property
    def error(self) -> EngineError | None: ...

    def join(self) -> None:
        """Add a reader."""

    def leave(self) -> None:
        """Remove a reader; the last one parks the generation."""

    async def wait(self, num_tokens: int) -> bool:
        """Wait until there are more than `num_tokens` (True) or no more will come (False)."""

    def seal(self, reason: str) -> None:
        """End it; readers are woken."""


class ReplyState(enum.Enum):
    """State of a reply."""

    SAMPLING = "sampling"
    COMMITTED = "committed"
    DELIVERED = "delivered"
    VOID = "void"


class ReplyHead(msgspec.Struct, frozen=True):
    """The data of a reply that are known from its beginning."""

    id: str
    """`<session id>-<number>`; ids of responses and tool calls derive from it."""
    created_s: int
    """Unix time."""
    num_prompt_tokens: int
    reads_calls: bool
    params: SamplingParams
    index: int = 0
    """Position among the choices of its call."""
    sampling: RequestedSampling = RequestedSampling()
    """The sampling fields that the agent requested."""
    dialect: DialectName = ""
    min_policy_version: int = -1
    """The newest weights that the session had seen when the call began."""

    @property
    def forced(self) -> tuple[str, ...]:
        """Sampling fields that the session's policy set against the agent's request."""
        return forced_fields(self.sampling, self.params)


class ReplySource(msgspec.Struct, frozen=True):
    """The context that a reply was sampled after, and the data that parsing it needs."""

    context: MessageNode
    """The history that it answers."""
    node: int
    """The last node of its prompt: that of `context`, or a prefill after it."""
    prefill: tuple[int, ...] = ()
    """The tokens of that prefill."""
    tools: bytes = b""
    """The offered tools; a JSON array in chat shape."""
    is_raw: bool = False
    """The reply answers a raw prompt: all of it is text."""
    prompt_text: str | None = None
    """That prompt, if it was sent as text."""
    digest: int = 0
    """Digest of the request."""


class Reply:
    """One reply; only its session writes the attributes."""

    __slots__ = (
        "_graph", "_top_logprobs", "answer", "failure", "generation", "head", "is_undelivered",
        "matched_stop", "node", "source", "state",
    )  # fmt: skip

    def __init__(
        self,
        head: ReplyHead,
        source: ReplySource,
        generation: LiveGeneration | None,
        graph: TokenGraph,
    ) -> None:
        """A reply without a generation was sampled in another process."""
        self.head = head
        self.source = source
        self.generation = generation
        self.state = ReplyState.SAMPLING
        self.node = NO_NODE
        self.answer: ParsedReply | None = None
        """Parsed at the commit, dropped after delivery."""
        self.matched_stop: str | None = None
        """The stop string that ended it."""
        self.failure: SessionError | None = None
        """Why it is VOID, for its readers; None if the session's end is the reason."""

        self.is_undelivered = False
        """COMMITTED, and its reader left before the last byte; written by the recorder."""
        self._graph = graph
        self._top_logprobs: Sequence[TopLogprobs] = ()

    @property
    def is_running(self) -> bool:
        """Whether a request should still join it."""
        return self.generation is not None and self.generation.state is not GenerationState.VOID

    @property
    def is_ended(self) -> bool:
        """Whether no more tokens will come."""
        return self.generation is None or self.generation.state in (
            GenerationState.COMMITTED,
            GenerationState.VOID,
        )

    @property
    def finish_reason(self) -> str:
        """Finish reason of a committed reply: `stop`, `length` or `tool_calls`."""
        return self._graph.nodes[self.node].finish_reason

    @property
    def num_tokens(self) -> int:
        """Number of tokens sampled so far."""
        if self.generation is not None:
            return len(self.generation.token_ids)
        return 0 if self.node == NO_NODE else self._graph.nodes[self.node].num_tokens

    def token_ids(self, start: int = 0) -> Sequence[int]:
        """The tokens so far, from `start` on."""
        if self.generation is not None:
            return self.generation.token_ids[start:]
        return () if self.node == NO_NODE else self._graph.ids_of(self.node)[start:]

    def logprobs(self) -> Sequence[float]:
        """One per token so far."""
        if self.generation is not None:
            return self.generation.logprobs
        return () if self.node == NO_NODE else self._graph.logprobs_of(self.node)

    def top_logprobs(self) -> Sequence[TopLogprobs]:
        """The likeliest (log-prob, token id) for each token so far, if requested."""
        return self._top_logprobs if self.generation is None else self.generation.top_logprobs

    def drop_top_logprobs(self) -> None:
        """Drop the likeliest tokens, which need much more memory than the rest of a reply."""
        self._top_logprobs = ()

    def prompt_ids(self) -> Sequence[int]:
        """All tokens that it was sampled after."""
        return self._graph.path_ids(self.source.node)

    def parse_options(self) -> ParseOptions:
        """How its tokens are parsed, unless it answers a raw prompt."""
        head, source = self.head, self.source
        prefix = f"call_{head.id.replace('-', '_')}"
        return ParseOptions(
            head.params.stop, head.reads_calls, prefix, source.prefill, source.tools
        )

    def settle(
        self,
        node: int,
        matched_stop: str | None = None,
        top_logprobs: Sequence[TopLogprobs] = (),
    ) -> None:
        """Replace the generation with `node`, which has its tokens in the graph.

        The other arguments are given for a reply of another process.
        """
        if self.generation is not None:
            matched = self.generation.matched_stop
            matched_stop = matched if isinstance(matched, str) else None
            top_logprobs = self.generation.top_logprobs
        self.matched_stop, self._top_logprobs = matched_stop, top_logprobs
        self.node, self.generation = node, None

    def join(self) -> None:
        """Add a connection that reads this reply."""
        if self.generation is not None:
            self.generation.join()

    def leave(self) -> None:
        """Remove a reading connection; a generation without readers is parked."""
        if self.generation is not None:
            self.generation.leave()

    async def wait(self, num_tokens: int) -> bool:
        """Wait until there are more than `num_tokens` (True) or no more will come (False)."""
        return self.generation is not None and await self.generation.wait(num_tokens)


def sampled_of(reply: Reply, finish_reason: str) -> Sampled:
    """The sampled tokens of a reply's generation, for the graph."""
    generation = reply.generation
    assert generation is not None
    return Sampled(
        generation.token_ids,
        generation.logprobs,
        tuple(generation.policy_versions),
        reply.head.params,
        finish_reason,
        generation.engines,
        reply.head.dialect,
    )


def number_of(reply: Reply) -> int:
    """Number of the reply's call in its session."""
    return int(reply.head.id.rpartition("-")[2])


def failure_of(error: EngineError | None) -> SessionError:
    """The error for the readers of a reply whose generation failed."""
    if isinstance(error, EngineRefused):
        if _OVERFLOW.search(str(error)):  # because of images, whose tokens only the engine counts
            why = f"This model's maximum context length is exceeded, as its engine says: {error}"
            return SessionError(400, "context_length_exceeded", why)
        return SessionError(400, "engine_refused", f"the engine refused the request: {error}")
    why = str(error or "the generation ended without a result")
    if isinstance(error, EngineOverloaded):
        return SessionError(429, "overloaded", why, RETRY_AFTER_S)
    if isinstance(error, RequestLost):
        return SessionError(503, "content_lost", why)
    return SessionError(503, "engine_unavailable", why, RETRY_AFTER_S)


MAX_LISTED = 32
"""Number of delivered replies whose likeliest tokens are kept for a retry: they need 2 KB per
token."""

Choices = tuple[Reply, ...]
"""The replies to one request."""


class ReplyTable:
    """The newest replies of each distinct request."""

    __slots__ = ("_listed", "_of_request", "_older")

    def __init__(self) -> None:
        self._of_request: dict[int, Choices] = {}
        """By the request's digest."""
        self._older: dict[int, set[int]] = {}
        """Nodes of delivered answers to requests that were sent again, until the new answer is
        delivered."""
        self._listed: deque[Reply] | None = None
        """The newest delivered replies with likeliest tokens; few sessions have any."""

    def put(self, digest: int, replies: Choices) -> None:
        """Set the replies of a request."""
        self._of_request[digest] = replies

    def put_again(self, digest: int, replies: Choices) -> None:
        """Set replies that another process stored; the previous ones of the request were
        delivered."""
        older = [
            r.node for r in self._of_request.get(digest, ()) if r.state is ReplyState.DELIVERED
        ]
        if older:
            self._older.setdefault(digest, set()).update(older)
        self.put(digest, replies)

    def newest(self, digest: int) -> Choices | None:
        """The newest replies of a request, whether or not they may answer it again."""
        return self._of_request.get(digest)

    def all(self) -> Iterable[Choices]:
        """The newest replies of all requests."""
        return self._of_request.values()

    def known(self, turn: Turn) -> Choices | None:
        """The replies that answer `turn` again, if there are any."""
        replies = self._of_request.get(turn.digest)
        if replies is None:
            return None
        if turn.is_retry or any(r.state is not ReplyState.DELIVERED for r in replies):
            return replies
        # Sent again after delivery: siblings. If no request follows the old ones, it is a retry.
        self._older.setdefault(turn.digest, set()).update([reply.node for reply in replies])
        return None

    def delivered(self, reply: Reply) -> Iterable[int]:
        """Record that a committed reply was sent completely; returns the nodes that it
        supersedes."""
        reply.state = ReplyState.DELIVERED
        if reply.top_logprobs():
            self._list(reply)
        return self._older.pop(reply.source.digest, ()) if self._older else ()

    def take_back(self, reply: Reply, older: set[int]) -> None:
        """Record that a reply was not delivered after all, and supersedes nothing until it is."""
        if older:
            self._older.setdefault(reply.source.digest, set()).update(older)

    def pop(self, digest: int) -> Choices:
        """Remove and return the replies of a request."""
        return self._of_request.pop(digest, ())

    def drop_void(self) -> None:
        """Forget requests whose answers were withdrawn, so that they can be sent again."""
        for digest, replies in list(self._of_request.items()):
            if any(reply.state is ReplyState.VOID for reply in replies):
                del self._of_request[digest]

    def _list(self, reply: Reply) -> None:
        self._listed = self._listed or deque()
        self._listed.append(reply)
        if len(self._listed) > MAX_LISTED:
            self._listed.popleft().drop_top_logprobs()


class AnswerIndex:
    """Finds answers by id; an id without an answer, or with a void one, has no node."""

    __slots__ = ("_nodes", "_prompts", "_session_id")

    def __init__(self, session_id: str, prompts: Prompts) -> None:
        self._session_id = session_id
        self._prompts = prompts
        self._nodes: list[int] = []
        """By the call's number; NO_NODE for a call without an answer."""

    def begin(self) -> str:
        """Begin a call; return its id."""
        name = f"{self._session_id}-{len(self._nodes)}"
        self._nodes.append(NO_NODE)
        return name

    def put(self, reply: Reply) -> None:
        """Record the node of a reply, which answers its call."""
        self._nodes[number_of(reply)] = reply.node

    def node_of(self, name: str) -> int:
        """The node of the answer with this id; NO_NODE if there is none."""
        session_id, _, number = name.rpartition("-")
        # Python limits the number of digits that it converts to an integer.
        is_ours = session_id == self._session_id and len(number) <= len(str(len(self._nodes)))
        if is_ours and number.isdecimal() and int(number) < len(self._nodes):
            return self._nodes[int(number)]
        return NO_NODE

    def reader(self, reply: Reply) -> DeltaReader:
        """An incremental parser of the reply's tokens."""
        if reply.source.is_raw:
            return self._prompts.raw_reader(reply.head.params.stop)
        return self._prompts.reader(reply.parse_options())

    def read(self, reply: Reply) -> ParsedReply:
        """The parsed reply so far."""
        token_ids = reply.token_ids()
        if not reply.source.is_raw:
            return self._prompts.answer(reply.parse_options(), token_ids)
        reader = self.reader(reply)
        reader.feed(token_ids)
        reader.end(len(token_ids))
        return reader.answer()

    def forget(self) -> None:
        """Forget all ids."""
        self._nodes.clear()


def no_such(name: int | str) -> SessionError:
    """The error for an id without an answer."""
    why = f"Previous response with id {name!r} not found."
    return SessionError(400, "previous_response_not_found", why)
