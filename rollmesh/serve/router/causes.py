"""Standing causes: why groups wait for long, and will wait until something is done about it.

    the fleet:             SERVES --no engine serves--> DOWN --STANDING_BEATS--> told
    an env with a queue:   SERVED --no live worker has it--> UNSERVED --STANDING_BEATS--> told
                           SERVED --all its live workers are over a budget--> FULL --> told
    any --an engine serves; a worker has room, is live or loads it; nothing waits--> forgotten

Invariants: what is usual at a start, or when a process is replaced, is no cause. A standing cause
is sent to each client that waits, repeatedly, and never ends a group. While no engine serves, that
is the only cause: workers and environments are not asked about. Read by status.py.
"""

from rollmesh.serve.router.book import Book, moved
from rollmesh.serve.router.loads import Loads
from rollmesh.serve.router.workers import Workers

STANDING_BEATS = 20
"""An environment without a worker for so long is a cause."""
TELL_BEATS = 60
"""Clients are told of it so often."""
MAX_NAMES = 5


class _Waiting:
    """An environment whose groups nobody takes."""

    def __init__(self, since_s: float, tell_s: float) -> None:
        self.since_s = since_s
        self.tell_s = tell_s


class Causes:
    """See the module."""

    def __init__(self, book: Book, workers: Workers, loads: Loads, beat_s: float) -> None:
        self._book = book
        self._workers = workers
        self._loads = loads
        self._standing_s = STANDING_BEATS * beat_s
        self._tell_s = TELL_BEATS * beat_s
        self._waits: dict[str, _Waiting] = {}
        self._why_no_engine = ""
        self._no_engine: _Waiting | None = None

    def see_engines(self, why_none: str) -> None:
        """Take why no engine serves, as the fleet table has it; '' while one does."""
        self._why_no_engine = why_none

    def look(self) -> None:
        """See what has come and gone, and send clients that wait the reason."""
        now_s = self._book.now_s
        self._look_at_engines(now_s)
        suspects = (group.env for group in self._book.suspects.values())
        waited_for = dict.fromkeys((*self._book.queue.envs(), *suspects))
        waiting = [env for env in waited_for if not self._may_be_served(env)]
        for env in self._waits.keys() - set(waiting):
            del self._waits[env]
        for env in waiting:
            wait = self._waits.get(env)
            if wait is None:
                self._waits[env] = _Waiting(now_s, now_s + self._standing_s)
            elif now_s >= wait.tell_s:
                wait.tell_s = now_s + self._tell_s
                if not self._engine_cause():
                    self._tell(env)

    def _look_at_engines(self, now_s: float) -> None:
        if not self._why_no_engine or not self._book.groups:
            self._no_engine = None
        elif self._no_engine is None:
            self._no_engine = _Waiting(now_s, now_s + self._standing_s)
        elif now_s >= self._no_engine.tell_s:
            self._no_engine.tell_s = now_s + self._tell_s
            for client_id, groups in self._book.of_client.items():
                if client := self._book.clients.get(client_id):
                    first = next(iter(groups.values()))
                    self._book.send(client.route, moved(first, self._engine_cause()))

    def _engine_cause(self) -> str:
        """That no engine has served for long, and why; '' where that is not so."""
        waited_s = self._book.now_s - self._no_engine.since_s if self._no_engine else 0.0
        if waited_s < self._standing_s:
            return ""
        return f"no engine serves: {self._why_no_engine} (for {waited_s:.0f} s)"

    def standing(self) -> list[str]:
        """All of them, in words."""
        if engine_cause := self._engine_cause():
            return [engine_cause]
        since_s = self._book.now_s - self._standing_s
        waits = self._waits.items()
        return [self._reason(env) for env, each in waits if each.since_s <= since_s]

    def _may_be_served(self, env: str) -> bool:
        if self._loads.bring(env):
            return True
        return self._workers.serve(env) and not self._workers.full(env)

    def _reason(self, env: str) -> str:
        waited_s = self._book.now_s - self._waits[env].since_s
        if full := self._workers.full(env):
            first = f"{full[0].worker_id} waits for {full[0].waits_for}"
            return f"over_budget: for {waited_s:.0f} s no worker of env {env!r} has room; {first}"
        others = self._workers.envs()
        names = ", ".join(others[:MAX_NAMES]) + (", ..." if len(others) > MAX_NAMES else "")
        there_are = f"there are workers of {names}" if others else "there is no worker"
        return f"no worker has served env {env!r} for {waited_s:.0f} s; {there_are}"

    def _tell(self, env: str) -> None:
        """One group for each client: it knows which others it wants of that environment."""
        reason = self._reason(env)
        for group in self._book.queue.firsts(env):
            if client := self._book.clients.get(group.client_id):
                self._book.send(client.route, moved(group, reason))
