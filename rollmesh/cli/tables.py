"""How a mesh stands, painted for a terminal.

Owns the layout. Invariant: what others wrote (an error's text, a name) is shown as it is and never
read as markup. Driven by the verb `status`.
"""

import datetime
from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from rollmesh.cli.standing import RunStanding, Standing
from rollmesh.core.run_state import SILENT_AFTER_S, RunState
from rollmesh.dashboard.rows import RouterRow
from rollmesh.launch.screen import NONE, STATE_STYLES, reward, share, summary_table

MIB = 2**20
SPACE = Text()


def paint(standing: Standing) -> RenderableType:
    """All that is known."""
    return Group(*_parts(standing))


def _parts(standing: Standing) -> Iterator[RenderableType]:
    run, router = standing.run, standing.router
    if run:
        yield from _of_run(run)
    if run and standing.time_s is not None and (line := _last_seen(run, standing)):
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
    if standing.processes:
        yield from (SPACE, _processes(standing))


def _last_seen(run: RunStanding, standing: Standing) -> str:
    """A line about telemetry that is old, for the tables below it; '' while it is fresh."""
    seen = datetime.datetime.fromtimestamp(standing.time_s or 0.0).astimezone()
    if run.phase is RunState.SILENT:
        return f"launch cannot be checked from here; as last seen at {seen:%H:%M:%S}:"
    if run.phase is RunState.KILLED:
        return f"as last seen at {seen:%H:%M:%S}:"
    if run.phase is RunState.RUNNING and standing.quiet_s >= SILENT_AFTER_S:
        return (
            f"launch is alive but has written no telemetry for {standing.quiet_s:.0f} s (is the "
            f"disk full, or launch suspended?); as last seen at {seen:%H:%M:%S}:"
        )
    return ""


def _of_run(run: RunStanding) -> Iterator[RenderableType]:
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
    table = _table("worker", "state", "env")
    _add_numbers(table, "in flight", "lag ms", "MB", "attempts", "failed")
    for row in router.workers:
        table.add_row(
            Text(row.worker_id),
            _state(row.state, good=("live",)),
            Text(row.env),
            str(row.in_flight),
            Text(f"{row.loop_lag_s * 1e3:.0f}", style="yellow" if row.stalled_in else ""),
            f"{row.rss_bytes / MIB:,.0f}",
            str(row.num_attempts),
            str(row.num_failed),
        )
    yield from (SPACE, table)
    for row in router.workers:
        if row.stalled_in:
            yield Text(f"{row.worker_id} is stalled in {row.stalled_in}", style="yellow")
        if row.num_left_behind:
            what = f"{row.num_left_behind} calls of its environment never ended"
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


def _engines(router: RouterRow) -> Iterator[RenderableType]:
    table = _table("engine", "state")
    _add_numbers(table, "version", "running", "waiting")
    for row in router.engines:
        numbers = (row.policy_version, row.num_running, row.num_waiting)
        table.add_row(Text(row.url), _state(row.phase, good=("ready",)), *map(str, numbers))
    yield from (SPACE, table)
    yield from (Text(f"{row.url}: {row.detail}") for row in router.engines if row.detail)


def _processes(standing: Standing) -> Table:
    table = _table("process")
    _add_numbers(table, "pid", "MB")
    for row in standing.processes:
        table.add_row(Text(row.role), str(row.pid), f"{row.rss_bytes / MIB:,.0f}")
    return table


def _table(*headings: str) -> Table:
    """Its first columns hold words: on a narrow terminal, long names are folded."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for heading in headings:
        table.add_column(heading, overflow="fold", min_width=8)
    return table


def _add_numbers(table: Table, *headings: str) -> None:
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True, min_width=len(heading))


def _state(state: str, good: tuple[str, ...]) -> Text:
    return Text(state, style="green" if state.lower() in good else "yellow")


def _or_none(value: int | None) -> str:
    return NONE if value is None else str(value)
