"""One sampled reply of a session, and the doors to the generation behind it.

    SAMPLING --generation ends--> COMMITTED --last byte handed over--> DELIVERED
    SAMPLING --generation void, session sealed--> VOID
    COMMITTED --session sealed before delivery--> VOID

A reply outlives the connections that read it: a retry attaches to it, resumes it, or is answered
again from the graph, byte for byte. Invariant: after COMMITTED its tokens are a node of the graph
and the generation is gone. Owned by session.py; read by the HTTP edge.
"""

import enum
from collections.abc import Sequence
from typing import Protocol

import msgspec

from rollmesh.core.errors import EngineError, SessionError
from rollmesh.core.types import SamplingParams, VersionRun
from rollmesh.runtime.deltas import Answer
from rollmesh.runtime.generation import GenerationState
from rollmesh.runtime.history import NO_NODE, Spot


class LiveGeneration(Protocol):
    """What the session needs of a generation; legs.Generation is the real one."""

    @property
    def state(self) -> GenerationState: ...
    @property
    def token_ids(self) -> Sequence[int]: ...
    @property
    def logprobs(self) -> Sequence[float]: ...
    @property
    def policy_versions(self) -> Sequence[VersionRun]: ...
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


class Reply:
    """See the module. Attributes are written by the session alone."""

    __slots__ = ("answer", "context", "failure", "generation", "head", "node", "state")

    def __init__(self, head: ReplyHead, context: Spot, generation: LiveGeneration) -> None:
        self.head = head
        self.context = context
        self.generation: LiveGeneration | None = generation
        self.state = ReplyState.SAMPLING
        self.node = NO_NODE
        self.answer: Answer | None = None
        """Parsed at the commit, dropped after delivery."""
        self.failure: SessionError | None = None
        """Why it is VOID, for each of its readers; None where the session's end is the reason."""

    @property
    def is_running(self) -> bool:
        """Still worth attaching to."""
        return self.generation is not None and self.generation.state is not GenerationState.VOID

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
