"""The pods of docker/k8s as services of tests/flow/containers.py, which runs plain processes.

- A pod is reached by the name under which others dial it, such as engine-0.engine.
- Init containers are services that run before, POD.CONTAINER.
- Claims, secrets and emptyDirs are folders; only /tmp and /dev/shm are those of this machine.
"""

import re
from pathlib import Path
from typing import Any

import msgspec

from tests.flow.compose import Build, Compose, Health, Mount, Network, Service
from tests.flow.kustomize import Tree

WORKLOADS = ("StatefulSet", "Deployment")
POD_IP = "0.0.0.0"
"""Containers replaces it by the container's own address."""
LOOPBACK_POD = "dashboard"
"""Serves its own loopback only, which a port-forward reaches."""
SHARED = ("/tmp", "/dev/shm")


class Container(msgspec.Struct, frozen=True):
    """A container of a pod, with what Kubernetes would make of its variables."""

    pod: str
    name: str
    spec: Tree
    volumes: dict[str, Tree]
    is_init: bool

    @property
    def image(self) -> str:
        return str(self.spec["image"])

    @property
    def stage(self) -> str:
        """Target of the Dockerfile; '' for another project's image."""
        name, _, tag = self.image.rpartition(":")
        return tag if name == "rollmesh" else ""

    def environment(self) -> dict[str, str]:
        """Variables, with $(NAME) replaced; those of a secret are its key's name."""
        made: dict[str, str] = {}
        for each in self.spec.get("env", []):
            made[each["name"]] = _expanded(_value(each), made)
        return made

    def argv(self) -> tuple[list[str], list[str]]:
        """Command ([] for the image's own) and arguments."""
        variables = self.environment()
        command, args = self.spec.get("command", []), self.spec.get("args", [])
        return [_expanded(each, variables) for each in command], [
            _expanded(each, variables) for each in args
        ]

    def mounts(self) -> dict[str, Tree]:
        """The volume mounted at each path."""
        return {
            each["mountPath"]: self.volumes[each["name"]]
            for each in self.spec.get("volumeMounts", [])
        }

    def reads_only(self, target: str) -> bool:
        """Whether the container may only read what is mounted at `target`."""
        [found] = [each for each in self.spec["volumeMounts"] if each["mountPath"] == target]
        return bool(found.get("readOnly"))


def pod_spec(document: Tree) -> Tree:
    """The pod of a workload."""
    spec: Tree = document["spec"]["template"]["spec"]
    return spec


def workloads(documents: list[Tree]) -> dict[str, Tree]:
    """StatefulSets and Deployments by name."""
    return {d["metadata"]["name"]: d for d in documents if d["kind"] in WORKLOADS}


def containers_of(document: Tree) -> list[Container]:
    """Init containers, then containers, of a workload."""
    spec = pod_spec(document)
    volumes = {each["name"]: each for each in spec.get("volumes", [])}
    name = document["metadata"]["name"]
    return [
        Container(name, each["name"], each, volumes, key == "initContainers")
        for key in ("initContainers", "containers")
        for each in spec.get(key, [])
    ]


def dialled_as(document: Tree) -> str:
    """The name under which other pods dial a workload's first pod."""
    name = str(document["metadata"]["name"])
    is_engine = document["kind"] == "StatefulSet" and name == "engine"
    return f"{name}-0.{document['spec']['serviceName']}" if is_engine else name


def as_compose(documents: list[Tree], settings: Path) -> Compose:
    """All containers of our images as services that read `settings`."""
    services = {}
    for document in workloads(documents).values():
        for container in containers_of(document):
            pod = dialled_as(document)
            name = f"{pod}.{container.name}" if container.is_init else pod
            services[name] = _service(container, settings)
    return Compose("k8s", services, {}, {"mesh": Network(internal=True)})


def _service(container: Container, settings: Path) -> Service:
    command, args = container.argv()
    volumes: list[str | Mount] = [
        f"{_folder(container.pod, volume)}:{target}{':ro' if container.reads_only(target) else ''}"
        for target, volume in container.mounts().items()
        if target not in SHARED and "configMap" not in volume
    ]
    if any("configMap" in each for each in container.mounts().values()):
        volumes.append(Mount("bind", str(settings), "/etc/rollmesh/mesh.toml", read_only=True))
    return Service(
        image=container.image,
        entrypoint=command,
        command=args,
        build=Build("..", "docker/Dockerfile", container.stage),
        environment=container.environment(),
        volumes=volumes,
        healthcheck=Health(disable=container.is_init),
        network_mode="host" if container.pod == LOOPBACK_POD else "",
    )


def _folder(pod: str, volume: Tree) -> str:
    if "persistentVolumeClaim" in volume:
        return str(volume["persistentVolumeClaim"]["claimName"])
    if "secret" in volume:
        return str(volume["secret"]["secretName"])
    return f"{pod}-{volume['name']}"


def _value(variable: dict[str, Any]) -> str:
    source = variable.get("valueFrom", {})
    if "fieldRef" in source:
        assert source["fieldRef"]["fieldPath"] == "status.podIP"
        return POD_IP
    if "secretKeyRef" in source:
        return str(source["secretKeyRef"]["key"])
    return str(variable["value"])


def _expanded(text: str, variables: dict[str, str]) -> str:
    """Replace $(NAME) as Kubernetes does, for variables that were defined before."""
    return re.sub(r"\$\((\w+)\)", lambda found: variables[found.group(1)], text)
