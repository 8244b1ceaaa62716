"""The order in which a delta's parts are told, for dialects that answer in blocks.

Invariant: reasoning, then content, then calls; content that comes once a call has begun stands
behind the calls, as deltas.py says. Driven by message_events.py and response_events.py.
"""

from collections.abc import Iterator

import msgspec

from rollmesh.runtime.deltas import CallDelta, Delta


class Said(msgspec.Struct, frozen=True):
    """The next piece of the answer's text."""

    text: str


class Thought(msgspec.Struct, frozen=True):
    """The next piece of its reasoning."""

    text: str


def parts_of(delta: Delta, has_called: bool) -> Iterator[Thought | Said | CallDelta]:
    """The parts in order; `has_called` where an earlier delta began a call."""
    if delta.reasoning:
        yield Thought(delta.reasoning)
    if delta.content and not has_called:
        yield Said(delta.content)
    yield from delta.calls
    if delta.content and has_called:
        yield Said(delta.content)
