"""Whoever watches a run reads what its trainer goes on with."""

from pathlib import Path
from typing import Any

import msgspec

from rollmesh.launch.recoveries import Recoveries

ROW: dict[str, Any] = {
    "life": 2,
    "savepoint": "000004-step-28",
    "redone_steps": [28, 29],
    "num_ready": 7,
    "num_open": 9,
    "num_dropped": 0,
    "lost": [],
}


def add(folder: Path, **changes: Any) -> None:
    with (folder / "recoveries.jsonl").open("ab") as file:
        file.write(msgspec.json.encode(ROW | changes) + b"\n")


def test_each_life_is_told_once(tmp_path: Path) -> None:
    recoveries = Recoveries(tmp_path)
    assert recoveries.new() == []
    add(tmp_path)
    told = (
        "the trainer goes on from savepoint 000004-step-28; steps to do again: 2; "
        "groups ready: 7, open: 9, dropped: 0"
    )
    assert recoveries.new() == [told]
    assert recoveries.new() == []


def test_lives_of_before_are_not_told_again(tmp_path: Path) -> None:
    add(tmp_path)
    recoveries = Recoveries(tmp_path)
    add(tmp_path, savepoint="", num_dropped=1, lost=["steps 5 to 7 are lost"])
    told = (
        "the trainer goes on from its first weights; steps to do again: 2; "
        "groups ready: 7, open: 9, dropped: 1; steps 5 to 7 are lost"
    )
    assert recoveries.new() == [told]


def test_a_line_of_something_else_is_passed_over(tmp_path: Path) -> None:
    recoveries = Recoveries(tmp_path)
    (tmp_path / "recoveries.jsonl").write_bytes(b"{}\n")
    add(tmp_path)
    assert len(recoveries.new()) == 1
