"""`rollmesh trace bias` reports selection bias in numbers and sentences."""

from pathlib import Path

import msgspec
import pytest

from rollmesh.cli.trace import main, sentence
from rollmesh.core.errors import UserError
from rollmesh.testing.run_folder import FakeRun
from rollmesh.trainer.reports.selection_bias import OutcomeComparison, RankSum


@pytest.fixture
def run(tmp_path: Path) -> FakeRun:
    run = FakeRun(tmp_path / "demo")
    run.add_steps(160)
    for number in range(10):
        run.add_drop(f"stale-{number}", length=5000, age=4)
    return run


def test_the_report_has_shares_and_conclusions(
    run: FakeRun, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bias", str(run.folder)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "170 rollouts ended: 160 trained, 10 stale"
    rows = [line.split() for line in lines]
    assert ["6", "to", "5,000", "60", "83.3%", "0.0%", "0.0%", "16.7%"] in rows
    assert ["guess", "170", "94.1%", "0.0%", "0.0%", "5.9%"] in rows
    [text] = [line for line in lines if "longer" in line]
    assert text.startswith("stale (10 groups, 4.0 steps old on average): longer than those that")
    assert "5,000 against" in text
    assert "in 100% of pairs (p = " in text
    assert "Mann-Whitney U" in lines[-1]


def test_json_output_is_one_line(run: FakeRun, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bias", "--json", str(run.folder)]) == 0
    report = msgspec.json.decode(capsys.readouterr().out)
    assert report["outcomes"] == {"trained": 160, "stale": 10}


def test_a_run_that_lost_nothing_has_no_bias(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = FakeRun(tmp_path / "demo")
    run.add_steps(3)
    assert main(["bias", str(run.folder)]) == 0
    assert capsys.readouterr().out.splitlines()[-1].endswith("no selection bias")


def test_a_run_without_rollouts_is_reported_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = FakeRun(tmp_path / "demo")
    assert main(["bias", str(run.folder)]) == 0
    assert capsys.readouterr().out == "0 rollouts ended\n"


def test_a_folder_without_a_run_is_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="not a run folder"):
        main(["bias", str(tmp_path)])


@pytest.mark.parametrize(
    ("share", "p", "text"),
    [
        (0.9, 0.001, "longer than those that trained, median 90 against 50 tokens, and so in 90%"),
        (0.2, 0.001, "shorter than those that trained, median 90 against 50 tokens, and so in 80%"),
        (0.6, 0.2, "no difference by length from those that trained (p = 0.2)"),
    ],
)
def test_a_difference_is_reported_only_if_significant(share: float, p: float, text: str) -> None:
    verdict = OutcomeComparison("stale", "length", 10, 20, 90, 50, RankSum(share, p))
    assert f"stale (10 groups): {text}" in sentence(verdict, None)


def test_too_few_groups_are_not_compared() -> None:
    verdict = OutcomeComparison("stale", "difficulty", 3, 20, 0.5, 0.4, None)
    assert sentence(verdict, 2.0) == "stale (3 groups): too few to compare by difficulty"
