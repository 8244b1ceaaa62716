"""A checkpoint is complete or refused: any bit flip, length change or missing file is found."""

import os
import shutil
import zlib
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollmesh.core.errors import CheckpointError
from rollmesh.trainer.checkpoints.manifest import (
    MANIFEST,
    record_pieces,
    seal,
    verify,
    write_pieces,
)
from tests.disks import full_disk

HALF = b"the rows of one rank, "
OTHER = b"and those of another"


def write(folder: Path) -> Path:
    """Write a checkpoint of two ranks, with one file written by both."""
    (folder / "model").mkdir(parents=True)
    for rank, (offset, data) in enumerate([(0, HALF), (len(HALF), OTHER)]):
        own = {f"random-{rank}": write_pieces(folder / f"random-{rank}", [(0, bytes([rank] * 9))])}
        both = {"model/both": write_pieces(folder / "model/both", [(offset, data)])}
        record_pieces(folder, str(rank), own | both)
    record_pieces(folder, "loop", {"empty": write_pieces(folder / "empty", [])})
    seal(folder)
    return folder


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("manifest") / "whole")


def files_of(folder: Path) -> list[str]:
    return sorted(str(each.relative_to(folder)) for each in folder.rglob("*") if each.is_file())


def test_file_written_by_two_ranks_is_verified(whole: Path) -> None:
    assert (whole / "model/both").read_bytes() == HALF + OTHER
    assert verify(whole).num_bytes == len(HALF + OTHER) + 18
    assert files_of(whole) == ["empty", "manifest.json", "model/both", "random-0", "random-1"]


@given(st.data())
def test_any_bit_that_flips_is_found(
    tmp_path_factory: pytest.TempPathFactory, whole: Path, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("flipped") / "it"
    shutil.copytree(whole, folder)
    path = folder / data.draw(st.sampled_from([n for n in files_of(whole) if n != "empty"]))
    content = bytearray(path.read_bytes())
    bit = data.draw(st.integers(0, 8 * len(content) - 1))
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=str(folder)) as caught:
        verify(folder)
    assert "\n" not in str(caught.value)


@given(st.data())
def test_any_file_that_is_cut_or_grows_is_found(
    tmp_path_factory: pytest.TempPathFactory, whole: Path, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("cut") / "it"
    shutil.copytree(whole, folder)
    path = folder / data.draw(st.sampled_from(files_of(whole)))
    size_bytes = path.stat().st_size
    sizes = st.integers(0, size_bytes + 3).filter(size_bytes.__ne__)
    os.truncate(path, data.draw(sizes))
    with pytest.raises(CheckpointError, match=str(path)):
        verify(folder)


@pytest.mark.parametrize("name", ["empty", "manifest.json", "model/both", "random-1"])
def test_missing_file_is_named(whole: Path, tmp_path: Path, name: str) -> None:
    shutil.copytree(whole, tmp_path / "it")
    (tmp_path / "it" / name).unlink()
    reason = "incomplete: it has no manifest" if name == MANIFEST else f"{name}: missing"
    with pytest.raises(CheckpointError, match=reason):
        verify(tmp_path / "it")


def test_unrecorded_file_is_not_sealed(tmp_path: Path) -> None:
    folder = tmp_path / "it"
    (folder / "model").mkdir(parents=True)
    (folder / "model/stray").touch()
    with pytest.raises(CheckpointError, match=r"model/stray: not part of the checkpoint"):
        seal(folder)
    assert not (folder / MANIFEST).exists()


def test_files_added_after_the_seal_are_ignored(whole: Path, tmp_path: Path) -> None:
    shutil.copytree(whole, tmp_path / "it")
    for name in ("README", "model/.nfs000000000001"):  # left by an NFS client for open files
        (tmp_path / "it" / name).write_text("mine")
    assert verify(tmp_path / "it") == verify(whole)


def test_missing_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no manifest"):
        verify(tmp_path / "absent")
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="file"):
        verify(tmp_path / "file")


def test_manifest_of_another_format_names_it(whole: Path, tmp_path: Path) -> None:
    shutil.copytree(whole, tmp_path / "it")
    path = tmp_path / "it" / MANIFEST
    text = path.read_bytes().replace(b'"format":1', b'"format":2')
    sealed = msgspec.json.decode(text)
    sealed["crc32"] = zlib.crc32(msgspec.json.encode(sealed["manifest"]))
    path.write_bytes(msgspec.json.encode(sealed))
    with pytest.raises(CheckpointError, match="format 2; this version of rollmesh reads 1"):
        verify(tmp_path / "it")


def test_unwritten_bytes_are_not_sealed(tmp_path: Path) -> None:
    folder = tmp_path / "it"
    folder.mkdir()
    record_pieces(folder, "1", {"both": write_pieces(folder / "both", [(len(HALF), OTHER)])})
    with pytest.raises(CheckpointError, match=r"both: bytes from 0 on were not written"):
        seal(folder)
    assert not (folder / MANIFEST).exists()


def test_bytes_written_twice_are_not_sealed(tmp_path: Path) -> None:
    folder = tmp_path / "it"
    folder.mkdir()
    for rank in ("0", "1"):
        record_pieces(folder, rank, {"both": write_pieces(folder / "both", [(0, OTHER)])})
    with pytest.raises(CheckpointError, match="bytes from 20 on were not written"):
        seal(folder)


def test_a_full_disk_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    with full_disk(50), pytest.raises(CheckpointError, match=r"file: File too large"):
        write_pieces(tmp_path / "file", [(0, b"x" * 100)])
