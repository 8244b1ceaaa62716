"""The replies of a session, and which of them an equal request gets again.

    SAMPLING --generation ends--> COMMITTED --last byte sent--> DELIVERED
    SAMPLING --generation void, session sealed--> VOID
    COMMITTED --session sealed before delivery--> VOID

- A reply outlives its connections: a retry attaches to it, resumes it, or gets the same bytes
  again.
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
from rollmesh.engine.answers import TopLogprobs
from rollmesh.runtime.chat import Answer, DeltaReader, Reading, SamplingAsk, Turn
from rollmesh.runtime.generation import GenerationState
from rollmesh.runtime.message_trie import NO_NODE, MessageNode
from rollmesh.runtime.prompts import Prompts
from rollmesh.runtime.sampling import forced_fields
from rollmesh.runtime.token_graph import Sampled, TokenGraph

RETRY_AFTER_S = 1.0
VOID_FINISH = "void"
"""The finish reason of a node that was never delivered."""
_OVERFLOW = re.compile("(longer than|exceeds) the model's (maximum )?context length")
"""How SGLang says that a request is longer than its context."""


class LiveGeneration(Protocol):
    """What the session needs of a generation; legs.Generation is the real one."""

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
        """A reader came."""

    def leave(self) -> None:
        """A reader went; the last one parks the generation."""

    async def wait(self, num_tokens: int) -> bool:
        """Until more than `num_tokens` are there (True) or no more will come (False)."""

    def seal(self, reason: str) -> None:
        """End it; readers are woken."""


class ReplyState(enum.Enum):
    """States of a reply."""

    SAMPLING = "sampling"
    COMMITTED = "committed"
    DELIVERED = "delivered"
    VOID = "void"


class ReplyHead(msgspec.Struct, frozen=True):
    """What is known of a reply from its beginning."""

    id: str
    """`<session id>-<number>`; ids of responses and tool calls derive from it."""
    created_s: int
    """Unix time."""
    num_prompt_tokens: int
    reads_calls: bool
    params: SamplingParams
    index: int = 0
    """Which choice of its call it is."""
    ask: SamplingAsk = SamplingAsk()
    """What the agent wished of them."""
    dialect: DialectName = ""
    min_policy_version: int = -1
    """The newest weights that the session had seen when the call began."""

    @property
    def forced(self) -> tuple[str, ...]:
        """Sampling fields that the session's policy decided against the agent's wish."""
        return forced_fields(self.ask, self.params)


class ReplySource(msgspec.Struct, frozen=True):
    """What a reply was sampled after, and what reading it needs."""

    context: MessageNode
    """The history that it answers."""
    node: int
    """The last node of its prompt: that of `context`, or a lead behind it."""
    lead: tuple[int, ...] = ()
    """The tokens of that lead."""
    tools: bytes = b""
    """On offer; a JSON array in chat shape."""
    is_raw: bool = False
    """It answers a raw prompt: all of it is text."""
    prompt_text: str | None = None
    """That prompt, if it came as text."""
    digest: int = 0
    """Of the request."""


class Reply:
    """One reply; only its session writes the attributes."""

    __slots__ = (
        "_graph", "_top_logprobs", "answer", "failure", "generation", "head", "is_untaken",
        "matched_stop", "node", "source", "state",
    )  # fmt: skip

    def __init__(
        self,
        head: ReplyHead,
        source: ReplySource,
        generation: LiveGeneration | None,
        graph: TokenGraph,
    ) -> None:
        """Without a generation it is one that another process sampled."""
        self.head = head
        self.source = source
        self.generation = generation
        self.state = ReplyState.SAMPLING
        self.node = NO_NODE
        self.answer: Answer | None = None
        """Parsed at the commit, dropped after delivery."""
        self.matched_stop: str | None = None
        """The stop string that ended it."""
        self.failure: SessionError | None = None
        """Why it is VOID, for each of its readers; None where the session's end is the reason."""

        self.is_untaken = False
        """COMMITTED, and who read it has gone without its last byte; its diary's."""
        self._graph = graph
        self._top_logprobs: Sequence[TopLogprobs] = ()

    @property
    def is_running(self) -> bool:
        """Still worth attaching to."""
        return self.generation is not None and self.generation.state is not GenerationState.VOID

    @property
    def is_ended(self) -> bool:
        """No more tokens will come."""
        return self.generation is None or self.generation.state in (
            GenerationState.COMMITTED,
            GenerationState.VOID,
        )

    @property
    def finish_reason(self) -> str:
        """Of a committed reply: `stop`, `length` or `tool_calls`."""
        return self._graph.nodes[self.node].finish_reason

    @property
    def num_tokens(self) -> int:
        """Sampled so far."""
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
        """Per token so far the likeliest (log-prob, token id) of its place, where asked for."""
        return self._top_logprobs if self.generation is None else self.generation.top_logprobs

    def drop_top_logprobs(self) -> None:
        """They take far more room than all else of a reply."""
        self._top_logprobs = ()

    def prompt_ids(self) -> Sequence[int]:
        """All tokens that it was sampled after."""
        return self._graph.path_ids(self.source.node)

    def reading(self) -> Reading:
        """How its tokens are to be read, unless it answers a raw prompt."""
        head, source = self.head, self.source
        prefix = f"call_{head.id.replace('-', '_')}"
        return Reading(head.params.stop, head.reads_calls, prefix, source.lead, source.tools)

    def settle(
        self,
        node: int,
        matched_stop: str | None = None,
        top_logprobs: Sequence[TopLogprobs] = (),
    ) -> None:
        """Its tokens are in the graph now, as `node`; the generation goes.

        The rest is of one that another process sampled.
        """
        if self.generation is not None:
            matched = self.generation.matched_stop
            matched_stop = matched if isinstance(matched, str) else None
            top_logprobs = self.generation.top_logprobs
        self.matched_stop, self._top_logprobs = matched_stop, top_logprobs
        self.node, self.generation = node, None

    def join(self) -> None:
        """A connection reads this reply."""
        if self.generation is not None:
            self.generation.join()

    def leave(self) -> None:
        """A connection stopped reading; a generation without readers is parked."""
        if self.generation is not None:
            self.generation.leave()

    async def wait(self, num_tokens: int) -> bool:
        """Until more than `num_tokens` are there (True) or no more will come (False)."""
        return self.generation is not None and await self.generation.wait(num_tokens)


def sampled_of(reply: Reply, finish_reason: str) -> Sampled:
    """What a reply's generation has sampled, as it enters the graph."""
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
    """Of its call, in its session."""
    return int(reply.head.id.rpartition("-")[2])


def failure_of(error: EngineError | None) -> SessionError:
    """What the readers of a reply are told whose generation found no good end."""
    if isinstance(error, EngineRefused):
        if _OVERFLOW.search(str(error)):  # by images, whose tokens the engine alone counts
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
"""Delivered replies whose likeliest tokens are kept, for a retry: they take 2 KB a token."""

Choices = tuple[Reply, ...]
"""The replies to one request."""


class ReplyTable:
    """The newest replies of each distinct request."""

    __slots__ = ("_listed", "_of_request", "_older")

    def __init__(self) -> None:
        self._of_request: dict[int, Choices] = {}
        """By the request's digest."""
        self._older: dict[int, set[int]] = {}
        """Nodes of delivered answers to requests that were asked anew, until that is delivered."""
        self._listed: deque[Reply] | None = None
        """The newest delivered ones with likeliest tokens; few sessions have any."""

    def put(self, digest: int, replies: Choices) -> None:
        """The request has these from now on."""
        self._of_request[digest] = replies

    def put_again(self, digest: int, replies: Choices) -> None:
        """The same, as another process did it: those it has already were delivered before."""
        older = [
            r.node for r in self._of_request.get(digest, ()) if r.state is ReplyState.DELIVERED
        ]
        if older:
            self._older.setdefault(digest, set()).update(older)
        self.put(digest, replies)

    def newest(self, digest: int) -> Choices | None:
        """What the request has, whether or not it is to be answered by that again."""
        return self._of_request.get(digest)

    def all(self) -> Iterable[Choices]:
        """By request."""
        return self._of_request.values()

    def known(self, turn: Turn) -> Choices | None:
        """What `turn` is to be answered with, if it already has that."""
        replies = self._of_request.get(turn.digest)
        if replies is None:
            return None
        if turn.is_retry or any(r.state is not ReplyState.DELIVERED for r in replies):
            return replies
        # Again after delivery: siblings. If no request follows the old ones, it is a retry.
        self._older.setdefault(turn.digest, set()).update([reply.node for reply in replies])
        return None

    def delivered(self, reply: Reply) -> Iterable[int]:
        """The last byte of a committed reply was handed over; the nodes that it supersedes."""
        reply.state = ReplyState.DELIVERED
        if reply.top_logprobs():
            self._list(reply)
        return self._older.pop(reply.source.digest, ()) if self._older else ()

    def take_back(self, reply: Reply, older: set[int]) -> None:
        """It was not delivered after all, and supersedes nothing until it is."""
        if older:
            self._older.setdefault(reply.source.digest, set()).update(older)

    def pop(self, digest: int) -> Choices:
        """The request has none from now on; those that it had."""
        return self._of_request.pop(digest, ())

    def drop_void(self) -> None:
        """Requests whose answers were withdrawn may be asked anew."""
        for digest, replies in list(self._of_request.items()):
            if any(reply.state is ReplyState.VOID for reply in replies):
                del self._of_request[digest]

    def _list(self, reply: Reply) -> None:
        self._listed = self._listed or deque()
        self._listed.append(reply)
        if len(self._listed) > MAX_LISTED:
            self._listed.popleft().drop_top_logprobs()


class Answers:
    """Answers by name: an id leads to its node, and to none if there is no answer or it is void."""

    __slots__ = ("_nodes", "_prompts", "_session_id")

    def __init__(self, session_id: str, prompts: Prompts) -> None:
        self._session_id = session_id
        self._prompts = prompts
        self._nodes: list[int] = []
        """By the call's number; NO_NODE where it has no answer."""

    def begin(self) -> str:
        """A call begins; its name."""
        name = f"{self._session_id}-{len(self._nodes)}"
        self._nodes.append(NO_NODE)
        return name

    def put(self, reply: Reply) -> None:
        """It is in the graph and answers its call."""
        self._nodes[number_of(reply)] = reply.node

    def node_of(self, name: str) -> int:
        """Of the answer with this name; NO_NODE if there is none such."""
        session_id, _, number = name.rpartition("-")
        # Python counts the digits of an integer and refuses too many.
        is_ours = session_id == self._session_id and len(number) <= len(str(len(self._nodes)))
        if is_ours and number.isdecimal() and int(number) < len(self._nodes):
            return self._nodes[int(number)]
        return NO_NODE

    def reader(self, reply: Reply) -> DeltaReader:
        """Cuts the reply's tokens into deltas."""
        if reply.source.is_raw:
            return self._prompts.raw_reader(reply.head.params.stop)
        return self._prompts.reader(reply.reading())

    def read(self, reply: Reply) -> Answer:
        """All that its tokens say."""
        token_ids = reply.token_ids()
        if not reply.source.is_raw:
            return self._prompts.answer(reply.reading(), token_ids)
        reader = self.reader(reply)
        reader.feed(token_ids)
        reader.end(len(token_ids))
        return reader.answer()

    def forget(self) -> None:
        """All names."""
        self._nodes.clear()


def no_such(name: int | str) -> SessionError:
    """Nothing here was answered under this name."""
    why = f"Previous response with id {name!r} not found."
    return SessionError(400, "previous_response_not_found", why)
