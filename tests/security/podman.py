"""The images of docker/Dockerfile as containers of podman, on a base that mmdebstrap makes.

The image is the Dockerfile's stage `runtime`. The packages are those of the Python that runs the
tests, mounted read-only, so nothing is downloaded but the base's Debian packages (once).
"""

import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

from tests.flow.compose import DOCKER, Service
from tests.flow.slim_image import make_script
from tests.house.source import ROOT

TOOLS = ("podman", "runc", "mmdebstrap")
SUITE = "bookworm"
BASE = f"localhost/rollmesh-test-base:{SUITE}-pip"
"""Like Docker's python:3.11-slim-bookworm: the Dockerfile's stages build on it."""
BASE_PACKAGES = "python3,python3-venv,python3-pip,passwd,ca-certificates"
BASE_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
IMAGE = "localhost/rollmesh-test-runtime"
LIMITS = ("--ulimit=nofile=1024:1024", "--ulimit=nproc=1024:1024")
BASE_S, BUILD_S = 180, 300
"""Timeouts of building the base from Debian's mirror, and of building the image from the base."""
PYTHON = "/usr/bin/python3"
"""Path in the container."""
LINK_PYTHON = f'ln -s {PYTHON} "$1/usr/local/bin/python"'


def podman(*args: str, timeout_s: float = 60.0) -> str:
    """Return the standard output of `podman ARGS`; AssertionError with its error output if it
    fails.
    """
    argv = ["podman", "--runtime", "runc", *args]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=timeout_s, check=False)
    assert done.returncode == 0, f"{' '.join(argv)}: {done.stderr}"
    return done.stdout.strip()


def why_no_containers() -> str:
    """The reason why containers cannot run here, or ''. Makes the base image if it is missing."""
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        return f"{', '.join(missing)} is not installed"
    if sys.version_info[:2] != (3, 11):
        return f"Debian {SUITE} has Python 3.11, and the tests run another"
    try:
        if not podman("images", "--quiet", BASE):
            make_base()
        podman("run", "--rm", *LIMITS, f"--entrypoint={PYTHON}", BASE, "--version")
    except (AssertionError, subprocess.SubprocessError) as error:
        return f"no containers here: {str(error).splitlines()[0]}"
    return ""


def make_base() -> None:
    """Make the base image of Debian packages; AssertionError if it cannot be made."""
    argv = ["timeout", str(BASE_S), "mmdebstrap", "--quiet", "--variant=minbase"]
    argv += [f"--include={BASE_PACKAGES}", f"--customize-hook={LINK_PYTHON}", SUITE, "-"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as made:
        argv = ["podman", "import", f"--change=ENV PATH={BASE_PATH}", "-", BASE]
        done = subprocess.run(argv, stdin=made.stdout, capture_output=True, check=False)
    assert (made.returncode, done.returncode) == (0, 0), "mmdebstrap failed"


def make_image() -> None:
    """Build the Dockerfile's stage `runtime` on the base; AssertionError if it does not build."""
    text = (DOCKER / "Dockerfile").read_text()
    argv = ["podman", "build", "--isolation=chroot", "--format=docker", "--target=runtime"]
    argv += [f"--build-arg=BASE={BASE}", f"--tag={IMAGE}", "--file=-", str(DOCKER)]
    done = subprocess.run(
        argv, input=text, capture_output=True, text=True, timeout=BUILD_S, check=False
    )
    assert done.returncode == 0, done.stderr


class ServiceContainer:
    """One container of a service; its options are the service's own, except for the network."""

    def __init__(
        self,
        name: str,
        service: Service,
        command: Sequence[str],
        mounts: dict[Path, str],
        folder: Path,
    ) -> None:
        """`mounts` are read-only: the container's path by the host's; `folder` is for scripts."""
        self.name = name
        self._grace_s = service.grace_s()
        packages = sysconfig.get_path("purelib")
        (folder / "opt" / "bin").mkdir(parents=True)
        make_script(folder / "opt" / "bin", PYTHON)
        mounts = {**mounts, folder / "opt": "/opt/rollmesh", Path(packages): packages}
        mounts[ROOT / "rollmesh"] = "/opt/source/rollmesh"
        args = ["create", f"--name={name}", "--network=host", *LIMITS]
        args += [f"--user={service.user}"] if service.user else []
        args += [f"--cap-drop={each}" for each in service.cap_drop]
        args += [f"--cap-add={each}" for each in service.cap_add]
        args += [f"--security-opt={each}" for each in service.security_opt]
        args += [f"--tmpfs={each}" for each in service.tmpfs]
        args += ["--read-only"] * service.read_only + ["--init"] * service.init
        args += [f"--pids-limit={service.pids_limit}", f"--memory={service.mem_limit}"]
        args += [f"--volume={source}:{target}:ro" for source, target in mounts.items()]
        variables = {**service.environment, "PYTHONPATH": f"/opt/source:{packages}:/opt/envs"}
        args += [f"--env={key}={value}" for key, value in variables.items()]
        podman(*args, IMAGE, *command)

    def start(self) -> None:
        podman("start", self.name)

    def run(self, *args: str) -> str:
        """Standard output of a command in the running container."""
        return podman("exec", self.name, *args)

    def pids(self) -> list[int]:
        """Process ids of the container on the host; its first process first."""
        return [int(each) for each in podman("top", self.name, "hpid").split()[1:]]

    def stop(self) -> int:
        """Stop it as `docker stop` does; return its exit code."""
        podman("stop", f"--time={self._grace_s}", self.name, timeout_s=self._grace_s + 30.0)
        return int(podman("inspect", "--format={{.State.ExitCode}}", self.name))

    def logs(self) -> str:
        argv = ["podman", "logs", self.name]
        return subprocess.run(argv, capture_output=True, text=True, check=False).stderr

    def remove(self) -> None:
        podman("rm", "--force", "--time=0", self.name)
