"""The tail returns each whole line once, whatever the writer does to the file."""

import os
from itertools import chain
from pathlib import Path

from rollmesh.core.files import FileTail


def read_text(tail: FileTail) -> list[str]:
    return [line.data.decode() for line in tail.read()]


def test_each_line_is_read_once_and_in_order(tmp_path: Path) -> None:
    path = tmp_path / "rows"
    path.write_text("one\ntwo\n")
    tail = FileTail(path)
    assert read_text(tail) == ["one", "two"]
    assert read_text(tail) == []
    with path.open("a") as file:
        file.write("three\n")
    assert read_text(tail) == ["three"]


def test_a_torn_last_line_waits_for_its_end(tmp_path: Path) -> None:
    path = tmp_path / "rows"
    path.write_text("one\ntw")
    tail = FileTail(path)
    assert read_text(tail) == ["one"]
    with path.open("a") as file:
        file.write("o\n")
    assert read_text(tail) == ["two"]


def test_a_missing_file_reads_as_empty_until_it_exists(tmp_path: Path) -> None:
    tail = FileTail(tmp_path / "rows")
    assert read_text(tail) == []
    (tmp_path / "rows").write_text("one\n")
    assert read_text(tail) == ["one"]
    assert tail.num_restarts == 0


def test_a_replaced_file_is_read_from_its_start(tmp_path: Path) -> None:
    path = tmp_path / "rows"
    path.write_text("old one\nold two\n")
    tail = FileTail(path)
    tail.read()
    (tmp_path / "next").write_text("new one\nnew two\nnew three\n")
    os.replace(tmp_path / "next", path)
    assert read_text(tail) == ["new one", "new two", "new three"]
    assert tail.num_restarts == 1


def test_a_truncated_file_is_read_from_its_start(tmp_path: Path) -> None:
    path = tmp_path / "rows"
    path.write_text("a long first line\n")
    tail = FileTail(path)
    tail.read()
    path.write_text("short\n")
    assert read_text(tail) == ["short"]


def test_one_read_is_bounded_and_loses_nothing(tmp_path: Path) -> None:
    path = tmp_path / "rows"
    path.write_text("".join(f"line {number}\n" for number in range(10)))
    tail = FileTail(path, max_read_bytes=20)
    reads = [read_text(tail) for _ in range(8)]
    assert max(map(len, reads)) == 2
    assert list(chain(*reads)) == [f"line {number}" for number in range(10)]


def test_a_line_longer_than_a_read_is_skipped(tmp_path: Path) -> None:
    path = tmp_path / "rows"
    path.write_text("a" * 55 + "\nnext\n")
    tail = FileTail(path, max_read_bytes=20)
    assert list(chain(*(read_text(tail) for _ in range(5)))) == ["next"]


def test_reading_starts_at_a_whole_line_near_the_end(tmp_path: Path) -> None:
    path = tmp_path / "rows"
    path.write_text("first\nsecond\nthird\n")
    in_a_line = FileTail(path, last_bytes=9)
    at_a_line = FileTail(path, last_bytes=6)
    assert read_text(in_a_line) == ["third"]
    assert read_text(at_a_line) == ["third"]


def test_offsets_point_at_the_lines(tmp_path: Path) -> None:
    path = tmp_path / "rows"
    path.write_bytes(b"first\nsecond\nthird\n")
    tail = FileTail(path, max_read_bytes=8)
    lines = [line for _ in range(4) for line in tail.read()]
    whole = path.read_bytes()
    assert [whole[at : at + len(data)] for at, data in lines] == [b"first", b"second", b"third"]
