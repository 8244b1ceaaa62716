"""What a dialect is: pure functions between an API's bytes and our words.

A dialect knows neither sockets nor sessions. `whole` is the fold of the deltas that `piece` and
`end` would have streamed. Invariant: whatever bytes come in, `decode` gives a Turn or raises a
SessionError that says what is wrong. One file per API in this folder; driven by exchange.py.
"""

from typing import Protocol

from rollmesh.core.errors import SessionError
from rollmesh.runtime.deltas import Delta
from rollmesh.runtime.turns import Turn
from rollmesh.serve.interception.view import ReplyView


class Dialect(Protocol):
    """One API."""

    def decode(self, body: bytes, digest: int, is_retry: bool) -> Turn:
        """The request; SessionError 400 where it is none."""

    def whole(self, view: ReplyView, delta: Delta) -> bytes:
        """The body of a plain answer."""

    def piece(self, view: ReplyView, delta: Delta, start: int) -> bytes:
        """Stream events of a delta whose tokens begin at `start`; 0 opens the stream."""

    def end(self, view: ReplyView, delta: Delta, start: int) -> bytes:
        """Stream events of what is left, the finish reason, and whatever closes the stream."""

    def error(self, error: SessionError) -> bytes:
        """The body of a failed answer."""

    def error_event(self, error: SessionError) -> bytes:
        """The stream event of a failure after the first byte."""
