"""The workers: who is alive, and how many slots are free.

    worker: LIVE --beats missed--> LOST --a beat--> LIVE
            LIVE, LOST --WorkerLeft, a new process under its name, silence for long--> forgotten

Invariants: nothing is assigned to a worker that is not LIVE; time in which the router itself did
not run counts against nobody. A worker's load is the smaller of what was given to it and what it
says it runs, so slots of finished siblings are free before their group ends. Driven by crew.py.
"""

import enum
from collections.abc import Iterable, Iterator

from rollmesh.core.ids import GroupId
from rollmesh.serve.router.groups import Group
from rollmesh.wire.messages import WorkerBeat, WorkerHello


class WorkerState(enum.StrEnum):
    """See the module."""

    LIVE = "live"
    LOST = "lost"


class Worker:
    """One worker process."""

    def __init__(self, hello: WorkerHello, route: bytes, now_s: float) -> None:
        self.hello = hello
        self.route = route
        self.state = WorkerState.LIVE
        self.heard_s = now_s
        self.beat: WorkerBeat | None = None
        self.accepting = True
        self.num_assigned = 0
        """Groups, since the hello; who had the fewest goes first among equals."""
        self.groups: dict[GroupId, Group] = {}
        self._seated = 0
        self._fresh = [0, 0]

    @property
    def worker_id(self) -> str:
        return self.hello.worker_id

    @property
    def load(self) -> int:
        """Slots in use. What was given since the last beat but one may not show in it yet."""
        if self.beat is None:
            return self._seated
        return min(self._seated, self.beat.num_running + sum(self._fresh))

    def can_take(self, num_samples: int) -> bool:
        """Whether a group fits; a group larger than any worker goes to one that is idle."""
        if self.state is not WorkerState.LIVE or not self.accepting:
            return False
        return self.load == 0 or self.load + num_samples <= self.hello.max_rollouts

    def seat(self, group: Group) -> None:
        """`group` is here now."""
        self.groups[group.group_id] = group
        self._seated += group.num_samples
        self._fresh[0] += group.num_samples

    def unseat(self, group: Group) -> None:
        """`group` is no longer here."""
        if self.groups.pop(group.group_id, None):
            self._seated -= group.num_samples

    def resize(self, group: Group, num_samples: int) -> None:
        """The client said how large a group is that the worker had claimed."""
        self._seated += num_samples - group.num_samples
        group.num_samples = num_samples

    def take_beat(self, beat: WorkerBeat, now_s: float) -> None:
        """It lives, and this is its load."""
        self.beat = beat
        self.heard_s = now_s
        self.accepting = beat.accepting
        self._fresh = [0, self._fresh[0]]


class Workers:
    """All workers, by name and by route."""

    def __init__(self) -> None:
        self._by_id: dict[str, Worker] = {}
        self._by_route: dict[bytes, Worker] = {}

    def __iter__(self) -> Iterator[Worker]:
        return iter(list(self._by_id.values()))

    def __len__(self) -> int:
        return len(self._by_id)

    def get(self, worker_id: str) -> Worker | None:
        return self._by_id.get(worker_id)

    def at(self, route: bytes) -> Worker | None:
        """Who speaks from `route`."""
        return self._by_route.get(route)

    def add(self, worker: Worker) -> None:
        self._by_id[worker.worker_id] = worker
        self._by_route[worker.route] = worker

    def move(self, worker: Worker, route: bytes) -> None:
        """`worker` dialled again and has another route."""
        self._by_route.pop(worker.route, None)
        worker.route = route
        self._by_route[route] = worker

    def remove(self, worker: Worker) -> None:
        self._by_id.pop(worker.worker_id, None)
        if self._by_route.get(worker.route) is worker:
            del self._by_route[worker.route]

    def serve(self, env: str) -> bool:
        """Whether a live worker has `env`."""
        return any(w.hello.env == env and w.state is WorkerState.LIVE for w in self)

    def best_for(self, env: str, num_samples: int, max_lag_s: float) -> Worker | None:
        """The worker with the most free slots that can take `num_samples` rollouts of `env`.

        One whose event loop is stalled longer than `max_lag_s` comes last.
        """

        def worth(worker: Worker) -> tuple[bool, int, int]:
            runs = worker.beat is None or worker.beat.loop_lag_s <= max_lag_s
            return runs, worker.hello.max_rollouts - worker.load, -worker.num_assigned

        fitting: Iterable[Worker] = (
            w for w in self if w.hello.env == env and w.can_take(num_samples)
        )
        return max(fitting, key=worth, default=None)
