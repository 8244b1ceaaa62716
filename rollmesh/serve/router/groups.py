"""A group, the client that asked for it, the queue, and the incarnations of workers.

    QUEUED --assigned--> ASSIGNED --GroupStarted--> RUNNING --GroupDelivered--> DONE
    QUEUED <--returned-- ASSIGNED                   any of the three --> FAILED | CANCELLED
    QUEUED <--its worker lost-- ASSIGNED, RUNNING;  QUEUED --claimed by a worker--> RUNNING

- A group is in the queue while it is QUEUED and not held back for claims. A suspect waits apart.
- The queue takes the highest priority first. Within one, clients take turns, each for as many
  groups in a row as its weight. Clients that are away come last.
- A worker's name outlives its process. An incarnation tells its processes apart, and what an ended
  process had sent before does not revive it.
"""

import bisect
import math
from collections import OrderedDict

import msgspec

from rollmesh.core.ids import GroupId
from rollmesh.wire.frames import Buffer
from rollmesh.wire.messages import GroupState

MAX_ENDS = 1024


class Incarnation(msgspec.Struct, frozen=True, gc=False):
    """One process of a worker, as far as it is known."""

    worker_id: str
    pid: int = 0
    started_s: float = 0.0
    """Unix time of its start; a container's pid is 1 after every restart."""
    host: str = ""

    def may_be(self, other: "Incarnation") -> bool:
        """Return whether no known field tells the two apart."""
        return (
            self.worker_id == other.worker_id
            and (self.pid == other.pid or not self.pid or not other.pid)
            and (self.started_s == other.started_s or not self.started_s or not other.started_s)
            and (self.host == other.host or not self.host or not other.host)
        )


class IncarnationEnd(msgspec.Struct, frozen=True):
    """A process that has ended."""

    incarnation: Incarnation
    group_ids: tuple[GroupId, ...]
    """Groups that it had."""
    until_s: float
    """Time for which its earlier messages may still arrive."""


class EndedIncarnations:
    """Processes that have ended, by worker id and pid."""

    def __init__(self, remember_s: float) -> None:
        self._remember_s = remember_s
        self._ends: OrderedDict[tuple[str, int], IncarnationEnd] = OrderedDict()

    def __len__(self) -> int:
        return len(self._ends)

    def add(
        self, incarnation: Incarnation, group_ids: tuple[GroupId, ...], now_s: float
    ) -> IncarnationEnd:
        """Record that an incarnation has ended, with these groups."""
        end = IncarnationEnd(incarnation, group_ids, now_s + self._remember_s)
        self._ends[incarnation.worker_id, incarnation.pid] = end
        if len(self._ends) > MAX_ENDS:
            self._ends.popitem(last=False)
        return end

    def find(self, incarnation: Incarnation) -> IncarnationEnd | None:
        """Return the record of it, if there is one."""
        end = self._ends.get((incarnation.worker_id, incarnation.pid))
        return end if end and end.incarnation.may_be(incarnation) else None

    def cover(self, incarnation: Incarnation, now_s: float) -> bool:
        """Return whether a message of `incarnation` was sent before its end: the recorded end is
        of it or later.
        """
        end = self._ends.get((incarnation.worker_id, incarnation.pid))
        if end is None or now_s >= end.until_s:
            return False
        return not end.incarnation.started_s or incarnation.started_s <= end.incarnation.started_s


_FROM_ANY = (GroupState.DONE, GroupState.FAILED, GroupState.CANCELLED)
TRANSITIONS: dict[GroupState, tuple[GroupState, ...]] = {
    GroupState.QUEUED: (GroupState.ASSIGNED, GroupState.RUNNING, *_FROM_ANY),
    GroupState.ASSIGNED: (GroupState.RUNNING, GroupState.QUEUED, *_FROM_ANY),
    GroupState.RUNNING: (GroupState.QUEUED, *_FROM_ANY),
    GroupState.DONE: (),
    GroupState.FAILED: (),
    GroupState.CANCELLED: (),
}


MAX_CUTS = 16
"""Limit on excused cuts of a group: a task may have a way to make its workers leave in order."""


MAX_UNBEGUN = 32
"""Assignments without a start after which a group fails: something keeps it from ever starting.
Each lasts as long as a stall does, some ten seconds.
"""


class Death(msgspec.Struct, frozen=True, gc=False):
    """An end, or apparent end, of a worker while it ran a group."""

    incarnation: Incarnation
    cause: str
    is_certain: bool
    """False while the worker is only silent or stalled."""


class Group(msgspec.Struct, gc=False):
    """One request that has not ended."""

    group_id: GroupId
    env: str
    num_samples: int
    sink: str
    client_id: str
    """'' while only a worker has reported it, after a restart."""
    priority: int = 0
    body: Buffer = b""
    """The encoded request, never opened here; needed until the end, to run it again."""
    state: GroupState = GroupState.QUEUED
    attempt: int = 0
    """Attempts that have begun."""
    excused: int = 0
    """Attempts of these that do not count: returned, lost before they began, or cut short by a
    worker that left.
    """
    num_unbegun: int = 0
    """How often a worker that had it was lost, or did not answer, before the attempt began."""
    is_unbegun: bool = False
    """The group has been QUEUED since then, and `excused` counts it."""
    num_cuts: int = 0
    """How often a worker that left in order cut it short."""
    worker_id: str = ""
    """Worker that has it; '' while QUEUED."""
    last_worker_id: str = ""
    """Worker that had it before it was queued again, and may still run it unheard."""
    is_finished: bool = False
    """Whether its worker reported that it ended and waits for its sink's ack."""
    repeat_s: float = math.inf
    """When RunGroup is repeated to its worker; for a group without a client, when it is given up.
    Set by Assignments for its timers; infinite without a worker.
    """
    assigned_s: float = 0.0
    """When its worker got it, or claimed it."""
    ends_s: float = math.inf
    """Deadline of the group."""
    deaths: tuple[Death, ...] = ()
    """Ends of workers under it; with one it is a suspect."""
    ran_s: float = 0.0
    """How long it had run at its worker's end; the next worker is watched for as long."""
    queued_s: float = 0.0
    """When it began to wait."""
    ticket: bytes = b""
    """Secret of the group, for its worker; empty while only a worker has named the group."""

    @property
    def tries(self) -> int:
        """Attempts that count."""
        return self.attempt - self.excused

    def excuse_cut(self) -> None:
        """Count an attempt as excused: its worker left in order before the end."""
        self.num_cuts += 1
        self.excused = min(self.excused + (self.num_cuts <= MAX_CUTS), self.attempt)


class GroupClient(msgspec.Struct):
    """A client."""

    client_id: str
    route: bytes
    last_message_s: float
    weight: int = 1
    keep: bool = False
    unbegun_sent_s: float = -math.inf
    """When it was last sent the reason why a group of it does not begin."""


class _Line(msgspec.Struct):
    """One client's groups of one priority."""

    groups: OrderedDict[GroupId, Group]
    num_turns: int = 0
    """Groups taken in a row."""


_Lines = OrderedDict[str, _Line]


class _Lanes(msgspec.Struct):
    """One environment's queues, by priority."""

    lines: dict[int, _Lines]
    priorities: list[int]
    """Sort the priorities; the last one is served first."""


class GroupQueue:
    """Waiting groups by environment, priority and client."""

    def __init__(self) -> None:
        self.away: set[str] = set()
        """Clients that have fallen silent, maintained by membership.py."""
        self._lanes: dict[str, _Lanes] = {}
        self._num = 0

    def __len__(self) -> int:
        return self._num

    def push(self, group: Group, first: bool = False) -> None:
        """Add `group` behind its client's others, or before them."""
        lanes = self._lanes.get(group.env)
        if lanes is None:
            lanes = self._lanes[group.env] = _Lanes({}, [])
        lines = lanes.lines.get(group.priority)
        if lines is None:
            lines = lanes.lines[group.priority] = OrderedDict()
            bisect.insort(lanes.priorities, group.priority)
        line = lines.get(group.client_id)
        if line is None:
            line = lines[group.client_id] = _Line(OrderedDict())
        assert group.group_id not in line.groups
        line.groups[group.group_id] = group
        if first:
            line.groups.move_to_end(group.group_id, last=False)
        self._num += 1

    def head(self, env: str) -> Group | None:
        """Return the group whose turn it is; it stays in the queue."""
        lanes = self._lanes.get(env)
        if not lanes:
            return None
        first = next(iter(lanes.lines[lanes.priorities[-1]].values()))
        if self.away and next(iter(first.groups.values())).client_id in self.away:
            first = self._first_there(lanes) or first
        return next(iter(first.groups.values()))

    def take(self, group: Group, weight: int) -> None:
        """Take out `group`, whose turn it was; after `weight` in a row its client goes last."""
        lines = self._lanes[group.env].lines[group.priority]
        line = lines[group.client_id]
        line.num_turns += 1
        if line.num_turns >= weight:
            line.num_turns = 0
            lines.move_to_end(group.client_id)
        self.remove(group)

    def remove(self, group: Group) -> bool:
        """Take out `group`; return False if it is not waiting here."""
        lanes = self._lanes.get(group.env)
        lines = lanes.lines.get(group.priority) if lanes else None
        line = lines.get(group.client_id) if lines else None
        if (
            lanes is None
            or lines is None
            or line is None
            or line.groups.pop(group.group_id, None) is None
        ):
            return False
        self._num -= 1
        # Empty tables are removed, so that head() never looks at one and memory stays bounded.
        if not line.groups:
            del lines[group.client_id]
        if not lines:
            del lanes.lines[group.priority]
            del lanes.priorities[bisect.bisect_left(lanes.priorities, group.priority)]
        if not lanes.lines:
            del self._lanes[group.env]
        return True

    def of_env(self, env: str) -> list[Group]:
        """Return everything that waits for `env`."""
        return [group for line in self._lines(env) for group in line.groups.values()]

    def firsts(self, env: str) -> list[Group]:
        """Return the first group of each client and priority that waits for `env`."""
        return [next(iter(line.groups.values())) for line in self._lines(env)]

    def envs(self) -> list[str]:
        """Return the environments that are waited for."""
        return list(self._lanes)

    def _first_there(self, lanes: _Lanes) -> _Line | None:
        """Return the client whose turn it is among those that are present."""
        lines = (lanes.lines[priority] for priority in reversed(lanes.priorities))
        named = (item for each in lines for item in each.items())
        return next((line for client_id, line in named if client_id not in self.away), None)

    def _lines(self, env: str) -> list[_Line]:
        lanes = self._lanes.get(env)
        return [line for lines in lanes.lines.values() for line in lines.values()] if lanes else []
