"""docker/Dockerfile's images built, and docker/compose.yaml run, by podman: `make test-containers`.

Minutes, and gigabytes of images, so no other target runs it.
"""

import itertools
import os
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.containers.mesh import PodmanMesh, await_that, left_behind, missing_programs, taken_ports
from tests.flow.demo import follow
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
