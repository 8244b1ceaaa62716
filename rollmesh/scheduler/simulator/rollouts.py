"""The rollouts of one pipeline's step on the workers that it has awake.

Owns which rollout runs where. A worker runs so many at a time, each at full speed; the others wait
and go to the worker with the least. Those of a worker that is put to sleep go first to others, and
pay for the KV that was lost. Invariant: each rollout of the step ends once; its seconds are all
done by then. Driven by tenant.py.
"""

import collections
from collections.abc import Callable
from functools import partial

from rollmesh.scheduler.simulator.agenda import Agenda
from rollmesh.scheduler.simulator.trace import Costs


class Rollouts:
    """See the module."""

    def __init__(
        self, agenda: Agenda, costs: Costs, per_worker: int, ended: Callable[[], None]
    ) -> None:
        self._agenda = agenda
        self._costs = costs
        self._per_worker = per_worker
        self._ended = ended
        self._waiting = collections.deque[float]()
        """Seconds that are left of each."""
        self._running: dict[int, dict[int, tuple[float, float]]] = {}
        """By worker that is awake and rollout, its start and end."""
        self._num = 0
        self.served_s = 0.0
        """What workers did, lost KV included."""

    def start(self, lengths_s: tuple[float, ...]) -> None:
        """Of a step."""
        self._waiting.extend(lengths_s)
        self._fill()

    def woke(self, rank: int) -> None:
        """The worker serves."""
        self._running[rank] = {}
        self._fill()

    def sleeps(self, rank: int) -> int:
        """It does not any more; how many lost their place."""
        evicted = self._running.pop(rank)
        now_s = self._agenda.now_s
        for start_s, end_s in evicted.values():
            self.served_s += now_s - start_s
            self._waiting.appendleft(end_s - now_s + self._costs.reprefill_s)
        self._fill()
        return len(evicted)

    def kv_tokens(self, rank: int) -> int:
        """What the worker's sleep would lose."""
        now_s = self._agenda.now_s
        running_s = sum(now_s - start_s for start_s, _ in self._running[rank].values())
        return int(running_s * self._costs.kv_tokens_per_s)

    def _fill(self) -> None:
        while self._waiting and self._running:
            rank = min(self._running, key=lambda rank: (len(self._running[rank]), rank))
            if len(self._running[rank]) == self._per_worker:
                return
            self._run(rank, self._waiting.popleft())

    def _run(self, rank: int, seconds: float) -> None:
        now_s = self._agenda.now_s
        self._num += 1
        self._running[rank][self._num] = (now_s, now_s + seconds)
        self._agenda.after(seconds, partial(self._end, rank, self._num))

    def _end(self, rank: int, rollout: int) -> None:
        ran = self._running.get(rank, {}).pop(rollout, None)
        if ran is None:
            return  # it was evicted, and ends elsewhere
        self.served_s += ran[1] - ran[0]
        if self._waiting:
            self._run(rank, self._waiting.popleft())
        self._ended()
