"""`rollmesh doctor` names what is broken on this machine, with a remedy, and passes what works."""

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from rollmesh.cli.doctor import check_tokenizer
from rollmesh.core.process import OK, USAGE
from rollmesh.launch.doctor.findings import Finding, Level, Part
from rollmesh.launch.doctor.host import (
    KEPT_CHECKPOINTS,
    KEPT_WEIGHTS,
    check_addresses,
    check_keys,
    check_ports,
    kind_of,
    memory_limit,
    size_of,
)
from rollmesh.trainer.checkpoints.store import KEEP
from rollmesh.trainer.weights.folder import KEPT_VERSIONS
from rollmesh.wire.keys import KEYS_VARIABLE, new_keys
from tests.flow.doctor import (
    ROOT,
    UNSHARE,
    check_bad,
    doctor,
    head_of,
    needs_mounts,
    plan_of,
)
from tests.flow.doctor import home as home  # the fixture


def test_a_machine_that_can_run_the_mesh_passes(home: Path) -> None:
    report = doctor(home)
    assert report.failures == []
    for check in ("python", "packages", "ports", "keys", "model.path", "tokenizer", "memory"):
        assert report.of("ok", check)
    assert list(home.glob("**/.rollmesh-doctor*")) == []


def test_a_gpu_that_is_not_there_fails_and_json_has_the_same_results(home: Path) -> None:
    argv = [sys.executable, "-m", "rollmesh.cli.main", "doctor", "mesh.toml", "--json"]
    argv += ["--set", "trainer.device=cuda:1"]
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(argv, cwd=home, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == USAGE
    [gpu] = [each for each in json.loads(done.stdout) if each["level"] == "FAIL"]
    assert (gpu["check"], bool(gpu["remedy"])) == ("gpu", True)
    assert gpu["text"] == "trainer.device = cuda:1 needs 2, and torch sees 0"


def test_an_old_package_is_named(home: Path) -> None:
    old = home / "site/pyzmq-1.0.dist-info"
    old.mkdir(parents=True)
    (old / "METADATA").write_text("Metadata-Version: 2.1\nName: pyzmq\nVersion: 1.0\n")
    paths = os.pathsep.join([str(home / "site"), str(ROOT)])
    line = doctor(home, PYTHONPATH=paths).of("FAIL", "packages")
    assert "pyzmq is 1.0 and must be >=26.2" in line
    assert "pip install 'rollmesh[train]'" in line


def test_an_old_python_and_missing_packages_are_named(home: Path) -> None:
    needed = home / "site/rollmesh-1.dist-info"
    needed.mkdir(parents=True)
    (needed / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: rollmesh\nVersion: 1\nRequires-Python: >=9.1\n"
        "Requires-Dist: no-such-package-1>=2\nRequires-Dist: pyzmq>=9000\n"
        "Requires-Dist: no-such-package-2; extra == 'train'\n"
        "Requires-Dist: no-such-package-3; extra == 'ray'\n"
    )
    paths = os.pathsep.join([str(home / "site"), str(ROOT)])
    report = doctor(home, PYTHONPATH=paths)
    assert "rollmesh needs >=9.1; install Python >=9.1" in report.of("FAIL", "python")
    line = report.of("FAIL", "packages")
    assert "no-such-package-1 is missing, pyzmq is " in line
    assert "and must be >=9000, no-such-package-2 is missing; pip install" in line


def test_a_copy_that_is_not_installed_is_a_warning(home: Path) -> None:
    (home / "site").mkdir()
    for path in Path(msgspec.__file__).parents[1].iterdir():
        if "rollmesh" not in path.name:
            (home / "site" / path.name).symlink_to(path)
    argv = [sys.executable, "-S", "-m", "rollmesh.cli.main", "doctor", "mesh.toml"]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(home / "site")])}
    done = subprocess.run(argv, cwd=home, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == OK, done.stderr
    line = done.stdout.splitlines()[0]
    assert line.startswith("warn packages: rollmesh is not installed")


def test_an_unknown_setting_or_a_missing_file_is_one_line(home: Path) -> None:
    text = (home / "mesh.toml").read_text()
    (home / "mesh.toml").write_text(f"rooter = 1\n{text}")
    for path, word in (("mesh.toml", "'rooter'"), ("none.toml", "`rollmesh init` writes one")):
        argv = [sys.executable, "-m", "rollmesh.cli.main", "doctor", path]
        done = subprocess.run(argv, cwd=home, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout) == (USAGE, "")
        [line] = done.stderr.splitlines()
        assert word in line


@pytest.mark.parametrize("key", ["router.bind", "trainer.bind", "router.http_bind"])
def test_a_taken_port_is_named_with_its_setting(home: Path, key: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        scheme = "" if key == "router.http_bind" else "tcp://"
        bind = f"{scheme}127.0.0.1:{other.getsockname()[1]}"
        found = list(check_ports(plan_of(home, f"{key}={bind}")))
    [failure] = [each for each in found if each.level is not Level.OK]
    words = f"{key} = {bind}: cannot listen there: address already in use", "ss -ltnp"
    check_bad(failure, Level.FAIL, *words)


@pytest.mark.parametrize(
    ("bind", "why"),
    [
        ("tcp://192.0.2.1:5555", "cannot assign requested address"),
        ("tcp://no-such-host.invalid:5555", "not known"),
        ("tcp://127.0.0.1:99999", "not a number up to 65535"),
        ("tcp://127.0.0.1", "not a number up to 65535"),
    ],
)
def test_an_address_where_this_machine_cannot_listen_is_named(
    home: Path, bind: str, why: str
) -> None:
    [found] = check_ports(plan_of(home, f"trainer.bind={bind}", parts=(Part.TRAINER,)))
    check_bad(found, Level.FAIL, f"trainer.bind = {bind}: cannot listen there: ", why)


def test_a_public_status_without_a_token_and_a_public_dashboard_fail(home: Path) -> None:
    settings = "--set", "router.http_bind=0.0.0.0:0", "--set", "dashboard.bind=0.0.0.0:0"
    token, page = doctor(home, *settings).failures
    assert "ROLLMESH_ADMIN_TOKEN" in token
    assert "dashboard.bind = 0.0.0.0:0" in page


def test_an_advertised_host_that_others_cannot_use_is_named(home: Path) -> None:
    [found] = check_addresses(plan_of(home, "network.advertise=no-such-host.invalid"))
    check_bad(found, Level.FAIL, "network.advertise = no-such-host.invalid")
    [found] = check_addresses(plan_of(home, "network.advertise=localhost"))
    check_bad(found, Level.WARN, "network.advertise = localhost is 127.0.0.1 here")


def test_one_public_url_for_several_workers_fails(home: Path) -> None:
    plan = plan_of(home, "interception.public_url=https://agents.example", parts=(Part.WORKER,))
    [found] = check_addresses(plan)
    check_bad(found, Level.FAIL, "{port}", "{host}")


def test_a_key_file_that_others_read_or_of_another_role_fails(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    new_keys(home / "keys")
    worker = home / "keys/worker.json"
    plan = plan_of(home, parts=(Part.WORKER,))

    def found(path: Path) -> Finding:
        monkeypatch.setenv(KEYS_VARIABLE, str(path))
        [finding], _ = check_keys(plan)
        return finding

    assert found(worker).line == "ok   keys: worker: worker, of role worker"
    worker.chmod(0o644)
    check_bad(found(worker), Level.FAIL, f"chmod 600 {worker}")
    check_bad(found(home / "keys/client.json"), Level.FAIL, "rollmesh keys add worker")
    check_bad(found(home / "none"), Level.FAIL, f"{home}/none: no such file", "keys export")
    (home / "text").write_text("key")
    (home / "text").chmod(0o600)
    check_bad(found(home / "text"), Level.FAIL, "not a key file", "keys export")


def test_a_worker_without_a_key_and_a_run_that_is_not_there_are_named(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(KEYS_VARIABLE, raising=False)
    plan = plan_of(home, parts=(Part.WORKER,))
    [found], _ = check_keys(plan)
    check_bad(found, Level.WARN, "worker: no key file is named", KEYS_VARIABLE)
    everything = plan_of(home)
    lost = msgspec.structs.replace(everything, run=home / "runs/none")
    [found], _ = check_keys(lost)
    check_bad(found, Level.FAIL, f"--run {home}/runs/none: no such run folder")


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
    assert "are free" in report.of("FAIL", f"disk {home / place}")
    if place == "runs":
        assert "tmpfs" in report.of("warn", "run folder")


def test_the_kind_of_file_system_is_that_of_the_nearest_mount(tmp_path: Path) -> None:
    assert kind_of(Path("/proc/self")) == "proc"
    assert kind_of(tmp_path) not in ("", "proc")


MOUNTS = """
22 1 8:1 / / rw - ext4 /dev/sda1 rw
30 22 0:40 / /data rw shared:7 - nfs4 server:/data rw
31 30 8:2 / /data/a\\040disk\\134\u00e9 rw - xfs /dev/sdb1 rw
"""


def test_the_kind_of_file_system_is_read_from_the_mounts(tmp_path: Path) -> None:
    mounts = tmp_path / "mountinfo"
    mounts.write_text(MOUNTS.lstrip())
    places = {"/home": "ext4", "/data/runs": "nfs4", "/data/a disk\\\u00e9/runs": "xfs"}
    assert {each: kind_of(Path(each), mounts) for each in places} == places
    assert kind_of(tmp_path, tmp_path / "none") == ""


@pytest.mark.parametrize(
    ("groups", "limits"),
    [
        ("0::/pod/run", {"pod/run/memory.max": "max", "pod/memory.max": "4096"}),
        ("0::/", {"memory.max": "4096"}),
        ("4:memory:/job\n0::/", {"memory/job/memory.limit_in_bytes": "4096"}),
        # A container has its own group as the root, and the host's path of it.
        ("4:memory:/docker/1f", {"memory/memory.limit_in_bytes": "4096"}),
    ],
)
def test_the_memory_limit_is_the_least_of_the_cgroups(
    tmp_path: Path, groups: str, limits: dict[str, str]
) -> None:
    (tmp_path / "cgroup").write_text(f"{groups}\n")
    for name, text in limits.items():
        (tmp_path / "fs" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "fs" / name).write_text(f"{text}\n")
    assert memory_limit(tmp_path / "cgroup", tmp_path / "fs") == 4096
    assert memory_limit(tmp_path / "cgroup", tmp_path / "none") > 2**28


@needs_mounts
def test_a_run_folder_on_a_network_disk_and_a_small_cgroup_are_named(home: Path) -> None:
    (home / "mounts").write_text(f"22 1 0:40 / {home} rw - nfs4 server:/home rw\n")
    (home / "group").write_text("0::/\n")
    (home / "fs").mkdir()
    (home / "fs/memory.max").write_text(f"{2**26}\n")
    pairs = {"mounts": "/proc/$$/mountinfo", "group": "/proc/$$/cgroup", "fs": "/sys/fs/cgroup"}
    binds = [f"mount --bind {home / each} {place}" for each, place in pairs.items()]
    script = " && ".join([*reversed(binds), 'exec "$0" "$@"'])
    report = doctor(home, before=(UNSHARE, "--mount", "sh", "-c", script))
    assert "is on nfs4, where syncing is slow" in report.of("warn", "run folder")
    assert "0.06 GiB are allowed" in report.of("FAIL", "memory")


def test_a_model_that_is_too_large_for_disk_and_memory_fails(home: Path) -> None:
    assert size_of(home / "model").num_parameters == 1000
    (home / "model/model.safetensors").write_bytes(head_of(2**50))
    report = doctor(home)
    assert "are free" in report.of("FAIL", "disk")
    assert "memory limit" in report.of("FAIL", "memory")


def test_room_is_for_what_the_trainer_keeps() -> None:
    assert (KEPT_CHECKPOINTS, KEPT_WEIGHTS) == (KEEP + 1, KEPT_VERSIONS + 1)


def test_a_model_folder_without_tokenizer_or_with_a_lossy_one_fails(home: Path) -> None:
    path = home / "model/tokenizer.json"
    spec = json.loads(path.read_text())
    spec["normalizer"] = {"type": "Lowercase"}
    path.write_text(json.dumps(spec))
    [found] = check_tokenizer(plan_of(home))
    check_bad(found, Level.FAIL, "when it is encoded and decoded")
    path.unlink()
    assert "tokenizer.json" in doctor(home).of("FAIL", "model.path")
