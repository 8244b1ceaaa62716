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


class _Engine:
    """A worker that is awake, and what runs there."""

    def __init__(self) -> None:
        self.ran: dict[int, tuple[float, float]] = {}
        """By rollout, its start and end."""
        self.starts_s = 0.0
        """The sum of their starts."""

    def run(self, rollout: int, start_s: float, end_s: float) -> None:
        self.ran[rollout] = (start_s, end_s)
        self.starts_s += start_s

    def end(self, rollout: int) -> float | None:
        """What it took; None where it does not run here."""
        if rollout not in self.ran:
            return None
        start_s, end_s = self.ran.pop(rollout)
        self.starts_s -= start_s
        return end_s - start_s


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
        self._engines: dict[int, _Engine] = {}
        """Those that are awake, by rank."""
        self._num = 0
        self.served_s = 0.0
        """What workers did, lost KV included."""

    def start(self, lengths_s: tuple[float, ...]) -> None:
        """Of a step."""
        self._waiting.extend(lengths_s)
        self._fill()

    def woke(self, rank: int) -> None:
        """The worker serves."""
        self._engines[rank] = _Engine()
        self._fill()

    def sleeps(self, rank: int) -> int:
        """It does not any more; how many lost their place."""
        evicted = self._engines.pop(rank).ran
        now_s = self._agenda.now_s
        for start_s, end_s in evicted.values():
            self.served_s += now_s - start_s
            self._waiting.appendleft(end_s - now_s + self._costs.reprefill_s)
        self._fill()
        return len(evicted)

    def kv_tokens(self, rank: int) -> int:
        """What the worker's sleep would lose."""
        engine = self._engines[rank]
        running_s = len(engine.ran) * self._agenda.now_s - engine.starts_s
        return int(running_s * self._costs.kv_tokens_per_s)

    def _fill(self) -> None:
        engines = self._engines
        while self._waiting and engines:
            rank = min(engines, key=lambda rank: (len(engines[rank].ran), rank))
            if len(engines[rank].ran) == self._per_worker:
                return
            self._run(rank, self._waiting.popleft())

    def _run(self, rank: int, seconds: float) -> None:
        now_s = self._agenda.now_s
        self._num += 1
        self._engines[rank].run(self._num, now_s, now_s + seconds)
        self._agenda.after(seconds, partial(self._end, rank, self._num))

    def _end(self, rank: int, rollout: int) -> None:
        seconds = self._engines[rank].end(rollout) if rank in self._engines else None
        if seconds is None:
            return  # it was evicted, and ends elsewhere
        self.served_s += seconds
        if self._waiting:
            self._run(rank, self._waiting.popleft())
        self._ended()
