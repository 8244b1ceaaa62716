"""The workers that the router knows: health, free slots, and which one is next.

    worker: LIVE --beats missed--> LOST --a beat--> LIVE
            LIVE --its loop is held for long--> STALLED --a beat of a free loop--> LIVE
            any --WorkerLeft, its process has ended, silence for long--> removed

- Nothing is assigned to a worker that is not LIVE or is draining. Time in which the router itself
  did not run counts against no worker.
- A worker's load is the smaller of its assignments and its own report, so slots of finished
  siblings are free before their group ends.
- A choice costs the logarithm of the number of workers: every change of a worker's room calls
  `rank`.
"""

import enum
import heapq
from collections.abc import Iterator

from rollmesh.core.ids import GroupId
from rollmesh.serve.router.groups import Group, Incarnation
from rollmesh.wire.messages import WorkerBeat, WorkerHello

SPARE_RANKS = 64
"""Limit on stale ranks in an order: this many, or three times its workers."""

CLOGGED_SHARE = 0.5
"""Share of what a worker may hold un-acked; past it, work for clients that are away waits, since a
worker full of undelivered results takes no work of any client.
"""

Rank = tuple[int, bool, int, int]
"""Tier, busy, slots over its limit (negative: free ones), groups assigned; the smallest goes
first.
"""
NUM_TIERS = 3
"""Tiers: healthy workers, those with a suspect, those whose loop lags."""


class WorkerHealth(enum.StrEnum):
    """Whether a worker is LIVE, LOST or STALLED."""

    LIVE = "live"
    STALLED = "stalled"
    LOST = "lost"


def incarnation_of(hello: WorkerHello) -> Incarnation:
    """The process that reports it."""
    return Incarnation(hello.worker_id, hello.pid, hello.started_s, hello.host)


class WorkerEntry:
    """One worker process."""

    def __init__(self, hello: WorkerHello, route: bytes, now_s: float) -> None:
        self.hello = hello
        self.incarnation = incarnation_of(hello)
        self.route = route
        self.state = WorkerHealth.LIVE
        self.last_message_s = now_s
        self.beat: WorkerBeat | None = None
        self.longest_gap_s = 0.0
        """Heartbeat interval."""
        self.accepting = True
        self.drain_reason = ""
        """Why it drains."""
        self.drain_due_s = 0.0
        self.watch_until_s = 0.0
        """Until when it runs a suspect that has not proved harmless; 0 is none."""
        self.num_assigned = 0
        """Groups assigned since the hello; the worker with fewest goes first among equals."""
        self.groups: dict[GroupId, Group] = {}
        self.lost_groups: dict[GroupId, None] = {}
        """Groups taken from it when it fell silent or stalled, which it may still run."""
        self.rank: Rank | None = None
        """Its rank among those that have free slots; None if it has none."""
        self._num_assigned = 0
        self._beat_s = 0.0
        self._fresh = [0, 0]

    @property
    def worker_id(self) -> str:
        return self.hello.worker_id

    @property
    def load(self) -> int:
        """Slots in use, including what was assigned since the last heartbeat but one."""
        if self.beat is None:
            return self._num_assigned
        return min(self._num_assigned, self.beat.num_running + self._fresh[0] + self._fresh[1])

    @property
    def waits_for(self) -> str:
        """Budget that keeps it from taking groups, as it reports; '' if none does."""
        return self.beat.waits_for if self.beat and not self.beat.accepting else ""

    @property
    def is_clogged(self) -> bool:
        """Return whether its results leave room for those of clients that are present."""
        most = CLOGGED_SHARE * self.hello.max_unacked_bytes
        return self.beat is not None and most > 0 and self.beat.unacked_bytes >= most

    @property
    def is_open(self) -> bool:
        """Return whether groups may be assigned to it, if it has free slots."""
        return self.state is WorkerHealth.LIVE and self.accepting and not self.drain_reason

    def can_take(self, num_samples: int) -> bool:
        """Return whether a group fits; a group larger than any worker goes to one that is idle."""
        if not self.is_open:
            return False
        load = self.load
        return load == 0 or load + num_samples <= self.hello.max_rollouts

    def is_responsive(self, now_s: float, patience_s: float) -> bool:
        """Return whether messages are likely to reach its loop: for a stalled worker they only pile
        up.
        """
        lag_s = self.beat.loop_lag_s if self.beat else 0.0
        return now_s - self.last_message_s <= patience_s and lag_s <= patience_s

    def occupy(self, group: Group) -> None:
        """`group` is here now."""
        self.groups[group.group_id] = group
        self._num_assigned += group.num_samples
        self._fresh[0] += group.num_samples

    def unassign(self, group: Group) -> None:
        """`group` is no longer here."""
        if self.groups.pop(group.group_id, None):
            self._num_assigned -= group.num_samples

    def resize(self, group: Group, num_samples: int) -> None:
        """Set the size of a group that the worker had claimed, as its client reports it."""
        self._num_assigned += num_samples - group.num_samples
        group.num_samples = num_samples

    def take_beat(self, beat: WorkerBeat, now_s: float) -> None:
        """Store the load from a heartbeat."""
        if self.beat is not None:
            self.longest_gap_s = max(self.longest_gap_s, now_s - self._beat_s)
        self.beat, self._beat_s = beat, now_s
        self.last_message_s = now_s
        self.accepting = beat.accepting
        self._fresh = [0, self._fresh[0]]


class WorkerTable:
    """All workers, by name, by route, and those with free slots in the order of their turn."""

    def __init__(self, slow_lag_s: float) -> None:
        """A worker that lags by more than `slow_lag_s` gets work only when the others are full."""
        self._slow_lag_s = slow_lag_s
        self._by_id: dict[str, WorkerEntry] = {}
        self._by_route: dict[bytes, WorkerEntry] = {}
        self._orders: dict[str, tuple[list[tuple[Rank, int, WorkerEntry]], ...]] = {}
        self._by_env: dict[str, dict[str, WorkerEntry]] = {}
        self._count = 0

    def __iter__(self) -> Iterator[WorkerEntry]:
        return iter(list(self._by_id.values()))

    def __len__(self) -> int:
        return len(self._by_id)

    def get(self, worker_id: str) -> WorkerEntry | None:
        return self._by_id.get(worker_id)

    def at(self, route: bytes) -> WorkerEntry | None:
        """Return the worker that sends from `route`."""
        return self._by_route.get(route)

    def add(self, worker: WorkerEntry) -> None:
        self._by_id[worker.worker_id] = worker
        self._by_route[worker.route] = worker
        self._by_env.setdefault(worker.hello.env, {})[worker.worker_id] = worker
        self.rank(worker)

    def move(self, worker: WorkerEntry, route: bytes) -> None:
        """`worker` dialled again and has another route."""
        self._by_route.pop(worker.route, None)
        worker.route = route
        self._by_route[route] = worker

    def remove(self, worker: WorkerEntry) -> None:
        worker.rank = None
        self._by_id.pop(worker.worker_id, None)
        if self._by_route.get(worker.route) is worker:
            del self._by_route[worker.route]
        env = worker.hello.env
        self._by_env[env].pop(worker.worker_id)
        if not self._by_env[env]:
            del self._by_env[env]
            self._orders.pop(env, None)

    def serve(self, env: str) -> bool:
        """Return whether a live worker has `env`."""
        return any(w.state is WorkerHealth.LIVE for w in self._by_env.get(env, {}).values())

    def full(self, env: str) -> list[WorkerEntry]:
        """Return the live workers of `env` if each of them is over a budget; else none."""
        live = [w for w in self._by_env.get(env, {}).values() if w.state is WorkerHealth.LIVE]
        return live if all(w.waits_for for w in live) else []

    def envs(self) -> list[str]:
        """Return the environments that live workers have."""
        return [env for env in self._by_env if self.serve(env)]

    def rank(self, worker: WorkerEntry) -> None:
        """Put `worker` where it belongs in the order; call it when its free slots have changed."""
        rank = self._rank_of(worker) if worker.is_open else None
        if rank == worker.rank:
            return
        worker.rank = rank
        if rank is None:
            return
        tiers = self._orders.get(worker.hello.env)
        if tiers is None:
            tiers = self._orders[worker.hello.env] = tuple([] for _ in range(NUM_TIERS))
        order = tiers[rank[0]]
        self._count += 1
        heapq.heappush(order, (rank, self._count, worker))
        if len(order) > SPARE_RANKS + 3 * len(self._by_env[worker.hello.env]):
            order[:] = [entry for entry in order if entry[2].rank is entry[0]]
            heapq.heapify(order)

    def best_for(self, env: str, num_samples: int) -> WorkerEntry | None:
        """Return the worker with the most free slots that can take `num_samples` rollouts of `env`.

        One that runs a suspect is chosen when others are full; one whose loop lags comes last.
        """
        for order in self._orders.get(env, ()):
            while order:
                rank, _, worker = order[0]
                if worker.rank is not rank:
                    heapq.heappop(order)
                elif worker.can_take(num_samples):
                    return worker
                else:
                    break
        return None

    def spare_for(self, env: str, num_samples: int) -> WorkerEntry | None:
        """Choose for a client that is away: a worker most of whose results find their sinks."""
        fitting = [
            w
            for w in self._by_env.get(env, {}).values()
            if w.can_take(num_samples) and not w.is_clogged
        ]
        return min(fitting, key=self._rank_of, default=None)

    def apart_for(self, env: str, num_samples: int, *, strictly: bool) -> WorkerEntry | None:
        """Choose for a suspect: a worker without another one or, if not `strictly`, any."""

        def worth(worker: WorkerEntry) -> tuple[bool, Rank]:
            return worker.watch_until_s > 0, self._rank_of(worker)

        fitting = [
            w
            for w in self._by_env.get(env, {}).values()
            if w.can_take(num_samples) and not (strictly and w.watch_until_s > 0)
        ]
        return min(fitting, key=worth, default=None)

    def _rank_of(self, worker: WorkerEntry) -> Rank:
        # Idle workers come first in their tier, so a group that fits any of it fits the first.
        load, beat = worker.load, worker.beat
        lags = beat is not None and beat.loop_lag_s > self._slow_lag_s
        tier = 2 if lags else int(worker.watch_until_s > 0)
        return tier, load > 0, load - worker.hello.max_rollouts, worker.num_assigned
