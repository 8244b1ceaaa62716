"""Scratch folders are separate, private and removed."""

import asyncio
import errno
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from rollmesh.core.errors import InfraError
from rollmesh.envs.scratch import ROLLOUT_PREFIX, new_scratch, remove, sweep


async def test_scratch_folders_are_empty_private_and_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    async with new_scratch() as one, new_scratch() as other:
        assert one.home != one.work != other.work
        assert [*one.home.iterdir(), *one.work.iterdir()] == []
        assert stat.S_IMODE(one.home.parent.stat().st_mode) == stat.S_IRWXU
        (one.work / "file").write_text("x")
    assert os.listdir(tmp_path) == []


async def test_scratch_folders_are_removed_when_the_rollout_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.raises(RuntimeError):
        async with new_scratch():
            raise RuntimeError
    assert os.listdir(tmp_path) == []


DIES = """import asyncio, os
from rollmesh.envs.scratch import new_scratch
async def main():
    async with new_scratch() as scratch:
        (scratch.work / "file").write_text("x")
        os._exit(9)
asyncio.run(main())
"""


async def test_folders_of_a_killed_worker_are_swept_and_those_in_use_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    other = tmp_path / "rollmesh-without-a-lock" / "file"
    other.parent.mkdir()
    other.touch()
    async with new_scratch() as mine:
        argv = [sys.executable, "-c", DIES]
        died = await asyncio.create_subprocess_exec(*argv, env={"TMPDIR": str(tmp_path)})
        assert await died.wait() == 9
        assert len(os.listdir(tmp_path)) == 3
        assert sweep() == 1
        assert mine.work.exists()
    assert os.listdir(tmp_path) == [other.parent.name]


CREATES_AND_REMOVES = """import asyncio, signal, sys
from rollmesh.envs.scratch import new_scratch
async def main():
    signal.setitimer(signal.ITIMER_REAL, float(sys.argv[1]))  # SIGALRM ends it without cleanup
    while True:
        async with new_scratch() as scratch:
            (scratch.work / "file").write_text("x")
asyncio.run(main())
"""


def test_a_worker_may_be_killed_at_any_moment_of_creation_and_removal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    for milliseconds in range(1, 9, 2):
        argv = [sys.executable, "-c", CREATES_AND_REMOVES, str(milliseconds / 1000)]
        with subprocess.Popen(argv, env=environment) as worker:
            while worker.poll() is None:
                sweep()
        assert worker.returncode == -signal.SIGALRM
        sweep()
        assert os.listdir(tmp_path) == []


def test_an_empty_scratch_folder_is_swept_and_another_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (tmp_path / f"{ROLLOUT_PREFIX}x").mkdir()
    (tmp_path / "rollmesh-x").mkdir()
    sweep()
    assert os.listdir(tmp_path) == ["rollmesh-x"]


async def test_nothing_is_left_of_a_rollout_that_is_cancelled_while_its_folder_is_created(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    async def roll_out() -> None:
        async with new_scratch():
            await asyncio.Event().wait()

    for _ in range(50):
        rollout = asyncio.create_task(roll_out())
        await asyncio.sleep(0)
        rollout.cancel()
        with pytest.raises(asyncio.CancelledError):
            await rollout
    assert os.listdir(tmp_path) == []


async def test_a_scratch_folder_that_cannot_be_created_is_an_infra_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "gone"))
    with pytest.raises(InfraError, match="gone: no scratch folder"):
        async with new_scratch():
            raise AssertionError


async def test_a_scratch_folder_on_a_full_disk_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def is_full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(Path, "mkdir", is_full)
    with pytest.raises(InfraError, match="no scratch folder: No space left on device"):
        async with new_scratch():
            raise AssertionError
    assert os.listdir(tmp_path) == []


async def test_folders_nested_beyond_the_recursion_limit_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    async with new_scratch() as scratch:
        dig = "import os\nfor _ in range(1500): os.mkdir('d'); os.chdir('d')"
        argv = [sys.executable, "-c", dig]
        dug = await asyncio.create_subprocess_exec(*argv, cwd=scratch.work)
        assert await dug.wait() == 0
    assert os.listdir(tmp_path) == []


@pytest.mark.skipif(os.geteuid() == 0, reason="root needs no permissions")
def test_revoked_permissions_do_not_prevent_removal(tmp_path: Path) -> None:
    root = tmp_path / "scratch"
    for name in ("a/b/c", "read_only/inner"):
        (root / name).mkdir(parents=True)
        (root / name / "file").write_text("x")
    for name in ("a/b/c", "a/b", "a", "read_only/inner"):
        (root / name).chmod(0)
    for name in ("read_only", "."):
        (root / name).chmod(0o500)
    remove(root)
    assert not root.exists()


def test_symlinks_are_not_followed_on_removal(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.mkdir()
    (kept / "file").write_text("x")
    root = tmp_path / "scratch"
    root.mkdir()
    (root / "link").symlink_to(kept)
    remove(root)
    assert not root.exists()
    assert (kept / "file").exists()


def test_a_symlink_named_like_a_scratch_folder_is_not_swept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    journal = tmp_path / "journal"
    journal.mkdir(mode=0o750)
    (journal / "lock").touch()
    (tmp_path / "rollmesh-x").symlink_to(journal)
    assert sweep() == 0
    assert stat.S_IMODE(journal.stat().st_mode) == 0o750
    assert (journal / "lock").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may become another user")
def test_a_folder_of_another_user_is_not_swept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    theirs = tmp_path / "rollmesh-x"
    theirs.mkdir()
    (theirs / "lock").touch()
    os.chown(theirs, 65534, 65534)
    assert sweep() == 0
    assert (theirs / "lock").exists()
