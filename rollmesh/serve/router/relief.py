"""Relief: worn workers leave one after another, so that what they serve stays served.

    a beat says "worn" --others serve, few leave--> it may leave (it drains, and has a successor)
                       --it is the only one, and no successor of another is on its way--> the same

Invariant: of two workers of an environment never both leave because they are worn, unless no
successor comes: workers that start together are worn together. Pure; driven by crew.py.
"""

from rollmesh.serve.router.workers import Worker, Workers, WorkerState
from rollmesh.wire.messages import RELIEVED

WORN = "worn"
"""What such a worker says of itself in its beats (serve/server/duties.py)."""
MAX_SHARE = 0.25
"""Of an environment's workers, but one at least, leave at the same time."""
SUCCESSOR_S = 60.0
"""So long after a worn worker has left its successor is waited for."""


class Relief:
    """See the module."""

    def __init__(self) -> None:
        self._worn: dict[str, Worker] = {}
        """By worker id, first come first."""
        self._awaited: dict[str, float] = {}
        """By environment: until when a successor is on its way."""

    def ask(self, worker: Worker) -> None:
        """`worker` would leave."""
        if not worker.drain_reason:
            self._worn[worker.worker_id] = worker

    def note_left(self, worker: Worker, now_s: float) -> None:
        """`worker` is gone; if that was for us, another comes."""
        self._worn.pop(worker.worker_id, None)
        self._awaited = {env: until_s for env, until_s in self._awaited.items() if until_s > now_s}
        if worker.drain_reason == RELIEVED:
            self._awaited[worker.hello.env] = now_s + SUCCESSOR_S

    def note_came(self, worker: Worker) -> None:
        """A new worker is there."""
        self._awaited.pop(worker.hello.env, None)

    def next(self, workers: Workers, now_s: float) -> Worker | None:
        """Who may leave now; to be drained before the next is asked for."""
        for worker in list(self._worn.values()):
            if workers.get(worker.worker_id) is not worker:
                del self._worn[worker.worker_id]
            elif worker.state is WorkerState.LIVE and self._can_spare(worker, workers, now_s):
                del self._worn[worker.worker_id]
                return worker
        return None

    def _can_spare(self, worker: Worker, workers: Workers, now_s: float) -> bool:
        env = worker.hello.env
        live = [w for w in workers if w.hello.env == env and w.state is WorkerState.LIVE]
        num_leaving = sum(map(_leaves, live))
        if len(live) - num_leaving > 1:
            return num_leaving < max(1.0, MAX_SHARE * len(live))
        return not num_leaving and now_s >= self._awaited.get(env, 0.0)


def _leaves(worker: Worker) -> bool:
    said = worker.beat.state if worker.beat else ""
    return bool(worker.drain_reason) or said == "draining"
