"""Typed rows come from a growing file, and what does not fit is counted."""

from pathlib import Path

from rollmesh.dashboard.rowfile import RowFile
from rollmesh.dashboard.rows import DropRow


def test_lines_that_do_not_fit_are_counted_and_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "drops.jsonl"
    path.write_bytes(b'{"reason": "stale"}\nnot json\n{"reason": 3}\n{"reason": "late", "x": 1}\n')
    file = RowFile(path, DropRow)
    assert [row.reason for row in file.read()] == ["stale", "late"]
    assert file.num_bad_lines == 2


def test_a_late_reader_catches_up_over_several_blocks(tmp_path: Path) -> None:
    path = tmp_path / "drops.jsonl"
    reason = "x" * 1000
    path.write_bytes(b'{"reason": "%s"}\n' % reason.encode() * 3000)
    assert len(RowFile(path, DropRow).read()) == 3000
