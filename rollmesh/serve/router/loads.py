"""The loads: which workers load their environment now, and of which environments there is none.

    LOADING --the worker's hello--> it serves
       +----EnvFailed, its process ended, its time is over--> FAILED, while nobody else serves or
                                                             loads that environment

Invariants: what waits for an environment hears of a failure at once, but not while another worker
may still bring it; a load ends by itself, whatever its worker does; a worker that somebody killed
or stopped says nothing about its environment. Driven by ledger.py.
"""

from collections import OrderedDict

import msgspec

from rollmesh.serve.router.workers import Workers
from rollmesh.wire.messages import WorkerHello

MAX_LOADS = 4096
MAX_ERRORS = 256
"""Environments whose failure is remembered."""
LATE_S = 30.0
"""Having loaded, a worker makes itself ready to serve; who needs longer will not come."""
MAX_LOAD_S = 86_400.0
"""Nobody is waited for longer, whatever it says."""
FROM_OUTSIDE = frozenset({"killed by signal 9", "killed by signal 15"})
"""Ends that somebody wanted."""


class _Load(msgspec.Struct, frozen=True):
    """A worker that loads."""

    said: WorkerHello
    until_s: float


class Loads:
    """See the module."""

    def __init__(self, workers: Workers) -> None:
        self._workers = workers
        self._errors: dict[str, str] = {}
        """By environment."""
        self._loads: OrderedDict[str, _Load] = OrderedDict()
        """By worker id, the oldest first."""

    def now(self) -> list[WorkerHello]:
        """What loads."""
        return [load.said for load in self._loads.values()]

    def begin(self, said: WorkerHello, now_s: float) -> None:
        """A worker begins to load, or says so again."""
        known = self._loads.get(said.worker_id)
        if known and known.said == said:
            return
        until_s = now_s + min(said.loads_for_s, MAX_LOAD_S) + LATE_S
        self._loads[said.worker_id] = _Load(said, until_s)
        if len(self._loads) > MAX_LOADS:
            self._loads.popitem(last=False)

    def why_none(self, env: str) -> str:
        """Why there is no `env`; '' where somebody serves it, or may be about to."""
        error = self._errors.get(env)
        if error is None or self._workers.serve(env):
            return ""
        return "" if self.bring(env) else error

    def bring(self, env: str) -> bool:
        """Whether a worker loads `env`."""
        return any(load.said.env == env for load in self._loads.values())

    def succeed(self, worker_id: str, env: str) -> None:
        """A worker serves."""
        self._loads.pop(worker_id, None)
        self._errors.pop(env, None)

    def fail(self, worker_id: str, env: str, error: str) -> None:
        """A worker has said that it has no environment."""
        self._loads.pop(worker_id, None)
        if len(self._errors) < MAX_ERRORS:
            self._errors[env] = error

    def hear_of_exit(self, worker_id: str, pid: int, cause: str) -> str:
        """A process has ended; the environment of which that was a failed load, or ''."""
        load = self._loads.get(worker_id)
        if load is None or load.said.pid != pid:
            return ""
        if cause in FROM_OUTSIDE:
            del self._loads[worker_id]
            return ""
        error = f"{worker_id} ended before it served {load.said.env}: {cause}"
        self.fail(worker_id, load.said.env, error)
        return load.said.env

    def take_overdue(self, now_s: float) -> list[str]:
        """The environments of workers from which nothing more is to be expected."""
        late = [load.said for load in self._loads.values() if now_s >= load.until_s]
        for said in late:
            limit_s = said.loads_for_s + LATE_S
            error = f"{said.worker_id} has not served {said.env} within {limit_s:g} s, nor said why"
            self.fail(said.worker_id, said.env, error)
        return [said.env for said in late]
