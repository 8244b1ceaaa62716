"""The whole product over two hosts: agents with the stock OpenAI client, under isolation, train to
the last step although one host is cut off and processes of each kind are killed.
"""

import secrets
import threading
from contextlib import closing
from pathlib import Path

import psutil
import pytest

from rollmesh.testing.host_mesh import HostMesh
from rollmesh.testing.network import HostNetwork
from tests.flow.test_run import kept
from tests.flow.trained_mesh import model as model  # the fixture
from tests.hosts.accounts import check_whole, rows, settings_of
from tests.security.test_isolation import mode as mode  # the fixture
from tests.security.test_isolation import processes_named
from tests.security.test_kills_under_isolation import check_exact

HOSTS = {
    "router": "head",
    "trainer": "head",
    "engine-0": "head",
    "worker-0": "head",
    "engine-1": "other",
    "worker-1": "other",
}
CUT_S = 12.0
"""Longer than a silent connection is kept."""
WITHIN_S = 120.0
NUM_MORE = 2


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("mode", ["bwrap"], indirect=True)
def test_agents_on_two_hosts_train_to_the_last_step_through_a_cut_and_kills(
    tmp_path: Path, model: Path, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    mark, scratch = f"agent-{secrets.token_hex(8)}", tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setenv("TMPDIR", str(scratch))
    settings = settings_of(
        model,
        env="tests.security.agent_env:Agent",
        env_settings={"kind": "openai", "mark": mark},
        sampling={"max_tokens": 8},
        worker={"max_rollouts": 4, "isolation": mode},
    )
    settings["trainer"] |= {"samples_per_group": 2, "max_running_groups": 3, "checkpoint_steps": 2}
    with HostNetwork(dict.fromkeys(HOSTS.values())) as network:
        mesh = HostMesh(tmp_path, network, HOSTS, settings)
        with closing(mesh), kept(mesh.run / "weights", mesh.run / "all_weights"):
            mesh.start(*HOSTS)
            mesh.until_steps(2, WITHIN_S)
            network.disconnect("other")
            threading.Event().wait(CUT_S)
            network.heal()
            mesh.until_full_speed(WITHIN_S)
            for role in ("worker-1", "engine-0"):
                mesh.kill(role)
                mesh.start(role)
                mesh.until_full_speed(WITHIN_S)
            num_steps = mesh.finish(NUM_MORE, WITHIN_S)
            pids = [pid for host in network.hosts.values() for pid in host.pids()]
        check_whole(mesh.run, num_steps)
        outcomes = {each["outcome"] for each in rows(mesh.run / "trajectories.jsonl")}
        assert outcomes == {"completed"}
        check_exact(mesh.run, mesh.run / "all_weights")
        assert [pid for pid in pids if psutil.pid_exists(pid)] == []
        assert processes_named(mark) == []
        assert list(scratch.glob("rollmesh-*")) == []
