"""The output of `rollmesh eval`: a progress bar while it runs, a table or JSON at its end.

Only the report goes to stdout, so that it can be piped; the bar goes to stderr and is a line now
and then if stderr is not a terminal.
"""

import asyncio
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from rollmesh.core.errors import UserError
from rollmesh.core.run_state import EVAL_MESH
from rollmesh.launch.screen import NONE, Terminal, ignore_closed_output
from rollmesh.serve.client.evaluation_files import EvaluationPlan
from rollmesh.serve.client.scores import CONFIDENCE, SUCCESS, Estimate, Report

SUMMARY = "summary.json"
LOGS = "logs"
QUIET_S = 30.0


@contextmanager
def progress(plan: EvaluationPlan, num_tasks: int, status: str) -> Iterator["EvalProgress"]:
    """Show a progress bar; call its `on_rows` with the number of rows so far.

    If nothing moves, a line says so, with the router's reason, and names `status` for more.
    """
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("rollouts"),
        TimeRemainingColumn(),
    )
    console = Terminal(stderr=True)
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        shown = EvalProgress(bar, plan.env, num_tasks * plan.num_samples, status)
        shown.schedule()
        try:
            yield shown
        finally:
            shown.close()


class EvalProgress:
    """A progress bar, with lines where a bar cannot be shown; runs on the current event loop."""

    def __init__(self, bar: Progress, env: str, num_wanted: int, status: str) -> None:
        self._bar = bar
        self._env = env
        self._num_wanted = num_wanted
        self._status = status
        self._task = bar.add_task("starting", total=num_wanted)
        self._num_rows = self._num_seen = 0
        self._has_warned = False
        self._why_waiting: Callable[[], str] = str
        self._timer: asyncio.TimerHandle | None = None

    def on_rows(self, num_rows: int) -> None:
        """Set the number of rows so far."""
        self._num_rows = num_rows
        self._bar.update(self._task, completed=num_rows, description=self._env)

    def set_wait_reason(self, why_waiting: Callable[[], str]) -> None:
        """Set the function that returns why groups wait, '' if unknown."""
        self._why_waiting = why_waiting

    def schedule(self) -> None:
        """Check for progress after a while, and again, until `close`."""
        self._timer = asyncio.get_running_loop().call_later(QUIET_S, self.update)

    def update(self) -> None:
        """Print a line: the progress, or once that there is none."""
        if self._num_rows != self._num_seen:
            self._has_warned = False
            if not self._bar.console.is_terminal:
                self._print(f"{self._env}: {self._num_rows:,} of {self._num_wanted:,} rollouts")
        elif not self._has_warned:
            self._has_warned = True
            why = self._why_waiting() or f"does a worker serve {self._env}?"
            self._print(f"no rollout has ended for {QUIET_S:g} s; {why}; {self._status} shows more")
        self._num_seen = self._num_rows
        self.schedule()

    def close(self) -> None:
        """Stop the checks."""
        if self._timer:
            self._timer.cancel()

    def _print(self, line: str) -> None:
        self._bar.console.print(Text(line), highlight=False, soft_wrap=True)


def show(plan: EvaluationPlan, report: Report, folder: Path, *, as_json: bool) -> None:
    """Print the report, and write it to the folder."""
    text = msgspec.json.format(msgspec.json.encode(report))
    try:
        (folder / SUMMARY).write_bytes(text + b"\n")
    except OSError as error:
        raise UserError(f"{folder / SUMMARY}: {error.strerror}") from None
    if as_json:
        print(text.decode())
        return
    console = Terminal(highlight=False, soft_wrap=not sys.stdout.isatty())
    with ignore_closed_output():
        console.print(
            table_of(plan, report), *failures_of(report, folder / EVAL_MESH / LOGS), sep="\n"
        )
        console.print(Text(f"files: {folder}"))


def table_of(plan: EvaluationPlan, report: Report) -> Table:
    """Return the table of figures."""
    title = f"{plan.env}: {report.num_rollouts:,} rollouts of {report.num_tasks:,} tasks"
    table = Table(title=Text(title), title_justify="left", box=None, padding=(0, 2, 0, 0))
    table.add_column("")
    table.add_column("mean", justify="right")
    table.add_column(f"{CONFIDENCE:.0%} interval", justify="right")
    _add_estimate(table, "reward", report.reward)
    if report.success:
        _add_estimate(table, "success", report.success)
    for k, estimate in report.pass_at.items():
        is_part = estimate.num_tasks < report.num_tasks
        of_tasks = f" of {estimate.num_tasks:,} tasks" if is_part else ""
        _add_estimate(table, f"pass@{k}{of_tasks}", estimate)
    for name, estimate in report.metrics.items():
        if name != SUCCESS:
            _add_estimate(table, name, estimate)
    for name, value in (
        ("tokens per rollout", report.tokens_per_rollout),
        ("turns per rollout", report.turns_per_rollout),
        ("s per rollout", report.s_per_rollout),
    ):
        table.add_row(name, NONE if value is None else f"{value:,.2f}", "")
    if report.num_truncated:
        table.add_row("truncated", f"{report.num_truncated:,}", "")
    return table


def failures_of(report: Report, logs: Path) -> Iterator[Text]:
    """Yield a line for each cause, for each of its most frequent errors, and for the `logs`."""
    for cause, failure in report.failures.items():
        yield Text(f"failed: {failure.num_rollouts:,} x {cause}", style="yellow")
        for error, num_rollouts in failure.errors.items():
            task = f"; task {failure.tasks[error]}" if error in failure.tasks else ""
            yield Text(f"  {num_rollouts:,} x {error}{task}", style="yellow")
        if failure.num_others:
            yield Text(f"  {failure.num_others:,} x something else", style="yellow")
    if report.failures and logs.is_dir():
        yield Text(f"the workers' logs: {logs}", style="yellow")


def _add_estimate(table: Table, name: str, estimate: Estimate | None) -> None:
    if estimate is None:
        table.add_row(name, NONE, "")
        return
    low, high = estimate.low, estimate.high
    interval = NONE if low is None or high is None else f"{low:.3f} to {high:.3f}"
    table.add_row(name, f"{estimate.mean:.3f}", interval)
