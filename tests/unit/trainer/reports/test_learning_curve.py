"""The learning curve is drawn from the files that a run left, complete or not."""

from pathlib import Path

import msgspec

from rollmesh.core.files import read_rows
from rollmesh.trainer.reports.learning_curve import draw_learning, moving_mean


def write(folder: Path, rows: list[dict[str, object]], tail: bytes = b"") -> None:
    lines = [msgspec.json.encode(row) + b"\n" for row in rows]
    (folder / "metrics.jsonl").write_bytes(b"".join(lines) + tail)


def step(number: int) -> dict[str, object]:
    return {"step": number, "reward": 0.5, "age_histogram": {"0": 3, "1": 1}, "num_samples": 4}


def test_run_with_steps_gets_a_learning_curve(tmp_path: Path) -> None:
    write(tmp_path, [{"step": -1, "reward_untrained": 0.6}, step(0), step(1)])
    draw_learning(tmp_path)
    assert (tmp_path / "learning.png").read_bytes().startswith(b"\x89PNG")


def test_run_without_steps_gets_no_learning_curve(tmp_path: Path) -> None:
    write(tmp_path, [])
    draw_learning(tmp_path)
    assert not (tmp_path / "learning.png").exists()


def test_incomplete_last_row_is_ignored(tmp_path: Path) -> None:
    write(tmp_path, [step(0)], tail=b'{"step": 1, "rew')
    assert [row["step"] for row in read_rows(tmp_path / "metrics.jsonl")] == [0]


def test_moving_mean_looks_back_only() -> None:
    assert moving_mean([0.0, 1.0, 1.0], 2) == [0.0, 0.5, 1.0]
