"""A mesh whose processes run on different hosts, with keys."""

from contextlib import closing
from pathlib import Path

import pytest

from rollmesh.testing.host_mesh import HostMesh
from rollmesh.testing.network import HostNetwork
from rollmesh.testing.run_history import why_not_whole
from tests.flow.trained_mesh import model as model  # the fixture
from tests.hosts.accounts import check_whole, settings_of

HOSTS = {
    "router": "head",
    "trainer": "head",
    "engine-0": "engine",
    "worker-0": "one",
    "worker-1": "two",
}
TRAINS_WITHIN_S = 100.0


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_mesh_over_four_hosts_trains(tmp_path: Path, model: Path) -> None:
    with HostNetwork(dict.fromkeys(HOSTS.values())) as network:
        mesh = HostMesh(tmp_path, network, HOSTS, settings_of(model, num_steps=3))
        with closing(mesh):
            mesh.start(*HOSTS)
            code = mesh.wait("trainer", TRAINS_WITHIN_S)
            assert code == 0, mesh.output("trainer")
    check_whole(mesh.run, 3)
    path = mesh.run / "trajectories.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([lines[0], *lines[:-1]]))
    faults = [fault.partition(":")[0] for fault in why_not_whole(mesh.run, 4)]
    assert faults == [
        "steps not taken once",
        "rollouts recorded again",
        "rollouts without a record",
        "ended as done after 3 steps",
    ]
