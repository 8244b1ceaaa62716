"""The worker's container of docker/compose.yaml, run by podman: rights, programs, end."""

import functools
import operator
import os
import re
import secrets
from collections.abc import Iterator
from pathlib import Path

import msgspec
import psutil
import pytest

from rollmesh.cli.main import main
from rollmesh.core.config import WorkerConfig
from rollmesh.core.process import INTERRUPTED, OK
from rollmesh.core.types import Outcome
from rollmesh.serve.client.arrivals import Finished
from rollmesh.wire.keys import KEYS_VARIABLE, read_keys
from tests.flow.compose import read_compose
from tests.flow.worker_mesh import Mesh, ask, open_mesh, take
from tests.ports import free_ports
from tests.security.podman import PYTHON, ServiceContainer, make_image, why_no_containers
from tests.security.test_isolation import ATTACK, ENGINE_KEY, ENV

WORKER = read_compose("compose.yaml").services["worker"]
USER = 10001
"""`rollmesh` of the Dockerfile."""
SETUID_AND_SETGID = 1 << 7 | 1 << 6


@pytest.fixture(scope="module")
def _image() -> None:
    if os.geteuid() != 0:
        pytest.skip("only root may start containers with capabilities")
    if why := why_no_containers():
        pytest.skip(why)
    make_image()


@pytest.fixture(params=[USER, 0])
def worker_keys(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """The volume `worker-keys`, made as the service `keys` makes it, or with a file of root."""
    folder = tmp_path / "worker-keys"
    folder.mkdir()
    args = ["keys", "--export", f"worker={folder}/worker.json", str(tmp_path / "keys")]
    assert main(args) == OK
    (folder / "engine-key").touch(mode=0o600)
    (folder / "engine-key").write_text(ENGINE_KEY)
    for path in folder.iterdir():
        os.chown(path, request.param, request.param)
    monkeypatch.setenv("ROLLMESH_ENGINE_KEY", ENGINE_KEY)
    monkeypatch.setenv(KEYS_VARIABLE, str(tmp_path / "keys"))
    return folder


@pytest.fixture
def started() -> Iterator[list[ServiceContainer]]:
    """Containers that are removed after the test; pytest shows their logs if it fails."""
    containers: list[ServiceContainer] = []
    yield containers
    for each in containers:
        print(each.logs())  # noqa: T201 - pytest shows it if the test fails
        each.remove()


def rights_of(pid: int) -> tuple[set[int], int]:
    """User ids of a process, and the capabilities that it has or could get by any means."""
    text = Path(f"/proc/{pid}/status").read_text()
    assert "\nNoNewPrivs:\t1\n" in text
    masks = dict(re.findall(r"^Cap(\w+):\t(\w+)$", text, re.MULTILINE))
    assert int(masks["Bnd"], 16) == SETUID_AND_SETGID
    uids = re.findall(r"^Uid:\t(.*)$", text, re.MULTILINE)[0].split()
    held = [int(masks[each], 16) for each in ("Eff", "Prm", "Inh", "Amb")]
    return set(map(int, uids)), functools.reduce(operator.or_, held)


def attacked_worker(mesh: Mesh, worker_keys: Path) -> tuple[ServiceContainer, str]:
    """The container of a worker whose agents attack it, and the name of its environment."""
    folder = mesh.folder
    facts = {
        "keys": "/worker-keys/worker.json",
        "folder": "/proc/1/root",
        "engine": mesh.engine.url,
        "router": mesh.router.ready.address,
        "token": "no token is in this container",
        "leftover": "left-behind-by-an-agent",
        "is_in_namespace": False,
    }
    env = mesh.write_env("attack", ENV.format(facts=facts, python=PYTHON, attack=ATTACK))
    (folder / "envs").mkdir()
    (folder / "attack.py").rename(folder / "envs" / "attack.py")
    [port] = free_ports(1)
    address = f"127.0.0.1:{port}"
    settings = {"env": env, "env_settings": {}, "model": {"path": "/models/policy"}}
    settings["interception"] = {"bind": address}
    (folder / "mesh.json").write_bytes(msgspec.json.encode(settings))
    os.chmod(folder / "mesh.json", 0o644)
    router = mesh.router.ready.address
    command = [part.replace("tcp://router:5555", router) for part in WORKER.command]
    command = [part.replace("mesh.toml", "mesh.json") for part in command]
    environment = {
        **WORKER.environment,
        "ROLLMESH_HEALTH": f"http://{address}/healthz",
        "ROLLMESH_ENGINE_KEY_FILE": "/worker-keys/engine-key",
    }
    service = msgspec.structs.replace(WORKER, mem_limit="8g", environment=environment)
    mounts = {
        worker_keys: "/worker-keys",
        folder / "model": "/models/policy",
        folder / "mesh.json": "/etc/rollmesh/mesh.json",
        folder / "envs": "/opt/envs",
    }
    name = f"rollmesh-test-{secrets.token_hex(4)}"
    return ServiceContainer(name, service, command, mounts, folder / "container"), env


@pytest.mark.slow
@pytest.mark.usefixtures("_image")
async def test_a_worker_s_container_keeps_no_rights_and_its_agents_reach_nothing(
    tmp_path: Path, worker_keys: Path, started: list[ServiceContainer]
) -> None:
    async with open_mesh(tmp_path) as mesh:
        mesh.engine.api_key = ENGINE_KEY
        container, env = attacked_worker(mesh, worker_keys)
        started.append(container)
        container.start()
        client = mesh.client(read_keys())
        ask(client, num_samples=2, env=env)
        [arrival] = await take(client)
        assert isinstance(arrival, Finished), (arrival, container.logs())
        for rollout in arrival.record.rollouts:
            assert (rollout.outcome, rollout.error) == (Outcome.COMPLETED, "")
            assert rollout.metrics.pop("uid") >= WorkerConfig().isolation_first_uid
            # Programs share the worker's network: the router, and metrics, which need no token.
            expected = {"calls": 200, "answer": 0, "router": 1.0, "metrics": 1.0}
            assert (rollout.reward, rollout.metrics) == (0.0, expected)
        container.run("rollmesh", "healthy")
        with pytest.raises(AssertionError, match="Read-only file system"):
            container.run("touch", "/etc/rollmesh/made")
        pids = container.pids()
        rights = [rights_of(pid) for pid in pids]
        assert rights[0] == ({USER}, 0), "the worker, which is the container's first process"
        assert [each for each in rights[1:] if each[1]] == [({0}, SETUID_AND_SETGID)], "the spawner"
        assert container.stop() in (OK, INTERRUPTED), container.logs()
        assert [pid for pid in pids if psutil.pid_exists(pid)] == []
