"""`rollmesh doctor` names what is broken on this machine, with a remedy, and passes what works."""

import asyncio
import email.utils
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from rollmesh.core.process import OK, USAGE
from rollmesh.launch.doctor.host import KEPT_CHECKPOINTS, KEPT_WEIGHTS, kind_of, size_of
from rollmesh.launch.doctor.mesh import TESTED_SGLANG
from rollmesh.testing.model_folder import write_model_folder
from rollmesh.trainer.checkpoints.store import KEEP
from rollmesh.trainer.weights.folder import KEPT_VERSIONS
from rollmesh.wire.keys import KEYS_VARIABLE, Role, add_member, new_keys, remove_member
from tests.flow.worker_mesh import Process, running

SETTINGS = """
env = "guess"
[run]
folder = "{folder}/runs"
[model]
path = "{folder}/model"
max_context_tokens = 64
[journal]
max_bytes = 1048576
"""
ROOT = Path(__file__).parents[2]
UNSHARE = shutil.which("unshare") or ""
needs_mounts = pytest.mark.skipif(
    os.geteuid() != 0 or not UNSHARE, reason="only root can mount a small disk, by unshare"
)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / "mesh.toml").write_text(SETTINGS.format(folder=tmp_path))
    write_model_folder(tmp_path / "model")
    (tmp_path / "model/model.safetensors").write_bytes(head_of(1000) + bytes(2000))
    return tmp_path


def head_of(num_values: int) -> bytes:
    """The head of a safetensors file; the values are left out."""
    size = 2 * num_values
    head = {"w": {"dtype": "BF16", "shape": [num_values], "data_offsets": [0, size]}}
    text = json.dumps(head).encode()
    return len(text).to_bytes(8, "little") + text


class Report:
    """The output of the verb."""

    def __init__(self, code: int, lines: list[str]) -> None:
        self.code = code
        self.lines = lines

    def of(self, level: str, check: str) -> str:
        """The line of this level and check."""
        found = [each for each in self.lines if each.startswith(f"{level:<4} {check}")]
        assert found, "\n".join(self.lines)
        return found[0]

    @property
    def failures(self) -> list[str]:
        return [each for each in self.lines if each.startswith("FAIL")]


def doctor(home: Path, *more: str, before: tuple[str, ...] = (), **env: str) -> Report:
    argv = [*before, sys.executable, "-m", "rollmesh.cli.main", "doctor", "mesh.toml", *more]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", **env}
    done = subprocess.run(
        argv, cwd=home, env=environment, capture_output=True, text=True, check=False, timeout=300
    )
    report = Report(done.returncode, done.stdout.splitlines())
    assert done.returncode == (USAGE if report.failures else OK), done.stderr
    for line in report.lines:
        assert line.startswith(("ok   ", "warn ", "FAIL "))
        assert line.startswith("ok") or line.rpartition(": ")[2], line
    return report


def test_a_machine_that_can_run_the_mesh_passes(home: Path) -> None:
    report = doctor(home)
    assert report.failures == []
    for check in ("python", "packages", "ports", "keys", "model.path", "tokenizer", "memory"):
        assert report.of("ok", check)
    assert list(home.glob("**/.rollmesh-doctor*")) == []


def test_json_has_the_same_results(home: Path) -> None:
    argv = [sys.executable, "-m", "rollmesh.cli.main", "doctor", "mesh.toml", "--json"]
    argv += ["--set", "trainer.device=cuda"]
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(argv, cwd=home, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == USAGE
    [gpu] = [each for each in json.loads(done.stdout) if each["level"] == "FAIL"]
    assert (gpu["check"], bool(gpu["text"]), bool(gpu["remedy"])) == ("gpu", True, True)


def test_an_old_package_is_named(home: Path) -> None:
    old = home / "site/pyzmq-1.0.dist-info"
    old.mkdir(parents=True)
    (old / "METADATA").write_text("Metadata-Version: 2.1\nName: pyzmq\nVersion: 1.0\n")
    paths = os.pathsep.join([str(home / "site"), str(ROOT)])
    line = doctor(home, PYTHONPATH=paths).of("FAIL", "packages")
    assert "pyzmq is 1.0 and must be >=26.2" in line
    assert "pip install 'rollmesh[train]'" in line


@pytest.mark.parametrize("key", ["router.bind", "trainer.bind", "router.http_bind"])
def test_a_taken_port_is_named_with_its_setting(home: Path, key: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        scheme = "" if key == "router.http_bind" else "tcp://"
        bind = f"{scheme}127.0.0.1:{other.getsockname()[1]}"
        line = doctor(home, "--set", f"{key}={bind}").of("FAIL", "ports")
    assert f"{key} = {bind}: cannot listen there: address already in use" in line


def test_a_public_status_without_a_token_and_a_public_dashboard_fail(home: Path) -> None:
    settings = "--set", "router.http_bind=0.0.0.0:0", "--set", "dashboard.bind=0.0.0.0:0"
    token, page = doctor(home, *settings).failures
    assert "ROLLMESH_ADMIN_TOKEN" in token
    assert "dashboard.bind = 0.0.0.0:0" in page


def test_an_advertised_host_that_others_cannot_use_is_named(home: Path) -> None:
    line = doctor(home, "--set", "network.advertise=no-such-host.invalid").of("FAIL", "addresses")
    assert "network.advertise = no-such-host.invalid" in line
    line = doctor(home, "--set", "network.advertise=localhost").of("warn", "addresses")
    assert "localhost" in line


def test_one_public_url_for_several_workers_fails(home: Path) -> None:
    url = "interception.public_url=https://agents.example"
    assert "{port}" in doctor(home, "--set", url).of("FAIL", "addresses")


def test_a_key_file_that_others_read_or_of_another_role_fails(home: Path) -> None:
    new_keys(home / "keys")
    worker = home / "keys/worker.json"
    parts = "--parts", "worker"
    assert doctor(home, *parts, ROLLMESH_KEYS=str(worker)).of("ok", "keys: worker")
    worker.chmod(0o644)
    line = doctor(home, *parts, ROLLMESH_KEYS=str(worker)).of("FAIL", "keys")
    assert line.endswith(f"chmod 600 {worker}")
    client = home / "keys/client.json"
    line = doctor(home, *parts, ROLLMESH_KEYS=str(client)).of("FAIL", "keys")
    assert "rollmesh keys add worker" in line
    assert doctor(home, *parts, ROLLMESH_KEYS=str(home / "none")).of("FAIL", "keys")


def test_too_few_open_files_fail(home: Path) -> None:
    prlimit = shutil.which("prlimit")
    assert prlimit, "tests of limits use prlimit of util-linux"
    before = (prlimit, "--nofile=200:200")
    line = doctor(home, "--set", "worker.max_rollouts=512", before=before).of("FAIL", "ulimit -n")
    assert "worker.max_rollouts = 512" in line
    assert "ulimit -n 65536" in line


def test_a_run_folder_that_cannot_be_written_fails(home: Path) -> None:
    (home / "file").touch()
    line = doctor(home, "--set", f"run.folder={home}/file/runs").of("FAIL", "run folder")
    assert "set run.folder to another" in line


@needs_mounts
@pytest.mark.parametrize("place", ["runs", "/dev/shm"])
def test_a_small_disk_fails_and_one_in_memory_is_a_warning(home: Path, place: str) -> None:
    (home / "runs").mkdir()
    script = f'mount -t tmpfs -o size=64k none {home / place} && exec "$0" "$@"'
    report = doctor(home, before=(UNSHARE, "--mount", "sh", "-c", script))
    assert "are free" in report.of("FAIL", "disk" if place == "runs" else "/dev/shm")
    if place == "runs":
        assert "tmpfs" in report.of("warn", "run folder")


def test_the_kind_of_file_system_is_that_of_the_nearest_mount(tmp_path: Path) -> None:
    assert kind_of(Path("/proc/self")) == "proc"
    assert kind_of(tmp_path) not in ("", "proc")


def test_a_model_that_is_too_large_for_disk_and_memory_fails(home: Path) -> None:
    assert size_of(home / "model").num_parameters == 1000
    (home / "model/model.safetensors").write_bytes(head_of(2**50))
    report = doctor(home)
    assert "are free" in report.of("FAIL", "disk")
    assert "memory limit" in report.of("FAIL", "memory")


def test_room_is_for_what_the_trainer_keeps() -> None:
    assert (KEPT_CHECKPOINTS, KEPT_WEIGHTS) == (KEEP + 1, KEPT_VERSIONS + 1)


def test_a_gpu_that_is_not_there_fails(home: Path) -> None:
    line = doctor(home, "--set", "trainer.device=cuda:1").of("FAIL", "gpu")
    assert "trainer.device = cuda:1 needs 2, and torch sees 0" in line


def test_a_model_folder_without_tokenizer_or_with_a_lossy_one_fails(home: Path) -> None:
    path = home / "model/tokenizer.json"
    spec = json.loads(path.read_text())
    spec["normalizer"] = {"type": "Lowercase"}
    path.write_text(json.dumps(spec))
    assert "when it is encoded and decoded" in doctor(home).of("FAIL", "tokenizer")
    path.unlink()
    assert "tokenizer.json" in doctor(home).of("FAIL", "model.path")


class OtherEngine(TestServer):
    """Answers like an SGLang server, with settings that may not suit."""

    def __init__(self) -> None:
        app = web.Application()
        for path in ("/model_info", "/server_info"):
            app.router.add_get(path, self._answer)
        super().__init__(app)
        self.info = {"version": TESTED_SGLANG, "context_length": 64, "model_path": "/m/model"}
        self.ahead_s = 0.0
        self.status = 200

    async def _answer(self, request: web.Request) -> web.Response:
        date = email.utils.formatdate(time.time() + self.ahead_s, usegmt=True)
        return web.json_response(self.info, headers={"Date": date}, status=self.status)

    def args(self) -> tuple[str, str]:
        return "--set", f'engine.urls=["{str(self.make_url("")).rstrip("/")}"]'


@pytest.fixture
async def engine() -> AsyncIterator[OtherEngine]:
    engine = OtherEngine()
    await engine.start_server()
    yield engine
    await engine.close()


@pytest.mark.parametrize(
    ("info", "ahead_s", "status", "level", "part"),
    [
        ({}, 0.0, 200, "ok", f"{TESTED_SGLANG}, serves"),
        ({"context_length": 32}, 0.0, 200, "FAIL", "a context of 32 tokens"),
        ({"model_path": "/m/other"}, 0.0, 200, "warn", "serves /m/other"),
        ({"version": "0.4.9"}, 0.0, 200, "warn", "SGLang 0.4.9"),
        ({}, 20.0, 200, "warn", "s ahead of ours"),
        ({}, -3600.0, 200, "FAIL", "s behind ours"),
        ({}, 0.0, 401, "FAIL", "needs a key"),
        ({}, 0.0, 500, "FAIL", "is not an SGLang server"),
    ],
)
async def test_an_engine_that_does_not_suit_is_named(
    home: Path,
    engine: OtherEngine,
    info: dict[str, Any],
    ahead_s: float,
    status: int,
    level: str,
    part: str,
) -> None:
    engine.info |= info
    engine.ahead_s, engine.status = ahead_s, status
    report = await asyncio.to_thread(doctor, home, *engine.args())
    shown = "\n".join(report.lines)
    assert any(x.startswith(f"{level:<4} engine") and part in x for x in report.lines), shown
    assert bool(report.failures) == (level == "FAIL"), shown


def test_an_engine_that_does_not_answer_fails(home: Path) -> None:
    line = doctor(home, "--set", 'engine.urls=["http://127.0.0.1:9"]').of("FAIL", "engine")
    assert "does not answer" in line


@contextmanager
def a_router(home: Path) -> Iterator[Process]:
    """A router with keys whose run folder is `home/runs/mesh`."""
    folder = home / "runs/mesh"
    folder.mkdir(parents=True)
    new_keys(folder / "keys")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(KEYS_VARIABLE, str(folder / "keys"))
        args = ("router", "--config", "mesh.toml", "--engine", "http://127.0.0.1:9")
        with running(home, *args) as router:
            patch.undo()
            yield router


def test_a_machine_that_can_join_a_mesh_is_told_which_engine_it_cannot_reach(home: Path) -> None:
    with a_router(home) as router:
        report = doctor(home, "--router", router.ready.address, "--run", "runs/mesh")
        assert "as worker, of role worker" in report.of("ok", "router")
        assert "is shared" in report.of("ok", "run folder")
        [failure] = report.failures
        assert failure.startswith("FAIL engine http://127.0.0.1:9: does not answer")


def test_a_key_that_was_removed_and_a_missing_router_fail(home: Path) -> None:
    with a_router(home) as router:
        add_member(home / "runs/mesh/keys", Role.WORKER, "gpu-2")
        own = home / "gpu-2.json"
        shutil.copy(home / "runs/mesh/keys/gpu-2.json", own)
        args = "--router", router.ready.address
        assert doctor(home, *args, ROLLMESH_KEYS=str(own)).of("ok", "router")
        remove_member(home / "runs/mesh/keys", "gpu-2")
        assert "refuses our key" in doctor(home, *args, ROLLMESH_KEYS=str(own)).of("FAIL", "router")
    assert "cannot be reached" in doctor(home, *args, ROLLMESH_KEYS=str(own)).of("FAIL", "router")


@needs_mounts
def test_a_folder_that_is_not_shared_fails_where_engines_read_weights(home: Path) -> None:
    with a_router(home) as router:
        own = shutil.copytree(home / "runs/mesh/keys", home / "keys")
        (home / "other").mkdir()
        script = f'mount --bind {home}/other {home}/runs/mesh && exec "$0" "$@"'
        before = (UNSHARE, "--mount", "sh", "-c", script)
        args = ("--router", router.ready.address, "--parts", "engine,worker")
        line = doctor(home, *args, before=before, ROLLMESH_KEYS=str(own)).of("FAIL", "run folder")
        assert 'publish.mode = "distributed"' in line
