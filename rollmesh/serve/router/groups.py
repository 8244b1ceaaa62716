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
    """Unix time; a container's pid is 1 in every life."""
    host: str = ""

    def may_be(self, other: "Incarnation") -> bool:
        """Whether nothing that is known of both tells them apart."""
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
    """What it had."""
    until_s: float
    """So long what it had said before may still come."""


class EndedIncarnations:
    """Notes of processes that have ended, by worker id and pid."""

    def __init__(self, remember_s: float) -> None:
        self._remember_s = remember_s
        self._ends: OrderedDict[tuple[str, int], IncarnationEnd] = OrderedDict()

    def __len__(self) -> int:
        return len(self._ends)

    def add(
        self, incarnation: Incarnation, group_ids: tuple[GroupId, ...], now_s: float
    ) -> IncarnationEnd:
        """`life` has ended, with these groups."""
        end = IncarnationEnd(incarnation, group_ids, now_s + self._remember_s)
        self._ends[incarnation.worker_id, incarnation.pid] = end
        if len(self._ends) > MAX_ENDS:
            self._ends.popitem(last=False)
        return end

    def find(self, incarnation: Incarnation) -> IncarnationEnd | None:
        """The note of it, if there is one."""
        end = self._ends.get((incarnation.worker_id, incarnation.pid))
        return end if end and end.incarnation.may_be(incarnation) else None

    def cover(self, incarnation: Incarnation, now_s: float) -> bool:
        """Whether what `life` says was said before its end: that of its pid was this or later."""
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
"""More of a group's cuts are not excused: a task may have a way to stop its workers in peace."""


MAX_UNBEGUN = 32
"""A group that was given out so often without beginning fails: something keeps it from ever doing
so. Each time lasts as long as a stall does, some ten seconds."""


class Death(msgspec.Struct, frozen=True, gc=False):
    """A worker ended, or seemed to, while it ran a group."""

    incarnation: Incarnation
    cause: str
    is_certain: bool
    """False while the worker is only silent or stalled."""


class Group(msgspec.Struct, gc=False):
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
    excused: int = 0
    """Of these, those that do not count: handed back, lost before they began, or cut short by a
    worker that left."""
    num_unbegun: int = 0
    """How often a worker that had it was lost, or gave no sign, before the attempt began."""
    is_unbegun: bool = False
    """It is QUEUED since that happened, and `excused` counts it."""
    num_cuts: int = 0
    """How often a worker that left in peace cut it short."""
    worker_id: str = ""
    """Who has it; '' while QUEUED."""
    last_worker_id: str = ""
    """Who had it before it was queued again, and may still run it unheard."""
    is_finished: bool = False
    """Its worker said that it ran to its end and waits for its sink's ack."""
    say_again_s: float = math.inf
    """When RunGroup is repeated to its worker; for an unasked group, when it is given up. Deals
    sets it, for its agenda; infinite without a worker."""
    assigned_s: float = 0.0
    """When its worker got it, or claimed it."""
    ends_s: float = math.inf
    """Its deadline."""
    deaths: tuple[Death, ...] = ()
    """Of workers under it; with one it is a suspect."""
    ran_s: float = 0.0
    """How long it had run at its worker's end; so long it is watched at the next."""
    queued_s: float = 0.0
    """When it began to wait."""
    ticket: bytes = b""
    """Secret of the group, for its worker; empty while only a worker has named the group."""

    @property
    def tries(self) -> int:
        """Attempts that count."""
        return self.attempt - self.excused

    def excuse_cut(self) -> None:
        """Its worker left in peace before its end: the attempt does not count."""
        self.num_cuts += 1
        self.excused = min(self.excused + (self.num_cuts <= MAX_CUTS), self.attempt)


class GroupClient(msgspec.Struct):
    """Who asks."""

    client_id: str
    route: bytes
    heard_s: float
    weight: int = 1
    keep: bool = False
    unbegun_said_s: float = -math.inf
    """When it was last sent the reason why a group of it does not begin."""


class _Line(msgspec.Struct):
    """One client's groups of one priority."""

    groups: OrderedDict[GroupId, Group]
    num_turns: int = 0
    """Taken in a row."""


_Lines = OrderedDict[str, _Line]


class _Lanes(msgspec.Struct):
    """One environment's lines, by priority."""

    lines: dict[int, _Lines]
    priorities: list[int]
    """In their order, however many there are: the last one is first."""


class GroupQueue:
    """Groups that wait, by environment, priority and client."""

    def __init__(self) -> None:
        self.away: set[str] = set()
        """Clients that have fallen silent; membership.py says who."""
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
        """Whose turn it is; it stays in the queue."""
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
        """Take out `group`; False if it is not waiting here."""
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
        # Empty tables go, so that head() never looks at one and nothing is kept of the past.
        if not line.groups:
            del lines[group.client_id]
        if not lines:
            del lanes.lines[group.priority]
            del lanes.priorities[bisect.bisect_left(lanes.priorities, group.priority)]
        if not lanes.lines:
            del self._lanes[group.env]
        return True

    def of_env(self, env: str) -> list[Group]:
        """Everything that waits for `env`."""
        return [group for line in self._lines(env) for group in line.groups.values()]

    def firsts(self, env: str) -> list[Group]:
        """The first group of each client, and of each of its priorities, that waits for `env`."""
        return [next(iter(line.groups.values())) for line in self._lines(env)]

    def envs(self) -> list[str]:
        """What is waited for."""
        return list(self._lanes)

    def _first_there(self, lanes: _Lanes) -> _Line | None:
        """Whose turn it is among those that are there."""
        lines = (lanes.lines[priority] for priority in reversed(lanes.priorities))
        named = (item for each in lines for item in each.items())
        return next((line for client_id, line in named if client_id not in self.away), None)

    def _lines(self, env: str) -> list[_Line]:
        lanes = self._lanes.get(env)
        return [line for lines in lanes.lines.values() for line in lines.values()] if lanes else []
