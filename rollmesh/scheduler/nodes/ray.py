"""Scheduler in a Ray cluster: the service as a detached named actor, and an agent on each node.

    driver, exits at once            the driver's node
      up() ---------------> ServiceActor
                              keeps `rollmesh scheduler serve` running, a separate process
                              reads ray.nodes(), starts
                                NodeActor, one on each node, which joins and sends heartbeats

- Ray carries no GPU requests: hooks and coordinators dial the service's own address, so that no
  limit of an actor blocks them.
- Ray restarts an actor whose process dies, and its service restores its journal at the same
  address.
- A node that leaves takes its agent with it, and is marked DOWN by the scheduler.
- A scheduler is never started twice under one name.
"""

import os
import socket
import sys
import threading
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rollmesh.core.errors import AddressError, ConfigError, UserError
from rollmesh.core.secret_files import ADMIN_TOKEN_FILE_VARIABLE
from rollmesh.scheduler.nodes.agent import NodeMachine, serve
from rollmesh.scheduler.nodes.supervisor import ServiceSupervisor
from rollmesh.wire.keys import KEYS_VARIABLE, SCHEDULER_KEYS_VARIABLE

NAMESPACE = "rollmesh"
SERVICE = "rollmesh-scheduler"
AGENT = "rollmesh-node-"
"""Prefix of the node's id in Ray; a node that returns has a new id."""
READY_S = 120.0
"""Time for the service to start and for Ray to answer."""
DIAL_S = 10.0
"""Time to connect to the cluster."""
HANDED_ON = (KEYS_VARIABLE, SCHEDULER_KEYS_VARIABLE, ADMIN_TOKEN_FILE_VARIABLE)
"""Environment variables passed on: names of files that must exist on each node."""


class RayNode(msgspec.Struct, frozen=True):
    """A node of the Ray cluster as the scheduler sees it."""

    node_id: str
    """Ray's."""
    name: str
    num_gpus: int
    labels: tuple[str, ...]


class NodeActor:
    """Actor on a node that joins it and sends heartbeats."""

    def __init__(self, scheduler: str, place: RayNode) -> None:
        self._agent = NodeMachine(place.name, place.num_gpus, place.labels)
        self._why = ""
        self._thread = threading.Thread(
            target=self._serve, args=(scheduler,), name="beats", daemon=True
        )
        self._thread.start()

    def state(self) -> tuple[str, str]:
        """Its phase, and why it has ended."""
        return self._agent.phase.value, self._why

    def _serve(self, scheduler: str) -> None:
        try:
            serve(scheduler, self._agent, threading.Event())
        except UserError as error:
            self._why = str(error)
        except Exception as error:  # noqa: BLE001 - door: reported by state()
            self._why = f"it has ended: {error!r}"


class ServiceActor:
    """Actor that runs the service's process and starts the agents."""

    def __init__(self, arguments: list[str], folder: str, resource: str) -> None:
        """`rollmesh` with `arguments` serves in `folder`; `resource` is the name under which Ray
        counts GPUs."""
        self._resource = resource
        self._agents: dict[str, Any] = {}
        argv = [sys.executable, "-m", "rollmesh.cli.main", *arguments]
        self._supervisor = ServiceSupervisor(argv, Path(folder), self._update_agents)
        self._thread = threading.Thread(
            target=self._supervisor.run, args=(threading.Event(),), name="supervisor", daemon=True
        )
        self._thread.start()

    def address(self) -> str:
        """Address of the service; '' if it failed to start."""
        self._supervisor.serves.wait(READY_S)
        ready = self._supervisor.ready
        return ready.address if ready else ""

    def last_line(self) -> str:
        """Last output line of a process that failed to start."""
        return self._supervisor.last_line

    def pid(self) -> int:
        """Pid of the process that serves."""
        ready = self._supervisor.ready
        return ready.pid if ready else 0

    def agents(self) -> dict[str, tuple[str, str]]:
        """State of the agent on each node."""
        refs = {name: agent.state.remote() for name, agent in list(self._agents.items())}
        states: dict[str, tuple[str, str]] = {}
        for name, ref in refs.items():
            try:
                states[name] = ray.get(ref, timeout=READY_S)
            except RayError as error:
                states[name] = ("gone", str(error).splitlines()[0])
        return states

    def _update_agents(self, address: str) -> None:
        here = {place.node_id: place for place in ray_nodes(ray.nodes(), self._resource)}
        for node_id in self._agents.keys() - here.keys():
            ray.kill(self._agents.pop(node_id))
        for node_id, place in here.items():
            if node_id not in self._agents:
                options = {**_options(f"{AGENT}{node_id}", node_id), "get_if_exists": True}
                actor = ray.remote(NodeActor).options(**options)
                self._agents[node_id] = actor.remote(address, place)


def ray_nodes(nodes: Sequence[dict[str, Any]], resource: str = "GPU") -> list[RayNode]:
    """Live nodes of ray.nodes() with `resource`, in a stable order.

    A node is named after its host, with Ray's id appended if several share it; its labels are those
    given by the user in Ray, as KEY=VALUE.
    """
    alive = [node for node in nodes if node["Alive"] and node["Resources"].get(resource, 0) >= 1]
    hosts = Counter(node["NodeManagerHostname"] for node in alive)
    found = []
    for node in sorted(alive, key=lambda each: (each["NodeManagerHostname"], each["NodeID"])):
        host, node_id = node["NodeManagerHostname"], node["NodeID"]
        name = host if hosts[host] == 1 else f"{host}-{node_id[:8]}"
        given = {
            key: value for key, value in node.get("Labels", {}).items() if "ray.io/" not in key
        }
        labels = tuple(f"{key}={value}" for key, value in sorted(given.items()))
        found.append(RayNode(node_id, name, int(node["Resources"][resource]), labels))
    return found


def up(cluster: str, fleet_file: Path, resource: str) -> str:
    """Start the scheduler of `fleet_file` in the cluster, on this node; return its address.

    UserError if it already runs there or fails to start.
    """
    _join(cluster)
    arguments = ["scheduler", "serve", str(fleet_file.absolute())]
    here = ray.get_runtime_context().get_node_id()
    service = ray.remote(ServiceActor).options(**_options(SERVICE, here))
    try:
        actor = service.remote(arguments, str(Path.cwd()), resource)
    except ValueError:
        raise AddressError(f"{cluster}: {SERVICE} already runs there; --down stops it") from None
    try:
        address: str = _result_of(cluster, actor.address.remote())
        if not address:
            why: str = _result_of(cluster, actor.last_line.remote())
            raise UserError(why.removeprefix("rollmesh: "))
    except UserError:
        ray.kill(actor)
        raise
    return address


def down(cluster: str) -> None:
    """Stop the scheduler and its agents; the journal stays. UserError if there is none."""
    _join(cluster)
    named = ray.util.list_named_actors(all_namespaces=True)
    names = [each["name"] for each in named if each["namespace"] == NAMESPACE]
    ours = [name for name in names if name == SERVICE or name.startswith(AGENT)]
    if not ours:
        raise UserError(f"{cluster}: no {SERVICE} runs there")
    for name in sorted(ours, key=lambda each: each != SERVICE):  # it would restart agents
        ray.kill(ray.get_actor(name, namespace=NAMESPACE))


def agent_states(cluster: str) -> dict[str, tuple[str, str]]:
    """State of the agent on each node of Ray; UserError if there is no scheduler."""
    _join(cluster)
    try:
        actor = ray.get_actor(SERVICE, namespace=NAMESPACE)
    except ValueError:
        raise UserError(f"{cluster}: no {SERVICE} runs there; start it without --status") from None
    states: dict[str, tuple[str, str]] = _result_of(cluster, actor.agents.remote())
    return states


def _result_of(cluster: str, ref: Any) -> Any:
    """Result of an actor call; one-line AddressError if the actor does not answer."""
    try:
        return ray.get(ref, timeout=2 * READY_S)
    except RayError as error:
        line = str(error).strip().partition("\n")[0]
        raise AddressError(f"{cluster}: {SERVICE} does not answer: {line}") from None


def _join(cluster: str) -> None:
    if ray.is_initialized():
        return
    host, _, port = cluster.rpartition(":")
    try:
        if host and port.isdigit():  # Ray would try for minutes
            socket.create_connection((host, int(port)), DIAL_S).close()
        ray.init(cluster, namespace=NAMESPACE, log_to_driver=False)
    except (OSError, OverflowError, ValueError, RuntimeError, RayError) as error:
        line = str(error).strip().partition("\n")[0]
        raise ConfigError(f"{cluster}: no Ray cluster there: {line}") from None


def _options(name: str, node_id: str) -> dict[str, Any]:
    """Options of a detached actor on that node only, restarted when it dies."""
    handed_on = {key: os.path.abspath(os.environ[key]) for key in HANDED_ON if os.environ.get(key)}
    more = {"runtime_env": {"env_vars": handed_on}} if handed_on else {}
    return {
        "name": name,
        "namespace": NAMESPACE,
        "lifetime": "detached",
        "num_cpus": 0,
        "max_restarts": -1,
        "max_concurrency": 4,
        "scheduling_strategy": NodeAffinitySchedulingStrategy(node_id, soft=False),
        **more,
    }
