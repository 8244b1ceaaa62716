"""docker/compose.yaml in containers of podman, by podman-compose.

- What podman needs on this machine comes from outside: limits and runtime from a containers.conf,
  pip's configuration as mounts of the build, and an override file of the test. The files in docker/
  stay as they are.
- The project has a name of its own, so its volumes are not those of a user's mesh. Images have the
  names of the compose file; ports do too, so the test fails if they are taken.
"""

import contextlib
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from urllib.parse import urlsplit

import psutil

from tests.flow.compose import DOCKER, read_compose
from tests.security.podman import BASE, BUILD_S, podman

PROJECT = "rollmesh-test"
LABEL = f"label=io.podman.compose.project={PROJECT}"
PORTS = (8080, 8100, 8265)
"""Ports of this machine that docker/compose.yaml uses."""
COMMAND_S = 150.0
"""Timeout of one podman-compose command; a stopped trainer has 30 s for its checkpoint."""
CONTAINERS_CONF = """
[containers]
default_ulimits = ["nofile=1024:1024", "nproc=1024:1024"]
[engine]
runtime = "runc"
init_path = "{init}"
[network]
network_backend = "netavark"
"""


def missing_programs() -> str:
    """Programs that the containers need and this machine lacks, by name, or ''."""
    programs = {
        "podman": "podman",
        "runc": "runc",
        "mmdebstrap": "mmdebstrap",
        "iptables": "/usr/sbin/iptables",
        "netavark": "/usr/lib/podman/netavark",
        "aardvark-dns": "/usr/lib/podman/aardvark-dns",
        "catatonit": "catatonit",
    }
    return ", ".join(name for name, path in programs.items() if shutil.which(path) is None)


class PodmanMesh:
    """The services of docker/compose.yaml; commands are those of docs/howto/containers.md."""

    def __init__(self, folder: Path, settings: Path | None = None) -> None:
        """`settings` replaces docker/mesh.toml."""
        self._folder = folder
        conf = folder / "containers.conf"
        conf.write_text(CONTAINERS_CONF.format(init=shutil.which("catatonit")))
        self._variables = {
            **os.environ,
            "CONTAINERS_CONF": str(conf),
            "BUILDAH_ISOLATION": "chroot",
            "BUILDAH_FORMAT": "docker",
            **({"MESH": str(settings)} if settings else {}),
        }
        # podman before 4.4 refuses --health-startup-interval.
        override = folder / "override.yaml"
        services = read_compose("compose.yaml").services.items()
        checked = [name for name, service in services if not service.healthcheck.disable]
        lines = [f"  {name}: {{healthcheck: {{start_interval: !reset null}}}}" for name in checked]
        override.write_text("\n".join(["services:", *lines, ""]))
        self._files = ("-f", str(DOCKER / "compose.yaml"), "-f", str(override))

    def compose(self, *args: str, timeout_s: float = COMMAND_S) -> str:
        """Run `podman-compose ARGS`; return its output. AssertionError if it fails."""
        program = str(Path(sys.executable).with_name("podman-compose"))
        options = ("--in-pod=false", "-p", PROJECT, *self._files)
        return self._called([program, *options, *args], timeout_s)

    def podman(self, *args: str, timeout_s: float = COMMAND_S) -> str:
        return self._called(["podman", *args], timeout_s)

    def up(self, *args: str) -> None:
        """Start services without those that they depend on.

        podman-compose turns `depends_on` into podman's `--requires`, and podman does not restart a
        container that requires one that has ended, as `keys` and `make-model` have.
        """
        self.compose("up", "--no-build", "--detach", "--no-deps", "--no-recreate", *args)

    def run(self, service: str, *args: str) -> str:
        """Standard output of a command in a running container of the service."""
        return podman("exec", self.name(f"{service}_1"), *args)

    def build(self, target: str) -> None:
        """Build an image of the Dockerfile as `compose build` would."""
        argv = ["podman", "build", "-f", str(DOCKER / "Dockerfile"), "--target", target]
        argv += ["-t", f"localhost/rollmesh:{target}", f"--build-arg=BASE={BASE}"]
        if index := os.environ.get("PIP_EXTRA_INDEX_URL"):
            argv.append(f"--build-arg=PIP_EXTRA_INDEX_URL={index}")
        argv += [f"--volume={path}:{target}:ro" for path, target in self._pip_mounts().items()]
        self._called(["nice", *argv, str(DOCKER.parent)], 6 * BUILD_S)

    def state(self, container: str) -> str:
        """State of a container of a service, as `running`; `worker_2` is the service's second."""
        return podman("inspect", "--format={{.State.Status}}", self.name(container))

    def name(self, container: str) -> str:
        return f"{PROJECT}_{container}"

    def is_healthy(self, container: str) -> bool:
        """Run its image's health check, which podman without systemd never does."""
        with contextlib.suppress(AssertionError):
            self.podman("healthcheck", "run", self.name(container))
            return True
        return False

    def volume(self, name: str) -> Path:
        """The folder on this machine that a volume is."""
        return Path(podman("volume", "inspect", "--format={{.Mountpoint}}", f"{PROJECT}_{name}"))

    def logs(self) -> str:
        """The last lines of each container's output."""
        names = podman("ps", "--all", f"--filter={LABEL}", "--format={{.Names}}").split()
        argv = ["podman", "logs", "--tail=30"]
        parts = []
        for name in names:
            done = subprocess.run([*argv, name], capture_output=True, text=True, check=False)
            parts.append(f"== {name}\n{done.stdout}{done.stderr}")
        return "\n".join(parts)

    def remove(self) -> None:
        """Remove containers, volumes and networks of the project, if any."""
        # Those that another requires are removed after it, so by `--depend`.
        for name in podman("ps", "--all", f"--filter={LABEL}", "--format={{.Names}}").split():
            with contextlib.suppress(AssertionError):
                self.podman("rm", "--force", "--depend", "--time=0", name)
        for kind in ("volume", "network"):
            for name in _names(kind):
                self.podman(kind, "rm", "--force", name)

    def _pip_mounts(self) -> dict[str, str]:
        """pip's configuration on this machine, and the local files that it names, by their paths
        here; the build installs from the same indexes as the tests' environment.
        """
        argv = [sys.executable, "-m", "pip", "config", "list"]
        listed = subprocess.run(argv, capture_output=True, text=True, check=True).stdout
        found = dict(
            re.findall(r"^(?:global|install|:env:)\.([\w-]+)='(.*)'$", listed, re.MULTILINE)
        )
        conf = self._folder / "pip.conf"
        lines = [f"{key} = {value}" for key, value in found.items()]
        conf.write_text("\n".join(["[global]", *lines, ""]))
        paths = map(_local_path, " ".join(found.values()).split())
        return {str(conf): "/etc/pip.conf", **{path: path for path in paths if path}}

    def _called(self, argv: list[str], timeout_s: float) -> str:
        # A file, because a container's monitor keeps its output open.
        with (self._folder / "output").open("w+") as output:
            done = subprocess.run(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=self._variables,
                timeout=timeout_s,
                check=False,
            )
            output.seek(0)
            text = output.read()
        assert done.returncode == 0, f"{' '.join(argv)}: {done.returncode}\n{text[-6000:]}"
        return text


def await_that(is_so: Callable[[], bool], what: str, timeout_s: float) -> None:
    """Look until `is_so()`, which runs podman; AssertionError with `what` after the timeout."""
    deadline_s = time.monotonic() + timeout_s
    while not is_so():
        assert time.monotonic() < deadline_s, f"not within {timeout_s:.0f} s: {what}"


def taken_ports() -> list[int]:
    """Ports of the compose file that have a listener on this machine."""
    taken = []
    for port in PORTS:
        try:
            socket.create_server(("127.0.0.1", port)).close()
        except OSError:
            taken.append(port)
    return taken


def left_behind() -> Mapping[str, list[str]]:
    """Containers, volumes, networks, mounts and processes of the project on this machine."""
    mounted = Path("/proc/mounts").read_text().splitlines()
    names = podman("ps", "--all", f"--filter={LABEL}", "--format={{.Names}}").split()
    return {
        "containers": names,
        "volumes": _names("volume"),
        "networks": _names("network"),
        "mounts": [line for line in mounted if PROJECT in line],
        "processes": [
            line
            for process in psutil.process_iter(["cmdline"])
            if f"{PROJECT}_" in (line := " ".join(process.info["cmdline"] or []))
        ],
    }


def _local_path(word: str) -> str:
    """The path of this machine that pip reads for a value of its configuration, or ''."""
    url = urlsplit(word)
    # An index's links lead to folders beside it.
    path = Path(url.path).parent if url.scheme == "file" else Path(word)
    return str(path) if path.is_absolute() and path.exists() else ""


def _names(kind: str) -> list[str]:
    names = podman(kind, "ls", "--format={{.Name}}").split()
    return [name for name in names if name.startswith(f"{PROJECT}_")]
