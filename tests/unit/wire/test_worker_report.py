"""Worker values are declared once; message, /status, /metrics and tables derive from that."""

import io
from typing import Any

import msgspec
import pytest
from rich.console import Console

from rollmesh.cli.mesh_state import MeshReport
from rollmesh.cli.status import tables_of
from rollmesh.core.metrics import Exposition
from rollmesh.core.types import ErrorPlace
from rollmesh.dashboard.rows import RouterRow, TelemetryRow
from rollmesh.dashboard.view import RunView
from rollmesh.serve.router.status import RouterStatus, figures_of, status_of
from rollmesh.wire.fleet import FleetChanged
from rollmesh.wire.messages import WorkerBeat
from rollmesh.wire.worker_report import (
    WorkerReport,
    WorkerStatus,
    shown_fields,
    worker_columns,
    worker_metrics,
)
from tests.unit.serve.router.scripted_router import ScriptedRouter


def distinct(field: msgspec.structs.FieldInfo, number: int) -> Any:
    """Return a value of the field's type that no other field has."""
    match field.default:
        case bool():
            return not field.default
        case int() | float():
            return type(field.default)(number * 2**20)
        case None:
            return ErrorPlace("ValueError", "env.py", number, "run")
        case _:
            return f"{field.name}-{number}"


def report() -> dict[str, Any]:
    fields = msgspec.structs.fields(WorkerReport)
    values = {each.name: distinct(each, at) for at, each in enumerate(fields, start=1)}
    return values | {"worker_id": "w0", "started_s": 0.0}  # the same values as in its hello


def status() -> RouterStatus:
    scripted = ScriptedRouter()
    scripted.worker("w0")
    scripted.receive("w0", WorkerBeat(**report()))
    return status_of("i0", scripted.group_scheduler, FleetChanged(1, ()), {})


def test_status_shows_every_field_of_the_report_as_it_was_sent() -> None:
    sent = report()
    del sent["state"]  # the router replaces it by its own state
    [shown] = msgspec.json.decode(msgspec.json.encode(status()))["workers"]
    assert shown.keys() == shown_fields().keys()
    assert {name: shown[name] for name in sent} == msgspec.to_builtins(sent)


def test_metrics_show_every_field_that_has_one() -> None:
    exposition = Exposition("router")
    exposition.add(lambda: figures_of(status()))
    text = exposition.render().decode()
    [worker] = status().workers
    shown = {name: value for name, value, _ in worker_metrics(worker)}
    assert shown.keys() == {each.metric for each in shown_fields().values() if each.metric}
    values = {}
    for line in text.splitlines():
        name, mark, value = line.partition('{worker_id="w0"} ')
        if mark:
            values[name.removeprefix("rollmesh_")] = float(value)
    assert values == shown


@pytest.mark.parametrize("column", worker_columns(), ids=lambda column: column.title)
def test_every_column_is_in_the_tables_of_the_page_and_the_terminal(column: Any) -> None:
    [worker] = status().workers
    cell = column.cell(getattr(worker, column.field))
    view = RunView()
    view.add_telemetry(TelemetryRow(1.0, router=RouterRow(workers=[worker])))
    table = view.fleet()["worker_table"]
    at = [title for title, _ in table["columns"]].index(column.title)
    assert table["rows"][0][at] == cell
    console = Console(width=400, file=io.StringIO())
    with console.capture() as capture:
        console.print(tables_of(MeshReport(0.0, None, RouterRow(workers=[worker]), [])))
    lines = [line.split() for line in capture.get().splitlines()]
    assert column.is_wide or cell in next(line for line in lines if line[:1] == ["w0"])


def test_a_worker_of_an_older_run_folder_is_shown_with_defaults() -> None:
    row = msgspec.json.decode(b'{"worker_id":"w0","extra":1}', type=WorkerStatus)
    assert all(column.cell(getattr(row, column.field)) is not None for column in worker_columns())
