"""The verbs that look at a mesh: status, drain and dashboard.

- They only read the run's files or the router's status, except drain, which asks the router to
  drain a worker.
- Text that others wrote (an error, a name) is shown as it is and never parsed as markup.
"""

import argparse
import contextlib
import datetime
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from rollmesh.cli.mesh_state import (
    SETTINGS,
    MeshReport,
    RunReport,
    all_runs,
    page_folder,
    report_of_folder,
    report_of_router,
    router_address,
    run_folder,
    send_request,
)
from rollmesh.cli.options import add_run, parser
from rollmesh.core.addresses import facing
from rollmesh.core.errors import UserError
from rollmesh.core.process import OK
from rollmesh.core.run_state import ENDED, SILENT_AFTER_S, RunState
from rollmesh.dashboard.rows import RouterRow
from rollmesh.launch.folder import read_addresses
from rollmesh.launch.screen import (
    NONE,
    STATE_STYLES,
    Terminal,
    ignore_closed_output,
    reward,
    share,
    summary_table,
)
from rollmesh.wire.keys import has_keys
from rollmesh.wire.messages import AddressesAnswered, AskAddresses, AskDrain, DrainAnswered
from rollmesh.wire.worker_report import MIB, WorkerColumn, WorkerStatus, worker_columns

REFRESH_S = 1.0
PIPE_WIDTH = 200
"""Width without a terminal, so that lines are not cut."""

ReadReport = Callable[[], MeshReport]


def add_mesh(arguments: argparse.ArgumentParser) -> None:
    """Add the run folder or router of the mesh, for `reader_of` and `router_of`."""
    where = arguments.add_mutually_exclusive_group()
    where.add_argument(
        "run_folder", type=Path, nargs="?", help="run folder (default: the newest in runs/)"
    )
    where.add_argument(
        "--router",
        metavar="ADDRESS",
        help="address of a router: tcp://host:port or http://host:port",
    )
    add_run(arguments)


def status(argv: list[str]) -> int:
    """`rollmesh status [RUN_FOLDER | --router ADDRESS]`: show a mesh, once or until Ctrl-C."""
    arguments = parser("status", "Show a run: its progress, workers, queue and engines.")
    add_mesh(arguments)
    arguments.add_argument("--watch", action="store_true", help="refresh each second until Ctrl-C")
    arguments.add_argument(
        "--json", dest="is_json", action="store_true", help="print one JSON line"
    )
    options = arguments.parse_args(argv)
    read = reader_of(options.run_folder, options.router, options.run)
    with ignore_closed_output():
        if options.is_json:
            print_json(read, options.watch)
        else:
            show(read, options.watch)
    return OK


def reader_of(folder: Path | None, router: str | None, run: Path | None = None) -> ReadReport:
    """Return a function that reads the mesh's state; UserError if there is no run."""
    if router:
        return lambda: report_of_router(router, time.time(), run)
    chosen = run_folder(folder or run)
    return lambda: report_of_folder(chosen, time.time())


def print_json(read: ReadReport, is_watched: bool) -> None:
    """Print a JSON line per reading."""
    with contextlib.suppress(KeyboardInterrupt):
        while True:
            print(msgspec.json.encode(read()).decode(), flush=True)
            if not is_watched:
                return
            time.sleep(REFRESH_S)


def show(read: ReadReport, is_watched: bool) -> None:
    """Print the tables; with `is_watched` repaint them each second and wait for a router that is
    away.
    """
    width = None if sys.stdout.isatty() else PIPE_WIDTH
    console = Terminal(highlight=False, width=width)
    tables: RenderableType = tables_of(read())
    if not is_watched:
        console.print(tables)
        return
    with contextlib.suppress(KeyboardInterrupt), painter(console) as repaint:
        while True:
            repaint(tables)
            time.sleep(REFRESH_S)
            try:
                tables = tables_of(read())
            except UserError as error:
                tables = Text(str(error), style="yellow")


@contextlib.contextmanager
def painter(console: Console) -> Iterator[Callable[[RenderableType], None]]:
    """Yield a function that shows tables: in place on a terminal, else below the last ones."""
    if not console.is_terminal:
        yield console.print
        return
    with Live(console=console, auto_refresh=False) as live:
        yield lambda tables: live.update(tables, refresh=True)


SPACE = Text()


def tables_of(report: MeshReport) -> RenderableType:
    """Return all that is known as tables."""
    return Group(*_parts(report))


def _parts(report: MeshReport) -> Iterator[RenderableType]:
    run, router = report.run, report.router
    if run:
        yield from _of_run(run)
    if run and report.time_s is not None and (line := _last_seen(run, report)):
        yield Text(line, style="yellow")
    if run and run.router_address:
        yield Text(_addresses(run.router_address, run.status_url))
    elif not run and router and router.address:
        yield Text(_addresses(router.address, router.status_url))
    if router:
        yield Text(_groups(router))
        yield from (Text(cause, style="yellow") for cause in router.causes)
        yield from _workers(router, run.logs if run else "")
        yield from _engines(router)
    if report.processes:
        yield from (SPACE, _processes(report))


def _last_seen(run: RunReport, report: MeshReport) -> str:
    """Return a line about old telemetry, for the tables below it; '' while it is fresh."""
    seen = datetime.datetime.fromtimestamp(report.time_s or 0.0).astimezone()
    if run.phase is RunState.SILENT:
        return f"launch cannot be checked from this machine; last seen at {seen:%H:%M:%S}:"
    if run.phase is RunState.KILLED:
        return f"last seen at {seen:%H:%M:%S}:"
    if run.phase is RunState.RUNNING and report.quiet_s >= SILENT_AFTER_S:
        return (
            f"launch is alive but has written no telemetry for {report.quiet_s:.0f} s (is the "
            f"disk full, or launch suspended?); last seen at {seen:%H:%M:%S}:"
        )
    return ""


def _of_run(run: RunReport) -> Iterator[RenderableType]:
    steps = f", step {run.num_done} of {run.num_steps}" if run.num_steps else ""
    yield Text(f"{run.name}: {run.phase}{steps}", style=f"bold {STATE_STYLES[run.phase]}")
    if run.cause:
        yield Text(f"cause: {run.cause}", style="red")
    if run.resume:
        yield Text(f"to resume: {run.resume}")
    if not run.num_steps:
        return
    if run.summary:
        yield summary_table(run.summary)
        return
    parts = [f"reward {reward(run.reward)}, untrained {reward(run.reward_untrained)}"]
    if run.success is not None:
        parts.append(f"success {share(run.success)}, untrained {share(run.success_untrained)}")
    parts.append(f"policy version {_or_none(run.policy_version)}")
    yield Text(", ".join([*parts, f"oldest sample {_or_none(run.max_age)}"]))


def _addresses(router: str, status_url: str) -> str:
    return f"router: {router}{f', status {status_url}' if status_url else ''}"


def _groups(router: RouterRow) -> str:
    waiting = ", ".join(f"{number} {state}" for state, number in router.queue.items())
    return (
        f"groups: {waiting or 'none'}; {router.num_done} done, {router.num_failed} failed,"
        f" {router.num_cancelled} cancelled; {router.num_clients} clients"
    )


def _workers(router: RouterRow, logs: str) -> Iterator[RenderableType]:
    columns = [each for each in worker_columns() if not each.is_wide]
    table = table_of(*(each.title for each in columns if not each.is_number))
    add_numbers(table, *(each.title for each in columns if each.is_number))
    for row in router.workers:
        table.add_row(*(_worker_cell(row, each) for each in columns))
    yield from (SPACE, table)
    for row in router.workers:
        if row.stalled_in:
            yield Text(f"{row.worker_id} is stalled in {row.stalled_in}", style="yellow")
        if row.num_left_behind:
            what = f"{row.num_left_behind} environment calls never returned"
            yield Text(f"{row.worker_id}: {what}", style="yellow")
        if row.waits_for:
            yield Text(f"{row.worker_id} waits for {row.waits_for}", style="yellow")
        if row.isolation:
            how = f"{row.worker_id} runs agents' programs with isolation = {row.isolation}"
            yield Text(how, style="yellow" if row.isolation == "none" else "")
        if row.last_error:
            task = f"; task {row.last_task_id}" if row.last_task_id else ""
            log = f", log {logs}/{row.worker_id}.log" if task and logs else ""
            yield Text(f"{row.worker_id}'s last error: {row.last_error}{task}{log}")


def _worker_cell(row: WorkerStatus, column: WorkerColumn) -> Text:
    value = getattr(row, column.field)
    if column.field == "state":
        return state_text(value, good=("live",))
    is_late = column.field == "loop_lag_s" and row.stalled_in
    return Text(column.cell(value), style="yellow" if is_late else "")


def _engines(router: RouterRow) -> Iterator[RenderableType]:
    table = table_of("engine", "state")
    add_numbers(table, "version", "running", "waiting")
    for row in router.engines:
        numbers = (row.policy_version, row.num_running, row.num_waiting)
        table.add_row(Text(row.url), state_text(row.phase, good=("ready",)), *map(str, numbers))
    yield from (SPACE, table)
    yield from (Text(f"{row.url}: {row.detail}") for row in router.engines if row.detail)


def _processes(report: MeshReport) -> Table:
    table = table_of("process")
    add_numbers(table, "pid", "MB")
    for row in report.processes:
        table.add_row(Text(row.role), str(row.pid), f"{row.rss_bytes / MIB:,.0f}")
    return table


def table_of(*headings: str) -> Table:
    """Return a table whose first columns hold text: long names are folded on a narrow terminal."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for heading in headings:
        table.add_column(heading, overflow="fold", min_width=8)
    return table


def add_numbers(table: Table, *headings: str) -> None:
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True, min_width=len(heading))


def state_text(state: str, good: tuple[str, ...]) -> Text:
    return Text(state, style="green" if state.lower() in good else "yellow")


def _or_none(value: int | None) -> str:
    return NONE if value is None else str(value)


def drain(argv: list[str]) -> int:
    """`rollmesh drain WORKER`: ask the router to drain a worker, and return when it has agreed.

    Launch does not restart a drained worker.
    """
    arguments = parser("drain", "Let a worker finish its rollouts, then stop its process.")
    arguments.add_argument("worker", help="id of the worker; `rollmesh status` lists them")
    add_mesh(arguments)
    options = arguments.parse_args(argv)
    router, run = router_of(options)
    reason = "asked for by `rollmesh drain`"
    answer = send_request(router, AskDrain(1, options.worker, reason), DrainAnswered, run)
    if not answer.ok:
        raise UserError(answer.error)
    addresses = send_request(router, AskAddresses(2), AddressesAnswered, run)
    print(
        f"{options.worker} takes no new rollouts; its process ends when the current ones are done"
    )
    print(f"router: {router}, status {facing(addresses.status_url, router)}")
    return OK


def router_of(options: argparse.Namespace) -> tuple[str, Path | None]:
    """Return the tcp:// address of the router that `add_mesh` names, and the run folder with its
    keys, if known."""
    run: Path | None = options.run
    if options.router:
        return router_address(options.router), run
    folder = run_folder(options.run_folder or run)
    return address_of_router(folder), run or (folder if has_keys(folder) else None)


def address_of_router(folder: Path) -> str:
    """Return the router's address; UserError if the run has ended, or has no router yet."""
    report = report_of_folder(folder, time.time())
    if report.run and report.run.phase in ENDED:
        raise UserError(f"{folder}: the run and its workers have ended")
    ready = read_addresses(folder).get("router")
    if ready is None:
        raise UserError(f"{folder}: its router is not ready yet; try again in a moment")
    return ready.address


RUNS = Path("runs")


def dashboard(argv: list[str]) -> int:
    """`rollmesh dashboard [RUN_FOLDER]`: serve a run's dashboard, or list the runs in `runs/`.

    It may run beside the run's own dashboard or long after the run.
    """
    # aiohttp comes with it, and stays out of the other verbs.
    from rollmesh.dashboard.server import DashboardOptions, add_arguments, run  # noqa: PLC0415 - see above

    arguments = parser("dashboard", "Serve a run's dashboard: learning, fleet, trajectories.")
    add_arguments(arguments)
    options = arguments.parse_args(argv, namespace=DashboardOptions())
    if options.run_folder is None:
        list_runs()
    else:
        run(options, page_folder(options.run_folder), print)
    return OK


def list_runs() -> None:
    """Print a line for each run, the newest first."""
    folders = all_runs(RUNS)
    width = max(len(str(folder)) for folder in folders)
    for folder in folders:
        print(f"{folder!s:<{width}}  {about(folder)}")
    print("`rollmesh dashboard RUN_FOLDER` serves the dashboard of one")


def about(folder: Path) -> str:
    """Format when the run began, its state and its steps; only the start if it has no mesh."""
    began = datetime.datetime.fromtimestamp((folder / SETTINGS).stat().st_mtime).astimezone()
    try:
        report = report_of_folder(run_folder(folder), time.time()).run
    except UserError:
        report = None
    parts = [f"{began:%Y-%m-%d %H:%M}"]
    if report:
        parts.append(f"{report.phase}")
        parts += [f"step {report.num_done} of {report.num_steps}"] if report.num_steps else []
    return "  ".join(parts)
