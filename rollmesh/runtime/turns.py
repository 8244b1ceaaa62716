"""What an agent asks for in one call, in the words that all dialects decode to.

Owns Turn: a history of units, or a raw prompt, and what is wished of the answer. A unit is what one
chat message comes from, or several adjacent ones; it stays unopened unless it is new. Invariant: a
Turn is a value; what the session makes of it is the session's. Made by the dialects.
"""

from collections.abc import Callable
from typing import Literal

import msgspec

from rollmesh.core.types import DialectName, Grammar
from rollmesh.runtime.chat import ChatMessage

ReadUnit = Callable[[bytes, int], list[ChatMessage]]
"""Reads one history unit; the number is its position, for the text of a SessionError 400."""


FindAnswer = Callable[[str], ChatMessage | None]
"""The answer with this ReplyHead.id in the session of the request; None if it has no such."""
SpellOut = Callable[[list[bytes], FindAnswer], list[bytes]]
"""Units with the items that they name by id; SessionError 400 for an unknown id."""


class SamplingAsk(msgspec.Struct, frozen=True, kw_only=True):
    """Sampling fields as the agent sent them; None where it did not."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    max_tokens: int | None = None
    min_p: float | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()
    grammar: Grammar | None = None
    stop: tuple[str, ...] = ()


class ToolChoice(msgspec.Struct, frozen=True):
    """Whether the model may, must not or must call a tool, or which one."""

    kind: Literal["auto", "none", "required", "named"] = "auto"
    name: str = ""


class Wish(msgspec.Struct, frozen=True):
    """What is shown with an answer: that alone of a Turn is kept until then."""

    model: str
    """As the agent names it; given back, otherwise without effect."""
    include_usage: bool
    logprobs: bool
    num_top_logprobs: int
    return_token_ids: bool
    prompt_text: str | None
    """A raw prompt that came as text."""


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """One decoded request."""

    messages: list[bytes]
    """History units in the dialect's own JSON, unopened, in order; system text is the first."""
    messages_raw: bytes = b""
    """More units, behind those: a JSON array whose elements they are, unopened.

    Cheaper than the list where a history grows at its end: what was there before is not split.
    """
    read: ReadUnit | None = None
    """Reads a unit that is not held yet; None where units are chat messages."""
    spell_out: SpellOut | None = None
    """Replaces references to answers of this session in `messages`; None where there are none."""
    tools: bytes = b""
    """A JSON array in chat shape, unopened; empty where the agent offers none."""
    tool_choice: ToolChoice = ToolChoice()
    parallel_calls: bool = True
    """False where the turn is to end after one tool call."""
    num_choices: int = 1
    num_top_logprobs: int = 0
    previous_reply: str = ""
    """ReplyHead.id of the reply to go on from; then the units are what follows it."""
    begins_anew: bool = False
    """The first unit is a system text that takes the place of that reply's own."""
    prompt_ids: tuple[int, ...] | None = None
    prompt_text: str | None = None
    """A raw prompt instead of messages: either as tokens or as text."""
    ask: SamplingAsk = SamplingAsk()
    model: str = ""
    stream: bool = False
    include_usage: bool = False
    logprobs: bool = False
    return_token_ids: bool = False
    digest: int = 0
    """Identifies the body (and its Idempotency-Key), in this process and those after it."""
    is_retry: bool = False
    """The client says that it sent this before."""
    dialect: DialectName = ""
    """What it was decoded from."""

    @property
    def is_raw(self) -> bool:
        """Whether it has a raw prompt, and no messages."""
        return self.prompt_ids is not None or self.prompt_text is not None

    def wish(self) -> "Wish":
        """How its answers are to be shown."""
        return Wish(
            self.model,
            self.include_usage,
            self.logprobs,
            self.num_top_logprobs,
            self.return_token_ids,
            self.prompt_text,
        )

    @property
    def reads_calls(self) -> bool:
        """Whether tool-call markup in the answer is a call, not text."""
        return bool(self.tools) and self.tool_choice.kind != "none"
