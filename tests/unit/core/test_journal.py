"""The journal: records are whole or absent, and damage is never skipped in silence."""

import errno
import os
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollmesh.core.errors import JournalError
from rollmesh.core.journal import MAGIC, Journal
from tests.disks import full_disk, small_disk

BIG = 2**20


def fill(folder: Path, *records: list[bytes], segment_bytes: int = BIG) -> list[int]:
    journal = Journal(folder, segment_bytes)
    positions = [journal.append(frames) for frames in records]
    journal.close()
    return positions


def read(folder: Path) -> list[list[bytes]]:
    journal = Journal(folder, BIG)
    try:
        return [frames for _, frames in journal.replay()]
    finally:
        journal.close()


def only_segment(folder: Path) -> Path:
    [path] = folder.glob("*.journal")
    return path


def test_a_batch_of_records_is_written_whole_or_not_at_all_on_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = Journal(tmp_path / "journal", BIG)
    records = [[b"a", b"b"], [b"x" * 100_000], [b"c"]]
    before = journal.append([b"first"])
    with (
        small_disk(monkeypatch, tmp_path / "journal", 1000),
        pytest.raises(JournalError, match="No space"),
    ):
        journal.append_all(records)
    assert [frames for _, frames in journal.replay()] == [[b"first"]]
    positions = journal.append_all(records)
    assert list(journal.replay()) == list(
        zip([before, *positions], [[b"first"], *records], strict=True)
    )
    journal.close()


def test_a_kill_during_a_batch_leaves_its_first_records(tmp_path: Path) -> None:
    journal = Journal(tmp_path, BIG)
    records = [[b"a" * 20], [b"b" * 30], [b"c" * 40]]
    ends = [*journal.append_all(records)[1:], journal.end]
    journal.close()
    whole = only_segment(tmp_path).read_bytes()
    for size in range(len(MAGIC), len(whole) + 1):
        only_segment(tmp_path).write_bytes(whole[:size])
        num_whole = sum(end <= size for end in ends)
        assert read(tmp_path) == records[:num_whole]


def test_records_come_back_in_order_with_their_positions(tmp_path: Path) -> None:
    records = [[b"a", b"", b"bcd"], [], [b"x" * 5000]]
    positions = fill(tmp_path, *records)
    journal = Journal(tmp_path, BIG)
    assert list(journal.replay()) == list(zip(positions, records, strict=True))
    assert positions == sorted(set(positions))
    journal.close()


def test_buffers_of_any_kind_are_stored_as_their_bytes(tmp_path: Path) -> None:
    fill(tmp_path, [memoryview(b"abcd").cast("I"), bytearray(b"ef")])  # type: ignore[list-item]
    assert read(tmp_path) == [[b"abcd", b"ef"]]


def test_more_frames_than_one_write_takes_are_stored_whole(tmp_path: Path) -> None:
    frames = [bytes([number % 251]) * (number % 7) for number in range(2500)]
    fill(tmp_path, frames, [b"after"])
    assert read(tmp_path) == [frames, [b"after"]]


@pytest.mark.parametrize("fsync", [False, True])
def test_writing_continues_where_it_ended(tmp_path: Path, fsync: bool) -> None:
    for text in (b"one", b"two"):
        journal = Journal(tmp_path, BIG, fsync=fsync)
        journal.append([text])
        journal.close()
    assert read(tmp_path) == [[b"one"], [b"two"]]


@pytest.mark.parametrize("fsync", [False, True])
def test_fsync_syncs_each_record_before_append_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fsync: bool
) -> None:
    synced: list[int] = []
    sync = os.fdatasync

    def seen_sync(file: int) -> None:
        synced.append(os.fstat(file).st_size)
        sync(file)

    monkeypatch.setattr(os, "fdatasync", seen_sync)
    journal = Journal(tmp_path, BIG, fsync=fsync)
    sizes = []
    for text in (b"one", b"two"):
        journal.append([text])
        sizes.append(only_segment(tmp_path).stat().st_size)
    assert synced == (sizes if fsync else [])
    journal.close()


def test_full_segment_is_closed_and_the_next_begins(tmp_path: Path) -> None:
    fill(tmp_path, *([bytes(60)] for _ in range(10)), segment_bytes=150)
    assert len(list(tmp_path.glob("*.journal"))) == 5
    assert len(read(tmp_path)) == 10


def test_dropping_frees_whole_segments_and_keeps_what_is_needed(tmp_path: Path) -> None:
    positions = fill(tmp_path, *([bytes(60)] for _ in range(10)), segment_bytes=150)
    journal = Journal(tmp_path, 150)
    before = journal.size_bytes
    journal.drop_before(positions[5])
    left = [position for position, _ in journal.replay()]
    assert set(positions[5:]) <= set(left)
    assert positions[0] not in left
    assert journal.size_bytes < before
    assert journal.append([b"more"]) > positions[-1]
    journal.drop_before(2**62)
    assert len(list(tmp_path.glob("*.journal"))) == 1
    journal.close()


def test_positions_continue_after_everything_else_was_dropped(tmp_path: Path) -> None:
    positions = fill(tmp_path, *([bytes(60)] for _ in range(4)), segment_bytes=100)
    journal = Journal(tmp_path, 100)
    journal.drop_before(2**62)
    journal.close()
    again = Journal(tmp_path, 100)
    assert again.append([b"x"]) > positions[-1]
    again.close()


@given(st.integers(1, 200))
def test_torn_end_is_cut_off_at_open(tmp_path_factory: pytest.TempPathFactory, cut: int) -> None:
    folder = tmp_path_factory.mktemp("journal")
    _, second = fill(folder, [b"first"], [b"second" * 30])
    path = only_segment(folder)
    os.truncate(path, max(second, path.stat().st_size - cut))
    assert read(folder) == [[b"first"]]
    fill(folder, [b"third"])
    assert read(folder) == [[b"first"], [b"third"]]


@pytest.mark.parametrize("length", range(len(MAGIC)))
def test_segment_with_a_torn_header_is_begun_again(tmp_path: Path, length: int) -> None:
    fill(tmp_path)
    (tmp_path / f"{0:020d}.journal").write_bytes(MAGIC[:length])
    fill(tmp_path, [b"one"])
    assert read(tmp_path) == [[b"one"]]


def test_zeros_after_a_crash_of_the_machine_are_cut_off(tmp_path: Path) -> None:
    fill(tmp_path, [b"one"])
    with only_segment(tmp_path).open("ab") as file:
        file.write(bytes(4096))
    assert read(tmp_path) == [[b"one"]]


def test_last_record_whose_pages_were_lost_is_cut_off(tmp_path: Path) -> None:
    _, second = fill(tmp_path, [b"one"], [b"x" * 100])
    flip(only_segment(tmp_path), second + 60)
    assert read(tmp_path) == [[b"one"]]


def flip(path: Path, offset: int) -> None:
    raw = bytearray(path.read_bytes())
    raw[offset] ^= 0xFF
    path.write_bytes(raw)


@given(st.data())
def test_damage_before_the_end_is_named_and_never_skipped(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("journal")
    _, second, third = fill(folder, [b"first"], [b"second" * 9], [b"third"])
    flip(only_segment(folder), data.draw(st.integers(second, third - 1)))
    with pytest.raises(JournalError, match=rf"journal: the record at offset {second} "):
        read(folder)


def test_damage_in_an_older_segment_is_an_error_even_at_its_end(tmp_path: Path) -> None:
    fill(tmp_path, [bytes(60)], [bytes(60)], segment_bytes=50)
    oldest = min(tmp_path.glob("*.journal"))
    os.truncate(oldest, oldest.stat().st_size - 1)
    with pytest.raises(JournalError, match="cut off"):
        read(tmp_path)


def test_file_of_another_format_is_refused(tmp_path: Path) -> None:
    (tmp_path / f"{0:020d}.journal").write_bytes(b"something else entirely")
    with pytest.raises(JournalError, match="not a journal"):
        Journal(tmp_path, BIG)


def test_second_writer_is_refused(tmp_path: Path) -> None:
    journal = Journal(tmp_path, BIG)
    with pytest.raises(JournalError, match="another process"):
        Journal(tmp_path, BIG)
    journal.close()
    Journal(tmp_path, BIG).close()


def test_folder_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(JournalError, match="file"):
        Journal(tmp_path / "file" / "journal", BIG)


def test_record_that_does_not_fit_on_the_disk_leaves_nothing_behind(tmp_path: Path) -> None:
    journal = Journal(tmp_path, BIG)
    journal.append([b"one"])
    with full_disk(200), pytest.raises(JournalError):
        journal.append([bytes(1000)])
    journal.append([b"two"])
    journal.close()
    assert read(tmp_path) == [[b"one"], [b"two"]]


def num_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("size", [0, 3])
def test_segment_that_did_not_fit_on_the_disk_begins_when_there_is_room(
    tmp_path: Path, size: int
) -> None:
    journal = Journal(tmp_path, 30)
    first = journal.append([b"one" * 20])
    before = num_descriptors()
    with full_disk(size):
        for _ in range(3):
            with pytest.raises(JournalError, match="File too large"):
                journal.append([b"two"])
    assert num_descriptors() <= before
    second = journal.append([b"two"])
    assert list(journal.replay()) == [(first, [b"one" * 20]), (second, [b"two"])]
    journal.close()
    assert read(tmp_path) == [[b"one" * 20], [b"two"]]


def test_half_a_record_is_cut_off_before_the_next_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(file: int, length: int) -> None:
        raise OSError(errno.EIO, "the disk fails", file, length)

    journal = Journal(tmp_path, BIG)
    journal.append([b"one"])
    with monkeypatch.context() as patch, full_disk(200):
        patch.setattr(os, "ftruncate", fails)
        for _ in range(2):
            with pytest.raises(JournalError, match=r"\.journal: "):
                journal.append([bytes(1000)])
    journal.append([b"two"])
    journal.close()
    assert read(tmp_path) == [[b"one"], [b"two"]]


def test_segment_that_cannot_be_read_is_an_error_and_releases_the_journal(tmp_path: Path) -> None:
    segment = tmp_path / f"{0:020d}.journal"
    segment.mkdir()
    before = num_descriptors()
    with pytest.raises(JournalError, match=r"journal: Is a directory"):
        Journal(tmp_path, BIG)
    assert num_descriptors() <= before
    segment.rmdir()
    Journal(tmp_path, BIG).close()


def test_segment_that_cannot_be_dropped_is_an_error_and_stays(tmp_path: Path) -> None:
    positions = fill(tmp_path, [bytes(60)], [bytes(60)], segment_bytes=50)
    journal = Journal(tmp_path, 50)
    oldest = min(tmp_path.glob("*.journal"))
    content = oldest.read_bytes()
    oldest.unlink()
    oldest.mkdir()
    with pytest.raises(JournalError, match=r"journal: "):
        journal.drop_before(positions[1])
    oldest.rmdir()
    oldest.write_bytes(content)
    assert [position for position, _ in journal.replay()] == positions
    journal.close()


def test_foreign_file_in_the_folder_is_named(tmp_path: Path) -> None:
    fill(tmp_path, [b"one"])
    (tmp_path / "copy.journal").write_bytes(b"")
    with pytest.raises(JournalError, match=r"copy\.journal: .*take it away"):
        Journal(tmp_path, BIG)


def test_a_record_is_read_back_by_its_position(tmp_path: Path) -> None:
    journal = Journal(tmp_path, segment_bytes=100)
    records = [[bytes([number]) * 40, b"end"] for number in range(9)]
    positions = [journal.append(frames) for frames in records]
    assert len(list(tmp_path.glob("*.journal"))) > 3
    assert [journal.read(position) for position in positions] == records
    journal.drop_before(positions[-1])
    assert journal.read(positions[-1]) == records[-1]
    with pytest.raises(JournalError, match="nothing is left"):
        journal.read(positions[0])
    with pytest.raises(JournalError, match="offset"):
        journal.read(positions[-1] + 1)
    journal.close()


def test_replay_of_a_long_segment_holds_one_record_at_a_time(tmp_path: Path) -> None:
    record_bytes, num_records = 2**20, 24
    fill(tmp_path, *([bytes(record_bytes)] for _ in range(num_records)), segment_bytes=2**30)
    tracemalloc.start()
    try:
        journal = Journal(tmp_path, 2**30)
        num_found = sum(1 for _ in journal.replay())
        journal.close()
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert num_found == num_records
    # The record being read, and the previous one, which the loop still holds.
    assert peak_bytes < 3 * record_bytes


def test_closing_a_journal_twice_closes_no_descriptor_opened_since(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal", BIG)
    journal.append([b"a record"])
    journal.close()
    with (tmp_path / "one").open("wb") as one, (tmp_path / "two").open("wb") as two:
        journal.close()
        assert os.fstat(one.fileno())
        assert os.fstat(two.fileno())
