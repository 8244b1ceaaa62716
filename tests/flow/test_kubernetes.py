"""docker/k8s without a cluster: schemas, what the files name, and their pods as plain processes."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest

from rollmesh.cli.healthy import split
from rollmesh.core.config import Config, load_config
from rollmesh.core.process import OK
from tests.flow.compose import write_short_settings
from tests.flow.containers import Containers
from tests.flow.demo import read
from tests.flow.dockerfile import Stages
from tests.flow.kustomize import Tree, build, load_all
from tests.flow.pods import (
    Container,
    as_compose,
    containers_of,
    dialled_as,
    pod_spec,
    workloads,
)
from tests.flow.slim_image import make_full, make_slim
from tests.house.source import ROOT

K8S = ROOT / "docker/k8s"
PAGE = ROOT / "docs/howto/kubernetes.md"
STAGES = Stages(ROOT / "docker/Dockerfile")
RELEASES = ("1.27", "1.37")
"""The oldest that the page names, and the newest that the schemas have."""
CRD_VARIABLE = "ROLLMESH_RAYJOB_CRD"
UID = 10001
PATIENCE_S = 90.0
SLIM_VERBS = ("router", "worker", "dashboard", "keys", "healthy")


def with_component(folder: Path) -> Path:
    """An overlay of the base with `restricted-workers`, in a copy of docker/k8s."""
    copy = folder / "k8s"
    shutil.copytree(K8S, copy)
    overlay = copy / "restricted"
    overlay.mkdir()
    (overlay / "kustomization.yaml").write_text(
        "apiVersion: kustomize.config.k8s.io/v1beta1\nkind: Kustomization\n"
        "resources: [../base]\ncomponents: [../restricted-workers]\n"
    )
    return overlay


@pytest.fixture(scope="module", params=["base", "cpu-demo", "restricted"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A kustomization."""
    if request.param == "restricted":
        return with_component(tmp_path_factory.mktemp("restricted"))
    return K8S / str(request.param)


@pytest.fixture
def documents(folder: Path) -> list[Tree]:
    return build(folder)


@pytest.fixture
def containers(documents: list[Tree]) -> list[Container]:
    return [each for d in workloads(documents).values() for each in containers_of(d)]


def settings_in(documents: list[Tree], folder: Path) -> Config:
    """Settings of the ConfigMap."""
    [text] = [d["data"]["mesh.toml"] for d in documents if d["kind"] == "ConfigMap"]
    path = folder / "mesh.toml"
    path.write_text(text)
    return load_config(path)


def shell_of_page() -> str:
    """The commands of the page."""
    blocks = re.findall(r"^ *```sh\n(.*?)^ *```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    return "\n".join(blocks).replace("\\\n", " ")


def secrets_of_page() -> dict[str, list[Path]]:
    """Files of each secret that the page makes."""
    made = {}
    for line in shell_of_page().splitlines():
        words = shlex.split(line)
        if words[:4] == ["kubectl", "create", "secret", "generic"]:
            made[words[4]] = [Path(w.partition("=")[2]) for w in words[5:]]
    return made


# schemas


@pytest.mark.parametrize("release", RELEASES)
def test_every_document_keeps_to_the_schema(documents: list[Tree], release: str) -> None:
    assert [fault for each in documents if (fault := fault_of(each, release))] == []


def fault_of(document: Tree, release: str = RELEASES[-1]) -> str:
    """The fault that Kubernetes' schema finds in a document; '' if it finds none."""
    try:
        kubernetes_validate.validate(document, release, strict=True)
    except kubernetes_validate.ValidationError as error:
        return f"{document['kind']}: {list(error.path)}: {error.message}"
    return ""


def test_the_schemas_refuse_a_misspelt_key(documents: list[Tree]) -> None:
    router = workloads(documents)["router"]
    pod_spec(router)["terminationGracePeriodSecond"] = 3
    assert "terminationGracePeriodSecond" in fault_of(router)


def test_kubectl_builds_the_same_documents(folder: Path, documents: list[Tree]) -> None:
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        pytest.skip("no kubectl on this machine")
    argv = [kubectl, "kustomize", str(folder)]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert in_order(load_all(done.stdout)) == in_order(documents)


def in_order(documents: list[Tree]) -> list[Tree]:
    """Sort by kind and name, without the hash in a generated name."""
    text = re.sub(r'"mesh-[a-z0-9]{10}"', '"mesh"', json.dumps(documents))
    found: list[Tree] = json.loads(text)
    return sorted(found, key=lambda each: (each["kind"], each["metadata"]["name"]))


def rayjob() -> Tree:
    [document] = load_all((K8S / "rayjob.yaml").read_text())
    return document


def ray_pods() -> dict[str, Tree]:
    """Pod templates of the RayJob, by group."""
    cluster = rayjob()["spec"]["rayClusterSpec"]
    groups = {each["groupName"]: each["template"] for each in cluster["workerGroupSpecs"]}
    return {"head": cluster["headGroupSpec"]["template"], **groups}


def test_the_rayjob_keeps_to_the_schema() -> None:
    schema = json.loads(Path(__file__).with_name("rayjob.schema.json").read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate(rayjob(), schema)
    for template in ray_pods().values():
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p"}, **template}
        assert fault_of(pod) == ""


def test_the_rayjob_keeps_to_the_custom_resource_definition() -> None:
    path = os.environ.get(CRD_VARIABLE)
    if not path:
        pytest.skip(f"{CRD_VARIABLE} names no file")
    [crd] = load_all(Path(path).read_text())
    schemas = {each["name"]: each["schema"]["openAPIV3Schema"] for each in crd["spec"]["versions"]}
    schema = schemas[rayjob()["apiVersion"].partition("/")[2]]
    validator = jsonschema.Draft202012Validator(closed(schema))
    assert [error.message for error in validator.iter_errors(rayjob())] == []


def closed(schema: Any) -> Any:
    """The schema without fields that it does not name, which a server drops in silence."""
    if isinstance(schema, list):
        return [closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    inner = {key: closed(value) for key, value in schema.items()}
    if isinstance(schema.get("properties"), dict) and schema.get("type") == "object":
        inner.setdefault("additionalProperties", False)
    return inner


# what the files name


def test_every_image_of_ours_is_a_stage_that_has_the_verb(containers: list[Container]) -> None:
    for container in containers:
        command, args = container.argv()
        if not container.stage:
            assert container.image.startswith("lmsysorg/sglang:")
            continue
        assert container.stage in STAGES.names()
        entry = command or STAGES.last(container.stage, "ENTRYPOINT").argv()
        if entry == ["rollmesh"] and container.stage == "slim":
            assert args[0] in SLIM_VERBS


def test_the_sglang_is_that_of_the_contract() -> None:
    pins = (ROOT / "tests/contract/sglang/pins.txt").read_text()
    [pin] = re.findall(r"^sglang==(.+)$", pins, re.MULTILINE)
    [engine] = containers_of(workloads(build(K8S / "base"))["engine"])
    assert engine.image == f"lmsysorg/sglang:v{pin}"


def test_every_variable_is_one_that_something_reads(containers: list[Container]) -> None:
    source = "".join(path.read_text() for path in (ROOT / "rollmesh").rglob("*.py"))
    for container in containers:
        text = json.dumps(container.spec)
        for name in container.environment():
            is_used = f"$({name})" in text or f'environ[\\"{name}\\"]' in text
            assert is_used or name == "HOME" or f'"{name}"' in source


def test_every_mount_has_a_volume_and_every_volume_is_used(documents: list[Tree]) -> None:
    names = {(d["kind"], d["metadata"]["name"]) for d in documents}
    for document in workloads(documents).values():
        containers = containers_of(document)
        used = {volume["name"] for each in containers for volume in each.mounts().values()}
        volumes = pod_spec(document)["volumes"]
        assert used == {each["name"] for each in volumes}
        for volume in volumes:
            if "configMap" in volume:
                assert ("ConfigMap", volume["configMap"]["name"]) in names
            if "persistentVolumeClaim" in volume:
                claim = volume["persistentVolumeClaim"]["claimName"]
                assert ("PersistentVolumeClaim", claim) in names


def test_a_pod_mounts_only_a_secret_that_the_page_makes(documents: list[Tree]) -> None:
    made = secrets_of_page()
    used = set()
    for name, document in workloads(documents).items():
        for volume in pod_spec(document)["volumes"]:
            if "secret" in volume:
                used.add(volume["secret"]["secretName"])
                assert volume["secret"]["secretName"] == f"rollmesh-{name}"
        for container in containers_of(document):
            text = json.dumps(container.spec)
            for key in re.findall(r"/(?:secret|keys)/([\w.]+)", text):
                assert key in {path.name for path in made[f"rollmesh-{name}"]}
    assert used <= made.keys()
    holders = {name for name, files in made.items() if Path("keys/mesh/hub.json") in files}
    assert holders == {"rollmesh-router"}


def test_ports_agree_with_the_settings(documents: list[Tree], tmp_path: Path) -> None:
    settings = settings_in(documents, tmp_path)
    found = workloads(documents)
    router, trainer = containers_of(found["router"])[-1], containers_of(found["trainer"])[-1]
    ports = {each["name"]: each["containerPort"] for each in router.spec["ports"]}
    assert str(ports["mesh"]) == settings.router.bind.rpartition(":")[2]
    assert str(ports["http"]) == settings.router.http_bind.rpartition(":")[2]
    assert f"--router=tcp://router:{ports['mesh']}" in trainer.argv()[1]
    assert f"--status=http://router:{ports['http']}" in trainer.argv()[1]
    health = containers_of(found["worker"])[-1].environment()["ROLLMESH_HEALTH"]
    assert split(health).netloc == settings.interception.bind
    engine = found["engine"]
    assert settings.engine.urls == tuple(
        f"http://engine-{number}.engine:30000" for number in range(engine["spec"]["replicas"])
    )
    assert "--port=30000" in containers_of(engine)[-1].argv()[1]


def test_services_select_pods_and_have_their_ports(documents: list[Tree]) -> None:
    found = workloads(documents)
    services = {d["metadata"]["name"]: d["spec"] for d in documents if d["kind"] == "Service"}
    assert services.keys() == {"router", "engine", "trainer"}
    for name, service in services.items():
        document = found[name]
        assert service["clusterIP"] == "None"
        assert document["spec"]["serviceName"] == name
        template = document["spec"]["template"]
        assert service["selector"].items() <= template["metadata"]["labels"].items()
        ports = {p["containerPort"] for p in containers_of(document)[-1].spec["ports"]}
        assert {port["port"] for port in service["ports"]} == ports


def test_policies_admit_the_ports_that_others_dial(documents: list[Tree]) -> None:
    policies = [d for d in documents if d["kind"] == "NetworkPolicy"]
    assert [d["spec"]["podSelector"] for d in policies if not d["spec"]["podSelector"]] == [{}]
    dialled = {
        ("worker", "router", 5555),
        ("trainer", "router", 5555),
        ("trainer", "router", 8080),
        ("worker", "trainer", 5556),
        ("router", "engine", 30000),
        ("worker", "engine", 30000),
        ("trainer", "engine", 30000),
    }
    admitted = {
        (source, d["metadata"]["name"], port["port"])
        for d in policies
        for rule in d["spec"].get("ingress", [])
        for peer in rule["from"]
        for source in selected(peer["podSelector"])
        for port in rule["ports"]
    }
    assert admitted == dialled
    [out] = [d["spec"] for d in policies if d["metadata"]["name"] == "mesh-egress"]
    [rule] = out["egress"]
    assert {source for source, _, _ in dialled} == set(selected(out["podSelector"]))
    assert {target for _, target, _ in dialled} == set(selected(rule["to"][0]["podSelector"]))
    assert {port for _, _, port in dialled} == {port["port"] for port in rule["ports"]}


def selected(selector: Tree) -> list[str]:
    """Names of the workloads that a selector matches."""
    labels = selector.get("matchLabels", {})
    named = [each["values"] for each in selector.get("matchExpressions", [])]
    return [*labels.values(), *(value for values in named for value in values)]


def test_every_container_is_confined_and_bounded(documents: list[Tree], folder: Path) -> None:
    for name, document in workloads(documents).items():
        pod = pod_spec(document)
        assert pod["automountServiceAccountToken"] is False
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in containers_of(document):
            own = pod["securityContext"] | container.spec["securityContext"]
            is_changer = (name, container.name) == ("worker", "worker")
            is_changer = is_changer and folder.name != "restricted"
            assert own["runAsUser"] == (0 if is_changer else UID)
            assert own["allowPrivilegeEscalation"] is False
            assert own["capabilities"]["drop"] == ["ALL"]
            added = own["capabilities"].get("add", [])
            assert added == (["SETUID", "SETGID"] if is_changer else [])
            assert own.get("readOnlyRootFilesystem", False) == bool(container.stage)
            assert container.spec["resources"]["limits"]["memory"]
            if "/runs" in container.mounts():
                assert container.reads_only("/runs") == (name != "trainer")
        shm = [each for each in pod["volumes"] if each["name"] == "shm"]
        assert all(each["emptyDir"]["medium"] == "Memory" for each in shm)
        assert bool(shm) == (name in ("engine", "worker", "trainer"))


def test_root_is_only_the_worker_that_changes_users(documents: list[Tree], folder: Path) -> None:
    roots = [
        name
        for name, document in workloads(documents).items()
        if not pod_spec(document)["securityContext"].get("runAsNonRoot")
    ]
    assert roots == ([] if folder.name == "restricted" else ["worker"])
    [args] = [containers_of(workloads(documents)["worker"])[-1].argv()[1]]
    assert ("--user=rollmesh" in args) == (roots == ["worker"])
    [namespace] = [d for d in documents if d["kind"] == "Namespace"]
    level = namespace["metadata"]["labels"]["pod-security.kubernetes.io/enforce"]
    assert level == ("baseline" if roots else "restricted")


def test_a_stopped_pod_has_time_to_end_in_order(documents: list[Tree], tmp_path: Path) -> None:
    worker = settings_in(documents, tmp_path).worker
    grace_s = {
        name: pod_spec(document)["terminationGracePeriodSeconds"]
        for name, document in workloads(documents).items()
    }
    assert grace_s["worker"] >= 2 * (worker.drain_timeout_s + worker.farewell_timeout_s)
    assert grace_s["trainer"] > grace_s["router"]


def test_every_workload_but_the_page_has_a_disruption_budget(documents: list[Tree]) -> None:
    budgets = {d["metadata"]["name"]: d for d in documents if d["kind"] == "PodDisruptionBudget"}
    found = workloads(documents)
    assert budgets.keys() == found.keys() - {"dashboard"}
    for name, budget in budgets.items():
        labels = found[name]["spec"]["template"]["metadata"]["labels"]
        assert budget["spec"]["selector"]["matchLabels"].items() <= labels.items()


def test_probes_run_the_health_check(containers: list[Container]) -> None:
    for container in containers:
        if container.is_init:
            continue
        probes = {kind: container.spec[f"{kind}Probe"] for kind in ("startup", "readiness")}
        probes["liveness"] = container.spec["livenessProbe"]
        for probe in probes.values():
            command = probe["exec"]["command"]
            if container.stage:
                assert command == ["rollmesh", "healthy"]
                split(container.environment()["ROLLMESH_HEALTH"])
            else:
                compile(command[2], "probe", "exec")
        timeout_s = probes["liveness"]["failureThreshold"] * probes["liveness"]["periodSeconds"]
        assert timeout_s >= 120


def test_the_rayjob_names_what_exists() -> None:
    spec = rayjob()["spec"]
    verb, *words = shlex.split(spec["entrypoint"])
    assert verb == "rollmesh"
    flags = [word for word in words if word.startswith("--")]
    usage = subprocess.run(
        [str(Path(sys.executable).with_name("rollmesh")), words[0], "--help"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert [flag for flag in flags if flag not in usage] == []
    pods = ray_pods()
    claims = {d["metadata"]["name"] for d in load_all((K8S / "base/storage.yaml").read_text())}
    for template in pods.values():
        volumes = {each["name"]: each for each in template["spec"]["volumes"]}
        assert {volumes[name]["persistentVolumeClaim"]["claimName"] for name in claims} == claims
        assert volumes["mesh"]["configMap"]["name"] in shell_of_page()
        assert volumes["shm"]["emptyDir"]["medium"] == "Memory"
        assert template["spec"]["securityContext"]["runAsNonRoot"] is True
    pin = re.search(r"^ray==(.+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert pin
    assert spec["rayClusterSpec"]["rayVersion"] == pin.group(1)
    assert f"rayproject/ray:{pin.group(1)}-" in PAGE.read_text()
    resources = pods["gpu"]["spec"]["containers"][0]["resources"]
    assert resources["limits"]["nvidia.com/gpu"] == resources["requests"]["nvidia.com/gpu"]
    assert "nvidia.com/gpu" not in pods["cpu"]["spec"]["containers"][0]["resources"]["limits"]


def test_documents_of_the_page_keep_to_the_schema() -> None:
    blocks = re.findall(r"```yaml\n(.*?)```", PAGE.read_text(), re.DOTALL)
    documents = [each for block in blocks for each in load_all(dedented(block))]
    kinds = {each["kind"]: each for each in documents}
    assert kinds.keys() == {"Kustomization", "Pod"}
    assert fault_of(kinds["Pod"]) == ""
    for name in kinds["Kustomization"]["resources"]:
        assert (K8S / "mine" / name).resolve().is_dir()


def dedented(text: str) -> str:
    return "\n".join(line[4:] if line.startswith("    ") else line for line in text.splitlines())


# the mesh


def write_secrets(folder: Path, image: Path) -> None:
    """Run the page's commands for keys; make each secret a folder, as a volume shows it."""
    (folder / "keys").mkdir()
    lines = shell_of_page().splitlines()
    argv = shlex.split(next(line for line in lines if line.strip().startswith("rollmesh keys")))
    subprocess.run([str(image / argv[0]), *argv[1:]], cwd=folder, check=True)
    [line] = [line for line in lines if "> keys/engine.key" in line]
    subprocess.run(["sh", "-c", line], cwd=folder, check=True)
    for name, files in secrets_of_page().items():
        volume = folder / "volumes" / name
        volume.mkdir(parents=True)
        for path in files:
            shutil.copyfile(folder / path, volume / path.name)
            (volume / path.name).chmod(0o440)


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[Containers]:
    """The pods of cpu-demo, with a short run."""
    images = {"slim": make_slim(tmp_path / "slim"), "full": make_full(tmp_path / "full")}
    settings = tmp_path / "mesh.toml"
    write_short_settings(K8S / "cpu-demo/mesh.toml", settings, num_steps=3)
    write_secrets(tmp_path, images["slim"])
    containers = Containers(as_compose(build(K8S / "cpu-demo"), settings), tmp_path, images)
    # The worker's secret is that of a pod whose owner is root.
    for path in (tmp_path / "volumes/rollmesh-worker").iterdir():
        path.chmod(0o400)
    try:
        yield containers
    finally:
        containers.kill()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_pods_train_to_the_end_and_the_trainer_waits(mesh: Containers) -> None:
    found = workloads(build(K8S / "cpu-demo"))
    for pod in ("engine", "router", "worker", "trainer"):
        start(mesh, found[pod])
    [trainer] = mesh.running["trainer"]
    run = mesh.volumes / "runs/mesh"
    until_printed(trainer.folder / "log", "waiting for SIGTERM")
    assert read(run / "summary.json")["num_steps"] == 3
    start(mesh, found["dashboard"])
    assert all(map(mesh.is_healthy, (mesh.running[dialled_as(found[n])][0] for n in found)))
    # A restarted pod waits too, instead of training again.
    trainer.process.send_signal(signal.SIGTERM)
    assert trainer.process.wait(PATIENCE_S) == OK
    mesh.start("trainer", patience_s=PATIENCE_S)
    until_printed(mesh.running["trainer"][-1].folder / "log", "waiting for SIGTERM")
    assert [path.name for path in (mesh.volumes / "runs").iterdir()] == ["mesh"]
    mesh.running["trainer"] = mesh.running["trainer"][-1:]
    for name in ("trainer", "dashboard", "worker", "router"):
        logs = "\n".join(each.log() for each in mesh.running[name])
        assert set(mesh.stop(name, PATIENCE_S)) == {OK}, logs


def start(mesh: Containers, document: Tree) -> None:
    """Run the init containers, one after the other, then the pod."""
    pod = dialled_as(document)
    for container in containers_of(document):
        name = f"{pod}.{container.name}" if container.is_init else pod
        mesh.start(name, patience_s=PATIENCE_S)


def until_printed(path: Path, text: str) -> None:
    """Follow a log until it has the text."""
    with subprocess.Popen(["tail", "-n", "+1", "-f", str(path)], stdout=subprocess.PIPE) as tail:
        assert tail.stdout is not None
        assert any(text in line.decode() for line in tail.stdout)
        tail.kill()
