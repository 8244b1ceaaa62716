"""A Ray cluster as a host: Ray places one actor for each process, and launch talks to its runner.

    RemoteChild --> RunnerConnection --> RayTransport ==actor calls==> RunnerActor --pipes--> runner

- Ray places and restarts actors. Results, weights and tokens go directly between our processes.
- An actor belongs to this driver: it ends when launch ends, however that happens (`ray job stop`,
  Ctrl-C, kill -9). Ray restarts it elsewhere if its node dies (`max_restarts=-1`); its process is
  started again by launch, after the usual back-off. No call is repeated (`max_task_retries=0`).
- Keys are arguments of actor calls, which Ray's state API does not show; `runtime_env` and the
  environment have none.
- Workers are plain actors, so that those without a place make an autoscaler add nodes. Ranks of
  the trainer with actors of their own are one placement group: all of them get places, or none.
"""

import asyncio
import os
import secrets
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import ray
from ray.exceptions import ActorUnavailableError, RayError
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rollmesh.core.child_process import ManagedProcess
from rollmesh.core.errors import AddressError
from rollmesh.core.logs import get_logger
from rollmesh.core.orphans import MARK_VARIABLE
from rollmesh.launch.hosts.base import ChildCallbacks, ChildOrder
from rollmesh.launch.hosts.remote import RUNNER, RemoteChild, RunnerConnection, share_logs
from rollmesh.launch.plan import ChildPlan

log = get_logger()

NAMESPACE = "rollmesh"
READ_S = 10.0
"""Longest time that a call waits for a line of the runner."""
WAIT_S = 5.0
"""Interval of the line about missing resources."""
RETRY_S = 1.0
"""Pause between calls of an actor that Ray restarts."""
CLOSE_S = 10.0
"""Time for a runner to end before its actor is killed."""


class RunnerPlace(NamedTuple):
    """A runner, and its node."""

    runner_id: str
    node: str
    address: str


class RunnerActor:
    """Actor that carries lines between launch and a runner on its node."""

    def __init__(self, mark: str) -> None:
        """`mark` is that of the mesh."""
        self._mark = mark
        self._runner: ManagedProcess | None = None
        self._runner_id = ""
        self._lines: deque[bytes] = deque()
        """Lines that launch has not acknowledged."""
        self._num_acknowledged = 0
        self._is_ended = False
        self._changed = threading.Condition()

    def open(self) -> RunnerPlace:
        """Start the runner, or another one if it has ended."""
        address = ray.util.get_node_ip_address()
        if self._runner is None or not self._runner.is_running:
            runner = self._runner = ManagedProcess(
                [sys.executable, *RUNNER, "--address", address],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                environment={**os.environ, MARK_VARIABLE: self._mark},
            )
            self._runner_id = secrets.token_hex(8)
            self._lines.clear()
            self._num_acknowledged, self._is_ended = 0, False
            threading.Thread(target=self._read_lines, args=(runner,), daemon=True).start()
        return RunnerPlace(self._runner_id, os.uname().nodename, address)

    def write(self, runner_id: str, lines: bytes) -> bool:
        """Write lines to this runner; return whether it still runs."""
        runner = self._runner
        if runner is None or self._runner_id != runner_id or not runner.is_running:
            return False
        assert runner.stdin
        try:
            runner.stdin.write(lines)
            runner.stdin.flush()
        except OSError:
            return False
        return True

    def read(self, runner_id: str, num_received: int) -> list[bytes] | None:
        """Return lines after the first `num_received` ones, as soon as there are any; an empty list
        after a while, and None once the runner has ended.
        """
        with self._changed:
            if self._runner_id != runner_id:
                return None
            while self._num_acknowledged < num_received:
                self._lines.popleft()
                self._num_acknowledged += 1
            self._changed.wait_for(lambda: self._lines or self._is_ended, READ_S)
            return None if self._is_ended and not self._lines else [*self._lines]

    def close(self) -> None:
        """End the runner and its children."""
        if self._runner and self._runner.stdin:
            self._runner.stdin.close()
            if not self._runner.wait_for(CLOSE_S):
                self._runner.kill()

    def _read_lines(self, runner: ManagedProcess) -> None:
        assert runner.stdout
        for line in runner.stdout:
            with self._changed:
                self._lines.append(line)
                self._changed.notify_all()
        with self._changed:
            self._is_ended = True
            self._changed.notify_all()


class RayTransport:
    """The lines of one runner, by calls of its actor."""

    def __init__(self, actor: Any, runner_id: str) -> None:
        self._actor = actor
        self._runner_id = runner_id
        self._received: deque[bytes] = deque()
        self._num_received = 0
        self._why = "its process ended"
        self._outgoing: asyncio.Queue[bytes] = asyncio.Queue()
        self._sending = asyncio.create_task(self._send_lines(), name="runner lines")

    def send(self, line: bytes) -> None:
        self._outgoing.put_nowait(line)

    async def receive(self) -> bytes:
        while not self._received:
            try:
                lines = await result_of(
                    self._actor.read.remote(self._runner_id, self._num_received)
                )
            except RayError as error:
                log.info("runner.lost", why=str(error))
                self._why = "Ray lost its actor or node"
                lines = None
            if lines is None:
                self._sending.cancel()
                return b""
            self._received.extend(lines)
            self._num_received += len(lines)
        return self._received.popleft()

    def why_ended(self) -> str:
        return self._why

    async def close(self) -> None:
        self._sending.cancel()
        try:
            await asyncio.wait_for(result_of(self._actor.close.remote()), 2 * CLOSE_S)
        except (RayError, TimeoutError) as error:
            log.info("runner.not_closed", why=first_line(error))

    async def _send_lines(self) -> None:
        """Send line by line: calls of an actor with several threads may overtake each other."""
        while True:
            line = await self._outgoing.get()
            try:
                await result_of(self._actor.write.remote(self._runner_id, line))
            except RayError as error:  # `receive` reports the end
                log.info("runner.line_lost", why=first_line(error))


class RayHost:
    """The nodes of a Ray cluster; each process has an actor of its own."""

    def __init__(self, logs: Path, mark: str, gang: Sequence[ChildPlan] = ()) -> None:
        """`mark` is that of the mesh; the processes of `gang` get their places together, on as few
        nodes as possible. `connect_to_cluster` comes first.
        """
        self._gang = [*gang] if len(gang) > 1 else []
        self._group: PlacementGroup | None = None
        self._logs = logs
        self._mark = mark
        self._actors: dict[str, Any] = {}
        self._connections: dict[str, RunnerConnection] = {}
        self._pending: dict[str, ChildOrder] = {}

    def start(self, order: ChildOrder, hooks: ChildCallbacks) -> RemoteChild:
        return RemoteChild(order, hooks, self._connect)

    async def close(self) -> None:
        await asyncio.gather(*(each.close() for each in self._connections.values()))
        for actor in self._actors.values():
            ray.kill(actor)
        if self._group:
            ray.util.remove_placement_group(self._group)

    async def _connect(self, child: RemoteChild) -> RunnerConnection:
        """Return a connection to the runner of the child's actor, which Ray places first."""
        role = child.role
        if (connection := self._connections.get(role)) and connection.is_open:
            return connection
        if role not in self._actors:
            strategy = await self._strategy(child)
            self._actors[role] = self._new_actor(child.order, strategy)
        place = await self._placed(child)
        transport = RayTransport(self._actors[role], place.runner_id)
        connection = RunnerConnection(transport, place.node, self._logs, share_logs(self._logs))
        self._connections[role] = connection
        return connection

    async def _placed(self, child: RemoteChild) -> RunnerPlace:
        """Wait until the actor runs on a node, and report the missing resources meanwhile."""
        role = child.role
        try:
            while True:
                opening = asyncio.ensure_future(result_of(self._actors[role].open.remote()))
                while not (await asyncio.wait([opening], timeout=WAIT_S))[0]:
                    self._report_pending(child)
                try:
                    return RunnerPlace(*opening.result())
                except ActorUnavailableError:  # Ray restarts it on another node
                    await asyncio.sleep(RETRY_S)
        except RayError as error:
            ray.kill(self._actors.pop(role))
            raise ConnectionError(f"Ray did not start its actor: {first_line(error)}") from None
        finally:
            self._pending.pop(role, None)

    def _report_pending(self, child: RemoteChild) -> None:
        """Report what is missing: one line for all that wait, under the name of the first."""
        self._pending[child.role] = child.order
        is_first = next(iter(self._pending)) == child.role
        child.pend(self._missing() if is_first else "")

    def _missing(self) -> str:
        resource = "GPU" if any(each.num_gpus for each in self._pending.values()) else "CPU"
        needed = sum(
            each.num_gpus if resource == "GPU" else each.num_cpus for each in self._pending.values()
        )
        others = len(self._pending) - 1
        also = f", with {others} other{'s' * (others > 1)}" if others else ""
        return missing_resources(resource, needed) + also

    async def _strategy(self, child: RemoteChild) -> Any:
        """Return how Ray chooses the node; wait until there is room for all of the gang."""
        roles = [plan.role for plan in self._gang]
        if child.role not in roles:
            return "SPREAD" if child.order.is_worker else "DEFAULT"
        if self._group is None:
            bundles = [bundle_of(plan) for plan in self._gang]
            self._group = ray.util.placement_group(bundles, strategy="PACK")
        ready = asyncio.ensure_future(result_of(self._group.ready()))
        try:
            while not (await asyncio.wait([ready], timeout=WAIT_S))[0]:
                self._report_pending(child)
        finally:
            self._pending.pop(child.role, None)
        return PlacementGroupSchedulingStrategy(self._group, roles.index(child.role))

    def _new_actor(self, order: ChildOrder, strategy: Any) -> Any:
        """Create an actor with the resources of the process."""
        actor = ray.remote(RunnerActor).options(
            num_gpus=order.num_gpus,
            num_cpus=order.num_cpus,
            max_restarts=-1,
            max_task_retries=0,
            max_concurrency=4,
            scheduling_strategy=strategy,
        )
        return actor.remote(self._mark)


def bundle_of(plan: ChildPlan) -> dict[str, float]:
    """Return the resources of a process, for a placement group."""
    needed = {"CPU": float(plan.num_cpus), "GPU": float(plan.num_gpus)}
    return {name: amount for name, amount in needed.items() if amount}


def connect_to_cluster(address: str) -> str:
    """Connect to the cluster at `address` (`auto`: RAY_ADDRESS, or one on this machine).

    Return this node's address for the others; raise AddressError if there is no cluster.
    """
    try:
        ray.init(address, namespace=NAMESPACE, log_to_driver=False, logging_level="ERROR")
    except (OSError, ValueError, RuntimeError, RayError) as error:
        raise AddressError(
            f"ray.address = {address}: no Ray cluster there ({first_line(error)}); start one by "
            "`ray start --head`, or set RAY_ADDRESS"
        ) from None
    # Ray's handler prints a trace; launch sets its own.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    node_address: str = ray.util.get_node_ip_address()
    node_id = ray.get_runtime_context().get_node_id()
    log.info("ray.joined", address=node_address, node_id=node_id)
    return node_address


def missing_resources(resource: str, needed: float) -> str:
    """Return the line for processes that wait for `needed` of a resource, such as GPU."""
    registered = ray.cluster_resources().get(resource, 0)
    free = ray.available_resources().get(resource, 0)
    return (
        f"waiting for {needed:g} {resource}{'s' * (needed != 1)}: {registered:g} registered, "
        f"{free:g} free"
    )


def largest_node_gpus() -> int:
    """Return the largest number of GPUs of one node."""
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    return max((int(each.get("GPU", 0)) for each in nodes), default=0)


def cluster_gpus() -> int:
    """Return the number of GPUs of the cluster's nodes."""
    return int(ray.cluster_resources().get("GPU", 0))


async def result_of(ref: Any) -> Any:
    """Return the result of an actor call."""
    return await asyncio.wrap_future(ref.future())


def first_line(error: BaseException) -> str:
    """Return the first line of an error of Ray, whose messages have many."""
    return str(error).strip().partition("\n")[0] or type(error).__name__
