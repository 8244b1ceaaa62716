"""Read docker/*.yaml as Compose does: anchors, variables, `extends`.

A service's command, variables and mounts are those that a container would get. The JSON schema
checks the rest of the format.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
from ruamel.yaml import YAML

from tests.house.source import ROOT

DOCKER = ROOT / "docker"
_VARIABLE = re.compile(r"\$\{(?P<name>\w+)(?::(?P<kind>[-?])(?P<rest>[^}]*))?\}")


class Build(msgspec.Struct, frozen=True):
    context: str
    dockerfile: str
    target: str


class Condition(msgspec.Struct, frozen=True):
    """Condition on another service that a service waits for."""

    condition: str


class Bind(msgspec.Struct, frozen=True):
    """Options of a mounted file of the host."""

    create_host_path: bool = True


class Mount(msgspec.Struct, frozen=True):
    """A file of the host, relative to the compose file's folder, and its path in the container."""

    type: str
    source: str
    target: str
    read_only: bool = False
    bind: Bind = Bind()


class Health(msgspec.Struct, frozen=True):
    """A service's own health check, which replaces that of its image."""

    test: list[str] = []
    disable: bool = False


class Service(msgspec.Struct, frozen=True, kw_only=True):
    image: str
    command: list[str]
    build: Build | None = None
    entrypoint: list[str] = []
    environment: dict[str, str] = {}
    volumes: list[str | Mount] = []
    ports: list[str] = []
    depends_on: dict[str, Condition] = {}
    healthcheck: Health = Health()
    network_mode: str = ""
    user: str = ""
    init: bool = False
    cap_drop: list[str] = []
    cap_add: list[str] = []
    security_opt: list[str] = []
    read_only: bool = False
    tmpfs: list[str] = []
    pids_limit: int = 0
    mem_limit: str = ""
    networks: list[str] = []
    restart: str = "no"
    stop_grace_period: str = "10s"

    def grace_s(self) -> int:
        """Seconds between SIGTERM and SIGKILL."""
        return int(self.stop_grace_period[:-1]) * {"s": 1, "m": 60}[self.stop_grace_period[-1]]

    def target(self) -> str:
        """The stage of the Dockerfile that builds its image."""
        assert self.build is not None
        return self.build.target

    def mounts(self) -> dict[str, str]:
        """The volume, or host folder, by its path in the container."""
        parts = [each.split(":") for each in self.volumes if isinstance(each, str)]
        return {target: volume for volume, target, *_ in parts}

    def files(self) -> list[Mount]:
        """Mounted files of the host."""
        return [each for each in self.volumes if isinstance(each, Mount)]

    def is_read_only(self, target: str) -> bool:
        """Whether the container may only read what is mounted at `target`."""
        return any(str(each).endswith(f":{target}:ro") for each in self.volumes)


class Network(msgspec.Struct, frozen=True):
    """A network; an internal one has no route out."""

    internal: bool = False


class Compose(msgspec.Struct, frozen=True):
    name: str
    services: dict[str, Service]
    volumes: dict[str, None]
    networks: dict[str, Network | None] = {}


def read_compose(name: str, variables: Mapping[str, str] | None = None) -> Compose:
    """Read docker/`name` with these variables; KeyError for a missing one."""
    return msgspec.convert(_tree(name, variables or {}), Compose)


def _tree(name: str, variables: Mapping[str, str]) -> dict[str, Any]:
    text = (DOCKER / name).read_text()
    tree: dict[str, Any] = YAML(typ="safe").load(_filled(text, variables))
    for service in tree["services"].values():
        if came_from := service.pop("extends", None):
            base = _tree(came_from["file"], variables)["services"][came_from["service"]]
            _extend(service, base)
    return tree


def _filled(text: str, variables: Mapping[str, str]) -> str:
    def value_of(found: re.Match[str]) -> str:
        name, kind, rest = found.group("name", "kind", "rest")
        if variables.get(name):
            return variables[name]
        if kind == "-":
            return str(rest)
        raise KeyError(f"{name}: {rest}")

    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    return _VARIABLE.sub(value_of, "\n".join(lines))


def _extend(service: dict[str, Any], base: dict[str, Any]) -> None:
    """Merge `base` below `service`: tables are merged, volumes by their target."""
    for key, value in base.items():
        if key not in service:
            service[key] = value
        elif isinstance(value, dict):
            _extend(service[key], value)
        elif key == "volumes":
            taken = set(map(_target, service[key]))
            service[key] += [each for each in value if _target(each) not in taken]


def _target(volume: str | dict[str, Any]) -> str:
    return volume.split(":")[1] if isinstance(volume, str) else str(volume["target"])


def write_short_settings(source: Path, path: Path, num_steps: int) -> None:
    """Write the settings of `source` to `path`, with so many small steps and a short evaluation."""
    steps = f"num_steps = {num_steps}\ngroups_per_step = 2\nsamples_per_group = 4"
    text = re.sub("num_steps = .*", steps, source.read_text())
    path.write_text(re.sub("eval_rollouts = .*", "eval_rollouts = 8", text))
