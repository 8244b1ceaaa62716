"""`rollmesh trace bias [RUN_FOLDER]`: what a run's rollouts went through, and which it lost.

Invariant: it only reads, and a running run as well as one that has ended. Driven by people, and
with `--json` by programs.
"""

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from rollmesh.cli.options import parser
from rollmesh.cli.run_folder import run_folder
from rollmesh.core.process import OK
from rollmesh.launch.screen import Terminal, ignore_closed_output
from rollmesh.trainer.books.bias import Bias, Part, Verdict, bias_of

PIPE_WIDTH = 200
"""Where stdout is no terminal, lines are cut for no one."""
SMALL_P = 0.01
"""A difference less probable than this by chance is said to be one."""
TOLD = ("trained", "masked", "requeued")
"""Fates with a column of their own; all others are dropped."""
COMPARED = {"length": ("longer", "shorter", "tokens"), "difficulty": ("easier", "harder", "reward")}
"""By what, what a larger value is called and a smaller one, and in what it is told."""
TEST = "Mann-Whitney U over the means of groups, two-sided, normal approximation with ties"


def main(argv: list[str]) -> int:
    """Tell it."""
    arguments = parser("trace", "Follow what became of a run's rollouts.")
    what = arguments.add_subparsers(dest="what", required=True, metavar="WHAT")
    bias = what.add_parser("bias", help="whom the run selects against, by length and difficulty")
    bias.add_argument("run_folder", type=Path, nargs="?", help="the newest in runs/ if left out")
    bias.add_argument("--json", dest="is_json", action="store_true", help="one JSON line")
    options = arguments.parse_args(argv)
    found = bias_of(run_folder(options.run_folder))
    with ignore_closed_output():
        if options.is_json:
            print(msgspec.json.encode(found).decode())
        else:
            tell(found)
    return OK


def tell(bias: Bias) -> None:
    """Tables, and what they say in words."""
    console = Terminal(highlight=False, width=None if sys.stdout.isatty() else PIPE_WIDTH)
    for each in _scenes(bias):
        console.print(each)


def _scenes(bias: Bias) -> Iterator[RenderableType]:
    yield Text(f"{bias.num_ended:,} rollouts came to an end{_told(bias.fates)}", style="bold")
    if bias.unseen:
        num = sum(bias.unseen.values())
        yield Text(f"{num:,} more never came, and nothing is known of them{_told(bias.unseen)}")
    if bias.num_unread:
        yield Text(f"{bias.num_unread:,} lines do not fit, and are passed over", style="yellow")
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
        yield Text(sentence(verdict, bias.mean_age.get(verdict.fate)))
    if any(each.test for each in bias.verdicts):
        yield Text(f"({TEST}; a difference is told where p < {SMALL_P:g})", style="dim")
    if not bias.verdicts:
        yield Text("all that came was trained, every token of it: nothing is selected against")


def _told(nums: dict[str, int]) -> str:
    parts = (f"{num:,} {name}" for name, num in nums.items())
    return f": {', '.join(parts)}" if nums else ""


def _table(title: str, parts: Sequence[Part]) -> Table:
    table = Table(box=None, pad_edge=False, show_edge=False)
    table.add_column(title)
    for head in ("rollouts", *TOLD, "dropped"):
        table.add_column(head, justify="right")
    for part in parts:
        shares = [part.shares.get(fate, 0.0) for fate in TOLD]
        others = sum(part.shares.values()) - sum(shares)
        table.add_row(Text(part.name), f"{part.num:,}", *(f"{s:.1%}" for s in (*shares, others)))
    return table


def sentence(verdict: Verdict, mean_age: float | None) -> str:
    """One comparison in words."""
    who = f"{verdict.num:,} group{'s' * (verdict.num != 1)}"
    if verdict.by == "length" and mean_age is not None:
        who += f", {mean_age:.1f} steps old on average"
    who = f"{verdict.fate} ({who})"
    test = verdict.test
    if test is None or verdict.median is None or verdict.median_trained is None:
        return f"{who}: too few to compare by {verdict.by}"
    if test.p >= SMALL_P:
        return f"{who}: by {verdict.by} no other than those that trained (p = {test.p:.2g})"
    larger, smaller, unit = COMPARED[verdict.by]
    is_larger = test.share_larger > 0.5
    share = test.share_larger if is_larger else 1.0 - test.share_larger
    return (
        f"{who}: {larger if is_larger else smaller} than those that trained, median "
        f"{verdict.median:,.4g} against {verdict.median_trained:,.4g} {unit}, and so in "
        f"{share:.0%} of pairs (p = {test.p:.2g})"
    )
