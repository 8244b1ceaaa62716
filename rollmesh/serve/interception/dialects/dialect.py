"""What a dialect is: pure functions between an API's bytes and our words.

    body --Dialect.decode--> Call --turns--> session --replies--> Call.whole | Call.stream

A Call is one request as read: the turns that it asks for, and how its answers are written. A Stream
keeps what events must agree on (indexes, sequence numbers) and folds to what `whole` says. A
dialect knows neither sockets nor sessions. Invariant: whatever bytes come in, `decode` gives a Call
or raises a SessionError that says what is wrong. Driven by exchange.py.
"""

from collections.abc import Sequence
from typing import Protocol

import msgspec

from rollmesh.core.errors import SessionError
from rollmesh.runtime.chat import Delta, Turn
from rollmesh.runtime.message_trie import key_of
from rollmesh.serve.interception.reply_view import ReplyView


class Asked(msgspec.Struct, frozen=True):
    """A request's body, and what its headers say of it."""

    body: bytes
    salt: bytes = b""
    """What else tells requests apart: the dialect, an Idempotency-Key."""
    is_retry: bool = False
    """The client says that it sent this before."""

    @property
    def digest(self) -> int:
        """Identifies the request, in this process and those after it."""
        return key_of(self.salt, self.body)

    def digest_without(self, part: bytes) -> int:
        """The same for a request of which `part` says nothing to the model."""
        before, _, after = self.body.partition(part)
        return key_of(self.salt, before, after)


class Stream(Protocol):
    """The events of one answer; choices may come in any order."""

    def piece(self, choice: int, delta: Delta) -> bytes:
        """Events of the next delta of a choice; the first piece opens the stream."""

    def end(self, choice: int, delta: Delta) -> bytes:
        """Events of what is left of a choice, and of its finish."""

    def close(self) -> bytes:
        """What follows the last choice."""

    def error(self, error: SessionError) -> bytes:
        """The event of a failure after the first byte."""


class Call(Protocol):
    """One request as read."""

    turns: tuple[Turn, ...]
    """What to sample: one turn but for batched raw prompts. Its reader takes them away: they hold
    the request's history."""

    @property
    def is_streamed(self) -> bool:
        """Whether the answer is a stream of events."""

    def whole(self, views: Sequence[ReplyView]) -> bytes:
        """The body of a plain answer; `views` are the ended replies of all turns, in order."""

    def stream(self, views: Sequence[ReplyView]) -> Stream:
        """A writer of the answer's events."""


class Dialect(Protocol):
    """One API."""

    def decode(self, asked: Asked) -> Call:
        """The request; SessionError 400 where it is none."""

    def error(self, error: SessionError) -> bytes:
        """The body of a failed answer."""
