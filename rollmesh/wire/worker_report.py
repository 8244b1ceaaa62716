"""The report of a worker: each value is declared once, with its metric and its table column.

WorkerBeat, /status, /metrics, the dashboard's table and `rollmesh status` derive from the fields
here. To add a value, append an annotated field to WorkerReport, because messages are encoded by
position, and set it in `Worker.report_status`; a value that only the router knows is a field of
WorkerStatus.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import msgspec

from rollmesh.core.types import ErrorPlace
from rollmesh.wire.header import Seconds

MIB = 2**20
DOWN = ("lost", "stalled", "loading")
"""States of workers whose heartbeats do not arrive."""


class ReportField(msgspec.Struct, frozen=True):
    """How a field is shown."""

    help: str
    """One line, also the metric's help text."""
    metric: str = ""
    """Name of the Prometheus metric without `rollmesh_`; '' for none."""
    measure: Callable[[Any], float] = float
    """Value of the metric."""
    column: str = ""
    """Title of the table column, with its unit; '' for none."""
    position: int = 0
    """Order of the columns."""
    scale: float = 1.0
    """A table shows the value divided by this."""
    is_wide: bool = False
    """Only the dashboard's table has room for the column."""


class WorkerReport(msgspec.Struct, frozen=True):
    """The values that a worker reports; counts are since its start."""

    worker_id: Annotated[str, ReportField("Name of the worker.", column="worker", position=1)]
    num_running: Annotated[int, ReportField("Rollouts, not groups, that the worker runs.")] = 0
    accepting: Annotated[bool, ReportField("False while draining or over a byte budget.")] = True
    unacked_bytes: Annotated[
        int, ReportField("Results without an ack from their sink.", metric="worker_unacked_bytes")
    ] = 0
    loop_lag_s: Annotated[
        Seconds,
        ReportField(
            "Lag of the event loop.",
            metric="worker_loop_lag_seconds",
            column="lag ms",
            position=8,
            scale=1e-3,
        ),
    ] = 0.0
    rss_bytes: Annotated[
        int,
        ReportField(
            "Resident memory.", metric="worker_rss_bytes", column="MB", position=9, scale=MIB
        ),
    ] = 0
    num_finished: Annotated[
        int, ReportField("Finished rollouts.", column="finished", position=5, is_wide=True)
    ] = 0
    num_calls: Annotated[
        int, ReportField("Model calls.", column="calls", position=6, is_wide=True)
    ] = 0
    num_tokens: Annotated[
        int, ReportField("Sampled tokens.", column="tokens", position=7, is_wide=True)
    ] = 0
    stalled_in: Annotated[str, ReportField("Function that blocks the event loop.")] = ""
    state: Annotated[
        str,
        ReportField(
            "Whether heartbeats arrive.",
            metric="worker_up",
            measure=lambda state: state not in DOWN,
            column="state",
            position=2,
        ),
    ] = "serving"
    num_failed: Annotated[
        int,
        ReportField(
            "Rollouts that ended in infra_error or agent_error.", column="failed", position=12
        ),
    ] = 0
    last_error: Annotated[str, ReportField("Error of the last failed rollout.")] = ""
    started_s: Annotated[Seconds, ReportField("Start time of the process.")] = 0.0
    num_left_behind: Annotated[
        int,
        ReportField(
            "Environment calls that were given up and never ended.",
            metric="worker_calls_left_behind",
        ),
    ] = 0
    waits_for: Annotated[
        str,
        ReportField(
            "Whether a budget keeps the worker from accepting groups.",
            metric="worker_full",
            measure=bool,
        ),
    ] = ""
    held_bytes: Annotated[
        int,
        ReportField(
            "Memory of rollouts and results, as counted by the worker.",
            metric="worker_held_bytes",
            column="held MB",
            position=10,
            scale=MIB,
            is_wide=True,
        ),
    ] = 0
    last_place: Annotated[
        ErrorPlace | None, ReportField("Place in environment code that raised `last_error`.")
    ] = None
    last_task_id: Annotated[str, ReportField("Task that ended in `last_error`.")] = ""
    isolation: Annotated[
        str,
        ReportField(
            "Weakest isolation of agents' programs (worker.isolation); '' before the first."
        ),
    ] = ""


class WorkerStatus(WorkerReport, frozen=True):
    """A worker's last report with what the router knows, as in the router's /status."""

    env: Annotated[str, ReportField("Environment.", column="env", position=3)] = ""
    in_flight: Annotated[
        int,
        ReportField(
            "Rollouts that the worker runs or is about to run.",
            metric="worker_rollouts",
            column="in flight",
            position=4,
        ),
    ] = 0
    pid: Annotated[int, ReportField("Process id.")] = 0
    host: Annotated[str, ReportField("Name of the machine.")] = ""
    max_rollouts: Annotated[int, ReportField("Rollouts that the worker runs at once, at most.")] = 0
    num_attempts: Annotated[
        int, ReportField("Groups assigned to the worker.", column="attempts", position=11)
    ] = 0
    longest_gap_s: Annotated[
        float,
        ReportField("Longest gap between two heartbeats.", metric="worker_longest_gap_seconds"),
    ] = 0.0


class WorkerColumn(msgspec.Struct, frozen=True):
    """A column of the table of workers."""

    title: str
    is_number: bool
    is_wide: bool
    field: str
    cell: Callable[[Any], str]
    """Formats a value of the field."""


@functools.cache
def shown_fields() -> dict[str, ReportField]:
    """Return the declaration of each field of WorkerStatus."""
    hints = get_type_hints(WorkerStatus, include_extras=True)
    return {name: _shown(hints[name]) for name in WorkerStatus.__struct_fields__}


@functools.cache
def worker_columns() -> tuple[WorkerColumn, ...]:
    """Return the columns of the table of workers, in order."""
    named = [(shown, name) for name, shown in shown_fields().items() if shown.column]
    return tuple(_column(name, shown) for shown, name in sorted(named, key=_position))


def worker_metrics(worker: WorkerStatus) -> Iterator[tuple[str, float, str]]:
    """Yield (name, value, help) of each metric of a worker."""
    for name, shown in shown_fields().items():
        if shown.metric:
            yield shown.metric, shown.measure(getattr(worker, name)), shown.help


def worker_table(workers: list[WorkerStatus]) -> dict[str, Any]:
    """Return all columns, as [title, is_number], and the rows of their cells."""
    columns = worker_columns()
    return {
        "columns": [[column.title, column.is_number] for column in columns],
        "rows": [[each.cell(getattr(row, each.field)) for each in columns] for row in workers],
    }


def _position(named: tuple[ReportField, str]) -> int:
    return named[0].position


def _shown(hint: Any) -> ReportField:
    assert get_origin(hint) is Annotated
    [shown] = [each for each in get_args(hint) if isinstance(each, ReportField)]
    return shown


def _column(name: str, shown: ReportField) -> WorkerColumn:
    default = msgspec.structs.fields(WorkerStatus)[
        WorkerStatus.__struct_fields__.index(name)
    ].default
    is_number = isinstance(default, int | float)

    def cell(value: Any) -> str:
        return str(value) if shown.scale == 1.0 else f"{value / shown.scale:,.0f}"

    return WorkerColumn(shown.column, is_number, shown.is_wide, name, cell)
