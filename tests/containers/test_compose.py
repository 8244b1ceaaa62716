"""docker/Dockerfile's images built, and docker/compose.yaml run, by podman: `make test-containers`.

Minutes, and gigabytes of images, so no other target runs it.
"""

import itertools
import os
import re
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import httpx
import msgspec
import openai
import pytest

from rollmesh.core.process import INTERRUPTED
from tests.containers.mesh import PodmanMesh, await_that, left_behind, missing_programs, taken_ports
from tests.flow.compose import DOCKER
from tests.flow.demo import follow, read
from tests.security.podman import why_no_containers

pytestmark = [pytest.mark.containers, pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module", autouse=True)
def _images(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Build both images; podman's and pip's caches make a second build seconds."""
    if os.geteuid() != 0:
        pytest.skip("only root may start containers with capabilities")
    if missing := missing_programs():
        pytest.skip(f"{missing} is not installed")
    if why := why_no_containers():
        pytest.skip(why)
    mesh = PodmanMesh(tmp_path_factory.mktemp("build"))
    mesh.remove()
    for target in ("slim", "full"):
        mesh.build(target)


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[PodmanMesh]:
    """The services of compose.yaml, not started; removed after the test."""
    assert not taken_ports(), "another process has the ports of docker/compose.yaml"
    mesh = PodmanMesh(tmp_path)
    yield mesh
    print(mesh.logs())  # noqa: T201 - pytest shows it if the test fails
    mesh.remove()


def await_healthy(mesh: PodmanMesh, name: str) -> None:
    await_that(lambda: mesh.is_healthy(name), f"{name} is healthy", 120.0)


def test_the_images_have_the_pinned_versions(tmp_path: Path) -> None:
    mesh = PodmanMesh(tmp_path)
    for target, package in (("slim", "pyzmq"), ("full", "torch")):
        code = f"from importlib.metadata import version; print(version({package!r}))"
        confined = ("--rm", "--read-only", "--cap-drop=ALL", "--network=none")
        image = f"localhost/rollmesh:{target}"
        found = mesh.podman("run", *confined, "--entrypoint=python", image, "-c", code)
        assert found.splitlines()[-1] == version(package)


def test_the_mesh_of_the_compose_file_trains_and_leaves_nothing(mesh: PodmanMesh) -> None:
    mesh.compose("up", "--no-build", "--detach")
    for name in ("keys_1", "make-model_1"):
        # podman has started both again, because the others require them: they keep what exists.
        assert mesh.podman("wait", mesh.name(name)).strip() == "0"
    run = mesh.volume("runs") / "mesh"
    rows = list(itertools.islice(follow(run / "metrics.jsonl"), 11))
    assert [row["step"] for row in rows] == list(range(-1, 10))
    for name in ("engine_1", "router_1", "worker_1", "trainer_1"):
        await_healthy(mesh, name)
    mesh.compose("down", "--volumes")
    assert not any(left_behind().values()), left_behind()


@pytest.fixture
def long_mesh(tmp_path: Path) -> Iterator[PodmanMesh]:
    """The same with a run that outlasts the test."""
    assert not taken_ports(), "another process has the ports of docker/compose.yaml"
    text = re.sub("num_steps = .*", "num_steps = 10000", (DOCKER / "mesh.toml").read_text())
    settings = tmp_path / "mesh.toml"
    settings.write_text(re.sub("eval_rollouts = .*", "eval_rollouts = 8", text))
    mesh = PodmanMesh(tmp_path, settings)
    yield mesh
    print(mesh.logs())  # noqa: T201 - pytest shows it if the test fails
    mesh.remove()


def test_the_mesh_is_operated_as_its_page_says(long_mesh: PodmanMesh) -> None:
    mesh = long_mesh
    start(mesh)
    run = mesh.volume("runs") / "mesh"
    await_step(run, 10)

    mesh.up("--scale=worker=4", "worker")
    await_that(lambda: len(workers(mesh)) == 4, "four workers", 180.0)

    killed = mesh.podman("inspect", "--format={{.Config.Hostname}}", mesh.name("worker_2")).strip()
    mesh.podman("kill", mesh.name("worker_2"))
    await_that(lambda: not any(w.startswith(killed) for w in workers(mesh)), "it is lost", 180.0)
    mesh.up("--scale=worker=4", "worker")
    await_that(lambda: len(workers(mesh)) == 4, "the killed one is back", 180.0)

    drained = workers(mesh)[0]
    mesh.run("router", "rollmesh", "drain", drained, "--router", "tcp://127.0.0.1:5555")
    await_that(lambda: drained not in workers(mesh), "it is drained", 180.0)
    await_that(lambda: len(workers(mesh)) == 4, "its container has started again", 180.0)

    page = httpx.get("http://127.0.0.1:8265/")
    assert (page.status_code, page.headers["content-type"].partition(";")[0]) == (200, "text/html")
    assert chat_by_gateway(mesh)

    mesh.compose("stop", "trainer")
    assert mesh.podman("wait", mesh.name("trainer_1")).strip() == str(INTERRUPTED)
    done = last_step(run)
    command = ["train", "--config=/etc/rollmesh/mesh.toml", "--router=tcp://router:5555"]
    command += ["--status=http://router:8080", "--resume", "--set", "trainer.num_steps=20000"]
    mesh.compose("run", "--no-deps", "--detach", "-T", "trainer", *command)
    await_step(run, done + 3)
    [resumed] = mesh.podman("ps", "--filter=name=trainer_tmp", "--format={{.Names}}").split()
    mesh.podman("stop", resumed)
    summary = read(run / "summary.json")
    assert (summary["num_lost"], summary["num_steps"] >= done) == (0, True)

    mesh.compose("--profile=gateway", "down", "--volumes", "--remove-orphans")
    assert not any(left_behind().values()), left_behind()


def start(mesh: PodmanMesh) -> None:
    """Start the services in the order in which Docker would, by their health."""
    mesh.up("keys", "make-model")
    for name in ("keys_1", "make-model_1"):
        assert mesh.podman("wait", mesh.name(name)).strip() == "0"
    mesh.up("engine", "router")
    for name in ("engine_1", "router_1"):
        await_healthy(mesh, name)
    mesh.up("--scale=worker=2", "worker", "trainer")
    await_healthy(mesh, "trainer_1")
    mesh.up("dashboard")
    await_healthy(mesh, "dashboard_1")


def workers(mesh: PodmanMesh) -> list[str]:
    """Ids of live workers."""
    command = ["rollmesh", "status", "--json", "--router", "http://127.0.0.1:8080"]
    found = msgspec.json.decode(mesh.run("router", *command))["router"]["workers"]
    return [each["worker_id"] for each in found if each["state"] == "live"]


def await_step(run: Path, step: int) -> None:
    next(row for row in follow(run / "metrics.jsonl") if row["step"] >= step)


def last_step(run: Path) -> int:
    lines = (run / "metrics.jsonl").read_bytes().splitlines()
    return int(msgspec.json.decode(lines[-1])["step"])


def chat_by_gateway(mesh: PodmanMesh) -> str:
    """Start the gateway; return the text that the engine answers to a session's first message."""
    mesh.compose(
        "--profile=gateway", "up", "--no-build", "--detach", "--no-deps", "--no-recreate", "gateway"
    )
    await_healthy(mesh, "gateway_1")
    token = (mesh.volume("gateway") / "admin.token").read_text().strip()
    address = "http://127.0.0.1:8100"
    refused = httpx.post(f"{address}/admin/sessions", json={})
    assert refused.status_code == 401
    headers = {"Authorization": f"Bearer {token}"}
    opened = httpx.post(f"{address}/admin/sessions", json={}, headers=headers).json()
    with openai.OpenAI(base_url=f"{address}/v1", api_key=opened["api_key"]) as client:
        messages = [{"role": "user", "content": "50"}]
        answer = client.chat.completions.create(model="policy", messages=messages, max_tokens=8)  # type: ignore[arg-type]
    text: str = answer.choices[0].finish_reason
    return text
