"""Only regular files below a program's folder are read."""

import os
from pathlib import Path

import pytest

from rollmesh.envs import read_bytes, read_text
from rollmesh.envs.scratch import open_by_parts


@pytest.fixture
def work(tmp_path: Path) -> Path:
    work = tmp_path / "work"
    (work / "a").mkdir(parents=True)
    (work / "a" / "b.txt").write_text("inside")
    (tmp_path / "secret").write_text("outside")
    return work


def test_a_file_below_the_folder_is_read(work: Path) -> None:
    assert read_text(work, "a/b.txt") == read_text(work, "./a//b.txt") == "inside"
    (work / "raw").write_bytes(b"\xff")
    assert (read_bytes(work, "raw"), read_text(work, "raw")) == (b"\xff", "\ufffd")


@pytest.mark.parametrize("target", ["../secret", "/etc/hostname", "a/b.txt"])
def test_no_symlink_is_followed(work: Path, target: str) -> None:
    (work / "link").symlink_to(target)
    with pytest.raises(OSError, match=r"link"):
        read_text(work, "link")


def test_no_folder_of_the_path_may_be_a_symlink(work: Path) -> None:
    (work / "c").symlink_to("..")
    with pytest.raises(OSError, match="c"):
        read_text(work, "c/secret")


@pytest.mark.parametrize("name", ["../secret", "/etc/hostname", "a/../../secret"])
def test_no_path_leaves_the_folder(work: Path, name: str) -> None:
    with pytest.raises(OSError, match=r"(?i)not a path below|cross-device"):
        read_text(work, name)


def test_a_fifo_or_a_folder_is_refused_at_once(work: Path) -> None:
    os.mkfifo(work / "fifo")
    for name in ("fifo", "a"):
        with pytest.raises(OSError, match=r"not a regular file|Is a directory"):
            read_text(work, name)


def test_a_longer_file_is_refused_and_a_missing_one_is_missing(work: Path) -> None:
    with pytest.raises(OSError, match="longer than 5 bytes"):
        read_text(work, "a/b.txt", max_bytes=5)
    with pytest.raises(FileNotFoundError):
        read_text(work, "a/c.txt")


def test_the_folder_itself_may_not_be_a_symlink(work: Path, tmp_path: Path) -> None:
    (tmp_path / "other").symlink_to(work)
    with pytest.raises(OSError, match="other"):
        read_text(tmp_path / "other", "a/b.txt")


@pytest.mark.parametrize("name", ["../secret", "/etc/hostname", "link", "c/secret", "", "a/.."])
def test_a_kernel_without_openat2_is_as_strict(work: Path, name: str) -> None:
    (work / "link").symlink_to("a/b.txt")
    (work / "c").symlink_to("..")
    root = os.open(work, os.O_RDONLY)
    try:
        os.close(open_by_parts(root, "a/b.txt"))
        with pytest.raises(OSError, match=r"link|c|below"):
            open_by_parts(root, name)
    finally:
        os.close(root)
