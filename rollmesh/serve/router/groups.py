"""One group as the ledger knows it, who asked for it, and the queue for a worker.

    QUEUED --assigned--> ASSIGNED --GroupStarted--> RUNNING --GroupDelivered--> DONE
    QUEUED <--returned-- ASSIGNED                   any of the three --> FAILED | CANCELLED
    QUEUED <--its worker lost-- ASSIGNED, RUNNING;  QUEUED --claimed by a worker--> RUNNING

Invariants: a group is in the queue exactly while it is QUEUED and not held back for claims; the
queue gives the highest priority first and, within one, takes turns among clients. Driven by
book.py.
"""

from collections import OrderedDict

import msgspec

from rollmesh.core.ids import GroupId
from rollmesh.wire.frames import Buffer
from rollmesh.wire.messages import GroupState

_FROM_ANY = (GroupState.DONE, GroupState.FAILED, GroupState.CANCELLED)
TRANSITIONS: dict[GroupState, tuple[GroupState, ...]] = {
    GroupState.QUEUED: (GroupState.ASSIGNED, GroupState.RUNNING, *_FROM_ANY),
    GroupState.ASSIGNED: (GroupState.RUNNING, GroupState.QUEUED, *_FROM_ANY),
    GroupState.RUNNING: (GroupState.QUEUED, *_FROM_ANY),
    GroupState.DONE: (),
    GroupState.FAILED: (),
    GroupState.CANCELLED: (),
}


class Group(msgspec.Struct):
    """One ask that has not ended."""

    group_id: GroupId
    env: str
    num_samples: int
    sink: str
    client_id: str
    """'' while only a worker has spoken of it, after a restart."""
    priority: int = 0
    body: Buffer = b""
    """The ask itself, never opened here; needed until the end, to run it again."""
    state: GroupState = GroupState.QUEUED
    attempt: int = 0
    """Attempts that have begun."""
    worker_id: str = ""
    """Who has it; '' while QUEUED."""
    last_worker_id: str = ""
    """Who had it before it was queued again, and may still run it unheard."""
    is_finished: bool = False
    """Its worker said that it ran to its end and waits for its sink's ack."""
    say_again_s: float = 0.0
    """When RunGroup is repeated to its worker; for an unasked group, when it is given up."""
    assigned_s: float = 0.0


class Client(msgspec.Struct):
    """Who asks."""

    client_id: str
    route: bytes
    heard_s: float


_Turns = OrderedDict[str, OrderedDict[GroupId, Group]]


class FairQueue:
    """Groups that wait, by environment, priority and client."""

    def __init__(self) -> None:
        self._lanes: dict[str, dict[int, _Turns]] = {}
        self._num = 0
        self.num_bytes = 0
        """Of the bodies that wait."""

    def __len__(self) -> int:
        return self._num

    def push(self, group: Group, first: bool = False) -> None:
        """Add `group` behind its client's others, or before them."""
        turns = self._lanes.setdefault(group.env, {}).setdefault(group.priority, OrderedDict())
        waiting = turns.setdefault(group.client_id, OrderedDict())
        assert group.group_id not in waiting
        waiting[group.group_id] = group
        if first:
            waiting.move_to_end(group.group_id, last=False)
        self._num += 1
        self.num_bytes += len(group.body)

    def head(self, env: str) -> Group | None:
        """Whose turn it is; it stays in the queue."""
        lanes = self._lanes.get(env)
        if not lanes:
            return None
        turns = lanes[max(lanes)]
        return next(iter(next(iter(turns.values())).values()))

    def take(self, group: Group) -> None:
        """Take out `group`, which got its turn: its client goes behind the others."""
        turns = self._lanes[group.env][group.priority]
        turns.move_to_end(group.client_id)
        self.remove(group)

    def remove(self, group: Group) -> bool:
        """Take out `group`; False if it is not waiting here."""
        lanes = self._lanes.get(group.env, {})
        turns = lanes.get(group.priority, OrderedDict())
        waiting = turns.get(group.client_id, OrderedDict())
        if waiting.pop(group.group_id, None) is None:
            return False
        self._num -= 1
        self.num_bytes -= len(group.body)
        # Empty tables go, so that head() never looks at one and nothing is kept of the past.
        if not waiting:
            del turns[group.client_id]
        if not turns:
            del lanes[group.priority]
        if not lanes:
            del self._lanes[group.env]
        return True

    def of_env(self, env: str) -> list[Group]:
        """Everything that waits for `env`."""
        lanes = self._lanes.get(env, {})
        return [g for turns in lanes.values() for one in turns.values() for g in one.values()]
