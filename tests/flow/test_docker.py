"""docker/ without Docker: other users can read its files, what they name exists, and the mesh that
they start trains as plain processes, with its services' own commands, settings and checks.
"""

import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from fnmatch import fnmatch
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from rollmesh.cli.main import VERBS
from rollmesh.core.config import load_config
from rollmesh.core.errors import AddressError
from rollmesh.core.process import INTERRUPTED
from rollmesh.envs.guess import GuessEnv
from rollmesh.testing.model_folder import write_model_folder
from rollmesh.trainer.models.tiny import TinyShape, texts_of, write_tiny_model
from rollmesh.wire.keys import check_bind
from tests.flow.compose import DOCKER, Build, Compose, Service, read_compose, write_short_settings
from tests.flow.containers import Container, Containers
from tests.flow.demo import follow, read
from tests.flow.dockerfile import Stages
from tests.flow.slim_image import make_full, make_slim
from tests.house.source import ROOT

MODEL = {"MODEL_DIR": "/models/a-model"}
FILES = ("compose.yaml", "compose.gpu.yaml")
STAGES = Stages(DOCKER / "Dockerfile")
SETTINGS = load_config(DOCKER / "mesh.toml")
PATIENCE_S = 90.0
"""Timeout of a process on a busy machine."""
STOPS_WITHIN_S = 60.0
PODMAN = """#!{python}
import json, os, sys
words = sys.argv[1:]
print({{"--version": "podman version 5.5.0", "ps": "[]"}}.get(words[0], ""))
if words[0] == "create":
    with open({calls!r}, "a") as file:
        print(json.dumps(words), file=file)
"""


@pytest.fixture(scope="module", params=FILES)
def compose(request: pytest.FixtureRequest) -> Compose:
    return read_compose(request.param, MODEL)


def ours(compose: Compose) -> dict[str, Service]:
    """The services that run one of this repository's images."""
    return {name: each for name, each in compose.services.items() if each.build}


def called(tool: str, *args: str | Path, path: str = os.defpath) -> tuple[int, str]:
    """Run a tool of this environment; return its exit code and output."""
    argv = [str(Path(sys.executable).with_name(tool)), *map(str, args)]
    variables = {"PATH": path, **MODEL}
    done = subprocess.run(argv, capture_output=True, text=True, env=variables, check=False)
    return done.returncode, done.stdout + done.stderr


# the files, checked by other tools


def checked(file: Path) -> tuple[int, str]:
    return called("check-jsonschema", "--builtin-schema=vendor.compose-spec", file)


@pytest.mark.parametrize("name", FILES)
def test_a_compose_file_keeps_to_the_schema(name: str, tmp_path: Path) -> None:
    code, output = checked(DOCKER / name)
    assert code == 0, output
    wrong = tmp_path / name
    wrong.write_text((DOCKER / name).read_text().replace("volumes:", "volume:"))
    code, output = checked(wrong)
    assert code == 1
    assert "volume" in output


@pytest.mark.parametrize("name", FILES)
def test_podman_compose_reads_the_files_as_these_tests_do(name: str, tmp_path: Path) -> None:
    created = created_by_podman(name, tmp_path)
    compose = read_compose(name, MODEL)
    assert created.keys() == compose.services.keys()
    for service, argv in created.items():
        wanted = compose.services[service]
        assert argv[-1 - len(wanted.command) :] == [wanted.image, *wanted.command]
        variables = [text for flag, text in pairwise(argv) if flag == "-e"]
        assert dict(text.split("=", 1) for text in variables) == wanted.environment
        targets = [*wanted.mounts(), *(mount.target for mount in wanted.files())]
        assert all(any(target in part for part in argv) for target in targets)
        assert ("--cap-drop" in argv) == bool(wanted.cap_drop)


def created_by_podman(name: str, folder: Path) -> dict[str, list[str]]:
    """Arguments of the `podman create` that podman-compose makes for each service; podman itself is
    a stub that records them.
    """
    podman, calls = folder / "podman", folder / "calls"
    podman.write_text(PODMAN.format(python=sys.executable, calls=str(calls)))
    podman.chmod(0o755)
    args = ("-f", DOCKER / name, "--profile", "gateway", "up", "--no-build", "--no-start")
    code, output = called("podman-compose", *args, path=f"{folder}:{os.defpath}")
    assert code == 0, output
    label = "com.docker.compose.service="
    argvs = map(json.loads, calls.read_text().splitlines())
    return {
        part.removeprefix(label): argv for argv in argvs for part in argv if part.startswith(label)
    }


# the files, compared with the program


def test_every_image_is_a_stage_that_runs_without_rights(compose: Compose) -> None:
    for service in ours(compose).values():
        stage = service.target()
        assert service.image == f"rollmesh:{stage}"
        assert int(STAGES.last(stage, "USER").rest.partition(":")[0]) > 0
        assert STAGES.last(stage, "ENTRYPOINT").argv() == ["rollmesh"]
        verb = STAGES.last(stage, "HEALTHCHECK").argv()
        assert (verb[0], verb[1] in VERBS) == ("rollmesh", True)
        assert service.build
        assert (DOCKER / service.build.context).resolve() == ROOT
        assert (ROOT / service.build.dockerfile).is_file()


def test_the_full_image_has_the_extra_that_trains_and_the_slim_one_has_not() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for stage, is_full in (("slim", False), ("full", True)):
        [built] = STAGES.copied_from(stage)
        extras = set(re.findall(r"\.\[(\w+)\]", STAGES.runs(built)))
        assert extras == ({"train"} if is_full else set())
        assert extras <= project["optional-dependencies"].keys()
    assert STAGES.names()[-1] == "full"
    assert "rollmesh" in project["scripts"]


def test_files_that_the_build_copies_exist_and_no_others_are_sent() -> None:
    rules = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line[:1] != "#"]
    let_in = [rule[1:] for rule in rules if rule.startswith("!")]
    copied = {each for each in STAGES.context_files() if each != "./"}
    assert rules[0] == "*"
    assert copied == set(let_in)
    for name in copied:
        assert (ROOT / name).exists()
        assert not any(fnmatch(name, rule) for rule in rules[1:] if not rule.startswith("!"))


def test_every_variable_is_one_that_the_program_reads(compose: Compose) -> None:
    source = "".join(path.read_text() for path in (ROOT / "rollmesh").rglob("*.py"))
    for service in ours(compose).values():
        for name in service.environment:
            assert f'"{name}"' in source


def test_every_volume_and_dependency_is_declared(compose: Compose) -> None:
    for service in compose.services.values():
        named = {volume for volume in service.mounts().values() if not volume.startswith("/")}
        assert named <= compose.volumes.keys()
        assert service.depends_on.keys() <= compose.services.keys()
        for mount in service.files():
            assert (DOCKER / mount.source).is_file()
            assert mount.read_only
            assert not mount.bind.create_host_path
    used = {volume for each in compose.services.values() for volume in each.mounts().values()}
    assert compose.volumes.keys() <= used


def test_a_volume_is_written_by_its_maker_only(compose: Compose) -> None:
    makers = {
        "gateway": "gateway",
        "keys": "keys",
        "worker-keys": "keys",
        "runs": "trainer",
        "models": "make-model",
    }
    for name, service in compose.services.items():
        for target, volume in service.mounts().items():
            assert service.is_read_only(target) or name == makers[volume]


def test_a_stopped_service_has_time_to_end_in_order(compose: Compose) -> None:
    services = ours(compose)
    takes_s = SETTINGS.worker.drain_timeout_s + SETTINGS.worker.farewell_timeout_s
    assert services["worker"].grace_s() >= 2 * takes_s
    gpu, plain = (read_compose(name, MODEL).services["trainer"] for name in reversed(FILES))
    assert gpu.grace_s() > plain.grace_s() >= services["router"].grace_s()


def test_a_trainer_that_dies_is_restarted_and_resumes(compose: Compose) -> None:
    trainer = compose.services["trainer"]
    assert trainer.restart.partition(":")[0] == "on-failure"
    assert "--go-on" in trainer.command


def test_ports_are_on_this_machine_and_match_the_settings(compose: Compose) -> None:
    published = [port for service in compose.services.values() for port in service.ports]
    port = SETTINGS.router.http_bind.rpartition(":")[2]
    assert published == [f"127.0.0.1:{each}:{each}" for each in (port, 8100)]
    on_host = {n: s for n, s in compose.services.items() if s.network_mode == "host"}
    assert on_host.keys() == {"dashboard"}
    assert "--host=127.0.0.1" in on_host["dashboard"].command


def test_a_worker_s_network_has_no_route_out(compose: Compose) -> None:
    assert compose.services["worker"].networks == ["mesh"]
    assert compose.networks["mesh"]
    assert compose.networks["mesh"].internal
    outside = {
        n for n, s in compose.services.items() if not s.network_mode and s.networks != ["mesh"]
    }
    assert outside == {"router", "gateway"}  # they are published, which needs another network


def test_every_container_of_ours_is_confined_and_bounded(compose: Compose) -> None:
    for name, service in ours(compose).items():
        is_worker = name == "worker"
        assert service.cap_drop == ["ALL"]
        assert service.cap_add == (["SETUID", "SETGID"] if is_worker else [])
        assert service.user == ("0:0" if is_worker else "")
        assert ("--user=rollmesh" in service.command) == is_worker
        assert service.init != is_worker  # root's init without CAP_KILL cannot signal the worker
        assert "no-new-privileges:true" in service.security_opt
        assert service.read_only
        assert [each for each in service.tmpfs if each.startswith("/tmp:")]
        assert service.pids_limit > 0
        assert service.mem_limit
    engine = compose.services["engine"]
    assert engine.cap_drop == ["ALL"]
    assert "no-new-privileges:true" in engine.security_opt


@pytest.mark.parametrize("bind", [SETTINGS.router.bind, SETTINGS.trainer.bind])
def test_ports_that_other_containers_reach_refuse_clients_without_keys(bind: str) -> None:
    with pytest.raises(AddressError, match="ROLLMESH_KEYS"):
        check_bind(bind, None)


def test_with_a_gpu_nothing_changes_but_the_engine_and_the_device() -> None:
    plain, gpu = read_compose("compose.yaml"), read_compose("compose.gpu.yaml", MODEL)
    assert plain.services.keys() - gpu.services.keys() == {"make-model"}
    device = gpu.services["trainer"].command[-1]
    assert gpu.services["trainer"].command[:-1] == plain.services["trainer"].command
    assert load_config(None, [device.removeprefix("--set=")]).trainer.device == "cuda"
    for name in ("keys", "router", "worker", "dashboard", "gateway"):
        assert gpu.services[name].command == plain.services[name].command
    with pytest.raises(KeyError, match="name the model's folder"):
        read_compose("compose.gpu.yaml")


def test_the_engine_with_a_gpu_is_the_sglang_of_the_contract() -> None:
    pins = (ROOT / "tests/contract/sglang/pins.txt").read_text()
    engine = read_compose("compose.gpu.yaml", MODEL).services["engine"]
    [pin] = re.findall(r"^sglang==(.+)$", pins, re.MULTILINE)
    assert engine.image == f"lmsysorg/sglang:v{pin}"
    ours = read_compose("compose.yaml").services["engine"].command[1:]
    flags = {part.replace("--model-path", "--model-dir") for part in engine.command}
    assert flags | {"--skip-tokenizer-init", "--no-api-key"} == set(ours)


# the mesh


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("images")
    return {"slim": make_slim(folder / "slim"), "full": make_full(folder / "full")}


@pytest.mark.parametrize("verb", ["router", "worker", "gateway", "dashboard", "keys", "healthy"])
def test_the_slim_image_has_the_verb(images: dict[str, Path], verb: str) -> None:
    argv = [str(images["slim"] / "rollmesh"), verb, "--help"]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"usage: rollmesh {verb}")


@pytest.mark.parametrize("library", ["torch", "transformers", "pytest"])
def test_the_slim_image_has_nothing_but_the_base_install(
    images: dict[str, Path], library: str
) -> None:
    argv = [str(images["slim"] / "python"), "-c", f"import {library}"]
    absent = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert f"No module named '{library}'" in absent.stderr


def test_the_gateway_of_the_docs_serves_and_stops(tmp_path: Path, images: dict[str, Path]) -> None:
    text = (ROOT / "docs/howto/containers.md").read_text()
    [run] = re.findall(r"^docker run (.*?)^```", text, re.MULTILINE | re.DOTALL)
    argv = shlex.split(run.replace("\\\n", " "))
    at = argv.index("rollmesh:slim")
    flags = list(pairwise(argv[:at]))
    service = Service(
        image=argv[at],
        command=argv[at + 1 :],
        build=Build("..", "docker/Dockerfile", "slim"),
        environment=dict(value.split("=", 1) for flag, value in flags if flag == "-e"),
        volumes=[value for flag, value in flags if flag == "-v"],
    )
    containers = Containers(Compose("docs", {"gateway": service}, {}), tmp_path, images)
    write_model_folder(containers.volumes / "models/Qwen3-8B")
    try:
        containers.start("gateway", patience_s=PATIENCE_S)
        assert (containers.volumes / "gateway-keys/admin.token").is_file()
        assert containers.stop("gateway", STOPS_WITHIN_S) == [0]
    finally:
        containers.kill()


@pytest.fixture
def mesh(tmp_path: Path, images: dict[str, Path]) -> Iterator[Containers]:
    """The services of compose.yaml, with an existing model and a run without end."""
    settings = tmp_path / "mesh.toml"
    write_short_settings(DOCKER / "mesh.toml", settings, num_steps=10_000)
    containers = Containers(read_compose("compose.yaml", {"MESH": str(settings)}), tmp_path, images)
    write_tiny_model(containers.volumes / "models", texts_of(GuessEnv()), TinyShape(), seed=0)
    try:
        yield containers
    finally:
        containers.kill()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_mesh_trains_twice_and_stops_on_request(mesh: Containers) -> None:
    run = mesh.volumes / "runs" / "mesh"
    for names in (("keys", "make-model"), ("engine", "router"), ("worker", "worker")):
        mesh.start(*names, patience_s=PATIENCE_S)
    for _ in range(2):
        mesh.start("keys", patience_s=PATIENCE_S)
        mesh.start("trainer", patience_s=PATIENCE_S)
        if "dashboard" not in mesh.running:
            mesh.start("dashboard", patience_s=PATIENCE_S)
        await_row(run / "metrics.jsonl", lambda row: row["step"] == 1)
        await_row(run / "telemetry.jsonl", lambda row: is_whole(row["router"]))
        [trainer] = mesh.running["trainer"]
        assert mesh.stop("trainer", STOPS_WITHIN_S) == [INTERRUPTED], trainer.log()
    assert all(map(mesh.is_healthy, served(mesh)))
    drain_one_worker(mesh)
    for name in ("worker", "router", "engine", "dashboard"):
        logs = "\n".join(each.log() for each in mesh.running[name])
        assert set(mesh.stop(name, STOPS_WITHIN_S)) == {0}, logs
    for each in (run, run.with_name("mesh.1")):
        summary = read(each / "summary.json")
        assert summary["num_steps"] >= 2
        assert summary["num_lost"] == 0
        assert (each / "checkpoint" / "config.json").is_file()


def drain_one_worker(mesh: Containers) -> None:
    """Drain as in docs/howto/containers.md; the worker's process ends by itself."""
    [router], (first, _) = mesh.running["router"], mesh.running["worker"]
    command = ["rollmesh", "status", "--json", "--router", "http://127.0.0.1:8080"]
    code, output = mesh.execute(router, *command)
    assert code == 0, output
    [name] = [
        worker["worker_id"]
        for worker in json.loads(output)["router"]["workers"]
        if worker["pid"] == first.process.pid
    ]
    command = ["rollmesh", "drain", name, "--router", "tcp://127.0.0.1:5555"]
    code, output = mesh.execute(router, *command)
    assert code == 0, output
    assert first.process.wait(PATIENCE_S) == 0


def await_row(path: Path, is_it: Callable[[dict[str, Any]], bool]) -> None:
    """Follow `path` until it has such a row."""
    next(row for row in follow(path) if is_it(row))


def is_whole(router: dict[str, Any] | None) -> bool:
    """Whether the status shows both workers and an engine that serves."""
    if router is None:
        return False
    workers = {worker["worker_id"] for worker in router["workers"]}
    return len(workers) == 2 and [each["phase"] for each in router["engines"]] == ["ready"]


def served(mesh: Containers) -> list[Container]:
    """The services that have a health check."""
    running = [each for own in mesh.running.values() for each in own]
    return [each for each in running if not each.service.healthcheck.disable]
