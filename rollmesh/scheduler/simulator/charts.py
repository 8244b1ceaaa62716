"""Charts of GPU use over time, of a simulation or a scheduler's journal: HTML, Perfetto and PNG.

- Spans of one GPU do not overlap: using a GPU that is not clear is an error.
- A pipeline has the same colour in all charts that are drawn together.
- Names cannot end the script of the HTML page that they are put into.
- The journal is opened read-only, so that its scheduler may be running.
"""

import enum
import io
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from rollmesh.core.errors import UserError
from rollmesh.scheduler.planning.state import FIXED
from rollmesh.wire.scheduling import WorkerPhase


class GpuUse(enum.StrEnum):
    """Use of a GPU: WAKE > SERVE > SLEEP for generation, FIXED for a fixed cluster, LOST if
    unknown."""

    WAKE = "wake"
    SERVE = "serve"
    SLEEP = "sleep"
    FIXED = "fixed"
    LOST = "lost"


class Span(msgspec.Struct, frozen=True):
    """Use of one GPU."""

    gpu: int
    pipeline_id: str
    label: str
    """`engine 3`, or the name of the fixed cluster."""
    use: GpuUse
    start_s: float
    end_s: float


class SpanRecorder:
    """Records spans as they begin and end."""

    def __init__(self) -> None:
        self.done: list[Span] = []
        self._open: dict[int, tuple[str, str, GpuUse, float]] = {}

    def enter(
        self, gpus: tuple[int, ...], pipeline_id: str, label: str, use: GpuUse, now_s: float
    ) -> None:
        """Begin using GPUs that are clear."""
        for gpu in gpus:
            assert gpu not in self._open, f"GPU {gpu} serves {self._open[gpu]} and {pipeline_id}"
            self._open[gpu] = (pipeline_id, label, use, now_s)

    def leave(self, gpus: tuple[int, ...], now_s: float) -> None:
        """Stop using the GPUs."""
        for gpu in gpus:
            pipeline_id, label, use, start_s = self._open.pop(gpu)
            if now_s > start_s:
                self.done.append(Span(gpu, pipeline_id, label, use, start_s, now_s))

    def turn(self, gpus: tuple[int, ...], use: GpuUse, now_s: float) -> None:
        """Change the use of the GPUs."""
        pipeline_id, label, _, _ = self._open[gpus[0]]
        self.leave(gpus, now_s)
        self.enter(gpus, pipeline_id, label, use, now_s)

    def is_clear(self, gpus: tuple[int, ...]) -> bool:
        return self._open.keys().isdisjoint(gpus)

    def close(self, now_s: float) -> list[Span]:
        """All spans; open ones end now."""
        self.leave(tuple(self._open), now_s)
        return sorted(self.done, key=lambda span: (span.gpu, span.start_s))


Colour = tuple[int, int, int]

COLOURS: tuple[Colour, ...] = (
    (31, 119, 180),
    (255, 127, 14),
    (44, 160, 44),
    (214, 39, 40),
    (148, 103, 189),
    (140, 86, 75),
    (227, 119, 194),
    (23, 190, 207),
    (188, 189, 34),
    (86, 86, 86),
)
"""Used in turn; distinguishable to most eyes."""
SHADES = {
    GpuUse.SERVE: 1.0,
    GpuUse.FIXED: 0.55,
    GpuUse.WAKE: 1.0,
    GpuUse.SLEEP: 1.0,
    GpuUse.LOST: 0.2,
}
"""Share of black: a fixed cluster is darker, a lost worker nearly black."""
TINTS = {
    GpuUse.SERVE: 0.0,
    GpuUse.FIXED: 0.0,
    GpuUse.WAKE: 0.65,
    GpuUse.SLEEP: 0.65,
    GpuUse.LOST: 0.0,
}
"""Share of white: moving workers are paler."""


class Chart(msgspec.Struct, frozen=True, kw_only=True):
    """Spans of one fleet over a period."""

    title: str
    gpus: tuple[int, ...]
    spans: list[Span]
    end_s: float
    start_s: float = 0.0


def pipeline_names(charts: Iterable[Chart]) -> list[str]:
    """Sorted names of the pipelines in the charts."""
    return sorted({span.pipeline_id for chart in charts for span in chart.spans})


def colour(number: int, use: GpuUse) -> Colour:
    """Colour of the pipeline with that number in `pipeline_names`."""
    shade, tint = SHADES[use], TINTS[use]
    red, green, blue = (
        round((part * shade) * (1 - tint) + 255 * tint) for part in COLOURS[number % len(COLOURS)]
    )
    return red, green, blue


TEMPLATE = Path(__file__).with_name("gantt.html")
MARK = "/* charts */ null"


def html_page(charts: Sequence[Chart]) -> str:
    """One self-contained HTML page of the charts: zoom by wheel, move by dragging, details on
    hover."""
    pipelines = pipeline_names(charts)
    numbers = {name: number for number, name in enumerate(pipelines)}
    uses = list(GpuUse)
    colours = {use: [_css(colour(number, use)) for number in numbers.values()] for use in uses}
    content = {
        "pipelines": pipelines,
        "uses": uses,
        "colours": colours,
        "charts": [_chart_data(chart, numbers, uses) for chart in charts],
    }
    # A JSON string may contain `</script>`; with `<` escaped it is the same JSON without a tag.
    data = msgspec.json.encode(content).decode().replace("<", "\\u003c")
    return TEMPLATE.read_text(encoding="ascii").replace(MARK, data)


def _chart_data(chart: Chart, numbers: dict[str, int], uses: list[GpuUse]) -> dict[str, Any]:
    places = {gpu: number for number, gpu in enumerate(chart.gpus)}
    labels = sorted({span.label for span in chart.spans})
    label_of = {label: number for number, label in enumerate(labels)}
    return {
        "title": chart.title,
        "gpus": chart.gpus,
        "length_s": chart.end_s - chart.start_s,
        "labels": labels,
        "spans": [
            (
                places[span.gpu],
                numbers[span.pipeline_id],
                label_of[span.label],
                uses.index(span.use),
                round(span.start_s - chart.start_s, 3),
                round(span.end_s - chart.start_s, 3),
            )
            for span in chart.spans
        ],
    }


def _css(parts: tuple[int, int, int]) -> str:
    return "#" + "".join(f"{part:02x}" for part in parts)


def perfetto_trace(charts: Sequence[Chart]) -> bytes:
    """Chrome trace events, which ui.perfetto.dev and chrome://tracing open.

    A chart is a process, a GPU a thread, a span a complete event ("X") with times in microseconds
    (Trace Event Format, Google 2016).
    """
    events = [event for number, chart in enumerate(charts, 1) for event in _events(number, chart)]
    return msgspec.json.encode({"traceEvents": events, "displayTimeUnit": "ms"})


def _events(process: int, chart: Chart) -> Iterator[dict[str, Any]]:
    yield _named("process_name", process, 0, chart.title)
    for gpu in chart.gpus:
        yield _named("thread_name", process, gpu, f"GPU {gpu}")
    for span in chart.spans:
        yield {
            "ph": "X",
            "pid": process,
            "tid": span.gpu,
            "ts": round((span.start_s - chart.start_s) * 1e6),
            "dur": round((span.end_s - span.start_s) * 1e6),
            "name": f"{span.pipeline_id} {span.label}",
            "cat": span.use,
            "args": {"pipeline": span.pipeline_id, "use": span.use},
        }


def _named(what: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "pid": process, "tid": thread, "name": what, "args": {"name": name}}


QUERY = "SELECT at_s, gpu, pipeline_id, cluster, rank, phase FROM history ORDER BY at_s, rowid"
FILE_NAME = "scheduler.sqlite"
HELD = "held"
USES: dict[str, GpuUse] = {
    WorkerPhase.WAKING: GpuUse.WAKE,
    WorkerPhase.AWAKE: GpuUse.SERVE,
    WorkerPhase.SLEEPING: GpuUse.SLEEP,
    WorkerPhase.LOST: GpuUse.LOST,
    HELD: GpuUse.FIXED,
}
"""Any other phase means unused."""


class OccupancyRow(NamedTuple):
    """A history row of the journal: use of a GPU until its next row."""

    at_s: float
    gpu: int
    pipeline_id: str
    cluster: str
    rank: int
    phase: str


def journal_chart(journal: Path) -> Chart:
    """Chart of a journal's history; UserError if it is not a journal."""
    path = journal / FILE_NAME if journal.is_dir() else journal
    rows = _rows(path)
    if not rows:
        raise UserError(f"{path} has no history of GPU use; give the journal of a run")
    return Chart(
        title=f"{journal.name}: use of the GPUs",
        gpus=tuple(sorted({row.gpu for row in rows})),
        spans=occupancy_spans(rows),
        start_s=rows[0].at_s,
        end_s=rows[-1].at_s,
    )


def occupancy_spans(rows: Iterable[OccupancyRow]) -> list[Span]:
    """Spans by GPU and time; open ones end at the last row."""
    found: list[Span] = []
    now: dict[int, OccupancyRow] = {}
    end_s = 0.0
    for row in rows:
        end_s = row.at_s
        if row.gpu in now:
            found.extend(_span(now[row.gpu], end_s))
        now[row.gpu] = row
    for row in now.values():
        found.extend(_span(row, end_s))
    return sorted(found, key=lambda span: (span.gpu, span.start_s))


def _span(row: OccupancyRow, end_s: float) -> list[Span]:
    use = USES.get(row.phase)
    if use is None or end_s <= row.at_s:
        return []
    label = row.cluster if row.rank == FIXED else f"engine {row.rank}"
    return [Span(row.gpu, row.pipeline_id, label, use, row.at_s, end_s)]


def _rows(path: Path) -> list[OccupancyRow]:
    if not path.is_file():
        raise UserError(f"{path} does not exist; give a journal's file or its folder")
    try:
        journal = sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)
        try:
            return [OccupancyRow(*row) for row in journal.execute(QUERY)]
        finally:
            journal.close()
    except sqlite3.Error as error:
        raise UserError(f"{path} is not a scheduler's journal: {error}") from None


def png_picture(charts: Sequence[Chart]) -> bytes | None:
    """Draw the charts on one time scale; None where matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure  # noqa: PLC0415 - an extra, and heavy
        from matplotlib.patches import Patch  # noqa: PLC0415 - as above
    except ImportError:
        return None
    pipelines = pipeline_names(charts)
    longest_s = max(max(chart.end_s - chart.start_s for chart in charts), 1e-9)
    figure = Figure(figsize=(15, 1 + 3 * len(charts)), layout="constrained")
    for axes, chart in zip(figure.subplots(len(charts), squeeze=False)[:, 0], charts, strict=True):
        rows = {gpu: row for row, gpu in enumerate(chart.gpus)}
        axes.set(title=chart.title, xlim=(0, longest_s), ylim=(len(rows) - 0.5, -0.5))
        axes.set(xlabel="seconds", ylabel="GPU")
        spans = chart.spans
        axes.barh(
            [rows[span.gpu] for span in spans],
            [span.end_s - span.start_s for span in spans],
            left=[span.start_s - chart.start_s for span in spans],
            height=0.9,
            color=[_css(colour(pipelines.index(span.pipeline_id), span.use)) for span in spans],
        )
    colours = [_css(colour(number, GpuUse.SERVE)) for number in range(len(pipelines))]
    pairs = zip(pipelines, colours, strict=True)
    figure.legend(
        handles=[Patch(color=each, label=name) for name, each in pairs], loc="upper right"
    )
    picture = io.BytesIO()
    figure.savefig(picture, format="png")
    return picture.getvalue()
