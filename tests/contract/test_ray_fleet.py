"""The scheduler in a Ray cluster of several nodes: it restarts, and nodes join and leave."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rollmesh.core.errors import AddressError, UserError
from rollmesh.core.ids import new_id
from rollmesh.scheduler.admission.transport import ask_scheduler
from rollmesh.scheduler.planning.state import NodePhase
from rollmesh.scheduler.service.explain import FleetExplanation, NodeView
from rollmesh.wire.scheduling import ReadScheduler
from tests.contract.ray_token import HAS_RAY, RAY_TOKEN, ray_environment
from tests.ports import free_ports

PATIENCE_S = 110.0
LOOK_S = 0.2
SLOT = "slot"
"""The resource of a node that replaces GPUs."""
STORE_BYTES = 100 * 2**20


class Fleet:
    """A cluster of a head and two nodes, and the scheduler in it."""

    def __init__(self, folder: Path) -> None:
        from ray.cluster_utils import Cluster  # noqa: PLC0415 - is not installed everywhere

        self.cluster: Any = Cluster(initialize_head=True, head_node_args=_node(0))
        self.nodes = [self.cluster.add_node(**_node(num)) for num in (4, 2)]
        ports = free_ports(2)
        self.file = folder / "scheduler.toml"
        self.file.write_text(
            f'bind = "tcp://127.0.0.1:{ports[0]}"\n'
            f'http_bind = "127.0.0.1:{ports[1]}"\n'
            'journal = "journal"\n'
            "[service]\nnode_grace_s = 3\n"
        )
        self.address = f"tcp://127.0.0.1:{ports[0]}"

    def seen(self) -> FleetExplanation:
        answer = ask_scheduler(self.address, ReadScheduler(new_id("read")), patience_s=PATIENCE_S)
        return msgspec.json.decode(answer.body, type=FleetExplanation)

    def sizes(self, phase: NodePhase = NodePhase.UP) -> list[int]:
        return sorted(len(node.gpus) for node in self.seen().nodes if node.phase is phase)

    def gpus(self) -> dict[str, NodeView]:
        return {node.name: node for node in self.seen().nodes}

    def until(self, condition: Callable[[], object]) -> None:
        give_up_s = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < give_up_s
            threading.Event().wait(LOOK_S)

    def actor(self) -> Any:
        import ray  # noqa: PLC0415 - as above

        from rollmesh.scheduler.nodes.ray import NAMESPACE, SERVICE  # noqa: PLC0415 - as above

        return ray.get_actor(SERVICE, namespace=NAMESPACE)

    def service_pid(self) -> int:
        import ray  # noqa: PLC0415 - as above

        return int(ray.get(self.actor().pid.remote(), timeout=PATIENCE_S))


def _node(num_slots: int) -> dict[str, Any]:
    return {
        "num_cpus": 1,
        "resources": {SLOT: num_slots} if num_slots else {},
        "object_store_memory": STORE_BYTES,
        "include_dashboard": False,
    }


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with ray_environment() as patch:
        import ray  # noqa: PLC0415 - as above

        from rollmesh.scheduler.nodes.ray import up  # noqa: PLC0415 - as above

        folder = tmp_path_factory.mktemp("fleet")
        patch.chdir(folder)
        fleet = Fleet(folder)
        try:
            assert up(fleet.cluster.address, fleet.file, SLOT) == fleet.address
            yield fleet
        finally:
            ray.shutdown()
            fleet.cluster.shutdown()


def test_each_node_with_gpus_has_an_agent(fleet: Fleet) -> None:
    from rollmesh.scheduler.nodes.ray import agent_states  # noqa: PLC0415 - as above

    fleet.until(lambda: fleet.sizes() == [2, 4])
    states = agent_states(fleet.cluster.address)
    assert sorted(states.values()) == [("joined", ""), ("joined", "")]


def test_a_missing_cluster_is_a_one_line_error() -> None:
    """Run in another process, since Ray is already initialized in this one."""
    if not HAS_RAY:
        pytest.skip("Ray is not installed: make test-ray")
    (port,) = free_ports(1)
    args = ["scheduler", "ray", "--status", "--cluster", f"127.0.0.1:{port}"]
    ended = subprocess.run(
        [sys.executable, "-m", "rollmesh.cli.main", *args],
        env={**os.environ, **RAY_TOKEN},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert ended.returncode == 2, ended.stderr
    assert ended.stderr.splitlines()[-1].startswith(f"rollmesh: 127.0.0.1:{port}: no Ray cluster")
    assert "Traceback" not in ended.stderr


def test_a_second_scheduler_is_refused(fleet: Fleet) -> None:
    from rollmesh.scheduler.nodes.ray import up  # noqa: PLC0415 - as above

    with pytest.raises(AddressError, match="already runs there"):
        up(fleet.cluster.address, fleet.file, SLOT)


@pytest.mark.parametrize("victim", ["service", "actor"])
def test_killed_actors_restart_at_the_same_address_with_the_same_gpus(
    victim: str, fleet: Fleet
) -> None:
    import ray  # noqa: PLC0415 - as above

    fleet.until(lambda: fleet.sizes() == [2, 4])
    before, pid = fleet.seen(), fleet.service_pid()
    if victim == "service":
        os.kill(pid, signal.SIGKILL)
    else:
        ray.kill(fleet.actor(), no_restart=False)
    fleet.until(lambda: fleet.seen().scheduler != before.scheduler)
    fleet.until(lambda: fleet.sizes() == [2, 4])
    assert fleet.seen().nodes == before.nodes
    assert (
        fleet.file.parent / "journal"
    ).is_dir()  # the address of the start, used from another folder


def test_a_node_that_leaves_is_down_and_another_joins_with_its_own_gpus(fleet: Fleet) -> None:
    fleet.until(lambda: fleet.sizes() == [2, 4])
    before = fleet.gpus()
    fleet.cluster.remove_node(fleet.nodes.pop())
    fleet.until(lambda: fleet.sizes(NodePhase.DOWN) == [2])
    fleet.cluster.add_node(**_node(3))
    fleet.until(lambda: fleet.sizes() == [3, 4])
    (new,) = [node for name, node in fleet.gpus().items() if name not in before]
    assert new.gpus == (6, 7, 8)


def test_the_scheduler_ends_with_its_agents(fleet: Fleet) -> None:
    from rollmesh.scheduler.nodes.ray import agent_states, down  # noqa: PLC0415 - as above

    fleet.until(fleet.sizes)
    down(fleet.cluster.address)
    with pytest.raises(AddressError, match="no answer"):
        ask_scheduler(fleet.address, ReadScheduler("k"), patience_s=3.0)
    with pytest.raises(UserError, match="no rollmesh-scheduler runs there"):
        agent_states(fleet.cluster.address)
    with pytest.raises(UserError, match="no rollmesh-scheduler runs there"):
        down(fleet.cluster.address)


@pytest.mark.usefixtures("fleet")
def test_placements_are_on_live_nodes_with_gpus() -> None:
    from rollmesh.scheduler.nodes.ray import RayNode, ray_nodes  # noqa: PLC0415 - as above

    def row(node_id: str, host: str, gpus: float, *, alive: bool = True) -> dict[str, Any]:
        labels = {"ray.io/node-id": node_id, "kind": "h200"}
        resources = {"GPU": gpus, "CPU": 8.0} if gpus else {"CPU": 8.0}
        return {
            "NodeID": node_id,
            "NodeManagerHostname": host,
            "Alive": alive,
            "Resources": resources,
            "Labels": labels,
        }

    rows = [
        row("bb" * 8, "twin", 8.0),
        row("aa" * 8, "twin", 4.0),
        row("cc" * 8, "alone", 2.0),
        row("dd" * 8, "head", 0.0),
        row("ee" * 8, "gone", 8.0, alive=False),
    ]
    assert ray_nodes(rows) == [
        RayNode("cc" * 8, "alone", 2, ("kind=h200",)),
        RayNode("aa" * 8, "twin-aaaaaaaa", 4, ("kind=h200",)),
        RayNode("bb" * 8, "twin-bbbbbbbb", 8, ("kind=h200",)),
    ]
