"""`rollmesh trace bias [RUN_FOLDER]`: what became of a run's rollouts, and which were lost.

It only reads; the run may be running or have ended.
"""

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from rollmesh.cli.mesh_state import run_folder
from rollmesh.cli.options import parser
from rollmesh.core.process import OK
from rollmesh.launch.screen import Terminal, ignore_closed_output
from rollmesh.trainer.reports.selection_bias import (
    OutcomeComparison,
    SelectionBias,
    SelectionSlice,
    selection_bias,
)

PIPE_WIDTH = 200
"""Width without a terminal, so that lines are not cut."""
SMALL_P = 0.01
"""A difference with a smaller p-value is reported."""
SHOWN_OUTCOMES = ("trained", "masked", "requeued")
"""Outcomes with a column of their own; all others are dropped."""
COMPARED = {"length": ("longer", "shorter", "tokens"), "difficulty": ("easier", "harder", "reward")}
"""By quantity: the words for larger and smaller values, and its unit."""
TEST = "Mann-Whitney U over the means of groups, two-sided, normal approximation with ties"


def main(argv: list[str]) -> int:
    """Print the report."""
    arguments = parser("trace", "Report what became of a run's rollouts.")
    what = arguments.add_subparsers(dest="what", required=True, metavar="WHAT")
    bias = what.add_parser(
        "bias", help="which rollouts the run selects against, by length and difficulty"
    )
    bias.add_argument(
        "run_folder", type=Path, nargs="?", help="run folder (default: the newest in runs/)"
    )
    bias.add_argument("--json", dest="is_json", action="store_true", help="print one JSON line")
    options = arguments.parse_args(argv)
    found = selection_bias(run_folder(options.run_folder))
    with ignore_closed_output():
        if options.is_json:
            print(msgspec.json.encode(found).decode())
        else:
            show(found)
    return OK


def show(bias: SelectionBias) -> None:
    """Print tables, and their conclusions as sentences."""
    console = Terminal(highlight=False, width=None if sys.stdout.isatty() else PIPE_WIDTH)
    for each in _parts(bias):
        console.print(each)


def _parts(bias: SelectionBias) -> Iterator[RenderableType]:
    yield Text(f"{bias.num_ended:,} rollouts ended{_counts(bias.outcomes)}", style="bold")
    if bias.unseen:
        num = sum(bias.unseen.values())
        yield Text(
            f"{num:,} more were never received, so nothing is known of them{_counts(bias.unseen)}"
        )
    if bias.num_unread:
        yield Text(
            f"{bias.num_unread:,} lines could not be parsed and were skipped", style="yellow"
        )
    if not bias.num_ended:
        return
    for title, parts in (
        ("length in sampled tokens", bias.by_length),
        ("mean reward of the task's others", bias.by_difficulty),
        ("environment", bias.by_env),
    ):
        if parts:
            yield Text()
            yield _table(title, parts)
    if not bias.by_length:
        yield Text("no lengths: the run was made by an older release", style="yellow")
    yield Text()
    for verdict in bias.verdicts:
        yield Text(sentence(verdict, bias.mean_age.get(verdict.outcome)))
    if any(each.test for each in bias.verdicts):
        yield Text(f"({TEST}; a difference is reported if p < {SMALL_P:g})", style="dim")
    if not bias.verdicts:
        yield Text("every token of every received rollout was trained: no selection bias")


def _counts(nums: dict[str, int]) -> str:
    parts = (f"{num:,} {name}" for name, num in nums.items())
    return f": {', '.join(parts)}" if nums else ""


def _table(title: str, parts: Sequence[SelectionSlice]) -> Table:
    table = Table(box=None, pad_edge=False, show_edge=False)
    table.add_column(title)
    for head in ("rollouts", *SHOWN_OUTCOMES, "dropped"):
        table.add_column(head, justify="right")
    for part in parts:
        shares = [part.shares.get(outcome, 0.0) for outcome in SHOWN_OUTCOMES]
        others = sum(part.shares.values()) - sum(shares)
        table.add_row(Text(part.name), f"{part.num:,}", *(f"{s:.1%}" for s in (*shares, others)))
    return table


def sentence(verdict: OutcomeComparison, mean_age: float | None) -> str:
    """Return one comparison as a sentence."""
    groups = f"{verdict.num:,} group{'s' * (verdict.num != 1)}"
    if verdict.by == "length" and mean_age is not None:
        groups += f", {mean_age:.1f} steps old on average"
    groups = f"{verdict.outcome} ({groups})"
    test = verdict.test
    if test is None or verdict.median is None or verdict.median_trained is None:
        return f"{groups}: too few to compare by {verdict.by}"
    if test.p >= SMALL_P:
        return f"{groups}: no difference by {verdict.by} from those that trained (p = {test.p:.2g})"
    larger, smaller, unit = COMPARED[verdict.by]
    is_larger = test.share_larger > 0.5
    share = test.share_larger if is_larger else 1.0 - test.share_larger
    return (
        f"{groups}: {larger if is_larger else smaller} than those that trained, median "
        f"{verdict.median:,.4g} against {verdict.median_trained:,.4g} {unit}, and so in "
        f"{share:.0%} of pairs (p = {test.p:.2g})"
    )
