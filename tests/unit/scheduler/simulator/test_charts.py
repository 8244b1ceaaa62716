"""Charts: spans never overlap; HTML, Perfetto and PNG; the history of a journal."""

import itertools
import json
import re
import sys
from pathlib import Path

import msgspec
import pytest

from rollmesh.core.errors import UserError
from rollmesh.scheduler.service.journal import FILE_NAME, SqliteJournal
from rollmesh.scheduler.service.state import HistoryRow
from rollmesh.scheduler.simulator.charts import (
    COLOURS,
    Chart,
    GpuUse,
    OccupancyRow,
    Span,
    SpanRecorder,
    colour,
    html_page,
    journal_chart,
    occupancy_spans,
    perfetto_trace,
    pipeline_names,
    png_picture,
)
from rollmesh.scheduler.simulator.comparison import simulate
from rollmesh.scheduler.simulator.trace import WorkloadShape, generate_trace


def test_each_activity_has_its_own_span() -> None:
    spans = SpanRecorder()
    spans.enter((0, 1), "a", "engine 0", GpuUse.WAKE, 1.0)
    spans.turn((0, 1), GpuUse.SERVE, 4.0)
    spans.leave((0, 1), 6.0)
    assert spans.is_clear((0, 1))
    spans.enter((1,), "b", "actor_train", GpuUse.FIXED, 6.0)
    assert spans.close(9.0) == [
        Span(0, "a", "engine 0", GpuUse.WAKE, 1.0, 4.0),
        Span(0, "a", "engine 0", GpuUse.SERVE, 4.0, 6.0),
        Span(1, "a", "engine 0", GpuUse.WAKE, 1.0, 4.0),
        Span(1, "a", "engine 0", GpuUse.SERVE, 4.0, 6.0),
        Span(1, "b", "actor_train", GpuUse.FIXED, 6.0, 9.0),
    ]


def test_a_second_user_of_a_gpu_is_an_error() -> None:
    spans = SpanRecorder()
    spans.enter((0,), "a", "engine 0", GpuUse.SERVE, 0.0)
    assert not spans.is_clear((0, 1))
    with pytest.raises(AssertionError, match="GPU 0"):
        spans.enter((0,), "b", "engine 0", GpuUse.SERVE, 1.0)


def _chart(*pipelines: str) -> Chart:
    spans = [Span(0, name, "engine 0", GpuUse.SERVE, 0.0, 1.0) for name in pipelines]
    return Chart(title="x", gpus=(0,), spans=spans, end_s=1.0)


def test_a_pipeline_has_the_same_number_in_all_charts_of_a_page() -> None:
    assert pipeline_names([_chart("b", "a"), _chart("c", "b")]) == ["a", "b", "c"]


def test_uses_of_a_pipeline_and_pipelines_are_distinguished() -> None:
    uses = (GpuUse.SERVE, GpuUse.FIXED, GpuUse.WAKE, GpuUse.LOST)
    seen = {colour(number, use) for number, use in itertools.product(range(len(COLOURS)), uses)}
    assert len(seen) == len(COLOURS) * len(uses)
    assert colour(0, GpuUse.SERVE) == colour(len(COLOURS), GpuUse.SERVE)


def _data(html: str) -> dict[str, object]:
    found = re.search(r"^const data = (.*);$", html, re.MULTILINE)
    assert found
    output: dict[str, object] = json.loads(found[1])
    return output


def test_the_page_holds_the_spans_and_loads_nothing_else() -> None:
    spans = [
        Span(4, "b", "engine 1", GpuUse.SERVE, 12.0, 15.5),
        Span(7, "a", "actor_train", GpuUse.FIXED, 11.0, 20.0),
    ]
    html = html_page([Chart(title="x", gpus=(4, 7), spans=spans, start_s=10.0, end_s=20.0)])
    output = _data(html)
    assert output["pipelines"] == ["a", "b"]
    assert output["charts"] == [
        {
            "title": "x",
            "gpus": [4, 7],
            "length_s": 10.0,
            "labels": ["actor_train", "engine 1"],
            "spans": [[0, 1, 1, 1, 2.0, 5.5], [1, 0, 0, 3, 1.0, 10.0]],
        }
    ]
    assert not re.search(r"\b(src|href)\s*=|https?://|@import|fetch\(", html)


def test_no_name_ends_the_script_of_the_page() -> None:
    spans = [Span(0, "</script><b>", "engine 0", GpuUse.SERVE, 0.0, 1.0)]
    html = html_page([Chart(title="<!--", gpus=(0,), spans=spans, end_s=1.0)])
    assert html.count("</script>") == 1
    assert _data(html)["pipelines"] == ["</script><b>"]


def test_a_gpu_is_a_thread_and_a_span_an_event_in_microseconds() -> None:
    spans = [Span(2, "a", "engine 1", GpuUse.WAKE, 11.5, 13.0)]
    chart = Chart(title="fair", gpus=(2,), spans=spans, start_s=10.0, end_s=20.0)
    output = json.loads(perfetto_trace([chart, chart]))
    assert len(output["traceEvents"]) == 6
    process, thread, event = output["traceEvents"][:3]
    assert (process["ph"], process["args"]["name"]) == ("M", "fair")
    assert (thread["tid"], thread["args"]["name"]) == (2, "GPU 2")
    assert (event["ph"], event["ts"], event["dur"]) == ("X", 1_500_000, 1_500_000)
    assert (event["name"], event["cat"]) == ("a engine 1", "wake")
    assert {each["pid"] for each in output["traceEvents"]} == {1, 2}


ROWS = [
    OccupancyRow(10.0, 0, "a", "actor_infer", 1, "waking"),
    OccupancyRow(10.0, 1, "b", "actor_train", -1, "held"),
    OccupancyRow(12.0, 0, "a", "actor_infer", 1, "awake"),
    OccupancyRow(15.0, 1, "", "", -1, "free"),
    OccupancyRow(18.0, 0, "a", "actor_infer", 1, "lost"),
    OccupancyRow(20.0, 1, "b", "actor_infer", 0, "sleeping"),
]


def test_a_row_is_valid_until_the_next_of_its_gpu() -> None:
    assert occupancy_spans(ROWS) == [
        Span(0, "a", "engine 1", GpuUse.WAKE, 10.0, 12.0),
        Span(0, "a", "engine 1", GpuUse.SERVE, 12.0, 18.0),
        Span(0, "a", "engine 1", GpuUse.LOST, 18.0, 20.0),
        Span(1, "b", "actor_train", GpuUse.FIXED, 10.0, 15.0),
    ]


def _journal(folder: Path, rows: list[OccupancyRow]) -> Path:
    """Write it as the service does."""
    journal = SqliteJournal(folder)
    journal.keep([HistoryRow(*row) for row in rows])
    journal.close()
    return folder / FILE_NAME


def test_the_journal_of_a_running_scheduler_is_readable(tmp_path: Path) -> None:
    journal = SqliteJournal(tmp_path)
    journal.keep([HistoryRow(*row) for row in ROWS])
    assert journal_chart(tmp_path).spans == occupancy_spans(ROWS)
    journal.keep([HistoryRow(*ROWS[-1]._replace(at_s=30.0))])
    assert journal_chart(tmp_path).end_s == 30.0
    journal.close()


def test_a_journal_is_given_by_its_file_or_its_folder(tmp_path: Path) -> None:
    path = _journal(tmp_path, ROWS)
    drawn = journal_chart(path)
    assert (drawn.start_s, drawn.end_s, drawn.gpus) == (10.0, 20.0, (0, 1))
    assert drawn.spans == occupancy_spans(ROWS) == journal_chart(tmp_path).spans


def test_a_file_that_is_no_journal_is_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="does not exist"):
        journal_chart(tmp_path / "none")
    (tmp_path / "text").write_text("no database at all, but a text that is long enough" * 9)
    with pytest.raises(UserError, match="is not a scheduler's journal"):
        journal_chart(tmp_path / "text")
    with pytest.raises(UserError, match="has no history"):
        journal_chart(_journal(tmp_path / "empty", []))


SPANS = [Span(0, "a", "engine 0", GpuUse.SERVE, 0.0, 5.0), Span(1, "b", "t", GpuUse.FIXED, 1, 2)]
CHART = Chart(title="two", gpus=(0, 1), spans=SPANS, end_s=6.0)


def test_matplotlib_draws_a_png() -> None:
    pytest.importorskip("matplotlib")
    picture = png_picture([CHART, CHART])
    assert picture is not None
    assert picture.startswith(b"\x89PNG\r\n")


def test_without_matplotlib_the_remedy_is_named_and_the_other_files_are_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    shape = WorkloadShape(block_gpus=2, node_gpus=2, rollouts_per_step=(8,), num_steps=(1, 1))
    shape = msgspec.structs.replace(shape, train_gpus=(1,), tp=(1,))
    trace = tmp_path / "trace.json"
    trace.write_bytes(msgspec.json.encode(generate_trace(shape, 1, 0)))
    assert simulate([str(trace), "--policy", "fair", "--out", str(tmp_path / "out")]) == 0
    assert "pip install '.[train]'" in capsys.readouterr().out
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "gantt.html",
        "perfetto.json",
        "trace.json",
    ]
