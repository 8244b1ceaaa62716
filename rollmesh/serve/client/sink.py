"""Where finished groups arrive: the first good result of an open ask is kept, later ones are
acknowledged as duplicates, and everything else is refused.

    open --GroupFinished--> Keep: decode, check and write it --Kept----> ended, acked
       |                                     +---------------Malformed-> open, refused
       |                                     +---------------nothing---> open (sent again)
       +------AskEnded-------------------------------------------------> ended, booked as a drop

- A result needs the ticket of its group, which only the worker that was given the group has.
- A group ends once, whatever the number of attempts and copies.
- Nothing is acked that was not kept. A refused result is not acked: its worker drops it, and
  reports the attempt as lost.
- What has ended is remembered as a few intervals per run, so that late copies are acknowledged as
  duplicates and their workers can free them.
"""

import hmac
from collections.abc import Callable

import msgspec

from rollmesh.core.ids import GroupId, IntervalSet
from rollmesh.serve.client.asks import Asked, AskEnded
from rollmesh.wire.frames import Buffer
from rollmesh.wire.machine import Received, Send
from rollmesh.wire.messages import GroupAcked, GroupFinished, ResultRefused

NOT_ASKED = "its group is not an open ask of this client"
NO_TICKET = "it does not carry the ticket of its group"


class Kept(msgspec.Struct, frozen=True):
    """Event: the result that `Keep` named is safe."""

    keep: "Keep"


class Malformed(msgspec.Struct, frozen=True):
    """Event: the result that `Keep` named does not fit its ask."""

    keep: "Keep"
    reason: str


class Keep(msgspec.Struct, frozen=True):
    """Action: check this result against its ask, make it safe, and step Kept or Malformed.

    Without either it is as if the result had not come.
    """

    route: bytes
    message: GroupFinished
    body: Buffer
    asked: Asked


class Book(msgspec.Struct, frozen=True):
    """Action: the group ended without a result; write that down and hand it out."""

    group_id: GroupId
    reason: str
    retry_after_s: float = 0.0


Event = Received | Kept | Malformed | AskEnded
Action = Send | Keep | Book


class Sink:
    """The ended groups of each run; `runs` restores what a journal remembers."""

    def __init__(
        self, runs: dict[str, IntervalSet], find: Callable[[GroupId], Asked | None]
    ) -> None:
        """`find` returns the open ask of a group, if there is one."""
        self.ended = runs
        self._find = find
        self.num_duplicates = 0
        self.num_refused = 0

    def has_ended(self, group_id: GroupId) -> bool:
        """True once the group's result was kept or its drop booked."""
        return group_id.seq in self.ended.get(group_id.run_id, ())

    def step(self, event: Event, now_s: float) -> list[Action]:
        """What to do about `event`; total, and deterministic."""
        del now_s
        match event:
            case Received(route, GroupFinished() as message, body):
                return self._arrived(route, message, body)
            case Received():
                return []
            case Kept(keep):
                ended = self.ended[keep.message.group_id.run_id]
                is_first = ended.add(keep.message.group_id.seq)
                return [_ack(keep.route, keep.message, duplicate=not is_first)]
            case Malformed(keep, reason):
                return [self._refuse(keep.route, keep.message, reason)]
            case AskEnded(group_id, reason, retry_after_s):
                known = self.ended.get(group_id.run_id)
                fresh = known is not None and known.add(group_id.seq)
                return [Book(group_id, reason, retry_after_s)] if fresh else []

    def _arrived(self, route: bytes, message: GroupFinished, body: Buffer) -> list[Action]:
        if self.has_ended(message.group_id):
            self.num_duplicates += 1
            return [_ack(route, message, duplicate=True)]
        asked = self._find(message.group_id)
        if asked is None:
            return [self._refuse(route, message, NOT_ASKED)]
        if not hmac.compare_digest(message.ticket, asked.ticket):
            return [self._refuse(route, message, NO_TICKET)]
        return [Keep(route, message, body, asked)]

    def _refuse(self, route: bytes, message: GroupFinished, reason: str) -> Send:
        self.num_refused += 1
        return Send(route, ResultRefused(message.group_id, message.attempt, reason))


def _ack(route: bytes, message: GroupFinished, *, duplicate: bool) -> Send:
    return Send(route, GroupAcked(message.group_id, message.attempt, duplicate))
