"""A worker keeps no secret where a program that runs beside it could read it."""

import ctypes
import os
from pathlib import Path

import pytest

from rollmesh.core.secret_files import protect_memory
from rollmesh.wire.keys import KEYS_VARIABLE, new_keys
from tests.flow.launched_mesh import LaunchedMesh

NOBODY = 65534
PR_SET_DUMPABLE = 4


def test_a_launched_worker_has_no_secret_in_its_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    new_keys(tmp_path / "mesh.json")
    monkeypatch.setenv(KEYS_VARIABLE, str(tmp_path / "mesh.json"))
    monkeypatch.setenv("ROLLMESH_ADMIN_TOKEN", "open-sesame")
    folder = tmp_path / "mesh"
    folder.mkdir()
    mesh = LaunchedMesh(folder, "http://127.0.0.1:9", env="echo", worker={"num_workers": 1})
    try:
        mesh.until_ready("router", "worker-0")  # it greets with the keys that launch passed to it
        pid = mesh.pids()["worker-0"]
        environ = Path(f"/proc/{pid}/environ").read_bytes()
        for secret in (b"open-sesame", b"mesh.json", b"ROLLMESH_KEYS", b"ADMIN_TOKEN"):
            assert secret not in environ
        limits = Path(f"/proc/{pid}/limits").read_text()
        assert limits.split("Max core file size")[1].split()[0] == "0"
        is_dumpable = os.stat(f"/proc/{pid}/environ").st_uid == os.geteuid()
        assert os.geteuid() == 0 or not is_dumpable
    finally:
        mesh.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may become another user")
def test_a_program_of_the_same_user_reads_neither_environment_nor_memory() -> None:
    assert readable_by_its_own_user(is_protected=False) == ["environ", "mem"]
    assert readable_by_its_own_user(is_protected=True) == []


def readable_by_its_own_user(*, is_protected: bool) -> list[str]:
    """The files in /proc of a process of user nobody that another process of nobody can open."""
    to_holder, to_us = os.pipe(), os.pipe()
    holder = os.fork()
    if holder == 0:
        become_nobody()
        if is_protected:
            protect_memory()
        os.write(to_us[1], b".")
        os.close(to_holder[1])
        os.read(to_holder[0], 1)
        os._exit(0)
    os.read(to_us[0], 1)
    reader = os.fork()
    if reader == 0:
        become_nobody()
        for name in ("environ", "mem"):
            try:
                os.close(os.open(f"/proc/{holder}/{name}", os.O_RDONLY))
                os.write(to_us[1], f"{name} ".encode())
            except PermissionError:
                pass
        os.write(to_us[1], b"end")
        os._exit(0)
    os.waitpid(reader, 0)
    found = os.read(to_us[0], 100).decode().removesuffix("end").split()
    for descriptor in (*to_holder, *to_us):
        os.close(descriptor)
    os.waitpid(holder, 0)
    return found


def become_nobody() -> None:
    """Change to user nobody, whose processes that user can inspect, as after exec."""
    os.setgroups([])
    os.setgid(NOBODY)
    os.setuid(NOBODY)
    ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 1, 0, 0, 0)
