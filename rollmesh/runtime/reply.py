"""One sampled reply of a session, and the doors to the generation behind it.

    SAMPLING --generation ends--> COMMITTED --last byte handed over--> DELIVERED
    SAMPLING --generation void, session sealed--> VOID
    COMMITTED --session sealed before delivery--> VOID

A reply outlives the connections that read it: a retry attaches to it, resumes it, or is answered
again from the graph, byte for byte. Invariant: after COMMITTED its tokens are a node of the graph
and the generation is gone. Owned by session.py; read by the HTTP edge.
"""

import enum
import re
from collections.abc import Sequence
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
from rollmesh.runtime.deltas import Answer, Reading
from rollmesh.runtime.generation import GenerationState
from rollmesh.runtime.graph import Sampled, TokenGraph
from rollmesh.runtime.sampling import forced_fields
from rollmesh.runtime.spot import NO_NODE, Spot
from rollmesh.runtime.turns import SamplingAsk

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
    """See the module's drawing."""

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

    context: Spot
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
    """See the module. Attributes are written by the session alone."""

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
