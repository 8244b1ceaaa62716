"""A real run's chart, from the journal of a scheduler that runs or ran.

Owns how occupancy rows become spans: a row says who is on a GPU from its moment on, until the GPU's
next. Invariant: the journal is opened for reading only, so the scheduler may go on. Driven by
command.py.
"""

import sqlite3
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from rollmesh.core.errors import UserError
from rollmesh.scheduler.planning.state import FIXED
from rollmesh.scheduler.simulator.chart import Chart
from rollmesh.scheduler.simulator.spans import Span, Use
from rollmesh.wire.scheduling import WorkerPhase

QUERY = "SELECT at_s, gpu, pipeline_id, cluster, rank, phase FROM history ORDER BY at_s, rowid"
FILE_NAME = "scheduler.sqlite"
HELD = "held"
USES: dict[str, Use] = {
    WorkerPhase.WAKING: Use.WAKE,
    WorkerPhase.AWAKE: Use.SERVE,
    WorkerPhase.SLEEPING: Use.SLEEP,
    WorkerPhase.LOST: Use.LOST,
    HELD: Use.FIXED,
}
"""In any other phase, nobody is there."""


class Occupancy(NamedTuple):
    """A row of the journal."""

    at_s: float
    gpu: int
    pipeline_id: str
    cluster: str
    rank: int
    phase: str


def chart(journal: Path) -> Chart:
    """Of all that the journal remembers; UserError if it is none."""
    path = journal / FILE_NAME if journal.is_dir() else journal
    rows = _rows(path)
    if not rows:
        raise UserError(f"{path} remembers nobody on a GPU; give the journal of a run")
    return Chart(
        title=f"{journal.name}: who was on which GPU",
        gpus=tuple(sorted({row.gpu for row in rows})),
        spans=spans(rows),
        start_s=rows[0].at_s,
        end_s=rows[-1].at_s,
    )


def spans(rows: Iterable[Occupancy]) -> list[Span]:
    """By GPU and time; the last rows of GPUs are cut at the last of all."""
    found: list[Span] = []
    now: dict[int, Occupancy] = {}
    end_s = 0.0
    for row in rows:
        end_s = row.at_s
        if row.gpu in now:
            found.extend(_span(now[row.gpu], end_s))
        now[row.gpu] = row
    for row in now.values():
        found.extend(_span(row, end_s))
    return sorted(found, key=lambda span: (span.gpu, span.start_s))


def _span(row: Occupancy, end_s: float) -> list[Span]:
    use = USES.get(row.phase)
    if use is None or end_s <= row.at_s:
        return []
    label = row.cluster if row.rank == FIXED else f"engine {row.rank}"
    return [Span(row.gpu, row.pipeline_id, label, use, row.at_s, end_s)]


def _rows(path: Path) -> list[Occupancy]:
    if not path.is_file():
        raise UserError(f"{path} is not there; give a journal's file, or the folder that it is in")
    try:
        journal = sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)
        try:
            return [Occupancy(*row) for row in journal.execute(QUERY)]
        finally:
            journal.close()
    except sqlite3.Error as error:
        raise UserError(f"{path} is not a scheduler's journal: {error}") from None
