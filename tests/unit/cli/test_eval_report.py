"""The report of `rollmesh eval` and its progress lines."""

import io
from pathlib import Path

import msgspec
import pytest
from rich.console import Console
from rich.progress import Progress

from rollmesh.cli.eval_report import SUMMARY, EvalProgress, show
from rollmesh.core.types import EVAL_SAMPLING
from rollmesh.serve.client.evaluation_files import EvaluationPlan, Row
from rollmesh.serve.client.scores import Report, report_of

PLAN = EvaluationPlan(
    env="games:One",
    env_settings={},
    model="m",
    split="eval",
    num_tasks=2,
    num_samples=2,
    seed=0,
    sampling=EVAL_SAMPLING,
)


def row(task_id: str, index: int, outcome: str, reward: float | None, error: str = "") -> Row:
    return Row(
        task_id=task_id,
        group_id=task_id,
        index=index,
        num_samples=2,
        outcome=outcome,
        reward=reward,
        error=error,
        num_calls=3,
        num_tokens=7,
        duration_s=0.5,
    )


REPORT = report_of(
    [
        row("a", 0, "completed", 1.0),
        row("a", 1, "truncated", 0.0),
        row("b", 0, "completed", 1.0),
        row("b", 1, "infra_error", None, "no engine [is] :READY:"),
    ]
)


def test_table_has_the_figures_and_the_failures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    show(PLAN, REPORT, tmp_path, as_json=False)
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == "games:One: 3 rollouts of 2 tasks"
    assert any(line.startswith("success 0.667 0.") for line in lines)
    assert any(line.startswith("pass@1 0.667 0.") for line in lines)
    assert any(line.startswith("pass@2 of 1 tasks 1.000 0.") for line in lines)
    assert {"tokens per rollout 7.00", "turns per rollout 3.00", "truncated 1"} <= set(lines)
    at = lines.index("failed: 1 x infra_error")
    assert lines[at + 1] == "1 x no engine [is] :READY:; task b"
    assert lines[-1] == " ".join(f"files: {tmp_path}".split())


def test_json_alone_goes_to_stdout_and_to_the_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    show(PLAN, REPORT, tmp_path, as_json=True)
    out = capsys.readouterr().out
    assert msgspec.json.decode(out, type=Report) == REPORT
    assert (tmp_path / SUMMARY).read_text() == out


def test_an_evaluation_without_counted_rollouts_shows_no_figures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    show(PLAN, report_of([]), tmp_path, as_json=False)
    text = " ".join(capsys.readouterr().out.split())
    assert "reward -" in text
    assert "pass@" not in text


def test_reward_comes_first_and_metrics_are_rows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [row("a", at, "completed", 0.155) for at in range(4)]
    rows = [msgspec.structs.replace(each, metrics={"turns": 3.0}) for each in rows]
    show(PLAN, report_of(rows), tmp_path, as_json=False)
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    named = [line[0] for line in lines if line]
    assert named.index("reward") < named.index("turns")
    assert ["turns", "3.000", "-"] in lines
    assert not any(name == "success" or name.startswith("pass@") for name in named)
    assert "success" not in (tmp_path / "summary.json").read_text()


def one_task(*rewards: float) -> Report:
    return report_of([row("a", at, "completed", reward) for at, reward in enumerate(rewards)])


def test_one_task_has_a_mean_reward_and_no_interval(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    show(PLAN, one_task(0.25, 0.75), tmp_path, as_json=False)
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "reward 0.500 -" in lines


async def test_progress_is_printed_as_lines_where_no_bar_can_be_drawn() -> None:
    console = Console(file=io.StringIO())
    with console.capture() as capture, Progress(console=console, disable=True) as bar:
        progress = EvalProgress(bar, "guess", num_wanted=4, status="its status")
        for num_rows in (0, 0, 2, 2, 4):
            progress.on_rows(num_rows)
            progress.update()
            progress.close()
    assert capture.get().splitlines() == [
        "no rollout has ended for 30 s; does a worker serve guess?; its status shows more",
        "guess: 2 of 4 rollouts",
        "no rollout has ended for 30 s; does a worker serve guess?; its status shows more",
        "guess: 4 of 4 rollouts",
    ]


def test_a_failure_is_shown_with_its_place_a_task_and_the_logs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    error = "ValueError: no (my_env.py:15 in score)"
    rows = [row("t7", at, "infra_error", None) for at in range(2)]
    rows = [msgspec.structs.replace(each, error=error) for each in rows]
    (tmp_path / "mesh" / "logs").mkdir(parents=True)
    show(PLAN, report_of(rows), tmp_path, as_json=False)
    out = capsys.readouterr().out
    assert f"  2 x {error}; task t7\n" in out
    assert f"the workers' logs: {tmp_path / 'mesh' / 'logs'}\n" in out


async def test_a_known_wait_reason_replaces_the_question_about_workers() -> None:
    console = Console(file=io.StringIO())
    with console.capture() as capture, Progress(console=console, disable=True) as bar:
        progress = EvalProgress(bar, "guess", num_wanted=4, status="its status")
        progress.set_wait_reason(lambda: "no engine serves: http://e is fenced: refused (for 20 s)")
        progress.update()
        progress.close()
    [line] = capture.get().splitlines()
    assert line == (
        "no rollout has ended for 30 s; no engine serves: http://e is fenced: refused (for 20 s); "
        "its status shows more"
    )
