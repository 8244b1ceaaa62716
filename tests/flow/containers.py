"""Run the services of a compose file as plain processes, each with its own loopback address.

- Container isolation is replaced by rewriting the process's arguments: volumes are folders below
  one folder, names of other services are their addresses, and a service's loopback, wildcard and
  eth0 are its own address (all of 127/8 is this machine, so ports stay as they are).
- A path that a service does not mount is not rewritten, and so does not exist.
"""

import contextlib
import os
import re
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from rollmesh.cli.healthy import HEALTH_VARIABLE, fault, split
from tests.flow.compose import DOCKER, Compose, Service
from tests.flow.dockerfile import Stages
from tests.house.leaks import MARK_VARIABLE

RETRIES = 3
QUIET_PORTS = 10000
LOOK_S = 0.1
"""Interval between health checks of a container that is not healthy yet."""


class Container:
    """One running process of a service."""

    def __init__(self, service: Service, address: str, folder: Path) -> None:
        self.service = service
        self.address = address
        self.folder = folder
        self.environment: dict[str, str] = {}
        self.process: subprocess.Popen[bytes]

    def log(self) -> str:
        """Return its output."""
        return (self.folder / "log").read_text()


class Containers:
    """Start services in the order of their dependencies; stop all that still run."""

    def __init__(self, compose: Compose, folder: Path, images: Mapping[str, Path]) -> None:
        """`images` names the bin folder of each target of the Dockerfile."""
        self.compose = compose
        self.volumes = folder / "volumes"
        self.running: dict[str, list[Container]] = {}
        self._stages = Stages(DOCKER / "Dockerfile")
        self._folder = folder
        self._images = images
        # A network for each run, so that concurrent runs use different addresses.
        self._net = f"127.{100 + os.getpid() % 100}.{os.getpid() // 100 % 250}"
        self._host_port = quiet_port()

    def start(self, *names: str, patience_s: float) -> None:
        """Start services whose dependencies are running, and wait until others may depend on
        them."""
        for name in dict.fromkeys(names):
            self._check_dependencies(self.compose.services[name])
        started = [self._start(name) for name in names]
        deadline_s = time.monotonic() + patience_s
        for container in started:
            self._await(container, deadline_s)

    def _start(self, name: str) -> Container:
        service = self.compose.services[name]
        own = self.running.setdefault(name, [])
        folder = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=self._folder))
        container = Container(service, self.address(name, len(own)), folder)
        own.append(container)
        # The image's user does not exist on this machine.
        command = [part for part in service.command if part != "--user=rollmesh"]
        command_line = [*self._entry(service), *command]
        container.environment = self._environment(container)
        with (folder / "log").open("wb") as log:
            container.process = subprocess.Popen(
                [self._local(part, container) for part in command_line],
                env=container.environment,
                cwd=folder,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return container

    def address(self, name: str, number: int = 0) -> str:
        """Address of the nth container of a service."""
        return f"{self._net}.{10 + 20 * list(self.compose.services).index(name) + number}"

    def is_healthy(self, container: Container) -> bool:
        """Run its image's health check, with as many retries as Docker allows."""
        check = self._health_command(container.service)
        return any(self.execute(container, *check)[0] == 0 for _ in range(RETRIES))

    def execute(self, container: Container, *args: str) -> tuple[int, str]:
        """Run a command in the container; return its exit code and output."""
        done = subprocess.run(
            [self._local(part, container) for part in args],
            env=container.environment,
            cwd=container.folder,
            capture_output=True,
            text=True,
            check=False,
        )
        return done.returncode, done.stdout + done.stderr

    def stop(self, name: str, patience_s: float) -> list[int]:
        """Send SIGTERM to all containers of a service; return their exit codes."""
        containers = self.running.pop(name, [])
        for container in containers:
            container.process.send_signal(signal.SIGTERM)
        return [container.process.wait(patience_s) for container in containers]

    def kill(self) -> None:
        """Kill what still runs."""
        for container in (each for own in self.running.values() for each in own):
            container.process.kill()
            container.process.wait()

    # differences between a container and a process

    def _check_dependencies(self, service: Service) -> None:
        for name, condition in service.depends_on.items():
            [*others] = self.running[name]
            if condition.condition == "service_healthy":
                assert all(map(self.is_healthy, others)), name
            else:
                assert condition.condition == "service_completed_successfully"
                assert {other.process.returncode for other in others} == {0}, name

    def _await(self, container: Container, deadline_s: float) -> None:
        if container.service.healthcheck.disable:
            code = container.process.wait(max(0.0, deadline_s - time.monotonic()))
            assert code == 0, container.log()
            return
        # The image's health check costs a process, so run it only when the address answers.
        where = split(container.environment[HEALTH_VARIABLE])
        while fault(where) or not self.is_healthy(container):
            assert time.monotonic() < deadline_s, container.log()
            try:
                container.process.wait(LOOK_S)
            except subprocess.TimeoutExpired:
                continue
            raise AssertionError(f"ended: {container.log()}")

    def _entry(self, service: Service) -> list[str]:
        if service.entrypoint:
            return service.entrypoint
        return self._stages.last(service.target(), "ENTRYPOINT").argv()

    def _health_command(self, service: Service) -> list[str]:
        assert not service.healthcheck.test
        return self._stages.last(service.target(), "HEALTHCHECK").argv()

    def _environment(self, container: Container) -> dict[str, str]:
        service = container.service
        own = {name: self._local(text, container) for name, text in service.environment.items()}
        mine = {
            "PATH": f"{self._images[service.target()]}:{os.defpath}",
            MARK_VARIABLE: os.environ.get(MARK_VARIABLE, ""),
        }
        return self._stages.environment(service.target()) | mine | own

    def _local(self, text: str, container: Container) -> str:
        """Return `text` with the container's paths and addresses translated to this machine's."""
        if text == "rollmesh":
            return str(self._images[container.service.target()] / text)
        for target, path in self._mounts(container).items():
            text = re.sub(rf"(?<![\w/]){re.escape(target)}(?![\w.-])", path, text)
        return self._with_addresses(text, container)

    def _with_addresses(self, text: str, container: Container) -> str:
        if container.service.network_mode == "host":
            return re.sub(r"(?<=[:=])8265\b", str(self._host_port), text)
        text = re.sub(r"\b(0\.0\.0\.0|127\.0\.0\.1)\b|(?<=//)eth0\b", container.address, text)
        for name in self.compose.services:
            text = re.sub(rf"(?<=//){name}(?=:)", self.address(name), text)
        return text

    def _mounts(self, container: Container) -> dict[str, str]:
        """Paths on this machine, by their paths in the container."""
        paths = {}
        for target, volume in container.service.mounts().items():
            folder = self.volumes / volume.lstrip("/")
            folder.mkdir(parents=True, exist_ok=True)
            paths[target] = str(folder)
        for mount in container.service.files():
            paths[mount.target] = str(container.folder / Path(mount.target).name)
            if not Path(paths[mount.target]).exists():
                self._write_settings(mount.source, Path(paths[mount.target]), container)
        return paths

    def _write_settings(self, source: str, path: Path, container: Container) -> None:
        """Write a mounted settings file with its paths and addresses translated."""
        text = (DOCKER / source).read_text()
        path.touch()
        path.write_text(self._local(text, container))


def quiet_port() -> int:
    """Find a port without a listener, below the range that the kernel assigns
    (ip_local_port_range), so that it stays free until its container binds it.
    """
    for port in range(QUIET_PORTS + os.getpid() % 5000, QUIET_PORTS + 10000):
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    raise AssertionError("no port is free")
