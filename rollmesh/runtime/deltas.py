"""What the model says, in pieces and whole: the words that readers give and dialects encode.

Owns Delta (a piece of a reply) and Answer (all of it). Invariant: an Answer is the fold of its
reply's deltas, however the tokens were cut; nothing that a delta told is ever taken back. In one
delta reasoning comes first, then content, then calls; once a call has begun, content can only come
with the last delta, and stands behind the calls. Made by the readers in marked.py and parsed.py,
driven by the HTTP edge (streams) and by session.py (answers).
"""

from collections.abc import Sequence
from typing import Protocol

import msgspec


class ToolCall(msgspec.Struct, frozen=True):
    """One call of a finished reply."""

    id: str
    name: str
    arguments: str
    """JSON text as the model wrote it; cut short where the reply was."""


class Answer(msgspec.Struct, frozen=True):
    """A finished reply, parsed."""

    content: str
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()


class CallDelta(msgspec.Struct, frozen=True):
    """A piece of one call; `id` and `name` stand in a call's first piece only."""

    index: int
    """Of the call in its reply."""
    id: str = ""
    name: str = ""
    arguments: str = ""
    """The next piece of the arguments' JSON text."""


class Delta(msgspec.Struct, frozen=True):
    """A piece of a reply; its tokens are those from the last delta's `num_tokens` on."""

    content: str = ""
    reasoning: str = ""
    calls: tuple[CallDelta, ...] = ()
    num_tokens: int = 0
    """Tokens of the reply up to and with this piece."""


class Reading(msgspec.Struct, frozen=True):
    """How one reply is to be read."""

    stop: tuple[str, ...] = ()
    """Text ends before the first of them."""
    reads_calls: bool = False
    """Whether tool-call markup is a call, not text."""
    call_id_prefix: str = "call"
    """Calls get ids `<prefix>_0`, `_1`..."""
    lead: tuple[int, ...] = ()
    """What stands between the generation prompt and the sampled tokens (Prompts.lead)."""
    tools: bytes = b""
    """A JSON array in chat shape: XML arguments are read by their declared types."""


class DeltaReader(Protocol):
    """Reads one generation's tokens: `feed` as they come, then `end`, then `answer`."""

    def feed(self, token_ids: Sequence[int]) -> Delta | None:
        """The piece that `token_ids` complete; None while there is nothing to tell."""

    def end(self, num_tokens: int) -> Delta:
        """The rest, when no more tokens will come; `num_tokens` is the reply's length."""

    def answer(self) -> Answer:
        """The fold of all deltas; after `end`."""


def whole_calls(calls: Sequence[ToolCall]) -> tuple[CallDelta, ...]:
    """Finished calls as deltas of one piece each."""
    return tuple(CallDelta(n, c.id, c.name, c.arguments) for n, c in enumerate(calls))
