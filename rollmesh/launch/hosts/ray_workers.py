"""Workers on a Ray cluster that no launch owns: `rollmesh worker --on ray --count N`.

    worker actor   STARTING --> RUNNING --> DRAINED      FAILED <-- STARTING (a user's mistake,
                      ^            |                                          or a crash loop)
                      +--(dies)----+

- Actors are detached and named after their worker; the router's address is part of the name, so
  that a later call finds them. Ray starts one again on another node when its node dies.
- An actor watches its worker by the machine of launch: it restarts a dead one with back-off, kills
  one that hangs, and gives up in a crash loop.
- The worker's key is an argument of the constructor, and a 0600 file in memory on the node.
"""

import enum
import hashlib
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import ray
from ray.exceptions import RayError

from rollmesh.core.config import LaunchConfig
from rollmesh.launch.hosts.ray import NAMESPACE, RunnerActor, first_line
from rollmesh.launch.hosts.runner import (
    ProcessBeat,
    ProcessEnded,
    ProcessReady,
    RunnerEvent,
    SignalOrder,
    StartOrder,
)
from rollmesh.launch.machine import (
    ChildExited,
    ChildReady,
    ChildState,
    Event,
    HeartbeatReceived,
    KillChild,
    StartChild,
    SupervisionMachine,
    TerminateChild,
    TimePassed,
)
from rollmesh.launch.plan import ChildPlan, OnDeath
from rollmesh.launch.supervisor import TICK_S

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


STATES = {ChildState.READY: ActorState.RUNNING, ChildState.GONE: ActorState.DRAINED}


class WorkerActor(RunnerActor):
    """Actor that keeps one worker running on its node, by the supervision machine of launch."""

    def __init__(self, start: bytes, settings: LaunchConfig) -> None:
        """`start` is the JSON of the StartOrder."""
        super().__init__(MARK)
        self._start = start
        self._role = msgspec.json.decode(start, type=StartOrder).order.role
        plan = ChildPlan(role=self._role, argv=(), on_death=OnDeath.REPLACE)
        self._machine = SupervisionMachine([plan], settings)
        self._child = self._machine.children[self._role]
        self._last_line = ""
        self._place, self._num_received = self.open(), 0
        threading.Thread(target=self._keep, name="worker", daemon=True).start()

    def state(self) -> tuple[str, str]:
        """Return the worker's state, and its last line."""
        if self._machine.end:
            return ActorState.FAILED.value, self._machine.end.reason
        state = STATES.get(self._child.state, ActorState.STARTING)
        return state.value, self._last_line

    def _keep(self) -> None:
        """Do what the machine decides, until the worker was drained or has failed."""
        for event in self._events():
            for action in self._machine.step(event, time.monotonic()):
                match action:
                    case StartChild():
                        place = self.open()
                        if place != self._place:
                            self._place, self._num_received = place, 0
                        self._send(self._start)
                    case TerminateChild(role):
                        self._send(msgspec.json.encode(SignalOrder(role, kill=False)))
                    case KillChild(role):
                        self._send(msgspec.json.encode(SignalOrder(role, kill=True)))
            if self._child.state is ChildState.GONE:
                return

    def _send(self, line: bytes) -> None:
        self.write(self._place.runner_id, line + b"\n")  # `read` reports the runner's end

    def _events(self) -> Iterator[Event]:
        """Yield the events of the worker's processes, and TimePassed when there are none."""
        yield TimePassed()
        while True:
            if not self._child.runs:
                threading.Event().wait(TICK_S)
                yield TimePassed()
                continue
            lines = self.read(self._place.runner_id, self._num_received)
            if lines is None:
                yield ChildExited(self._role, -signal.SIGKILL, cause="its runner ended")
                continue
            self._num_received += len(lines)
            yield TimePassed()
            for line in lines:
                match msgspec.json.decode(line, type=RunnerEvent):
                    case ProcessReady(role):
                        yield ChildReady(role)
                    case ProcessBeat(role):
                        yield HeartbeatReceived(role)
                    case ProcessEnded(exited):
                        self._last_line = exited.last_line or exited.cause
                        yield exited


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

    def add(self, start: StartOrder, num_cpus: float, settings: LaunchConfig) -> None:
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
        actor.remote(msgspec.json.encode(start), settings)

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
