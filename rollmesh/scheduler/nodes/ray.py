"""The scheduler in a Ray cluster: the service as a detached named actor, an agent on each node.

    driver, gone at once             a node that the driver stands on
      up() ---------------> Service, an actor
                              keeps `rollmesh scheduler serve` alive, a process of its own
                              looks at ray.nodes(), starts
                                NodeAgent, an actor on each node, which joins and beats

Owns the actors' names. Invariants: Ray carries no ask for GPUs: hooks and coordinators dial the
service's own address, so that no limit of an actor can block one; an actor whose process dies is
started again by Ray, and its service rises from the journal, at the same address; a node that
leaves takes its agent with it, and is down by the scheduler's own clock; a scheduler is never
started twice under one name. Driven by `rollmesh scheduler ray`.
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
from rollmesh.scheduler.nodes.agent import Agent, serve
from rollmesh.scheduler.nodes.keeper import Keeper
from rollmesh.wire.keys import KEYS_VARIABLE, SCHEDULER_KEYS_VARIABLE

NAMESPACE = "rollmesh"
SERVICE = "rollmesh-scheduler"
AGENT = "rollmesh-node-"
"""And the node's id in Ray: a node that comes back has another."""
READY_S = 120.0
"""In which a service has to serve, and Ray to answer."""
DIAL_S = 10.0
"""A cluster has so long to be there."""
HANDED_ON = (KEYS_VARIABLE, SCHEDULER_KEYS_VARIABLE, ADMIN_TOKEN_FILE_VARIABLE)
"""Environment: names of files that have to be on each node."""


class Place(msgspec.Struct, frozen=True):
    """A node of the cluster, as the scheduler is told of it."""

    node_id: str
    """Ray's."""
    name: str
    num_gpus: int
    labels: tuple[str, ...]


class NodeAgent:
    """An actor on a node, which joins it and beats."""

    def __init__(self, scheduler: str, place: Place) -> None:
        self._agent = Agent(place.name, place.num_gpus, place.labels)
        self._why = ""
        self._thread = threading.Thread(
            target=self._serve, args=(scheduler,), name="beats", daemon=True
        )
        self._thread.start()

    def standing(self) -> tuple[str, str]:
        """Its phase, and why it has ended."""
        return self._agent.phase.value, self._why

    def _serve(self, scheduler: str) -> None:
        try:
            serve(scheduler, self._agent, threading.Event())
        except UserError as error:
            self._why = str(error)
        except Exception as error:  # noqa: BLE001 - door: who asks how it stands is told
            self._why = f"it has ended: {error!r}"


class Service:
    """The actor that keeps the service's process and the agents."""

    def __init__(self, words: list[str], folder: str, resource: str) -> None:
        """`words` are those of `rollmesh` that serve, in `folder`; `resource` counts GPUs."""
        self._resource = resource
        self._agents: dict[str, Any] = {}
        argv = [sys.executable, "-m", "rollmesh.cli.main", *words]
        self._keeper = Keeper(argv, Path(folder), self._settle)
        self._thread = threading.Thread(
            target=self._keeper.run, args=(threading.Event(),), name="keeper", daemon=True
        )
        self._thread.start()

    def address(self) -> str:
        """Where it serves, '' and why if it does not."""
        self._keeper.serves.wait(READY_S)
        ready = self._keeper.ready
        return ready.address if ready else ""

    def complaint(self) -> str:
        """The last line of a process that did not come to serve."""
        return self._keeper.complaint

    def pid(self) -> int:
        """Of the process that serves."""
        ready = self._keeper.ready
        return ready.pid if ready else 0

    def agents(self) -> dict[str, tuple[str, str]]:
        """By node, how its agent stands."""
        refs = {name: agent.standing.remote() for name, agent in list(self._agents.items())}
        told: dict[str, tuple[str, str]] = {}
        for name, ref in refs.items():
            try:
                told[name] = ray.get(ref, timeout=READY_S)
            except RayError as error:
                told[name] = ("gone", str(error).splitlines()[0])
        return told

    def _settle(self, address: str) -> None:
        here = {place.node_id: place for place in places(ray.nodes(), self._resource)}
        for node_id in self._agents.keys() - here.keys():
            ray.kill(self._agents.pop(node_id))
        for node_id, place in here.items():
            if node_id not in self._agents:
                options = {**_options(f"{AGENT}{node_id}", node_id), "get_if_exists": True}
                actor = ray.remote(NodeAgent).options(**options)
                self._agents[node_id] = actor.remote(address, place)


def places(nodes: Sequence[dict[str, Any]], resource: str = "GPU") -> list[Place]:
    """Of ray.nodes(), those that live and have `resource`, in an order that stays.

    A node has its host's name, with Ray's id behind it where several have the same; its labels are
    those that somebody gave it in Ray, as KEY=VALUE.
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
        found.append(Place(node_id, name, int(node["Resources"][resource]), labels))
    return found


def up(cluster: str, fleet_file: Path, resource: str) -> str:
    """Start the scheduler of `fleet_file` in the cluster, on this node; where it serves.

    UserError if it runs there already, or its process does not come to serve.
    """
    _join(cluster)
    words = ["scheduler", "serve", str(fleet_file.absolute())]
    here = ray.get_runtime_context().get_node_id()
    service = ray.remote(Service).options(**_options(SERVICE, here))
    try:
        actor = service.remote(words, str(Path.cwd()), resource)
    except ValueError:
        raise AddressError(f"{cluster}: {SERVICE} runs there already; --down ends it") from None
    try:
        address: str = _heard(cluster, actor.address.remote())
        if not address:
            why: str = _heard(cluster, actor.complaint.remote())
            raise UserError(why.removeprefix("rollmesh: "))
    except UserError:
        ray.kill(actor)
        raise
    return address


def down(cluster: str) -> None:
    """End the scheduler and its agents; its journal stays. UserError if there is none."""
    _join(cluster)
    named = ray.util.list_named_actors(all_namespaces=True)
    names = [each["name"] for each in named if each["namespace"] == NAMESPACE]
    ours = [name for name in names if name == SERVICE or name.startswith(AGENT)]
    if not ours:
        raise UserError(f"{cluster}: no {SERVICE} runs there")
    for name in sorted(ours, key=lambda each: each != SERVICE):  # it would start agents again
        ray.kill(ray.get_actor(name, namespace=NAMESPACE))


def standing(cluster: str) -> dict[str, tuple[str, str]]:
    """By node of Ray, how its agent stands; UserError if there is no scheduler."""
    _join(cluster)
    try:
        actor = ray.get_actor(SERVICE, namespace=NAMESPACE)
    except ValueError:
        raise UserError(f"{cluster}: no {SERVICE} runs there; start it without --status") from None
    told: dict[str, tuple[str, str]] = _heard(cluster, actor.agents.remote())
    return told


def _heard(cluster: str, ref: Any) -> Any:
    """What an actor answers; AddressError in one line where it does not."""
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
    """Of an actor that outlives us, on that node alone, and is started again when it dies."""
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
