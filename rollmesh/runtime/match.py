"""How a request relates to what its session holds: where it parts from that, and what is new of it.

Owns Match, which is read off a walk once that has gone as far as it could. Invariant: a match
changes nothing; its new messages are read, and stand in the common shape beside it. Made by
history.py, held by it or let go.
"""

import msgspec

from rollmesh.core.errors import SessionError
from rollmesh.runtime.chat import ChatMessage, read_message
from rollmesh.runtime.keys import unit_key
from rollmesh.runtime.openings import SAME_BYTES, UnitEnd
from rollmesh.runtime.spot import NO_NODE, Spot
from rollmesh.runtime.walk import Walk


class Match(msgspec.Struct):
    """See the module."""

    spot: Spot
    """The deepest spot to build on: the whole request's, or the last sampled message's."""
    deepest: Spot
    """The last spot that the request was found to share."""
    tools_key: int
    """The meaning of the tools on offer."""
    walk: Walk
    new: list[ChatMessage] = []
    """The messages after `spot`, read."""
    raws: list[bytes] = []
    """The same in the common shape."""
    ends: list[tuple[int, int]] = []
    """Of each unit of `new`: its hash, and how many of `new` end with it."""

    @property
    def is_held(self) -> bool:
        """The very same messages were asked before: a sibling, no new context."""
        return not self.new and self.spot.node != NO_NODE and not self.spot.sampled

    def unit_ends(self) -> tuple[UnitEnd, ...]:
        """`ends` in keys that outlive the process."""
        ends: list[UnitEnd] = []
        at = 0
        for unit, (_, end) in zip(self.walk.units, self.ends, strict=True):
            is_message = end == at + 1 and self.raws[at] is unit
            ends.append((SAME_BYTES if is_message else unit_key(unit), end))
            at = end
        return tuple(ends)


def conclude(walk: Walk, tools_key: int) -> Match:
    """What `walk` has found; SessionError 400 where that is no message at all."""
    if not walk.is_stopped and (asked := walk.spot.asked()) is not None:
        return Match(asked, walk.spot, tools_key, walk)
    assert walk.anchor is not None
    match = Match(walk.anchor, walk.spot, tools_key, walk)
    for place, unit in enumerate(walk.units):
        messages = walk.messages_of(place)
        # Parts may have keys of the client's own, which say nothing and are not held.
        is_common = walk.read is read_chat and not isinstance(messages[0].content, list)
        match.new += messages
        match.raws += [unit] if is_common else [message.as_json() for message in messages]
        match.ends.append((hash(unit), len(match.new)))
    if walk.anchor.parent is None and not match.new:
        raise SessionError(400, "invalid_messages", "messages: expected at least one")
    return match


def read_chat(raw: bytes, position: int) -> list[ChatMessage]:
    """Reads a unit that is one chat message."""
    return [read_message(raw, position)]
