"""Where finished groups arrive: the first result of a group is kept, then acked; later ones are
acked as duplicates.

    unknown --GroupFinished--> asked to be kept --Kept--> ended, acked
       |                             +----NotKept-------> unknown (the worker sends it again)
       +------AskEnded----------------------------------> ended, booked as a drop

Invariants: a group ends once, whatever the number of attempts and copies; nothing is acked that was
not kept; what has ended is remembered as a few intervals per run, forever. Results of runs that
this sink does not know are acked as duplicates, so that no worker holds them. Driven by client.py,
and by the simulator.
"""

import msgspec

from rollmesh.core.ids import GroupId, IntervalSet
from rollmesh.serve.client.asks import AskEnded
from rollmesh.wire.frames import Buffer
from rollmesh.wire.machine import Received, Send
from rollmesh.wire.messages import GroupAcked, GroupFinished


class Kept(msgspec.Struct, frozen=True):
    """Event: the result that `Keep` named is safe."""

    keep: "Keep"


class Keep(msgspec.Struct, frozen=True):
    """Action: make this result safe, say Kept, and hand it out; leave it if that fails."""

    route: bytes
    message: GroupFinished
    body: Buffer


class Book(msgspec.Struct, frozen=True):
    """Action: the group ended without a result; write that down and hand it out."""

    group_id: GroupId
    reason: str
    retry_after_s: float = 0.0


Event = Received | Kept | AskEnded
Action = Send | Keep | Book


class Sink:
    """The ended groups of each run; `runs` restores what a journal remembers."""

    def __init__(self, runs: dict[str, IntervalSet]) -> None:
        self.ended = runs
        self.num_duplicates = 0
        self.num_foreign = 0

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
                return [self._ack(keep, duplicate=not ended.add(keep.message.group_id.seq))]
            case AskEnded(group_id, reason, retry_after_s):
                known = self.ended.get(group_id.run_id)
                fresh = known is not None and known.add(group_id.seq)
                return [Book(group_id, reason, retry_after_s)] if fresh else []

    def _arrived(self, route: bytes, message: GroupFinished, body: Buffer) -> list[Action]:
        keep = Keep(route, message, body)
        if message.group_id.run_id not in self.ended:
            self.num_foreign += 1
            return [self._ack(keep, duplicate=True)]
        if self.has_ended(message.group_id):
            self.num_duplicates += 1
            return [self._ack(keep, duplicate=True)]
        return [keep]

    def _ack(self, keep: Keep, *, duplicate: bool) -> Send:
        message = keep.message
        return Send(keep.route, GroupAcked(message.group_id, message.attempt, duplicate))
