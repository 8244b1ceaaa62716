"""A segment stays visible to processes that attached it, and leaves no file behind."""

import os
import stat
import threading
from pathlib import Path

import pytest

from rollmesh.tensors.segment import AttachedSegment, Segment, sweep

NUM_BYTES = 1 << 16
MINE = f"rollmesh-{os.getuid()}-"


@pytest.fixture
def segment(tmp_path: Path) -> Segment:
    segment = Segment(tmp_path, NUM_BYTES)
    segment.back(0, NUM_BYTES)
    segment.memory[100:105] = b"hello"
    return segment


def test_an_attached_segment_shows_later_writes(segment: Segment) -> None:
    seen = AttachedSegment(segment.path).view(100, 5)
    assert seen.tobytes() == b"hello"
    segment.memory[101:102] = b"a"
    assert seen.tobytes() == b"hallo"


def test_an_attached_segment_is_read_only(segment: Segment) -> None:
    seen = AttachedSegment(str(segment.path)).view(100, 5)
    assert not seen.flags.writeable
    with pytest.raises(ValueError, match="cannot set WRITEABLE flag"):
        seen.flags.writeable = True


def test_only_its_user_can_open_it(segment: Segment) -> None:
    assert stat.S_IMODE(segment.path.stat().st_mode) == 0o600


def test_a_place_beyond_its_end_is_refused(segment: Segment) -> None:
    attached = AttachedSegment(segment.path)
    for offset, num_bytes in [(NUM_BYTES - 4, 5), (NUM_BYTES + 1, 0), (-1, 1)]:
        with pytest.raises(ValueError, match=r"buffer|offset"):
            attached.view(offset, num_bytes)
    assert attached.view(NUM_BYTES, 0).nbytes == 0


def test_views_stay_valid_when_the_segment_is_closed(segment: Segment) -> None:
    seen = AttachedSegment(segment.path).view(100, 5)
    segment.close()
    segment.close()
    assert not segment.path.exists()
    with pytest.raises(FileNotFoundError):
        AttachedSegment(segment.path)
    del segment
    assert seen.tobytes() == b"hello"


def test_one_that_is_forgotten_leaves_no_file(tmp_path: Path) -> None:
    segment = Segment(tmp_path, NUM_BYTES)
    assert [*tmp_path.iterdir()] == [segment.path]
    del segment
    assert [*tmp_path.iterdir()] == []


def test_a_folder_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        Segment(tmp_path / "absent", NUM_BYTES)


def test_a_sweep_removes_only_our_unused_segments(segment: Segment, tmp_path: Path) -> None:
    orphan = tmp_path / f"{MINE}1"
    others = [tmp_path / f"rollmesh-{os.getuid() + 1}-1", tmp_path / "rollmesh.toml"]
    for path in (orphan, *others):
        path.touch()
    link = tmp_path / f"{MINE}2"
    link.symlink_to(others[1])
    assert sweep(tmp_path) == 1
    assert {*tmp_path.iterdir()} == {segment.path, link, *others}


def test_a_new_segment_sweeps_first(tmp_path: Path) -> None:
    (tmp_path / f"{MINE}1").touch()
    segment = Segment(tmp_path, NUM_BYTES)
    assert [*tmp_path.iterdir()] == [segment.path]


def test_no_sweep_comes_between_the_making_and_the_lock(tmp_path: Path) -> None:
    is_over = threading.Event()

    def sweep_on() -> None:
        while not is_over.is_set():
            sweep(tmp_path)

    sweepers = [threading.Thread(target=sweep_on) for _ in range(3)]
    for each in sweepers:
        each.start()
    try:
        segments = [Segment(tmp_path, 4096) for _ in range(200)]
    finally:
        is_over.set()
        for each in sweepers:
            each.join()
    assert {*tmp_path.iterdir()} == {each.path for each in segments}
