"""Why groups are blocked, and which workers load their environments.

    fleet:               SERVES --no engine serves--> DOWN --STANDING_BEATS--> reported
    environment:         SERVED --no live worker has it--> UNSERVED --STANDING_BEATS--> reported
                         SERVED --all its live workers are over a budget--> FULL --> reported
    load of a worker:    LOADING --its hello--> serves
                         LOADING --EnvFailed, its process ended, timeout--> FAILED, unless another
                         worker serves or loads the environment

- What is usual at a start or a replacement is no reason. A reason is sent to each waiting client,
  repeatedly, and ends no group. While no engine serves, that is the only reason.
- Groups that wait for an environment learn of a failed load at once, unless another worker may
  still serve it. A worker that was stopped or killed says nothing about its environment.
"""

from collections import OrderedDict

import msgspec

from rollmesh.serve.router.group_table import GroupTable, moved
from rollmesh.serve.router.workers import WorkerTable
from rollmesh.wire.messages import WorkerHello

MAX_LOADS = 4096
MAX_ERRORS = 256
"""Limit on environments whose failure is remembered."""
MAX_LOAD_S = 86_400.0
"""Limit on the time for which a load is waited for, whatever the worker announces."""
FROM_OUTSIDE = frozenset({"killed by signal 9", "killed by signal 15"})
"""Ends that were requested."""


class _EnvLoad(msgspec.Struct, frozen=True):
    """A worker that loads an environment."""

    hello: WorkerHello
    until_s: float


class EnvLoads:
    """Loads of environments by workers."""

    def __init__(self, workers: WorkerTable, load_grace_s: float) -> None:
        self._workers = workers
        self._load_grace_s = load_grace_s
        self._errors: dict[str, str] = {}
        """By environment."""
        self._env_loads: OrderedDict[str, _EnvLoad] = OrderedDict()
        """By worker id, oldest first."""

    def now(self) -> list[WorkerHello]:
        """Number of loads in progress."""
        return [load.hello for load in self._env_loads.values()]

    def begin(self, hello: WorkerHello, now_s: float) -> None:
        """A worker begins to load, or reports it again."""
        known = self._env_loads.get(hello.worker_id)
        if known and known.hello == hello:
            return
        until_s = now_s + min(hello.loads_for_s, MAX_LOAD_S) + self._load_grace_s
        self._env_loads[hello.worker_id] = _EnvLoad(hello, until_s)
        if len(self._env_loads) > MAX_LOADS:
            self._env_loads.popitem(last=False)

    def why_none(self, env: str) -> str:
        """Return why no worker serves `env`; '' if one does or may soon."""
        error = self._errors.get(env)
        if error is None or self._workers.serve(env):
            return ""
        return "" if self.bring(env) else error

    def bring(self, env: str) -> bool:
        """Return whether a worker loads `env`."""
        return any(load.hello.env == env for load in self._env_loads.values())

    def succeed(self, worker_id: str, env: str) -> None:
        """A worker serves."""
        self._env_loads.pop(worker_id, None)
        self._errors.pop(env, None)

    def fail(self, worker_id: str, env: str, error: str) -> None:
        """A worker reports that it could not load its environment."""
        self._env_loads.pop(worker_id, None)
        if len(self._errors) < MAX_ERRORS:
            self._errors[env] = error

    def worker_exited(self, worker_id: str, pid: int, cause: str) -> str:
        """A process has ended; return the environment whose load thereby failed, or ''."""
        load = self._env_loads.get(worker_id)
        if load is None or load.hello.pid != pid:
            return ""
        if cause in FROM_OUTSIDE:
            del self._env_loads[worker_id]
            return ""
        error = f"{worker_id} ended before it served {load.hello.env}: {cause}"
        self.fail(worker_id, load.hello.env, error)
        return load.hello.env

    def take_overdue(self, now_s: float) -> list[str]:
        """Return the environments of workers whose load has timed out."""
        late = [load.hello for load in self._env_loads.values() if now_s >= load.until_s]
        for hello in late:
            limit_s = hello.loads_for_s + self._load_grace_s
            error = (
                f"{hello.worker_id} has not served {hello.env} within {limit_s:g} s, nor said why"
            )
            self.fail(hello.worker_id, hello.env, error)
        return [hello.env for hello in late]


STANDING_BEATS = 20
"""Time without a worker after which an environment is reported."""
NOTIFY_BEATS = 60
"""Interval at which waiting clients are informed."""
MAX_NAMES = 5


class _Waiting:
    """An environment whose groups no worker takes."""

    def __init__(self, since_s: float, notify_s: float) -> None:
        self.since_s = since_s
        self.notify_s = notify_s


class BlockedReasons:
    """Reasons why groups wait for long, by fleet and environment."""

    def __init__(
        self, table: GroupTable, workers: WorkerTable, env_loads: EnvLoads, beat_s: float
    ) -> None:
        self._table = table
        self._workers = workers
        self._env_loads = env_loads
        self._standing_s = STANDING_BEATS * beat_s
        self._notify_s = NOTIFY_BEATS * beat_s
        self._waits: dict[str, _Waiting] = {}
        self._why_no_engine = ""
        self._no_engine: _Waiting | None = None

    def see_engines(self, why_none: str) -> None:
        """Set why no engine serves, from the fleet table; '' while one does."""
        self._why_no_engine = why_none

    def look(self) -> None:
        """Update all reasons and return what to send to clients that wait."""
        now_s = self._table.now_s
        self._check_engines(now_s)
        suspects = (group.env for group in self._table.suspects.values())
        waited_for = dict.fromkeys((*self._table.queue.envs(), *suspects))
        waiting = [env for env in waited_for if not self._may_be_served(env)]
        for env in self._waits.keys() - set(waiting):
            del self._waits[env]
        for env in waiting:
            wait = self._waits.get(env)
            if wait is None:
                self._waits[env] = _Waiting(now_s, now_s + self._standing_s)
            elif now_s >= wait.notify_s:
                wait.notify_s = now_s + self._notify_s
                if not self._engine_cause():
                    self._tell(env)

    def _check_engines(self, now_s: float) -> None:
        if not self._why_no_engine or not self._table.groups:
            self._no_engine = None
        elif self._no_engine is None:
            self._no_engine = _Waiting(now_s, now_s + self._standing_s)
        elif now_s >= self._no_engine.notify_s:
            self._no_engine.notify_s = now_s + self._notify_s
            for client_id, groups in self._table.of_client.items():
                if client := self._table.clients.get(client_id):
                    first = next(iter(groups.values()))
                    self._table.send(client.route, moved(first, self._engine_cause()))

    def _engine_cause(self) -> str:
        """Return why no engine has served for long; '' if one does."""
        waited_s = self._table.now_s - self._no_engine.since_s if self._no_engine else 0.0
        if waited_s < self._standing_s:
            return ""
        return f"no engine serves: {self._why_no_engine} (for {waited_s:.0f} s)"

    def standing(self) -> list[str]:
        """Return all reasons in words."""
        if engine_cause := self._engine_cause():
            return [engine_cause]
        since_s = self._table.now_s - self._standing_s
        waits = self._waits.items()
        return [self._reason(env) for env, each in waits if each.since_s <= since_s]

    def _may_be_served(self, env: str) -> bool:
        if self._env_loads.bring(env):
            return True
        return self._workers.serve(env) and not self._workers.full(env)

    def _reason(self, env: str) -> str:
        waited_s = self._table.now_s - self._waits[env].since_s
        if full := self._workers.full(env):
            first = f"{full[0].worker_id} waits for {full[0].waits_for}"
            return f"over_budget: for {waited_s:.0f} s no worker of env {env!r} has room; {first}"
        others = self._workers.envs()
        names = ", ".join(others[:MAX_NAMES]) + (", ..." if len(others) > MAX_NAMES else "")
        there_are = f"there are workers of {names}" if others else "there is no worker"
        return f"no worker has served env {env!r} for {waited_s:.0f} s; {there_are}"

    def _tell(self, env: str) -> None:
        """Return one waiting group per client: the client knows its other groups of that
        environment.
        """
        reason = self._reason(env)
        for group in self._table.queue.firsts(env):
            if client := self._table.clients.get(group.client_id):
                self._table.send(client.route, moved(group, reason))
