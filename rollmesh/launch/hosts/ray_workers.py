"""Workers on a Ray cluster that no launch owns: `rollmesh worker --on ray --count N`.

    worker actor   STARTING --> RUNNING --> DRAINED      FAILED <-- STARTING (a user's mistake)
                      ^            |
                      +--(dies)----+

- Actors are detached and named after their worker; the router's address is part of the name, so
  that a later call finds them. Ray starts one again on another node when its node dies.
- An actor restarts its worker with back-off, as launch does.
- The worker's key is an argument of the constructor, and a 0600 file in memory on the node.
"""

import enum
import hashlib
import threading
from collections.abc import Iterator
from typing import Any

import msgspec
import ray
from ray.exceptions import RayError

from rollmesh.core.config import LaunchConfig
from rollmesh.core.process import OK, RECYCLED, USAGE
from rollmesh.launch.hosts.ray import NAMESPACE, RunnerActor, first_line
from rollmesh.launch.hosts.runner import ProcessEnded, ProcessReady, RunnerEvent, StartOrder
from rollmesh.launch.machine import ChildExited

PREFIX = "rollmesh-worker-"
STATE_S = 2.0
"""Time for actors to report their state; those without a node do not answer."""
MARK = "ray-workers"


class ActorState(enum.StrEnum):
    """The state of one worker; PENDING while its actor has no node."""

    PENDING = "pending"
    STARTING = "starting"
    RUNNING = "running"
    DRAINED = "drained"
    FAILED = "failed"


class WorkerActor(RunnerActor):
    """Actor that keeps one worker running on its node."""

    def __init__(self, start: bytes) -> None:
        """`start` is the JSON of the StartOrder."""
        super().__init__(MARK)
        self._start = start
        self._state = ActorState.STARTING
        self._last_line = ""
        self._settings = LaunchConfig()
        threading.Thread(target=self._keep, name="worker", daemon=True).start()

    def state(self) -> tuple[str, str]:
        """Return the worker's state, and the last line of the process that ended last."""
        return self._state.value, self._last_line

    def _keep(self) -> None:
        pause_s = self._settings.restart_delay_s
        while True:
            exited = self._run_once()
            was_running = self._state is ActorState.RUNNING
            self._last_line = exited.last_line or exited.cause
            if exited.code == OK:
                self._state = ActorState.DRAINED
                return
            if exited.code == USAGE and not was_running:
                self._state = ActorState.FAILED
                return
            self._state = ActorState.STARTING
            if exited.code == RECYCLED or was_running:
                pause_s = self._settings.restart_delay_s
            threading.Event().wait(0 if exited.code == RECYCLED else pause_s)
            pause_s = min(2 * pause_s, self._settings.max_restart_delay_s)

    def _run_once(self) -> ChildExited:
        """Run the worker's process to its end."""
        place, num_received = self.open(), 0
        self.write(place.runner_id, self._start + b"\n")
        while (lines := self.read(place.runner_id, num_received)) is not None:
            num_received += len(lines)
            for line in lines:
                match msgspec.json.decode(line, type=RunnerEvent):
                    case ProcessReady():
                        self._state = ActorState.RUNNING
                    case ProcessEnded(exited):
                        return exited
        return ChildExited("worker", -9, "its runner ended")


class WorkerPool:
    """The detached workers of one mesh, on a cluster to which this process is connected."""

    def __init__(self, router: str) -> None:
        """`router` is the address of the mesh's router."""
        self._prefix = f"{PREFIX}{hashlib.sha256(router.encode()).hexdigest()[:8]}-"

    def workers(self) -> list[str]:
        """Return the names of the workers, in the order in which they were added."""
        named = ray.util.list_named_actors(all_namespaces=True)
        names = [each["name"] for each in named if each["namespace"] == NAMESPACE]
        ours = [name for name in names if name.startswith(self._prefix)]
        return sorted(ours, key=self._number)

    def free_names(self, num: int) -> Iterator[str]:
        """Yield names for `num` more workers."""
        taken = {self._number(name) for name in self.workers()}
        free = (number for number in range(len(taken) + num) if number not in taken)
        for _ in range(num):
            yield f"{self._prefix}{next(free)}"

    def add(self, start: StartOrder, num_cpus: float) -> None:
        """Create the actor of a worker, whose role is its name."""
        actor = ray.remote(WorkerActor).options(
            name=start.order.role,
            namespace=NAMESPACE,
            lifetime="detached",
            num_cpus=num_cpus,
            max_restarts=-1,
            max_task_retries=0,
            max_concurrency=4,
            scheduling_strategy="SPREAD",
        )
        actor.remote(msgspec.json.encode(start))

    def states(self, names: list[str]) -> dict[str, tuple[ActorState, str]]:
        """Return state and last line of each worker."""
        refs = {name: self._actor(name).state.remote() for name in names}
        ray.wait([*refs.values()], num_returns=len(refs), timeout=STATE_S)
        found = {}
        for name, ref in refs.items():
            try:
                state, line = ray.get(ref, timeout=0)
                found[name] = ActorState(state), line
            except RayError as error:
                found[name] = ActorState.PENDING, first_line(error)
        return found

    def remove(self, name: str) -> None:
        """End a worker and its actor."""
        ray.kill(self._actor(name))

    def _actor(self, name: str) -> Any:
        return ray.get_actor(name, namespace=NAMESPACE)

    def _number(self, name: str) -> int:
        return int(name.rpartition("-")[2])
