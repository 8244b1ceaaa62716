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
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rollmesh.core.errors import AddressError, ConfigError, UserError
from rollmesh.core.logs import get_logger
from rollmesh.core.process import LAUNCHER_VARIABLE, Ready
from rollmesh.core.secret_file import ADMIN_TOKEN_FILE_VARIABLE
from rollmesh.scheduler.nodes.agent import Agent, serve
from rollmesh.wire.keys import KEYS_VARIABLE

log = get_logger()

NAMESPACE = "rollmesh"
SERVICE = "rollmesh-scheduler"
AGENT = "rollmesh-node-"
"""And the node's id in Ray: a node that comes back has another."""
LOOK_S = 2.0
"""For nodes that are new, and for a service that died."""
READY_S = 120.0
"""In which a service has to serve, and Ray to answer."""
HANDED_ON = (KEYS_VARIABLE, ADMIN_TOKEN_FILE_VARIABLE)
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


class Service:
    """The actor that keeps the service's process and the agents."""

    def __init__(self, words: list[str], resource: str) -> None:
        """`words` are those of `rollmesh` that serve; `resource` counts a node's GPUs."""
        self._words = words
        self._resource = resource
        self._serves = threading.Event()
        self._ready: Ready | None = None
        self._agents: dict[str, Any] = {}
        self._last_line = ""
        # Children die with the thread that started them, so one thread starts all of them.
        self._thread = threading.Thread(target=self._keep, name="keeper", daemon=True)
        self._thread.start()

    def address(self) -> str:
        """Where it serves, '' and why if it does not."""
        self._serves.wait(READY_S)
        return self._ready.address if self._ready else ""

    def complaint(self) -> str:
        """The last line of a process that did not come to serve."""
        return self._last_line

    def pid(self) -> int:
        """Of the process that serves."""
        return self._ready.pid if self._ready else 0

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

    def _keep(self) -> None:
        """Start the process whenever it has ended, and an agent wherever there is none."""
        child: subprocess.Popen[bytes] | None = None
        while True:
            try:
                if child is None or child.poll() is not None:
                    child = self._start()
                if self._ready:
                    self._settle(self._ready.address)
                child.wait(LOOK_S)
            except subprocess.TimeoutExpired:
                pass
            except Exception:  # door: the service lives as long as this thread
                log.exception("keeper.failed")
                time.sleep(LOOK_S)

    def _start(self) -> "subprocess.Popen[bytes]":
        reading, writing = os.pipe()
        argv = [sys.executable, "-m", "rollmesh.cli.main", *self._words]
        child = subprocess.Popen(
            [*argv, "--ready-fd", str(writing)],
            env={**os.environ, LAUNCHER_VARIABLE: str(os.getpid())},
            pass_fds=[writing],
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
        os.close(writing)
        with os.fdopen(reading, "rb") as pipe:
            line = pipe.readline()
        self._ready = msgspec.json.decode(line, type=Ready) if line else None
        assert child.stderr is not None
        if self._ready:
            # What it logs goes where the actor's own goes, for as long as it lives.
            threading.Thread(target=_copy, args=(child.stderr,), daemon=True).start()
        else:
            said = child.stderr.read().decode(errors="replace").strip().splitlines()
            self._last_line = said[-1] if said else f"it ended with code {child.wait()}"
        self._serves.set()
        return child

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
    try:
        actor = ray.remote(Service).options(**_options(SERVICE, here)).remote(words, resource)
    except ValueError:
        raise AddressError(f"{cluster}: {SERVICE} runs there already; --down ends it") from None
    address: str = ray.get(actor.address.remote(), timeout=2 * READY_S)
    if not address:
        why = ray.get(actor.complaint.remote(), timeout=READY_S)
        ray.kill(actor)
        raise UserError(why.removeprefix("rollmesh: "))
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
    told: dict[str, tuple[str, str]] = ray.get(actor.agents.remote(), timeout=2 * READY_S)
    return told


def _join(cluster: str) -> None:
    if ray.is_initialized():
        return
    try:
        ray.init(cluster, namespace=NAMESPACE, log_to_driver=False)
    except (ConnectionError, ValueError) as error:
        line = str(error).strip().partition("\n")[0]
        raise ConfigError(f"{cluster}: no Ray cluster there: {line}") from None


def _options(name: str, node_id: str) -> dict[str, Any]:
    """Of an actor that outlives us, on that node alone, and is started again when it dies."""
    handed_on = {key: os.environ[key] for key in HANDED_ON if key in os.environ}
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


def _copy(stream: Any) -> None:
    for line in stream:
        sys.stderr.buffer.write(line)
        sys.stderr.buffer.flush()
