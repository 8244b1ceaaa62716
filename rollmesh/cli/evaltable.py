"""What `rollmesh eval` shows: a bar while it runs, a table or JSON at its end.

Invariant: the report alone goes to stdout, so that it may be piped; the bar is painted on stderr,
where that is a terminal. Driven by the verb `eval`.
"""

import asyncio
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from rollmesh.core.errors import UserError
from rollmesh.serve.client.plan import Plan
from rollmesh.serve.client.scores import CONFIDENCE, Estimate, Report

SUMMARY = "summary.json"
QUIET_S = 30.0


@contextmanager
def progress(plan: Plan, num_tasks: int) -> Iterator[Callable[[int], None]]:
    """A bar, moved by telling it the number of rows so far; a line, if that stays what it was."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("rollouts"),
        TimeRemainingColumn(),
    )
    console = Console(stderr=True)
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("starting", total=num_tasks * plan.num_samples)
        told: set[int] = set()

        def on_rows(num_rows: int) -> None:
            told.add(num_rows)
            bar.update(task, completed=num_rows, description=plan.env)

        def remind() -> None:
            if len(told) < 2:
                console.print(
                    f"nothing has ended within {QUIET_S:g} s; does a worker serve {plan.env}? "
                    "`rollmesh status` knows",
                    markup=False,
                    highlight=False,
                )

        timer = asyncio.get_running_loop().call_later(QUIET_S, remind)
        try:
            yield on_rows
        finally:
            timer.cancel()


def show(plan: Plan, report: Report, folder: Path, *, as_json: bool) -> None:
    """Print the report, and leave it in the folder."""
    text = msgspec.json.format(msgspec.json.encode(report))
    try:
        (folder / SUMMARY).write_bytes(text + b"\n")
    except OSError as error:
        raise UserError(f"{folder / SUMMARY}: {error.strerror}") from None
    if as_json:
        print(text.decode())
        return
    console = Console(highlight=False, soft_wrap=not sys.stdout.isatty())
    console.print(table_of(plan, report), *failures_of(report), sep="\n")
    console.print(Text(f"left in {folder}"))


def table_of(plan: Plan, report: Report) -> Table:
    """The figures."""
    title = f"{plan.env}: {report.num_rollouts:,} rollouts of {report.num_tasks:,} tasks"
    table = Table(title=title, title_justify="left", box=None, padding=(0, 2, 0, 0))
    table.add_column("")
    table.add_column("mean", justify="right")
    table.add_column(f"{CONFIDENCE:.0%} interval", justify="right")
    _add_estimate(table, "success", report.success)
    _add_estimate(table, "reward", report.reward)
    for k, estimate in report.pass_at.items():
        _add_estimate(table, f"pass@{k}", estimate)
    for name, value in (
        ("tokens per rollout", report.tokens_per_rollout),
        ("turns per rollout", report.turns_per_rollout),
        ("s per rollout", report.s_per_rollout),
    ):
        table.add_row(name, "-" if value is None else f"{value:,.2f}", "")
    if report.num_truncated:
        table.add_row("truncated", f"{report.num_truncated:,}", "")
    return table


def failures_of(report: Report) -> Iterator[Text]:
    """A line for each cause."""
    for cause, failure in report.failures.items():
        example = f", the first: {failure.example}" if failure.example else ""
        yield Text(f"failed: {failure.num_rollouts:,} x {cause}{example}", style="yellow")


def _add_estimate(table: Table, name: str, estimate: Estimate | None) -> None:
    if estimate is None:
        table.add_row(name, "-", "")
    else:
        table.add_row(name, f"{estimate.mean:.3f}", f"{estimate.low:.3f} to {estimate.high:.3f}")
